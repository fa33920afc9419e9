"""Books of an epoch: checking what ranks report, and adding the ranks' books up. Pure.

Counts are positions: rows taken of a lane since the epoch began, whichever generation took them. So books of one
generation cover, per lane, the rows from its start point to what it handed out. In dynamic order a rank has one lane, and
the pool knows which rows those are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from manifests import cursor
from manifests.errors import ProtocolError
from manifests.plan import lane_sizes
from manifests.ranges import Ranges
from manifests.wire import messages as m

from .pool import Pool, taken_before
from .records import EpochRecord, GenerationRecord, RankEpochRecord
from .stretches import merged

I64 = npt.NDArray[np.int64]
_MASK = (1 << 64) - 1

#: skipped rows kept with key and reason, per rank and epoch
KEPT_SKIPPED = 100
#: skipped rows of one rank in one epoch that fit a stored record
MAX_SKIPPED = 50_000
#: shards that do not balance kept in the record of a whole epoch
KEPT_UNBALANCED = 200


def sizes_of(generation: GenerationRecord) -> I64:
    """Rows of each lane of an epoch, int64 [lanes]."""
    return lane_sizes(generation.rows, generation.settings.lanes or 1)


def start_counts(generation: GenerationRecord, epoch: int) -> I64:
    """Rows per lane that lie before the generation's start point: all of an earlier epoch, none of a later one."""
    sizes = sizes_of(generation)
    start = generation.start
    if epoch < start.epoch:
        return sizes
    if epoch > start.epoch or not start.taken:
        return np.zeros_like(sizes)
    return np.asarray(start.taken, np.int64)


def _quota(settings: m.JobSettings, sizes: I64, start: I64) -> tuple[int, list[int]]:
    """Tail ``drop``: rows every rank hands out from a start point on, and the rows each rank has left there."""
    world, batch = settings.world_size, settings.batch_size
    left = [cursor.left(sizes[rank::world], start[rank::world]) for rank in range(world)]
    return min(left) // batch * batch, left


def left_over(settings: m.JobSettings, sizes: I64, start: I64) -> list[int]:
    """Rows that the rule of tail ``drop`` leaves over on each rank, from a start point on. Arrays int64 [lanes].

    Every rank hands out as many full batches as the one with the fewest rows left can. From the beginning of an epoch
    that leaves fewer rows than a global batch; from a start point where ranks stand unevenly it may be more.
    """
    quota, left = _quota(settings, sizes, start)
    return [rows - quota for rows in left]


def quota_end(settings: m.JobSettings, sizes: I64, start: I64) -> I64:
    """Rows taken per lane when every rank has handed out its quota (tail ``drop``), int64 [lanes]."""
    quota, _ = _quota(settings, sizes, start)
    end = start.copy()
    for rank in range(settings.world_size):
        own = slice(rank, None, settings.world_size)
        end[own] = cursor.advance(sizes[own], start[own], quota)
    return end


def check_progress(
    generation: GenerationRecord, rank: int, progress: m.EpochProgress, pool: Pool | None = None
) -> None:
    """Raise ``ProtocolError`` for books that cannot be this rank's. ``pool``: of the epoch, in dynamic order."""
    what = f"books of rank {rank}, epoch {progress.epoch} of job {generation.job}"
    if progress.epoch < generation.start.epoch:
        raise ProtocolError(what, cause=f"the generation starts at epoch {generation.start.epoch}")
    start, sizes = _bounds(generation, rank, progress.epoch, pool)
    if len(progress.handed) != len(sizes) or len(progress.acked) != len(sizes):
        raise ProtocolError(
            what, cause=f"{len(progress.handed)} and {len(progress.acked)} counts for {len(sizes)} lanes"
        )
    handed, acked = np.asarray(progress.handed, np.int64), np.asarray(progress.acked, np.int64)
    if (handed > sizes).any() or (acked > handed).any() or (acked < start).any():
        raise ProtocolError(what, cause="counts are not start <= acknowledged <= handed out <= rows of the lane")
    if not 0 <= progress.acked_skipped <= len(progress.skipped):
        raise ProtocolError(
            what, cause=f"{progress.acked_skipped} of {len(progress.skipped)} skipped rows acknowledged"
        )
    if len(progress.skipped) > MAX_SKIPPED:
        raise ProtocolError(
            what, cause=f"{len(progress.skipped)} skipped rows; at most {MAX_SKIPPED} per epoch and rank are kept"
        )
    if Ranges.decode(progress.acked_quarantined) - Ranges.decode(progress.quarantined):
        raise ProtocolError(what, cause="rows in quarantine were acknowledged but not passed over")


