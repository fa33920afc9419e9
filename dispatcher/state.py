"""The dispatcher's state: all of it, changed by events only.

``apply`` returns what to do about an event. It reads no clock and no randomness, does no I/O and starts no threads, so
the same events give the same state, and a test can walk through any history. A request that cannot be met changes
nothing and is answered with the error. What must survive is put as records; ``load`` builds the state from them again.
Memory only: workers, liveness of ranks, and what they wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from manifests.errors import FeedlineError, ProtocolError

from . import events, marks, progress, records
from .datasets import Datasets
from .effects import Effect, Outbox
from .elastic import Elastic
from .grants import MAX_OPEN, Grants
from .job import Job, Liveness
from .jobs import Jobs
from .library import Library
from .pools import Pools
from .workers import Workers


class State:
    """The pure core.

    Args:
        library: facts about manifests.
        lease: seconds a worker or rank may be silent.
    """

    def __init__(self, library: Library, lease: float) -> None:
        self._out = Outbox()
        self.library = library
        self.lease = lease
        self.datasets = Datasets(self._out)
        self.jobs = Jobs(self._out, lease)
        self.workers = Workers(self._out, lease, lambda: self.grants.secrets())
        self.grants = Grants(self._out, self.jobs, self.workers, library)
        self.pools = Pools(self._out, library)
        self.elastic = Elastic(self._out, self.pools)
        self.progress = progress.Progress(self._out, self.jobs, self.grants, self.pools, self.elastic)
        self.grants.more_rows = self.pools.more_rows
        self.jobs.on_gone = self._on_gone
        self._table: dict[type[events.Event], Callable[[Any], None]] = {
            events.KeyDrawn: self.grants.on_key,
            events.DatasetFindRequested: self.datasets.on_find,
            events.DatasetRegistrationRequested: self.datasets.on_register,
            events.WorkerRegistered: self.workers.on_register,
            events.WorkerHeartbeatReceived: self.workers.on_heartbeat,
            events.WorkerLeft: self.workers.on_left,
            events.DrainRequested: self.workers.on_drain,
            events.JobOpenRequested: self.jobs.on_open,
            events.GrantsRequested: self.grants.on_ask,
            events.ProgressReported: self.progress.on_report,
            events.StockGrantsRequested: self.grants.on_stock,
            events.Asked: self._on_asked,
            events.TimePassed: self._on_time,
        }

    def __repr__(self) -> str:
        names = sum(map(len, self.datasets.by_name.values()))
        return f"State({names} datasets, {len(self.jobs.by_name)} jobs, {len(self.workers.by_id)} workers)"

    def apply(self, event: events.Event) -> list[Effect]:
        """Take the event in; the effects are to be performed in order."""
        self._out.cause = event.cause
        try:
            self._table[type(event)](event)
        except FeedlineError as error:
            kept = self._out.take()
            self._out.fail(event.request, error)
            return [*kept, *self._out.take()]
        return self._out.take()

    def _on_asked(self, event: events.Asked) -> None:
        self._out.reply(event.request, event.look(self, event))

    def _on_gone(self, job: Job, rank: int, why: str) -> None:
        self.grants.drop(job, rank, None)
        self.elastic.bury(job, rank, why)

    def _on_time(self, event: events.TimePassed) -> None:
        self.workers.on_time(event.at)
        self.jobs.on_time(event.at, event.now_ms)

    # -- loading

    def load(self, stored: Mapping[str, bytes], at: float) -> list[Effect]:
        """Build the state from all records of the store. Ranks and workers get one lease of grace from ``at``.

        Returns:
            Clean-up of what a commit that was cut in two left behind.

        Raises:
            ProtocolError: a record that cannot be read, or a job without its generation.
        """
        found = [records.decode(value) for value in stored.values()]
        for record in found:
            if isinstance(record, records.DatasetRecord):
                self.datasets.load(record)
            elif isinstance(record, records.KeyRecord):
                self.grants.keys[record.id] = record
            elif isinstance(record, records.JobRecord):
                self.jobs.by_name[record.name] = Job(record)
        for record in found:
            if isinstance(
                record, records.GenerationRecord | records.EpochRecord | records.QuarantineRecord | records.MarkRecord
            ):
                job = self.jobs.by_name.get(record.job)
                if job is None:
                    self._out.delete(record.key)
                elif isinstance(record, records.GenerationRecord):
                    job.generations[record.number] = record
                elif isinstance(record, records.QuarantineRecord):
                    job.quarantine[record.generation, record.shard.source, record.shard.shard] = record
                elif isinstance(record, records.MarkRecord):
                    marks.load(job, record)
                else:
                    job.folded[record.generation, record.epoch] = record
        for job in self.jobs.by_name.values():
            if job.record.generation not in job.generations:
                raise ProtocolError(
                    f"the store lacks generation {job.record.generation} of job {job.name}",
                    remedy="restore the store from a backup",
                )
        for record in found:
            if isinstance(record, records.MemberRecord | records.AssignmentRecord | records.RankEpochRecord):
                self._load_current(record, at)
        self._load_pools(found)
        for job in self.jobs.by_name.values():
            job.recount()
        self.workers.start(at)
        return self._out.take()

    def _load_current(
        self, record: records.MemberRecord | records.AssignmentRecord | records.RankEpochRecord, at: float
    ) -> None:
        job = self.jobs.by_name.get(record.job)
        if job is None or record.generation != job.record.generation:
            self._out.delete(record.key)
        elif isinstance(record, records.MemberRecord):
            job.members[record.rank] = record
            if not record.left and not record.gone:
                job.liveness[record.rank] = Liveness(at, waiting_since=at)
        elif isinstance(record, records.AssignmentRecord):
            self.grants.load(job, record)
        elif (record.generation, record.epoch) in job.folded:
            self._out.delete(record.key)
        else:
            progress.load_rank(job, record)

    def _load_pools(self, found: list[records.Stored]) -> None:
        lanes: dict[tuple[str, int, int], list[records.LaneRecord | records.LanePartRecord]] = {}
        for record in found:
            if isinstance(record, records.LaneRecord | records.LanePartRecord):
                lanes.setdefault((record.job, record.generation, record.epoch), []).append(record)
        for record in found:
            if isinstance(record, records.PoolRecord):
                job = self.jobs.by_name.get(record.job)
                current = job is not None and record.generation == job.record.generation
                if job is not None and current and (record.generation, record.epoch) not in job.folded:
                    self.pools.load(job, record, lanes.pop((record.job, record.generation, record.epoch), []))
                else:
                    self._out.delete(record.key)
        for old in chain.from_iterable(lanes.values()):
            self._out.delete(old.key)

    # -- invariants

    def check(self) -> None:
        """Raise ``RuntimeError`` for a state that must not be; tests call it after every event."""
        loads: dict[str, int] = {}
        for name, job in self.jobs.by_name.items():
            _require(
                job.name == name and job.record.generation in job.generations, f"{name}: current generation is there"
            )
            world, lanes = job.world_size, job.current.settings.lanes or 0
            _require(job.current.settings.seed is not None, f"{name}: has a seed")
            _require(lanes > 0 and lanes % world == 0, f"{name}: world size divides lanes")
            _require(all(0 <= rank < world for rank in job.members), f"{name}: members are ranks")
            _require(bool(job.members), f"{name}: somebody opened it")
            _require(
                all(record.generation == job.record.generation for record in job.members.values()),
                f"{name}: members belong to the current generation",
            )
            _require(not job.absent or not job.current.granted, f"{name}: no grant before all ranks joined")
            _require(max(job.generations) == job.record.generation, f"{name}: the current generation is the newest")
            for rank, mine in job.assignments.items():
                _require(len(mine) <= MAX_OPEN, f"{name}: rank {rank} has at most {MAX_OPEN} open shards")
                for worker in mine.values():
                    loads[worker] = loads.get(worker, 0) + 1
            for pool in job.pools.values():
                pool.check()
            _require(job.is_dynamic or not job.pools, f"{name}: pools belong to dynamic order")
            for epoch in {*job.ranks, *job.pools}:
                _require((job.record.generation, epoch) not in job.folded, f"{name}: epoch {epoch} is folded or open")
        _require(loads == dict(self.grants.loads), "loads are the open shards")

    def durable(self) -> dict[str, bytes]:
        """All records this state stands for: what the store should hold."""
        found: list[records.Stored] = [*self.datasets.all(), *self.grants.keys.values()]
        for job in self.jobs.by_name.values():
            found += [job.record, *job.generations.values(), *job.members.values(), *job.folded.values()]
            found += job.quarantine.values()
            found += [record for marked in job.marks.values() for record in marked.values()]
            for pool in job.pools.values():
                found += [pool.record(), *(pool.lane_record(rank) for rank in pool.lanes)]
                found += [part for rank in pool.lanes for part in pool.lane_parts(rank)]
            for ranks in job.ranks.values():
                found += ranks.values()
        return {record.key: records.encode(record) for record in found}


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"invariant broken: {what}")
