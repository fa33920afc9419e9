"""The shards of a manifest: looked at one by one, kept in columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Shard:
    """One stored object. ``content_id``: ``blake3:``/``sha256:`` of its bytes, or ``etag:`` from a fast build."""

    ordinal: int
    uri: str
    format: str
    rows: int
    bytes: int
    content_id: str


class Shards(Sequence[Shard]):
    """Lazy view of a manifest's shards by ordinal; a ``Shard`` is made in a few microseconds when it is looked at.

    Args:
        table: the five columns of a checked manifest table. first: ordinal of its first row.
    """

    def __init__(self, table: pa.Table, first: int = 0) -> None:
        self._table = table
        self._first = first
        self._count = int(table.num_rows)

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"Shards({len(self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Shards, (self._table, self._first)

    @overload
    def __getitem__(self, at: int) -> Shard: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Shard]: ...
    def __getitem__(self, at: int | slice) -> Shard | Sequence[Shard]:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if step == 1:
                return Shards(self._table.slice(start, max(stop - start, 0)), self._first + start)
            return [self[i] for i in range(start, stop, step)]
        number = at + len(self) if at < 0 else at
        if not 0 <= number < len(self):
            raise IndexError(f"shard {at} of {len(self)}")
        return Shard(self._first + number, *self.values(number))

    def values(self, at: int) -> tuple[str, str, int, int, str]:
        """What a ``Shard`` holds after its ordinal. ``at``: 0 to ``len(self) - 1``, not checked."""
        uri, form, rows, size, content_id = self._columns
        return uri[at], form[at], rows[at], size[at], content_id[at]

    @cached_property
    def _columns(self) -> tuple[Any, Any, Any, Any, Any]:
        table = self._table
        return (
            _Texts(table["uri"]), _Names(table["format"]), _Numbers(table["rows"]), _Numbers(table["bytes"]),
            _Texts(table["content_id"]),
        )  # fmt: skip

    def __iter__(self) -> Iterator[Shard]:
        ordinal = self._first
        for batch in self._table.to_batches(max_chunksize=4096):
            for values in zip(*(column.to_pylist() for column in batch.columns)):
                yield Shard(ordinal, *values)
                ordinal += 1


class _Chunked(ABC):
    """A column by index: which of its chunks, and where in it."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._starts = [0]
        for chunk in chunks[:-1]:
            self._starts.append(self._starts[-1] + len(chunk))
        self._parts = [self._part(chunk) for chunk in chunks]

    @abstractmethod
    def _part(self, chunk: Any) -> Any:
        """What is kept of a chunk."""

    def _find(self, at: int) -> tuple[Any, int]:
        if len(self._parts) == 1:
            return self._parts[0], at
        number = bisect_right(self._starts, at) - 1
        return self._parts[number], at - self._starts[number]


class _Numbers(_Chunked):
    def _part(self, chunk: Any) -> Any:
        return np.asarray(chunk.to_numpy())

    def __getitem__(self, at: int) -> int:
        values, place = self._find(at)
        return int(values.item(place))


class _Texts(_Chunked):
    def _part(self, chunk: Any) -> Any:
        _, offsets, data = chunk.buffers()
        ends = np.frombuffer(offsets, "<i8", len(chunk) + 1, chunk.offset * 8)
        return ends, memoryview(data if data is not None else b"")

    def __getitem__(self, at: int) -> str:
        (ends, data), place = self._find(at)
        return str(data[ends.item(place) : ends.item(place + 1)], "utf-8")


class _Names(_Chunked):
    def _part(self, chunk: Any) -> Any:
        return np.asarray(chunk.indices.to_numpy()), chunk.dictionary.to_pylist()

    def __getitem__(self, at: int) -> str:
        (numbers, names), place = self._find(at)
        return str(names[numbers.item(place)])


__all__ = ["Shard", "Shards"]
