"""Stored columns to output columns without a Python step per row: nulls, fills, casts and dropping rows.

A number column is handled as (values, null mask): values is a numpy view of the Arrow buffers where there is one, the
mask is None when nothing is null. Dtypes never depend on values: an integer column with nulls stays integer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from manifests.errors import ProtocolError
from manifests.schema import Field

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


def conform(column: pa.Array, field: Field) -> pa.Array:
    """``column`` with exactly the field's type; a reader may hand over the storage of an extension type."""
    kind = field.arrow_type()
    if column.type == kind:
        return column
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    try:
        if column.type != storage:
            column = column.cast(storage)
    except pa.ArrowInvalid as error:
        raise ProtocolError(f"field {field.name!r} was read as {column.type}", cause=str(error)) from None
    return pa.ExtensionArray.from_storage(kind, column) if storage is not kind else column


def nulls(column: pa.Array) -> Mask | None:
    """bool [rows], True where null; None when no row is."""
    if not column.null_count:
        return None
    mask: Mask = column.is_null().to_numpy(zero_copy_only=False)
    return mask


def inner_nulls(column: pa.Array, field: Field) -> Mask | None:
    """bool [rows], True where an element of the row's tensor or list is null; None when none is."""
    storage = column.storage if isinstance(column, pa.ExtensionArray) else column
    if field.kind == "tensor":
        size = int(np.prod(field.shape, dtype=np.int64))
        inner = storage.values[storage.offset * size : (storage.offset + len(storage)) * size]
        if not inner.null_count or not size:
            return None
        found: Mask = inner.is_null().to_numpy(zero_copy_only=False).reshape(len(storage), size).any(axis=1)
    elif field.kind == "ragged":
        lists = storage.field("data") if field.ndim > 1 else storage
        if not lists.values.null_count:
            return None
        seen = np.zeros(len(lists.values) + 1, np.int64)
        np.cumsum(lists.values.is_null().to_numpy(zero_copy_only=False), out=seen[1:])
        offsets = lists.offsets.to_numpy()
        found = seen[offsets[1:]] > seen[offsets[:-1]]
    else:
        return None
    whole = nulls(column)
    return found if whole is None else found & ~whole


def flat(column: pa.Array, dtype: str) -> Array:
    """Values of a primitive array (without its nulls applied) as numpy ``dtype``: a view except for bool."""
    kind = np.dtype(dtype)
    if kind == np.bool_:
        bits = np.frombuffer(column.buffers()[1], np.uint8) if len(column) else np.zeros(0, np.uint8)
        return np.unpackbits(bits, bitorder="little")[column.offset : column.offset + len(column)].astype(np.bool_)
    if not len(column):
        return np.zeros(0, kind)
    return np.frombuffer(column.buffers()[1], kind)[column.offset : column.offset + len(column)]


def tensor_values(column: pa.Array, field: Field) -> Array:
    """[rows, *shape] of a tensor column; rows that are null hold anything."""
    storage = column.storage if isinstance(column, pa.ExtensionArray) else column
    size = int(np.prod(field.shape, dtype=np.int64))
    values = storage.values[storage.offset * size : (storage.offset + len(storage)) * size]
    return flat(values, field.dtype).reshape(len(storage), *field.shape)


def scalar_array(values: Array) -> pa.Array:
    """A primitive Arrow array over the values (no copy except for bool)."""
    return pa.array(np.ascontiguousarray(values))


def tensor_array(values: Array, field: Field) -> pa.Array:
    """[rows, *shape] as the field's fixed-shape tensor column (no copy of contiguous values except for bool)."""
    size = int(np.prod(field.shape, dtype=np.int64))
    flat_values = scalar_array(values.reshape(-1))
    storage = pa.FixedSizeListArray.from_arrays(flat_values, size) if size else _empty_lists(len(values), field)
    return pa.ExtensionArray.from_storage(field.arrow_type(), storage)


def _empty_lists(rows: int, field: Field) -> pa.Array:
    return pa.array([[]] * rows, field.arrow_type().storage_type)


