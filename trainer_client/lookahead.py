"""The rows that will be read next, known before they are planned, so that grants for their shards can be asked for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .chunks import in_order
from .dynamic import AnyLeg

I64 = npt.NDArray[np.int64]

#: rows that ``grow`` works out in one step
STEP = 16_384


@dataclass(slots=True)
class _Stretch:
    shards: I64
    rows: I64
    distinct: list[int]
    taken: int = 0


class LookAhead:
    """The read stream of a leg from its beginning, taken in stretches; one thread uses it."""

    def __init__(self, leg: AnyLeg) -> None:
        self._leg = leg
        self._known: deque[_Stretch] = deque()
        #: place in the read stream up to which rows are known
        self.end = 0
        self.taken = 0
        self._uses: dict[int, int] = {}  # stretches that hold a shard

    def __repr__(self) -> str:
        return f"LookAhead({self.taken} taken, {self.end} known, {len(self._uses)} shards)"

    @property
    def rows(self) -> int:
        """Rows that are known and not taken."""
        return self.end - self.taken

    @property
    def shard_count(self) -> int:
        """Shards of these rows, about: a stretch that was begun counts as a whole."""
        return len(self._uses)

    def grow(self, limit: int, count: int = STEP) -> bool:
        """Make up to ``count`` more rows known, none at or after place ``limit``. False: there was none."""
        count = min(count, limit - self.end)
        if count <= 0:
            return False
        shards, rows = self._leg.refs(self.end, count)
        if not len(rows):
            return False
        distinct = in_order(shards)
        for shard in distinct:
            self._uses[shard] = self._uses.get(shard, 0) + 1
        self._known.append(_Stretch(shards, rows, distinct))
        self.end += len(rows)
        return True

    def take(self, count: int, limit: int) -> tuple[I64, I64]:
        """The next ``count`` rows, none at or after ``limit``: (shard ordinals, rows), int64 each."""
        while self.rows < count and self.grow(limit, max(count, 1024)):
            pass
        taken: list[tuple[I64, I64]] = []
        while count and self._known:
            head = self._known[0]
            stop = min(head.taken + count, len(head.rows))
            taken.append((head.shards[head.taken : stop], head.rows[head.taken : stop]))
            count -= stop - head.taken
            self.taken += stop - head.taken
            head.taken = stop
            if stop == len(head.rows):
                self._forget(self._known.popleft())
        if not taken:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate([s for s, _ in taken]), np.concatenate([r for _, r in taken])

    def _forget(self, stretch: _Stretch) -> None:
        for shard in stretch.distinct:
            self._uses[shard] -= 1
            if not self._uses[shard]:
                del self._uses[shard]

    def shards(self, most: int) -> list[int]:
        """Shards of the rows that are known and not taken, first needed first, at most ``most``."""
        found: dict[int, None] = {}
        for stretch in self._known:
            begun = in_order(stretch.shards[stretch.taken :]) if stretch.taken else stretch.distinct
            found.update(dict.fromkeys(begun))
            if len(found) >= most:
                break
        return list(found)[:most]
