"""The Manifest file: what is in the digest and what is not, round trips, damage, a million shards."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manifests import Field, Manifest, Shard
from manifests.errors import ConfigError

FIELDS = (Field(name="cls", kind="scalar", dtype="int64"), Field(name="jpg", kind="bytes", nullable=True))
LABELS = {"cls": {"cat": 0, "dög": 1}}


def _id(text: str) -> str:
    return "blake3:" + hashlib.sha256(text.encode()).hexdigest()


def _shard(n: int, **changes: Any) -> Shard:
    values: dict[str, Any] = {
        "ordinal": n, "uri": f"file:///d/é-{n}.tar", "format": "tar", "rows": n * 10, "bytes": 1000 + n, "content_id": _id(str(n)),
    }  # fmt: skip
    return Shard(**{**values, **changes})


def _manifest(shards: list[Shard] | None = None, **changes: Any) -> Manifest:
    values = {"name": "d", "version": "1", "fields": FIELDS, "labels": LABELS}
    return Manifest.from_shards(shards=shards or [_shard(n) for n in range(5)], **{**values, **changes})


def test_round_trip_through_bytes_and_files(tmp_path: Path) -> None:
    made = _manifest()
    made.save(tmp_path / "m.parquet")
    assert [p.name for p in tmp_path.iterdir()] == ["m.parquet"]
    for found in (Manifest.load(tmp_path / "m.parquet"), Manifest.from_bytes(made.to_bytes())):
        assert (found.name, found.version, found.fields, found.labels) == ("d", "1", FIELDS, LABELS)
        assert list(found.shards) == [_shard(n) for n in range(5)]
        assert (found.digest, found.locations, found.rows) == (made.digest, made.locations, 100)
        assert found.to_bytes() == made.to_bytes()


def test_ids_rows_and_the_lazy_view() -> None:
    m = _manifest()
    assert m.shard_rows.tolist() == [0, 10, 20, 30, 40] and m.shard_rows.dtype == np.int64
    assert m.first_ids.tolist() == [0, 0, 10, 30, 60, 100]
    assert m.shard_of([0, 9, 10, 29, 30, 99]).tolist() == [1, 1, 2, 2, 3, 4]
    assert m.shard_of(60) == 4
    with pytest.raises(IndexError):
        m.shard_of([100])
    assert len(m.shards) == 5 and m.shards[-1] == _shard(4) and m.shards[2].ordinal == 2
    assert list(m.shards[1:3]) == [_shard(1), _shard(2)] and m.shards[1:3][1].ordinal == 2
    assert m.shards[::-2] == [_shard(4), _shard(2), _shard(0)] and len(m.shards[4:1]) == 0
    with pytest.raises(IndexError):
        m.shards[5]
    with pytest.raises(ValueError, match="read-only"):
        m.first_ids[0] = 1


@pytest.mark.parametrize("change", [{"rows": 11}, {"bytes": 1}, {"content_id": _id("x")}, {"format": "tar-last"}])
def test_the_digest_covers_each_shard(change: dict[str, Any]) -> None:
    shards = [_shard(n) for n in range(5)]
    changed = [*shards[:1], _shard(1, **change), *shards[2:]]
    assert _manifest(changed).digest != _manifest(shards).digest


def test_the_digest_covers_order_fields_and_labels_but_no_names() -> None:
    base = _manifest()
    shards = list(base.shards)
    assert _manifest([shards[1], shards[0], *shards[2:]]).digest != base.digest
    assert _manifest(shards[:4]).digest != base.digest
    assert _manifest(fields=FIELDS[:1]).digest != base.digest
    assert _manifest(fields=FIELDS[::-1]).digest != base.digest
    assert _manifest(labels={"cls": {"cat": 1, "dög": 0}}).digest != base.digest
    other = _manifest([_shard(n, uri=f"file:///elsewhere/{n}") for n in range(5)], name="e", version="2")
    assert other.digest == base.digest and other.locations != base.locations


def test_the_digest_is_a_stored_format() -> None:
    """Golden value: a change of it makes every registered dataset and saved state another one."""
    assert _manifest().digest == "sha256:9ef2bbd7aaffec6ac9cbf32d7733d7a45ba75a835f176df1856723fda1131f21"


def test_the_digest_does_not_depend_on_chunks() -> None:
    table = _manifest().table
    pieces = pa.concat_tables([table.slice(n, 1) for n in range(5)])
    sliced = pa.concat_tables([table, table]).slice(5)
    for variant in (pieces, sliced, table.combine_chunks()):
        assert Manifest("d", "1", FIELDS, LABELS, variant).digest == _manifest().digest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": -1}, "shard 1 has -1 rows"),
        ({"bytes": -5}, "shard 1 has -5 bytes"),
        ({"content_id": "md5:00"}, "content id 'md5:00'"),
        ({"rows": 1 << 62}, "more than"),
        ({"rows": 1 << 70}, "cannot hold"),
        ({"uri": None}, "uri"),
    ],
)
def test_values_no_manifest_may_have(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _manifest([_shard(0), _shard(1, **changes), _shard(2, **({"rows": 1 << 62} if "rows" in changes else {}))])


@pytest.mark.parametrize("bad", ["", "a b", "a/b", "x" * 129])
def test_names_are_checked(bad: str) -> None:
    with pytest.raises(ConfigError):
        _manifest(name=bad)
    with pytest.raises(ConfigError):
        _manifest(version=bad)


def test_fields_are_checked() -> None:
    with pytest.raises(ConfigError, match="two fields"):
        _manifest(fields=FIELDS[:1] * 2)
    with pytest.raises(ConfigError, match="dtype"):
        _manifest(fields=(Field(name="x", kind="scalar", dtype="complex64"),))


def _rewritten(path: Path, head: dict[str, Any] | bytes | None, table: pa.Table) -> Path:
    meta = head if isinstance(head, bytes) or head is None else json.dumps(head).encode()
    pq.write_table(table.replace_schema_metadata({} if meta is None else {b"feedline.manifest": meta}), path)
    return path


def test_files_that_are_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.parquet cannot be read"):
        Manifest.load(tmp_path / "gone.parquet")
    for data in (b"", b"PAR1", b"no parquet at all" * 100):
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(ConfigError, match="is not a manifest"):
            Manifest.load(tmp_path / "x")
    with pytest.raises(ConfigError, match=r"is not a manifest.*without a manifest head"):
        Manifest.load(_rewritten(tmp_path / "y", None, pa.table({"a": [1]})))
    with pytest.raises(ConfigError):
        Manifest.load(tmp_path)


def test_newer_and_damaged_files(tmp_path: Path) -> None:
    made = _manifest()
    head = json.loads(pq.ParquetFile(pa.BufferReader(made.to_bytes())).schema_arrow.metadata[b"feedline.manifest"])
    assert Manifest.load(_rewritten(tmp_path / "same", head, made.table)).digest == made.digest
    newer = {"format_version": 2, "fields": "another shape"}
    with pytest.raises(ConfigError, match=r"format version 2.*update feedline"):
        Manifest.load(_rewritten(tmp_path / "newer", newer, made.table))
    with pytest.raises(ConfigError, match="is damaged: its digest is"):
        Manifest.load(_rewritten(tmp_path / "rows", head, made.table.slice(1)))
    with pytest.raises(ConfigError, match="columns"):
        Manifest.load(_rewritten(tmp_path / "columns", head, made.table.drop_columns(["rows"])))
    for broken in (b"{", b"[]", b"{}", b'{"format_version": 1}', b'{"format_version": "x"}'):
        with pytest.raises(ConfigError, match="is damaged"):
            Manifest.load(_rewritten(tmp_path / "head", broken, made.table))
    data = made.to_bytes()
    for at in range(4, len(data) - 8, 37):
        (tmp_path / "flipped").write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            assert Manifest.load(tmp_path / "flipped").digest == made.digest
        except ConfigError as error:
            assert "\n" not in str(error)


def test_saving_to_a_place_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        _manifest().save(tmp_path / "no" / "m.parquet")


def test_a_million_shards_load_quickly_and_small(tmp_path: Path) -> None:
    n = 1_000_000
    table = pa.table(
        {
            "uri": pa.array([f"file:///data/set/train/shard-{i:07d}.tar" for i in range(n)], pa.large_utf8()),
            "format": pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), pa.array(["tar"])),
            "rows": pa.array(np.arange(n) % 1000),
            "bytes": pa.array(np.arange(n) * 7),
            "content_id": pa.array(
                [f"blake3:{i * 0x9E3779B97F4A7C15 % (1 << 256):064x}" for i in range(n)], pa.large_utf8()
            ),
        }
    )
    made = Manifest("d", "1", FIELDS, {}, table)
    made.save(tmp_path / "m.parquet")
    script = (
        "import resource, sys, time\nfrom manifests import Manifest\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "before, start = peak(), time.monotonic()\n"
        "m = Manifest.load(sys.argv[1])\n"
        "print(time.monotonic() - start, peak() - before, m.digest, m.shards[999_999].uri, m.rows)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "m.parquet")],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    seconds, mebibytes, digest, uri, rows = done.stdout.split()
    assert digest == made.digest and uri.endswith("shard-0999999.tar") and int(rows) == made.rows
    # a guard against another order of growth; the figures themselves are measured in benchmarks
    assert float(seconds) < 20 and int(mebibytes) < 350, done.stdout
