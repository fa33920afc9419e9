"""Giving ranks the right to read shards, on the workers that placement chooses."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from manifests.errors import ConfigError, NoWorker
from manifests.wire import codec
from manifests.wire import messages as m

from . import events, placement, records
from .effects import Outbox
from .job import Job
from .jobs import Jobs
from .library import Library, ShardInfo
from .workers import Worker, Workers

WaitingCode = Literal["", "wait-timeout", "no-worker", "rank-absent"]

#: how long a grant is good for, ms
EXPIRY_MS = 120_000
#: open shards kept per rank; the least recently renewed go first
MAX_OPEN = 512
#: epochs a rank may be ahead of the slowest
MAX_AHEAD = 2
#: endpoints in one FlightInfo
MAX_ENDPOINTS = 10_000


@dataclass(frozen=True, slots=True)
class MoreRows:
    """What the pool of a job in dynamic order answers to an ask; fields as in ``messages.Grants``."""

    lane: m.LaneGrants | None = None
    final: bool = False
    floor: m.Floor | None = None
    carried: bytes = b""


class Grants:
    """Places shards on workers and signs grants."""

    def __init__(self, out: Outbox, jobs: Jobs, workers: Workers, library: Library) -> None:
        self._out = out
        self._jobs = jobs
        self._workers = workers
        self._library = library
        self.keys: dict[str, records.KeyRecord] = {}
        #: open shards per worker, over all jobs
        self.loads: Counter[str] = Counter()
        #: content id -> worker -> open shards, over all jobs
        self._homes: dict[str, Counter[str]] = {}
        #: (job, rank) whose assignments changed in this event
        self._changed: set[int] = set()
        jobs.on_release = self.release
        #: dynamic order: gives the rank more of the plan
        self.more_rows: Callable[[events.GrantsRequested, Job], MoreRows] = lambda event, job: MoreRows()

    # -- asking

    def on_ask(self, event: events.GrantsRequested) -> None:
        ask = event.message
        job = self._jobs.member(ask.job, ask.generation, ask.rank, ask.holder, event.at)
        for failure in ask.failures:
            self._workers.on_failure(failure, ask.job)
        if len(ask.shards) > MAX_OPEN:
            raise ConfigError(f"{len(ask.shards)} shards asked for at once", cause=f"the limit is {MAX_OPEN}")
        infos = self._look_up(job, ask.shards)
        self._changed.clear()
        for done in ask.done:
            self._close(job, ask.rank, (ask.epoch, done.source, done.shard))
        waiting, code = self._not_yet(event.at, job, ask)
        found: list[m.GrantInfo] = []
        more = MoreRows()
        if not waiting:
            if job.current.settings.order == "dynamic" and ask.want:
                more = self.more_rows(event, job)
            found, waiting = self._grant(event, job, infos)
            code = "no-worker" if waiting else ""
        self._store(job)
        self._out.reply(
            event.request,
            m.Grants(
                grants=tuple(found),
                now_ms=event.now_ms,
                waiting=waiting,
                waiting_code=code,
                lane=more.lane,
                final=more.final,
                floor=more.floor,
                carried=more.carried,
            ),
        )

    def _look_up(self, job: Job, shards: Iterable[m.ShardAsk]) -> list[tuple[m.ShardAsk, ShardInfo]]:
        sources = job.current.settings.sources
        found = []
        for ask in shards:
            source = sources[ask.source] if 0 <= ask.source < len(sources) else None
            info = self._library.shard(source.digest, ask.shard) if source is not None else None
            if info is None:
                raise ConfigError(f"job {job.name} has no shard {ask.shard} of source {ask.source}")
            found.append((ask, info))
        return found

    def _not_yet(self, at: float, job: Job, ask: m.AskGrants) -> tuple[str, WaitingCode]:
        """Why this rank must wait whatever the workers do, "" if it need not, and the error that should become of it."""
        if absent := job.absent:
            names = ", ".join(map(str, absent[:8])) + (" .." if len(absent) > 8 else "")
            verb = "ranks {} have" if len(absent) > 1 else "rank {} has"
            return f"{verb.format(names)} not joined", "rank-absent"
        epoch, rank = job.slowest()
        if ask.epoch <= epoch + MAX_AHEAD:
            return "", ""
        if job.is_live(rank, at, self._jobs.lease):
            return f"rank {rank} is still in epoch {epoch}", "wait-timeout"
        silent = at - job.liveness[rank].heard if rank in job.liveness else 0.0
        return f"rank {rank} is still in epoch {epoch}, and was not heard for {silent:.0f} s", "rank-absent"

    def _grant(
        self, event: events.GrantsRequested, job: Job, infos: list[tuple[m.ShardAsk, ShardInfo]]
    ) -> tuple[list[m.GrantInfo], str]:
        ask = event.message
        usable, waiting = self._usable(event.at, job, ask.avoid)
        found: list[m.GrantInfo] = []
        key = self._key()
        expires = event.now_ms + EXPIRY_MS
        for shard_ask, info in infos:
            able = {w.message.id for w in usable if w.can_read(info.format)}
            if not able:
                waiting = waiting or f"no worker that is up reads {info.format!r} shards"
                continue
            place = (ask.epoch, shard_ask.source, shard_ask.shard)
            chosen = placement.place(info.content_id, able, self.loads, self._preferred(job, ask.rank, place, info))
            self._open(job, ask.rank, place, info, chosen[0])
            grant = _grant(job.current, ask, shard_ask, info, chosen, expires)
            found.append(self._signed(grant, shard_ask.source, key))
        if found and not job.current.granted:
            self._update(job, granted=True)
        return found, waiting

    def _usable(self, at: float, job: Job, avoid: tuple[str, ...]) -> tuple[list[Worker], str]:
        """Workers for this job now, and why there is none. A job that decodes keeps to one decode fingerprint."""
        found = self._workers.candidates(at, avoid)
        if not found:
            return [], self._workers.none_reason(at, avoid)
        generation = job.current
        if not generation.decodes:
            return found, ""
        prints = Counter(w.message.fingerprint for w in found)
        if not generation.granted and generation.fingerprint not in prints:
            chosen = max(prints, key=lambda name: (prints[name], name))
            self._update(job, fingerprint=chosen)
            generation = job.current
        same = [w for w in found if w.message.fingerprint == generation.fingerprint]
        if same:
            return same, ""
        others = ", ".join(f"{count} of {name!r}" for name, count in sorted(prints.items())[:3])
        return [], f"no worker with decode fingerprint {generation.fingerprint!r} is up; there are {others}"

    def _preferred(self, job: Job, rank: int, place: tuple[int, int, int], info: ShardInfo) -> list[str]:
        own = job.assignments.get(rank, {}).get(place)
        homes = self._homes.get(info.content_id, Counter())
        others = sorted(homes, key=lambda worker: (-homes[worker], worker))
        return [*([own] if own else []), *others]

    def _update(self, job: Job, **changes: object) -> None:
        generation = msgspec.structs.replace(job.current, **changes)
        job.generations[generation.number] = generation
        self._out.put(generation)
        if "fingerprint" in changes:
            self._out.log(logging.INFO, f"job {job.name} keeps to decode fingerprint {generation.fingerprint!r}")

    # -- stock Flight clients

    def on_stock(self, event: events.StockGrantsRequested) -> None:
        """Grants without a job: the reply is a list of (GrantInfo, rows, bytes)."""
        usable = self._workers.candidates(event.at, ())
        if not usable:
            raise NoWorker("no worker could serve this dataset", cause=self._workers.none_reason(event.at))
        key, answer = self._key(), []
        ask = m.AskGrants(job="", generation=0, rank=0, holder="", epoch=0)
        for ordinal in range(event.first, event.first + min(event.count, MAX_ENDPOINTS)):
            info = self._library.shard(event.manifest, ordinal)
            if info is None:
                break
            able = {w.message.id for w in usable if w.can_read(info.format)}
            chosen = placement.place(info.content_id, able, self.loads, list(self._homes.get(info.content_id, ())))
            if not chosen:
                raise NoWorker(f"no worker that is up reads {info.format!r} shards")
            shard = m.ShardAsk(source=0, shard=ordinal)
            grant = _grant(None, ask, shard, info, chosen, event.now_ms + EXPIRY_MS, event.manifest, event.spec)
            answer.append((self._signed(grant, 0, key), info))
        self._out.reply(event.request, answer)

    # -- signing

    def on_key(self, event: events.KeyDrawn) -> None:
        if not self.keys:
            record = records.KeyRecord(id=event.id, secret=event.secret, created_ms=event.now_ms)
            self.keys[record.id] = record
            self._out.put(record)

    def secrets(self) -> dict[str, bytes]:
        """Signing keys by id, for workers."""
        return {name: record.secret for name, record in self.keys.items()}

    def _key(self) -> records.KeyRecord:
        return max(self.keys.values(), key=lambda record: (record.created_ms, record.id))

    def _signed(self, grant: m.Grant, source: int, key: records.KeyRecord) -> m.GrantInfo:
        refs = []
        for name in grant.workers:
            worker = self._workers.get(name)
            if worker is not None:
                refs.append(m.WorkerRef(id=name, address=worker.message.address))
        return m.GrantInfo(
            source=source,
            shard=grant.shard,
            workers=tuple(refs),
            expires_ms=grant.expires_ms,
            signed=codec.sign(grant, key.id, key.secret),
        )

    # -- assignments

    def _open(self, job: Job, rank: int, place: tuple[int, int, int], info: ShardInfo, worker: str) -> None:
        mine = job.assignments.setdefault(rank, {})
        old = mine.pop(place, None)
        mine[place] = worker
        if old == worker:
            return
        if old is not None:
            self._count(info.content_id, old, -1)
        self._count(info.content_id, worker, 1)
        self._changed.add(rank)
        while len(mine) > MAX_OPEN:
            self._close(job, rank, next(iter(mine)))

    def _close(self, job: Job, rank: int, place: tuple[int, int, int]) -> None:
        worker = job.assignments.get(rank, {}).pop(place, None)
        if worker is not None:
            self._count(self._content(job, place), worker, -1)
            self._changed.add(rank)

    def drop(self, job: Job, rank: int, epoch: int | None) -> None:
        """The rank needs no shard of ``epoch`` (None: at all) any more."""
        self._changed.clear()
        for place in list(job.assignments.get(rank, {})):
            if epoch is None or place[0] <= epoch:
                self._close(job, rank, place)
        self._store(job)

    def release(self, job: Job) -> None:
        """The job's generation ends: count none of its open shards any more."""
        for mine in job.assignments.values():
            for place, worker in mine.items():
                self._count(self._content(job, place), worker, -1)

    def load(self, job: Job, record: records.AssignmentRecord) -> None:
        """Take a stored record in."""
        mine = job.assignments.setdefault(record.rank, {})
        for item in record.open:
            place, worker = (item.epoch, item.source, item.shard), record.workers[item.worker]
            mine[place] = worker
            self._count(self._content(job, place), worker, 1)

    def _content(self, job: Job, place: tuple[int, int, int]) -> str:
        info = self._library.shard(job.current.settings.sources[place[1]].digest, place[2])
        return info.content_id if info is not None else ""

    def _count(self, content_id: str, worker: str, change: int) -> None:
        self.loads[worker] += change
        homes = self._homes.setdefault(content_id, Counter())
        homes[worker] += change
        if self.loads[worker] <= 0:
            del self.loads[worker]
        if homes[worker] <= 0:
            del homes[worker]
        if not homes:
            del self._homes[content_id]

    def _store(self, job: Job) -> None:
        for rank in sorted(self._changed):
            mine = job.assignments.get(rank, {})
            names = sorted(set(mine.values()))
            index = {name: number for number, name in enumerate(names)}
            self._out.put(
                records.AssignmentRecord(
                    job=job.name,
                    generation=job.record.generation,
                    rank=rank,
                    workers=tuple(names),
                    open=tuple(records.Assigned(*place, index[worker]) for place, worker in mine.items()),
                )
            )
        self._changed.clear()


def _grant(
    generation: records.GenerationRecord | None,
    ask: m.AskGrants,
    shard: m.ShardAsk,
    info: ShardInfo,
    workers: tuple[str, ...],
    expires_ms: int,
    manifest: str = "",
    spec: str = "",
) -> m.Grant:
    settings = generation.settings if generation is not None else None
    return m.Grant(
        job=ask.job,
        tenant=settings.tenant if settings is not None else "default",
        generation=ask.generation,
        rank=ask.rank,
        epoch=ask.epoch,
        seed=(settings.seed or 0) if settings is not None else 0,
        source=shard.source,
        manifest=settings.sources[shard.source].digest if settings is not None else manifest,
        spec=settings.spec if settings is not None else spec,
        shard=shard.shard,
        uri=info.uri,
        format=info.format,
        rows=info.rows,
        bytes=info.bytes,
        content_id=info.content_id,
        first_id=info.first_id,
        first_row=0,
        last_row=info.rows,
        workers=workers,
        expires_ms=expires_ms,
    )
