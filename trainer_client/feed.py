"""The rows of one epoch on their way to the loop: planned ahead in order, read from any worker, kept until taken.

The planner thread cuts the read stream into chunks as the prefetch budget allows, and each chunk into reads by worker.
A read that fails or goes silent gives its remaining rows back to the planner, which issues them elsewhere; nothing else
is thrown away, and the order never changes because every row has its place in its chunk from the start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from manifests.errors import (
    AccessDenied,
    ConfigError,
    DispatcherUnavailable,
    FeedlineError,
    NoWorker,
    ProtocolError,
    RankAbsent,
    ShardChanged,
    ShardMissing,
    WaitTimeout,
)
from manifests.schema import Field
from manifests.wire import messages as m
from manifests.wire.flight import PeerSilent

from .budget import Budget, FeedStats
from .chunks import MISSING, Chunk
from .control import Closed, Control
from .grants import ASK, GrantKeeper, Held
from .lookahead import LookAhead
from .reads import Read, ReadPool
from .session import Leg
from .tensors import Part, view_part

log = logging.getLogger("feedline.client")
I64 = npt.NDArray[np.int64]

#: bytes one read should bring
READ_BYTES = 8 << 20
_FIRST_BYTES = 1 << 20
#: seconds a worker is left alone after it refused or broke a connection / went silent
_AVOID_REFUSED, _AVOID_SILENT = 3.0, 15.0
_TRIES = 4


class Feed:
    """Rows of one leg.

    Args:
        leg: what to hand out. fields: output columns. control: the dispatcher. pool: read threads.
        budget: shared byte budget; its lock is this feed's lock.
        stall: seconds of silence after which a read moves. timeout: seconds without any row after which waiting ends.
        fatal: called with an error that ends the loader (``Fenced`` and the like).
    """

    def __init__(
        self,
        leg: Leg,
        *,
        epoch: int,
        fields: Sequence[Field],
        control: Control,
        pool: ReadPool,
        budget: Budget,
        job: str,
        generation: int,
        holder: str,
        stall: float,
        timeout: float,
        fatal: Callable[[FeedlineError], None],
    ) -> None:
        self.leg = leg
        self.epoch = epoch
        self._fields = list(fields)
        sizes = [field.row_bytes() for field in fields]
        #: bytes of one row's fixed-shape columns and its id, and whether that is all of it
        self._fixed = sum(size or 0 for size in sizes) + 8
        self._all_fixed = None not in sizes
        self._control = control
        self._pool = pool
        self._budget = budget
        self._lock = budget.lock
        self._stall, self._timeout = stall, timeout
        self._fatal = fatal
        self._chunks: deque[Chunk] = deque()
        self._planned = 0
        self._bad = 0
        self._retry: deque[tuple[Chunk, I64]] = deque()
        self._reads: dict[Read, Chunk] = {}
        self._starving = False
        self._closing = False
        self._grow = _FIRST_BYTES
        self._progress = time.monotonic()
        self._waits_since = 0.0
        self._ahead = LookAhead(leg)
        self._last_wanted: list[int] = []
        self._workers: dict[str, float] = {}
        self._quiet: dict[str, float] = {}
        self._blocked = ""
        self._keeper = GrantKeeper(
            control,
            job=job,
            generation=generation,
            rank=leg.rank,
            holder=holder,
            epoch=epoch,
            timeout=timeout,
            changed=self._notify,
            failed=fatal,
        )
        self._thread = threading.Thread(target=self._run, name=f"feedline-plan-{epoch}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return (
            f"Feed(epoch {self.epoch}, {len(self._chunks)} chunks, {len(self._reads)} reads, planned {self._planned})"
        )

    # -- the loop's side

    @property
    def planned_all(self) -> bool:
        """Every row of the leg is planned, as far as is known of bad ones."""
        return self._planned >= self._needed()

    def status(self, first: int, count: int) -> npt.NDArray[np.int32]:
        """Marks of the rows ``first ..`` of the read stream that are planned, at most ``count``, cut at the first one
        that is not there yet: a part number, BAD or FAILED. int32 [<= count]."""
        with self._lock:
            marks = [
                c.part[max(0, first - c.first) :] for c in self._chunks if c.end > first and c.first < first + count
            ]
            marks = [part.copy() for part in marks]
        known = np.concatenate(marks)[:count] if marks else np.empty(0, np.int32)
        missing = np.flatnonzero(known == MISSING)
        return known[: missing[0]] if len(missing) else known

    def wait(self, first: int, known: int, fatal: Callable[[], FeedlineError | None]) -> None:
        """Wait until more than ``known`` rows from ``first`` on are there.

        Raises:
            FeedlineError: the loader cannot go on, or nothing came for ``timeout`` seconds (named).
            Closed: the feed was closed meanwhile.
        """
        with self._lock:
            while True:
                if self._closing:
                    raise Closed
                error = fatal()
                if error is not None:
                    raise error
                if len(self.status(first, known + 1)) > known:
                    self._starving = False
                    return
                idle = time.monotonic() - max(self._progress, self._waits_since)
                if idle >= self._timeout:
                    raise self._timed_out(idle)
                if not self._starving:
                    self._starving = True
                    self._lock.notify_all()
                self._lock.wait(min(1.0, self._timeout - idle))

    def begin_wait(self) -> None:
        """The loop starts to wait: a pause of the loop itself does not count against the deadline."""
        self._waits_since = time.monotonic()

    def chunk_at(self, place: int) -> Chunk:
        """The chunk that holds this place of the read stream."""
        with self._lock:
            for chunk in self._chunks:
                if chunk.first <= place < chunk.end:
                    return chunk
            if self._closing:
                raise Closed
        raise LookupError(f"place {place} is not planned")

    def release(self, place: int) -> None:
        """Rows before ``place`` are not needed any more."""
        with self._lock:
            while self._chunks and self._chunks[0].end <= place:
                self._budget.used -= self._chunks.popleft().reserved
            self._lock.notify_all()

    def reason(self) -> str:
        """Why rows are missing right now, for people."""
        trouble = self._control.trouble
        if trouble:
            return f"dispatcher: {trouble}"
        if self._keeper.waiting:
            return self._keeper.waiting
        reads = [r for r in tuple(self._reads) if r.last_sign]
        if reads:
            oldest = min(reads, key=lambda r: r.last_sign)
            return f"worker {oldest.worker.id}: no sign for {time.monotonic() - oldest.last_sign:.1f} s"
        return self._blocked or "rows on their way"

    def stats(self) -> FeedStats:
        """Bytes and reads on their way, and workers that served lately."""
        now = time.monotonic()
        with self._lock:
            fresh = sum(1 for seen in self._workers.values() if now - seen < 10)
            return FeedStats(sum(c.reserved for c in self._chunks), len(self._reads), fresh)

    def close(self) -> None:
        """Cancel what is under way and give the budget back."""
        with self._lock:
            self._closing = True
            reads = tuple(self._reads)
            self._budget.used -= sum(c.reserved for c in self._chunks)
            self._chunks.clear()
            self._lock.notify_all()
        self._keeper.close()
        for read in reads:
            read.abandon(self._pool)

    def join(self, timeout: float) -> None:
        """Wait for the threads to end."""
        self._thread.join(timeout)
        self._keeper.join(timeout)

    def _timed_out(self, idle: float) -> FeedlineError:
        where = f"rank {self.leg.rank} waited {idle:.1f} s for rows of epoch {self.epoch}"
        if self._control.trouble:
            return DispatcherUnavailable(where, cause=self._control.trouble)
        code = self._keeper.waiting_code
        kind = NoWorker if code == "no-worker" else RankAbsent if code == "rank-absent" else WaitTimeout
        return kind(where, cause=self.reason(), remedy="`feedline status` shows workers and ranks")

    # -- planning (own thread)

    def _needed(self) -> int:
        if self.leg.tail == "ragged":
            return self.leg.candidates
        return self.leg.quota + self._bad

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception as error:
            log.exception("planning reads failed")
            self._fatal(
                error if isinstance(error, FeedlineError) else ProtocolError("planning failed", cause=str(error))
            )

    def _step(self) -> bool:
        """One round: retries first, then silence, then new rows. False: closed."""
        with self._lock:
            if self._closing:
                return False
            retry = self._retry.popleft() if self._retry else None
        self._check_silence()
        if retry is not None:
            if not self._issue(*retry):
                with self._lock:
                    self._retry.appendleft(retry)
                    self._lock.wait(0.05)
            return True
        chunk = self._next_chunk()
        if chunk is None:
            with self._lock:
                if not self._closing and not self._retry:
                    self._lock.wait(0.25)
            return True
        offsets = np.arange(len(chunk), dtype=np.int64)
        with self._lock:
            self._retry.append((chunk, offsets))
        return True

    def _next_chunk(self) -> Chunk | None:
        with self._lock:
            wanted = self._needed() - self._planned
            if wanted <= 0:
                return None
            size = self._row_size()
            free = self._budget.limit - self._budget.used
            target = min(self._grow, max(self._budget.limit // 4, 1))
            unfilled = any((c.part == MISSING).any() for c in self._chunks)
            forced = self._starving and not unfilled and not self._retry
            if free < target and self._budget.used > 0 and not forced:
                return None
            count = int(max(1, min(wanted, target // max(size, 1))))
            if self._budget.row_bytes is None and not self._all_fixed:
                count = min(count, 64)
            self._grow = min(self._grow * 2, READ_BYTES * max(1, min(4, len(self._workers))))
        shards, rows = self._ahead.take(count, self._needed())
        chunk = Chunk(self._planned, shards, rows, self.leg.plan.ids(shards, rows), int(len(rows) * size))
        self._want(chunk)
        with self._lock:
            if self._closing:
                return None
            self._chunks.append(chunk)
            self._planned = chunk.end
            self._budget.used += chunk.reserved
        return chunk

    def _row_size(self) -> float:
        return self._fixed if self._all_fixed else max(self._fixed, self._budget.row_bytes or 64 << 10)

    def _want(self, chunk: Chunk | None = None) -> None:
        """Tell the keeper which shards are needed: by rows not there yet, then by the rows that come."""
        with self._lock:
            open_chunks = [c.shards[c.part == MISSING] for c in self._chunks]
        parts = [*open_chunks, *([chunk.shards] if chunk is not None else []), *self._ahead.shards()]
        if not parts:
            return
        shards = np.concatenate(parts)
        _, first = np.unique(shards, return_index=True)
        wanted = shards[np.sort(first)][:ASK].tolist()
        if wanted != self._last_wanted:
            self._last_wanted = wanted
            self._keeper.want(wanted)

    # -- reads

    def _issue(self, chunk: Chunk, offsets: I64) -> bool:
        """Cut these rows into reads by worker and submit them. False: no room or no grant yet for any of them."""
        with self._lock:
            if self._closing or chunk not in self._chunks:
                return True
            offsets = offsets[chunk.part[offsets] == MISSING]
            if len(self._reads) >= 2 * self._pool.size:
                self._blocked = f"{len(self._reads)} reads in flight"
                return False
        if not len(offsets):
            return True
        avoided = self._keeper.avoided()
        by_worker: dict[str, tuple[m.WorkerRef, list[Held]]] = {}
        waiting = []
        shards = chunk.shards[offsets]
        for shard in np.unique(shards).tolist():
            held = self._keeper.held(shard)
            worker = next((w for w in held.workers if w.id not in avoided), None) if held is not None else None
            if held is None or worker is None:
                waiting.append(shard)
                continue
            by_worker.setdefault(worker.id, (worker, []))[1].append(held)
        if waiting:
            self._last_wanted = []
            self._want()
            if not by_worker:
                self._blocked = f"a grant for shard {waiting[0]}"
                return False
            with self._lock:
                self._retry.append((chunk, offsets[np.isin(shards, waiting)]))
        rows = int(max(1, READ_BYTES // max(1.0, self._row_size())))
        for worker, grants in by_worker.values():
            numbers = np.array([g.shard for g in grants], np.int64)
            mine = offsets[np.isin(shards, numbers)]
            order = np.argsort(numbers)
            which = order[np.searchsorted(numbers[order], chunk.shards[mine])]
            signed = tuple(g.signed for g in grants)
            for at in range(0, len(mine), rows):
                self._submit(chunk, worker, signed, mine[at : at + rows], which[at : at + rows])
        return True

    def _submit(self, chunk: Chunk, worker: m.WorkerRef, grants: tuple[bytes, ...], offsets: I64, which: I64) -> None:
        used = np.unique(which)
        read = Read(
            worker,
            tuple(grants[i] for i in used.tolist()),
            offsets,
            np.searchsorted(used, which),
            chunk.rows[offsets],
            on_part=lambda r, batch, before, part: self._part(chunk, r, batch, before, part),
            on_end=lambda r, error: self._end(chunk, r, error),
        )
        with self._lock:
            if self._closing:
                return
            self._reads[read] = chunk
        self._pool.submit(lambda: read.run(self._pool))

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
            self._bad += len(chunk.bad) - before_bad  # not again when a read that moved brings them twice
            self._learn(view)
            self._budget.rows += len(offsets)
            self._budget.hot_rows += part.hot
            now = time.monotonic()
            self._workers[read.worker.id] = now
            if filled:
                self._progress = now
            self._lock.notify_all()

    def _learn(self, view: Part) -> None:
        if len(view.ids):
            size = view.nbytes / len(view.ids)
            known = self._budget.row_bytes
            self._budget.row_bytes = size if known is None else 0.8 * known + 0.2 * size

    def _end(self, chunk: Chunk, read: Read, error: Exception | None) -> None:
        with self._lock:
            self._reads.pop(read, None)
            if self._closing or read.abandoned:
                self._lock.notify_all()
                return
        if error is not None:
            rest = read.offsets[read.done :]
            self._failed(chunk, read, rest, error)
        self._notify()

    def _failed(self, chunk: Chunk, read: Read, rest: I64, error: Exception) -> None:
        shard = int(chunk.shards[rest[0]]) if len(rest) else -1
        code = error.code if isinstance(error, FeedlineError) else "unreachable"
        failure = m.ReadFailure(worker=read.worker.id, source=0, shard=shard, code=code, message=str(error)[:300])
        first = self._quiet.get(read.worker.id, 0.0) < time.monotonic()
        self._quiet[read.worker.id] = time.monotonic() + 10.0  # one line per worker and outage, not per read
        level = logging.WARNING if first else logging.DEBUG
        log.log(level, "read of %d rows from worker %s failed: %s", len(rest), read.worker.id, str(error))
        with self._lock:
            chunk.tries += isinstance(error, FeedlineError)
            final = isinstance(error, (ConfigError, ShardChanged, ShardMissing)) or chunk.tries >= _TRIES
        if isinstance(error, AccessDenied) and not final:
            for number in np.unique(chunk.shards[rest]).tolist():
                self._keeper.drop(number)
        elif not final or not isinstance(error, FeedlineError):
            silent = isinstance(error, PeerSilent)
            self._keeper.avoid(read.worker.id, _AVOID_SILENT if silent else _AVOID_REFUSED, failure)
        with self._lock:
            if final and isinstance(error, FeedlineError):
                chunk.fail(rest, error)
            else:
                self._retry.append((chunk, rest))
            self._lock.notify_all()

    def _check_silence(self) -> None:
        """Move reads that have shown no sign of life for the stall time."""
        now = time.monotonic()
        with self._lock:
            silent = [r for r in self._reads if r.last_sign and not r.abandoned and now - r.last_sign > self._stall]
        for read in silent:
            seconds = now - read.last_sign
            log.warning("worker %s is silent for %.1f s; its read moves", read.worker.id, seconds)
            read.abandon(self._pool)
            with self._lock:
                chunk = self._reads.pop(read, None)
                if chunk is not None:
                    self._retry.append((chunk, read.offsets[read.done :]))
            failure = m.ReadFailure(
                worker=read.worker.id, source=0, shard=-1, code="silent", message=f"{seconds:.1f} s"
            )
            self._keeper.avoid(read.worker.id, _AVOID_SILENT, failure)

    def _notify(self) -> None:
        with self._lock:
            self._lock.notify_all()
