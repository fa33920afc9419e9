"""Stretches: rows of several epochs as (epoch, start, stop) of plan positions. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from manifests.granted import Lane, Piece, decode_pieces, encode_pieces
from manifests.ranges import Ranges

#: epoch, start, stop: plan positions of an epoch
Stretch = tuple[int, int, int]


def left_rows(lane: Lane, place: int) -> list[Stretch]:
    """Kept rows of the lane that had left at ``place``, in ranges, ascending."""
    positions, epochs = lane.leave(lane.dropped, place - lane.dropped)
    return [(e, a, b) for e in np.unique(epochs).tolist() for a, b in Ranges.members(positions[epochs == e])]


def _by_epoch(rows: Iterable[Stretch]) -> dict[int, Ranges]:
    found: dict[int, list[tuple[int, int]]] = {}
    for epoch, start, stop in rows:
        found.setdefault(epoch, []).append((start, stop))
    return {epoch: Ranges.of(pairs) for epoch, pairs in sorted(found.items())}


def union(rows: Iterable[Stretch], others: Iterable[Stretch]) -> list[Stretch]:
    """Rows in any of the two, ascending by epoch and position."""
    return [(epoch, a, b) for epoch, found in _by_epoch([*rows, *others]).items() for a, b in found]


def without(rows: Iterable[Stretch], gone: Iterable[Stretch]) -> list[Stretch]:
    """Rows that are not among ``gone``, ascending by epoch and position."""
    away = _by_epoch(gone)
    nothing = Ranges.of([])
    return [(e, a, b) for e, found in _by_epoch(rows).items() for a, b in found - away.get(e, nothing)]


def count(rows: Iterable[Stretch]) -> int:
    """How many rows."""
    return sum(stop - start for _, start, stop in rows)


def encode_stretches(rows: Iterable[Stretch]) -> bytes:
    """As pieces with index 0 (``manifests.granted``)."""
    return encode_pieces(Piece(0, start, stop, epoch) for epoch, start, stop in rows)


def decode_stretches(data: bytes) -> list[Stretch]:
    """The inverse. Raises ``ProtocolError`` for anything that is no pieces."""
    return [(piece.epoch, piece.start, piece.stop) for piece in decode_pieces(data)]


def merged(parts: Iterable[Ranges]) -> Ranges:
    """The union of all."""
    return Ranges.of(pair for part in parts for pair in part)
