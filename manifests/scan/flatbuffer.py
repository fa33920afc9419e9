"""Just enough FlatBuffers to find the buffers of an Arrow IPC file.

pyarrow reads whole record batches; a worker wants some rows of a large one. The layout is that of Arrow's ``File.fbs``,
``Message.fbs`` and ``Schema.fbs`` (format versions V4 and V5); names of slots are given where they are read. Every
access is bounds-checked: damaged metadata raise ``FlatbufferError``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

#: longest vector that is believed
_MOST = 1 << 24


class FlatbufferError(ValueError):
    """The metadata do not make sense."""


class Table:
    """One FlatBuffers table inside ``data``."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self._at = at
        self._vtable = at - self._get("<i", at)
        self._slots = (self._get("<H", self._vtable) - 4) // 2

    @classmethod
    def root(cls, data: memoryview) -> Table:
        """The root table of a buffer."""
        table = cls.__new__(cls)
        table._data = data
        cls.__init__(table, data, table._get("<I", 0))
        return table

    def _get(self, kind: str, at: int) -> int:
        if at < 0:
            raise FlatbufferError("offset before the buffer")
        try:
            value: int = struct.unpack_from(kind, self._data, at)[0]
        except struct.error:
            raise FlatbufferError("offset behind the buffer") from None
        return value

    def _slot(self, slot: int) -> int:
        """Position of the slot's value, 0 if it is absent."""
        if slot >= self._slots:
            return 0
        offset = self._get("<H", self._vtable + 4 + 2 * slot)
        return self._at + offset if offset else 0

    def number(self, slot: int, kind: str, default: int = 0) -> int:
        """A scalar; ``kind`` as in ``struct``: "<q" int64, "<h" int16, "<B" uint8."""
        at = self._slot(slot)
        return self._get(kind, at) if at else default

    def table(self, slot: int) -> Table | None:
        """A table, None if absent."""
        at = self._slot(slot)
        return Table(self._data, at + self._get("<I", at)) if at else None

    def structs(self, slot: int, kind: str) -> list[tuple[int, ...]]:
        """A vector of structs of the layout ``kind``."""
        start, length = self._vector(slot)
        width = struct.calcsize(kind)
        if start + length * width > len(self._data):
            raise FlatbufferError("vector behind the buffer")
        return list(struct.iter_unpack(kind, self._data[start : start + length * width]))

    def tables(self, slot: int) -> Iterator[Table]:
        """A vector of tables."""
        start, length = self._vector(slot)
        for at in range(start, start + 4 * length, 4):
            yield Table(self._data, at + self._get("<I", at))

    def _vector(self, slot: int) -> tuple[int, int]:
        at = self._slot(slot)
        if not at:
            return 0, 0
        start = at + self._get("<I", at)
        length = self._get("<I", start)
        if length > _MOST:
            raise FlatbufferError(f"vector of {length} items")
        return start + 4, length
