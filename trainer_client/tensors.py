"""From Arrow columns to batches: rows are copied once, from the Flight buffer to their place in the batch tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from manifests.errors import ProtocolError
from manifests.schema import Field

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """Columns of one record batch as views: numpy [rows, ...] for scalar and tensor fields, Arrow arrays otherwise."""

    columns: dict[str, Any]
    ids: I64
    nbytes: int


@dataclass(frozen=True)
class Piece:
    """Rows of one part and the places they have in the batch."""

    part: Part
    rows: I64
    places: I64


def view_part(batch: pa.RecordBatch, fields: Sequence[Field]) -> Part:
    """Views into a record batch a worker sent.

    Raises:
        ProtocolError: a column is missing or of another type than the pipeline gives.
    """
    columns: dict[str, Any] = {}
    for field in fields:
        at = batch.schema.get_field_index(field.name)
        if at < 0 or batch.schema.field(at).type != field.arrow_type():
            found = batch.schema.field(at).type if at >= 0 else "nothing"
            raise ProtocolError(f"column {field.name!r} came as {found}", cause=f"expected {field.arrow_type()}")
        column = batch.column(at)
        columns[field.name] = _numbers(column, field) if field.kind in ("scalar", "tensor") else column
    return Part(columns, batch.column("__id__").to_numpy(), batch.nbytes)


def _numbers(column: pa.Array, field: Field) -> npt.NDArray[Any]:
    if column.null_count:
        raise ProtocolError(f"column {field.name!r} has nulls")
    flat = column if field.kind == "scalar" else column.storage.flatten()
    values: npt.NDArray[Any] = flat.to_numpy(zero_copy_only=False)
    return values.reshape(len(column), *field.shape)


def assemble(fields: Sequence[Field], pieces: Sequence[Piece], rows: int, pin: bool) -> dict[str, Any]:
    """One batch of ``rows`` rows: dict of Tensor [rows, ...] or list per field, and ``__id__`` int64 [rows]."""
    out: dict[str, Any] = {}
    for field in fields:
        if field.kind in ("scalar", "tensor"):
            out[field.name] = _tensor(field, pieces, rows, pin)
        else:
            out[field.name] = _list(field, pieces, rows)
    ids = torch.empty(rows, dtype=torch.int64, pin_memory=pin)
    for piece in pieces:
        _place(ids.numpy(), piece, piece.part.ids)
    out["__id__"] = ids
    return out


def _tensor(field: Field, pieces: Sequence[Piece], rows: int, pin: bool) -> torch.Tensor:
    tensor = torch.empty((rows, *field.shape), dtype=getattr(torch, field.dtype), pin_memory=pin)
    target = tensor.numpy()
    for piece in pieces:
        _place(target, piece, piece.part.columns[field.name])
    return tensor


def _place(target: npt.NDArray[Any], piece: Piece, values: npt.NDArray[Any]) -> None:
    first, last = int(piece.places[0]), int(piece.places[-1])
    if last - first + 1 != len(piece.places):
        target[piece.places] = values[piece.rows]
        return
    here = target[first : last + 1]
    start, stop = int(piece.rows[0]), int(piece.rows[-1]) + 1
    if stop - start == len(piece.rows):  # consecutive on both sides: one memory copy
        here[...] = values[start:stop]
    else:
        np.take(values, piece.rows, axis=0, out=here)


def _list(field: Field, pieces: Sequence[Piece], rows: int) -> list[Any]:
    out: list[Any] = [None] * rows
    for piece in pieces:
        column = piece.part.columns[field.name].take(pa.array(piece.rows))
        values = column.to_pylist() if field.kind != "ragged" else [_value(field, v) for v in column]
        for place, value in zip(piece.places.tolist(), values, strict=True):
            out[place] = value
    return out


def _value(field: Field, scalar: pa.Scalar) -> torch.Tensor:
    if field.ndim == 1:
        return _ragged(scalar.values, field)
    shape = scalar["shape"].as_py()
    return _ragged(scalar["data"].values, field).reshape(shape)


def _ragged(values: pa.Array | None, field: Field) -> torch.Tensor:
    if values is None:
        return torch.empty(0, dtype=getattr(torch, field.dtype))
    numbers = values.to_numpy(zero_copy_only=False)
    return torch.from_numpy(np.array(numbers, dtype=field.dtype))  # a copy: Arrow memory is read-only
