"""A rank's lane as the pool keeps it: what it was granted, and how much it may have. Pure.

The rows that have left at a place are worked out from the pieces near it: a row leaves at most a window before or after
its index. So a place costs as much as its window has rows, however much is kept, and no lists of rows are.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from manifests.errors import ProtocolError
from manifests.granted import PIECE, Lane, Piece, group_rows, pieces_below, rows_before, window_keys
from manifests.identity import stream_key
from manifests.ranges import Ranges
from manifests.wire import messages as m

from .stretches import Stretch, left_rows

#: pieces stored in one record
PART = 64

_index = attrgetter("index")


class Held:
    """One rank's lane.

    Args:
        seed, epoch: of the job and the epoch. number: of the lane's random stream.
        window: rows, see ``manifests.granted.window_rows``.
        dropped: rows at its beginning that were forgotten. forgotten: pieces at its beginning that were.

    Attributes:
        begun: its place when the generation, or the rank's holder, began.
        limit: rows it may have since its beginning, None: no quota.
        ended: the place at which its rank left, when the rows after that went back to the pool.
        pieces: what it was granted and did not forget. length: rows granted since the lane began.
    """

    def __init__(
        self, *, seed: int, epoch: int, number: int, window: int, dropped: int = 0, forgotten: int = 0, begun: int = 0
    ) -> None:
        self.epoch, self.number, self.window = epoch, number, window
        self.dropped, self.forgotten = dropped, forgotten
        self.begun = begun
        self.limit: int | None = None
        self.ended: int | None = None
        self.pieces: list[Piece] = []
        self.length = dropped
        self._seed = seed
        self._key = stream_key("window", seed, epoch, number)
        # lane indices of the cuts
        self._cuts: list[int] = []
        # (lane index of a group, least position of this epoch from there on), ascending in both
        self._least: list[tuple[int, int]] = []
        # pieces as stored, those that were forgotten but share a part with kept ones too
        self._encoded = bytearray(forgotten % PART * PIECE.size)
        self._certain: int | None = None

    def __repr__(self) -> str:
        kept = f"{len(self.pieces)} pieces, {self.length} rows"
        return f"Held({self.number}, epoch {self.epoch}, {kept}, begun {self.begun}, limit {self.limit}, ended {self.ended})"

    @property
    def lane(self) -> Lane:
        """The lane with all kept rows: mind their number."""
        grants = self.grants(0, self.begun)
        return Lane.restore(grants, seed=self._seed, epoch=self.epoch, window=self.window)

    @property
    def is_full(self) -> bool:
        """It has all it will ever get."""
        return self.ended is not None or (self.limit is not None and self.length >= self.limit)

    @property
    def ends_with_cut(self) -> bool:
        """Nothing was in the pool when its rank last asked."""
        return bool(self.pieces) and self.pieces[-1].is_cut

    @property
    def certain(self) -> int:
        """Places below this are certain."""
        if self._certain is None:
            first = max(self.dropped, self.length - self.window, *self._cuts[-1:])
            self._certain = first + int(np.count_nonzero(self._keys(first, self.length) <= self.length))
        return self._certain

    # -- growing

    def extend(self, pieces: Iterable[Piece]) -> None:
        """More pieces were granted, whole groups of them. Raises ``ProtocolError`` if they do not continue the lane."""
        group = -1
        for piece in pieces:
            if piece.index not in (self.length, group) or (piece.is_cut and piece.index != self.length):
                raise ProtocolError(
                    "pieces do not continue the lane", cause=f"index {piece.index} after {self.length} rows"
                )
            if piece.is_cut:
                if self.ends_with_cut:
                    continue
                group = -1
                self._cuts.append(piece.index)
            else:
                group = piece.index
                self.length += len(piece)
                if piece.epoch == self.epoch:
                    while self._least and self._least[-1][1] >= piece.start:
                        self._least.pop()
                    self._least.append((piece.index, piece.start))
            self.pieces.append(piece)
            self._encoded += PIECE.pack(piece.index, piece.start, piece.stop, piece.epoch)
        self._certain = None

    # -- as sent and as stored

    def after(self, have: int) -> bytes:
        """Pieces whose groups begin at lane index ``have`` or later, as sent."""
        first = bisect.bisect_left(self.pieces, have, key=_index)
        return bytes(self._encoded[PIECE.size * (self.forgotten % PART + first) :])

    def grants(self, rank: int, place: int) -> m.LaneGrants:
        """What a lane is made of again, with all its pieces."""
        kept = bytes(self._encoded[PIECE.size * (self.forgotten % PART) :])
        return m.LaneGrants(rank=rank, number=self.number, dropped=self.dropped, place=place, pieces=kept)

    @property
    def count(self) -> int:
        """Pieces since the lane began; as stored they are numbered from there."""
        return self.forgotten + len(self.pieces)

    def parts(self, first: int = 0) -> Iterator[tuple[int, bytes]]:
        """Number and content of the stored parts with kept pieces that are numbered ``first`` or later."""
        base, size = self.forgotten // PART, PIECE.size * PART
        for part in range(max(base, first // PART), -(-self.count // PART)):
            yield part, bytes(self._encoded[(part - base) * size : (part - base + 1) * size])

    def restore(self, parts: Iterable[bytes]) -> None:
        """Take the stored parts in, in order."""
        self._encoded.clear()
        kept = b"".join(parts)
        skipped = PIECE.size * (self.forgotten % PART)
        self._encoded += kept[:skipped]
        self.extend(Piece(*numbers) for numbers in PIECE.iter_unpack(kept[skipped:]))

    def forget(self, floor: int) -> bool:
        """Leave out leading groups below ``floor``, of which every rank has handed everything out; whether there were any.
        Stored parts before ``forgotten`` are needed no more. A lane that ended is kept as it is, because rows of it that
        others handed out since may lie below."""
        if self.ended is not None:
            return False
        keep = pieces_below(self.pieces, self.epoch, floor)
        if not keep:
            return False
        dropped = self.dropped + sum(map(len, self.pieces[:keep]))
        parts = (self.forgotten + keep) // PART - self.forgotten // PART
        self.dropped, self.forgotten = dropped, self.forgotten + keep
        del self.pieces[:keep]
        del self._encoded[: PIECE.size * PART * parts]
        del self._cuts[: bisect.bisect_right(self._cuts, dropped)]
        del self._least[: bisect.bisect_left(self._least, (dropped, -1))]
        return True

    # -- what has left

    def left(self, place: int) -> Ranges:
        """Plan positions of the epoch that had left at ``place``, as far as they are kept."""
        place = self._clamp(place)
        first, stop, gone = self._near(place)
        at = self._group_at(first)
        begin = self.pieces[at].index if at < len(self.pieces) else first
        positions, epochs = self._rows(begin, stop)
        away = np.concatenate([np.ones(max(0, first - begin), np.bool_), gone])
        whole = [(p.start, p.stop) for p in self.pieces[:at] if p.epoch == self.epoch]
        return Ranges.of(whole) | Ranges.members(positions[away & (epochs == self.epoch)])

    def own(self) -> list[Stretch]:
        """All rows the rank has or had, as far as they are kept, in ranges."""
        if self.ended is None:
            return [(p.epoch, p.start, p.stop) for p in self.pieces if not p.is_cut]
        return left_rows(self.lane, self.ended)

    def lowest(self, place: int) -> int | None:
        """The lowest position of the epoch that the rank has and had not handed out at ``place``."""
        if self.ended is not None:
            rest = self.left(self.ended) - self.left(place)
            return int(rest.bounds[0, 0]) if rest else None
        first, stop, gone = self._near(place)
        found: list[int] = []
        if first < stop:
            positions, epochs = self._rows(first, stop)
            found += positions[~gone & (epochs == self.epoch)].tolist()
        at = self._group_at(stop)
        if at < len(self.pieces) and self.pieces[at].index < stop:
            group = self._group(at)
            before = rows_before(list(map(len, group)), stop - group[0].index)
            pairs = [(p.start + gone, p) for p, gone in zip(group, before) if p.epoch == self.epoch]
            found += [start for start, piece in pairs if start < piece.stop]
        later = bisect.bisect_left(self._least, (stop, -1))
        found += [start for _, start in self._least[later : later + 1]]
        return min(found, default=None)

    def _clamp(self, place: int) -> int:
        return min(place, self.length if self.ended is None else self.ended)

    def _near(self, place: int) -> tuple[int, int, npt.NDArray[np.bool_]]:
        """Lane indices [first, stop) of rows whose leaving depends on their keys, and which of them had left at ``place``:
        those before had all left, those after had not."""
        place = min(place, self.length)
        cut = bisect.bisect_right(self._cuts, place)
        first = max(self.dropped, place - self.window, *self._cuts[cut - 1 : cut] if cut else ())
        stop = max(first, min(self.length, place + self.window, *self._cuts[cut : cut + 1]))
        gone = np.zeros(stop - first, np.bool_)
        if place > first:
            gone[np.argsort(self._keys(first, stop), kind="stable")[: place - first]] = True
        return first, stop, gone

    def _keys(self, first: int, stop: int) -> npt.NDArray[np.float64]:
        return window_keys(self._key, self.window, first, stop)

    def _group_at(self, index: int) -> int:
        """Where in ``pieces`` the group begins that has the row at this lane index; its cut, if one is before it."""
        at = bisect.bisect_right(self.pieces, index, key=_index) - 1
        return bisect.bisect_left(self.pieces, self.pieces[at].index, key=_index) if at >= 0 else 0

    def _group(self, at: int) -> list[Piece]:
        """The pieces of the group that begins at ``at``, cuts left out; [] for a cut at the end."""
        index = self.pieces[at].index
        stop = bisect.bisect_right(self.pieces, index, key=_index)
        return [piece for piece in self.pieces[at:stop] if not piece.is_cut]

    def _rows(self, first: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Plan positions and epochs of the rows at lane indices [first, stop), int64 each."""
        found = [np.empty((0, 2), np.int64)]
        at = self._group_at(first)
        while first < stop:
            group = self._group(at)
            begin, size = self.pieces[at].index, sum(map(len, group))
            if size:
                found.append(group_rows(group, first - begin, min(stop - begin, size)))
                first = min(stop, begin + size)
            at = bisect.bisect_right(self.pieces, begin, key=_index)
        rows = np.concatenate(found)
        return rows[:, 0], rows[:, 1]
