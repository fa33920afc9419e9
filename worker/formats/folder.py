"""Reads rows of image folders (virtual shards)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from manifests.scan.folder import FolderIndex
from manifests.scan.port import I64, Bytes, read_exactly
from manifests.schema import Field

from .port import StoredRows, bytes_column, check_rows, joined, null_column


def read_folder(
    index: FolderIndex,
    source: Bytes,
    rows: I64,
    fields: Sequence[Field],
    labels: Mapping[str, Mapping[str, int]],
) -> StoredRows:
    """As ``Reader``. ``label`` is the number of the file's class folder in ``labels["label"]``."""
    check_rows(index, source, rows)
    keys: list[str] = index.keys.take(pa.array(rows)).to_pylist() if len(rows) else []
    bad: dict[int, str] = {}
    columns: dict[str, pa.Array] = {}
    for f in fields:
        if f.name == "__key__":
            columns[f.name] = pa.array(keys, pa.large_utf8())
        elif f.name == "image":
            columns[f.name] = bytes_column(_files(index, source, rows))
        elif f.name == "label":
            columns[f.name] = _labels(keys, labels.get("label", {}), bad)
        else:
            columns[f.name] = null_column(f, len(rows))
    return StoredRows(columns, keys, bad)


def _files(index: FolderIndex, source: Bytes, rows: I64) -> list[memoryview | None]:
    order = np.argsort(rows, kind="stable")
    offsets, sizes = index.offsets[rows[order]], index.sizes[rows[order]]
    values: list[memoryview | None] = [None] * len(rows)
    # neighbours in a folder are separate files: joining them saves calls, gaps would read files nobody asked for
    for begin, end, start, length in joined(offsets, sizes, gap=0):
        data = read_exactly(source, start, length)
        for m in range(begin, end):
            at = int(offsets[m]) - start
            values[order[m]] = data[at : at + int(sizes[m])]
    return values


def _labels(keys: Sequence[str], numbers: Mapping[str, int], bad: dict[int, str]) -> pa.Array:
    found: list[int | None] = []
    for at, key in enumerate(keys):
        name, slash, _ = key.partition("/")
        found.append(numbers.get(name) if slash else None)
        if slash and name not in numbers:
            bad[at] = f"class folder {name!r} is not in the label map"
    return pa.array(found, pa.int64())
