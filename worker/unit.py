"""One unit of a read: some rows from stored bytes to record batches of a size that travels well.

    fetch + parse (I/O threads) -> rows of pictures (decode threads) -> encode -> ready to be sent

A unit belongs to one read. Its reservation covers stored and output bytes from before it starts until it was sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from manifests.wire.messages import BadRow, Grant, ReadPart

from . import columns
from .formats import StoredRows
from .memory import Reservation
from .pipeline import Made, Work
from .pool import Lane
from .shards import OpenShard, Shards, fetched_here
from .specs import Spec

I64 = npt.NDArray[np.int64]

#: a message is cut until it is no larger, unless it is one row, bytes
MESSAGE = 2_500_000
#: a row larger than this cannot be sent, bytes
LARGEST_ROW = 60 << 20


@dataclass
class Times:
    """Microseconds per stage."""

    us: dict[str, int] = field(default_factory=dict)

    def add(self, stage: str, began_ns: int, less_ns: int = 0) -> None:
        """The time since ``began_ns`` (perf_counter_ns) counts for ``stage``."""
        spent = (time.perf_counter_ns() - began_ns - less_ns) // 1000
        self.us[stage] = self.us.get(stage, 0) + max(0, spent)


class Unit:
    """Rows ``[start, start + len(rows))`` of a read, all of one dataset, epoch and seed."""

    def __init__(
        self,
        start: int,
        grants: Sequence[Grant],
        which: I64,
        rows: I64,
        ids: I64,
        spec: Spec,
        shards: Shards,
        decode: Lane,
        reservation: Reservation,
        first: bool,
    ) -> None:
        self.start = start
        self.end = start + len(rows)
        self._grants, self._which, self._rows, self._ids = grants, which, rows, ids
        self._spec = spec
        self._shards = shards
        self._decode = decode
        self.reservation = reservation
        self._first = first
        self._lock = threading.Lock()
        self._left = 0
        self._dropped = False
        self._running = False
        self._keys: list[str] = []
        self.times = Times()
        self._hot = False
        #: set when ``parts`` or ``error`` is there
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.parts: list[tuple[pa.RecordBatch, ReadPart]] = []

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.done.is_set() else "under way"
        return f"Unit(rows {self.start} to {self.end}, {state})"

    def drop(self) -> None:
        """Nobody wants it any more: stop soon and give the memory back."""
        with self._lock:
            self._dropped = True
            idle = not self._running
        if idle:
            self._free()

    def fetch(self) -> None:
        """Read and parse the stored rows; a task of an I/O thread."""
        if not self._begin():
            return
        try:
            work = self._parse()
            self._left = len(work.rows)
            if work.rows:
                self._decode.submit(*[self._row_task(work, position) for position in work.rows])
            else:
                self._finish(work)
        except BaseException as error:
            self._fail(error)
        finally:
            self._pause()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        with self._lock:
            self._running = not self._dropped
            return self._running

    def _pause(self) -> None:
        with self._lock:
            self._running = False
            gone = self._dropped
        if gone:
            self._free()

    def _free(self) -> None:
        self.parts = []
        self.reservation.release()

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self.done.set()

    def _parse(self) -> Work:
        began, waited, fetched = time.perf_counter_ns(), 0, fetched_here()
        groups: list[tuple[I64, StoredRows]] = []
        readers: dict[int, tuple[OpenShard, I64]] = {}
        for number in dict.fromkeys(self._which.tolist()):
            grant = self._grants[number]
            opening = time.perf_counter_ns()
            shard = self._shards.open(grant, lambda: self._dropped)
            waited += time.perf_counter_ns() - opening
            positions = np.flatnonzero(self._which == number)
            source = shard.reader(self._first)
            stored = shard.format.read_rows(
                shard.index, source, self._rows[positions], self._spec.executor.needs, self._spec.labels
            )
            waited += source.fetch_ns
            readers[number] = shard, positions
            groups.append((positions, stored))
        stored = _merged(groups, len(self._rows))
        self._hot = fetched_here() == fetched
        self._keys = stored.keys
        first = self._grants[int(self._which[0])]
        work = self._spec.executor.start(
            stored, self._ids, first.seed, first.epoch, lambda position: self._present(readers, position)
        )
        self.times.us["fetch"] = waited // 1000
        self.times.add("parse", began, waited)
        return work

    def _present(self, readers: dict[int, tuple[OpenShard, I64]], position: int) -> list[str]:
        """Names of the stored fields that the row at ``position`` has, whether the pipeline needs them or not."""
        shard, _ = readers[int(self._which[position])]
        stored = shard.format.read_rows(
            shard.index, shard.reader(True), self._rows[position : position + 1], self._spec.fields, self._spec.labels
        )
        return [name for name, column in stored.columns.items() if column[0].is_valid]

    def _row_task(self, work: Work, position: int) -> Callable[[], None]:
        def task() -> None:
            began = time.perf_counter_ns()
            try:
                if not self._dropped and self.error is None:
                    work.row(position)
            except BaseException as error:
                self._fail(error)
            with self._lock:
                self.times.add("decode", began)
                self._left -= 1
                last = not self._left
            if last and self.error is None and self._begin():
                try:
                    self._finish(work)
                except BaseException as error:
                    self._fail(error)
                finally:
                    self._pause()

        return task

    def _finish(self, work: Work) -> None:
        began = time.perf_counter_ns()
        made = work.finish()
        batches = split(made.batch)
        at = 0
        for batch in batches:
            if batch.nbytes > LARGEST_ROW:
                made.bad[int(made.kept[at])] = f"row of {batch.nbytes} bytes: more than {LARGEST_ROW} cannot be sent"
            at += batch.num_rows
        size = sum(batch.nbytes for batch in batches)
        self._spec.learn(made.batch.num_rows, size)
        self.reservation.resize(max(1, size))
        self.times.add("encode", began)
        self.parts = self._messages(made, batches)
        self.done.set()

    def _messages(self, made: Made, batches: list[pa.RecordBatch]) -> list[tuple[pa.RecordBatch, ReadPart]]:
        """Each batch with the bad rows up to it; the last one ends the unit."""
        bad = sorted(made.bad)
        parts: list[tuple[pa.RecordBatch, ReadPart]] = []
        row = told = 0
        for batch in batches:
            row += batch.num_rows
            last = row == made.batch.num_rows
            upto = len(self._rows) if last else int(made.kept[row - 1]) + 1
            news = []
            while told < len(bad) and bad[told] < upto:
                news.append(self._bad_row(bad[told], made.bad[bad[told]]))
                told += 1
            sent = batch if batch.nbytes <= LARGEST_ROW else batch.slice(0, 0)
            stages = self.times.us if last else {}
            hot = len(self._rows) if last and self._hot else 0
            parts.append((sent, ReadPart(done=self.start + upto, bad=tuple(news), stage_us=stages, hot=hot)))
        return parts

    def _bad_row(self, position: int, reason: str) -> BadRow:
        return BadRow(
            position=self.start + position,
            sample_id=int(self._ids[position]),
            key=self._keys[position],
            shard=self._grants[int(self._which[position])].uri,
            reason=reason,
        )


def split(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """``batch`` in parts of at most ``MESSAGE`` bytes or one row each (itself when it has no rows)."""
    if batch.nbytes <= MESSAGE or batch.num_rows <= 1:
        return [batch]
    half = batch.num_rows // 2
    return split(batch.slice(0, half)) + split(batch.slice(half))


def _merged(groups: list[tuple[I64, StoredRows]], rows: int) -> StoredRows:
    """Rows of several shards in the order asked for."""
    if len(groups) == 1:
        return groups[0][1]
    positions = np.concatenate([group for group, _ in groups])
    order = np.argsort(positions, kind="stable")
    straight = bool((order == np.arange(rows)).all())
    keys: list[str] = [""] * rows
    bad: dict[int, str] = {}
    for group, stored in groups:
        for position, key in zip(group.tolist(), stored.keys):
            keys[position] = key
        for local, reason in stored.bad.items():
            bad[int(group[local])] = reason
    merged: dict[str, pa.Array] = {}
    for name in groups[0][1].columns:
        whole = pa.concat_arrays([stored.columns[name] for _, stored in groups])
        merged[name] = whole if straight else columns.keep(whole, order)
    return StoredRows(merged, keys, bad)
