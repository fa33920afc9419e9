"""Counts per lane: how a position in an epoch is written, moved and read.

A rank always takes from its lane with the fewest rows taken among those with rows left (ties: lowest lane). Because each
take raises that count by one, the rows it will take are exactly the pairs (index, lane) with index >= taken[lane], in
lexicographic order. So any stretch of the sequence follows from counts alone, without walking there.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def default_lanes(world_size: int) -> int:
    """lcm(12, world_size): any world size up to 4, and many others, can take over later."""
    return math.lcm(12, world_size)


def own_lanes(rank: int, world_size: int, lanes: int) -> I64:
    """Lanes of ``rank``, ascending: those with lane mod world_size == rank."""
    return np.arange(rank, lanes, world_size, dtype=np.int64)


def divisors(number: int) -> list[int]:
    """All positive divisors, ascending: the world sizes that ``number`` lanes allow."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def left(sizes: I64, taken: I64) -> int:
    """Rows not yet taken."""
    return int((sizes - taken).sum())


def advance(sizes: I64, taken: I64, count: int) -> I64:
    """Counts after ``count`` more takes (fewer if the lanes run out). Arrays int64 [own lanes]; input is not changed."""
    level, rest = _level(sizes, taken, count)
    moved = np.maximum(taken, np.minimum(sizes, level))
    if rest:
        open_here = np.flatnonzero((moved == level) & (level < sizes))[:rest]
        moved[open_here] += 1
    return moved


def _level(sizes: I64, taken: I64, count: int) -> tuple[int, int]:
    """Largest level up to which all lanes can be filled with ``count`` takes, and the takes then left over."""
    low, high = int(taken.min(initial=0)), int(sizes.max(initial=0))

    def need(level: int) -> int:
        return int(np.maximum(np.minimum(sizes, level) - taken, 0).sum())

    if need(high) <= count:
        return high, 0
    while high - low > 1:
        middle = (low + high) // 2
        if need(middle) <= count:
            low = middle
        else:
            high = middle
    return low, count - need(low)


def sequence(sizes: I64, taken: I64, count: int) -> tuple[I64, I64]:
    """The next ``count`` takes from ``taken``: (position among the own lanes, index in that lane), int64 [<= count]."""
    count = min(count, left(sizes, taken))
    if count <= 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    after = advance(sizes, taken, count)
    lanes = np.repeat(np.arange(len(sizes), dtype=np.int64), after - taken)
    starts = np.repeat(np.cumsum(after - taken) - (after - taken), after - taken)
    index = np.arange(len(lanes), dtype=np.int64) - starts + taken[lanes]
    order = np.lexsort((lanes, index))
    return lanes[order], index[order]
