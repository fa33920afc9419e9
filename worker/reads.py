"""Reads: a ticket in, record batches in exactly the order asked for out.

The thread of the Flight call drives its read: it keeps a few units ahead of what it sends (bounded in bytes, see
``memory``), waits for the next one, and hands its messages over. I/O and decode threads are shared by all reads, a task
of each in turn. While nothing is ready for a second it sends a batch of no rows as a sign of life.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from manifests import log as logs
from manifests.errors import FeedlineError, NoWorker, ProtocolError
from manifests.wire.messages import Grant, ReadPart

from .memory import Budget
from .pool import FairPool
from .shards import Shards
from .specs import Spec, Specs
from .tickets import Authority, Plan, open_ticket
from .unit import Unit

log = logging.getLogger("worker.reads")

#: output of one unit, bytes: a message of one to two megabytes travels best
UNIT = 1_500_000
#: units of one read under way or waiting to be sent
UNITS_AHEAD = 6
#: bytes of one read under way or waiting to be sent, whatever the memory
BYTES_AHEAD = 16 << 20
#: rows of one unit
UNIT_ROWS = 1 << 16
#: seconds without progress after which a sign of life is sent
LIFE_SIGN = 1.0
#: seconds between looks whether the client is still there
_LOOK = 0.05

Part = tuple[pa.RecordBatch, ReadPart]


@dataclass(frozen=True, slots=True)
class ReadStats:
    """Totals since the worker started, and reads under way now."""

    active: int
    reads: int
    rows: int
    bytes: int
    stage_us: dict[str, int]


class Reads:
    """All reads of one worker."""

    def __init__(
        self,
        worker: str,
        authority: Authority,
        specs: Specs,
        shards: Shards,
        budget: Budget,
        io: FairPool,
        decode: FairPool,
    ) -> None:
        self._worker = worker
        self._authority = authority
        self._specs = specs
        self._shards = shards
        self._budget = budget
        self._io = io
        self._decode = decode
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._active: set[_Read] = set()
        self._refused = ""
        self._reads = self._rows = self._bytes = 0
        self._stage_us: dict[str, int] = {}

    def __repr__(self) -> str:
        s = self.stats()
        return f"Reads({s.active} active, {s.reads} done, {s.rows} rows)"

    def stats(self) -> ReadStats:
        """The totals now."""
        with self._lock:
            return ReadStats(len(self._active), self._reads, self._rows, self._bytes, dict(self._stage_us))

    def open(self, ticket: bytes, cancelled: Callable[[], bool]) -> tuple[pa.Schema, Iterator[Part]]:
        """Schema and parts of the read that ``ticket`` asks for.

        Raises:
            AccessDenied, ProtocolError, ConfigError: see ``open_ticket`` and ``Specs.get``.
            NoWorker: this worker is draining.
        """
        with self._lock:
            if self._refused:
                raise NoWorker(
                    f"worker {self._worker} takes no reads", cause=self._refused, remedy="read from another worker"
                )
        plan = open_ticket(ticket, self._worker, self._authority)
        specs = [self._specs.get(grant.spec, grant.source) for grant in plan.grants]
        schema = specs[0].executor.schema
        if any(spec.executor.schema != schema for spec in specs):
            raise ProtocolError("ticket over datasets whose batches differ", remedy="read each dataset by itself")
        read = _Read(self, plan, specs, cancelled)
        return schema, read.parts()

    def refuse(self, why: str) -> None:
        """Take no new reads from now on."""
        with self._lock:
            self._refused = why

    def wait_idle(self, timeout: float) -> bool:
        """Wait until no read is under way; False after ``timeout`` seconds."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._active, timeout)

    def abort(self, why: str) -> None:
        """End the reads that are under way with ``NoWorker``."""
        with self._lock:
            for read in self._active:
                read.aborted = why

    def _began(self, read: _Read) -> None:
        with self._lock:
            self._active.add(read)

    def _ended(self, read: _Read) -> None:
        with self._idle:
            self._active.discard(read)
            self._reads += 1
            self._idle.notify_all()

    def _sent(self, batch: pa.RecordBatch, stage_us: dict[str, int]) -> None:
        with self._lock:
            self._rows += batch.num_rows
            self._bytes += batch.nbytes
            for stage, us in stage_us.items():
                self._stage_us[stage] = self._stage_us.get(stage, 0) + us


