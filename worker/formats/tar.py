"""Reads rows of WebDataset tar archives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from manifests.scan.port import I64, Bytes, read_exactly
from manifests.scan.tar import TarIndex
from manifests.schema import Field

from .port import StoredRows, bytes_column, check_rows, joined, null_column
from .values import parse_text, parse_whole


def read_tar(
    index: TarIndex,
    source: Bytes,
    rows: I64,
    fields: Sequence[Field],
    labels: Mapping[str, Mapping[str, int]],
) -> StoredRows:
    """As ``Reader``. ``cls`` and ``id`` are parsed as whole numbers, ``txt`` must be UTF-8; everything else is bytes."""
    check_rows(index, source, rows)
    keys = index.keys.take(pa.array(rows)) if len(rows) else index.keys.slice(0, 0)
    wanted = [f.name for f in fields if f.name in index.names]
    values = _values(index, source, rows, wanted)
    bad: dict[int, str] = {}
    columns: dict[str, pa.Array] = {}
    for f in fields:
        if f.name == "__key__":
            columns[f.name] = keys
        elif f.name not in values:
            columns[f.name] = null_column(f, len(rows))
        elif f.kind == "scalar":
            columns[f.name] = parse_whole(f.name, values[f.name], bad)
        elif f.kind == "string":
            columns[f.name] = parse_text(f.name, values[f.name], bad)
        else:
            columns[f.name] = bytes_column(values[f.name])
    return StoredRows(columns, keys.to_pylist(), bad)


def _values(index: TarIndex, source: Bytes, rows: I64, wanted: Sequence[str]) -> dict[str, list[memoryview | None]]:
    """Data of the wanted fields per row, None where a row lacks one. Each byte is read once, also for repeated rows."""
    values: dict[str, list[memoryview | None]] = {name: [None] * len(rows) for name in wanted}
    counts = index.starts[rows + 1] - index.starts[rows]
    # members of all rows asked for, side by side: member number and position in the read
    position = np.repeat(np.arange(len(rows)), counts)
    first = np.cumsum(counts) - counts
    member = index.starts[rows][position] + np.arange(len(position)) - first[position]
    of_interest = np.isin(index.member_field[member], [index.names.index(name) for name in wanted])
    member, position = member[of_interest], position[of_interest]
    order = np.argsort(index.offsets[member], kind="stable")
    member, position = member[order], position[order]
    offsets, sizes = index.offsets[member], index.sizes[member]
    for begin, end, start, length in joined(offsets, sizes):
        data = read_exactly(source, start, length)
        for m in range(begin, end):
            at = int(offsets[m]) - start
            values[index.names[index.member_field[member[m]]]][position[m]] = data[at : at + int(sizes[m])]
    return values
