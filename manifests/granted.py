"""A rank's lane in dynamic order: the rows it was granted, and the order in which they leave. Pure.

The dispatcher hands the plan out in *pieces*: stretches of plan positions, each inside one shard. Pieces that came
together form a *group* (``Shuffle.interleave`` of them, fewer where the pool ended), merged evenly as in the
deterministic order; the rows of all groups in the order granted are the lane. Row k of it leaves by the key
k + window * u(seed, epoch, lane, k), u uniform in [0, 1), as in the deterministic order. A key is never below its index,
so the row at a place is certain as soon as the lane is longer than its key: what comes later cannot overtake it.

A *cut* is put where the pool was found empty: all rows before it leave before all rows after it, so they are certain
without waiting for more. Given the pieces, the order is a pure function; client and dispatcher compute it alike.

Places (how many rows left the lane) and indices both count from the lane's beginning, whatever was forgotten of it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import ProtocolError
from .identity import random_unit, stream_key
from .ranges import Ranges
from .wire.messages import LaneGrants, Shuffle

I64 = npt.NDArray[np.int64]

#: numbers per piece in ``LaneGrants.pieces``
_WIDTH = 4
#: one piece in ``LaneGrants.pieces``
PIECE = struct.Struct(f"<{_WIDTH}q")


@dataclass(frozen=True, slots=True)
class Piece:
    """Plan positions [start, stop) of ``epoch``. ``index``: lane index of the first row of its group. Empty: a cut."""

    index: int
    start: int
    stop: int
    epoch: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_cut(self) -> bool:
        return self.start == self.stop


def window_rows(shuffle: Shuffle | None, rows: int, world_size: int) -> int:
    """Rows the keyed window of a lane spans: the job's buffer shared by its ranks, and at most an eighth of a rank's
    share of the epoch, since a rank has to hold that many rows ahead, which others cannot have any more."""
    if shuffle is None:
        return 0
    return min(shuffle.buffer // world_size, rows // (8 * world_size))


def encode_pieces(pieces: Iterable[Piece]) -> bytes:
    """Four little-endian int64 per piece."""
    return b"".join([PIECE.pack(p.index, p.start, p.stop, p.epoch) for p in pieces])


def decode_pieces(data: bytes) -> list[Piece]:
    """The inverse. Raises ``ProtocolError`` for anything else."""
    if len(data) % (8 * _WIDTH):
        raise ProtocolError("pieces are damaged", cause=f"{len(data)} bytes")
    found = np.frombuffer(data, "<i8").reshape(-1, _WIDTH)
    if (found < 0).any() or (found[:, 1] > found[:, 2]).any():
        raise ProtocolError("pieces are damaged", cause="a piece ends before it starts")
    return [Piece(*row) for row in found.tolist()]


class Lane:
    """The lane of one rank in one epoch.

    Args:
        seed, epoch: of the job and the epoch. number: of the lane's random stream.
        window: rows, see ``window_rows``.
        dropped: rows of groups that were forgotten (``forget``); all had left.
    """

    def __init__(self, *, seed: int, epoch: int, number: int, window: int, dropped: int = 0) -> None:
        self.epoch = epoch
        self.number = number
        self.window = window
        self.dropped = dropped
        self.pieces: list[Piece] = []
        #: rows granted since the lane began
        self.length = dropped
        self._key = stream_key("window", seed, epoch, number)
        # rows in leaving order, and those whose place is not certain yet
        self._order: list[I64] = []
        #: places below this are certain
        self.certain = dropped
        self._open_keys = np.empty(0, np.float64)
        self._open = np.empty((0, 2), np.int64)

    def __repr__(self) -> str:
        return f"Lane({self.number}, epoch {self.epoch}, {self.length} rows, {self.certain} certain)"

    @classmethod
    def restore(cls, grants: LaneGrants, *, seed: int, epoch: int, window: int) -> Lane:
        """The lane that ``grants`` tells of."""
        lane = cls(seed=seed, epoch=epoch, number=grants.number, window=window, dropped=grants.dropped)
        lane.extend(decode_pieces(grants.pieces))
        return lane

    def grants(self, rank: int, place: int) -> LaneGrants:
        """What ``restore`` needs."""
        return LaneGrants(
            rank=rank, number=self.number, dropped=self.dropped, place=place, pieces=encode_pieces(self.pieces)
        )

    # -- growing

    def extend(self, pieces: Iterable[Piece]) -> None:
        """More pieces were granted, whole groups of them.

        Raises:
            ProtocolError: they do not continue the lane.
        """
        groups: list[list[Piece]] = []
        for piece in pieces:
            if piece.is_cut:
                self._take(groups)
                groups = []
                self._cut(piece)
            elif groups and piece.index == groups[-1][0].index:
                groups[-1].append(piece)
            else:
                groups.append([piece])
        self._take(groups)

    def _take(self, groups: list[list[Piece]]) -> None:
        if not groups:
            return
        first, rows = self.length, []
        for group in groups:
            if group[0].index != self.length:
                raise ProtocolError(
                    "pieces do not continue the lane", cause=f"index {group[0].index} after {self.length} rows"
                )
            rows.append(_rows(group))
            self.pieces += group
            self.length += len(rows[-1])
        self._open_keys = np.concatenate([self._open_keys, window_keys(self._key, self.window, first, self.length)])
        self._open = np.concatenate([self._open, *rows])
        self._settle(float(self.length))

    def _cut(self, piece: Piece) -> None:
        if piece.index != self.length:
            raise ProtocolError("a cut does not end the lane", cause=f"index {piece.index} after {self.length} rows")
        if not self.ends_with_cut:
            self.pieces.append(piece)
            self._settle(np.inf)

    def _settle(self, below: float) -> None:
        """Rows with keys up to ``below`` have their places."""
        order = np.argsort(self._open_keys, kind="stable")
        count = int(np.searchsorted(self._open_keys[order], below, side="right"))
        if count:
            self._order.append(self._open[order[:count]])
            self.certain += count
            rest = np.sort(order[count:])
            self._open_keys, self._open = self._open_keys[rest], self._open[rest]

    @property
    def ends_with_cut(self) -> bool:
        """Nothing was in the pool when this rank last asked."""
        return bool(self.pieces) and self.pieces[-1].is_cut

    # -- what leaves

    def leave(self, first: int, count: int) -> tuple[I64, I64]:
        """Rows at places ``first .. first + count`` that are certain: (plan positions, epochs), int64 each, maybe fewer.

        Only for places at or after those that were handed out when a group was forgotten.
        """
        if not self._order:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        if len(self._order) > 1:
            self._order = [np.concatenate(self._order)]
        begin = first - self.dropped
        found = self._order[0][max(0, begin) : max(0, begin + count)]
        return found[:, 0], found[:, 1]

    def left(self, place: int) -> Ranges:
        """Plan positions of this epoch among the kept rows that have left at ``place``."""
        positions, epochs = self.leave(self.dropped, place - self.dropped)
        return Ranges.members(positions[epochs == self.epoch])

    def remaining(self, place: int) -> list[tuple[int, int, int]]:
        """(epoch, start, stop) of the rows that have not left at ``place``, in ranges, ascending."""
        positions, epochs = self.leave(self.dropped, place - self.dropped)
        found: list[tuple[int, int, int]] = []
        for epoch in sorted({p.epoch for p in self.pieces if not p.is_cut}):
            all_of_it = Ranges.of((p.start, p.stop) for p in self.pieces if p.epoch == epoch)
            gone = Ranges.members(positions[epochs == epoch])
            found += [(epoch, start, stop) for start, stop in all_of_it - gone]
        return found

    def lowest(self, place: int) -> int | None:
        """The lowest plan position of this epoch that has not left at ``place``, None if all granted ones have."""
        found: list[int] = []
        near: list[Piece] = []
        following, index = self.length, self.length
        for piece in reversed(self.pieces):
            if piece.index != index:
                following, index = index, piece.index
            if piece.is_cut or piece.epoch != self.epoch:
                continue
            if piece.index >= place + self.window:
                found.append(piece.start)
            elif following > place - self.window:
                near.append(piece)
        near.reverse()
        if near:
            first = max(self.dropped, near[0].index - self.window)
            positions, epochs = self.leave(first, place - first)
            gone = np.sort(positions[epochs == self.epoch])
            for piece in near:
                low, high = np.searchsorted(gone, [piece.start, piece.stop])
                if high - low < len(piece):
                    inside = gone[low:high] - piece.start
                    holes = np.flatnonzero(inside != np.arange(len(inside)))
                    found.append(piece.start + (int(holes[0]) if len(holes) else len(inside)))
        return min(found, default=None)

    def forget(self, floor: int) -> Lane:
        """This lane without the leading groups that lie below ``floor``: of these every rank has handed everything out.
        Cuts at its beginning go too."""
        keep = pieces_below(self.pieces, self.epoch, floor)
        if not keep:
            return self
        dropped = self.dropped + sum(map(len, self.pieces[:keep]))
        out = Lane.__new__(Lane)
        out.epoch, out.number, out.window, out._key = self.epoch, self.number, self.window, self._key
        out.dropped, out.pieces, out.length = dropped, self.pieces[keep:], self.length
        order = np.concatenate(self._order) if self._order else np.empty((0, 2), np.int64)
        # what was dropped had left; the others keep their order
        gone = Ranges.of((p.start, p.stop) for p in self.pieces[:keep])
        mine = order[:, 1] == self.epoch
        away = np.zeros(len(order), np.bool_)
        away[mine] = gone.has(order[mine, 0])
        out._order, out.certain = [order[~away]], dropped + int((~away).sum())
        out._open_keys, out._open = self._open_keys, self._open
        return out


def window_keys(key: int, window: int, first: int, stop: int) -> npt.NDArray[np.float64]:
    """Keys by which the rows at lane indices [first, stop) leave; ``key``: of the lane's random stream. float64."""
    keys = np.arange(first, stop, dtype=np.float64)
    return keys + window * random_unit(key, first, stop - first) if window else keys


