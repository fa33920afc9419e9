"""Tar shards as people really have them: hard cases 35 to 41, from the file on disk to the rows a worker returns."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from stored_data import read, read_manifest, rows_of, scan, tar_bytes, write_tar

from manifests import build
from manifests.errors import ConfigError
from manifests.manifest import Manifest
from manifests.scan.tar import TarIndex

BLOCK = 512


def _build(src: Path | list[Path], **settings: str) -> Manifest:
    return build(src, name="d", version="1", **settings)  # type: ignore[arg-type]


def _samples(first: int, last: int) -> list[tuple[str, bytes]]:
    return [part for n in range(first, last) for part in ((f"{n}.jpg", b"J%d" % n), (f"{n}.cls", b"%d" % n))]


def _keys(manifest: Manifest) -> list[str]:
    return [row["__key__"] for row in read_manifest(manifest)]


# -- case 35: dots in the base name ------------------------------------------------------------------------------------

_DOTTED = ["22.05.png", "22.05.json", "Track 2.0 (x).jpg", "a.left.jpg", "a.right.jpg", ".hidden.jpg", "noext", "end."]


def test_case_35_first_dot_splits_as_webdataset_does(tmp_path: Path) -> None:
    manifest = _build(write_tar(tmp_path / "x.tar", [(n, n.encode()) for n in _DOTTED]))
    assert read_manifest(manifest) == [
        {"05.png": b"22.05.png", "05.json": b"22.05.json", "__key__": "22"},
        {"0 (x).jpg": b"Track 2.0 (x).jpg", "__key__": "Track 2"},
        {"left.jpg": b"a.left.jpg", "right.jpg": b"a.right.jpg", "__key__": "a"},
        {"": b"end.", "__key__": "end"},
    ]
    assert [f.name for f in manifest.fields][-1] == "__key__"
    assert any("2 members are no part of a sample" in w and "noext" in w for w in manifest.warnings)


def test_case_35_last_dot_by_switch_and_the_worker_knows_it(tmp_path: Path) -> None:
    manifest = _build(write_tar(tmp_path / "x.tar", [(n, n.encode()) for n in _DOTTED]), split="last")
    assert {s.format for s in manifest.shards} == {"tar-last"}
    assert read_manifest(manifest) == [
        {"png": b"22.05.png", "json": b"22.05.json", "__key__": "22.05"},
        {"jpg": b"Track 2.0 (x).jpg", "__key__": "Track 2.0 (x)"},
        {"jpg": b"a.left.jpg", "__key__": "a.left"},
        {"jpg": b"a.right.jpg", "__key__": "a.right"},
        {"": b"end.", "__key__": "end"},
    ]


def test_case_35_folders_with_dots_stay_in_the_key(tmp_path: Path) -> None:
    members = [("./v1.2/a.jpg", b"1"), ("v1.2/.x/b.jpg", b"2"), ("v1.2/._a.jpg", b"3"), ("__meta__/a.json", b"{}")]
    manifest = _build(write_tar(tmp_path / "x.tar", members))
    assert _keys(manifest) == ["./v1.2/a", "v1.2/.x/b"]


def test_case_35_a_field_per_row_is_a_naming_mistake_that_names_the_switch(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [(f"2024.{n}.png", b"") for n in range(1500)])
    with pytest.raises(ConfigError, match=r"more than 1000 different fields.*--split last"):
        _build(path)
    assert _build(path, split="last").rows == 1500


# -- case 36: parts that are not neighbours ----------------------------------------------------------------------------


def test_case_36_parts_are_regrouped_in_order_of_first_appearance(tmp_path: Path) -> None:
    order = ["0.jpg", "1.jpg", "0.cls", "1.cls"]
    manifest = _build(write_tar(tmp_path / "x.tar", [(n, n[0].encode()) for n in order]))
    assert read_manifest(manifest) == [
        {"cls": 0, "jpg": b"0", "__key__": "0"},
        {"cls": 1, "jpg": b"1", "__key__": "1"},
    ]


def test_case_36_all_pictures_then_all_labels(tmp_path: Path) -> None:
    members = [(f"{n}.jpg", b"p%d" % n) for n in range(50)] + [(f"{n}.cls", b"%d" % n) for n in reversed(range(50))]
    manifest = _build(write_tar(tmp_path / "x.tar", members))
    assert read_manifest(manifest) == [{"cls": n, "jpg": b"p%d" % n, "__key__": str(n)} for n in range(50)]


def test_case_36_folders_and_foreign_files_between_parts(tmp_path: Path) -> None:
    members = [
        ("5.jpg", b"p"),
        ("sub/", b""),
        ("README", b"foreign"),
        ("5.cls", b"5"),
        ("6.cls", b"6"),
        ("6.jpg", b"q"),
    ]
    manifest = _build(write_tar(tmp_path / "x.tar", members))
    assert read_manifest(manifest) == [
        {"cls": 5, "jpg": b"p", "__key__": "5"},
        {"cls": 6, "jpg": b"q", "__key__": "6"},
    ]
    assert not any(f.nullable for f in manifest.fields)


# -- case 37: one name twice -------------------------------------------------------------------------------------------


def test_case_37_the_last_of_two_members_counts_and_is_named(tmp_path: Path) -> None:
    members = [*_samples(0, 10), ("5.jpg", b"newer")]
    manifest = _build(write_tar(tmp_path / "x.tar", members))
    rows = read_manifest(manifest)
    assert [r["__key__"] for r in rows] == [str(n) for n in range(10)]
    assert rows[5] == {"jpg": b"newer", "cls": 5, "__key__": "5"}
    assert [rows[n]["jpg"] for n in (4, 6)] == [b"J4", b"J6"]
    with tarfile.open(tmp_path / "x.tar") as tar:
        extracted = tar.extractfile("5.jpg")
        assert extracted is not None and extracted.read() == rows[5]["jpg"]
    assert any("x.tar: 1 members have a name twice" in w and "'5.jpg'" in w for w in manifest.warnings)


def test_case_37_the_same_member_appended_again(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", _samples(0, 10))
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo("5.jpg")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"J5"))
    manifest = _build(path)
    assert read_manifest(manifest) == [{"jpg": b"J%d" % n, "cls": n, "__key__": str(n)} for n in range(10)]
    assert any("'5.jpg'" in w for w in manifest.warnings)


def test_case_37_two_spellings_of_one_field(tmp_path: Path) -> None:
    manifest = _build(write_tar(tmp_path / "x.tar", [("a.JPG", b"1"), ("a.jpg", b"2")]))
    assert read_manifest(manifest) == [{"jpg": b"2", "__key__": "a"}]
    assert any("twice" in w for w in manifest.warnings)


# -- case 38: extra headers do not shift offsets -----------------------------------------------------------------------


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_case_38_every_offset_equals_tarfiles(format: int) -> None:
    long = format != tarfile.USTAR_FORMAT
    names = ["n" * 26 + ".jpg", "d/" * 10 + "m" * 80 + ".jpg", "é" * 20 + ".jpg", "zero.jpg", "block.jpg"]
    if long:
        names.insert(2, "d" * 100 + "/" + "x" * 195 + ".jpg")
    out = io.BytesIO()
    settings = {"pax_headers": {"comment": "global", "origin": "é"}} if format == tarfile.PAX_FORMAT else {}
    with tarfile.open(fileobj=out, mode="w", format=format, **settings) as tar:  # type: ignore[call-overload]
        for at, name in enumerate(names):
            data = {"zero.jpg": b"", "block.jpg": b"b" * BLOCK}.get(name, bytes([at]) * (at * 700 + 1))
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1_700_000_000.25 if long else 1_700_000_000  # type: ignore[assignment]
            info.uname = "näme"
            tar.addfile(info, io.BytesIO(data))
    data = out.getvalue()
    index = scan("tar", data).index
    assert isinstance(index, TarIndex)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = tar.getmembers()
    assert index.offsets.tolist() == [m.offset_data for m in members]
    assert index.sizes.tolist() == [m.size for m in members]
    assert index.keys.to_pylist() == [m.name.removesuffix(".jpg") for m in members]
    for at, (row, member) in enumerate(zip(rows_of(read("tar", data)), members)):
        assert row["jpg"] == data[member.offset_data : member.offset_data + member.size], at


def test_case_38_pax_size_and_path_override_the_header() -> None:
    data = bytearray(tar_bytes([("a.jpg", b"x" * 700), ("b.jpg", b"y")], tarfile.PAX_FORMAT))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("short.jpg")
        info.pax_headers = {"path": "from/records.jpg", "size": "700"}
        info.size = 700
        tar.addfile(info, io.BytesIO(b"x" * 700))
    whole = out.getvalue()[: -(-(3 * BLOCK + 700) // BLOCK) * BLOCK]
    row = rows_of(read("tar", whole + bytes(data)))
    assert row[0] == {"jpg": b"x" * 700, "__key__": "from/records"}
    assert [r["__key__"] for r in row[1:]] == ["a", "b"]


# -- case 39: missing parts, upper case --------------------------------------------------------------------------------


def test_case_39_missing_parts_are_nulls_in_any_case(tmp_path: Path) -> None:
    members: list[tuple[str, bytes]] = []
    for n in range(10):
        if n != 7:
            members.append((f"{n}.JPG", b"p%d" % n))
        if n != 4:
            members.append((f"{n}.Cls", b" %d\n" % n))
        if n >= 8:
            members.append((f"{n}.caption.TXT", b"c"))
    manifest = _build(write_tar(tmp_path / "x.tar", members))
    assert {f.name: (f.dtype or f.kind, f.nullable) for f in manifest.fields} == {
        "jpg": ("bytes", True),
        "cls": ("int64", True),
        "caption.txt": ("bytes", True),
        "__key__": ("string", False),
    }
    rows = read_manifest(manifest)
    assert "cls" not in rows[4] and rows[4]["jpg"] == b"p4"
    assert "jpg" not in rows[7] and rows[7]["cls"] == 7
    assert ["caption.txt" in r for r in rows] == [n >= 8 for n in range(10)]


def test_case_39_a_field_that_one_shard_lacks_altogether(tmp_path: Path) -> None:
    paths = [
        write_tar(tmp_path / "a.tar", [("0.jpg", b"x")]),
        write_tar(tmp_path / "b.tar", [("1.jpg", b"y"), ("1.cls", b"1")]),
    ]
    manifest = _build(paths)
    assert {f.name: f.nullable for f in manifest.fields} == {"jpg": False, "cls": True, "__key__": False}
    assert read_manifest(manifest)[0] == {"jpg": b"x", "__key__": "0"}


def test_case_39_what_cannot_be_parsed_is_named_and_harms_no_other_row() -> None:
    members = [
        ("0.cls", b"0"),
        ("1.cls", b"cat"),
        ("2.cls", b"2.0"),
        ("3.cls", b"9" * 30),
        ("4.cls", b"-4"),
        ("5.cls", b""),
    ]
    members += [("6.cls", b"6"), ("6.txt", b"\xff\xfe")]
    found = read("tar", tar_bytes(members), [6, 1, 0, 2, 3, 4, 5])
    assert sorted(found.bad) == [0, 1, 3, 4, 6]
    assert found.bad[0] == "field 'txt' is not UTF-8 text: invalid start byte at byte 0"
    assert found.bad[1] == "field 'cls' is not a whole number: 'cat'"
    assert found.columns["cls"].to_pylist() == [6, None, 0, None, None, -4, None]
    assert found.keys == ["6", "1", "0", "2", "3", "4", "5"]


# -- case 40: cut and damaged archives ---------------------------------------------------------------------------------


def _twenty() -> tuple[bytes, list[tarfile.TarInfo]]:
    """10 samples of two members."""
    data = tar_bytes([(n, d.ljust(400, b" ")) for n, d in _samples(0, 10)])
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return data, tar.getmembers()


def _cut(tmp_path: Path, data: bytes) -> Manifest:
    path = tmp_path / "x.tar"
    path.write_bytes(data)
    manifest = _build(path)
    assert len(manifest.warnings) == 1 and str(path) in manifest.warnings[0]
    return manifest


def test_case_40a_cut_inside_a_header(tmp_path: Path) -> None:
    data, members = _twenty()
    at = members[12].offset + 100
    manifest = _cut(tmp_path, data[:at])
    assert _keys(manifest) == [str(n) for n in range(6)]
    assert f"ends at byte {at}, inside a header" in manifest.warnings[0]


def test_case_40b_cut_inside_data_drops_that_sample_whole(tmp_path: Path) -> None:
    data, members = _twenty()
    at = members[13].offset_data + 10
    manifest = _cut(tmp_path, data[:at])
    assert _keys(manifest) == [str(n) for n in range(6)]
    assert not any(f.nullable for f in manifest.fields)
    assert f"ends at byte {at}" in manifest.warnings[0] and "sample '6' is dropped" in manifest.warnings[0]
    assert "(1 sample dropped)" in manifest.warnings[0]


def test_case_40c_cut_between_two_members(tmp_path: Path) -> None:
    data, members = _twenty()
    manifest = _cut(tmp_path, data[: members[13].offset])
    rows = read_manifest(manifest)
    assert [r["__key__"] for r in rows] == [str(n) for n in range(7)]
    assert rows[6] == {"jpg": b"J6".ljust(400), "__key__": "6"}
    assert f"no end mark at byte {members[13].offset}" in manifest.warnings[0]
    assert "the last sample '6' may lack parts" in manifest.warnings[0]


def test_case_40d_only_the_end_mark_is_missing(tmp_path: Path) -> None:
    data, members = _twenty()
    end = members[-1].offset_data + -(-members[-1].size // BLOCK) * BLOCK
    for size in (end, members[-1].offset_data + members[-1].size):
        manifest = _cut(tmp_path, data[:size])
        assert _keys(manifest) == [str(n) for n in range(10)]
        assert "no end mark" in manifest.warnings[0]


def test_case_40e_one_header_byte_flipped(tmp_path: Path) -> None:
    data, members = _twenty()
    broken = bytearray(data)
    broken[members[10].offset + 148] ^= 1
    manifest = _cut(tmp_path, bytes(broken))
    assert _keys(manifest) == [str(n) for n in range(5)]
    assert f"header checksum at byte {members[10].offset} is wrong" in manifest.warnings[0]


def test_case_40_a_cut_in_every_block_gives_the_complete_samples() -> None:
    data, members = _twenty()
    ends = {n: members[2 * n + 1].offset_data + members[2 * n + 1].size for n in range(10)}
    for size in range(1, len(data), 97):
        rows = rows_of(read("tar", data[:size])) if size >= BLOCK else []
        whole = [str(n) for n in range(10) if ends[n] <= size]
        assert [r["__key__"] for r in rows][: len(whole)] == whole
        assert len(rows) <= len(whole) + 1
        assert [r for r in rows[: len(whole)] if len(r) != 3] == []


def test_case_40_archives_joined_with_cat_are_pointed_out(tmp_path: Path) -> None:
    manifest = _cut(tmp_path, tar_bytes(_samples(0, 3)) + tar_bytes(_samples(3, 6)))
    assert manifest.rows == 3
    assert "data behind the end mark" in manifest.warnings[0]


@pytest.mark.parametrize("magic", [b"\x1f\x8b\x08", b"BZh9", b"\x28\xb5\x2f\xfd", b"not a tar at all"])
def test_case_40_what_is_no_tar_is_refused(tmp_path: Path, magic: bytes) -> None:
    (tmp_path / "x.tar").write_bytes(magic + b"?" * 2000)
    with pytest.raises(ConfigError, match=r"x\.tar is not tar"):
        _build(tmp_path / "x.tar")


# -- case 41: empty shards ---------------------------------------------------------------------------------------------

_EMPTY = {
    "no-bytes": b"",
    "zero-blocks": bytes(20 * BLOCK),
    "folders": tar_bytes([("a/", b""), ("a/b/", b"")]),
    "foreign": tar_bytes([("README", b"x"), (".hidden.jpg", b"y")]),
}


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_case_41_empty_shards_add_nothing_and_are_named_once(tmp_path: Path, place: str) -> None:
    good = [write_tar(tmp_path / f"good-{n}.tar", _samples(5 * n, 5 * n + 5)) for n in range(2)]
    empty = []
    for name, data in _EMPTY.items():
        empty.append(tmp_path / f"{name}.tar")
        empty[-1].write_bytes(data)
    at = {"first": 0, "middle": 1, "last": 2}[place]
    manifest = _build([*good[:at], *empty, *good[at:]])
    assert _keys(manifest) == [str(n) for n in range(10)]
    assert manifest.fields == _build(good).fields
    assert sorted(manifest.shard_rows.tolist()) == [0, 0, 0, 0, 5, 5]
    for path in empty:
        assert sum(f"{path} has no samples" in w for w in manifest.warnings) == 1
    shards = {"first": (4, 5), "middle": (0, 5), "last": (0, 1)}[place]
    assert manifest.shard_of(range(10)).tolist() == [shards[0]] * 5 + [shards[1]] * 5


def test_case_41_all_shards_empty_is_an_error(tmp_path: Path) -> None:
    for name, data in _EMPTY.items():
        (tmp_path / f"{name}.tar").write_bytes(data)
    with pytest.raises(ConfigError, match="no samples in"):
        _build(tmp_path)


# -- further ----------------------------------------------------------------------------------------------------------


def test_links_are_no_samples_and_are_pointed_out() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind in (("a.jpg", tarfile.REGTYPE), ("b.jpg", tarfile.SYMTYPE), ("c.jpg", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.jpg" if kind != tarfile.REGTYPE else ""
            tar.addfile(info)
    found = scan("tar", out.getvalue())
    assert found.index.rows == 1
    assert [n.kind for n in found.notes] == ["ignored"] and "'b.jpg', 'c.jpg'" in found.notes[0].text


def test_sparse_members_and_reserved_fields_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="__key__"):
        _build(write_tar(tmp_path / "k.tar", [("a.__key__", b"x")]))
    with pytest.raises(ConfigError, match="__id__"):
        _build(write_tar(tmp_path / "i.tar", [("a.__id__", b"x")]))
    data = bytearray(tar_bytes([("a.jpg", b"x")]))
    data[156:157] = b"S"
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + sum(data[156:512]) + 8 * 32)
    (tmp_path / "s.tar").write_bytes(bytes(data))
    with pytest.raises(ConfigError, match="sparse"):
        _build(tmp_path / "s.tar")


def test_names_that_are_not_utf8_stay_apart(tmp_path: Path) -> None:
    members = [
        (b"\xe9.jpg".decode("utf-8", "surrogateescape"), b"1"),
        (b"\xe8.jpg".decode("utf-8", "surrogateescape"), b"2"),
    ]
    path = tmp_path / "x.tar"
    path.write_bytes(tar_bytes(members, tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"))
    assert _keys(_build(path)) == ["\\xe9", "\\xe8"]


def test_base_256_sizes_beyond_octal(tmp_path: Path) -> None:
    """A member of more than 8 GiB has its size in base 256; the file here is sparse on disk."""
    path = tmp_path / "big.tar"
    size = (8 << 30) + 5
    head = tarfile.TarInfo("a.bin")
    head.size = size
    after = tar_bytes([("b.cls", b"7")])
    with path.open("wb") as file:
        file.write(head.tobuf(tarfile.GNU_FORMAT))
        file.seek(BLOCK + -(-size // BLOCK) * BLOCK)
        file.write(after)
    manifest = build(path, name="d", version="1", fast_id=True)
    assert manifest.rows == 2 and manifest.shards[0].bytes == BLOCK + -(-size // BLOCK) * BLOCK + len(after)
    assert manifest.shards[0].content_id.startswith(f"etag:{manifest.shards[0].bytes}-")
