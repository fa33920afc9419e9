"""Dynamic order: gives ranks more of the plan when they ask, and keeps the pools of all jobs."""

from __future__ import annotations

from collections.abc import Iterable

from manifests.errors import ProtocolError
from manifests.wire import messages as m

from . import events
from .effects import Outbox
from .grants import MoreRows
from .held import PART
from .job import Job
from .library import Library, ShardOrder
from .pool import Bounds, Pool
from .records import LanePartRecord, LaneRecord, PoolRecord
from .stretches import encode_stretches

#: most bytes of a shard that one piece covers
PIECE_BYTES = 64 << 20
#: parts of a lane that is no more that are deleted with one event
MOST_DELETED = 24


class Pools:
    """Answers asks for rows; every pool and lane that changes is stored with the same event."""

    def __init__(self, out: Outbox, library: Library) -> None:
        self._out = out
        self._library = library
        #: keys of parts whose lanes are no more
        self._left_over: list[str] = []

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
        count = held.count
        granted = pool.grant(held, ask.want, min(ask.place, held.length), self._bounds(job))
        if not known:
            self._out.put(pool.lane_record(ask.rank))
        if granted:
            for part in pool.lane_parts(ask.rank, count):
                self._out.put(part)
            self._out.put(pool.record())
        # a rank that took another's place may know rows of a lane that is no more
        have = ask.have if held.dropped <= ask.have <= held.length else held.dropped
        lane = m.LaneGrants(rank=ask.rank, number=held.number, dropped=have, place=held.begun, pieces=held.after(have))
        floor = m.Floor(epoch=ask.epoch, position=pool.floor, step=pool.floor_step) if pool.floor else None
        final = held.is_full or ask.epoch < generation.start.epoch
        short = held.length < ask.want and not held.is_full and not pool.is_empty
        waiting = self._kept_reason(job, pool, ask) if short and pool.is_at_most(held) else ""
        return MoreRows(lane=lane, final=final, floor=floor, carried=encode_stretches(pool.carried_in), waiting=waiting)

    @staticmethod
    def _kept_reason(job: Job, pool: Pool, ask: m.AskGrants) -> str:
        """Why a rank whose lane is as long as it may be gets no more: names the one that acknowledged least."""
        books = job.ranks.get(pool.epoch, {})
        ranks = job.staying() if job.is_elastic else range(job.world_size)
        staying = [rank for rank in ranks if rank not in books or books[rank].progress.state == "open"]
        steps = {rank: books[rank].progress.acked_step if rank in books else 0 for rank in staying}
        slow = min(steps, key=lambda rank: (steps[rank], rank), default=ask.rank)
        return (
            f"rank {slow}, which has not acknowledged epoch {pool.epoch} after step {steps.get(slow, 0)}: rank {ask.rank} "
            f"has {len(pool.lanes[ask.rank].pieces)} pieces after that and cannot be given more"
        )

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
        orders: dict[int, ShardOrder] = {}

        def bounds(epoch: int, position: int) -> tuple[int, int]:
            order = orders.get(epoch)
            if order is None:
                order = orders[epoch] = self._library.plan(digest, settings.seed or 0, epoch, settings.shuffle)
            ordinal, start = order.at(position)
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
            self._put_all(pool)
        return pool

    def _put_all(self, pool: Pool) -> None:
        # the pool last: if this takes several commits and the last is missing, there are only lanes of no pool
        for rank in pool.lanes:
            for part in pool.lane_parts(rank):
                self._out.put(part)
            self._out.put(pool.lane_record(rank))
        self._out.put(pool.record())

    def put(self, pool: Pool) -> None:
        """Store what the pool itself knows; its lanes have records of their own."""
        self._out.put(pool.record())

    def discard(self, pool: Pool, rank: int) -> None:
        """The lane of ``rank`` is about to be settled. Only so many of its parts go at once that all that this event changes
        fits one commit; without the lane's own record the others mean nothing, and they go later."""
        lane, *parts = pool.lane_keys(rank)
        for key in [lane, *parts[:MOST_DELETED]]:
            self._out.delete(key)
        self._left_over += parts[MOST_DELETED:]

    def end(self, job: Job, rank: int, epoch: int, place: int) -> None:
        """The rank hands out no more than the first ``place`` rows of its lane."""
        pool = job.pools.get(epoch)
        if pool is not None and pool.end(rank, place):
            self._out.put(pool.record())
            self._out.put(pool.lane_record(rank))

    def advance(self, job: Job, epoch: int) -> m.Floor | None:
        """Work out anew how far all ranks are; None while nobody is anywhere."""
        for key in self._left_over[:MOST_DELETED]:
            self._out.delete(key)
        del self._left_over[:MOST_DELETED]
        pool = job.pools.get(epoch)
        if pool is None:
            return None
        books, through = job.ranks.get(epoch, {}), job.through(epoch)
        # what a rank had not acknowledged when it closed comes again on a resume, unless elastic ranks took it over
        ranks = job.staying() if job.is_elastic else range(job.world_size)
        waited = [
            rank
            for rank in ranks
            if rank not in through and (rank not in books or books[rank].progress.state == "open")
        ]
        forgot = pool.advance(books, waited)
        if forgot is not None:
            # the pool first: a lane may know rows below the floor, but the pool has to know of all a lane forgot
            self._out.put(pool.record())
            for rank, parts in sorted(forgot.items()):
                self._out.put(pool.lane_record(rank))
                for key in parts:
                    self._out.delete(key)
        return m.Floor(epoch=epoch, position=pool.floor, step=pool.floor_step) if pool.floor else None

    def drop(self, job: Job, epoch: int) -> None:
        """The epoch's books were folded: its pool and lanes are not needed any more."""
        pool = job.pools.pop(epoch, None)
        if pool is not None:
            for key in (key for rank in pool.lanes for key in pool.lane_keys(rank)):
                self._out.delete(key)
            self._out.delete(pool.record().key)

    def load(self, job: Job, record: PoolRecord, found: Iterable[LaneRecord | LanePartRecord]) -> None:
        """Take stored records in, and delete parts that no lane needs."""
        lanes = {lane.lane.rank: lane for lane in found if isinstance(lane, LaneRecord)}
        parts = []
        for part in (part for part in found if isinstance(part, LanePartRecord)):
            lane = lanes.get(part.rank)
            if lane is not None and part.number == lane.lane.number and part.part >= lane.forgotten // PART:
                parts.append(part)
            else:
                self._out.delete(part.key)
        pool = job.pools[record.epoch] = Pool.load(job.current, record, lanes.values(), parts)
        if any(lane.lane.pieces for lane in lanes.values()):
            self._put_all(pool)
