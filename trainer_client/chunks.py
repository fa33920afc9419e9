"""Rows on their way: stretches of the read stream, planned together, filled by reads in any order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from manifests.wire.messages import BadRow

from .tensors import Part, Piece

I64 = npt.NDArray[np.int64]

#: marks in ``Chunk.part``: not there yet, a bad sample, cannot be had, in a shard that is in quarantine
MISSING, BAD, FAILED, QUARANTINED = -1, -2, -3, -4


def in_order(numbers: I64) -> list[int]:
    """The distinct numbers, first met first."""
    found, first = np.unique(numbers, return_index=True)
    return [int(n) for n in found[np.argsort(first)]]


class Chunk:
    """Rows ``first .. first + count`` of the read stream.

    Not locked: its owner changes and reads it under one lock, except ``pieces`` on places that are filled.
    """

    def __init__(self, first: int, shards: I64, rows: I64, ids: I64, reserved: int) -> None:
        self.first = first
        self.shards = shards
        self.rows = rows
        #: sample ids as the plan has them, int64 [count]
        self.ids = ids
        #: bytes taken from the prefetch budget
        self.reserved = reserved
        #: index into ``parts`` per row, or a mark above, int32 [count]
        self.part = np.full(len(rows), MISSING, np.int32)
        #: rows that are marked MISSING
        self.missing = len(rows)
        #: no longer needed
        self.released = False
        self._row = np.zeros(len(rows), np.int32)
        self._parts: list[Part] = []
        self.bad: dict[int, BadRow] = {}
        #: why, per offset that is marked FAILED or QUARANTINED
        self.errors: dict[int, Exception] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Chunk({self.first}+{len(self)}, {self.missing} missing)"

    @property
    def end(self) -> int:
        """Place in the read stream after the last row."""
        return self.first + len(self.rows)

    def fill(self, offsets: I64, part: Part, bad: Sequence[tuple[int, BadRow]]) -> int:
        """Put rows of ``part`` at ``offsets`` (those not bad, in order) and mark bad ones; places that are filled
        already keep what they have. Returns how many places were filled."""
        if bad:
            bad_offsets = np.array([offset for offset, _ in bad], np.int64)
            good = offsets[~np.isin(offsets, bad_offsets)]
        else:
            good = offsets
        new = self.part[good] == MISSING
        if new.any():
            # the mark last: a place that shows as filled can be read
            self._parts.append(part)
            self._row[good[new]] = np.flatnonzero(new)
            self.part[good[new]] = len(self._parts) - 1
        filled = int(new.sum())
        for offset, row in bad:
            if self.part[offset] == MISSING:
                self.bad[offset] = row
                self.part[offset] = BAD
                filled += 1
        self.missing -= filled
        return filled

    def fail(self, offsets: I64, error: Exception) -> None:
        """These rows cannot be had."""
        self._mark(offsets, error, FAILED)

    def quarantine(self, shard: int, error: Exception) -> int:
        """All rows of ``shard`` that are not there are in quarantine. Returns how many."""
        return self._mark(np.flatnonzero(self.shards == shard), error, QUARANTINED)

    def _mark(self, offsets: I64, error: Exception, mark: int) -> int:
        missing = offsets[self.part[offsets] == MISSING]
        self.errors.update(dict.fromkeys(missing.tolist(), error))
        self.part[missing] = mark
        self.missing -= len(missing)
        return len(missing)

    def pieces(self, offsets: I64, places: I64) -> list[Piece]:
        """Where the rows at ``offsets`` (filled) are, for the places ``places`` of a batch."""
        numbers = self.part[offsets]
        out = []
        for number in np.unique(numbers):
            mine = numbers == number
            out.append(Piece(self._parts[number], self._row[offsets[mine]].astype(np.int64), places[mine]))
        return out
