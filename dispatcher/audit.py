"""The audit: where did every row of an epoch go? Pure, on a snapshot of the records, so it may take its time.

The audit of an epoch follows a *line of generations* (``line.py``): from the newest that was in the epoch back along the
parents its start points name, as long as these lie inside the epoch. A start point acknowledges all rows before it and voids all after it, so of
each generation on the line only the rows up to the next start point count; what it handed out past that was *rewound*,
as was everything handed out by generations off the line. With start point s, counts per lane handed h and acknowledged
a, and next start point c:

    last of the line     acknowledged s..a, open a..n (n: rows of the lane)
    earlier ones         acknowledged s..c, rewound c..h

In an epoch that is over nothing is open: what is missing was dropped by rule (tail ``drop``), abandoned (the loop was
left early), or lost. Ids are checked with order-independent sums: the sum over the ids handed out must be that over the
plan's rows s..h without the skipped ones. If it is not, the ranks' own details tell what was lost or repeated; without
details at least one row of each.

    rows       = acknowledged + lost + skipped + dropped + abandoned + quarantined + open
    handed_out = acknowledged + repeated + rewound + handed out but not yet acknowledged or abandoned
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from manifests.errors import ConfigError
from manifests.identity import id_sum
from manifests.plan import Plan
from manifests.wire import messages as m

from . import books, line
from .job import Job
from .records import EpochRecord, GenerationRecord

I64 = npt.NDArray[np.int64]
_MASK = (1 << 64) - 1
#: rows whose ids are computed at a time
_CHUNK = 1 << 18
#: shards listed in the document
LISTED = 1000


@dataclass(frozen=True)
class Snapshot:
    """What the audit of a job needs, taken on the driver's thread: immutable records and a few facts."""

    job: str
    current: int
    generations: Mapping[int, GenerationRecord]
    books: Mapping[tuple[int, int], EpochRecord]
    newest_epoch: int
    live: bool


def snapshot(job: Job, at: float, lease: float) -> Snapshot:
    """The job as of now."""
    return Snapshot(
        job=job.name,
        current=job.record.generation,
        generations=dict(job.generations),
        books=job.all_books(),
        newest_epoch=job.newest_epoch(),
        live=job.any_live(at, lease),
    )


@dataclass
class _Sum:
    """Counters of the document."""

    acknowledged: int = 0
    handed_out: int = 0
    lost: int = 0
    repeated: int = 0
    skipped: int = 0
    dropped: int = 0
    abandoned: int = 0
    rewound: int = 0
    open: int = 0
    padded: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)


def audit(snap: Snapshot, epoch: int | None, shard_rows: Callable[[str], I64]) -> dict[str, Any]:
    """The audit document of one epoch (None: the newest entered).

    Args:
        shard_rows: manifest digest -> rows per shard, int64 [shards].

    Raises:
        ConfigError: an epoch that the job has not entered, or that the record does not reach back to.
    """
    epoch = snap.newest_epoch if epoch is None else epoch
    found = line.find(snap.generations, snap.books, snap.current, epoch)
    if found is None:
        lowest, highest = line.entered(snap.generations, snap.books, snap.current)
        if lowest <= epoch <= highest:
            raise ConfigError(f"job {snap.job} has not entered epoch {epoch}")
        raise ConfigError(f"job {snap.job} has no epoch {epoch}", cause=f"it has been in epochs {lowest} to {highest}")
    last, vouched = found.legs[-1], found.vouched
    total = _Sum()
    # the first start point of the line vouches for what lies before it
    before = int(books.start_counts(found.legs[0], epoch).sum())
    total.acknowledged += before
    total.handed_out += before
    for place, generation in enumerate(found.legs):
        book = snap.books.get((generation.number, epoch)) or books.fold(generation, epoch, {})
        leg = _Leg(generation, book, epoch, _plan(generation, epoch, shard_rows))
        if generation is last:
            leg.last(total, vouched)
        else:
            leg.earlier(total, books.start_counts(found.legs[place + 1], epoch))
    numbers = {generation.number for generation in found.legs}
    for (number, book_epoch), book in snap.books.items():
        if book_epoch == epoch and number >= found.root and number not in numbers:
            leg = _Leg(snap.generations[number], book, epoch, None)
            total.rewound += leg.handed_rows
            total.handed_out += leg.handed_rows
    last_book = snap.books.get((last.number, epoch))
    over = vouched or (last_book is not None and not last_book.unfinished)
    reading = snap.live and last.number == snap.current
    state = "complete" if over else "running" if reading else "stopped"
    return {
        "schema": 1,
        "job": snap.job,
        "generation": snap.current,
        "epoch": epoch,
        "state": state,
        "rows": last.rows,
        "handed_out": total.handed_out,
        "acknowledged": total.acknowledged,
        "lost": total.lost,
        "repeated": total.repeated,
        "skipped": total.skipped,
        "dropped": total.dropped,
        "abandoned": total.abandoned,
        "rewound": total.rewound,
        "quarantined": 0,
        "padded": total.padded,
        "open": total.open,
        "shards": total.shards[:LISTED],
    }


