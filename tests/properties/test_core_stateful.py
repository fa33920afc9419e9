"""The core under faults: messages lost, late and twice, dispatchers that die before and after a commit, processes that
die and come back, and the table of guarantees held against a model after every step.

The model knows only sets. A row of an epoch is a pair (lane, index in it); a generation has the rows before its start
point, the generation that was taken from, and what each rank told. From these follow, by the rules of docs/guarantees.md
and nothing else, the rows that stand, those that were rewound, and so every number of the audit.

``HYPOTHESIS_PROFILE=nightly`` runs ten times as many histories; ``--hypothesis-seed=N`` plays one run again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import hypothesis
import numpy as np
import observed
from core_bench import LEASE, Bench, DynamicRank, Rank
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dispatcher import events
from dispatcher.transitions import MACHINES
from manifests.cursor import own_lanes
from manifests.errors import ConfigError, FeedlineError, Fenced, JobBusy, JobMismatch
from manifests.granted import decode_pieces
from manifests.plan import lane_sizes
from manifests.wire import codec
from manifests.wire import messages as m

KEYS = {"k1": b"s" * 32}
ROWS, LANES, BATCH = 24, 12, 2
SIZES = lane_sizes(ROWS, LANES)
WHOLE = frozenset((lane, index) for lane in range(LANES) for index in range(int(SIZES[lane])))
JOB = "train"
#: what happens to a message and its answer
FAULTS = st.sampled_from(["", "", "", "", "", "twice", "lost", "held", "before", "after"])

Row = tuple[int, int]
Rows = frozenset[Row]


class LostError(Exception):
    """No answer came; whether the message arrived, nobody knows."""


def rows_before(counts: Any, lanes: Any) -> Rows:
    return frozenset((int(lane), index) for lane, count in zip(lanes, counts) for index in range(int(count)))


# -- the model -----------------------------------------------------------------------------------------------------


@dataclass
class Told:
    """The newest report of a rank in an epoch that the dispatcher took."""

    handed: Rows
    acked: Rows
    skipped: int
    state: str


@dataclass
class Generation:
    number: int
    epoch: int
    before: Rows
    parent: int | None
    world: int
    latest: bool = False
    joined: set[int] = field(default_factory=set)
    told: dict[tuple[int, int], Told] = field(default_factory=dict)

    def starts_inside(self, epoch: int) -> bool:
        return self.epoch == epoch and bool(self.before)

    def handed(self, epoch: int) -> Rows:
        found = [told.handed for (e, _), told in self.told.items() if e == epoch]
        return frozenset().union(*found) - (self.before if epoch == self.epoch else frozenset())


class Model:
    """What the dispatcher was told and took, by generation."""

    def __init__(self) -> None:
        self.generations: dict[int, Generation] = {}
        self.current = 0

    @property
    def now(self) -> Generation:
        return self.generations[self.current]

    def chain(self) -> list[Generation]:
        """The current generation, the one its start point was taken in, and so on."""
        found: list[Generation] = []
        number: int | None = self.current
        while number:
            found.append(self.generations[number])
            number = found[-1].parent
        return found

    def opened(self, ask: m.OpenJob, answer: m.JobOpened) -> None:
        if answer.generation != self.current:
            assert answer.generation == self.current + 1, "generations go up by one"
            start = answer.start
            before = rows_before(start.taken, range(LANES)) if start.taken else frozenset()
            self.current = answer.generation
            self.generations[self.current] = Generation(
                self.current, start.epoch, before, start.generation or None, answer.settings.world_size
            )
        self.now.joined.add(ask.rank)
        assert set(answer.absent) == set(range(self.now.world)) - self.now.joined

    def reported(self, report: m.Report) -> None:
        assert report.generation == self.current, "a report of another generation was taken"
        lanes = own_lanes(report.rank, self.now.world, LANES)
        for book in report.epochs:
            place = (book.epoch, report.rank)
            new = Told(rows_before(book.handed, lanes), rows_before(book.acked, lanes), len(book.skipped), book.state)
            old = self.now.told.get(place)
            late = old is not None and not (new.handed >= old.handed and new.acked >= old.acked)
            if not late and (old is None or old.state == "open" or new.state != "open"):
                self.now.told[place] = new

    def entered(self) -> set[int]:
        """Epochs that the line of the current generation was in, or vouches for."""
        found = {self.now.epoch}
        for generation in self.chain():
            found |= {epoch for epoch, _ in generation.told}
            found |= {generation.epoch} if generation.before else set()
        return found

    def audit(self, epoch: int) -> dict[str, int] | None:
        """Rows that are acknowledged (skipped ones too), rewound, abandoned and open; None for an epoch that only the
        present start point vouches for, or that older lines left behind."""
        chain = self.chain()
        last = next((g for g in chain if g.epoch <= epoch), None)
        if last is not self.now or not (last.epoch == epoch or any(e == epoch for e, _ in last.told)):
            return None
        legs = [last]
        while legs[-1].starts_inside(epoch) and legs[-1].parent:
            legs.append(self.generations[legs[-1].parent])
        root = chain[-1].number
        rewound = 0
        for generation in self.generations.values():
            told = generation.handed(epoch)
            if generation.number < root or generation is last:
                continue
            if generation in legs:
                told -= legs[legs.index(generation) - 1].before
            rewound += len(told)
        acked, abandoned, unfinished = frozenset[Row](), frozenset[Row](), frozenset[Row]()
        for rank in range(last.world):
            mine = frozenset(row for row in WHOLE if row[0] % last.world == rank)
            start = mine & last.before if epoch == last.epoch else frozenset()
            told_of = last.told.get((epoch, rank), Told(start, start, 0, "open"))
            acked |= told_of.acked | start
            if told_of.state == "abandoned":
                abandoned |= mine - told_of.acked
            elif told_of.state == "open":
                unfinished |= mine - told_of.acked
        for leg, after in zip(legs[1:], legs):
            for (e, rank), told_of in leg.told.items():
                # a rank that was through counts as past all its rows, also those that it never handed out
                gone = frozenset(row for row in after.before if row[0] % leg.world == rank) - told_of.handed
                if e == epoch and told_of.state != "open":
                    acked -= gone
                    abandoned |= gone if told_of.state == "abandoned" else frozenset()
        return {
            "settled": len(acked), "rewound": rewound, "abandoned": len(abandoned), "open": len(unfinished),
            "rest": len(WHOLE - acked - abandoned - unfinished),
        }  # fmt: skip


# -- the wire ------------------------------------------------------------------------------------------------------


class Wire(Bench):
    """A core behind a network and a store: a message may be lost, late or come twice, and the dispatcher may die."""

    #: (machine, from, event, to) of everything that a core did in this test run
    transitions: ClassVar[set[tuple[str, str, str, str]]] = set()

    def __init__(self) -> None:
        self.model = Model()
        self.fault = ""
        #: every message ever sent, as (kind of event, fields)
        self.sent: list[tuple[type[events.Event], dict[str, Any]]] = []
        super().__init__()

    def deliver(self, kind: type[events.Event], fields: dict[str, Any]) -> Any:
        before = observed.states(self.state, self.at, LEASE)
        try:
            return Bench.apply(self, kind, **fields)
        finally:
            after = observed.states(self.state, self.at, LEASE)
            self.transitions |= observed.changes(before, after, kind.__name__)

    def wait(self, seconds: float) -> None:
        before = observed.states(self.state, self.at, LEASE)
        self.at += seconds
        after = observed.states(self.state, self.at, LEASE)
        self.transitions |= observed.changes(before, after, "lease over")
        self.apply(events.TimePassed)

    def send(self, kind: type[events.Event], fields: dict[str, Any]) -> Any:
        """One delivery, taken into the model if the core takes it."""
        answer = self.deliver(kind, fields)
        message = fields.get("message")
        if isinstance(message, m.OpenJob):
            self.model.opened(message, answer)
        elif isinstance(message, m.Report):
            self.model.reported(message)
        return answer

    def apply(self, kind: type[events.Event], **fields: Any) -> Any:
        fault, self.fault = self.fault, ""
        if kind not in (events.JobOpenRequested, events.GrantsRequested, events.ProgressReported):
            return self.deliver(kind, fields)
        self.sent.append((kind, fields))
        if fault == "held":
            raise LostError
        if fault == "before":
            # decided, not committed: nobody but the dispatcher that died ever knew
            number, before = next(self._numbers), observed.states(self.state, self.at, LEASE)
            self.state.apply(kind(at=self.at, now_ms=self.now_ms, request=number, **fields))
            self.take_over(before)
            raise LostError
        answer = self.send(kind, fields)
        if fault == "after":
            self.take_over()
        if fault in ("after", "lost"):
            raise LostError
        if fault == "twice":
            before = dict(self.stored)
            again = self.send(kind, fields)
            assert self.stored == before, "the same message again changed the records"
            assert meaning(again) == meaning(answer)
        return answer

    def take_over(self, before: observed.States | None = None) -> None:
        """The dispatcher dies; another one has what is in the store. ``before``: what was so, if it decided since."""
        before = observed.states(self.state, self.at, LEASE) if before is None else before
        self.reload()
        after = observed.states(self.state, self.at, LEASE)
        self.transitions |= observed.changes(before, after, "take-over")


def check_transitions() -> None:
    """Everything that a core did is in the tables that docs/states.md is drawn from."""
    known = {(machine.name, t.source, t.event, t.target) for machine in MACHINES for t in machine.transitions}
    assert not Wire.transitions - known, "not in dispatcher/transitions.py"


def meaning(answer: Any) -> Any:
    """An answer without what may differ between two equal ones."""
    if isinstance(answer, m.Grants):
        return [(g.source, g.shard, g.workers) for g in answer.grants], answer.waiting, answer.lane, answer.final
    if isinstance(answer, m.JobOpened):
        return answer.generation, answer.settings, answer.start, answer.absent
    return answer


@dataclass
class Process:
    """An honest trainer: one rank, one loader object."""

    rank: int
    uid: str
    nonce: str
    start: m.StartPoint
    world: int
    opened: m.JobOpened | None = None
    heard: float = 0.0
    books: dict[int, Rank] = field(default_factory=dict)
    epoch: int = 0
    over: dict[int, str] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)


class Faults(RuleBasedStateMachine):
    """Trainers, workers and time against one core; at most one job, up to three ranks, deterministic order."""

    def __init__(self) -> None:
        super().__init__()
        self.wire = Wire()
        self.wire.worker("w1")
        self.processes: dict[int, Process] = {}
        self.saved: list[m.StartPoint] = []
        self.numbers = 0
        self.workers = {"w1"}

    @initialize(
        tail=st.sampled_from(["pad", "drop", "ragged"]),
        on_error=st.sampled_from(["raise", "skip"]),
        world=st.sampled_from([1, 2, 3]),
    )
    def begin(self, tail: str, on_error: str, world: int) -> None:
        self.settings = {"tail": tail, "on_error": on_error, "epochs": None, "lanes": LANES, "batch_size": BATCH}
        self.launch_all(world, m.StartPoint())

    def launch_all(self, world: int, start: m.StartPoint, dead: tuple[str, ...] = ()) -> None:
        self.processes = {}
        for rank in range(world):
            process = Process(rank, self.fresh("u"), self.fresh("n"), start, world)
            self.processes[rank] = process
            assert self.try_open(process, dead)

    # -- helpers

    @property
    def model(self) -> Model:
        return self.wire.model

    def job(self) -> Any:
        return self.wire.state.jobs.by_name.get(JOB)

    def is_live(self, rank: int) -> bool:
        job = self.job()
        return job is not None and bool(job.is_live(rank, self.wire.at, LEASE))

    def anybody(self, gone: tuple[str, ...] = ()) -> bool:
        """Whether a rank is held by somebody that lives, those that are said to be dead left out."""
        job = self.job()
        return job is not None and any(self.is_live(r) and job.members[r].holder.uid not in gone for r in job.members)

    def fresh(self, what: str) -> str:
        self.numbers += 1
        return f"{what}{self.numbers:06}"

    def hear(self, process: Process, opened: m.JobOpened) -> None:
        """The answer to an open came: the process begins at the start point."""
        if process.opened is None or process.opened.generation != opened.generation:
            process.books, process.over, process.steps = {}, {}, {}
            process.epoch = opened.start.epoch
        process.opened = opened

    def book(self, process: Process) -> Rank:
        assert process.opened is not None
        if process.epoch not in process.books:
            process.books[process.epoch] = Rank(self.wire, process.opened, process.rank, process.epoch)
        return process.books[process.epoch]

    def quota(self, process: Process) -> int:
        """Rows this rank hands out from the start point on, in its present epoch."""
        assert process.opened is not None
        start = process.opened.start
        taken = np.array(start.taken if process.epoch == start.epoch and start.taken else [0] * LANES)
        left = [int((SIZES - taken)[rank :: process.world].sum()) for rank in range(process.world)]
        return min(left) // BATCH * BATCH if self.settings["tail"] == "drop" else left[process.rank]

    def try_open(self, process: Process, dead: tuple[str, ...] = ()) -> bool:
        """Send the open; whether an answer came."""
        start = process.start
        try:
            opened = self.wire.open(
                process.rank, process.uid, job=JOB, nonce=process.nonce, start=start, dead=dead,
                world_size=process.world, **self.settings,
            )  # fmt: skip
        except LostError:
            return False
        self.hear(process, opened)
        return True

    def pick(self, data: Any, ready: bool = False) -> Process | None:
        found = [p for p in self.processes.values() if not ready or p.opened is not None]
        return data.draw(st.sampled_from(sorted(found, key=lambda p: p.rank))) if found else None

    def start_points(self) -> list[m.StartPoint]:
        fresh = [m.StartPoint()] if self.job() is None else []
        return [*fresh, m.StartPoint(kind="latest"), *self.saved[-3:]]

    # -- trainers

    @rule(
        data=st.data(), world=st.sampled_from([1, 2, 2, 3]), rank=st.integers(0, 2), fault=FAULTS, odd=st.integers(0, 9)
    )
    def open(self, data: Any, world: int, rank: int, fault: str, odd: int) -> None:
        """A process starts. Most often it does what a launcher makes it do: the world and start point of the others."""
        job = self.job()
        joining = job is not None and bool(job.absent) and self.anybody() and odd > 1
        if job is not None and not job.absent and self.anybody() and odd > 2:
            return  # all are there and at work
        dead = odd == 1
        start = data.draw(st.sampled_from(self.start_points()))
        if joining:
            world, rank = job.world_size, data.draw(st.sampled_from(job.absent))
            start = m.StartPoint(kind="latest") if job.current.latest else job.current.start
        rank %= world
        uid = self.fresh("u")
        gone = tuple(p.uid for p in self.processes.values()) if dead and not joining else ()
        before, live = self.model.current, self.is_live(rank)
        position = self.position()
        process = Process(rank, uid, self.fresh("n"), start, world)
        self.wire.fault = fault
        try:
            answered = self.try_open(process, gone)
        except JobBusy:
            assert self.anybody(gone)
            return
        except JobMismatch:
            assert self.anybody(gone) and not joining
            return
        assert not (live and self.model.current == before + 1 and not gone), "a live holder was put out"
        if self.model.current == before + 1 and start.kind == "latest" and before:
            assert (self.model.now.epoch, self.model.now.before) == position, "latest is what was acknowledged"
        if answered:
            self.processes[rank] = process
            if self.model.current == before + 1:
                # whoever held the ranks before is gone or will find out
                self.processes = {rank: process}
        else:
            self.processes.setdefault(rank, process)

    @rule(data=st.data(), world=st.sampled_from([1, 2, 3]), seen=st.booleans())
    def restart(self, data: Any, world: int, seen: bool) -> None:
        """All processes die and a launcher starts a new set: once the leases are over, or at once on a host that sees
        that the old ones are dead."""
        start = data.draw(st.sampled_from(self.start_points()))
        if not seen:
            self.wire.wait(1.1 * LEASE)
        before, position = self.model.current, self.position()
        dead = tuple(member.holder.uid for member in self.job().members.values()) if self.job() is not None else ()
        self.launch_all(world, start, dead if seen else ())
        assert self.model.current == before + 1
        if start.kind == "latest":
            assert (self.model.now.epoch, self.model.now.before) == position, "latest is what was acknowledged"

    @rule(steps=st.integers(1, 5), ack=st.booleans())
    @precondition(lambda self: self.processes)
    def everybody_works(self, steps: int, ack: bool) -> None:
        """The loop goes on: all ranks take the same number of steps."""
        for process in list(self.processes.values()):
            if process.opened is not None and len(self.model.now.joined) == self.model.now.world:
                self.hand_out(process, steps, 0, ack)
                self.tell(process)

    def position(self) -> tuple[int, Rows]:
        """What "latest" stands for: the lowest epoch that is not over for all, and the rows acknowledged in it."""
        if not self.model.current or not self.job().has_progress():
            return 0, frozenset()
        now = self.model.now
        epochs = []
        for rank in range(now.world):
            behind = [e for (e, r), told in now.told.items() if r == rank and told.state == "open"]
            over = [e + 1 for (e, r), told in now.told.items() if r == rank and told.state != "open"]
            epochs.append(min(behind) if behind else max(over, default=now.epoch))
        epoch = min(epochs)
        rows: set[Row] = set()
        for rank in range(now.world):
            mine = frozenset(row for row in WHOLE if row[0] % now.world == rank)
            told = now.told.get((epoch, rank))
            if epochs[rank] > epoch:
                rows |= mine
            elif told is not None:
                rows |= told.acked
            elif now.epoch == epoch:
                rows |= mine & now.before
        return epoch, frozenset(rows)

    @rule(data=st.data(), fault=FAULTS)
    @precondition(lambda self: any(p.opened is None for p in self.processes.values()))
    def ask_again_to_open(self, data: Any, fault: str) -> None:
        """The answer was lost: the same open again, with its nonce."""
        process = data.draw(st.sampled_from([p for p in self.processes.values() if p.opened is None]))
        before, joined = self.model.current, self.joined_as(process)
        self.wire.fault = fault
        try:
            if self.try_open(process) and joined:
                assert self.model.current == before, "an open that was repeated opened again"
        except (JobBusy, JobMismatch):
            assert not joined
            del self.processes[process.rank]

    def joined_as(self, process: Process) -> bool:
        member = self.job().members.get(process.rank) if self.job() is not None else None
        return member is not None and (member.holder.uid, member.nonce, member.left) == (
            process.uid,
            process.nonce,
            False,
        )

    @rule(data=st.data(), fault=FAULTS)
    @precondition(lambda self: self.saved and self.processes)
    def rewind(self, data: Any, fault: str) -> None:
        """A loader goes back to a state by itself: a new generation that the others join or are fenced by."""
        process = self.pick(data, ready=True)
        if process is None or not self.joined_as(process):
            return
        before = self.model.current
        process.nonce, process.start = self.fresh("n"), self.saved[-1]
        self.wire.fault = fault
        answered = self.try_open(process)
        assert not answered or self.model.current == before + 1
        if self.model.current == before + 1:
            self.processes = {process.rank: process}
        if not answered:
            process.opened = None

    @rule(data=st.data(), shards=st.sets(st.integers(0, 4), min_size=1), fault=FAULTS)
    @precondition(lambda self: self.processes)
    def ask(self, data: Any, shards: set[int], fault: str) -> None:
        process = self.pick(data, ready=True)
        if process is None or process.opened is None:
            return
        self.wire.fault = fault
        try:
            found = self.wire.ask(process.opened, process.rank, sorted(shards), uid=process.uid, epoch=process.epoch)
        except LostError:
            return
        except Fenced:
            self.fenced(process)
            return
        assert process.opened.generation == self.model.current
        assert not found.grants or self.model.now.joined == set(range(self.model.now.world)), (
            "granted before all joined"
        )
        assert bool(found.waiting) == (len(found.grants) < len(shards))
        for info in found.grants:
            grant = codec.open_signed(info.signed, KEYS)
            assert (grant.job, grant.generation, grant.rank, grant.epoch, grant.shard in shards) == (
                JOB, self.model.current, process.rank, process.epoch, True,
            )  # fmt: skip
            assert {ref.id for ref in info.workers} <= self.workers

    def fenced(self, process: Process) -> None:
        """``Fenced`` is final, and only ever for one whose rank or generation somebody else has now."""
        opened = process.opened
        assert opened is not None
        member = self.job().members.get(process.rank)
        assert opened.generation < self.model.current or member is None or member.holder.uid != process.uid
        if self.processes.get(process.rank) is process:
            del self.processes[process.rank]

    @rule(data=st.data(), steps=st.integers(1, 4), bad=st.integers(0, 1), ack=st.integers(0, 2), fault=FAULTS)
    @precondition(lambda self: self.processes)
    def work(self, data: Any, steps: int, bad: int, ack: int, fault: str) -> None:
        """Hand out some batches, acknowledge all or none, report; into the next epoch when this one is over."""
        process = self.pick(data, ready=True)
        if process is None or len(self.model.now.joined) < self.model.now.world:
            return
        self.hand_out(process, steps, bad, bool(ack))
        self.tell(process, fault)

    def hand_out(self, process: Process, steps: int, bad: int, ack: bool) -> None:
        if process.epoch in process.over:
            return
        book, quota = self.book(process), self.quota(process)
        bad = bad if self.settings["on_error"] == "skip" and self.settings["tail"] != "drop" else 0
        for _ in range(steps):
            left = quota - len(book.ids) - len(book.skipped)
            if not left:
                break
            rows = min(BATCH, left)
            skip = bad if rows > bad else 0
            book.hand(rows - skip, skip)
        if ack:
            book.ack()

    def tell(self, process: Process, fault: str = "", state: str = "", **fields: Any) -> None:
        book, quota = self.book(process), self.quota(process)
        done = len(book.ids) + len(book.skipped) == quota and (book.acked == book.handed).all()
        state = state or ("finished" if done else "open")
        self.wire.fault = fault
        if state != "open":
            # whether or not this report arrives, the rank goes on, and the next report tells of both epochs
            process.over[process.epoch] = state
        told = [process.books[e].progress(process.over.get(e, "open")) for e in sorted(process.books)]
        try:
            self.wire.report(process.opened, process.rank, *told, uid=process.uid, **fields)
        except LostError:
            pass
        except Fenced:
            self.fenced(process)
            return
        if state != "open" and process.epoch <= self.wire_epoch() + 1:
            process.epoch += 1

    def wire_epoch(self) -> int:
        """The lowest epoch that some process is in."""
        return min((p.epoch for p in self.processes.values() if p.opened is not None), default=0)

    @rule(data=st.data(), fault=FAULTS)
    @precondition(lambda self: self.processes)
    def leave_the_epoch(self, data: Any, fault: str) -> None:
        process = self.pick(data, ready=True)
        if process is not None and process.epoch not in process.over:
            self.tell(process, fault, "abandoned")

    @rule(data=st.data(), fault=FAULTS)
    @precondition(lambda self: self.processes)
    def close(self, data: Any, fault: str) -> None:
        process = self.pick(data, ready=True)
        if process is not None:
            self.tell(process, fault, "", leaving=True)
            self.processes = {rank: p for rank, p in self.processes.items() if p is not process}

    @rule(data=st.data())
    @precondition(lambda self: self.processes)
    def die(self, data: Any) -> None:
        """Nothing is ever heard of it again, but what it sent may still arrive."""
        process = self.pick(data)
        if process is not None:
            del self.processes[process.rank]

    @rule()
    @precondition(lambda self: len({p.epoch for p in self.processes.values()}) == 1)
    def save(self) -> None:
        """All ranks save at the same step count of one epoch, whatever the dispatcher was told."""
        ready = [p for p in self.processes.values() if p.opened is not None]
        if (
            not ready
            or len(ready) != self.model.now.world
            or any(p.opened.generation != self.model.current for p in ready)
        ):  # type: ignore[union-attr]
            return
        if any(p.epoch in p.over for p in ready):
            return
        taken = np.zeros(LANES, np.int64)
        for process in ready:
            taken[self.book(process).own] = self.book(process).handed
        epoch = ready[0].epoch
        self.saved.append(
            m.StartPoint(
                kind="checkpoint", epoch=epoch, step=max(self.book(p).step for p in ready), taken=tuple(taken.tolist()),
                first_epoch=0, generation=self.model.current, job=JOB, world_size=len(ready),
            )
        )  # fmt: skip

    # -- the network

    @rule(data=st.data())
    @precondition(lambda self: self.wire.sent)
    def an_old_message_arrives(self, data: Any) -> None:
        """Anything ever sent, now. It changes nothing, unless it never came before and its sender holds its rank."""
        kind, fields = data.draw(st.sampled_from(self.wire.sent[-30:]))
        message = fields["message"]
        member = self.job().members.get(message.rank) if self.job() is not None else None
        if isinstance(message, m.OpenJob):
            again = (
                member is not None
                and not member.left
                and (member.holder.uid, member.nonce) == (message.holder.uid, message.nonce)
            )
            other = member is not None and member.holder.uid != message.holder.uid and self.is_live(message.rank)
            if not again and not (other and member is not None and member.holder.uid not in message.dead):
                return  # an open of somebody who may open: ``open`` does that
            before = self.model.current
            try:
                self.wire.send(kind, fields)
                assert again
            except JobBusy:
                assert other
            assert self.model.current == before
            return
        holds = message.generation == self.model.current and member is not None and member.holder.uid == message.holder
        try:
            self.wire.send(kind, fields)
            assert holds, "one who does not hold the rank was heard"
        except Fenced as error:
            assert not holds
            assert error.detail["generation"] == self.model.current
        except FeedlineError as error:
            raise AssertionError(f"an honest message was refused: {error}") from error

    @rule(seconds=st.sampled_from([0.5, 0.5, 3.0, 3.0, 9.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.wire.wait(seconds)

    @rule()
    def take_over(self) -> None:
        audits, loads = self.audits(), dict(self.wire.state.grants.loads)
        self.wire.take_over()
        self.workers = set()
        assert dict(self.wire.state.grants.loads) == loads
        after = self.audits()
        for document in (*audits.values(), *after.values()):
            document.pop("state")
        assert audits == after

    @rule(name=st.sampled_from(["w1", "w2", "w3"]), what=st.sampled_from(["come", "beat", "beat", "leave", "drain"]))
    def worker(self, name: str, what: str) -> None:
        known = name in self.wire.state.workers.by_id
        if what == "come":
            self.wire.worker(name)
        elif what == "beat":
            assert self.wire.beat(name).known == known
        elif what == "leave":
            self.wire.apply(events.WorkerLeft, message=m.LeaveWorker(id=name, incarnation=f"{name}-1"))
        elif known:
            self.wire.apply(events.DrainRequested, message=m.DrainWorker(id=name))
        self.workers = set(self.wire.state.workers.by_id)

    # -- always

    def audits(self) -> dict[int, dict[str, Any]]:
        if self.job() is None:
            return {}
        return {epoch: self.wire.audit(JOB, epoch) for epoch in sorted(self.model.entered())}

    @invariant()
    def workers_are_known(self) -> None:
        self.workers = set(self.wire.state.workers.by_id)

    @invariant()
    def the_audit_is_the_model_s(self) -> None:
        for epoch, document in self.audits().items():
            assert document["lost"] == document["repeated"] == 0 and document["shards"] == [], document
            settled = document["acknowledged"] + document["rewound"]
            assert settled <= document["handed_out"] <= settled + document["open"] + document["abandoned"], document
            model = self.model.audit(epoch)
            if model is None:
                continue
            found = {
                "settled": document["acknowledged"] + document["skipped"],
                "rewound": document["rewound"],
                "abandoned": document["abandoned"],
                "open": document["open"],
                "rest": document["dropped"],
            }
            if self.settings["on_error"] == "skip":
                # rewound skipped rows were not handed out
                assert found.pop("rewound") <= model.pop("rewound")
            assert found == model, (epoch, found, model, document)

    def teardown(self) -> None:
        self.to_the_end()
        check_transitions()

    def to_the_end(self) -> None:
        """Everybody is gone; a new set of processes goes to the end of the epoch from "latest"."""
        if self.job() is None:
            return
        self.wire.fault = ""
        self.wire.wait(2 * LEASE)
        world = 1 + self.numbers % 3
        everybody = [
            Process(r, self.fresh("u"), self.fresh("n"), m.StartPoint(kind="latest"), world) for r in range(world)
        ]
        position = self.position()
        assert all(self.try_open(process) for process in everybody)
        assert (self.model.now.epoch, self.model.now.before) == position
        self.wire.worker("w1")
        steps = set()
        for process in everybody:
            self.processes[process.rank] = process
            book, quota = self.book(process), self.quota(process)
            while len(book.ids) < quota:
                book.hand(min(BATCH, quota - len(book.ids)))
            book.ack()
            steps.add(book.step)
            self.tell(process)
        assert self.settings["tail"] != "drop" or len(steps) == 1, "unequal steps"
        self.the_audit_is_the_model_s()
        for epoch, document in self.audits().items():
            document = self.wire.audit(JOB, epoch)
            if epoch <= position[0]:
                assert document["state"] == "complete", document
                assert document["open"] == 0
            whole = document["acknowledged"] + document["skipped"] + document["dropped"] + document["abandoned"]
            assert whole + document["open"] == ROWS


# -- dynamic order -------------------------------------------------------------------------------------------------


class DynamicWire(Wire):
    """The same faults; the model is the machine's own."""

    def send(self, kind: type[events.Event], fields: dict[str, Any]) -> Any:
        return self.deliver(kind, fields)


