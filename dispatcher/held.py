"""A rank's lane as the pool keeps it: what it was granted, and how much it may have. Pure."""

from __future__ import annotations

import bisect

from manifests.granted import Lane, Piece, encode_pieces
from manifests.ranges import Ranges
from manifests.wire import messages as m

from .stretches import Stretch, left_rows

_PIECE_BYTES = len(encode_pieces([Piece(0, 0, 0, 0)]))


class Held:
    """One rank's lane.

    The order in which its rows leave is worked out when books need it, not with each ask.

    Attributes:
        begun: its place when the generation, or the rank's holder, began.
        limit: rows it may have since its beginning, None: no quota.
        ended: the place at which its rank left, when the rows after that went back to the pool.
        pieces, length: what it was granted, as ``Lane`` has it.
    """

    def __init__(self, lane: Lane, begun: int = 0, limit: int | None = None, ended: int | None = None) -> None:
        self.begun = begun
        self.limit = limit
        self.ended = ended
        self.pieces = list(lane.pieces)
        self.length = lane.length
        self.number = lane.number
        self._lane = lane
        # granted, but not in the lane yet
        self._coming: list[Piece] = []
        # the pieces as stored
        self._encoded = bytearray(encode_pieces(lane.pieces))

    def __repr__(self) -> str:
        return f"Held({self._lane!r}, {self.length} rows, begun {self.begun}, limit {self.limit}, ended {self.ended})"

    @property
    def lane(self) -> Lane:
        """The lane with all its pieces."""
        if self._coming:
            self._lane.extend(self._coming)
            self._coming = []
        return self._lane

    @property
    def dropped(self) -> int:
        """Rows at its beginning that were forgotten."""
        return self._lane.dropped

    @property
    def is_full(self) -> bool:
        """It has all it will ever get."""
        return self.ended is not None or (self.limit is not None and self.length >= self.limit)

    @property
    def ends_with_cut(self) -> bool:
        """Nothing was in the pool when its rank last asked."""
        return bool(self.pieces) and self.pieces[-1].is_cut

    def extend(self, pieces: list[Piece]) -> None:
        self.pieces += pieces
        self.length += sum(map(len, pieces))
        self._coming += pieces
        self._encoded += encode_pieces(pieces)

    def after(self, have: int) -> bytes:
        """Pieces whose groups begin at lane index ``have`` or later, as sent."""
        first = bisect.bisect_left(self.pieces, have, key=lambda piece: piece.index)
        return bytes(self._encoded[_PIECE_BYTES * first :])

    def grants(self, rank: int) -> m.LaneGrants:
        """As stored; ``place`` is where it began."""
        return m.LaneGrants(
            rank=rank, number=self.number, dropped=self.dropped, place=self.begun, pieces=bytes(self._encoded)
        )

    def forget(self, floor: int) -> bool:
        """Leave out leading groups below ``floor``; whether there were any. A lane that ended is kept as it is, because
        rows of it that others handed out since may lie below."""
        lane = self.lane
        short = lane.forget(floor) if self.ended is None else lane
        if short is lane:
            return False
        del self._encoded[: _PIECE_BYTES * (len(lane.pieces) - len(short.pieces))]
        self._lane, self.pieces = short, list(short.pieces)
        return True

    def left(self, place: int) -> Ranges:
        """Plan positions of the epoch that had left at ``place``, as far as they are kept."""
        return self.lane.left(place if self.ended is None else min(place, self.ended))

    def own(self) -> list[Stretch]:
        """All rows the rank has or had, as far as they are kept, in ranges."""
        if self.ended is None:
            return [(p.epoch, p.start, p.stop) for p in self.pieces if not p.is_cut]
        return left_rows(self.lane, self.ended)

    def lowest(self, place: int) -> int | None:
        """The lowest position of the epoch that the rank has and had not handed out at ``place``."""
        if self.ended is None:
            return self.lane.lowest(place)
        rest = self.lane.left(self.ended) - self.lane.left(min(place, self.ended))
        return int(rest.bounds[0, 0]) if rest else None
