"""Dynamic order: gives ranks more of the plan when they ask, and keeps the pools of all jobs."""

from __future__ import annotations

from collections.abc import Iterable

from manifests.errors import ProtocolError
from manifests.wire import messages as m

from . import events
from .effects import Outbox
from .grants import MoreRows
from .job import Job
from .library import Library
from .pool import Bounds, Pool
from .records import LaneRecord, PoolRecord
from .stretches import encode_stretches

#: most bytes of a shard that one piece covers
PIECE_BYTES = 64 << 20


class Pools:
    """Answers asks for rows; every pool and lane that changes is stored with the same event."""

    def __init__(self, out: Outbox, library: Library) -> None:
        self._out = out
        self._library = library

    # -- asking

    def more_rows(self, event: events.GrantsRequested, job: Job) -> MoreRows:
        """Pieces for the rank that asks: those it was given before and does not know of, and new ones up to ``want`` rows.

        Raises:
            ProtocolError: an ask that cannot be one of this rank.
        """
        ask, generation = event.message, job.current
        if min(ask.have, ask.want, ask.place) < 0 or ask.epoch < 0:
            raise ProtocolError(f"ask of rank {ask.rank} of job {job.name}: counts below zero")
        if self._is_over(job, ask.rank, ask.epoch):
            return MoreRows(lane=m.LaneGrants(rank=ask.rank, number=ask.rank, dropped=ask.have), final=True)
        pool = self.at(job, ask.epoch)
        known = ask.rank in pool.lanes
        held = pool.hold(ask.rank, job.members[ask.rank].tenure)
        if pool.grant(held, ask.want, min(ask.place, held.length), self._bounds(job)):
            self._out.put(pool.record())
            self._out.put(pool.lane_record(ask.rank))
        elif not known:
            self._out.put(pool.lane_record(ask.rank))
        # a rank that took another's place may know rows of a lane that is no more
        have = ask.have if held.dropped <= ask.have <= held.length else held.dropped
        lane = m.LaneGrants(rank=ask.rank, number=held.number, dropped=have, place=held.begun, pieces=held.after(have))
        floor = m.Floor(epoch=ask.epoch, position=pool.floor, step=pool.floor_step) if pool.floor else None
        final = held.is_full or ask.epoch < generation.start.epoch
        return MoreRows(lane=lane, final=final, floor=floor, carried=encode_stretches(pool.carried_in))

    @staticmethod
    def _is_over(job: Job, rank: int, epoch: int) -> bool:
        """The epoch has nothing for this rank any more."""
        if epoch < job.current.start.epoch or (job.record.generation, epoch) in job.folded:
            return True
        record = job.ranks.get(epoch, {}).get(rank)
        if record is not None and record.progress.state != "open":
            return True
        return bool(job.members[rank].tenure) and epoch < job.slowest()[0]

    def _bounds(self, job: Job) -> Bounds:
        settings = job.current.settings
        digest = settings.sources[0].digest

        def bounds(epoch: int, position: int) -> tuple[int, int]:
            ordinal, start = self._library.plan(digest, settings.seed or 0, epoch, settings.shuffle).at(position)
            info = self._library.shard(digest, ordinal)
            if info is None:
                raise ProtocolError(f"job {job.name} has no shard {ordinal}")
            return start + info.rows, max(1, PIECE_BYTES * info.rows // max(1, info.bytes))

        return bounds

    # -- keeping

    def at(self, job: Job, epoch: int) -> Pool:
        """The pool of an epoch of the current generation, made if nobody asked before."""
        pool = job.pools.get(epoch)
        if pool is None:
            pool = job.pools[epoch] = Pool.begin(job.current, epoch)
            self.put(job, pool)
            for rank in pool.lanes:
                self._out.put(pool.lane_record(rank))
        return pool

    def put(self, job: Job, pool: Pool) -> None:
        """Store what the pool itself knows; its lanes have records of their own."""
        self._out.put(pool.record())

    def lane_key(self, job: Job, epoch: int, rank: int) -> str:
        """Where the lane of a rank is stored."""
        return LaneRecord(job=job.name, generation=job.record.generation, epoch=epoch, lane=m.LaneGrants(rank=rank)).key

    def end(self, job: Job, rank: int, epoch: int, place: int) -> None:
        """The rank hands out no more than the first ``place`` rows of its lane."""
        pool = job.pools.get(epoch)
        if pool is not None and pool.end(rank, place):
            self._out.put(pool.record())
            self._out.put(pool.lane_record(rank))

    def advance(self, job: Job, epoch: int) -> m.Floor | None:
        """Work out anew how far all ranks are; None while nobody is anywhere."""
        pool = job.pools.get(epoch)
        if pool is None:
            return None
        books, through = job.ranks.get(epoch, {}), job.through(epoch)
        waited = [
            rank
            for rank in job.staying()
            if rank not in through and (rank not in books or books[rank].progress.state == "open")
        ]
        forgot = pool.advance(books, waited)
        if forgot is not None:
            self._out.put(pool.record())
            for rank in sorted(forgot):
                self._out.put(pool.lane_record(rank))
        return m.Floor(epoch=epoch, position=pool.floor, step=pool.floor_step) if pool.floor else None

    def drop(self, job: Job, epoch: int) -> None:
        """The epoch's books were folded: its pool and lanes are not needed any more."""
        pool = job.pools.pop(epoch, None)
        if pool is not None:
            for rank in pool.lanes:
                self._out.delete(self.lane_key(job, epoch, rank))
            self._out.delete(pool.record().key)

    def load(self, job: Job, record: PoolRecord, lanes: Iterable[LaneRecord]) -> None:
        """Take stored records in."""
        job.pools[record.epoch] = Pool.load(job.current, record, lanes)
