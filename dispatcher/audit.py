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

In dynamic order the same holds for sets of plan positions instead of counts per lane. Rows that an elastic job carried over
into a later epoch are open until that epoch's books acknowledge them. Rows in quarantine are part of neither id sum.

    rows       = acknowledged + lost + skipped + dropped + abandoned + quarantined + open
    handed_out = acknowledged + repeated + rewound + handed out but not yet acknowledged or abandoned
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from manifests.errors import ConfigError
from manifests.granted import decode_pieces
from manifests.plan import Plan
from manifests.ranges import Ranges
from manifests.wire import messages as m

from . import books, line
from .job import Job
from .legs import Carried, LaneLeg, SetLeg, Sum
from .pool import Pool, taken_before
from .records import EpochRecord, GenerationRecord, LaneRecord, PoolRecord, QuarantineRecord, RankEpochRecord

I64 = npt.NDArray[np.int64]
#: shards listed in the document
LISTED = 1000


@dataclass(frozen=True)
class OpenEpoch:
    """Books of an epoch that were not folded yet, to be folded beside the driver's thread."""

    ranks: Mapping[int, RankEpochRecord]
    pool: PoolRecord | None
    lanes: tuple[LaneRecord, ...]
    through: frozenset[int]

    def fold(self, generation: GenerationRecord, epoch: int) -> EpochRecord:
        pool = Pool.load(generation, self.pool, self.lanes) if self.pool is not None else None
        return books.fold(generation, epoch, self.ranks, pool, self.through)


@dataclass(frozen=True)
class Snapshot:
    """What the audit of a job needs, taken on the driver's thread: immutable records and a few facts."""

    job: str
    current: int
    generations: Mapping[int, GenerationRecord]
    folded: Mapping[tuple[int, int], EpochRecord]
    unfolded: Mapping[int, OpenEpoch]
    quarantine: Mapping[tuple[int, int, int], QuarantineRecord]
    newest_epoch: int
    live: bool

    def books(self) -> dict[tuple[int, int], EpochRecord]:
        """Every (generation, epoch) with books."""
        generation = self.generations[self.current]
        now = {(self.current, epoch): found.fold(generation, epoch) for epoch, found in self.unfolded.items()}
        return {**self.folded, **now}


def snapshot(job: Job, at: float, lease: float) -> Snapshot:
    """The job as of now."""
    return Snapshot(
        job=job.name,
        current=job.record.generation,
        generations=dict(job.generations),
        folded=dict(job.folded),
        unfolded={epoch: _open_epoch(job, epoch) for epoch in job.unfolded()},
        quarantine=dict(job.quarantine),
        newest_epoch=job.newest_epoch(),
        live=job.any_live(at, lease),
    )


def _open_epoch(job: Job, epoch: int) -> OpenEpoch:
    pool = job.pools.get(epoch)
    return OpenEpoch(
        ranks=dict(job.ranks.get(epoch, {})),
        pool=pool.record() if pool is not None else None,
        lanes=tuple(pool.whole_lane(rank) for rank in pool.lanes) if pool is not None else (),
        through=frozenset(job.through(epoch)),
    )


