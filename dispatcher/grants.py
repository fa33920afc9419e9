"""Giving ranks the right to read shards, on the workers that placement chooses."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from manifests.errors import ConfigError, NoWorker, UnknownDataset
from manifests.wire import codec
from manifests.wire import messages as m

from . import events, limits, placement, reasons, records
from .effects import Outbox
from .job import Job, OpenShard
from .jobs import Jobs
from .library import Library, ShardInfo
from .loads import Loads
from .placement import Fleet
from .quarantine import ABOUT_SHARD, Quarantine
from .workers import Worker, Workers

WaitingCode = Literal["", "wait-timeout", "no-worker", "rank-absent"]

#: how long a grant is good for, ms
EXPIRY_MS = 120_000
#: open shards kept per rank; the least recently renewed go first
MAX_OPEN = limits.MOST_SHARDS
#: epochs a rank may be ahead of the slowest
MAX_AHEAD = 2
#: sets of workers kept ready for placement
KEPT_FLEETS = 256
#: endpoints in one FlightInfo
MAX_ENDPOINTS = 10_000


@dataclass(frozen=True, slots=True)
class MoreRows:
    """What the pool of a job in dynamic order answers to an ask; fields as in ``messages.Grants``."""

    lane: m.LaneGrants | None = None
    final: bool = False
    floor: m.Floor | None = None
    carried: bytes = b""
    waiting: str = ""


class Grants:
    """Places shards on workers and signs grants."""

    def __init__(self, out: Outbox, jobs: Jobs, workers: Workers, library: Library) -> None:
        self._out = out
        self._jobs = jobs
        self._workers = workers
        self._library = library
        self.keys: dict[str, records.KeyRecord] = {}
        self.quarantine = Quarantine(out)
        #: what the workers have open, over all jobs
        self.open = Loads()
        #: job -> (generation, epoch that every rank has reached, when that was last looked at)
        self._reached: dict[str, tuple[int, int]] = {}
        #: (decode fingerprint, workers to avoid) -> the workers, and by format what places shards on them; good for one
        #: version of the workers, until the first speed is not known any more
        self._kept: dict[tuple[str | None, tuple[str, ...]], tuple[list[Worker], dict[str, Fleet]]] = {}
        self._version, self._until = -1, math.inf
        #: ranks whose assignments changed in this event
        self._changed: set[int] = set()
        jobs.on_release = self.release
        #: dynamic order: gives the rank more of the plan
        self.more_rows: Callable[[events.GrantsRequested, Job], MoreRows] = lambda event, job: MoreRows()

    @property
    def loads(self) -> Mapping[str, int]:
        """Open shards per worker, over all jobs."""
        return self.open.shards

    # -- asking

    def on_ask(self, event: events.GrantsRequested) -> None:
        ask = event.message
        job = self._jobs.member(ask.job, ask.generation, ask.rank, ask.holder, event.at)
        limits.check_ask(ask)
        infos = self._look_up(job, ask.shards)
        for failure in ask.failures:
            self._on_failure(event, job, failure)
        for speed in ask.speeds:
            self._workers.on_speed(speed, event.at)
        self._changed.clear()
        for done in ask.done:
            self._close(job, ask.rank, (ask.epoch, done.source, done.shard))
        infos, quarantined = self._set_aside(job, ask, infos)
        waiting, code = self._not_yet(event.at, job, ask)
        found: list[m.GrantInfo] = []
        more = MoreRows()
        if not waiting:
            if job.current.settings.order == "dynamic" and ask.want:
                more = self.more_rows(event, job)
            found, waiting = self._grant(event, job, infos)
            code = "no-worker" if waiting else "wait-timeout" if more.waiting else ""
            waiting = waiting or more.waiting
        self._store(job)
        self._out.reply(
            event.request,
            m.Grants(
                grants=tuple(found),
                now_ms=event.now_ms,
                waiting=waiting,
                waiting_code=code,
                quarantined=quarantined,
                lane=more.lane,
                final=more.final,
                floor=more.floor,
                carried=more.carried,
            ),
        )

    def _look_up(self, job: Job, shards: Iterable[m.ShardAsk]) -> list[tuple[m.ShardAsk, ShardInfo]]:
        digests = [source.digest for source in job.current.settings.sources]
        look = self._library.shard
        found = []
        for ask in shards:
            info = look(digests[ask.source], ask.shard) if 0 <= ask.source < len(digests) else None
            if info is None:
                raise ConfigError(f"job {job.name} has no shard {ask.shard} of source {ask.source}")
            found.append((ask, info))
        return found

    def _on_failure(self, event: events.GrantsRequested, job: Job, failure: m.ReadFailure) -> None:
        self._workers.on_failure(failure, job.name)
        sources = job.current.settings.sources
        if failure.code not in ABOUT_SHARD or not 0 <= failure.source < len(sources):
            return
        info = self._library.shard(sources[failure.source].digest, failure.shard)
        if info is None or self._workers.get(failure.worker) is None:
            return
        generation = job.current
        peers = [
            worker.message.id
            for worker in self._workers.up()
            if worker.can_read(info.format)
            and (not generation.decodes or worker.message.fingerprint == generation.fingerprint)
        ]
        self.quarantine.on_failure(job, failure, info, peers, event.at, event.now_ms)

    def _set_aside(
        self, job: Job, ask: m.AskGrants, infos: list[tuple[m.ShardAsk, ShardInfo]]
    ) -> tuple[list[tuple[m.ShardAsk, ShardInfo]], tuple[m.QuarantinedShard, ...]]:
        """Those of the shards that may be read, and those in quarantine."""
        if not job.quarantine:
            return infos, ()
        good, bad = [], []
        for shard, info in infos:
            found = self.quarantine.find(job, shard.source, shard.shard)
            if found is None:
                good.append((shard, info))
            else:
                bad.append(found)
                self._close(job, ask.rank, (ask.epoch, shard.source, shard.shard))
        return good, tuple(bad)

    def _not_yet(self, at: float, job: Job, ask: m.AskGrants) -> tuple[str, WaitingCode]:
        """Why this rank must wait whatever the workers do, "" if it need not, and the error that should become of it."""
        generation = job.current
        if not generation.granted and (absent := job.absent):
            return reasons.not_joined(absent), "rank-absent"
        number, reached = self._reached.get(job.name, (0, 0))
        if number == generation.number and ask.epoch <= reached + MAX_AHEAD:
            return "", ""
        epoch, rank = job.slowest()
        self._reached[job.name] = (generation.number, epoch)
        if ask.epoch <= epoch + MAX_AHEAD:
            return "", ""
        if job.is_live(rank, at, self._jobs.lease):
            return reasons.behind(rank, epoch), "wait-timeout"
        silent = at - job.liveness[rank].heard if rank in job.liveness else 0.0
        return reasons.behind(rank, epoch, silent), "rank-absent"

    def _grant(
        self, event: events.GrantsRequested, job: Job, infos: list[tuple[m.ShardAsk, ShardInfo]]
    ) -> tuple[list[m.GrantInfo], str]:
        ask = event.message
        if not infos:
            return [], ""
        mine = job.assignments.setdefault(ask.rank, {})
        places = [(ask.epoch, shard.source, shard.shard) for shard, _ in infos]
        sizes = [placement.size_of(info.bytes) for _, info in infos]
        coming = sum(size for place, size in zip(places, sizes) if place not in mine)
        fleets, missing = self._fleets(event.at, job, ask.avoid, {info.format for _, info in infos})
        orders: dict[str, list[str]] = {}
        for shard_format, fleet in fleets.items():
            fleet.expect(coming)
            ids = list({info.content_id for _, info in infos if info.format == shard_format})
            orders.update(zip(ids, fleet.orders(ids)))
        found: list[m.GrantInfo] = []
        waiting = ""
        key = self._key()
        generation, expires = job.current, event.now_ms + EXPIRY_MS
        for (shard, info), place, size in zip(infos, places, sizes):
            chosen = fleets[info.format].place(
                orders[info.content_id],
                size,
                own=mine.get(place),
                homes=self._homes(info),
                without=self.quarantine.failed_on(job, shard.source, shard.shard),
            )
            if not chosen:
                reason = missing or f"no worker that is up reads {info.format!r} shards"
                waiting = waiting or f"{_name(shard)}: {reason}"
                continue
            self._open(job, ask.rank, place, info, chosen[0])
            found.append(self._signed(_grant(generation, ask, shard, info, chosen, expires), shard.source, key))
        if found and not job.current.granted:
            self._update(job, granted=True)
        return found, waiting

    def _fleets(
        self, at: float, job: Job, avoid: tuple[str, ...], formats: Iterable[str]
    ) -> tuple[dict[str, Fleet], str]:
        """The workers that may serve this job now, by format, and why there is none. Kept as long as the workers that may
        serve and their speeds stay the same."""
        if self._version != self._workers.version or not at <= self._until or len(self._kept) > KEPT_FLEETS:
            self._kept.clear()
            self._version = self._workers.version
            known = [worker.speed_until for worker in self._workers.by_id.values() if worker.speed(at) is not None]
            self._until = min(known, default=math.inf)
        name = (job.current.fingerprint if job.current.decodes else None, avoid)
        kept = self._kept.get(name)
        if kept is None:
            usable, missing = self._usable(at, job, avoid)
            kept = (usable, {})
            # a last resort is one for a moment only, and a job may have been given a fingerprint just now
            if not missing and not any(worker.suspect or worker.message.id in avoid for worker in usable):
                self._kept[job.current.fingerprint if job.current.decodes else None, avoid] = kept
        else:
            missing = ""
        usable, fleets = kept
        for shard_format in formats:
            if shard_format not in fleets:
                fleets[shard_format] = self._fleet(at, usable, shard_format)
        return {shard_format: fleets[shard_format] for shard_format in formats}, missing

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

    def _fleet(self, at: float, usable: Iterable[Worker], shard_format: str) -> Fleet:
        speeds = {worker.message.id: worker.speed(at) for worker in usable if worker.can_read(shard_format)}
        return Fleet(placement.weights(speeds), self.open.bytes)

    def _homes(self, info: ShardInfo) -> list[str]:
        """Workers that have the content open, most often first."""
        homes = self.open.homes(info.content_id)
        return sorted(homes, key=lambda worker: (-homes[worker], worker)) if len(homes) > 1 else [*homes]

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
        fleets: dict[str, Fleet] = {}
        for ordinal in range(event.first, event.first + min(event.count, MAX_ENDPOINTS)):
            info = self._library.shard(event.manifest, ordinal)
            if info is None:
                break
            fleet = fleets.get(info.format) or fleets.setdefault(
                info.format, self._fleet(event.at, usable, info.format)
            )
            order = fleet.orders([info.content_id])[0]
            chosen = fleet.place(order, placement.size_of(info.bytes), homes=self._homes(info))
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
        by_id = self._workers.by_id
        return m.GrantInfo(
            source=source,
            shard=grant.shard,
            workers=tuple([by_id[name].ref for name in grant.workers]),
            expires_ms=grant.expires_ms,
            signed=codec.sign(grant, key.id, key.secret),
        )

    # -- assignments

    def _open(self, job: Job, rank: int, place: OpenShard, info: ShardInfo, worker: str) -> None:
        mine = job.assignments.setdefault(rank, {})
        old = mine.pop(place, None)
        mine[place] = worker
        if old == worker:
            return
        digest = _digest(job, place)
        if old is not None:
            self.open.remove(digest, info.ordinal, old)
        self.open.add(digest, info, worker)
        self._changed.add(rank)
        while len(mine) > MAX_OPEN:
            self._close(job, rank, next(iter(mine)))

    def _close(self, job: Job, rank: int, place: OpenShard) -> None:
        worker = job.assignments.get(rank, {}).pop(place, None)
        if worker is not None:
            self.open.remove(_digest(job, place), place[2], worker)
            self._changed.add(rank)

    def drop(self, job: Job, rank: int, epoch: int | None) -> None:
        """The rank needs no shard of ``epoch`` (None: at all) any more."""
        self._changed.clear()
        for place in list(job.assignments.get(rank, {})):
            if epoch is None or place[0] <= epoch:
                self._close(job, rank, place)
        self._store(job)

    def release(self, job: Job) -> None:
        """The job's generation ends: count none of its open shards any more, nor failures on them."""
        self.quarantine.forget(job)
        self._reached.pop(job.name, None)
        for mine in job.assignments.values():
            for place, worker in mine.items():
                self.open.remove(_digest(job, place), place[2], worker)

    def load(self, job: Job, record: records.AssignmentRecord) -> None:
        """Take a stored record in. Shards of a manifest that is gone are left out: they are only where reads go first."""
        mine = job.assignments.setdefault(record.rank, {})
        for place, worker in record.open_shards.items():
            digest = _digest(job, place)
            try:
                info = self._library.shard(digest, place[2])
            except UnknownDataset:
                info = None
            if info is not None:
                mine[place] = worker
                self.open.add(digest, info, worker)

    def _store(self, job: Job) -> None:
        for rank in sorted(self._changed):
            mine = job.assignments.get(rank, {})
            self._out.put(records.AssignmentRecord.of(job.name, job.record.generation, rank, mine))
        self._changed.clear()


def _name(shard: m.ShardAsk) -> str:
    return f"shard {shard.shard}" + (f" of source {shard.source}" if shard.source else "")


def _digest(job: Job, place: OpenShard) -> str:
    return job.current.settings.sources[place[1]].digest


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