def ragged_array(arrays: Sequence[Array], field: Field) -> pa.Array:
    """One array per row as the field's ragged column; the data is copied once."""
    sizes = np.fromiter((a.size for a in arrays), np.int64, len(arrays))
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    data = np.empty(int(offsets[-1]), np.dtype(field.dtype))
    for begin, array in zip(offsets.tolist(), arrays):
        data[begin : begin + array.size] = array.reshape(-1)
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), scalar_array(data))
    if field.ndim == 1:
        return lists
    shapes = np.array([a.shape for a in arrays], np.int32).reshape(len(arrays), field.ndim)
    kind = field.arrow_type()
    shape = pa.FixedSizeListArray.from_arrays(pa.array(shapes.reshape(-1)), field.ndim)
    return pa.StructArray.from_arrays([lists, shape.cast(kind.field("shape").type)], fields=list(kind))


def fill(column: pa.Array, field: Field, value: Any) -> pa.Array:
    """Nulls of ``column`` (of ``field``'s type) replaced by ``value``."""
    mask = nulls(column)
    if mask is None:
        return column
    if field.kind in ("string", "bytes"):
        return column.fill_null(pa.scalar(value, column.type))
    if field.kind == "scalar":
        values = flat(column, field.dtype).copy()
        values[mask] = value
        return scalar_array(values)
    if field.kind == "tensor":
        values = tensor_values(column, field).copy()
        values[mask] = value
        return tensor_array(values, field)
    filler = pa.array([value], column.type)
    index = np.where(mask, len(column), np.arange(len(column)))
    return pa.concat_arrays([column, filler]).take(pa.array(index))


def cast(column: pa.Array, field: Field, dtype: str) -> pa.Array:
    """Numbers of ``column`` (of ``field``'s type) as ``dtype``; floats are cut towards zero. Nulls stay null."""
    if field.dtype == dtype:
        return column
    made = Field(name=field.name, kind=field.kind, dtype=dtype, shape=field.shape, ndim=field.ndim)
    if field.kind == "scalar":
        values = convert(flat(column, field.dtype), dtype)
        mask = nulls(column)
        return scalar_array(values) if mask is None else pa.array(values, made.arrow_type(), mask=mask)
    if field.kind == "tensor":
        array = tensor_array(convert(tensor_values(column, field), dtype), made)
        return array if nulls(column) is None else _with_nulls(array, column)
    lists = column.field("data") if field.ndim > 1 else column
    values = convert(flat(lists.values, field.dtype), dtype)
    offsets = pa.array(lists.offsets.to_numpy().copy())  # a slice's own offsets do not go with a mask
    recast = pa.LargeListArray.from_arrays(offsets, scalar_array(values), mask=_mask(lists))
    if field.ndim == 1:
        return recast
    kind = made.arrow_type()
    return pa.StructArray.from_arrays([recast, column.field("shape")], fields=list(kind), mask=_mask(column))


def _mask(column: pa.Array) -> pa.Array | None:
    mask = nulls(column)
    return None if mask is None else pa.array(mask)


def _with_nulls(array: pa.Array, like: pa.Array) -> pa.Array:
    storage = array.storage
    mask = like.is_null()
    made = pa.FixedSizeListArray.from_arrays(storage.values, storage.type.list_size, mask=mask)
    return pa.ExtensionArray.from_storage(array.type, made)


def convert(values: Array, dtype: str) -> Array:
    """numpy's own conversion; what a target cannot hold (NaN to integer, overflow) is undefined, not an error."""
    with np.errstate(invalid="ignore", over="ignore"):
        return values.astype(dtype)


def keep(column: pa.Array, rows: npt.NDArray[np.int64]) -> pa.Array:
    """The rows of ``column`` at these positions."""
    if isinstance(column, pa.ExtensionArray):
        return pa.ExtensionArray.from_storage(column.type, column.storage.take(pa.array(rows)))
    return column.take(pa.array(rows))