def pieces_below(pieces: Sequence[Piece], epoch: int, floor: int) -> int:
    """How many pieces at the beginning make up whole groups of rows of ``epoch`` below ``floor``, and cuts."""
    keep = 0
    while keep < len(pieces):
        piece, stop = pieces[keep], keep + 1
        while not piece.is_cut and stop < len(pieces) and not pieces[stop].is_cut and pieces[stop].index == piece.index:
            stop += 1
        if any(p.epoch != epoch or p.stop > floor for p in pieces[keep:stop] if not p.is_cut):
            break
        keep = stop
    return keep


def rows_before(sizes: list[int], count: int) -> list[int]:
    """How many rows of each stretch are among the first ``count`` of stretches that are merged evenly
    (``plan.merged_evenly``), in a time that grows with the stretches and not with their rows."""
    total = sum(sizes)
    if len(sizes) == 1 or count <= 0 or count >= total:
        return [size if count >= total else max(0, count) for size in sizes]
    # a row with key x has about x * total rows before it, give or take one per stretch
    near = 2 * len(sizes) + 1
    low = [max(0, math.floor((count - near) / total * size - 0.5)) for size in sizes]
    high = [min(size, math.ceil((count + near) / total * size - 0.5) + 1) for size in sizes]
    keys = np.concatenate([(np.arange(a, b) + 0.5) / size for a, b, size in zip(low, high, sizes)])
    stretch = np.repeat(np.arange(len(sizes)), [b - a for a, b in zip(low, high)])
    first = stretch[np.argsort(keys, kind="stable")[: count - sum(low)]]
    return [a + more for a, more in zip(low, np.bincount(first, minlength=len(sizes)).tolist())]


def group_rows(group: Sequence[Piece], first: int, stop: int) -> I64:
    """Rows [first, stop) of a group in the order they enter the lane: (plan position, epoch), int64 [stop - first, 2]."""
    sizes = list(map(len, group))
    bounds = list(zip(rows_before(sizes, first), rows_before(sizes, stop)))
    positions = np.concatenate(
        [np.arange(p.start + a, p.start + b, dtype=np.int64) for p, (a, b) in zip(group, bounds)]
    )
    counts = [b - a for a, b in bounds]
    rows = np.stack([positions, np.repeat(np.array([p.epoch for p in group], np.int64), counts)], axis=1)
    if len(group) == 1:
        return rows
    keys = np.concatenate([(np.arange(a, b) + 0.5) / size for (a, b), size in zip(bounds, sizes)])
    return rows[np.argsort(keys, kind="stable")]


def _rows(group: list[Piece]) -> I64:
    """All rows of one group."""
    return group_rows(group, 0, sum(map(len, group)))
