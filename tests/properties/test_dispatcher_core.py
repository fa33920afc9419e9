"""The core under any history: opens, joins, closes, restarts, asks, reports, workers that come and go, take-overs.

The model is small: which holder has which rank of the newest generation, and an honest rank's books. After every event
``Bench.apply`` checks the core's invariants, that the store holds what memory holds, and after every step the audit
must balance, with nothing lost and nothing repeated.
"""

import numpy as np
from core_bench import LEASE, Bench, Rank
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from manifests.errors import ConfigError, Fenced, JobBusy, JobMismatch, StateMismatch
from manifests.plan import lane_sizes
from manifests.wire import codec
from manifests.wire import messages as m

KEYS = {"k1": b"s" * 32}
ROWS = 24


class Core(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.bench = Bench()
        self.generation = 0
        self.world = 1
        #: rank -> (uid, opened, heard)
        self.holders = {}
        #: rank -> books of the epoch it is in
        self.books = {}
        self.fenced = []
        self.checkpoint = None
        self.bench.worker("w1")
        self.workers = {"w1"}
        self.uids = 0

    # -- helpers

    def live(self):
        return {r for r, (_, _, heard) in self.holders.items() if self.bench.at - heard <= LEASE}

    def heard(self, rank):
        uid, opened, _ = self.holders[rank]
        self.holders[rank] = (uid, opened, self.bench.at)

    def new_uid(self):
        self.uids += 1
        return f"h{self.uids}"

    def became(self, rank, uid, opened, world):
        if opened.generation > self.generation:
            assert opened.generation == self.generation + 1
            self.fenced = [(r, u, o) for r, (u, o, _) in self.holders.items()]
            self.holders, self.books = {}, {}
            self.generation, self.world = opened.generation, world
            taken = opened.start.taken
            if taken:
                assert (np.array(taken) <= lane_sizes(ROWS, 12)).all()
        self.holders[rank] = (uid, opened, self.bench.at)
        self.books[rank] = Rank(self.bench, opened, rank)
        assert set(opened.absent) == set(range(world)) - set(self.joined())

    def joined(self):
        return self.bench.state.jobs.by_name["train"].members

    def try_open(self, rank, uid, world, start, dead=()):
        kwargs = {"world_size": world, "start": start, "epochs": None, "tail": "pad", "dead": dead}
        opened = self.bench.open(rank, uid, **kwargs)
        self.became(rank, uid, opened, world)

    # -- rules

    @rule(
        world=st.sampled_from([1, 1, 2, 3]),
        rank=st.integers(0, 2),
        kind=st.sampled_from(["fresh", "latest", "checkpoint"]),
        epoch=st.sampled_from([0, 0, 0, 1, 3]),
        dead=st.booleans(),
    )
    def open(self, world, rank, kind, epoch, dead):
        rank %= world
        epoch = epoch if kind == "fresh" else 0
        start = m.StartPoint(kind=kind, epoch=epoch, first_epoch=epoch) if kind != "checkpoint" else self.checkpoint
        if start is None:
            return
        uid, live = self.new_uid(), self.live()
        gone = tuple(u for u, _, _ in self.holders.values()) if dead else ()
        before = self.generation
        busy = rank in live and not dead
        try:
            self.try_open(rank, uid, world, start, gone)
        except JobBusy:
            assert busy or (live and not dead and world != self.world)
        except (JobMismatch, StateMismatch):
            assert live and not dead
        else:
            assert not busy
            if not live or dead:
                assert self.generation == before + 1 or rank in self.holders

    @rule(data=st.data())
    @precondition(lambda self: self.holders)
    def rewind(self, data):
        rank = data.draw(st.sampled_from(sorted(self.holders)))
        uid, _, _ = self.holders[rank]
        member = self.joined().get(rank)
        if self.checkpoint is None or member is None or member.left:
            return
        before = self.generation
        self.try_open(rank, uid, self.world, self.checkpoint)
        assert self.generation == before + 1

    @rule(data=st.data(), epoch=st.integers(0, 3))
    @precondition(lambda self: self.holders)
    def set_epoch(self, data, epoch):
        """A loader goes to another epoch by itself: a fresh generation without a warning."""
        rank = data.draw(st.sampled_from(sorted(self.holders)))
        uid, _, _ = self.holders[rank]
        member = self.joined().get(rank)
        if member is None or member.left:
            return
        before = self.generation
        self.try_open(rank, uid, self.world, m.StartPoint(kind="fresh", epoch=epoch, first_epoch=epoch))
        assert self.generation == before + 1 and self.holders[rank][1].warning == ""

    @rule(data=st.data(), shards=st.sets(st.integers(0, 4), min_size=1), avoid=st.sets(st.sampled_from(["w1", "w2"])))
    @precondition(lambda self: self.holders)
    def ask(self, data, shards, avoid):
        rank = data.draw(st.sampled_from(sorted(self.holders)))
        uid, opened, _ = self.holders[rank]
        found = self.bench.ask(
            opened, rank, sorted(shards), uid=uid, epoch=self.books[rank].epoch, avoid=tuple(sorted(avoid))
        )
        self.heard(rank)
        assert bool(found.waiting) == (len(found.grants) < len(shards))
        if found.grants:
            assert len(self.joined()) == self.world
        for info in found.grants:
            grant = codec.open_signed(info.signed, KEYS)
            assert (grant.generation, grant.rank, grant.expires_ms) == (
                self.generation,
                rank,
                self.bench.now_ms + 120_000,
            )
            assert set(grant.workers) <= self.workers

    @rule(data=st.data(), steps=st.integers(0, 3), skip=st.integers(0, 1), ack=st.booleans())
    @precondition(lambda self: self.holders)
    def work(self, data, steps, skip, ack):
        rank = data.draw(st.sampled_from(sorted(self.holders)))
        uid, opened, _ = self.holders[rank]
        books = self.books[rank]
        for _ in range(steps):
            if books.left > skip:
                books.hand(min(2, books.left - skip), skip)
        if ack:
            books.ack()
        over = books.left == 0 and (books.handed == books.acked).all()
        self.bench.report(opened, rank, books.progress("finished" if over else "open"), uid=uid)
        self.heard(rank)
        if over:
            self.books[rank] = Rank(self.bench, opened, rank, books.epoch + 1)

    @rule(data=st.data())
    @precondition(lambda self: self.holders)
    def leave_early(self, data):
        rank = data.draw(st.sampled_from(sorted(self.holders)))
        uid, opened, _ = self.holders[rank]
        books = self.books[rank]
        self.bench.report(opened, rank, books.progress("abandoned"), uid=uid)
        self.heard(rank)
        self.books[rank] = Rank(self.bench, opened, rank, books.epoch + 1)

    @rule(job=st.sampled_from(["", "train", "train", "other"]))
    @precondition(lambda self: len(self.books) == self.world and len({b.epoch for b in self.books.values()}) == 1)
    def save(self, job):
        """A checkpoint of all ranks; acknowledged or not, it vouches for what was handed out."""
        books = list(self.books.values())
        taken = np.zeros(12, np.int64)
        for book in books:
            taken[book.own] = book.handed
        self.checkpoint = m.StartPoint(
            kind="checkpoint",
            epoch=books[0].epoch,
            step=max(book.step for book in books),
            taken=tuple(taken.tolist()),
            first_epoch=books[0].epoch,
            generation=self.generation,
            job=job,
        )

    @rule(data=st.data())
    @precondition(lambda self: self.holders)
    def close(self, data):
        rank = data.draw(st.sampled_from(sorted(self.holders)))
        uid, opened, _ = self.holders.pop(rank)
        self.books.pop(rank)
        self.bench.report(opened, rank, uid=uid, leaving=True)

    @rule()
    @precondition(lambda self: self.fenced)
    def old_holder_speaks(self):
        rank, uid, opened = self.fenced.pop()
        for call in (self.bench.ask, self.bench.report):
            try:
                call(opened, rank, uid=uid)
            except Fenced as error:
                assert error.detail["generation"] == self.generation
            else:
                raise AssertionError("a deposed holder was not fenced")

    @rule(name=st.sampled_from(["w1", "w2"]))
    def worker_comes(self, name):
        self.bench.worker(name)
        self.workers.add(name)

    @rule(name=st.sampled_from(["w1", "w2"]))
    def worker_beats(self, name):
        assert self.bench.beat(name).known == (name in self.workers)

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def time_passes(self, seconds):
        self.bench.wait(seconds)

    @rule()
    def take_over(self):
        before = self.bench.state
        audits = self.audits()
        self.bench.reload()
        assert self.bench.state.durable() == before.durable()
        assert dict(self.bench.state.grants.loads) == dict(before.grants.loads)
        self.workers.clear()
        for rank in self.holders:
            self.heard(rank)  # one lease of grace
        for document in (*audits, *(after := self.audits())):
            document.pop("state")
        assert after == audits

    # -- always

    def audits(self):
        job = self.bench.state.jobs.by_name.get("train")
        if job is None:
            return []
        found = [self.bench.audit()]
        entered = {epoch for _, epoch in job.all_books()}
        for epoch in range(max(entered | {job.current.start.epoch}) + 2):
            try:
                found.append(self.bench.audit(epoch=epoch))
            except ConfigError:
                assert epoch not in entered and epoch != job.current.start.epoch
        return found

    @invariant()
    def books_balance(self):
        for document in self.audits():
            assert document["lost"] == document["repeated"] == 0 and not document["shards"], document
            unsettled = document["open"] + document["abandoned"]
            settled = document["acknowledged"] + document["rewound"]
            assert settled <= document["handed_out"] <= settled + unsettled, document


TestCore = Core.TestCase
TestCore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