class DynamicFaults(RuleBasedStateMachine):
    """Ranks that take rows from a pool, while asks and reports are lost, late and repeated and dispatchers die between
    deciding, committing and answering. No position is ever two ranks', and in the end each was handed out once.

    Restarts, saved states and elastic ranks have their own histories in test_dispatcher_pools.py.
    """

    @initialize(
        world=st.sampled_from([1, 2, 3, 4]),
        tail=st.sampled_from(["pad", "drop", "ragged"]),
        shuffle=st.sampled_from([None, m.Shuffle(buffer=12, interleave=2), m.Shuffle(buffer=40)]),
    )
    def begin(self, world: int, tail: str, shuffle: m.Shuffle | None) -> None:
        self.wire = DynamicWire()
        self.wire.worker("w1")
        self.tail, self.world = tail, world
        opens = [
            self.wire.open(
                rank, f"u{rank}", world_size=world, order="dynamic", tail=tail, shuffle=shuffle, lanes=LANES, epochs=None,
                batch_size=BATCH,
            )
            for rank in range(world)
        ]  # fmt: skip
        self.ranks = [DynamicRank(self.wire, opens[-1], rank) for rank in range(world)]
        #: (epoch, position) -> the rank that was told that it has it
        self.owner: dict[tuple[int, int], int] = {}
        #: epoch -> rank -> rows handed out, and steps taken
        self.handed: dict[int, dict[int, list[tuple[int, int]]]] = {}
        self.steps: dict[int, set[int]] = {}

    def told(self, rank: int, epoch: int, grants: m.Grants) -> None:
        """A reply that arrives, to whomever and whenever, gives nobody what another rank has."""
        if grants.lane is not None:
            for piece in decode_pieces(grants.lane.pieces):
                for position in range(piece.start, piece.stop):
                    assert 0 <= position < ROWS
                    assert self.owner.setdefault((epoch, position), rank) == rank, "one position, two ranks"

    def ask(self, rank: DynamicRank, more: int, fault: str = "") -> None:
        self.wire.fault = fault
        try:
            found = rank.ask(more, lose=True)
        except LostError:
            return
        self.told(rank.rank, rank.epoch, found)
        rank.take(found)

    def tell(self, rank: DynamicRank, fault: str = "", state: str = "open") -> None:
        self.wire.fault = fault
        try:
            rank.send(state)
        except LostError:
            pass

    @rule(data=st.data(), fault=FAULTS, more=st.integers(1, 12))
    def ask_for_rows(self, data: Any, fault: str, more: int) -> None:
        self.ask(data.draw(st.sampled_from(self.ranks)), more, fault)

    @rule(data=st.data(), fault=FAULTS, batches=st.integers(1, 4), ack=st.booleans())
    def work(self, data: Any, fault: str, batches: int, ack: bool) -> None:
        rank = data.draw(st.sampled_from(self.ranks))
        for _ in range(batches):
            if not rank.hand() and not rank.done:
                self.ask(rank, rank.window + BATCH)
        if ack:
            rank.ack()
        self.tell(rank, fault)
        self.next_epoch(rank, fault)

    def next_epoch(self, rank: DynamicRank, fault: str = "") -> None:
        """A rank that is through reports it, until it is heard, and goes on with the next epoch."""
        if not rank.done or rank.epoch > min(other.epoch for other in self.ranks):
            return
        rank.ack()
        self.tell(rank, fault, "finished")
        self.tell(rank, "", "finished")
        self.handed.setdefault(rank.epoch, {})[rank.rank] = rank.rows
        self.steps.setdefault(rank.epoch, set()).add(rank.step)
        self.ranks[rank.rank] = DynamicRank(self.wire, rank.opened, rank.rank, rank.epoch + 1)

    @rule(data=st.data())
    @precondition(lambda self: self.wire.sent)
    def an_old_message_arrives(self, data: Any) -> None:
        kind, fields = data.draw(st.sampled_from(self.wire.sent[-20:]))
        message = fields["message"]
        if isinstance(message, m.OpenJob):
            return
        answer = self.wire.send(kind, fields)
        if isinstance(message, m.AskGrants):
            self.told(message.rank, message.epoch, answer)

    @rule()
    def take_over(self) -> None:
        self.wire.take_over()
        self.wire.worker("w1")

    @rule(seconds=st.sampled_from([0.5, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.wire.wait(seconds)

    @invariant()
    def nothing_is_lost_or_repeated(self) -> None:
        for epoch in {rank.epoch for rank in self.ranks} | set(self.handed):
            try:
                document = self.wire.audit(JOB, epoch)
            except ConfigError:
                continue  # not entered
            assert document["lost"] == document["repeated"] == document["rewound"] == 0, document

    def teardown(self) -> None:
        if not hasattr(self, "ranks"):
            return
        check_transitions()
        last = max(rank.epoch for rank in self.ranks)
        self.wire.take_over()
        self.wire.worker("w1")
        for _ in range(2000):
            behind = [rank for rank in self.ranks if rank.epoch <= last]
            if not behind:
                break
            rank = min(behind, key=lambda r: (r.epoch, r.place))
            if not rank.hand() and not rank.done:
                self.ask(rank, rank.window + BATCH)
                rank.ack()
                self.tell(rank)
            self.next_epoch(rank)
        assert all(rank.epoch > last for rank in self.ranks), "somebody waits for ever"
        for epoch in range(last + 1):
            rows = [row for rank in self.handed[epoch].values() for row in rank]
            assert len(rows) == len(set(rows)), "handed out twice"
            assert self.tail == "ragged" or len(self.steps[epoch]) == 1, "unequal steps"
            document = self.wire.audit(JOB, epoch)
            assert (document["state"], document["lost"], document["repeated"], document["open"]) == (
                "complete",
                0,
                0,
                0,
            )
            assert document["acknowledged"] == len(rows) == ROWS - document["dropped"]
            assert not document["dropped"] or (self.tail == "drop" and document["dropped"] < self.world * BATCH)


#: 200 histories in CI, 2,000 of ``make nightly``
Faults.TestCase.settings = hypothesis.settings(
    max_examples=max(200, hypothesis.settings().max_examples), stateful_step_count=30
)
TestFaults = Faults.TestCase
DynamicFaults.TestCase.settings = hypothesis.settings(
    max_examples=max(50, hypothesis.settings().max_examples // 4), stateful_step_count=25
)
TestDynamicFaults = DynamicFaults.TestCase
