"""Settings and start points: filling in, comparing, and what "latest" means. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from manifests.cursor import default_lanes, divisors
from manifests.errors import ConfigError, ProtocolError, StateMismatch, UnknownDataset
from manifests.granted import Lane, decode_pieces, window_rows
from manifests.identity import check_name
from manifests.plan import lane_sizes
from manifests.ranges import Ranges
from manifests.wire import messages as m

from . import books
from .events import JobOpenRequested
from .job import Job
from .pool import has_quotas
from .records import GenerationRecord
from .stretches import encode_stretches, left_rows, union, without

#: settings that make a position mean something; a resume may change all others
IDENTITY = ("sources", "seed", "order", "shuffle", "lanes")


def check_open(event: JobOpenRequested) -> None:
    """Raise for an open that no job could take."""
    ask = event.message
    settings = ask.settings
    check_name(ask.job, "job")
    check_name(settings.tenant, "tenant")
    if settings.world_size < 1 or not 0 <= ask.rank < settings.world_size:
        raise ConfigError(f"rank {ask.rank} of world size {settings.world_size}", cause="ranks are 0 .. world_size - 1")
    if settings.batch_size < 1:
        raise ConfigError(f"batch_size {settings.batch_size} is not above zero")
    if settings.epochs is not None and settings.epochs < 1:
        raise ConfigError(f"epochs {settings.epochs} is not above zero", remedy="None goes on for ever")
    if settings.lanes is not None and settings.lanes < 1:
        raise ConfigError(f"lanes {settings.lanes} is not above zero")
    if len(settings.sources) != 1:
        raise ConfigError(f"job {ask.job} asks for a mix of datasets", cause="they come later")
    if settings.elastic and settings.order != "dynamic":
        raise ConfigError(
            f"job {ask.job} is elastic in deterministic order",
            cause="there a rank's rows are its own, so nobody can take over those of one that died",
            remedy="order='dynamic', or elastic=False",
        )
    if settings.elastic and settings.tail == "drop":
        raise ConfigError(
            f"job {ask.job} is elastic with tail 'drop'",
            cause="ranks of an elastic job take rows until there are none, so nothing can be dropped by rule",
            remedy="tail='ragged', or elastic=False",
        )
    if not ask.holder.uid or not ask.nonce:
        raise ConfigError(f"job {ask.job} was opened without a holder or a nonce")
    if event.unknown:
        raise UnknownDataset(
            f"the dispatcher has no manifest {event.unknown[0]}",
            remedy="feedline manifest register FILE, or give the loader the manifest file",
        )
    if event.rows == 0:
        raise ConfigError(
            f"the dataset of job {ask.job} has no rows", remedy="build the manifest from a folder with data"
        )


def resolve_settings(event: JobOpenRequested, job: Job | None, start: m.StartPoint) -> m.JobSettings:
    """Settings of a new generation: seed and lanes from the request, else the record, else drawn and lcm(12, W)."""
    asked = event.message.settings
    record = job.current.settings if job is not None else None
    seed = asked.seed
    if seed is None:
        seed = record.seed if record is not None and record.seed is not None else event.drawn_seed
    lanes, world = asked.lanes, asked.world_size
    resumes = start.kind != "fresh"
    if lanes is None:
        if start.kind == "checkpoint" and start.taken:
            lanes = len(start.taken)
        elif record is not None and record.lanes and (resumes or record.lanes % world == 0):
            lanes = record.lanes
        else:
            lanes = default_lanes(world)
    if lanes % world:
        fits = ", ".join(map(str, divisors(lanes)))
        kind = StateMismatch if resumes else ConfigError
        raise kind(
            f"world size {world} does not divide {lanes} lanes",
            cause=f"world sizes that do: {fits}",
            remedy="choose one of them" if resumes else "choose one of them, or leave lanes unset",
            detail={"lanes": lanes, "world_sizes": divisors(lanes)},
        )
    return replace(asked, seed=seed, lanes=lanes)


def check_start(start: m.StartPoint, settings: m.JobSettings, rows: int) -> None:
    """Raise ``StateMismatch`` for a checkpoint that does not fit the settings and the data, ``ConfigError`` for a fresh
    start that is not the beginning of an epoch."""
    if start.kind == "fresh" and (start.epoch < 0 or start.step or start.inside or start.lanes or start.carried):
        raise ConfigError(
            f"a fresh start at epoch {start.epoch} step {start.step}",
            cause="it must be the beginning of an epoch, 0 or later",
        )
    if start.kind != "checkpoint":
        return
    if start.epoch < 0 or start.step < 0:
        raise _outside(f"epoch {start.epoch}, step {start.step}")
    if settings.order == "dynamic":
        _check_dynamic(start, settings, rows)
        return
    if start.ranges or start.lanes or start.carried:
        raise StateMismatch("the state is one of a job in dynamic order", cause="this job's order is deterministic")
    lanes = settings.lanes or 1
    if len(start.taken) != lanes:
        raise StateMismatch(
            f"the state has counts for {len(start.taken)} lanes", cause=f"the job has {lanes}", detail={"lanes": lanes}
        )
    taken = np.asarray(start.taken, np.int64)
    if (taken < 0).any() or (taken > lane_sizes(rows, lanes)).any():
        raise _outside(f"{int(taken.sum())} rows taken in {lanes} lanes, the dataset has {rows} rows")


def _outside(cause: str) -> StateMismatch:
    return StateMismatch("the state's position is not inside an epoch of this dataset", cause=cause)


def _check_dynamic(start: m.StartPoint, settings: m.JobSettings, rows: int) -> None:
    if start.taken:
        raise StateMismatch("the state is one of a job in deterministic order", cause="this job's order is dynamic")
    whole, taken = Ranges.of([(0, rows)]), Ranges.decode(start.ranges)
    if taken - whole:
        raise _outside(f"rows up to {int(taken.bounds[-1, 1])} were taken, the dataset has {rows} rows")
    held = Ranges.of([])
    for grants in start.lanes:
        lane = restore(grants, settings, start, rows)
        own = Ranges.of((p.start, p.stop) for p in lane.pieces if p.epoch == start.epoch)
        unread = Ranges.of((a, b) for e, a, b in lane.remaining(grants.place) if e == start.epoch)
        fits = lane.dropped <= grants.place <= lane.certain and not own & held and not own - whole
        if not fits or unread & taken or lane.left(grants.place) - taken:
            raise _outside(f"the lane of rank {grants.rank} does not fit the rows taken")
        held |= own
    carried = decode_pieces(start.carried)
    if any(p.epoch >= start.epoch or p.stop > rows for p in carried):
        raise _outside("rows are carried over from no earlier epoch")
    if carried and not settings.elastic:
        raise StateMismatch(
            f"the state carries {sum(map(len, carried))} rows of earlier epochs over into epoch {start.epoch}",
            cause="only elastic jobs hand such rows out",
            remedy="resume with elastic=True, or start at the next epoch",
        )


def restore(grants: m.LaneGrants, settings: m.JobSettings, start: m.StartPoint, rows: int) -> Lane:
    """A lane of a start point. Raises ``StateMismatch`` for one that cannot be."""
    window = window_rows(settings.shuffle, rows, start.world_size or settings.world_size)
    try:
        return Lane.restore(grants, seed=settings.seed or 0, epoch=start.epoch, window=window)
    except ProtocolError as error:
        raise StateMismatch(f"the lane of rank {grants.rank} in the state is damaged", cause=str(error)) from None


def normal(start: m.StartPoint, settings: m.JobSettings, rows: int) -> m.StartPoint:
    """The start point as generations keep it: with lanes only where all ranks can go on with theirs.

    They cannot when the world size changed, when a lane has more rows than its rank may still hand out (ranks stood
    unevenly, close to the end of the epoch), or in an elastic job, where another holder may take a rank's place: then what
    they had not handed out is in the pool.
    """
    if settings.order != "dynamic" or start.kind != "checkpoint" or not start.lanes:
        return start
    world = settings.world_size
    lanes = tuple(sorted(start.lanes, key=lambda grants: grants.rank))
    usable = (
        not settings.elastic
        and start.world_size in (0, world)
        and [grants.rank for grants in lanes] == list(range(world))
    )
    if usable and has_quotas(settings):
        quotas = lane_sizes(rows - len(Ranges.decode(start.ranges)), world).tolist()
        lengths = [grants.dropped + sum(map(len, decode_pieces(grants.pieces))) for grants in lanes]
        usable = all(length <= grants.place + quotas[grants.rank] for length, grants in zip(lengths, lanes))
    return msgspec.structs.replace(start, lanes=lanes if usable else ())


def latest(job: Job, world_size: int) -> m.StartPoint:
    """The start point the record stands for: rows acknowledged in the lowest epoch that is not over for all ranks.

    A rank that is through with that epoch has taken everything of its lanes there. ``world_size``: of the generation to
    come; with the present one lanes of the dynamic order go on.
    """
    if not job.has_progress():
        return m.StartPoint(kind="fresh")
    generation = job.current
    settings, epoch = generation.settings, job.open_epoch()
    start = generation.start
    step = start.step if epoch == start.epoch else 0
    for record in job.ranks.get(epoch, {}).values():
        step = max(step, record.progress.acked_step)
    first = start.first_epoch
    if settings.epochs is not None and epoch >= first + settings.epochs:
        first = epoch - (epoch - first) % settings.epochs
    found = m.StartPoint(
        kind="checkpoint",
        epoch=epoch,
        step=step,
        first_epoch=first,
        generation=generation.number,
        job=job.name,
        world_size=settings.world_size,
        skip=settings.on_error == "skip",
    )
    position = _latest_dynamic(job, epoch, world_size) if job.is_dynamic else {"taken": _latest_taken(job, epoch)}
    return msgspec.structs.replace(found, **position)


def _latest_taken(job: Job, epoch: int) -> tuple[int, ...]:
    generation, settings = job.current, job.current.settings
    sizes = books.sizes_of(generation)
    taken = books.start_counts(generation, epoch).copy()
    for rank in range(settings.world_size):
        own = slice(rank, settings.lanes, settings.world_size)
        record = job.ranks.get(epoch, {}).get(rank)
        if job.rank_epoch(rank) > epoch and (record is None or record.progress.state != "open"):
            taken[own] = sizes[own]
        elif record is not None:
            taken[own] = record.progress.acked
    return tuple(taken.tolist())


def _latest_dynamic(job: Job, epoch: int, world_size: int) -> dict[str, Any]:
    generation, pool, ranks = job.current, job.pools.get(epoch), job.ranks.get(epoch, {})
    start = generation.start
    if pool is None:
        if epoch != start.epoch:
            return {}
        same = world_size == job.world_size
        return {"ranges": start.ranges, "lanes": start.lanes if same else (), "carried": start.carried}
    lanes, carried = [], pool.carried
    for rank in range(job.world_size):
        held = pool.lanes.get(rank)
        record = ranks.get(rank)
        place = 0 if held is None else held.begun if record is None else record.progress.acked[0]
        if held is None:
            lanes.append(m.LaneGrants(rank=rank, number=rank))
            continue
        lanes.append(held.grants(rank, place))
        if pool.carried_in:
            carried = union(carried, [s for s in without(held.own(), left_rows(held.lane, place)) if s[0] != epoch])
    gone = any(member.gone or member.tenure for member in job.members.values())
    ended = any(held.ended is not None for held in pool.lanes.values())
    same = world_size == job.world_size and not gone and not ended
    return {
        "ranges": (pool.taken(ranks)[1]).encode(),
        "lanes": tuple(lanes) if same else (),
        "carried": encode_stretches(carried),
    }


def drop_warning(generation: GenerationRecord) -> str:
    """What to say when ranks that acknowledged unevenly make tail ``drop`` leave over a global batch or more; else ""."""
    settings, start = generation.settings, generation.start
    if settings.tail != "drop" or settings.steps_per_epoch is not None or start.kind == "fresh":
        return ""
    if settings.order == "dynamic":
        return ""  # ranks share what is left
    sizes = books.sizes_of(generation)
    rows = sum(books.left_over(settings, sizes, books.start_counts(generation, start.epoch)))
    if rows < settings.world_size * settings.batch_size:
        return ""
    return (
        f"job {generation.job} resumes epoch {start.epoch} where its ranks acknowledged unevenly: {rows} rows of it will "
        f"be dropped, as every rank hands out as many batches as the one with the fewest rows left (tail 'drop')"
    )


def check_identity(job: Job, asked: m.JobSettings) -> None:
    """Raise ``StateMismatch`` when "latest" would put the record's position on other data or another order."""
    record = job.current.settings
    differences = [
        text
        for name, text in setting_differences(record, asked)
        if name in IDENTITY and not (name in ("seed", "lanes") and getattr(asked, name) is None)
    ]
    if differences:
        raise StateMismatch(f"the record of job {job.name} belongs to something else", cause="; ".join(differences))