def _bounds(generation: GenerationRecord, rank: int, epoch: int, pool: Pool | None) -> tuple[I64, I64]:
    """Lowest and highest counts that the rank can have: int64 [own lanes], in dynamic order [1]."""
    if generation.settings.order == "dynamic":
        held = pool.lanes.get(rank) if pool is not None else None
        if held is not None:
            return np.array([held.begun]), np.array([held.certain if held.ended is None else held.ended])
        lanes = generation.start.lanes if epoch == generation.start.epoch else ()
        place = next((found.place for found in lanes if found.rank == rank), 0)
        return np.array([0]), np.array([place])
    own = slice(rank, generation.settings.lanes, generation.settings.world_size)
    return start_counts(generation, epoch)[own], sizes_of(generation)[own]


def is_late(old: m.EpochProgress, new: m.EpochProgress) -> bool:
    """Whether ``new`` was sent before ``old``: then it changes nothing."""
    if old.state != "open" and new.state == "open":
        return True
    return (
        sum(new.handed) < sum(old.handed)
        or sum(new.acked) < sum(old.acked)
        or new.step < old.step
        or new.acked_step < old.acked_step
    )


def rank_record(generation: GenerationRecord, rank: int, progress: m.EpochProgress) -> RankEpochRecord:
    """Books of one rank as stored: sample ids of all skipped rows, details of the first few."""
    ids = np.array([row.sample_id for row in progress.skipped], np.int64)
    if len(progress.skipped) > KEPT_SKIPPED:
        progress = _replace_skipped(progress, progress.skipped[:KEPT_SKIPPED])
    return RankEpochRecord(
        job=generation.job,
        generation=generation.number,
        epoch=progress.epoch,
        rank=rank,
        progress=progress,
        skipped_ids=ids.astype("<i8").tobytes(),
    )


def _replace_skipped(progress: m.EpochProgress, skipped: tuple[m.SkippedRow, ...]) -> m.EpochProgress:
    fields = {name: getattr(progress, name) for name in progress.__struct_fields__}
    return m.EpochProgress(**{**fields, "skipped": skipped})


def fold(
    generation: GenerationRecord,
    epoch: int,
    ranks: Mapping[int, RankEpochRecord],
    pool: Pool | None = None,
    away: Collection[int] = (),
) -> EpochRecord:
    """Books of all ranks of an epoch added up. A rank without books stands at the start point, unfinished.

    Args:
        pool: dynamic order: of the epoch, None if nobody asked for rows of it.
        away: ranks that will not come back to this epoch (elastic jobs).
    """
    books = [ranks[rank].progress for rank in sorted(ranks)]
    ids = [np.frombuffer(ranks[rank].skipped_ids, "<i8") for rank in sorted(ranks)]
    acked_ids = [found[: book.acked_skipped] for found, book in zip(ids, books)]
    later_ids = [found[book.acked_skipped :] for found, book in zip(ids, books)]
    states = {}
    for rank in range(generation.settings.world_size):
        if rank in ranks:
            state = ranks[rank].progress.state
            states[rank] = "abandoned" if state == "open" and rank in away else state
        else:
            states[rank] = "finished" if rank in away else "open"
    quarantined = merged(Ranges.decode(book.quarantined) for book in books)
    acked_quarantined = merged(Ranges.decode(book.acked_quarantined) for book in books)
    book = EpochRecord(
        job=generation.job,
        generation=generation.number,
        epoch=epoch,
        step=max((book.step for book in books), default=0),
        acked_step=max((book.acked_step for book in books), default=0),
        unfinished=tuple(rank for rank, state in states.items() if state == "open"),
        abandoned=tuple(rank for rank, state in states.items() if state == "abandoned"),
        source=add_sums([book.source for book in books]),
        handed_out=add_sums([book.handed_out for book in books]),
        acknowledged=add_sums([book.acknowledged for book in books]),
        skipped=tuple(row for book in books for row in book.skipped)[:KEPT_SKIPPED],
        skipped_ids=np.concatenate([*acked_ids, *later_ids]).astype("<i8").tobytes() if ids else b"",
        acked_skipped=sum(book.acked_skipped for book in books),
        padded=sum(book.padded for book in books),
        unbalanced=tuple(item for book in books for item in book.unbalanced)[:KEPT_UNBALANCED],
        quarantined=quarantined.encode(),
        acked_quarantined=acked_quarantined.encode(),
        carried=_add_carried(item for book in books for item in book.carried),
        **_positions(generation, epoch, ranks, pool),
    )
    return book if pool is None or pool.book is None else add(pool.book, book)


