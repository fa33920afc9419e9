"""The ``status`` document: what there is and how it is. Pure."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from manifests.plan import lane_sizes
from manifests.wire import messages as m

from . import reasons
from .events import Asked
from .job import Job
from .pool import has_quotas
from .state import State
from .workers import Worker

#: shards in quarantine that are listed per job
LISTED = 1000


def collect(state: State, event: Asked) -> dict[str, Any]:
    """Workers, jobs and datasets as of now; the service adds ``dispatcher`` and ``etcd``."""
    return {
        "workers": [_worker(state, found, event.at) for _, found in sorted(state.workers.by_id.items())],
        "jobs": [_job(state, job, event) for _, job in sorted(state.jobs.by_name.items())],
        "datasets": [
            {
                "name": record.name,
                "version": record.version,
                "digest": record.digest,
                "rows": record.rows,
                "shards": record.shards,
            }
            for record in state.datasets.all()
        ],
    }


def _worker(state: State, worker: Worker, at: float) -> dict[str, Any]:
    beat, speed = worker.beat, worker.speed(at)
    return {
        "id": worker.message.id,
        "address": worker.message.address,
        "state": worker.state,
        "capabilities": list(worker.capabilities),
        "fingerprint": worker.message.fingerprint,
        "host": worker.message.host,
        "pid": worker.message.pid,
        "memory_bytes": worker.message.memory_bytes,
        "cache_bytes": beat.cache_bytes if beat is not None else 0,
        "queue_bytes": beat.queue_bytes if beat is not None else 0,
        "active_reads": beat.active_reads if beat is not None else 0,
        "rows_served": beat.rows_served if beat is not None else 0,
        "bytes_served": beat.bytes_served if beat is not None else 0,
        "open_shards": state.grants.open.shards[worker.message.id],
        "read_bytes_per_s": round(speed * 1000) if speed is not None else None,
        "suspect": worker.suspect,
        "failures": dict(sorted(worker.failures.items())),
    }


def _job(state: State, job: Job, event: Asked) -> dict[str, Any]:
    generation, lease = job.current, state.lease
    quarantined = state.grants.quarantine.all(job)
    settings = generation.settings
    source = settings.sources[0]
    name = source.name or source.digest
    absent = reasons.not_joined(job.absent) if job.absent else ""
    return {
        "name": job.name,
        "tenant": settings.tenant,
        "dataset": f"{name}@{source.version}" if source.version else name,
        "digest": source.digest,
        "generation": generation.number,
        "state": job.state(event.at, lease),
        "epoch": job.newest_epoch(),
        "epochs": settings.epochs,
        "rows": generation.rows,
        "world_size": settings.world_size,
        "batch_size": settings.batch_size,
        "steps_per_epoch": steps_per_epoch(settings, generation.rows),
        "ranks": [_rank(job, rank, event, lease, absent) for rank in range(settings.world_size)],
        "quarantined": [
            {**msgspec.structs.asdict(shard), "workers": list(shard.workers)} for shard in quarantined[:LISTED]
        ],
        "quarantined_shards": len(quarantined),
    }


def _rank(job: Job, rank: int, event: Asked, lease: float, absent: str) -> dict[str, Any]:
    """``absent``: the ranks that have not joined yet, "" when all have."""
    at = event.at
    member, live = job.members.get(rank), job.liveness.get(rank)
    waiting_for, waiting_s = "", 0.0
    if member is not None and member.left:
        state = "done"
    elif member is None or live is None or not job.is_live(rank, at, lease):
        state = "absent"
    elif absent:
        state, waiting_for = "waiting", absent
        waiting_s = max(0.0, round(at - live.waiting_since, 1))
    else:
        state = live.state
        if state == "waiting":
            waiting_for, waiting_s = live.waiting_for, max(0.0, round(at - live.waiting_since, 1))
    epochs = [epoch for epoch, ranks in job.ranks.items() if rank in ranks]
    epoch = max(epochs) if epochs else job.rank_epoch(rank)
    book = job.ranks.get(epoch, {}).get(rank)
    start = job.current.start
    started = start.step if epoch == start.epoch else 0
    return {
        "rank": rank,
        "state": state,
        "epoch": epoch,
        "step": book.progress.step if book is not None else started,
        "rows": sum(book.progress.handed) if book is not None else 0,
        "waiting_for": waiting_for,
        "waiting_s": waiting_s,
        "host": member.holder.host if member is not None else "",
        "pid": member.holder.pid if member is not None else 0,
    }


def steps_per_epoch(settings: m.JobSettings, rows: int) -> int | None:
    """Steps of a whole epoch; for tail ``ragged`` those of the rank with the most. None in dynamic order without quotas,
    where ranks take rows until there are none."""
    world, batch = settings.world_size, settings.batch_size
    if settings.steps_per_epoch is not None:
        return settings.steps_per_epoch
    if settings.order == "dynamic" and not has_quotas(settings):
        return None
    if settings.tail == "drop":
        return rows // (world * batch)
    if settings.tail == "pad":
        return math.ceil(math.ceil(rows / world) / batch)
    sizes = lane_sizes(rows, settings.lanes or world)
    return max(math.ceil(int(sizes[rank::world].sum()) / batch) for rank in range(world))
