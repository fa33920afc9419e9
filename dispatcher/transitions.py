"""The state machines of the control plane, as tables: docs/states.md is drawn from them, and tests hold what a core does
against them (``tests/observed.py``).

``event`` is the name of an event of ``events.py``, or what happens outside of the core: "lease over" (time passed since it
was last heard), "take-over" (another dispatcher loads the records).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transition:
    """``source`` becomes ``target`` at ``event``, if ``when`` holds."""

    source: str
    event: str
    target: str
    when: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """One kind of thing. ``first``: the state of what is not there. ``where``: who holds the state, and whether it lasts."""

    name: str
    about: str
    where: str
    first: str
    transitions: tuple[Transition, ...]

    @property
    def states(self) -> tuple[str, ...]:
        """All states, in the order of the table."""
        return tuple(dict.fromkeys([self.first, *(s for t in self.transitions for s in (t.source, t.target))]))


T = Transition

WORKER = Machine(
    "worker",
    "A data worker as the dispatcher sees it. One that a client could not reach is *suspect* besides, and gets no new "
    "shards until its next heartbeat.",
    "`dispatcher/workers.py`, memory only",
    "unknown",
    (
        T("unknown", "WorkerRegistered", "up"),
        T("unknown", "WorkerRegistered", "draining", "it says so, or it was told to drain"),
        T("up", "WorkerRegistered", "draining", "as above"),
        T("up", "WorkerHeartbeatReceived", "draining", "it says so (it got a signal)"),
        T("up", "DrainRequested", "draining"),
        T("draining", "WorkerRegistered", "up", "a new process of that id that was not told to drain"),
        T("draining", "WorkerHeartbeatReceived", "up", "it does not say so any more, and was not told to drain"),
        T("up", "TimePassed", "lost", "not heard for a lease"),
        T("draining", "TimePassed", "lost", "not heard for a lease"),
        T("lost", "WorkerHeartbeatReceived", "up"),
        T("lost", "WorkerHeartbeatReceived", "draining", "it says so, or was told to drain"),
        T("lost", "WorkerRegistered", "up"),
        T("lost", "WorkerRegistered", "draining", "it says so, or was told to drain"),
        T("up", "WorkerLeft", "unknown"),
        T("draining", "WorkerLeft", "unknown"),
        T("lost", "WorkerLeft", "unknown"),
        T("lost", "TimePassed", "unknown", "lost for 10 minutes"),
        T("up", "take-over", "unknown", "it registers at its next heartbeat; grants name it all the while"),
        T("draining", "take-over", "unknown"),
        T("lost", "take-over", "unknown"),
    ),
)

RANK = Machine(
    "rank",
    "A rank of the current generation. *silent*: its lease is over, another process may take its place.",
    "`jobs/<job>/generations/<g>/members/<r>`; live and silent are memory only",
    "absent",
    (
        T("absent", "JobOpenRequested", "live", "it opens the generation, or joins it"),
        T("live", "lease over", "silent"),
        T("silent", "GrantsRequested", "live", "the same holder is heard again"),
        T("silent", "ProgressReported", "live", "the same holder is heard again"),
        T("silent", "JobOpenRequested", "live", "the same holder, or another that takes its place"),
        T("silent", "take-over", "live", "one lease of grace"),
        T("live", "ProgressReported", "closed", "leaving"),
        T("silent", "ProgressReported", "closed", "leaving"),
        T("closed", "JobOpenRequested", "live", "another process takes its place, or opens the next generation"),
        T("live", "JobOpenRequested", "absent", "another rank opened the next generation"),
        T("silent", "JobOpenRequested", "absent", "another rank opened the next generation"),
        T("closed", "JobOpenRequested", "absent", "another rank opened the next generation"),
        T("silent", "TimePassed", "absent", "the job was not used for 7 days and is removed"),
        T("closed", "TimePassed", "absent", "the job was not used for 7 days and is removed"),
    ),
)

JOB = Machine(
    "job",
    "As `feedline status` has it. No grant is given while a job is *joining*.",
    "worked out from members, leases and books (`dispatcher/job.py`)",
    "none",
    (
        T("none", "JobOpenRequested", "joining", "more than one rank"),
        T("none", "JobOpenRequested", "running", "one rank"),
        T("joining", "JobOpenRequested", "running", "the last rank joined"),
        T("running", "JobOpenRequested", "joining", "a new generation"),
        T("stopped", "JobOpenRequested", "joining", "a rank joined, or a new generation of more than one"),
        T("stopped", "JobOpenRequested", "running"),
        T("complete", "JobOpenRequested", "joining", "another pass, or a new generation"),
        T("complete", "JobOpenRequested", "running"),
        T("joining", "lease over", "stopped", "no rank is live"),
        T("running", "lease over", "stopped", "no rank is live"),
        T("joining", "ProgressReported", "stopped", "the last live rank closed"),
        T("running", "ProgressReported", "stopped", "the last live rank closed"),
        T("stopped", "GrantsRequested", "running", "a silent rank is heard"),
        T("stopped", "GrantsRequested", "joining", "a silent rank is heard, others never joined"),
        T("stopped", "ProgressReported", "running", "a silent rank is heard"),
        T("stopped", "ProgressReported", "joining", "a silent rank is heard, others never joined"),
        T("stopped", "take-over", "running", "one lease of grace"),
        T("stopped", "take-over", "joining", "one lease of grace"),
        T("running", "ProgressReported", "complete", "all ranks took the last epoch of the pass to its end"),
        T("stopped", "ProgressReported", "complete", "as above"),
        T("complete", "ProgressReported", "running", "a rank is in the next pass"),
        T("stopped", "TimePassed", "none", "not used for 7 days"),
        T("complete", "TimePassed", "none", "not used for 7 days"),
    ),
)

GENERATION = Machine(
    "generation",
    "Opened by the first rank that starts from a start point. Holders of a past one get `Fenced`.",
    "`jobs/<job>/generations/<g>`",
    "none",
    (
        T("none", "JobOpenRequested", "current"),
        T("current", "JobOpenRequested", "past", "a rank opened the next one"),
        T("past", "JobOpenRequested", "none", "more than 1,000 newer ones"),
        T("current", "TimePassed", "none", "the job was not used for 7 days"),
        T("past", "TimePassed", "none", "the job was not used for 7 days"),
    ),
)

EPOCH = Machine(
    "epoch",
    "The books of one rank in one epoch of a generation. *folded*: added up with those of the other ranks.",
    "`jobs/<job>/generations/<g>/epochs/<e>/ranks/<r>`, folded: `.../epochs/<e>`",
    "not begun",
    (
        T("not begun", "ProgressReported", "open"),
        T("not begun", "ProgressReported", "finished", "no earlier report arrived"),
        T("not begun", "ProgressReported", "abandoned", "no earlier report arrived"),
        T("open", "ProgressReported", "finished", "all its rows were handed out and acknowledged"),
        T("open", "ProgressReported", "abandoned", "the loop was left early"),
        T("finished", "ProgressReported", "folded", "all ranks are through, and two newer epochs have begun"),
        T("abandoned", "ProgressReported", "folded", "as above"),
        T("not begun", "ProgressReported", "folded", "as above, in one report"),
        T("open", "ProgressReported", "folded", "as above, in one report"),
        T("not begun", "JobOpenRequested", "folded", "the generation ended; a rank without books stands at its start"),
        T("open", "JobOpenRequested", "folded", "the generation ended"),
        T("finished", "JobOpenRequested", "folded", "the generation ended"),
        T("abandoned", "JobOpenRequested", "folded", "the generation ended"),
        T("folded", "ProgressReported", "not begun", "more than 1,000 newer ones: only the newest are kept"),
        T("folded", "JobOpenRequested", "not begun", "as above, or its generation is forgotten"),
        T("folded", "TimePassed", "not begun", "the job was not used for 7 days"),
    ),
)

POOL = Machine(
    "pool",
    "Dynamic order: the rows of an epoch that no rank was granted. *dry*: there are none now.",
    "`jobs/<job>/generations/<g>/epochs/<e>/pool`",
    "none",
    (
        T("none", "GrantsRequested", "open", "the first ask of the epoch"),
        T("none", "GrantsRequested", "dry", "the first ask took everything"),
        T("open", "GrantsRequested", "dry", "the last rows were granted"),
        T("dry", "ProgressReported", "open", "a rank left with rows that it had not handed out"),
        T("dry", "TimePassed", "open", "the lease of an elastic rank is over: what it has not acknowledged is back"),
        T("dry", "JobOpenRequested", "open", "a rank of an elastic job was found dead"),
        T("open", "ProgressReported", "none", "the epoch is folded"),
        T("dry", "ProgressReported", "none", "the epoch is folded"),
        T("open", "JobOpenRequested", "none", "the generation ended"),
        T("dry", "JobOpenRequested", "none", "the generation ended"),
    ),
)

LEADER = Machine(
    "leader",
    "A dispatcher process. It answers only while it leads.",
    "`leader` in etcd, attached to a lease; `dispatcher/driver.py`",
    "standby",
    (
        T("standby", "campaign won", "loading", "no leader key, or its holder is dead for certain"),
        T("loading", "records loaded and signing key stored", "leads"),
        T("loading", "store failed", "standby"),
        T("leads", "commit failed or unknown", "standby", "the state in memory is dropped"),
        T("leads", "lease could be over", "standby", "by its own monotonic clock"),
        T("leads", "internal error", "standby", "what is in the store is right"),
        T("leads", "stops", "ended", "it resigns: the key is deleted"),
        T("standby", "stops", "ended"),
    ),
)

GRANT = Machine(
    "grant",
    "The right of a rank to read a shard, and the worker that was assigned.",
    "`.../assignments/<r>` while open; the grant itself is signed and kept by the client",
    "none",
    (
        T("none", "GrantsRequested", "open", "all ranks joined, and a worker is up that may serve"),
        T("open", "GrantsRequested", "open", "asked for again: renewed, on the same worker while that is usable"),
        T("open", "GrantsRequested", "closed", "named as done, or more than 512 newer ones of the rank"),
        T("open", "ProgressReported", "closed", "the rank finished or abandoned the epoch, or closed"),
        T("open", "JobOpenRequested", "closed", "the generation ended"),
        T("open", "120 s in dispatcher time", "expired", "no new read begins with it; one that runs goes on"),
        T("expired", "GrantsRequested", "open", "asked for again"),
    ),
)

READ = Machine(
    "read",
    "Ordered rows of granted shards on one worker: one `DoGet`, idempotent.",
    "client and worker, memory only",
    "planned",
    (
        T("planned", "all its shards are granted", "under way"),
        T("under way", "last row came", "done"),
        T("under way", "connection broke, worker silent or refused", "planned", "on the next worker of the grant"),
        T("under way", "shard missing or changed", "failed", "the loop gets the error, or the shard is quarantined"),
        T("under way", "row is bad", "under way", "`on_error=skip`: named and left out"),
        T("under way", "loop left or closed", "cancelled"),
        T("planned", "loop left or closed", "cancelled"),
        T("planned", "timeout", "failed", "the wait is named"),
    ),
)

MACHINES = (WORKER, RANK, JOB, GENERATION, EPOCH, POOL, LEADER, GRANT, READ)