def _positions(
    generation: GenerationRecord, epoch: int, ranks: Mapping[int, RankEpochRecord], pool: Pool | None
) -> dict[str, Any]:
    """The fields of a folded book that say which rows were taken."""
    if generation.settings.order == "dynamic":
        before = taken_before(generation, epoch)
        out, done = pool.taken(ranks) if pool is not None else (before, before)
        if len(done) == generation.rows:
            return {"whole": True}
        away = pool.away.encode() if pool is not None else b""
        return {"handed_ranges": out.encode(), "acked_ranges": done.encode(), "away": away}
    world = generation.settings.world_size
    handed = start_counts(generation, epoch).copy()
    acked = handed.copy()
    for rank in ranks:
        handed[rank::world] = ranks[rank].progress.handed
        acked[rank::world] = ranks[rank].progress.acked
    if (acked == sizes_of(generation)).all():
        return {}
    return {"handed": tuple(handed.tolist()), "acked": tuple(acked.tolist())}


def acknowledged_only(generation: GenerationRecord, record: RankEpochRecord) -> EpochRecord:
    """Books of a rank that is gone: what it acknowledged counts, the rest it had handed out was rewound."""
    book = record.progress
    done = [(item.handed_out.count - item.acknowledged.count) for item in book.carried]
    ids = np.frombuffer(record.skipped_ids, "<i8")[: book.acked_skipped]
    return EpochRecord(
        job=generation.job,
        generation=generation.number,
        epoch=record.epoch,
        step=book.acked_step,
        acked_step=book.acked_step,
        source=book.acknowledged,
        handed_out=book.acknowledged,
        acknowledged=book.acknowledged,
        skipped=book.skipped[: book.acked_skipped],
        skipped_ids=ids.tobytes(),
        acked_skipped=book.acked_skipped,
        quarantined=book.acked_quarantined,
        acked_quarantined=book.acked_quarantined,
        carried=tuple(
            m.CarriedSum(epoch=item.epoch, handed_out=item.acknowledged, acknowledged=item.acknowledged)
            for item in book.carried
        ),
        rewound=book.handed_out.count - book.acknowledged.count + sum(done),
    )


def add(gone: EpochRecord, book: EpochRecord) -> EpochRecord:
    """``book`` with the books of ranks that are gone added to it."""
    mine, old = np.frombuffer(book.skipped_ids, "<i8"), np.frombuffer(gone.skipped_ids, "<i8")
    quarantined = Ranges.decode(gone.quarantined) | Ranges.decode(book.quarantined)
    acked_quarantined = Ranges.decode(gone.acked_quarantined) | Ranges.decode(book.acked_quarantined)
    return msgspec.structs.replace(
        book,
        step=max(gone.step, book.step),
        acked_step=max(gone.acked_step, book.acked_step),
        source=add_sums([gone.source, book.source]),
        handed_out=add_sums([gone.handed_out, book.handed_out]),
        acknowledged=add_sums([gone.acknowledged, book.acknowledged]),
        skipped=(*gone.skipped, *book.skipped)[:KEPT_SKIPPED],
        skipped_ids=np.concatenate([old, mine]).astype("<i8").tobytes(),
        acked_skipped=gone.acked_skipped + book.acked_skipped,
        quarantined=quarantined.encode(),
        acked_quarantined=acked_quarantined.encode(),
        carried=_add_carried((*gone.carried, *book.carried)),
        rewound=gone.rewound + book.rewound,
    )


def _add_carried(items: Iterable[m.CarriedSum]) -> tuple[m.CarriedSum, ...]:
    by_epoch: dict[int, list[m.CarriedSum]] = {}
    for item in items:
        by_epoch.setdefault(item.epoch, []).append(item)
    return tuple(
        m.CarriedSum(
            epoch=epoch,
            handed_out=add_sums([item.handed_out for item in found]),
            acknowledged=add_sums([item.acknowledged for item in found]),
        )
        for epoch, found in sorted(by_epoch.items())
    )


def add_sums(sums: list[m.IdSum]) -> m.IdSum:
    """The sum over all their ids."""
    return m.IdSum(count=sum(s.count for s in sums), value=sum(s.value for s in sums) & _MASK)


def handed_counts(generation: GenerationRecord, book: EpochRecord) -> I64:
    """Rows taken per lane by what was handed out, int64 [lanes]."""
    return np.asarray(book.handed, np.int64) if book.handed else sizes_of(generation)


def acked_counts(generation: GenerationRecord, book: EpochRecord) -> I64:
    """Rows taken per lane by what was acknowledged, int64 [lanes]."""
    return np.asarray(book.acked, np.int64) if book.acked else sizes_of(generation)


def handed_ranges(generation: GenerationRecord, book: EpochRecord) -> Ranges:
    """Dynamic order: plan positions handed out since the epoch began."""
    return Ranges.of([(0, generation.rows)]) if book.whole else Ranges.decode(book.handed_ranges)


def acked_ranges(generation: GenerationRecord, book: EpochRecord) -> Ranges:
    """Dynamic order: plan positions acknowledged since the epoch began."""
    return Ranges.of([(0, generation.rows)]) if book.whole else Ranges.decode(book.acked_ranges)
