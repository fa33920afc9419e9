"""One generation as this rank lives it: its feeds, books and reports, from opening to the next rewind or the end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from manifests.errors import BadSample, FeedlineError, ProtocolError, RankAbsent, TooManyBadSamples
from manifests.plan import Plan
from manifests.wire import messages as m

from .auditing import Auditor
from .books import Books
from .budget import Budget, FeedStats
from .chunks import BAD, FAILED, QUARANTINED
from .config import LoaderConfig
from .control import Closed, Control
from .dynamic import AnyLeg, DynamicLeg
from .feed import Feed
from .figures import Waits
from .joining import Dataset
from .reads import ReadPool
from .reporter import Reporter, State
from .seat import Seat
from .session import Leg, Position, Session
from .tensors import Piece, assemble

I64 = npt.NDArray[np.int64]


class Epoch:
    """One epoch of this generation: its leg, how far it was handed out, and its rows on the way."""

    def __init__(self, number: int, leg: AnyLeg, first_epoch: int) -> None:
        self.number = number
        #: epoch in which the pass (one ``for``) began
        self.first_epoch = first_epoch
        self.session = Session(leg)
        self.books = Books(number, leg)
        self.feed: Feed | None = None

    @property
    def leg(self) -> AnyLeg:
        """What this rank hands out of the epoch."""
        return self.session.leg


class Run:
    """A generation that was opened. One thread (the loop's) hands out; others report and read.

    Args:
        opened: the dispatcher's answer: generation, resolved settings, start point.
    """

    def __init__(
        self,
        config: LoaderConfig,
        dataset: Dataset,
        opened: m.JobOpened,
        *,
        rank: int,
        holder: m.Holder,
        control: Control,
        pool: ReadPool,
        waits: Waits,
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.settings = opened.settings
        self.generation = opened.generation
        self.start = opened.start
        self.rank = rank
        self._holder = holder
        self._control = control
        self._pool = pool
        self._budget = Budget(config.prefetch)
        self.waits = waits
        self._fatal: FeedlineError | None = None
        self._feeds: list[Feed] = []
        self._feeds_lock = threading.Lock()
        self._closed = False
        self._ahead: Epoch | None = None
        self.current: Epoch | None = None
        self._bad = 0
        self._plans: dict[int, Plan] = {}
        #: rows of an earlier epoch may come in one
        self._mixes_epochs = opened.settings.elastic or bool(opened.start.carried)
        self._lease = opened.lease_ms / 1000
        self.done = False
        self.reporter = Reporter(
            control,
            job=config.job,
            generation=self.generation,
            rank=rank,
            holder=holder.uid,
            lease=self._lease,
            status=self._status,
            answered=self._answered,
            fatal=self.fail,
        )
        self.auditor = Auditor(
            control,
            config.job,
            through=lambda epoch: self.reporter.slowest[0] > epoch,
            refresh=lambda: self.reporter.flush(1.0),
            fatal=self.fail,
        )

    def __repr__(self) -> str:
        return (
            f"Run({self.config.job} generation {self.generation} rank {self.rank}, {self.current and self.current.leg})"
        )

    # -- epochs

    def begin(self, number: int, first_epoch: int) -> Epoch:
        """Enter epoch ``number``; the start point's rows count as taken if it is the epoch it names."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.number == number and ahead.first_epoch == first_epoch:
            epoch = ahead
        else:
            if ahead is not None and ahead.feed is not None:
                self._drop(ahead.feed)
            epoch = self._make(number, first_epoch)
        if self.current is not None and self.current.feed is not None:
            self._drop(self.current.feed)
        self._bad = 0
        self.current = epoch
        if epoch.feed is None and epoch.leg.steps:
            epoch.feed = self._feed(epoch)
        self.reporter.add(epoch.books)
        return epoch

    def look_ahead(self, first_epoch: int, stop: int | None) -> None:
        """Ask for the next epoch once all rows of the current one are known; they are read after those."""
        epoch = self.current
        if self._ahead is not None or epoch is None or epoch.feed is None or not epoch.feed.looked_all:
            return
        following = epoch.number + 1
        if stop is not None and following >= stop:
            return
        self._ahead = self._make(following, first_epoch)
        if self._ahead.leg.steps:
            self._ahead.feed = self._feed(self._ahead, after=epoch.feed)

    def _make(self, number: int, first_epoch: int) -> Epoch:
        settings, start = self.settings, self.start
        leg: AnyLeg
        if settings.order == "dynamic":
            leg = DynamicLeg.of(self._plan, settings, start, epoch=number, rank=self.rank)
        else:
            here = number == start.epoch and start.inside
            leg = Leg(
                self._plan(number),
                rank=self.rank,
                world_size=settings.world_size,
                batch_size=settings.batch_size,
                tail=settings.tail,
                taken=np.array(start.taken if here else [0] * (settings.lanes or 1), np.int64),
                first_step=start.step if here else 0,
            )
        return Epoch(number, leg, first_epoch)

    def _plan(self, epoch: int) -> Plan:
        """The order of an epoch; the last few are kept."""
        settings = self.settings
        if settings.seed is None or settings.lanes is None:
            raise ProtocolError("the dispatcher left seed or lanes open")
        found = self._plans.get(epoch)
        if found is None:
            found = Plan(
                self.dataset.manifest.shard_rows,
                seed=settings.seed,
                epoch=epoch,
                shuffle=settings.shuffle,
                lanes=settings.lanes,
            )
            self._plans = {number: plan for number, plan in self._plans.items() if number >= epoch - 2} | {epoch: found}
        return found

    def _feed(self, epoch: Epoch, after: Feed | None = None) -> Feed:
        with self._feeds_lock:
            if self._closed:
                raise Closed
            feed = Feed(
                epoch.leg,
                epoch=epoch.number,
                fields=self.dataset.fields,
                control=self._control,
                pool=self._pool,
                budget=self._budget,
                seat=Seat(self.config.job, self.generation, self.rank, self._holder.uid),
                stall=float(self.config.options.stall),
                timeout=self.config.timeout,
                fatal=self.fail,
                after=after,
            )
            self._feeds.append(feed)
        return feed

    def _drop(self, feed: Feed) -> None:
        feed.close()
        feed.join(1.0)
        with self._feeds_lock:
            if feed in self._feeds:
                self._feeds.remove(feed)

    # -- batches

    def next_batch(self, epoch: Epoch) -> tuple[Any] | None:
        """The next batch of ``epoch``, through ``collate``, as a tuple of one; None at the end of the leg.

        Raises:
            BadSample, TooManyBadSamples, or what a worker or the dispatcher answered; WaitTimeout and its kin.
        """
        session, feed = epoch.session, epoch.feed
        self.check()
        if session.finished or feed is None:
            return None
        place = session.position.read
        want = session.leg.batch_rows(session.position.steps)
        look = want
        while True:
            marks = feed.status(place, look)
            failed = np.flatnonzero(marks == FAILED)
            usable = marks[: failed[0]] if len(failed) else marks
            bad = np.flatnonzero((usable == BAD) | (usable == QUARANTINED))
            got = session.next_batch(usable >= 0)
            if len(bad) and self.config.on_error == "raise" and (got is None or place + bad[0] < got[1].read):
                raise self._unusable(feed, place + int(bad[0]))
            if got is not None:
                return self._hand_out(epoch, feed, *got)
            if len(failed):
                chunk = feed.chunk_at(place + int(failed[0]))
                raise chunk.errors[place + int(failed[0]) - chunk.first]
            mine = bad[bad + place < session.leg.candidates]
            self._check_budget(epoch, int((usable[mine] == BAD).sum()))
            self._check_pads(epoch, place, usable)
            if len(marks) == look:
                look *= 2
            else:
                self._wait(feed, place, len(marks))

    @staticmethod
    def _check_pads(epoch: Epoch, place: int, marks: npt.NDArray[np.int32]) -> None:
        """Raise if the rows of a whole round of pads are bad: pads go round all rows of the plan, so no row is good."""
        leg = epoch.leg
        pads = marks[max(0, leg.candidates - place) :]
        if len(pads) >= leg.plan.rows * leg.world_size and not (pads >= 0).any():
            raise TooManyBadSamples(
                f"no row of epoch {epoch.number} is good", cause="all rows that its pads could repeat are bad"
            )

    def _wait(self, feed: Feed, place: int, known: int) -> None:
        started = time.monotonic()
        self.waits.waiting_since = started
        feed.begin_wait()
        try:
            feed.wait(place, known, lambda: self._fatal)
        finally:
            self.waits.waiting_since = None
            self.waits.waited += time.monotonic() - started

    def _hand_out(self, epoch: Epoch, feed: Feed, offsets: I64, position: Position) -> tuple[Any] | None:
        session = epoch.session
        place = session.position.read
        skipped, quarantined = self._passed_over(feed, place, position.read, len(offsets))
        self._check_budget(epoch, len(skipped))
        if not len(offsets):  # nothing but bad rows was left
            epoch.books.skip(skipped, position, quarantined)
            self._move(epoch, feed, position, len(skipped), len(quarantined))
            return None
        pieces: list[Piece] = []
        planned, shards = np.empty(len(offsets), np.int64), np.empty(len(offsets), np.int64)
        done = 0
        while done < len(offsets):
            chunk = feed.chunk_at(place + int(offsets[done]))
            stop = int(np.searchsorted(offsets, chunk.end - place))
            inside = offsets[done:stop] + place - chunk.first
            pieces += chunk.pieces(inside, np.arange(done, stop, dtype=np.int64))
            planned[done:stop], shards[done:stop] = chunk.ids[inside], chunk.shards[inside]
            done = stop
        batch = assemble(
            self.dataset.fields, pieces, len(offsets), self.config.pin_memory and torch.cuda.is_available()
        )
        pad = offsets + place >= session.leg.candidates
        if self.config.tail == "pad" or self.config.on_error == "skip":
            batch["__pad__"] = torch.from_numpy(pad)
        found = batch["__id__"].numpy()
        epochs: I64 | None = None
        if isinstance(session.leg, DynamicLeg) and self._mixes_epochs:
            epochs = session.leg.epochs(place, position.read - place)[offsets]
            batch["__epoch__"] = torch.from_numpy(epochs)
            epochs = epochs.copy() if (epochs != epoch.number).any() else None  # the loop may change its own
        size = sum(v.nbytes for v in batch.values() if isinstance(v, torch.Tensor))
        # before anything moves: a collate that raises leaves the batch to be handed out
        result = batch if self.config.collate is None else self.config.collate(batch)
        pads = int(pad.sum())
        if pads:
            real = ~pad
            planned, found, shards = planned[real], found[real], shards[real]
            epochs = None if epochs is None else epochs[real]
        epoch.books.hand_out(planned, found, pads, skipped, position, shards, quarantined, epochs)
        self._move(epoch, feed, position, len(skipped), len(quarantined))
        self.waits.got(len(offsets), size)
        return (result,)

    def _move(self, epoch: Epoch, feed: Feed, position: Position, skipped: int, quarantined: int) -> None:
        epoch.session.position = position
        feed.release(position.read)
        self._bad += skipped
        if skipped or quarantined:
            # A state saved from now on counts these rows as taken; only the books know that they were not, so they
            # are on record before the loop goes on.
            self.reporter.flush(1.0)

    def _passed_over(self, feed: Feed, first: int, stop: int, used: int) -> tuple[list[m.SkippedRow], list[int]]:
        """Bad rows of this stretch of the read stream, and ids of rows in quarantine; without pads (they are repeats of
        rows counted elsewhere). ``used``: rows of it that are in the batch."""
        bad: list[m.SkippedRow] = []
        quarantined: list[int] = []
        if used == stop - first:
            return bad, quarantined
        candidates = self.current.leg.candidates if self.current is not None else 0
        marks = feed.status(first, min(stop, candidates) - first)
        for offset in np.flatnonzero((marks == BAD) | (marks == QUARANTINED)).tolist():
            chunk = feed.chunk_at(first + offset)
            place = first + offset - chunk.first
            if marks[offset] == QUARANTINED:
                quarantined.append(int(chunk.ids[place]))
                continue
            row = chunk.bad[place]
            bad.append(m.SkippedRow(sample_id=row.sample_id, key=row.key, shard=row.shard, reason=row.reason))
        return bad, quarantined

    def _unusable(self, feed: Feed, place: int) -> Exception:
        chunk = feed.chunk_at(place)
        if place - chunk.first in chunk.errors:  # its shard is in quarantine
            return chunk.errors[place - chunk.first]
        row = chunk.bad[place - chunk.first]
        return BadSample(
            f"sample {row.key!r} of {row.shard} cannot be used",
            cause=row.reason,
            remedy="mend or remove it, or pass on_error='skip' with a budget max_bad",
            detail={"sample_id": row.sample_id, "key": row.key, "shard": row.shard, "reason": row.reason},
        )

    def _check_budget(self, epoch: Epoch, more: int) -> None:
        if self.config.on_error != "skip":
            return
        limit = self.config.max_bad
        rows = int(epoch.leg.plan.rows)
        allowed = limit if isinstance(limit, int) else int(np.ceil(limit * rows))
        if self._bad + more > allowed:
            share = "" if isinstance(limit, int) else f" ({limit:g} of {rows} rows)"
            raise TooManyBadSamples(
                f"rank {self.rank} met {self._bad + more} bad samples in epoch {epoch.number}",
                cause=f"max_bad allows {allowed}{share}",
                remedy="look at their reasons in `feedline audit`, or raise max_bad",
            )

    # -- the rest

    def check(self) -> None:
        """Raise what ended this run, if something did."""
        if self._fatal is not None:
            raise self._fatal

    def _answered(self, reply: m.Reported) -> None:
        """What a report was answered: how far all ranks are, and who is gone."""
        current, ahead = self.current, self._ahead
        for epoch in (current, ahead):
            if epoch is not None and isinstance(epoch.leg, DynamicLeg):
                for floor in reply.floors:
                    epoch.leg.take_floor(floor)
        patience = max(self._lease, self.config.timeout)
        gone = [one for one in reply.silent if one.silent_ms >= patience * 1000 and one.rank != self.rank]
        if gone and not self.settings.elastic:
            self.fail(_absent(gone, self.config.job))

    def fail(self, error: FeedlineError) -> None:
        """This run may not go on; the loop gets ``error`` when it next asks."""
        if self._fatal is None:
            self._fatal = error
        with self._budget.lock:
            self._budget.lock.notify_all()

    def _status(self) -> tuple[State, str, float]:
        if self.done:
            return "done", "", 0.0
        since, epoch = self.waits.waiting_since, self.current
        if since is None or epoch is None or epoch.feed is None:
            return "reading", "", 0.0
        return "waiting", epoch.feed.reason(), time.monotonic() - since

    @property
    def hot_share(self) -> float:
        """Share of the rows read in this generation that needed nothing from storage."""
        return min(1.0, self._budget.hot_rows / self._budget.rows) if self._budget.rows else 0.0

    def feed_stats(self) -> Sequence[FeedStats]:
        """Of the feeds under way."""
        return [feed.stats() for feed in tuple(self._feeds)]

    def close(self, *, leave: bool) -> None:
        """End the run: deliver acknowledgements, stop all threads. ``leave``: for good; gives the lease back and closes
        the connections to the dispatcher. Takes at most about 5 s, whoever is away."""
        with self._feeds_lock:
            self._closed = True
            feeds = tuple(self._feeds)
            self._feeds.clear()
        for feed in feeds:
            feed.close()
        self.auditor.close()
        # also on a rewind: what was handed out past its start point counts as rewound
        if self._fatal is None or isinstance(self._fatal, RankAbsent):
            self.reporter.flush(4.0 if leave else 2.0, leaving=leave)
        if leave:
            self._control.close()  # ends calls that other threads still wait in
        self.reporter.close()
        deadline = time.monotonic() + 1.0
        for feed in feeds:
            feed.join(max(0.0, deadline - time.monotonic()))
        self.auditor.join(max(0.0, deadline - time.monotonic()))


def _absent(gone: Sequence[m.SilentRank], job: str) -> RankAbsent:
    first = gone[0]
    others = f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
    return RankAbsent(
        f"rank {first.rank} of job {job}{others} is silent for {first.silent_ms / 1000:.1f} s",
        cause=f"it was process {first.pid} on {first.host}, which did not close",
        remedy="start all ranks again from the last state; a loop without collectives can go on with elastic=True",
        detail={"absent": [one.rank for one in gone], "host": first.host, "pid": first.pid},
    )


class Engine:
    """Threads and connections of a loader: what its finalizer holds, closed once, from wherever that happens."""

    def __init__(self, control: Control, pool: ReadPool) -> None:
        self.control = control
        self.pool = pool
        self.run: Run | None = None
        self.closing = threading.Event()
        #: threads and connections live in this process only, not in one forked from it
        self.pid = os.getpid()
        self._lock = threading.Lock()

    def adopt(self, run: Run) -> None:
        """``run`` is closed together with this; at once if this is closed already.

        Raises:
            Closed: this was closed while the generation was opened.
        """
        with self._lock:
            if not self.closing.is_set():
                self.run = run
                return
        run.close(leave=False)
        raise Closed

    def close(self) -> None:
        """Flush, give the lease back, stop. Safe to call twice and from any thread; nothing in a forked process."""
        if os.getpid() != self.pid:
            return
        with self._lock:
            if self.closing.is_set():
                return
            self.closing.set()
            run = self.run
        if run is not None:
            run.close(leave=True)
        self.pool.close()
        self.control.close()
        self.pool.join(0.5)
