"""Sets of integers as sorted, disjoint, non-touching ranges: rows of a plan that were taken, sample ids that were passed
over. Their size follows from the number of gaps, not of members."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from .errors import ProtocolError

I64 = npt.NDArray[np.int64]

_NONE = np.empty((0, 2), np.int64)


class Ranges:
    """An immutable set of integers of at least 0.

    Attributes:
        bounds: [start, stop) of each range, ascending, none empty and none touching the next. int64 [ranges, 2].
    """

    __slots__ = ("_encoded", "bounds")

    def __init__(self, bounds: I64) -> None:
        self.bounds = bounds
        self._encoded: bytes | None = None

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Ranges:
        """The union of [start, stop) pairs in any order; empty ones are passed over."""
        return cls._normal(np.array(list(pairs), np.int64).reshape(-1, 2))

    @classmethod
    def members(cls, values: I64) -> Ranges:
        """The set of these values (any order, repeats count once)."""
        return cls._normal(np.stack([values, values + 1], axis=1)) if len(values) else cls(_NONE)

    @classmethod
    def _normal(cls, pairs: I64) -> Ranges:
        pairs = pairs[pairs[:, 0] < pairs[:, 1]]
        if not len(pairs):
            return cls(_NONE)
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        ends = np.maximum.accumulate(pairs[:, 1])
        first = np.concatenate([[True], pairs[1:, 0] > ends[:-1]])
        last = np.concatenate([first[1:], [True]])
        return cls(np.stack([pairs[first, 0], ends[last]], axis=1))

    # -- looking

    def __len__(self) -> int:
        return int((self.bounds[:, 1] - self.bounds[:, 0]).sum())

    def __bool__(self) -> bool:
        return bool(len(self.bounds))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The ranges, ascending."""
        return iter([(int(start), int(stop)) for start, stop in self.bounds])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and np.array_equal(self.bounds, other.bounds)

    def __hash__(self) -> int:
        return hash(self.bounds.tobytes())

    def __repr__(self) -> str:
        shown = ", ".join(f"{start}..{stop}" for start, stop in list(self)[:4])
        return f"Ranges({len(self)} in {len(self.bounds)}: {shown}{', ..' if len(self.bounds) > 4 else ''})"

    @property
    def floor(self) -> int:
        """The lowest integer of at least 0 that is not in the set."""
        return int(self.bounds[0, 1]) if len(self.bounds) and self.bounds[0, 0] == 0 else 0

    def has(self, values: I64) -> npt.NDArray[np.bool_]:
        """Which of the values are members, bool [values]."""
        place = np.searchsorted(self.bounds[:, 0], values, side="right") - 1
        inside = place >= 0
        inside[inside] = values[inside] < self.bounds[place[inside], 1]
        return inside

    def values(self) -> I64:
        """All members, ascending, int64 [len]. Mind their number."""
        if not len(self.bounds):
            return np.empty(0, np.int64)
        sizes = self.bounds[:, 1] - self.bounds[:, 0]
        before = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        members: I64 = np.arange(int(sizes.sum()), dtype=np.int64) + np.repeat(self.bounds[:, 0] - before, sizes)
        return members

    # -- arithmetic

    def __or__(self, other: Ranges) -> Ranges:
        return self._normal(np.concatenate([self.bounds, other.bounds]))

    def __and__(self, other: Ranges) -> Ranges:
        top = max([0, *self.bounds[-1:, 1].tolist(), *other.bounds[-1:, 1].tolist()])
        return (self.gaps(top) | other.gaps(top)).gaps(top)

    def __sub__(self, other: Ranges) -> Ranges:
        top = max([0, *self.bounds[-1:, 1].tolist()])
        return self & other.gaps(top)

    def gaps(self, stop: int) -> Ranges:
        """The integers of [0, stop) that are not members."""
        starts = np.concatenate([[0], self.bounds[:, 1]])
        stops = np.concatenate([self.bounds[:, 0], [stop]])
        return self._normal(np.stack([starts, np.minimum(stops, stop)], axis=1).astype(np.int64))

    # -- bytes

    def encode(self) -> bytes:
        """Compact bytes: distances between successive bounds as LEB128 numbers. The empty set is b""."""
        if self._encoded is None:
            self._encoded = encode_bounds(self.bounds.reshape(-1).tolist())
        return self._encoded

    @classmethod
    def decode(cls, data: bytes) -> Ranges:
        """The inverse. Raises ``ProtocolError`` for anything that ``encode`` does not make."""
        numbers: list[int] = []
        value = shift = 0
        for byte in data:
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                numbers.append(value)
                value = shift = 0
            elif shift > 63:
                break
        bounds = np.cumsum(np.array(numbers, object)) if numbers else np.empty(0, object)
        zero_inside = any(number == 0 for number in numbers[1:])
        if shift or len(numbers) % 2 or zero_inside or (numbers and int(bounds[-1]) >= 1 << 62):
            raise ProtocolError("a set of rows is damaged", cause=f"{len(data)} bytes that are no ranges")
        return cls(bounds.astype(np.int64).reshape(-1, 2))


def encode_bounds(bounds: Iterable[int]) -> bytes:
    """``Ranges.encode`` of the set with these ascending bounds, start and stop of each range in turn."""
    out, before = bytearray(), 0
    for bound in bounds:
        step, before = bound - before, bound
        while step >= 0x80:
            out.append(step & 0x7F | 0x80)
            step >>= 7
        out.append(step)
    return bytes(out)