def _plan(generation: GenerationRecord, epoch: int, shard_rows: Callable[[str], I64]) -> Plan:
    settings = generation.settings
    return Plan(
        shard_rows(settings.sources[0].digest),
        seed=settings.seed or 0,
        epoch=epoch,
        shuffle=settings.shuffle,
        lanes=settings.lanes or 1,
    )


class _Leg:
    """Books of one generation in the epoch, per lane (all arrays int64 [lanes])."""

    def __init__(self, generation: GenerationRecord, book: EpochRecord, epoch: int, plan: Plan | None) -> None:
        self.generation = generation
        self.book = book
        self.plan = plan
        self.sizes = books.sizes_of(generation)
        self.start = books.start_counts(generation, epoch)
        self.handed = np.maximum(books.handed_counts(generation, book), self.start)
        self.acked = np.maximum(books.acked_counts(generation, book), self.start)
        self.skipped_ids = np.frombuffer(book.skipped_ids, "<i8").astype(np.int64)
        #: rows handed to loops, pads and skipped rows not counted, as the plan has it
        self.handed_rows = int((self.handed - self.start).sum()) - len(self.skipped_ids)
        self.ranks = np.arange(len(self.sizes)) % generation.settings.world_size

    def _of(self, ranks: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        return np.isin(self.ranks, ranks)

    def earlier(self, total: _Sum, cap: I64) -> None:
        """A generation that another start point in this epoch follows: only rows before ``cap`` count."""
        inside = np.clip(self.handed, self.start, np.maximum(cap, self.start))
        skipped = self._skipped_before(inside)
        past = int((self.handed - inside).sum()) - (len(self.skipped_ids) - skipped)
        gap = np.maximum(cap - inside, 0)
        total.rewound += past
        total.skipped += skipped
        total.acknowledged += int((inside - self.start).sum()) - skipped
        total.handed_out += self.handed_rows
        # the start point counts rows that no report told of: handed out, but for the end of ranks that are through
        self._missing(total, gap, vouched=True, to_end=False)
        self._check(total)

    def last(self, total: _Sum, vouched: bool) -> None:
        """The last generation of the line in this epoch. ``vouched``: a later start point lies past the epoch."""
        book = self.book
        open_lanes = self._of(book.unfinished)
        total.padded += book.padded
        total.handed_out += self.handed_rows
        if vouched:
            total.skipped += len(self.skipped_ids)
            total.acknowledged += self.handed_rows
            self._missing(total, self.sizes - self.handed, vouched=True, to_end=True)
        else:
            total.skipped += book.acked_skipped
            total.acknowledged += int((self.acked - self.start).sum()) - book.acked_skipped
            unacked = self.handed - self.acked
            total.open += int((unacked + self.sizes - self.handed)[open_lanes].sum())
            abandoned = self._of(book.abandoned)
            total.abandoned += int(unacked[abandoned].sum())
            total.acknowledged += int(unacked[~(open_lanes | abandoned)].sum())
            missing = np.where(open_lanes, 0, self.sizes - self.handed)
            self._missing(total, missing, vouched=False, to_end=True)
        self._check(total)

    def _missing(self, total: _Sum, missing: I64, *, vouched: bool, to_end: bool) -> None:
        """Sort rows that were never reported as handed out.

        Args:
            vouched: a start point says that ranks which were not through handed them out.
            to_end: up to the end of the epoch, so that part of them may be dropped by rule.
        """
        settings, book = self.generation.settings, self.book
        abandoned, unfinished = self._of(book.abandoned), self._of(book.unfinished)
        total.abandoned += int(missing[abandoned].sum())
        rest = np.where(abandoned, 0, missing)
        if vouched:
            told = np.where(unfinished, rest, 0)
            if settings.tail == "drop" and to_end:
                told = np.minimum(told, books.quota_end(settings, self.sizes, self.start) - self.handed)
            told = np.maximum(told, 0)
            total.acknowledged += int(told.sum())
            total.handed_out += int(told.sum())
            rest = rest - told
        gone = int(rest.sum())
        by_rule = 0
        if settings.steps_per_epoch is not None:
            by_rule = gone
        elif settings.tail == "drop":
            # what each rank drops by rule; ranks that acknowledged unevenly may drop more than a global batch together
            allowed = books.left_over(settings, self.sizes, self.start)
            by_rule = sum(min(int(rest[self._of((rank,))].sum()), rows) for rank, rows in enumerate(allowed))
        total.dropped += by_rule
        total.lost += gone - by_rule
        if gone > by_rule:
            total.shards.append({"source": 0, "shard": None, "note": f"{gone - by_rule} rows were never handed out"})

    # -- ids

    def _skipped_before(self, inside: I64) -> int:
        """Skipped rows among those before ``inside``."""
        if not len(self.skipped_ids) or (inside == self.handed).all() or self.plan is None:
            return len(self.skipped_ids)
        after = 0
        for lane in np.flatnonzero(self.handed > inside):
            for ids in self._ids(int(lane), int(inside[lane]), int(self.handed[lane])):
                after += int(np.isin(self.skipped_ids, ids).sum())
        return len(self.skipped_ids) - after

    def _ids(self, lane: int, start: int, stop: int) -> Iterator[I64]:
        if self.plan is not None:
            for at in range(start, stop, _CHUNK):
                yield self.plan.lane_ids(lane, at, min(_CHUNK, stop - at))

    def _planned(self) -> m.IdSum:
        """Sum over the ids the plan has between start point and handed out, without the skipped ones."""
        value = 0
        if not self.start.any() and (self.handed == self.sizes).all():
            rows = int(self.sizes.sum())
            for at in range(0, rows, _CHUNK):
                value += id_sum(np.arange(at, min(rows, at + _CHUNK), dtype=np.int64))
        else:
            for lane in np.flatnonzero(self.handed > self.start):
                for ids in self._ids(int(lane), int(self.start[lane]), int(self.handed[lane])):
                    value += id_sum(ids)
        value -= id_sum(self.skipped_ids)
        return m.IdSum(count=self.handed_rows, value=value & _MASK)

    def _check(self, total: _Sum) -> None:
        """Compare the ids handed out with the plan's; count what was lost and repeated."""
        planned, handed = self._planned(), self.book.handed_out
        if planned == handed:
            return
        lost, repeated, value = 0, 0, planned.value
        for item in self.book.unbalanced:
            extra = item.handed_out - item.planned
            gone = max(len(item.lost), len(item.repeated) - extra)
            lost, repeated = lost + gone, repeated + gone + extra
            value -= id_sum(np.asarray(item.lost, np.int64))
            value += id_sum(np.asarray(item.repeated, np.int64))
            total.shards.append(
                {
                    "source": item.source,
                    "shard": item.shard,
                    "planned": item.planned,
                    "handed_out": item.handed_out,
                    "lost": list(item.lost),
                    "repeated": list(item.repeated),
                }
            )
        extra = handed.count - planned.count
        if repeated - lost != extra or value & _MASK != handed.value:
            rest = extra - (repeated - lost)
            lost, repeated = lost + max(1, -rest), repeated + max(1, rest)
            if self.book.source != planned:
                note = "the ids this job planned are not those of the plan"
            else:
                note = "the ids handed out are not those of the plan"
            total.shards.append({"source": 0, "shard": None, "note": f"{note}; no rank told which"})
        total.lost += lost
        total.repeated += repeated
        total.handed_out += repeated - lost
        from_acknowledged = min(lost, total.acknowledged)
        total.acknowledged -= from_acknowledged
        total.open = max(0, total.open - (lost - from_acknowledged))
