"""The port stored rows are read through: an index and ``Bytes`` in, Arrow columns out.

A reader is called on the worker's own threads, several at once, with an index that a scanner of ``manifests.scan`` made
from the same bytes. It reads the bytes of the rows it is asked for and no others (neighbouring ranges are read
together), and it decides nothing: a row that cannot be parsed is reported in ``bad``, a shard that is not what its index
says raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from manifests.errors import ShardChanged
from manifests.scan.port import I64, Bytes, ShardIndex, name_of
from manifests.schema import Field

#: reads at most this far apart, in bytes, are joined into one
GAP = 16 << 10
#: a joined read is not made longer than this, bytes
LONGEST = 8 << 20


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows as stored, in the order asked for.

    Attributes:
        columns: one array per field asked for, of the type ``Field.arrow_type()``, null where the row lacks it.
        keys: what to call each row: its ``__key__``, or ``row N``.
        bad: position in the read -> why this row cannot be parsed; its value is null in that column.
    """

    columns: dict[str, pa.Array]
    keys: list[str]
    bad: dict[int, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes the columns take."""
        return sum(int(column.nbytes) for column in self.columns.values())


class Reader(Protocol):
    """One format."""

    def __call__(
        self,
        index: Any,
        source: Bytes,
        rows: I64,
        fields: Sequence[Field],
        labels: Mapping[str, Mapping[str, int]],
    ) -> StoredRows:
        """Read ``rows`` (int64 [n], any order, repeats allowed) of one shard.

        Args:
            index: what this format's scanner returned for the shard.
            source: the shard's bytes.
            fields: those to read; a field the shard does not have comes back as nulls.
            labels: label maps of the manifest, field -> class name -> number.

        Raises:
            ShardChanged: a row beyond the index, or bytes that are not as indexed.
            ShardMissing: the storage has the shard no more.
        """


def check_rows(index: ShardIndex, source: Bytes, rows: I64) -> None:
    """Raise ``ShardChanged`` if a row is not in the index."""
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < index.rows):
        worst = int(rows.min()) if int(rows.min()) < 0 else int(rows.max())
        raise ShardChanged(
            f"{name_of(source)} has no row {worst}",
            cause=f"it has {index.rows} rows",
            remedy="build the manifest again",
        )


def joined(offsets: I64, sizes: I64, gap: int = GAP, longest: int = LONGEST) -> list[tuple[int, int, int, int]]:
    """Ranges sorted by offset, neighbours joined: (first range, last range + 1, offset, length) of each read."""
    reads: list[tuple[int, int, int, int]] = []
    ends = offsets + sizes
    first = 0
    while first < len(offsets):
        last, start, end = first + 1, int(offsets[first]), int(ends[first])
        while last < len(offsets):
            reach = max(end, int(ends[last]))
            if int(offsets[last]) > end + gap or (reach - start > longest and reach > end):
                break
            end = reach
            last += 1
        reads.append((first, last, start, end - start))
        first = last
    return reads


def bytes_column(values: Sequence[memoryview | None], text: bool = False) -> pa.Array:
    """large_binary (or large_utf8 for ``text``, which must be valid UTF-8) of these values; one copy of the data."""
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([0 if v is None else len(v) for v in values], out=offsets[1:])
    data = np.empty(int(offsets[-1]), np.uint8)
    for value, begin in zip(values, offsets.tolist()):
        if value is not None:
            data[begin : begin + len(value)] = np.frombuffer(value, np.uint8)
    kind = pa.large_utf8() if text else pa.large_binary()
    valid = np.array([v is not None for v in values], np.bool_)
    bitmap = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(kind, len(values), [bitmap, pa.py_buffer(offsets), pa.py_buffer(data)])


def null_column(kind: Field, length: int) -> pa.Array:
    """``length`` nulls of the field's type."""
    return pa.nulls(length, kind.arrow_type())
