"""Reads rows of Arrow IPC files without reading their record batches.

Rows asked for are sorted and joined into runs; of each run only the slices of the wanted columns' buffers are read. A
compressed buffer has no random access: it is decompressed once per read, whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from manifests.errors import FeedlineError, ShardChanged
from manifests.scan.arrow import ArrowIndex, Column, decompressed, layout
from manifests.scan.flatbuffer import FlatbufferError
from manifests.scan.port import I64, Bytes, name_of, read_exactly
from manifests.schema import Field

from .port import GAP, StoredRows, check_rows, null_column

_Bools = npt.NDArray[np.bool_]


def read_arrow(
    index: ArrowIndex,
    source: Bytes,
    rows: I64,
    fields: Sequence[Field],
    labels: Mapping[str, Mapping[str, int]],
) -> StoredRows:
    """As ``Reader``. Rows have a key only if the file has a text column ``__key__``, else they are ``row N``."""
    check_rows(index, source, rows)
    wanted = {f.name: index.columns[f.name] for f in fields if f.name in index.columns}
    key = index.columns.get("__key__")
    if key is not None and key.field.kind == "string":
        wanted["__key__"] = key
    try:
        read = _read(index, source, rows, wanted)
    except FeedlineError:
        raise
    except (FlatbufferError, pa.ArrowException, OSError, MemoryError) as error:
        raise ShardChanged(
            f"{name_of(source)} is damaged", cause=str(error), remedy="build the manifest again"
        ) from None
    bad: dict[int, str] = {}
    columns = {f.name: _finish(f, read.get(f.name), len(rows), bad) for f in fields}
    named = [None] * len(rows)
    if "__key__" in read and len(rows):
        named = _checked_text("__key__", read["__key__"].values, {}).to_pylist()
    keys = [name if name is not None else f"row {row}" for name, row in zip(named, rows.tolist())]
    return StoredRows(columns, keys, bad)


class _Slice(NamedTuple):
    """Rows of one column in storage form; ``flawed``: a null inside the row's list (bool per row), None for none."""

    values: pa.Array
    flawed: _Bools | None = None


def _read(index: ArrowIndex, source: Bytes, rows: I64, wanted: Mapping[str, Column]) -> dict[str, _Slice]:
    """The wanted columns in the order of ``rows``."""
    order, inverse = np.unique(rows, return_inverse=True)
    batch = np.searchsorted(index.firsts, order, side="right") - 1
    edges = _run_edges(index, order, batch, list(wanted.values()))
    slices: dict[str, list[_Slice]] = {name: [] for name in wanted}
    place = np.empty(len(order), np.int64)
    opened: _Batch | None = None
    done = 0
    for begin, end in itertools.pairwise(edges):
        first, last, number = int(order[begin]), int(order[end - 1]) + 1, int(batch[begin])
        if opened is None or opened.number != number:
            opened = _Batch(index, source, number)
        start = int(index.firsts[number])
        for name, column in wanted.items():
            slices[name].append(opened.rows(column, first - start, last - start))
        place[begin:end] = order[begin:end] - first + done
        done += last - first
    taken = place[inverse]
    return {name: _joined(parts, taken, wanted[name]) for name, parts in slices.items()}


