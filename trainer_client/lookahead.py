"""The rows that will be read next, known before they are planned, so that grants for their shards can be asked for."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from .session import Leg

I64 = npt.NDArray[np.int64]

#: rows looked at ahead, at the most
_ROWS = 100_000


class LookAhead:
    """The read stream of a leg from its beginning, taken in stretches; one thread uses it."""

    def __init__(self, leg: Leg) -> None:
        self._leg = leg
        self._known: deque[tuple[I64, I64]] = deque()
        self._end = 0  # place in the read stream up to which rows are known
        self._taken = 0

    def __repr__(self) -> str:
        return f"LookAhead({self._taken} taken, {self._end} known)"

    def take(self, count: int, limit: int) -> tuple[I64, I64]:
        """The next ``count`` rows: (shard ordinals, rows), int64 each; makes more known, up to place ``limit``."""
        ahead = min(_ROWS, max(4 * count, 1024))
        while self._end < min(self._taken + count + ahead, limit):
            shards, rows = self._leg.refs(self._end, min(ahead, limit - self._end))
            if not len(rows):
                break
            self._known.append((shards, rows))
            self._end += len(rows)
        taken: list[tuple[I64, I64]] = []
        while count and self._known:
            shards, rows = self._known.popleft()
            if len(rows) > count:
                self._known.appendleft((shards[count:], rows[count:]))
                shards, rows = shards[:count], rows[:count]
            taken.append((shards, rows))
            count -= len(rows)
            self._taken += len(rows)
        return np.concatenate([s for s, _ in taken]), np.concatenate([r for _, r in taken])

    def shards(self) -> list[I64]:
        """Shards of the rows that are known and not taken, in order."""
        return [shards for shards, _ in self._known]
