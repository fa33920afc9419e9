"""The order of an epoch, as a pure function of (shard rows, seed, epoch, shuffle, lanes).

Three steps, each computable for any range without those before it:

1. *Plan order*: shards sorted by a keyed random number; rows of a shard as stored, or in keyed order (``within_shard``).
2. *Lanes*: lane l of L holds a contiguous range of the plan, N // L rows, one more for the first N mod L lanes. Within
   it, groups of ``interleave`` neighbouring shards are merged evenly: row j of a shard with n rows in the lane sorts at
   (j + 1/2) / n, so that every shard of the group lasts as long as the group whatever its size.
3. *Keyed window*: the row at lane index k gets the key k + B * u(seed, epoch, lane, k) with B = buffer // L; rows leave
   in key order. No row moves more than B places, so output p .. p + n needs only indices p - B .. p + n + B.

With ``shuffle=None`` lane l holds the rows l, l + L, l + 2 L, .. of the manifest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .errors import ConfigError
from .identity import random_u64, random_unit, stream_key
from .wire.messages import Shuffle

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

#: rows of per-shard and per-group orders kept for reuse (8 bytes each)
_CACHED_ROWS = 4 << 20


class Plan:
    """Order of one epoch of one manifest.

    Args:
        shard_rows: rows per shard, int64 [shards].
        seed: job seed. epoch: from 0. shuffle: None for the stored order. lanes: L, at least 1.
    """

    def __init__(self, shard_rows: I64, *, seed: int, epoch: int, shuffle: Shuffle | None, lanes: int) -> None:
        if lanes < 1 or epoch < 0:
            raise ConfigError(f"no plan with {lanes} lanes and epoch {epoch}")
        self.lanes = lanes
        self.shuffle = shuffle
        self._seed = seed
        self._epoch = epoch
        rows = np.asarray(shard_rows, dtype=np.int64)
        if shuffle is None:
            self._order: I64 = np.arange(len(rows), dtype=np.int64)
        else:
            keys = random_u64(stream_key("shard-order", seed, epoch), 0, len(rows))
            self._order = np.argsort(keys, kind="stable").astype(np.int64)
        self._rows = rows
        self._ends: I64 = np.cumsum(rows[self._order], dtype=np.int64)
        self._first_ids: I64 = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows, dtype=np.int64)])
        self.rows = int(self._ends[-1]) if len(rows) else 0
        self._window = shuffle.buffer // lanes if shuffle is not None else 0
        self._kept: OrderedDict[tuple[str, int, int], I64] = OrderedDict()
        self._kept_rows = 0

    def lane_size(self, lane: int) -> int:
        """Rows of ``lane``."""
        return self.rows // self.lanes + (lane < self.rows % self.lanes)

    def lane_sizes(self) -> I64:
        """Rows of every lane, int64 [lanes]."""
        return lane_sizes(self.rows, self.lanes)

    def lane_rows(self, lane: int, first: int, count: int) -> tuple[I64, I64]:
        """Rows ``first .. first + count`` of the lane, in the order they leave it: (shard ordinals, rows), int64 each."""
        count = max(0, min(count, self.lane_size(lane) - first))
        if self.shuffle is None:
            return self.plan_rows(lane + self.lanes * np.arange(first, first + count, dtype=np.int64))
        return self.plan_rows(self._lane_positions(lane, self._leave(lane, first, count)))

    def lane_ids(self, lane: int, first: int, count: int) -> I64:
        """The same as sample ids, int64 [count]."""
        return self.ids(*self.lane_rows(lane, first, count))

    def plan_rows(self, positions: I64) -> tuple[I64, I64]:
        """Rows at these positions of the plan order (before lanes): (shard ordinals, rows)."""
        place = np.searchsorted(self._ends, positions, side="right")
        shards = self._order[place]
        rows = positions - (self._ends[place] - self._rows[shards])
        if self.shuffle is not None and self.shuffle.within_shard:
            rows = self._shuffled_rows(shards, rows)
        return shards, rows

    def ids(self, shards: I64, rows: I64) -> I64:
        """Sample ids of (shard, row) pairs."""
        return self._first_ids[shards] + rows

    # -- step 3: which lane indices leave at places first .. first + count

    def _leave(self, lane: int, first: int, count: int) -> I64:
        reach = self._window
        if reach == 0:
            return np.arange(first, first + count, dtype=np.int64)
        low = max(0, first - reach)
        high = min(self.lane_size(lane), first + count + reach)
        keys = np.arange(low, high, dtype=np.float64)
        keys += reach * random_unit(stream_key("window", self._seed, self._epoch, lane), low, high - low)
        order = np.argsort(keys, kind="stable")
        return order[first - low : first - low + count].astype(np.int64) + low

    # -- step 2: lane index -> plan position

    def _lane_positions(self, lane: int, index: I64) -> I64:
        base, extra = divmod(self.rows, self.lanes)
        start = lane * base + min(lane, extra)
        mixed = self.shuffle.interleave if self.shuffle is not None else 1
        if mixed <= 1 or len(index) == 0:
            return start + index
        out = np.empty(len(index), np.int64)
        bounds = self._group_bounds(start, start + self.lane_size(lane), mixed)
        groups = np.searchsorted(bounds, index + start, side="right") - 1
        for group in np.unique(groups):
            mine = groups == group
            order = self._merged(int(bounds[group]), int(bounds[group + 1]))
            out[mine] = bounds[group] + order[index[mine] + start - bounds[group]]
        return out

    def _group_bounds(self, start: int, stop: int, mixed: int) -> I64:
        """Plan positions where groups of ``mixed`` shards begin inside [start, stop), and stop itself."""
        inner = self._ends[(self._ends > start) & (self._ends < stop)]
        cuts = np.unique(inner)  # empty shards give equal ends
        return np.concatenate([np.array([start], np.int64), cuts[mixed - 1 :: mixed], np.array([stop], np.int64)])

    def _merged(self, start: int, stop: int) -> I64:
        """Offsets from ``start`` in the order in which the shards inside [start, stop) are merged."""

        def make() -> I64:
            inner = np.unique(self._ends[(self._ends > start) & (self._ends < stop)])
            cuts = np.concatenate([np.array([start], np.int64), inner, np.array([stop], np.int64)])
            return merged_evenly(np.diff(cuts))

        return self._keep(("group", start, stop), make)

    # -- step 1: rows within a shard

    def _shuffled_rows(self, shards: I64, rows: I64) -> I64:
        out = np.empty(len(rows), np.int64)
        for shard in np.unique(shards):
            mine = shards == shard
            number = int(shard)

            def make(number: int = number) -> I64:
                keys = random_u64(stream_key("row-order", self._seed, self._epoch, number), 0, int(self._rows[number]))
                return np.argsort(keys, kind="stable").astype(np.int64)

            out[mine] = self._keep(("shard", number, 0), make)[rows[mine]]
        return out

    def _keep(self, name: tuple[str, int, int], make: Callable[[], I64]) -> I64:
        found = self._kept.get(name)
        if found is None:
            found = self._kept[name] = make()
            self._kept_rows += len(found)
            while self._kept_rows > _CACHED_ROWS and len(self._kept) > 1:
                self._kept_rows -= len(self._kept.popitem(last=False)[1])
        self._kept.move_to_end(name)
        return found


def merged_evenly(sizes: I64) -> I64:
    """Order in which stretches of these sizes, laid end to end, are merged so that each lasts as long as the whole:
    int64 [sum of sizes]."""
    keys = np.concatenate([(np.arange(n) + 0.5) / n for n in sizes.tolist()])
    return np.argsort(keys, kind="stable").astype(np.int64)


def lane_sizes(rows: int, lanes: int) -> I64:
    """Rows of each of ``lanes`` lanes of an epoch of ``rows`` rows, int64 [lanes]."""
    base, extra = divmod(rows, lanes)
    sizes = np.full(lanes, base, np.int64)
    sizes[:extra] += 1
    return sizes
