"""Marks: positions that ranks saved, kept so that the state of one rank can be completed with those of the others.

A mark is named by (generation, epoch, step) and the rank. The last few names of a job are kept; they outlive their
generation, since a resume opens a new one and may be repeated, and end with the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from manifests.errors import ProtocolError, StateIncomplete, StateMismatch
from manifests.granted import Lane, decode_pieces
from manifests.ranges import Ranges
from manifests.wire import messages as m

from .effects import Outbox
from .job import Job
from .records import MarkRecord
from .starts import restore
from .stretches import decode_stretches, encode_stretches, left_rows, without

#: (generation, epoch, step) whose marks are kept per job
KEPT_MARKS = 8


def take(out: Outbox, job: Job, rank: int, marks: Iterable[m.EpochProgress]) -> None:
    """Keep these marks of a rank of the current generation, and let the oldest of the job go.

    Raises:
        ProtocolError: a mark of no position.
    """
    marks = list(marks)
    lanes = 1 if job.is_dynamic else (job.current.settings.lanes or 1) // job.world_size
    for mark in marks:
        if mark.epoch < 0 or mark.step < 0 or len(mark.handed) != lanes or min(mark.handed) < 0:
            raise ProtocolError(f"mark of rank {rank}, epoch {mark.epoch} step {mark.step} of job {job.name}")
        Ranges.decode(mark.before)
        decode_pieces(mark.lane.pieces if mark.lane is not None else b"")
    for mark in marks:
        name = (job.record.generation, mark.epoch, mark.step)
        if name not in job.marks and len(job.marks) >= KEPT_MARKS and name < min(job.marks):
            continue
        record = MarkRecord(job=job.name, generation=job.record.generation, rank=rank, mark=mark)
        if job.marks.setdefault(name, {}).get(rank) != record:
            job.marks[name][rank] = record
            out.put(record)
        while len(job.marks) > KEPT_MARKS:
            for old in job.marks.pop(min(job.marks)).values():
                out.delete(old.key)


def load(job: Job, record: MarkRecord) -> None:
    """Take a stored record in."""
    job.marks.setdefault((record.generation, record.mark.epoch, record.mark.step), {})[record.rank] = record


def complete(job: Job | None, start: m.StartPoint, settings: m.JobSettings, rows: int) -> m.StartPoint:
    """The start point with the missing ranks' parts from their marks.

    Args:
        job: in whose marks to look.
        settings: of the new generation, filled in. rows: of an epoch.

    Raises:
        StateIncomplete: not all of them are there; names the ranks.
        StateMismatch: they do not fit the state.
    """
    if not start.missing or start.kind != "checkpoint":
        return start
    name = (start.generation, start.epoch, start.step)
    found = job.marks.get(name, {}) if job is not None and _same(job, start, settings) else {}
    absent = [rank for rank in start.missing if rank not in found]
    if absent:
        raise StateIncomplete(
            f"the state lacks the positions of ranks {', '.join(map(str, absent))}",
            cause=f"job {start.job or (job.name if job is not None else '')} has no marks of them for generation "
            f"{start.generation}, epoch {start.epoch} step {start.step}",
            remedy="load the list of the states of all ranks",
            detail={"ranks": absent},
        )
    marks = {rank: found[rank].mark for rank in start.missing}
    add = _add_lanes if settings.order == "dynamic" else _add_counts
    return msgspec.structs.replace(add(start, marks, settings, rows), missing=())


def _same(job: Job, start: m.StartPoint, settings: m.JobSettings) -> bool:
    """Whether the generation the state names is, as far as this dispatcher knows, one of the same order and ranks: a job
    of that name may have been another one."""
    parent = job.generations.get(start.generation)
    if parent is None:
        return True
    then = parent.settings
    if start.world_size not in (0, then.world_size):
        return False
    same = all(getattr(then, name) == getattr(settings, name) for name in ("order", "seed", "shuffle", "lanes"))
    return same and [s.digest for s in then.sources] == [s.digest for s in settings.sources]


def _add_counts(
    start: m.StartPoint, marks: Mapping[int, m.EpochProgress], settings: m.JobSettings, rows: int
) -> m.StartPoint:
    taken, world = list(start.taken), start.world_size or settings.world_size
    for rank, mark in marks.items():
        if len(taken[rank::world]) != len(mark.handed):
            raise StateMismatch(
                f"the mark of rank {rank} has counts for {len(mark.handed)} lanes",
                cause=f"the state has {len(taken)} lanes for {world} ranks",
            )
        taken[rank::world] = mark.handed
    return msgspec.structs.replace(start, taken=tuple(taken))


def _add_lanes(
    start: m.StartPoint, marks: Mapping[int, m.EpochProgress], settings: m.JobSettings, rows: int
) -> m.StartPoint:
    taken, lanes = Ranges.decode(start.ranges), {grants.rank: grants for grants in start.lanes}
    carried = decode_stretches(start.carried)
    for rank, mark in marks.items():
        grants = mark.lane if mark.lane is not None else m.LaneGrants(rank=rank, number=rank)
        grants = msgspec.structs.replace(grants, rank=rank, place=mark.handed[0])
        lane: Lane = restore(grants, settings, start, rows)
        taken |= Ranges.decode(mark.before) | lane.left(grants.place)
        carried = without(carried, left_rows(lane, grants.place))
        lanes[rank] = grants
    return msgspec.structs.replace(
        start, ranges=taken.encode(), lanes=tuple(lanes.values()), carried=encode_stretches(carried)
    )
