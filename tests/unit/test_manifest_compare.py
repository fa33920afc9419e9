"""``diff`` and ``verify``."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from stored_data import write_tar

from manifests import Field, Manifest, Shard, build, diff, verify
from manifests.compare import Part
from manifests.errors import ConfigError

FIELDS = (Field(name="x", kind="bytes"),)


def _made(root: str, contents: dict[str, str], fields: tuple[Field, ...] = FIELDS) -> Manifest:
    shards = [
        Shard(0, f"file://{root}/{name}", "tar", 10, 100, f"blake3:{content.encode().hex():0>64}")
        for name, content in contents.items()
    ]
    return Manifest.from_shards("d", "1", fields, shards)


def test_added_removed_changed_shared() -> None:
    a = _made("/a", {"1.tar": "A", "2.tar": "B", "3.tar": "C", "4.tar": "D"})
    b = _made("/b", {"1.tar": "A", "2.tar": "B2", "5.tar": "C", "6.tar": "E"})
    found = diff(a, b)
    one = Part(1, 10, 100)
    assert (found.changed, found.shared) == (one, Part(2, 20, 200))
    assert (found.added, found.removed) == (one, one)
    assert found.schema == ()


def test_the_same_content_twice_is_counted_twice() -> None:
    a = _made("/a", {"1.tar": "A", "2.tar": "A"})
    b = _made("/a", {"1.tar": "A"})
    assert diff(a, b).removed.shards == 1 and diff(a, b).shared.shards == 1
    assert diff(b, a).added.shards == 1
    empty = Manifest.from_shards("d", "1", FIELDS, [])
    assert diff(empty, a).added == Part(2, 20, 200) and diff(a, empty).removed == Part(2, 20, 200)


def test_fields_and_labels_are_compared() -> None:
    wide = (Field(name="x", kind="bytes", nullable=True), Field(name="y", kind="string"))
    assert diff(_made("/a", {}), _made("/a", {}, wide)).schema == ("field 'x' changed", "field 'y' added")
    assert diff(_made("/a", {}, wide), _made("/a", {})).schema == ("field 'x' changed", "field 'y' removed")
    labelled = Manifest.from_shards("d", "1", FIELDS, [], {"x": {"a": 0}})
    assert diff(_made("/a", {}), labelled).schema == ("label maps differ",)


def test_verify_tells_missing_size_and_content(tmp_path: Path) -> None:
    paths = [write_tar(tmp_path / f"{n}.tar", [(f"{n}.cls", b"%d" % n)]) for n in range(4)]
    manifest = build(tmp_path, name="d", version="1")
    seen: list[tuple[int, int]] = []
    assert verify(manifest, content=True, progress=lambda done, total: seen.append((done, total))) == []
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    paths[1].unlink()
    paths[2].write_bytes(paths[2].read_bytes() + b"x")
    data = bytearray(paths[3].read_bytes())
    data[512] ^= 1
    paths[3].write_bytes(bytes(data))
    assert [(p.ordinal, p.what) for p in verify(manifest)] == [(1, "missing"), (2, "size")]
    found = verify(manifest, content=True)
    assert [(p.ordinal, p.what) for p in found] == [(1, "missing"), (2, "size"), (3, "content")]
    assert found[2].uri == manifest.shards[3].uri and "blake3:" in found[2].detail


def test_verify_knows_sha256_and_refuses_what_is_not_local(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("1.cls", b"1")])
    data = path.read_bytes()
    shard = Shard(0, f"file://{path}", "tar", 1, len(data), "sha256:" + hashlib.sha256(data).hexdigest())
    assert verify(Manifest.from_shards("d", "1", FIELDS, [shard]), content=True) == []
    remote = Shard(0, "s3://b/x.tar", "tar", 1, 10, "sha256:" + "0" * 64)
    with pytest.raises(ConfigError, match="not a local file"):
        verify(Manifest.from_shards("d", "1", FIELDS, [remote]))