def setting_differences(job: m.JobSettings, asked: m.JobSettings) -> list[tuple[str, str]]:
    """(name, "name: job has X, this rank asks Y") of each setting that differs; seed and lanes None differ from nothing."""
    found = []
    for name in job.__struct_fields__:
        have, want = getattr(job, name), getattr(asked, name)
        if name in ("seed", "lanes") and want is None:
            continue
        if name == "sources":
            have, want = [(s.digest, s.weight) for s in have], [(s.digest, s.weight) for s in want]
        if have != want:
            found.append((name, f"{name}: job has {_show(have)}, this rank asks {_show(want)}"))
    return found


def start_differences(generation: GenerationRecord, asked: m.StartPoint) -> list[tuple[str, str]]:
    """The same for start points. "latest" equals a generation that was opened with "latest"."""
    have = generation.start
    if generation.latest or asked.kind == "latest":
        if generation.latest and asked.kind == "latest":
            return []
        kind = "latest" if generation.latest else have.kind
        return [("start", f"start: job has {kind}, this rank asks {asked.kind}")]
    found = []
    for name in ("kind", "epoch", "step"):
        if getattr(have, name) != getattr(asked, name):
            found.append((name, f"{name}: job has {getattr(have, name)}, this rank asks {getattr(asked, name)}"))
    if not found and tuple(have.taken) != tuple(asked.taken):
        found.append(
            ("taken", f"rows taken: job has {_show(list(have.taken))}, this rank asks {_show(list(asked.taken))}")
        )
    if not found and (have.ranges, have.lanes, have.carried) != (asked.ranges, asked.lanes, asked.carried):
        counts = [len(Ranges.decode(start.ranges)) for start in (have, asked)]
        text = f"rows taken: job has {counts[0]} rows, this rank asks {counts[1]}"
        found.append(("taken", text if counts[0] != counts[1] else f"{text}, but others"))
    return found


def replace(settings: m.JobSettings, **changes: Any) -> m.JobSettings:
    """A copy of ``settings`` with some fields changed."""
    return msgspec.structs.replace(settings, **changes)


def _show(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        inner = ", ".join(f"{name}={getattr(value, name)!r}" for name in value.__struct_fields__)
        return f"{type(value).__name__}({inner})"
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
