"""Helpers for tests of stored formats: bytes in memory, tar members, reading a shard the way a worker does."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manifests.compare import open_shard
from manifests.manifest import Manifest
from manifests.scan import Scan
from worker.formats import FORMATS, StoredRows


class MemoryBytes:
    """``Bytes`` over an object in memory that counts what is read."""

    name = "memory"

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size = len(data)
        self.calls = 0
        self.bytes_read = 0

    def read(self, offset: int, length: int) -> memoryview:
        part = memoryview(self.data)[offset : offset + length]
        self.calls += 1
        self.bytes_read += len(part)
        return part


def tar_bytes(members: Iterable[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT, **settings: Any) -> bytes:
    """A tar archive; names that end in "/" become folders."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format, **settings) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name.rstrip("/"))
            if name.endswith("/"):
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            else:
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT) -> Path:
    path.write_bytes(tar_bytes(members, format))
    return path


def scan(format: str, data: bytes) -> Scan:
    return FORMATS[format].scan(MemoryBytes(data))


def read(
    format: str, data: bytes, rows: Sequence[int] | None = None, labels: Mapping[str, Mapping[str, int]] | None = None
) -> StoredRows:
    """All fields of some rows (default: all)."""
    source = MemoryBytes(data)
    found = FORMATS[format].scan(source)
    wanted = np.arange(found.index.rows) if rows is None else np.array(rows, np.int64)
    return FORMATS[format].read_rows(found.index, source, wanted, found.fields, labels or {})


def rows_of(stored: StoredRows) -> list[dict[str, Any]]:
    """Rows as dicts without their missing fields."""
    columns = {name: column.to_pylist() for name, column in stored.columns.items()}
    return [{n: c[at] for n, c in columns.items() if c[at] is not None} for at in range(len(stored.keys))]


def read_manifest(manifest: Manifest) -> list[dict[str, Any]]:
    """Every row of a manifest, in order, as a worker reads it."""
    found: list[dict[str, Any]] = []
    for shard in manifest.shards:
        format = FORMATS[shard.format]
        source = open_shard(shard.uri)
        try:
            assert source.size == shard.bytes
            index = format.scan(source).index
            assert index.rows == shard.rows
            found += rows_of(format.read_rows(index, source, np.arange(index.rows), manifest.fields, manifest.labels))
        finally:
            source.close()
    return found
