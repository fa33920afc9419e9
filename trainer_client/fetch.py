"""Getting the rows of chunks from workers: cut into reads, moved when a worker breaks or falls silent, asked of a second
worker when the loop waits for a slow one.

Every row has its place in its chunk from the start, so reads are repeated, moved and run side by side freely: what comes
first is kept. One thread (the planner's) calls ``add``, ``step`` and ``hedge``; parts and ends of reads come on the
threads of the pool.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from manifests.errors import ProtocolError
from manifests.schema import Field
from manifests.wire import messages as m

from .avoid import Avoided
from .budget import Budget
from .chunks import MISSING, Chunk, in_order
from .cutting import Cut, Source, cut, stretch_rows
from .grants import GrantKeeper
from .reads import Read, ReadPool
from .tensors import Part, view_part
from .trouble import Trouble

log = logging.getLogger("feedline.client")
I64 = npt.NDArray[np.int64]

#: bytes one read should bring
READ_BYTES = 8 << 20
#: a read without progress for this many seconds, and this many times as long as reads usually take, is slow
_SLOW, _SLOWER = 0.5, 4.0
#: slow reads that a second worker helps with at a time
_HEDGES = 3


class Fetch:
    """Reads of one feed.

    Args:
        fields: output columns. keeper: grants. budget: its lock is used here. shard_rows: rows of a shard.
        stall: seconds of silence after which a read moves.
        news: called, with the lock held, when something changed that the planner should look at.
    """

    def __init__(
        self,
        *,
        fields: Sequence[Field],
        pool: ReadPool,
        budget: Budget,
        keeper: GrantKeeper,
        avoided: Avoided,
        shard_rows: Callable[[int], int],
        stall: float,
        news: Callable[[], None],
    ) -> None:
        self._fields = list(fields)
        sizes = [field.row_bytes() for field in fields]
        #: bytes of one row's fixed-shape columns and its id, and whether that is all of it
        self._fixed = sum(size or 0 for size in sizes) + 8
        self._all_fixed = None not in sizes
        self._pool = pool
        self._budget = budget
        self._lock = budget.lock
        self._keeper = keeper
        self._avoided = avoided
        self._trouble = Trouble(keeper, avoided)
        self._shard_rows = shard_rows
        self._stall = stall
        self._news = news
        self._pending: list[tuple[Chunk, I64]] = []
        self._reads: dict[Read, Chunk] = {}
        self._stretches: dict[int, int] = {}
        self._seen: dict[str, float] = {}
        #: workers that were slow, and since when they gave no sign
        self._mute: dict[str, float] = {}
        self._quarantined = 0
        self._closing = False
        #: rows that turned out bad or are in quarantine
        self.unusable = 0
        #: monotonic time at which a row last came
        self.progress = time.monotonic()
        #: a row waits for a grant
        self.wants_grants = False

    def __repr__(self) -> str:
        return f"Fetch({len(self._reads)} reads, {len(self._pending)} chunks to issue)"

    # -- what it says of itself

    @property
    def idle(self) -> bool:
        """Nothing is left to issue."""
        return not self._pending

    @property
    def in_flight(self) -> int:
        """Reads under way."""
        return len(self._reads)

    @property
    def row_size_known(self) -> bool:
        """Whether ``row_size`` is more than a guess."""
        return self._all_fixed or self._budget.row_bytes is not None

    def row_size(self) -> float:
        """Bytes of one row, about."""
        return self._fixed if self._all_fixed else max(self._fixed, self._budget.row_bytes or 64 << 10)

    def workers(self, seconds: float = 10.0) -> int:
        """Workers that sent rows in the last ``seconds``."""
        now = time.monotonic()
        with self._lock:
            return sum(1 for seen in self._seen.values() if now - seen < seconds)

    def reason(self, chunk: Chunk, offset: int) -> str:
        """Why this row is not there, for people; "": it has no grant that can be used."""
        shard = int(chunk.shards[offset])
        now = time.monotonic()
        with self._lock:
            reads = self._covering(chunk, offset)
        for read in reads:
            if not read.last_sign:
                return f"shard {shard} on worker {read.worker.id}: {len(self._reads) - 1} other reads are before it"
            silent = now - read.last_sign
            what = f"no sign for {silent:.1f} s" if silent > 1.5 else f"no row for {now - read.moved:.1f} s"
            return f"shard {shard} on worker {read.worker.id}: {what}"
        if error := self._trouble.error_of(shard):
            return f"shard {shard} {error}"
        held = self._keeper.held([shard]).get(shard)
        usable = held is not None and self._avoided.usable(held.workers, shard)
        if held is None or not usable:
            return ""
        if others := len(self._reads):
            return f"shard {shard}: {others} other reads are before its own"
        return f"shard {shard} is about to be asked of worker {held.workers[0].id}"

    def last_failure(self, shard: int) -> str:
        """What the worker of this shard did when it was last asked, "": nothing wrong, or there is none."""
        held = self._keeper.held([shard]).get(shard)
        worker = held.workers[0].id if held is not None and held.workers else ""
        failure = self._trouble.last_of(worker)
        return f"shard {shard} on worker {worker}: {failure}" if failure else ""

    def _covering(self, chunk: Chunk, offset: int) -> list[Read]:
        found = [r for r, c in self._reads.items() if c is chunk and not r.abandoned]
        return [r for r in found if (r.offsets[r.done :] == offset).any()]

    def unissued_shards(self, most: int) -> list[int]:
        """Shards of rows that no read is under way for, first needed first, about ``most`` of them."""
        with self._lock:
            pending = [chunk.shards[offsets[chunk.part[offsets] == MISSING]] for chunk, offsets in self._pending]
        found: dict[int, None] = {}
        for shards in pending:
            found.update(dict.fromkeys(in_order(shards)))
            if len(found) >= most:
                break
        return list(found)

    # -- the planner's side

    def add(self, chunk: Chunk) -> None:
        """Get the rows of ``chunk``."""
        with self._lock:
            self._pending.append((chunk, np.arange(len(chunk), dtype=np.int64)))
            self._mark_quarantined([chunk])

    def step(self, chunks: Sequence[Chunk]) -> bool:
        """Move reads that are silent, mark what is in quarantine, issue what can be. True: something was issued."""
        self._check_silence()
        if len(self._keeper.quarantined) != self._quarantined:
            with self._lock:
                self._quarantined = len(self._keeper.quarantined)
                self._mark_quarantined(chunks)
                self._lock.notify_all()
        with self._lock:
            pending, self._pending = self._pending, []
        issued, left = False, []
        self.wants_grants = False
        for chunk, offsets in pending:
            rest = self._issue(chunk, offsets)
            issued |= len(rest) < len(offsets)
            if len(rest):
                left.append((chunk, rest))
        with self._lock:
            self._pending = sorted(left + self._pending, key=lambda pending: pending[0].first)
        return issued

    def hedge(self, chunk: Chunk, offset: int) -> None:
        """The loop waits for this row: if its read is slow, have the rest of it read from another worker too."""
        now = time.monotonic()
        with self._lock:
            reads = self._covering(chunk, offset)
            if len(reads) != 1 or reads[0].hedged or self._closing:
                return
            read = reads[0]
            if now - read.moved < max(_SLOW, _SLOWER * self._budget.speeds.usual):
                return
            if sum(1 for r in self._reads if r.hedged) >= 2 * _HEDGES:
                return
            rest = read.offsets[read.done :]
            rest = rest[chunk.part[rest] == MISSING]
        cuts, _ = self._cut(chunk, rest, without=read.worker.id)
        if not cuts:
            return
        log.info(
            "worker %s sent no row for %.1f s; %d rows are read from worker %s too",
            read.worker.id, now - read.moved, sum(len(c.offsets) for c in cuts), cuts[0].worker.id,
        )  # fmt: skip
        with self._lock:
            read.hedged = True
            self._budget.hedges += 1
        for one in cuts:
            self._submit(chunk, one, hedge=True)

    def close(self) -> None:
        """Cancel what is under way."""
        with self._lock:
            self._closing = True
            reads = tuple(self._reads)
            self._pending.clear()
        for read in reads:
            read.abandon(self._pool)

    # -- issuing

    def _issue(self, chunk: Chunk, offsets: I64) -> I64:
        """Submit reads for those of the rows that have a grant and room; returns the others."""
        with self._lock:
            if self._closing or chunk.released:
                return offsets[:0]
            offsets = offsets[chunk.part[offsets] == MISSING]
            loads = Counter(read.worker.id for read in self._reads)
        if not len(offsets) or loads.total() >= 2 * self._pool.size:
            return offsets
        cuts, waiting = self._cut(chunk, offsets)
        self.wants_grants |= len(waiting) > 0
        # a worker that hangs must leave threads to the others
        most = 2 * self._pool.size if self.workers() < 2 else max(1, self._pool.size * 3 // 4)
        rest = [waiting]
        for one in cuts:
            if loads[one.worker.id] >= most:
                rest.append(one.offsets)
                continue
            loads[one.worker.id] += 1
            self._submit(chunk, one)
        return np.sort(np.concatenate(rest)) if len(rest) > 1 else waiting

    def _cut(self, chunk: Chunk, offsets: I64, without: str = "") -> tuple[list[Cut], I64]:
        shards = chunk.shards[offsets]
        size = self.row_size()
        sources = {}
        for shard, held in self._keeper.held(np.unique(shards).tolist()).items():
            workers = [w for w in self._avoided.usable(held.workers, shard) if w.id != without]
            if not workers:
                continue
            stretch = self._stretch(shard, size)
            if stretch:
                workers.sort(key=lambda w: w.id)
            sources[shard] = Source(tuple(workers), held.signed, stretch, self._trouble.is_suspect(shard))
        return cut(offsets, shards, chunk.rows[offsets], sources, int(max(1, READ_BYTES // max(1.0, size))))

    def _stretch(self, shard: int, size: float) -> int:
        """Rows of a stretch of this shard, always the same; 0: it is not big, or that is not known yet."""
        if shard not in self._stretches and self.row_size_known:
            if len(self._stretches) > 4096:
                self._stretches.clear()
            self._stretches[shard] = stretch_rows(self._shard_rows(shard), size)
        return self._stretches.get(shard, 0)

    def _submit(self, chunk: Chunk, one: Cut, hedge: bool = False) -> None:
        read = Read(
            one.worker,
            one.grants,
            one.offsets,
            one.which,
            chunk.rows[one.offsets],
            on_part=lambda r, batch, before, part: self._part(chunk, r, batch, before, part),
            on_end=lambda r, error: self._end(chunk, r, error),
        )
        read.hedged = hedge
        with self._lock:
            if self._closing:
                return
            self._reads[read] = chunk
        self._pool.submit(lambda: read.run(self._pool), at_once=hedge)

    def _mark_quarantined(self, chunks: Sequence[Chunk]) -> None:
        for shard, error in tuple(self._keeper.quarantined.items()):
            for chunk in chunks:
                if chunk.missing and (marked := chunk.quarantine(shard, error)):
                    self.unusable += marked
                    self.progress = time.monotonic()

    # -- what reads bring (threads of the pool)

    def _part(self, chunk: Chunk, read: Read, batch: pa.RecordBatch, before: int, part: m.ReadPart) -> None:
        offsets = read.offsets[before : part.done]
        bad = [(int(read.offsets[b.position]), b) for b in part.bad]
        view: Part = view_part(batch, self._fields)
        if len(view.ids) + len(bad) != len(offsets):
            raise ProtocolError(
                f"worker {read.worker.id} sent {len(view.ids)} rows and {len(bad)} bad of {len(offsets)}"
            )
        good = offsets if not bad else offsets[~np.isin(offsets, [offset for offset, _ in bad])]
        if not np.array_equal(view.ids, chunk.ids[good]):
            raise ProtocolError(f"worker {read.worker.id} sent other rows than were asked for")
        with self._lock:
            before_bad = len(chunk.bad)
            filled = chunk.fill(offsets, view, bad)
            self.unusable += len(chunk.bad) - before_bad  # not again when a read that moved brings them twice
            self._learn(view)
            self._budget.rows += len(offsets)
            self._budget.hot_rows += part.hot
            now = time.monotonic()
            self._seen[read.worker.id] = now
            if filled:
                self.progress = now
            beaten = self._beaten(chunk, read) if read.hedged else []
            self._lock.notify_all()
        for other in beaten:
            other.abandon(self._pool)

    def _beaten(self, chunk: Chunk, read: Read) -> list[Read]:
        """Reads beside ``read`` all of whose rows are there; they count as ended."""
        others = [r for r, c in self._reads.items() if c is chunk and r.hedged and r is not read]
        beaten = [r for r in others if not (chunk.part[r.offsets[r.done :]] == MISSING).any()]
        for other in beaten:
            if other.moved < read.started:  # it was given a head start
                self._avoided.slow(other.worker.id)
                self._mute.setdefault(other.worker.id, other.last_sign or other.moved)
            self._ended(other)
        return beaten

    def _learn(self, view: Part) -> None:
        if len(view.ids):
            size = view.nbytes / len(view.ids)
            known = self._budget.row_bytes
            self._budget.row_bytes = size if known is None else 0.8 * known + 0.2 * size

    def _ended(self, read: Read, whole: bool = False) -> bool:
        """The read is over. False: it was already."""
        if self._reads.pop(read, None) is None:
            return False
        if whole and not read.hedged:
            self._avoided.well(read.worker.id)
        if read.started:
            self._budget.speeds.note(read.worker.id, read.size, time.monotonic() - read.started, whole=whole)
        return True

    def _end(self, chunk: Chunk, read: Read, error: Exception | None) -> None:
        with self._lock:
            first = self._ended(read, whole=error is None)
            over = not first or self._closing or read.abandoned
            rest = self._uncovered(chunk, read.offsets[read.done :])
        if error is not None and not over:
            self._failed(chunk, read, rest, error)
        with self._lock:
            self._news()

    def _uncovered(self, chunk: Chunk, offsets: I64) -> I64:
        """Those of the rows that are not there and that no read brings."""
        offsets = offsets[chunk.part[offsets] == MISSING]
        for read, of in self._reads.items():
            if of is chunk and read.hedged and not read.abandoned:
                offsets = np.setdiff1d(offsets, read.offsets[read.done :], assume_unique=True)
        return offsets

    # -- what goes wrong

    def _failed(self, chunk: Chunk, read: Read, rest: I64, error: Exception) -> None:
        shards = np.unique(chunk.shards[read.offsets[read.done :]]).tolist()
        lost = self._trouble.failed(read.worker.id, shards, error)
        with self._lock:
            if lost:
                chunk.fail(rest[np.isin(chunk.shards[rest], list(lost))], error)
            rest = rest[chunk.part[rest] == MISSING]
            if len(rest) and not chunk.released and not self._closing:
                self._pending.append((chunk, rest))
            self._lock.notify_all()

    def _check_silence(self) -> None:
        """Move reads that have shown no sign of life for the stall time. A worker whose reads were given up before
        that time, because others were faster, counts as silent from the first of them on."""
        now = time.monotonic()
        with self._lock:
            for worker, since in tuple(self._mute.items()):
                if self._pool.heard_at(worker) > since:
                    del self._mute[worker]
            silent = []
            for read in self._reads:
                if not read.last_sign or read.abandoned:
                    continue
                since = self._mute.get(read.worker.id, read.last_sign)
                if now - min(read.last_sign, since) > self._stall and now - read.last_sign > _SLOW:
                    silent.append(read)
        gone: dict[str, float] = {}
        for read in silent:
            seconds = now - min(read.last_sign, self._mute.get(read.worker.id, read.last_sign))
            read.abandon(self._pool)
            with self._lock:
                self._mute.pop(read.worker.id, None)
                chunk = self._reads.get(read)
                if chunk is not None and self._ended(read):
                    rest = self._uncovered(chunk, read.offsets[read.done :])
                    if len(rest):
                        self._pending.append((chunk, rest))
            gone.setdefault(read.worker.id, seconds)
        for worker, seconds in gone.items():
            self._trouble.silent(worker, seconds)
