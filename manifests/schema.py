"""Fields: what a stored or output column is, and how it travels in Arrow.

One rule for every format and step, so that a reader, a pipeline and the client agree without asking each other:

    kind     Arrow type on the wire                                          batch in the training loop
    scalar   the dtype                                                       Tensor [batch]
    tensor   fixed_shape_tensor(dtype, shape)                                Tensor [batch, *shape]
    string   large_utf8                                                      list[str]
    bytes    large_binary                                                    list[bytes]
    ragged   large_list<dtype> (ndim 1), else struct<data: large_list<dtype>, shape: int32[ndim]>   list[Tensor]
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import msgspec
import numpy as np
import pyarrow as pa

Kind = Literal["scalar", "tensor", "string", "bytes", "ragged"]

#: dtypes a tensor, scalar or ragged field may have, by numpy name.
DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip


class Field(msgspec.Struct, frozen=True, omit_defaults=True):
    """One column: its name, kind and, for numbers, dtype and shape."""

    name: str
    kind: Kind
    #: numpy dtype name; "" for string and bytes
    dtype: str = ""
    #: sizes of one row's value; () for scalar, string, bytes and ragged
    shape: tuple[int, ...] = ()
    #: dimensions of one row's value when kind is ragged, else 0
    ndim: int = 0
    #: True when stored rows may lack it
    nullable: bool = False

    def arrow_type(self) -> pa.DataType:
        """The type this field has in every record batch feedline sends."""
        return _arrow_type(self.kind, self.dtype, self.shape, self.ndim)

    def row_bytes(self) -> int | None:
        """Bytes of one row's value, None when it differs from row to row."""
        if self.kind in ("scalar", "tensor"):
            return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize
        return None


@lru_cache(maxsize=1024)
def _arrow_type(kind: Kind, dtype: str, shape: tuple[int, ...], ndim: int) -> pa.DataType:
    if kind == "string":
        return pa.large_utf8()
    if kind == "bytes":
        return pa.large_binary()
    value = pa.from_numpy_dtype(np.dtype(dtype))
    if kind == "scalar":
        return value
    if kind == "tensor":
        return pa.fixed_shape_tensor(value, shape)
    if ndim == 1:
        return pa.large_list(value)
    return pa.struct([("data", pa.large_list(value)), ("shape", pa.list_(pa.int32(), ndim))])


def arrow_schema(fields: tuple[Field, ...]) -> pa.Schema:
    """Schema of the record batches that carry ``fields``; the sample id column ``__id__`` comes last."""
    columns = [pa.field(f.name, f.arrow_type()) for f in fields]
    return pa.schema([*columns, pa.field("__id__", pa.int64(), nullable=False)])
