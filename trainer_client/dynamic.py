"""One rank's part of an epoch in dynamic order: its rows come from the dispatcher's pool while it reads. No clock or I/O.

A dynamic leg answers the same questions as ``session.Leg``; its candidates are the rows of the rank's lane
(``manifests.granted``) after the start point, of which more become known with every answer to an ask. What is known of
the read stream at a time, and what has left the lane at a place in it, is a pure function of the pieces granted.

With quotas (`pad`, `drop`) the rank's number of rows is fixed from the start and so are its steps. Without (`ragged`, and
elastic jobs whatever their tail) the leg ends when the pool was empty and still is after everything was handed out.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from manifests.errors import ProtocolError
from manifests.granted import PIECE, Lane, Piece, decode_pieces, encode_pieces, window_rows
from manifests.plan import Plan, lane_sizes
from manifests.ranges import Ranges
from manifests.wire import messages as m

from .session import Leg, Position, pad_positions

I64 = npt.NDArray[np.int64]

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Saved:
    """What a state tells of a dynamic leg beside the place in it; made once per answer, so that saving costs nothing."""

    #: every rank has handed out the plan positions below ``floor`` when the slowest had acknowledged ``floor_step`` steps
    floor: int
    floor_step: int
    #: the place in it is left open
    lane: m.LaneGrants
    #: plan positions at and above the floor that were taken before this generation
    before: Ranges
    #: pieces of earlier epochs that this epoch hands out too, over all ranks
    carried: bytes
    #: the lane's pieces, ``before`` and ``carried`` as hexadecimal text
    texts: tuple[str, str, str]

    def below(self) -> Ranges:
        """Plan positions that were taken and need not be in a lane that is kept."""
        return Ranges.of([(0, self.floor)]) | self.before


class DynamicLeg:
    """What one rank hands out from a start point to the end of the epoch, as far as it is known.

    Thread-safe. The feed's keeper thread calls ``have``, ``wanted``, ``place`` and ``take``; the loop's thread ``need``.

    Args:
        plans: epoch -> its plan; called once with ``epoch``, and for carried rows with earlier ones.
        seed, shuffle: of the job. epoch: number of the epoch.
        before: plan positions taken at the start point.
        start: the rank's lane there, None: it has none yet.
        carried: pieces of earlier epochs to be handed out in this epoch, as at the start point.
        elastic: no quotas, whatever the tail.
        first_step: steps of this epoch before the start point.
    """

    dynamic = True

    def __init__(
        self,
        plans: Callable[[int], Plan],
        *,
        seed: int,
        shuffle: m.Shuffle | None,
        epoch: int,
        rank: int,
        world_size: int,
        batch_size: int,
        tail: str,
        elastic: bool = False,
        before: Ranges | None = None,
        start: m.LaneGrants | None = None,
        carried: bytes = b"",
        first_step: int = 0,
    ) -> None:
        self.plan = plans(epoch)
        self.epoch = epoch
        self.rank = rank
        self.world_size = world_size
        self.batch_size = batch_size
        #: "ragged" wherever there are no quotas
        self.tail = "ragged" if elastic else tail
        self.first_step = first_step
        self._plans = plans
        self._seed = seed
        self._window = window_rows(shuffle, self.plan.rows, world_size)
        self._lock = threading.Lock()
        self._before = Ranges.of([]) if before is None else before
        self._carried = carried
        self._floor, self._floor_step = 0, 0
        #: rows that were not taken at the start point
        self.left = self.plan.rows - len(self._before)
        self._start = 0 if start is None else start.place
        if start is None:
            self._lane = self._new_lane(rank)
        else:
            self._lane = Lane.restore(start, seed=seed, epoch=epoch, window=self._window)
        #: the lane's pieces as a state has them
        self._encoded = bytearray(encode_pieces(self._lane.pieces))
        #: rows of the lane at and after the start point that are the rank's at the most
        self._most = sys.maxsize if self.tail == "ragged" else int(lane_sizes(self.left, world_size)[rank])
        self.quota = self.quota_of(rank)
        #: batches to hand out; without quotas not known before the end
        self.steps = math.ceil(self.quota / batch_size) if self.tail != "ragged" else sys.maxsize
        self._needed = self._useless = 0
        #: the lane is that of the start point, and the dispatcher has not answered yet: it may have given the rank of an
        #: elastic job another one
        self._unsure = start is not None
        self._elastic = elastic
        self._asked_at_end = False
        self._final = False
        self._check_final(False)
        self._saved = self._save()

    @classmethod
    def of(
        cls,
        plans: Callable[[int], Plan],
        settings: m.JobSettings,
        start: m.StartPoint,
        *,
        epoch: int,
        rank: int,
    ) -> DynamicLeg:
        """The leg of ``rank`` in ``epoch`` of a generation with these (resolved) settings and start point."""
        here = epoch == start.epoch
        return cls(
            plans,
            seed=settings.seed or 0,
            shuffle=settings.shuffle,
            epoch=epoch,
            rank=rank,
            world_size=settings.world_size,
            batch_size=settings.batch_size,
            tail=settings.tail,
            elastic=settings.elastic,
            before=Ranges.decode(start.ranges) if here else None,
            start=next((lane for lane in start.lanes if lane.rank == rank), None) if here else None,
            carried=start.carried if here else b"",
            first_step=start.step if here else 0,
        )

    def __repr__(self) -> str:
        return (
            f"DynamicLeg(rank {self.rank}/{self.world_size}, {self._lane!r} from {self._start}, "
            f"{'final, ' if self._final else ''}{self.tail})"
        )

    def _new_lane(self, number: int) -> Lane:
        return Lane(seed=self._seed, epoch=self.epoch, number=number, window=self._window)

    # -- how much there is

    @property
    def final(self) -> bool:
        """No row beyond ``candidates`` can come."""
        return self._final

    @property
    def candidates(self) -> int:
        """Rows of the lane after the start point that are known."""
        return min(self._most, self._lane.length - self._start)

    @property
    def certain(self) -> int:
        """Rows of the read stream that ``refs`` can give now."""
        with self._lock:
            if self._unsure and self._elastic:
                return 0
            if not self._final:
                return max(0, min(self._most, self._lane.certain - self._start))
            return self.candidates if self.tail == "ragged" else sys.maxsize

    @property
    def last_step(self) -> int:
        """Step count at the end of the leg."""
        return self.first_step + self.steps

    def quota_of(self, rank: int) -> int:
        """Rows ``rank`` hands out in this leg, pads included; without quotas not known."""
        if self.tail == "pad":
            return math.ceil(self.left / self.world_size)
        if self.tail == "drop":
            return self.left // (self.world_size * self.batch_size) * self.batch_size
        return sys.maxsize

    def ends_at(self, position: Position) -> bool:
        """All batches of the leg were handed out at this position."""
        if self.tail == "ragged":
            return self._final and position.read >= self.candidates
        return position.steps >= self.steps

    def batch_rows(self, step: int) -> int:
        """Rows of batch ``step`` (counted from the leg's first); without quotas the last one may have fewer."""
        return max(0, min(self.batch_size, self.quota - step * self.batch_size))

    def ends_everywhere(self, position: Position) -> bool:
        """The leg is over at ``position``, and surely for the other ranks too after as many steps."""
        return self.ends_at(position) and (self.tail != "ragged" or self.world_size == 1)

    # -- the read stream

    def refs(self, first: int, count: int) -> tuple[I64, I64]:
        """Rows ``first .. first + count`` of the read stream that are certain: (shard ordinals, rows in shard), int64
        each."""
        positions, epochs, pads = self._stream(first, count)
        shards, rows = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            plan = self.plan if epoch == self.epoch else self._plans(epoch)
            shards[mine], rows[mine] = plan.plan_rows(positions[mine])
        if pads:
            more = self.plan.plan_rows(
                pad_positions(self.plan.rows, self.world_size, self.rank, max(0, first - self.candidates), pads)
            )
            shards, rows = np.concatenate([shards, more[0]]), np.concatenate([rows, more[1]])
        return shards, rows

    def epochs(self, first: int, count: int) -> I64:
        """The epoch each of these rows belongs to; an earlier one for carried rows. int64, as many as ``refs`` gives."""
        _, epochs, pads = self._stream(first, count)
        return np.concatenate([epochs, np.full(pads, self.epoch, np.int64)])

    def _stream(self, first: int, count: int) -> tuple[I64, I64, int]:
        """(plan positions, their epochs, pads after them)."""
        with self._lock:
            blind = self._unsure and self._elastic
            real = 0 if blind else max(0, min(count, self.candidates - first))
            positions, epochs = self._lane.leave(self._start + first, real) if real else (_NONE, _NONE)
            pads = count - real if self._final and self.tail != "ragged" and self.plan.rows else 0
        return positions, epochs, pads

    # -- positions

    def own_taken(self, read: int) -> I64:
        """The place in the lane when ``read`` rows of the read stream were taken, int64 [1]."""
        return np.array([self._start + min(read, self.candidates)], np.int64)

    def taken(self, read: int, steps: int) -> I64:
        """There are no counts per lane in this order."""
        return _NONE

    def saved(self, position: Callable[[], Position]) -> tuple[Position, Saved]:
        """A position and what is known of the lane, of one moment; never waits for the keeper.

        What was forgotten had been handed out before, and what is handed out was told before, so that a position read
        between two looks at the same record fits it.
        """
        while True:
            saved = self._saved
            found = position()
            if saved is self._saved:
                return found, saved

    # -- growing

    @property
    def have(self) -> int:
        """Rows of the lane that are known, from its beginning."""
        return self._lane.length

    def need(self, read: int, useless: int) -> None:
        """The loop cannot go on with fewer than ``read`` rows of the read stream, unless there are no more. Of those that
        are known, as many as ``useless`` were handed out or cannot be."""
        self._needed, self._useless = max(self._needed, read), max(self._useless, useless)

    def wanted(self, read: int) -> int:
        """Rows the lane has to have, from its beginning, for the first ``read`` rows of the read stream to be certain."""
        with self._lock:
            length = self._lane.length
            if self._final:
                return length
            known = length - self._start
            if self.tail == "ragged" and self._lane.ends_with_cut:
                most = length + (self._needed > known)
            else:
                most = self._start + min(max(read, self._needed) + self._window, self._most)
            return max(most, length + self._unsure)

    def place(self, read: int) -> int:
        """The place in the lane when ``read`` rows of the read stream were handed out, for an ask that is made now. Rows
        that the loop waits to pass over count too, so that a rank which got many of them may have more."""
        with self._lock:
            known = self._lane.length - self._start
            self._asked_at_end = self._lane.ends_with_cut and self._needed > known
            return self._start + min(max(read, self._useless), self.candidates)

    def take(self, reply: m.Grants) -> bool:
        """Take the answer to an ask in. True: something changed.

        Raises:
            ProtocolError: pieces that do not continue the lane.
        """
        with self._lock:
            told, length = reply.lane, self._lane.length
            was_final, cut = self._final, self._lane.ends_with_cut
            if reply.carried:
                self._carried = reply.carried
            moved = reply.floor is not None and self._forget(reply.floor)
            if told is not None and (told.pieces or not reply.final):
                self._grow(told)
            nothing = told is not None and told.dropped == length == self._lane.length
            self._check_final(reply.final, nothing)
            grown = self._lane.length != length or self._lane.ends_with_cut != cut or self._final != was_final
            if grown or moved or self._carried != self._saved.carried:
                self._saved = self._save()
            return grown

    def take_floor(self, floor: m.Floor) -> None:
        """All ranks have come so far: groups that lie below are forgotten."""
        with self._lock:
            if self._forget(floor):
                self._saved = self._save()

    def _grow(self, grants: m.LaneGrants) -> None:
        if grants.number != self._lane.number:
            if self._lane.length and not self._unsure:
                raise ProtocolError(
                    f"rank {self.rank} got pieces of lane {grants.number}", cause=f"its lane is {self._lane.number}"
                )
            self._lane = self._new_lane(grants.number)
            self._encoded.clear()
            self._start = grants.place
        self._unsure = False
        pieces = decode_pieces(grants.pieces)
        if pieces and grants.dropped > self._lane.length:
            return  # of a lane that had more rows: asked for again from the beginning
        self._extend([p for p in pieces if p.index >= self._lane.length])

    def _extend(self, pieces: list[Piece]) -> None:
        before = len(self._lane.pieces)
        self._lane.extend(pieces)
        self._encoded += encode_pieces(self._lane.pieces[before:])

    def _check_final(self, told: bool, nothing: bool = False) -> None:
        reached = self._lane.length - self._start >= self._most
        ended = self.tail == "ragged" and nothing and self._lane.ends_with_cut and self._asked_at_end
        if told or ended or (reached and not self._unsure):
            self._end()

    def _end(self) -> None:
        self._final = True
        if self._lane.certain < self._lane.length:  # nothing can come that would leave before these
            self._extend([Piece(self._lane.length, 0, 0, self.epoch)])

    def _forget(self, floor: m.Floor) -> bool:
        if floor.epoch != self.epoch or floor.position <= self._floor:
            return False
        self._floor, self._floor_step = floor.position, floor.step
        before = len(self._lane.pieces)
        self._lane = self._lane.forget(floor.position)
        del self._encoded[: PIECE.size * (before - len(self._lane.pieces))]
        return True

    def _save(self) -> Saved:
        lane = m.LaneGrants(
            rank=self.rank, number=self._lane.number, dropped=self._lane.dropped, pieces=bytes(self._encoded)
        )
        above = self._before - Ranges.of([(0, self._floor)])
        texts = lane.pieces.hex(), above.encode().hex(), self._carried.hex()
        return Saved(self._floor, self._floor_step, lane, above, self._carried, texts)


AnyLeg = Leg | DynamicLeg