class _Read:
    """One read; used by the one thread that sends it."""

    def __init__(self, reads: Reads, plan: Plan, specs: list[Spec], cancelled: Callable[[], bool]) -> None:
        self._reads = reads
        self._plan = plan
        self._specs = specs
        self._cancelled = cancelled
        self._next = 0
        self._units: deque[Unit] = deque()
        self._breaks = _breaks(plan)
        self._io = reads._io.lane(limit=2)
        self._decode = reads._decode.lane()
        self._most = min(BYTES_AHEAD, reads._budget.limit("queue") // 2)
        self.aborted = ""

    def __repr__(self) -> str:
        return f"_Read({self._next} of {len(self._plan.rows)} rows begun, {len(self._units)} units)"

    def parts(self) -> Iterator[Part]:
        """The messages. Closing the generator ends the read and gives its memory back."""
        self._log(logging.DEBUG, "begins")
        self._reads._began(self)
        send_us = 0
        try:
            if not len(self._plan.rows):
                return
            while self._units or self._next < len(self._plan.rows):
                self._submit()
                unit = self._units[0]
                yield from self._signs_of_life(unit)
                if unit.error is not None:
                    raise self._worded(unit.error)
                for batch, part in unit.parts:
                    stage_us = {**part.stage_us, "send": send_us} if part.stage_us else {}
                    began = time.perf_counter_ns()
                    yield batch, ReadPart(done=part.done, bad=part.bad, stage_us=stage_us, hot=part.hot)
                    send_us = (time.perf_counter_ns() - began) // 1000
                    self._reads._sent(batch, stage_us)
                self._units.popleft()
                unit.drop()
        finally:
            self._close()

    def _signs_of_life(self, unit: Unit) -> Iterator[Part]:
        last = time.monotonic()
        while not unit.done.wait(_LOOK):
            if self.aborted:
                raise NoWorker(f"worker {self._reads._worker} ended this read", cause=self.aborted)
            if self._cancelled():
                raise FeedlineError("read cancelled by its client")
            if time.monotonic() - last >= LIFE_SIGN:
                last = time.monotonic()
                yield _empty(self._specs[0].executor.schema), ReadPart(done=unit.start)
        if self.aborted:
            raise NoWorker(f"worker {self._reads._worker} ended this read", cause=self.aborted)
        if self._cancelled():
            raise FeedlineError("read cancelled by its client")

    def _submit(self) -> None:
        """Begin units as far ahead as memory allows; the one to be sent next always."""
        while self._next < len(self._plan.rows) and len(self._units) < UNITS_AHEAD:
            rows, size = self._cut()
            held = sum(unit.reservation.size for unit in self._units)
            if self._units and held + size > self._most:
                return
            first = not self._units
            if first:
                reservation = self._reads._budget.reserve(size, "queue", "a unit of a read", 0.0, first=True)
            else:
                taken = self._reads._budget.try_reserve(size, "queue")
                if taken is None:
                    return
                reservation = taken
            part = slice(self._next, self._next + rows)
            plan = self._plan
            unit = Unit(
                self._next, plan.grants, plan.which[part], plan.rows[part], plan.ids[part],
                self._specs[int(plan.which[self._next])], self._reads._shards, self._decode, reservation, first,
            )  # fmt: skip
            self._next += rows
            self._units.append(unit)
            self._io.submit(unit.fetch)

    def _cut(self) -> tuple[int, int]:
        """(rows, bytes to reserve) of the next unit."""
        number = int(self._plan.which[self._next])
        grant, spec = self._plan.grants[number], self._specs[number]
        stored = grant.bytes / max(1, grant.rows)
        known = spec.row_bytes
        # before the first rows of a pipeline with ragged output: pictures are about ten times their encoded size
        output = known if known is not None else 12 * stored + 64
        rows = int(max(1, min(UNIT // max(1.0, output), UNIT_ROWS)))
        end = int(self._breaks[np.searchsorted(self._breaks, self._next, side="right")])
        rows = min(rows, end - self._next)
        return rows, int(rows * (output + min(stored, 4 * UNIT))) + 1

    def _worded(self, error: BaseException) -> BaseException:
        known = isinstance(error, FeedlineError)
        self._log(logging.WARNING if known else logging.ERROR, f"fails: {type(error).__name__}: {error}", error)
        return error

    def _log(self, level: int, what: str, error: BaseException | None = None) -> None:
        grant = self._plan.grants[0]
        with logs.cause(self._plan.cause):
            trace = error if error is not None and not isinstance(error, FeedlineError) else None
            rows = len(self._plan.rows)
            log.log(level, "read of %d rows for job %s rank %d %s", rows, grant.job, grant.rank, what, exc_info=trace)

    def _close(self) -> None:
        self._io.close()
        self._decode.close()
        for unit in self._units:
            unit.drop()
        self._units.clear()
        self._reads._ended(self)


def _breaks(plan: Plan) -> np.ndarray:
    """Ends of runs of rows that one unit may hold: one dataset, one epoch, one seed."""
    kinds: dict[tuple[int, int, int, str], int] = {}
    numbers = [kinds.setdefault(_kind(grant), len(kinds)) for grant in plan.grants]
    kind = np.array(numbers, np.int64)[plan.which]
    return np.append(np.flatnonzero(kind[1:] != kind[:-1]) + 1, len(plan.rows))


def _kind(grant: Grant) -> tuple[int, int, int, str]:
    return grant.source, grant.epoch, grant.seed, grant.spec


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
