"""One rank's part of one epoch in one generation: which rows it hands out at which step. Pure: no clock, I/O or threads.

A *leg* fixes the sequence of rows a rank may read. Its read stream is

    candidates   the rows of the rank's own lanes from the start point on, in take order
    pads         then, without end, the rows (q * W + r) mod N of the plan for q = 0, 1, ..

and every batch takes the next good rows of that stream. So a place in it is one number, *read*; how many of those rows
were bad tells the rest. Batches past the candidates are pads and flagged (`pad` and `drop`) or not there (`ragged`).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from manifests import cursor
from manifests.plan import Plan, lane_sizes

if TYPE_CHECKING:
    from .dynamic import DynamicLeg

I64 = npt.NDArray[np.int64]


def steps_per_epoch(rows: int, world_size: int, batch_size: int, tail: str, rank: int, lanes: int) -> int:
    """Steps a rank takes in one whole epoch that starts at its beginning."""
    if tail == "pad":
        return math.ceil(math.ceil(rows / world_size) / batch_size)
    if tail == "drop":
        return rows // (world_size * batch_size)
    own = cursor.own_lanes(rank, world_size, lanes)
    return math.ceil(int(lane_sizes(rows, lanes)[own].sum()) / batch_size)


def pad_positions(rows: int, world_size: int, rank: int, first: int, count: int) -> I64:
    """Plan positions of the pads ``first .. first + count`` of a rank, in a plan of ``rows`` rows: int64 [count]."""
    q = np.arange(first, first + count, dtype=np.int64)
    turn = q // rows  # shifts by one each time round, so that bad rows cannot be all there is
    places: I64 = (q * world_size + rank + turn) % rows
    return places


class Leg:
    """What one rank has to hand out from a start point to the end of the epoch, in deterministic order.

    Args:
        plan: the epoch's order.
        taken: rows taken per lane at the start point, int64 [lanes].
        first_step: steps of this epoch before the start point.
    """

    dynamic = False
    #: no row beyond ``candidates`` can come
    final = True
    #: rows of the read stream that ``refs`` can give now
    certain = sys.maxsize

    def __init__(
        self, plan: Plan, *, rank: int, world_size: int, batch_size: int, tail: str, taken: I64, first_step: int = 0
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.world_size = world_size
        self.batch_size = batch_size
        self.tail = tail
        self.first_step = first_step
        self.start = np.asarray(taken, np.int64)
        self._sizes = plan.lane_sizes()
        self.own = cursor.own_lanes(rank, world_size, plan.lanes)
        self._own_sizes = self._sizes[self.own]
        #: rows of the own lanes at and after the start point
        self.candidates = cursor.left(self._own_sizes, self.start[self.own])
        #: rows to hand out, pads included
        self.quota = self.quota_of(rank)
        #: batches to hand out
        self.steps = math.ceil(self.quota / batch_size)

    def __repr__(self) -> str:
        return (
            f"Leg(rank {self.rank}/{self.world_size}, steps {self.first_step}+{self.steps}, "
            f"{self.candidates} rows, quota {self.quota}, {self.tail})"
        )

    @property
    def last_step(self) -> int:
        """Step count at the end of the leg."""
        return self.first_step + self.steps

    def quota_of(self, rank: int) -> int:
        """Rows ``rank`` hands out in this leg."""
        fresh = not self.start.any()
        rows, world = self.plan.rows, self.world_size
        if self.tail == "pad" and fresh:
            return math.ceil(rows / world)
        if self.tail == "drop" and fresh:
            return rows // (world * self.batch_size) * self.batch_size
        if self.tail == "ragged":
            return self._left_of(rank)
        open_rows = [self._left_of(r) for r in range(world)]
        return max(open_rows) if self.tail == "pad" else min(open_rows) // self.batch_size * self.batch_size

    def _left_of(self, rank: int) -> int:
        own = cursor.own_lanes(rank, self.world_size, self.plan.lanes)
        return cursor.left(self._sizes[own], self.start[own])

    def ends_at(self, position: Position) -> bool:
        """All batches of the leg were handed out at this position."""
        return position.steps >= self.steps or (self.tail == "ragged" and position.read >= self.candidates)

    def batch_rows(self, step: int) -> int:
        """Rows of batch ``step`` (counted from the leg's first)."""
        return max(0, min(self.batch_size, self.quota - step * self.batch_size))

    def ends_everywhere(self, position: Position) -> bool:
        """The leg is over at ``position``, for the other ranks too after as many steps. With `ragged` a rank with a
        smaller share ends earlier than others."""
        if not self.ends_at(position):
            return False
        if self.tail != "ragged":
            return True
        handed = position.steps * self.batch_size
        return all(handed >= self.quota_of(rank) for rank in range(self.world_size) if rank != self.rank)

    # -- the read stream

    def refs(self, first: int, count: int) -> tuple[I64, I64]:
        """Rows ``first .. first + count`` of the read stream: (shard ordinals, rows in shard), int64 [count].

        Shorter only where the stream ends (`ragged` after the candidates, or a plan without rows).
        """
        real = max(0, min(count, self.candidates - first))
        shards, rows = self._candidate_refs(first, real) if real else (_NONE, _NONE)
        pads = count - real
        if pads and self.tail != "ragged" and self.plan.rows:
            places = pad_positions(self.plan.rows, self.world_size, self.rank, max(0, first - self.candidates), pads)
            pad_shards, pad_rows = self.plan.plan_rows(places)
            shards, rows = np.concatenate([shards, pad_shards]), np.concatenate([rows, pad_rows])
        return shards, rows

    def need(self, read: int, useless: int) -> None:
        """See ``DynamicLeg``: no news here, where all rows are known from the start."""

    def _candidate_refs(self, first: int, count: int) -> tuple[I64, I64]:
        before = self.own_taken(first)
        lanes, index = cursor.sequence(self._own_sizes, before, count)
        shards, rows = np.empty(len(lanes), np.int64), np.empty(len(lanes), np.int64)
        for place, lane in enumerate(self.own):
            mine = lanes == place
            if mine.any():
                start = int(before[place])
                shards[mine], rows[mine] = self.plan.lane_rows(int(lane), start, int(index[mine][-1]) + 1 - start)
        return shards, rows

    # -- positions

    def own_taken(self, read: int) -> I64:
        """Rows taken of each own lane when ``read`` rows of the read stream were taken, int64 [own lanes]."""
        return cursor.advance(self._own_sizes, self.start[self.own], min(read, self.candidates))

    def taken(self, read: int, steps: int) -> I64:
        """Rows taken of all lanes after ``steps`` batches: own lanes from ``read``, those of other ranks as if they had
        skipped nothing in this generation. int64 [lanes]."""
        out = self.start.copy()
        for rank in range(self.world_size):
            own = cursor.own_lanes(rank, self.world_size, self.plan.lanes)
            if rank == self.rank:
                out[own] = self.own_taken(read)
            else:
                handed = min(steps * self.batch_size, self.quota_of(rank) if self.tail == "ragged" else self.quota)
                out[own] = cursor.advance(self._sizes[own], self.start[own], handed)
        return out


_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Position:
    """Where a rank is inside a leg, after a whole batch."""

    #: batches handed out in this leg
    steps: int = 0
    #: rows of the read stream taken (good, bad and pads)
    read: int = 0


@dataclass
class Session:
    """Cuts the read stream of a leg into batches, given which of its rows turned out bad.

    ``position`` only moves when a batch is handed over, so it is always that of the last batch the loop received.
    """

    leg: Leg | DynamicLeg
    position: Position = field(default_factory=Position)

    @property
    def finished(self) -> bool:
        """All batches of the leg were handed out."""
        return self.leg.ends_at(self.position)

    def next_batch(self, good: npt.NDArray[np.bool_]) -> tuple[I64, Position] | None:
        """The next batch, if it can be told from what is known.

        Args:
            good: for the rows ``position.read ..`` of the read stream, whether each is good; as many as are known.

        Returns:
            (offsets into ``good`` of the batch's rows, int64 [rows]; the position after it), or None when more of the
            stream has to be known first. Offsets at or past ``leg.candidates - position.read`` are pads. No rows at
            all means that nothing but bad rows was left (`ragged`): the leg is over, and no empty batch is handed out.
        """
        leg = self.leg
        want = leg.batch_rows(self.position.steps)
        found = np.flatnonzero(good)
        known = self.position.read + len(good)
        # whether it is final first: what is known may grow until then
        ends = leg.tail == "ragged" and leg.final and known >= leg.candidates
        if len(found) < want and not ends:
            leg.need(known + want - len(found), known - len(found))
            return None
        rows = found[:want]
        used = int(rows[-1]) + 1 if len(rows) == want and want else len(good)
        return rows, Position(self.position.steps + (len(rows) > 0), self.position.read + used)
