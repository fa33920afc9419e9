"""Faults at random moments on every role while two ranks train: nothing is lost, nothing comes twice beyond the table.

One run: a job of two ranks as processes that save their states every few steps, on a cluster of two dispatchers, three
etcd members and two workers. Two to four faults come at random moments; what was killed is started again. After a kill
of a rank both are started anew from the last states that both saved, as a trainer would. Then what the ranks wrote down
is held against the manifest and against the audit.

The seed is printed; ``make chaos SEED=N`` plays the same faults again.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trainer
from cluster import TestCluster
from trainer import Trainer
from training import check_audit, make_dataset

#: rows per shard: uneven, one empty
SHARDS = (31, 7, 60, 1, 18, 0, 44, 25, 90, 12, 5, 37, 66, 20, 84)
ROWS = sum(SHARDS)
EPOCHS = 3
WORLD = 2
ORDERS = ("deterministic", "dynamic")
#: batches between two saved states
EVERY = 20
#: seconds a run may take
LIMIT = 120.0

FAULTS = (
    "worker killed", "worker paused", "worker added and drained", "leader killed", "leader paused", "leader asked to end",
    "standby killed", "etcd member killed", "etcd member paused", "ranks killed", "rank paused",
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_dataset(tmp_path_factory.mktemp("chaos"), SHARDS, size=2000)


@pytest.fixture
def cluster(data: Any) -> Iterator[TestCluster]:
    with TestCluster(workers=2, dispatchers=2, etcd_members=3) as found:
        found.register(data)
        yield found


class ChaosRun:
    """One job through its faults."""

    def __init__(self, cluster: TestCluster, folder: Path, job: str, draw: random.Random) -> None:
        self.cluster, self.folder, self.job, self.draw = cluster, folder, job, draw
        folder.mkdir()
        self.leg = 0
        #: (epoch, step) at which each start of the ranks began
        self.starts: list[tuple[int, int]] = []
        self.ranks: list[Trainer] = []
        self.story: list[str] = []
        self.settings = {
            "address": cluster.address,
            "world_size": WORLD,
            "job": job,
            "epochs": EPOCHS,
            "order": ORDERS[draw.randrange(len(ORDERS))],
            "tail": draw.choice(["pad", "drop"]),
            "prefetch": "32KiB",
            "shuffle": draw.choice([None, {"buffer": 64}, {"buffer": 200, "interleave": 2}]),
            "delay": 0.025,
            "every": EVERY,
            "timeout": 40.0,
        }
        self.begun = time.monotonic()

    def start(self) -> None:
        place = trainer.saved(self.folder, WORLD)
        state = trainer.states(self.folder, WORLD, place) if place is not None else None
        self.story.append(f"ranks start from {place}")
        self.ranks = [Trainer(self.folder, r, self.leg, state=state, **self.settings) for r in range(WORLD)]
        self.starts.append(place or (0, 0))
        self.leg += 1

    def running(self) -> bool:
        return any(rank.process.poll() is None for rank in self.ranks)

    def play(self, faults: list[str]) -> None:
        self.start()
        for fault in faults:
            time.sleep(self.draw.uniform(0.2, 1.5))
            if not self.running():
                break
            self.story.append(fault)
            getattr(self, fault.replace(" ", "_"))()
        while self.running():
            assert time.monotonic() - self.begun < LIMIT, f"not through after {LIMIT:g} s: {self.story}"
            time.sleep(0.05)
        for rank in self.ranks:
            status = rank.wait(5.0)
            assert status == 0, (self.story, rank.log)

    def end(self) -> None:
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.signal(signal.SIGCONT)
            rank.kill()

    # -- faults; each leaves a cluster that is whole again

    def worker_killed(self) -> None:
        victim = self.draw.choice([w for w in self.cluster.workers if w.child.poll() is None])
        self.cluster.kill(victim.child.name)
        self.cluster.add_worker()

    def worker_paused(self) -> None:
        victim = self.draw.choice([w for w in self.cluster.workers if w.child.poll() is None]).child.name
        self.cluster.pause(victim)
        time.sleep(self.draw.choice([0.3, 2.5, 6.0]))
        self.cluster.resume(victim)

    def worker_added_and_drained(self) -> None:
        self.cluster.add_worker()
        victim = self.draw.choice([w for w in self.cluster.workers if w.child.poll() is None])
        assert self.cluster.terminate(victim.child.name) == 0

    def leader_killed(self) -> None:
        name = self.cluster.wait_leader()
        self.cluster.kill(name)
        time.sleep(self.draw.choice([0.0, 1.0]))
        self.cluster.restart(name)

    def leader_paused(self) -> None:
        name = self.cluster.wait_leader()
        self.cluster.pause(name)
        time.sleep(self.draw.choice([0.5, 3.5]))
        self.cluster.resume(name)

    def leader_asked_to_end(self) -> None:
        name = self.cluster.wait_leader()
        self.cluster.terminate(name)
        self.cluster.restart(name)

    def standby_killed(self) -> None:
        name = next(n for n in ("dispatcher-0", "dispatcher-1") if n != self.cluster.wait_leader())
        self.cluster.kill(name)
        self.cluster.restart(name)

    def etcd_member_killed(self) -> None:
        name = self.draw.choice(["etcd-0", "etcd-1", "etcd-2"])
        self.cluster.kill(name)
        time.sleep(self.draw.choice([0.0, 2.0]))
        self.cluster.restart(name)

    def etcd_member_paused(self) -> None:
        name = self.draw.choice(["etcd-0", "etcd-1", "etcd-2"])
        self.cluster.pause(name)
        time.sleep(self.draw.choice([0.5, 4.0]))
        self.cluster.resume(name)

    def ranks_killed(self) -> None:
        for rank in self.draw.sample(self.ranks, WORLD):
            rank.kill()
        self.start()

    def rank_paused(self) -> None:
        victim = self.draw.choice(self.ranks)
        if victim.process.poll() is None:
            victim.signal(signal.SIGSTOP)
            time.sleep(self.draw.choice([0.5, 3.0]))
            victim.signal(signal.SIGCONT)

    # -- what came of it

    def counted(self, epoch: int) -> list[int]:
        """Ids of the epoch without pads and without those past a start point that a later leg began at."""
        ids: list[int] = []
        for rank in range(WORLD):
            for line in trainer.batches(self.folder, rank):
                void = any((line["epoch"], line["step"]) >= place for place in self.starts[line["leg"] + 1 :])
                if line["epoch"] == epoch and not void:
                    pads = line["pads"] or [False] * len(line["ids"])
                    ids += [i for i, pad in zip(line["ids"], pads, strict=True) if not pad]
        return ids

    def check(self) -> None:
        steps: dict[int, dict[int, set[int]]] = {rank: {} for rank in range(WORLD)}
        for rank in range(WORLD):
            for line in trainer.batches(self.folder, rank):
                steps[rank].setdefault(line["epoch"], set()).add(line["step"])
        assert steps[0] == steps[1], self.story
        for epoch in range(EPOCHS):
            ids = self.counted(epoch)
            assert len(ids) == len(set(ids)), f"epoch {epoch}: rows came twice: {self.story}"
            missing = sorted(set(range(ROWS)) - set(ids))
            dropped = len(missing)
            if self.settings["tail"] == "drop":
                assert dropped < WORLD * 4, f"epoch {epoch}: {missing}: {self.story}"
            else:
                assert not missing, f"epoch {epoch}: lost {missing}: {self.story}"
            document = check_audit(self.cluster, self.job, epoch)
            assert document["dropped"] == dropped, (document, self.story)


def play(cluster: TestCluster, folder: Path, seed: int, runs: int, most: int) -> None:
    for number in range(runs):
        draw = random.Random(f"{seed}/{number}")
        run = ChaosRun(cluster, folder / str(number), f"chaos-{seed}-{number}", draw)
        try:
            run.play([draw.choice(FAULTS) for _ in range(draw.randint(2, most))])
            run.check()
        except BaseException:
            print(f"seed {seed}, run {number}: {run.settings}, {run.story}")
            raise
        finally:
            run.end()
        cluster.wait_for("two workers", lambda: _whole(cluster), 20.0)


def _whole(cluster: TestCluster) -> bool:
    return sum(w["state"] == "up" for w in cluster.status()["workers"]) >= 2


def test_every_fault_once(cluster: TestCluster, tmp_path: Path, seed: int) -> None:
    """Each role is hit: killed, paused past its lease, restarted, in a few runs of several faults each."""
    order = random.Random(seed).sample(FAULTS, len(FAULTS))
    for number in range(0, len(order), 4):
        run = ChaosRun(cluster, tmp_path / str(number), f"once-{number}", random.Random(f"{seed}/once/{number}"))
        try:
            run.play(order[number : number + 4])
            run.check()
        finally:
            run.end()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_runs_of_random_faults(cluster: TestCluster, tmp_path: Path, seed: int) -> None:
    play(cluster, tmp_path, seed, runs=50, most=4)
