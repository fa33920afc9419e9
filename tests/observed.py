"""Sees which transitions a core makes, in the words of ``dispatcher/transitions.py``."""

from __future__ import annotations

from dispatcher.state import State

#: (machine, name) -> state; a name that is not there is in the machine's first state
States = dict[tuple[str, str], str]


def states(state: State, at: float, lease: float) -> States:
    """The state of every worker, rank, job, generation, and epoch of a rank."""
    found: States = {("worker", name): worker.state for name, worker in state.workers.by_id.items()}
    for name, job in state.jobs.by_name.items():
        found["job", name] = job.state(at, lease)
        for number in job.generations:
            found["generation", f"{name}/{number}"] = "current" if number == job.record.generation else "past"
        for rank, member in job.members.items():
            where = "live" if job.is_live(rank, at, lease) else "silent"
            found["rank", f"{name}/{rank}"] = "closed" if member.left else where
        for epoch, ranks in job.ranks.items():
            for rank, record in ranks.items():
                found["epoch", f"{name}/{job.record.generation}/{epoch}/{rank}"] = record.progress.state
        for number, epoch in job.folded:
            world = job.generations[number].settings.world_size if number in job.generations else 0
            for rank in range(world):
                found["epoch", f"{name}/{number}/{epoch}/{rank}"] = "folded"
        for epoch, pool in getattr(job, "pools", {}).items():
            left = "open" if pool.free_rows else "dry"
            found["pool", f"{name}/{job.record.generation}/{epoch}"] = left
    return found


FIRST = {
    "worker": "unknown",
    "rank": "absent",
    "job": "none",
    "generation": "none",
    "epoch": "not begun",
    "pool": "none",
}


def changes(before: States, after: States, event: str) -> set[tuple[str, str, str, str]]:
    """(machine, from, event, to) of all that changed."""
    found = set()
    for machine, name in before.keys() | after.keys():
        old, new = (seen.get((machine, name), FIRST[machine]) for seen in (before, after))
        if old != new:
            found.add((machine, old, event, new))
    return found
