"""One suite for every stored format: what a reader returns equals what the format's own library reads."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from stored_data import MemoryBytes, rows_of, tar_bytes

from manifests.errors import ShardChanged
from manifests.scan.folder import FolderBytes, walk_folder
from manifests.scan.local import HashingBytes, LocalBytes
from manifests.schema import Field
from worker.formats import FORMATS

Row = dict[str, Any]


@dataclass
class Stored:
    """A shard, and its rows as another library reads them (missing fields left out)."""

    format: str
    data: bytes
    rows: list[Row]
    keys: list[str]
    labels: dict[str, dict[str, int]]
    #: False where a buffer must be read whole
    random_access: bool = True


def _picture(number: int, kind: str) -> bytes:
    rng = np.random.default_rng(number)
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (8 + number % 5, 9, 3), np.uint8)).save(out, kind)
    return out.getvalue()


def _tar(format: int, long_names: bool) -> Callable[[Path], Stored]:
    def make(tmp_path: Path) -> Stored:
        members: list[tuple[str, bytes]] = []
        for n in range(40):
            key = f"part-{n % 3}/{'x' * 110 if long_names and n % 4 == 0 else ''}sample-{n:03d}é"
            members.append((f"{key}.JPG", _picture(n, "JPEG")))
            members.append((f"{key}.cls", str(n * 3 - 7).encode()))
            members.append((f"{key}.txt", f"Größe {n}\n".encode()))
            if n % 7:
                members.append((f"{key}.meta.json", b'{"n": %d}' % n))
            members.append((f"{key}.bin", bytes(n % 2 * 512)))
        data = tar_bytes(members, format)
        rows: dict[str, Row] = {}
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for member in tar:
                folder, _, base = member.name.rpartition("/")
                stem, _, field = base.partition(".")
                file = tar.extractfile(member)
                assert file is not None
                raw = file.read()
                value: Any = raw
                if field == "cls":
                    value = int(raw)
                elif field == "txt":
                    value = raw.decode()
                rows.setdefault(f"{folder}/{stem}", {})[field.lower()] = value
        for key, row in rows.items():
            row["__key__"] = key
        return Stored("tar", data, list(rows.values()), list(rows), {})

    return make


def _folder(tmp_path: Path) -> Stored:
    root = tmp_path / "pictures"
    numbers = {"9": 0, "A": 1, "a": 2, "é": 3}
    for n in range(30):
        folder = root / list(numbers)[n % 4]
        if n % 5 == 0:
            folder = folder / "deep"
        folder.mkdir(parents=True, exist_ok=True)
        kind = ("PNG", "JPEG")[n % 2]
        (folder / f"{n}.{kind.lower()}").write_bytes(_picture(n, kind))
    (root / "loose.png").write_bytes(_picture(99, "PNG"))
    (root / "A" / "empty.jpg").write_bytes(b"")
    rows: list[Row] = []
    names = sorted((p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()), key=lambda n: n.split("/"))
    for name in names:
        row: Row = {"image": (root / name).read_bytes(), "__key__": name}
        if "/" in name:
            row["label"] = numbers[name.split("/")[0]]
        rows.append(row)
    source = FolderBytes(str(root), walk_folder(str(root)).files)
    data = bytes(source.read(0, source.size))
    return Stored("folder", data, rows, names, {"label": numbers})


def _arrow(compression: str | None, chunk: int) -> Callable[[Path], Stored]:
    def make(tmp_path: Path) -> Stored:
        n = 60
        table = pa.table(
            {
                "i": pa.array([None if k % 7 == 0 else k for k in range(n)], pa.int32()),
                "b": pa.array([k % 3 == 0 for k in range(n)]),
                "f": pa.array([k / 8 for k in range(n)], pa.float64()),
                "t": pa.array(
                    [[[k, 1, 2], [3, 4, k]] if k % 9 else None for k in range(n)],
                    pa.list_(pa.list_(pa.float32(), 3), 2),
                ),
                "tt": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(n * 4, dtype=np.uint8).reshape(n, 2, 2)),
                "bits": pa.array([[True, False, k % 2 == 0] for k in range(n)], pa.list_(pa.bool_(), 3)),
                "l": pa.array([list(range(k % 5)) if k % 4 else None for k in range(n)], pa.list_(pa.int64())),
                "ll": pa.array([[True] * (k % 3) for k in range(n)], pa.large_list(pa.bool_())),
                "s": pa.array([f"Größe {k}" if k % 5 else None for k in range(n)]),
                "y": pa.array([b"x" * (k % 6) * 50 for k in range(n)], pa.large_binary()),
                "d": pa.array([("a", "b", None)[k % 3] for k in range(n)]).dictionary_encode(),
                "__key__": pa.array([f"k{k}" for k in range(n)]),
            }
        )
        out = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_file(out, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=chunk)
        with pa.ipc.open_file(io.BytesIO(out.getvalue())) as reader:
            rows = [{k: v for k, v in row.items() if v is not None} for row in reader.read_all().to_pylist()]
        for row in rows:
            if "t" in row:
                row["t"] = [value for part in row["t"] for value in part]
        return Stored("arrow", out.getvalue(), rows, [f"k{k}" for k in range(n)], {}, compression is None)

    return make


KINDS: dict[str, Callable[[Path], Stored]] = {
    "tar-ustar": _tar(tarfile.USTAR_FORMAT, False),
    "tar-gnu": _tar(tarfile.GNU_FORMAT, True),
    "tar-pax": _tar(tarfile.PAX_FORMAT, True),
    "folder": _folder,
    "arrow-one-batch": _arrow(None, 1000),
    "arrow-batches": _arrow(None, 7),
    "arrow-lz4": _arrow("lz4", 13),
    "arrow-zstd": _arrow("zstd", 1000),
}


@pytest.fixture(params=sorted(KINDS))
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Stored:
    return KINDS[request.param](tmp_path)


def _read(stored: Stored, rows: list[int], source: Any = None, fields: tuple[Field, ...] | None = None) -> list[Row]:
    source = source or MemoryBytes(stored.data)
    found = FORMATS[stored.format].scan(source)
    wanted = found.fields if fields is None else fields
    read = FORMATS[stored.format].read_rows(found.index, source, np.array(rows, np.int64), wanted, stored.labels)
    assert read.bad == {}
    assert list(read.columns) == [f.name for f in wanted]
    for field in wanted:
        column = read.columns[field.name]
        assert column.type == field.arrow_type()
        assert len(column) == len(rows)
        column.validate(full=True)
    assert read.keys == [stored.keys[r] for r in rows]
    return rows_of(read)


def test_all_rows_in_order_equal_the_reference(stored: Stored) -> None:
    assert _read(stored, list(range(len(stored.rows)))) == stored.rows


def test_rows_come_in_any_order_and_repeated(stored: Stored) -> None:
    rng = random.Random(5)
    for _ in range(10):
        rows = [rng.randrange(len(stored.rows)) for _ in range(rng.randrange(1, 50))]
        assert _read(stored, rows) == [stored.rows[r] for r in rows]
    last = len(stored.rows) - 1
    assert _read(stored, [last, last, 0, last]) == [stored.rows[r] for r in (last, last, 0, last)]


def test_no_rows(stored: Stored) -> None:
    assert _read(stored, []) == []


@pytest.mark.parametrize("beyond", [-1, 0, 1 << 40])
def test_a_row_outside_the_shard_is_a_changed_shard(stored: Stored, beyond: int) -> None:
    row = -1 if beyond < 0 else len(stored.rows) + beyond
    with pytest.raises(ShardChanged, match=f"no row {row}"):
        _read(stored, [0, row])


def test_fields_and_nulls(stored: Stored) -> None:
    scan = FORMATS[stored.format].scan(MemoryBytes(stored.data))
    names = [f.name for f in scan.fields]
    assert names == sorted({n for row in stored.rows for n in row}, key=lambda n: (n == "__key__", n))
    for field in scan.fields:
        assert field.nullable == any(field.name not in row for row in stored.rows), field.name
    assert not [n for n in scan.notes if n.kind != "ignored"]


def test_some_fields_only_and_a_field_the_shard_lacks(stored: Stored) -> None:
    scan = FORMATS[stored.format].scan(MemoryBytes(stored.data))
    some = (scan.fields[1], Field(name="absent", kind="tensor", dtype="float32", shape=(2, 3), nullable=True))
    found = _read(stored, [3, 1], fields=some)
    assert found == [{n: v for n, v in stored.rows[r].items() if n == some[0].name} for r in (3, 1)]


def test_one_row_reads_little_more_than_that_row(stored: Stored) -> None:
    source = MemoryBytes(stored.data)
    format = FORMATS[stored.format]
    found = format.scan(source)
    source.bytes_read = 0
    format.read_rows(found.index, source, np.array([5]), found.fields, stored.labels)
    if stored.random_access:
        assert source.bytes_read < 5 * len(stored.data) / len(stored.rows)
    assert source.bytes_read <= len(stored.data)


def test_neighbouring_rows_are_read_together(stored: Stored) -> None:
    source = MemoryBytes(stored.data)
    format = FORMATS[stored.format]
    found = format.scan(source)
    source.calls = 0
    format.read_rows(found.index, source, np.arange(len(stored.rows)), found.fields, stored.labels)
    buffers = 30 * max(1, len(stored.rows) // 7) if stored.format == "arrow" else 3
    assert source.calls <= buffers


def test_scan_gives_the_same_while_hashing_from_a_file(stored: Stored, tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(stored.data)
    scanner = FORMATS[stored.format].scan
    with LocalBytes(str(path)) as file:
        hashing = HashingBytes(file)
        assert scanner(hashing).fields == scanner(MemoryBytes(stored.data)).fields
        whole = HashingBytes(MemoryBytes(stored.data))  # type: ignore[arg-type]
        assert hashing.content_id() == whole.content_id()
        assert _read(stored, [2, 0], file) == [stored.rows[2], stored.rows[0]]


def test_a_shard_that_became_shorter_is_a_changed_shard(stored: Stored) -> None:
    format = FORMATS[stored.format]
    found = format.scan(MemoryBytes(stored.data))
    cut = MemoryBytes(stored.data[: len(stored.data) // 50])
    with pytest.raises(ShardChanged):
        format.read_rows(found.index, cut, np.arange(len(stored.rows)), found.fields, stored.labels)


def test_several_threads_read_one_index(stored: Stored) -> None:
    source = MemoryBytes(stored.data)
    rng = random.Random(1)
    asks = [[rng.randrange(len(stored.rows)) for _ in range(10)] for _ in range(20)]
    with ThreadPoolExecutor(4) as pool:
        for rows, found in zip(asks, pool.map(lambda rows: _read(stored, rows, source), asks)):
            assert found == [stored.rows[r] for r in rows]


def test_the_index_says_how_much_memory_it_takes(stored: Stored) -> None:
    index = FORMATS[stored.format].scan(MemoryBytes(stored.data)).index
    assert index.rows == len(stored.rows)
    assert 0 < index.nbytes < 500 * index.rows
