"""Books of an epoch: checking what ranks report, and adding the ranks' books up. Pure.

Counts are positions: rows taken of a lane since the epoch began, whichever generation took them. So books of one
generation cover, per lane, the rows from its start point to what it handed out.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from manifests import cursor
from manifests.errors import ProtocolError
from manifests.plan import lane_sizes
from manifests.wire import messages as m

from .records import EpochRecord, GenerationRecord, RankEpochRecord

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


def check_progress(generation: GenerationRecord, rank: int, progress: m.EpochProgress) -> None:
    """Raise ``ProtocolError`` for books that cannot be this rank's."""
    lanes = generation.settings.lanes or 1
    own = slice(rank, lanes, generation.settings.world_size)
    sizes = sizes_of(generation)[own]
    start = start_counts(generation, progress.epoch)[own]
    what = f"books of rank {rank}, epoch {progress.epoch} of job {generation.job}"
    if progress.epoch < generation.start.epoch:
        raise ProtocolError(what, cause=f"the generation starts at epoch {generation.start.epoch}")
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


def fold(generation: GenerationRecord, epoch: int, ranks: Mapping[int, RankEpochRecord]) -> EpochRecord:
    """Books of all ranks of an epoch added up. A rank without books stands at the start point, unfinished."""
    settings = generation.settings
    sizes = sizes_of(generation)
    handed = start_counts(generation, epoch).copy()
    acked = handed.copy()
    books = [ranks[rank].progress for rank in sorted(ranks)]
    for rank in sorted(ranks):
        handed[rank :: settings.world_size] = ranks[rank].progress.handed
        acked[rank :: settings.world_size] = ranks[rank].progress.acked
    ids = [np.frombuffer(ranks[rank].skipped_ids, "<i8") for rank in sorted(ranks)]
    acked_ids = [found[: book.acked_skipped] for found, book in zip(ids, books)]
    later_ids = [found[book.acked_skipped :] for found, book in zip(ids, books)]
    full = bool((acked == sizes).all())
    states = {rank: ranks[rank].progress.state if rank in ranks else "open" for rank in range(settings.world_size)}
    return EpochRecord(
        job=generation.job,
        generation=generation.number,
        epoch=epoch,
        step=max((book.step for book in books), default=0),
        acked_step=max((book.acked_step for book in books), default=0),
        handed=() if full else tuple(handed.tolist()),
        acked=() if full else tuple(acked.tolist()),
        unfinished=tuple(rank for rank, state in states.items() if state == "open"),
        abandoned=tuple(rank for rank, state in states.items() if state == "abandoned"),
        source=_add([book.source for book in books]),
        handed_out=_add([book.handed_out for book in books]),
        acknowledged=_add([book.acknowledged for book in books]),
        skipped=tuple(row for book in books for row in book.skipped)[:KEPT_SKIPPED],
        skipped_ids=np.concatenate([*acked_ids, *later_ids]).astype("<i8").tobytes() if ids else b"",
        acked_skipped=sum(book.acked_skipped for book in books),
        padded=sum(book.padded for book in books),
        unbalanced=tuple(item for book in books for item in book.unbalanced)[:KEPT_UNBALANCED],
    )


def _add(sums: list[m.IdSum]) -> m.IdSum:
    return m.IdSum(count=sum(s.count for s in sums), value=sum(s.value for s in sums) & _MASK)


def handed_counts(generation: GenerationRecord, book: EpochRecord) -> I64:
    """Rows taken per lane by what was handed out, int64 [lanes]."""
    return np.asarray(book.handed, np.int64) if book.handed else sizes_of(generation)


def acked_counts(generation: GenerationRecord, book: EpochRecord) -> I64:
    """Rows taken per lane by what was acknowledged, int64 [lanes]."""
    return np.asarray(book.acked, np.int64) if book.acked else sizes_of(generation)