def audit(snap: Snapshot, epoch: int | None, shard_rows: Callable[[str], I64]) -> dict[str, Any]:
    """The audit document of one epoch (None: the newest entered).

    Args:
        shard_rows: manifest digest -> rows per shard, int64 [shards].

    Raises:
        ConfigError: an epoch that the job has not entered, or that the record does not reach back to.
    """
    epoch = snap.newest_epoch if epoch is None else epoch
    all_books = snap.books()
    found = line.find(snap.generations, all_books, snap.current, epoch)
    if found is None:
        lowest, highest = line.entered(snap.generations, all_books, snap.current)
        if lowest <= epoch <= highest:
            raise ConfigError(f"job {snap.job} has not entered epoch {epoch}")
        raise ConfigError(f"job {snap.job} has no epoch {epoch}", cause=f"it has been in epochs {lowest} to {highest}")
    last, vouched = found.legs[-1], found.vouched
    total = Sum()
    # the first start point of the line vouches for what lies before it
    before = rows_before(found.legs[0], epoch)
    total.acknowledged += before
    total.handed_out += before
    quarantined = Ranges.of([])
    for place, generation in enumerate(found.legs):
        book = all_books.get((generation.number, epoch)) or books.fold(generation, epoch, {})
        leg = _leg(generation, book, epoch, _plan(generation, epoch, shard_rows))
        quarantined |= leg.quarantined
        if generation is last:
            leg.last(total, vouched, _carried(snap.generations, all_books, last, epoch))
        else:
            leg.earlier(total, found.legs[place + 1])
    numbers = {generation.number for generation in found.legs}
    for (number, book_epoch), book in all_books.items():
        if book_epoch == epoch and number >= found.root and number not in numbers:
            rows = _leg(snap.generations[number], book, epoch, None).handed_rows + book.rewound
            total.rewound += rows
            total.handed_out += rows
    last_book = all_books.get((last.number, epoch))
    over = (vouched or (last_book is not None and not last_book.unfinished)) and not total.open
    reading = snap.live and last.number == snap.current
    state = "complete" if over else "running" if reading else "stopped"
    passed = _shards_of(quarantined, shard_rows(last.settings.sources[0].digest))
    total.shards += _quarantined_shards(snap, numbers, passed, None if over else last.number)
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
        "quarantined": total.quarantined,
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


def _leg(generation: GenerationRecord, book: EpochRecord, epoch: int, plan: Plan | None) -> LaneLeg | SetLeg:
    kind = SetLeg if generation.settings.order == "dynamic" else LaneLeg
    return kind(generation, book, epoch, plan)


def rows_before(generation: GenerationRecord, epoch: int) -> int:
    """Rows of the epoch that lie before the generation's start point."""
    if generation.settings.order == "dynamic":
        return len(taken_before(generation, epoch))
    return int(books.start_counts(generation, epoch).sum())


def _carried(generations: line.Generations, all_books: line.Books, last: GenerationRecord, epoch: int) -> Carried:
    """What later epochs handed out of the rows of ``epoch``. ``last``: the last generation that was in it."""
    newest, remaining = last, None
    for number in sorted(generations, reverse=True):
        generation = generations[number]
        if number > last.number and generation.start.epoch > epoch and line.leads_to(generations, generation, last):
            newest = generation
            pieces = decode_pieces(generation.start.carried)
            remaining = sum(len(piece) for piece in pieces if piece.epoch == epoch)
            break
    found = [
        item
        for (number, later), book in all_books.items()
        if number == newest.number and later > epoch
        for item in book.carried
        if item.epoch == epoch
    ]
    return Carried(
        handed_out=books.add_sums([item.handed_out for item in found]),
        acknowledged=books.add_sums([item.acknowledged for item in found]),
        remaining=remaining,
    )


def _shards_of(ids: Ranges, rows: I64) -> set[int]:
    """Shards that these sample ids belong to. ``rows``: per shard, int64 [shards]."""
    ends = np.cumsum(rows)
    firsts = [int(np.searchsorted(ends, start, side="right")) for start, _ in ids]
    lasts = [int(np.searchsorted(ends, stop - 1, side="right")) for _, stop in ids]
    return {shard for first, last in zip(firsts, lasts) for shard in range(first, last + 1) if rows[shard]}


def _quarantined_shards(
    snap: Snapshot, generations: Collection[int], passed: Collection[int], stopped: int | None
) -> list[dict[str, Any]]:
    """Shards in quarantine, and why.

    Args:
        passed: those of which rows were passed over.
        stopped: the generation that has not got through the epoch; all its shards in quarantine are listed, as each may
            be what stops it. None: the epoch is over.
    """
    why: dict[tuple[int, int], m.QuarantinedShard] = {(0, shard): m.QuarantinedShard(0, shard) for shard in passed}
    for (number, source, shard), record in sorted(snap.quarantine.items()):
        if number == stopped or (number in generations and (source, shard) in why):
            why[source, shard] = record.shard
    return [
        {"source": source, "shard": shard, "uri": found.uri, "code": found.code, "reason": found.reason}
        for (source, shard), found in sorted(why.items())
    ]
