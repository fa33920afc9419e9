"""How an audit counts the rows that one generation took of an epoch: in counts per lane, or as sets in dynamic order. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from manifests.identity import id_sum
from manifests.plan import Plan
from manifests.ranges import Ranges
from manifests.wire import messages as m

from . import books
from .pool import has_quotas, taken_before
from .records import EpochRecord, GenerationRecord

I64 = npt.NDArray[np.int64]
_MASK = (1 << 64) - 1
#: rows whose ids are computed at a time
CHUNK = 1 << 18
#: how a leg counts rows: int64 [lanes], or plan positions
Taken = TypeVar("Taken")


@dataclass
class Sum:
    """Counters of the document."""

    acknowledged: int = 0
    handed_out: int = 0
    lost: int = 0
    repeated: int = 0
    skipped: int = 0
    dropped: int = 0
    abandoned: int = 0
    rewound: int = 0
    quarantined: int = 0
    open: int = 0
    padded: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Carried:
    """What became of the rows of an epoch that were carried over into later ones.

    ``handed_out``, ``acknowledged``: in the newest generation; ``remaining``: of them, that were still to be handed out
    when it began, None: it is the generation that carried them over.
    """

    handed_out: m.IdSum
    acknowledged: m.IdSum
    remaining: int | None


class Leg(ABC, Generic[Taken]):
    """Books of one generation in the epoch. ``plan`` None: only the counts are needed."""

    def __init__(self, generation: GenerationRecord, book: EpochRecord, epoch: int, plan: Plan | None) -> None:
        self.generation = generation
        self.book = book
        self.epoch = epoch
        self.plan = plan
        self.skipped_ids = np.frombuffer(book.skipped_ids, "<i8").astype(np.int64)
        self.quarantined = Ranges.decode(book.quarantined)
        self.acked_quarantined = len(Ranges.decode(book.acked_quarantined))

    @property
    def passed_over(self) -> int:
        """Rows taken that no loop got: skipped and quarantined ones."""
        return len(self.skipped_ids) + len(self.quarantined)

    @property
    @abstractmethod
    def handed_rows(self) -> int:
        """Rows handed to loops, without pads and those passed over, as the plan has it."""

    @abstractmethod
    def earlier(self, total: Sum, later: GenerationRecord) -> None:
        """Count a generation that the start point of ``later``, inside this epoch, follows: only rows before that count."""

    @abstractmethod
    def last(self, total: Sum, vouched: bool, carried: Carried) -> None:
        """Count the last generation of the line in this epoch. ``vouched``: a later start point lies past the epoch."""

    @abstractmethod
    def _handed_ids(self) -> Iterator[I64]:
        """Ids of the rows between start point and what was handed out, with those passed over."""

    def _passed_over(self, found: Iterator[I64]) -> tuple[int, int]:
        """How many of these ids were skipped, and how many quarantined."""
        skipped = quarantined = 0
        if self.passed_over:
            for ids in found:
                skipped += int(np.isin(self.skipped_ids, ids).sum())
                quarantined += int(self.quarantined.has(ids).sum())
        return skipped, quarantined

    def _lost(self, total: Sum, rows: int) -> None:
        total.lost += rows
        if rows:
            total.shards.append({"source": 0, "shard": None, "note": f"{rows} rows were never handed out"})

    def _planned(self) -> m.IdSum:
        """Sum over the ids the plan has between start point and handed out, without those passed over."""
        value = sum(id_sum(ids) for ids in self._handed_ids()) - id_sum(self.skipped_ids)
        value -= sum(id_sum(ids) for ids in members(self.quarantined))
        return m.IdSum(count=self.handed_rows, value=value & _MASK)

    def _check(self, total: Sum) -> None:
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


class LaneLeg(Leg[I64]):
    """Deterministic order: counts per lane, all arrays int64 [lanes]."""

    def __init__(self, generation: GenerationRecord, book: EpochRecord, epoch: int, plan: Plan | None) -> None:
        super().__init__(generation, book, epoch, plan)
        self.sizes = books.sizes_of(generation)
        self.start = books.start_counts(generation, epoch)
        self.handed = np.maximum(books.handed_counts(generation, book), self.start)
        self.acked = np.maximum(books.acked_counts(generation, book), self.start)
        self.ranks = np.arange(len(self.sizes)) % generation.settings.world_size

    @property
    def handed_rows(self) -> int:
        return int((self.handed - self.start).sum()) - self.passed_over

    def _of(self, ranks: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        return np.isin(self.ranks, ranks)

    def earlier(self, total: Sum, later: GenerationRecord) -> None:
        cap = books.start_counts(later, self.epoch)
        inside = np.clip(self.handed, self.start, np.maximum(cap, self.start))
        skipped, quarantined = self._passed_over(self._ids_between(inside, self.handed))
        past = int((self.handed - inside).sum()) - skipped - quarantined
        skipped, quarantined = len(self.skipped_ids) - skipped, len(self.quarantined) - quarantined
        gap = np.maximum(cap - inside, 0)
        total.rewound += past
        total.skipped += skipped
        total.quarantined += quarantined
        total.acknowledged += int((inside - self.start).sum()) - skipped - quarantined
        total.handed_out += self.handed_rows
        # the start point counts rows that no report told of: handed out, but for the end of ranks that are through
        self._missing(total, gap, vouched=True, to_end=False)
        self._check(total)

    def last(self, total: Sum, vouched: bool, carried: Carried) -> None:
        book = self.book
        open_lanes = self._of(book.unfinished)
        total.padded += book.padded
        total.handed_out += self.handed_rows
        if vouched:
            total.skipped += len(self.skipped_ids)
            total.quarantined += len(self.quarantined)
            total.acknowledged += self.handed_rows
            self._missing(total, self.sizes - self.handed, vouched=True, to_end=True)
        else:
            total.skipped += book.acked_skipped
            total.quarantined += self.acked_quarantined
            total.acknowledged += int((self.acked - self.start).sum()) - book.acked_skipped - self.acked_quarantined
            unacked = self.handed - self.acked
            total.open += int((unacked + self.sizes - self.handed)[open_lanes].sum())
            abandoned = self._of(book.abandoned)
            total.abandoned += int(unacked[abandoned].sum())
            total.acknowledged += int(unacked[~(open_lanes | abandoned)].sum())
            missing = np.where(open_lanes, 0, self.sizes - self.handed)
            self._missing(total, missing, vouched=False, to_end=True)
        self._check(total)

    def _missing(self, total: Sum, missing: I64, *, vouched: bool, to_end: bool) -> None:
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
        self._lost(total, gone - by_rule)

    # -- ids

    def _ids_between(self, first: I64, stop: I64) -> Iterator[I64]:
        if self.plan is not None:
            for lane in np.flatnonzero(stop > first).tolist():
                for at in range(int(first[lane]), int(stop[lane]), CHUNK):
                    yield self.plan.lane_ids(lane, at, min(CHUNK, int(stop[lane]) - at))

    def _handed_ids(self) -> Iterator[I64]:
        if not self.start.any() and (self.handed == self.sizes).all():
            yield from members(Ranges.of([(0, int(self.sizes.sum()))]))
        else:
            yield from self._ids_between(self.start, self.handed)


class SetLeg(Leg[Ranges]):
    """Dynamic order: sets of plan positions."""

    def __init__(self, generation: GenerationRecord, book: EpochRecord, epoch: int, plan: Plan | None) -> None:
        super().__init__(generation, book, epoch, plan)
        self.whole = Ranges.of([(0, generation.rows)])
        self.start = taken_before(generation, epoch)
        self.handed = books.handed_ranges(generation, book) | self.start
        self.acked = books.acked_ranges(generation, book) | self.start

    @property
    def handed_rows(self) -> int:
        return len(self.handed) - len(self.start) - self.passed_over

    def earlier(self, total: Sum, later: GenerationRecord) -> None:
        cap = taken_before(later, self.epoch)
        past = self.handed - cap - self.start
        skipped, quarantined = self._passed_over(self._ids_of(past))
        total.rewound += len(past) - skipped - quarantined + self.book.rewound
        skipped, quarantined = len(self.skipped_ids) - skipped, len(self.quarantined) - quarantined
        total.skipped += skipped
        total.quarantined += quarantined
        total.acknowledged += len(self.handed - self.start) - len(past) - skipped - quarantined
        total.handed_out += self.handed_rows + self.book.rewound
        # the start point counts rows that no report told of
        self._told(total, len(cap - self.handed))
        self._check(total)

    def _told(self, total: Sum, rows: int) -> None:
        """Rows that a later start point counts and no report does: handed out by ranks that were not through."""
        if self.book.unfinished or self.book.abandoned:
            total.acknowledged += rows
            total.handed_out += rows
        else:
            self._lost(total, rows)

    def last(self, total: Sum, vouched: bool, carried: Carried) -> None:
        book = self.book
        total.padded += book.padded
        total.handed_out += self.handed_rows + book.rewound
        total.rewound += book.rewound
        missing = self.whole - self.handed
        away = Ranges.decode(book.away) & missing
        if vouched:
            total.skipped += len(self.skipped_ids)
            total.quarantined += len(self.quarantined)
            total.acknowledged += self.handed_rows
        else:
            unacked = len(self.handed - self.acked)
            total.skipped += book.acked_skipped
            total.quarantined += self.acked_quarantined
            total.acknowledged += len(self.acked) - len(self.start) - book.acked_skipped - self.acked_quarantined
            if book.unfinished:
                total.open += unacked
            elif book.abandoned:
                total.abandoned += unacked
            else:
                total.acknowledged += unacked
        remaining = carried.remaining
        if away or remaining:
            self._carried(total, away if away else missing, carried)
            missing = missing - away if away else Ranges.of([])
        if book.unfinished and not vouched:
            total.open += len(missing)
        elif vouched and book.unfinished:
            self._told(total, len(missing))
        else:
            self._left_over(total, len(missing))
        self._check(total)

    def _left_over(self, total: Sum, rows: int) -> None:
        """Rows that were in no lane when all ranks were through."""
        settings, book = self.generation.settings, self.book
        by_rule = 0
        if settings.steps_per_epoch is not None:
            by_rule = rows
        elif settings.tail == "drop" and has_quotas(settings):
            by_rule = min(rows, (len(self.whole) - len(self.start)) % (settings.world_size * settings.batch_size))
        total.dropped += by_rule
        if book.abandoned:
            total.abandoned += rows - by_rule
        else:
            self._lost(total, rows - by_rule)

    def _carried(self, total: Sum, rows: Ranges, carried: Carried) -> None:
        """Rows of this epoch that later epochs handed out, or will."""
        done, out = carried.acknowledged.count, carried.handed_out.count
        if carried.remaining is not None:
            done, out = done + len(rows) - carried.remaining, out + len(rows) - carried.remaining
        total.handed_out += out
        total.acknowledged += min(done, len(rows))
        total.open += max(0, len(rows) - done)
        total.repeated += max(0, done - len(rows))
        if carried.remaining is None and done == len(rows):
            value = sum(id_sum(ids) for ids in self._ids_of(rows)) & _MASK
            if value != carried.acknowledged.value:
                total.lost, total.repeated = total.lost + 1, total.repeated + 1
                total.acknowledged -= 1
                note = "the ids handed out in later epochs are not those carried over"
                total.shards.append({"source": 0, "shard": None, "note": note})

    # -- ids

    def _ids_of(self, positions: Ranges) -> Iterator[I64]:
        if self.plan is not None:
            for some in members(positions):
                yield self.plan.ids(*self.plan.plan_rows(some))

    def _handed_ids(self) -> Iterator[I64]:
        if not self.start and self.handed == self.whole:
            yield from members(self.whole)
        else:
            yield from self._ids_of(self.handed - self.start)


def members(found: Ranges) -> Iterator[I64]:
    """All members, ascending, in arrays of limited length."""
    some: list[tuple[int, int]] = []
    size = 0
    for first, stop in found:
        for at in range(first, stop, CHUNK):
            some.append((at, min(stop, at + CHUNK)))
            size += some[-1][1] - at
            if size >= CHUNK:
                yield Ranges.of(some).values()
                some, size = [], 0
    if some:
        yield Ranges.of(some).values()