def _run_edges(index: ArrowIndex, order: I64, batch: I64, wanted: Sequence[Column]) -> list[int]:
    """Where runs of rows begin in ``order``, and its end: a run stays in one batch and has no wide gaps."""
    if not len(order):
        return [0]
    spans = [b for c in wanted for b in range(c.buffer, c.buffer + layout(c.type)[1])]
    sizes = index.buffers[:, spans, 1].sum(axis=1) if spans else np.zeros(len(index.codecs), np.int64)
    per_row = np.maximum(sizes // np.maximum(np.diff(index.firsts), 1), 1)
    wide = np.diff(order) - 1 > (GAP // per_row)[batch[1:]]
    return [0, *(np.flatnonzero(wide | (np.diff(batch) != 0)) + 1).tolist(), len(order)]


def _joined(parts: list[_Slice], taken: I64, column: Column) -> _Slice:
    """Runs put together and rows taken from them."""
    if not parts:
        return _Slice(pa.array([], column.field.arrow_type()) if column.field.kind == "string" else pa.nulls(0))
    values = parts[0].values if len(parts) == 1 else pa.concat_arrays([p.values for p in parts])
    flawed: _Bools | None = None
    if any(p.flawed is not None for p in parts):
        flawed = np.concatenate(
            [p.flawed if p.flawed is not None else np.zeros(len(p.values), np.bool_) for p in parts]
        )[taken]
    if flawed is not None or len(values) != len(taken) or not np.array_equal(taken, np.arange(len(taken))):
        values = values.take(pa.array(taken, mask=flawed))
    return _Slice(values, flawed)


class _Batch:
    """One record batch: slices of its columns. Decompressed buffers are kept as long as this object."""

    def __init__(self, index: ArrowIndex, source: Bytes, number: int) -> None:
        self.number = number
        self._buffers = index.buffers[number]
        self._nulls = index.nulls[number]
        self._codec = index.codecs[number]
        self._source = source
        self._whole: dict[int, memoryview] = {}

    def rows(self, column: Column, start: int, stop: int) -> _Slice:
        """Rows ``[start, stop)`` of the batch, in the storage form of the field's Arrow type."""
        kind = column.type.storage_type if isinstance(column.type, pa.BaseExtensionType) else column.type
        valid = self._valid(column.node, column.buffer, start, stop)
        if column.dictionary is not None:
            indices = self._numbers(kind.index_type, column.buffer + 1, start, stop)
            return _Slice(column.dictionary.take(_with_nulls(indices, valid)))
        if column.field.kind == "tensor":
            return self._tensor(column, kind, valid, start, stop)
        if column.field.kind == "scalar":
            return _Slice(_with_nulls(self._numbers(kind, column.buffer + 1, start, stop), valid))
        wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) or pa.types.is_large_list(kind)
        offsets = self._offsets(column.buffer + 1, wide, start, stop)
        first, last = int(offsets[0]), int(offsets[-1])
        flat = pa.py_buffer(offsets - first)
        if column.field.kind == "ragged":
            child = self._numbers(kind.value_type, column.buffer + 3, first, last)
            flawed = self._holes(column.node + 1, column.buffer + 2, first, last)
            if flawed is not None:
                before = np.append(0, np.cumsum(flawed))
                inside = np.asarray(before[offsets[1:] - first] > before[offsets[:-1] - first], np.bool_)
                flawed = inside if valid is None else inside & valid
            listed = pa.large_list(child.type)
            return _Slice(pa.Array.from_buffers(listed, stop - start, [_bitmap(valid), flat], children=[child]), flawed)
        data = pa.py_buffer(self._bytes(column.buffer + 2, first, last - first))
        text = pa.large_utf8() if column.field.kind == "string" else pa.large_binary()
        return _Slice(pa.Array.from_buffers(text, stop - start, [_bitmap(valid), flat, data]))

    def _tensor(self, column: Column, kind: pa.DataType, valid: _Bools | None, start: int, stop: int) -> _Slice:
        """Nested fixed-size lists as one flat one: the innermost values are already side by side."""
        each, node, buffer = 1, column.node, column.buffer
        flawed: _Bools | None = None
        while pa.types.is_fixed_size_list(kind):
            each *= kind.list_size
            kind, node, buffer = kind.value_type, node + 1, buffer + 1
            holes = self._holes(node, buffer, start * each, stop * each)
            if holes is not None:
                inside = np.asarray(holes.reshape(stop - start, each).any(axis=1), np.bool_)
                flawed = inside if flawed is None else flawed | inside
        if flawed is not None and valid is not None:
            flawed = flawed & valid
        values = self._numbers(kind, buffer + 1, start * each, stop * each)
        flat = pa.list_(values.type, each)
        return _Slice(pa.Array.from_buffers(flat, stop - start, [_bitmap(valid)], children=[values]), flawed)

    def _numbers(self, kind: pa.DataType, buffer: int, start: int, stop: int) -> pa.Array:
        """Numbers or bools ``[start, stop)`` without their validity."""
        if pa.types.is_boolean(kind):
            return pa.array(self._bits(buffer, start, stop))
        width = kind.bit_width // 8
        data = np.frombuffer(self._bytes(buffer, start * width, (stop - start) * width), np.uint8)
        if data.ctypes.data % width:
            data = data.copy()
        return pa.Array.from_buffers(kind, stop - start, [None, pa.py_buffer(data)])

    def _offsets(self, buffer: int, wide: bool, start: int, stop: int) -> I64:
        """int64 [stop - start + 1], checked to go forward."""
        if not self._buffers[buffer, 1]:
            return np.zeros(stop - start + 1, np.int64)
        width = 8 if wide else 4
        data = self._bytes(buffer, start * width, (stop - start + 1) * width)
        offsets = np.frombuffer(data, np.int64 if wide else np.int32).astype(np.int64)
        if int(offsets[0]) < 0 or bool((np.diff(offsets) < 0).any()):
            raise FlatbufferError("offsets of a column run backwards")
        return offsets

    def _valid(self, node: int, buffer: int, start: int, stop: int) -> _Bools | None:
        """True where a value is there; None if all are."""
        if not self._nulls[node] or not self._buffers[buffer, 1]:
            return None
        return self._bits(buffer, start, stop)

    def _holes(self, node: int, buffer: int, start: int, stop: int) -> _Bools | None:
        valid = self._valid(node, buffer, start, stop)
        return None if valid is None or valid.all() else ~valid

    def _bits(self, buffer: int, start: int, stop: int) -> _Bools:
        data = self._bytes(buffer, start // 8, -(-stop // 8) - start // 8)
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        return bits[start % 8 : start % 8 + stop - start].astype(np.bool_)

    def _bytes(self, buffer: int, start: int, length: int) -> memoryview:
        """A slice of a buffer."""
        offset, size = int(self._buffers[buffer, 0]), int(self._buffers[buffer, 1])
        if self._codec:
            if buffer not in self._whole:
                self._whole[buffer] = decompressed(read_exactly(self._source, offset, size), self._codec)
            data = self._whole[buffer][start : start + length]
            if len(data) != length:
                raise FlatbufferError("a column's buffer is too short")
            return data
        if start + length > size:
            raise FlatbufferError("a column's buffer is too short")
        return read_exactly(self._source, offset + start, length)


def _bitmap(valid: _Bools | None) -> pa.Buffer | None:
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _with_nulls(values: pa.Array, valid: _Bools | None) -> pa.Array:
    if valid is None:
        return values
    return pa.Array.from_buffers(values.type, len(values), [_bitmap(valid), values.buffers()[1]], offset=0)


def _finish(field: Field, read: _Slice | None, length: int, bad: dict[int, str]) -> pa.Array:
    """The column in its final type; rows that cannot be used go into ``bad``."""
    if read is None or not length:
        return null_column(field, length)
    values = read.values
    if read.flawed is not None:
        for at in np.flatnonzero(read.flawed).tolist():
            bad[at] = f"field {field.name!r} has a null inside its list"
    if field.kind == "tensor":
        return pa.ExtensionArray.from_storage(field.arrow_type(), values)
    if field.kind == "string":
        return _checked_text(field.name, values, bad)
    return values


def _checked_text(name: str, values: pa.Array, bad: dict[int, str]) -> pa.Array:
    try:
        values.validate(full=True)
        return values
    except pa.ArrowInvalid:
        pass
    good: list[str | None] = []
    for at, value in enumerate(values.cast(pa.large_binary()).to_pylist()):
        try:
            good.append(None if value is None else value.decode())
        except UnicodeDecodeError as error:
            good.append(None)
            bad[at] = f"field {name!r} is not UTF-8 text: {error.reason} at byte {error.start}"
    return pa.array(good, pa.large_utf8())
