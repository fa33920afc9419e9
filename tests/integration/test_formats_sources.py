"""What a user names and what is built from it: files, folders, patterns, lists; image folders; Arrow files; case 61."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
from PIL import Image
from stored_data import read, read_manifest, tar_bytes, write_tar

from manifests import build, diff, verify
from manifests.compare import open_shard
from manifests.errors import ConfigError, FeedlineError, ShardChanged, ShardMissing
from manifests.manifest import Manifest
from manifests.scan.folder import PictureFile, cut

NAMES = {"name": "d", "version": "1"}


def _shards(folder: Path, numbers: list[int], pattern: str = "shard-{:04d}.tar") -> list[Path]:
    folder.mkdir(exist_ok=True)
    return [write_tar(folder / pattern.format(n), [(f"{n}.cls", b"%d" % n)]) for n in numbers]


def _order(manifest: Manifest) -> list[int]:
    return [row["cls"] for row in read_manifest(manifest)]


# -- case 61: missing shards -------------------------------------------------------------------------------------------


def test_case_61_every_missing_shard_of_a_range_is_named(tmp_path: Path) -> None:
    _shards(tmp_path, [n for n in range(10) if n not in (3, 7)])
    with pytest.raises(ShardMissing) as caught:
        build(tmp_path / "shard-{0000..0009}.tar", **NAMES)
    missing = [str(tmp_path / f"shard-000{n}.tar") for n in (3, 7)]
    assert caught.value.detail == {"missing": missing}
    assert all(name in str(caught.value) for name in missing)


def test_case_61_every_missing_file_of_a_list_is_named(tmp_path: Path) -> None:
    there = _shards(tmp_path, [0])
    with pytest.raises(ShardMissing) as caught:
        build([tmp_path / "a.tar", *there, tmp_path / "b-{0..1}.tar", tmp_path / "dangling.tar"], **NAMES)
    assert [Path(p).name for p in caught.value.detail["missing"]] == ["a.tar", "b-0.tar", "b-1.tar", "dangling.tar"]


def test_case_61_a_link_to_nowhere_is_missing(tmp_path: Path) -> None:
    (tmp_path / "x.tar").symlink_to(tmp_path / "gone.tar")
    with pytest.raises(ShardMissing, match=r"x\.tar"):
        build(tmp_path / "x.tar", **NAMES)


def test_case_61_a_pattern_without_matches_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing matches"):
        build(tmp_path / "*.tar", **NAMES)


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own are private."""
    with tempfile.TemporaryDirectory(prefix="feedline-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize("source", ["locked", "locked/*.tar", "*/x.tar"])
def test_case_61_a_folder_that_cannot_be_listed_is_an_error(public_path: Path, source: str) -> None:
    """Root may list everything, so a process without its rights looks."""
    tmp_path = public_path
    _shards(tmp_path / "open", [1], "x.tar")
    _shards(tmp_path / "locked", [2], "x.tar")
    (tmp_path / "locked").chmod(0)
    script = """
import os, sys
from manifests import build
from manifests.errors import ConfigError, ShardMissing
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    build(sys.argv[1], name="d", version="1")
except (ConfigError, ShardMissing) as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / source)], capture_output=True, text=True, timeout=60, check=True
    )
    (tmp_path / "locked").chmod(0o755)
    assert done.stdout.startswith("ConfigError") and "Permission denied" in done.stdout and "locked" in done.stdout


# -- files, folders, patterns, lists -----------------------------------------------------------------------------------


def test_folders_and_patterns_are_in_natural_order(tmp_path: Path) -> None:
    _shards(tmp_path / "s", [10, 2, 1, 30], "x-{}.tar")
    (tmp_path / "s" / "README.md").write_text("no shard")
    (tmp_path / "s" / ".x-5.tar").write_text("hidden")
    manifest = build(tmp_path / "s", **NAMES)
    assert _order(manifest) == [1, 2, 10, 30]
    assert [w for w in manifest.warnings if "README.md" in w]
    assert _order(build(str(tmp_path / "*" / "x-*.tar"), **NAMES)) == [1, 2, 10, 30]
    assert _order(build(str(tmp_path / "s" / "x-{1..2}.tar"), **NAMES)) == [1, 2]
    assert _order(build(str(tmp_path / "s" / "x-{30,1}.tar"), **NAMES)) == [30, 1]


def test_a_list_keeps_its_order_and_one_file_is_enough(tmp_path: Path) -> None:
    paths = _shards(tmp_path, [1, 2, 3])
    assert _order(build([paths[2], paths[0]], **NAMES)) == [3, 1]
    twice = build([paths[0], paths[0]], **NAMES)
    assert _order(twice) == [1, 1] and "named twice" in twice.warnings[0]
    assert _order(build(paths[1], **NAMES)) == [2]
    with pytest.raises(ConfigError, match="the list is empty"):
        build([], **NAMES)


def test_names_with_any_characters_come_back_from_the_uri(tmp_path: Path) -> None:
    names = ["a b#?%.tar", "é{x}[1].tar", b"\xff.tar".decode("utf-8", "surrogateescape")]
    for name in names:
        write_tar(tmp_path / name, [("1.cls", b"1")])
        manifest = build(tmp_path / name, **NAMES)
        assert manifest.shards[0].uri.isascii()
        assert _order(Manifest.from_bytes(manifest.to_bytes())) == [1]


def test_mixed_and_unknown_formats_are_refused(tmp_path: Path) -> None:
    _shards(tmp_path, [1])
    pa.feather.write_feather(pa.table({"cls": [1]}), str(tmp_path / "x.arrow"))
    with pytest.raises(ConfigError, match="different formats"):
        build(tmp_path, **NAMES)
    assert build(tmp_path, format="arrow", **NAMES).shards[0].format == "arrow"
    (tmp_path / "x.bin").write_bytes(b"?" * 600)
    with pytest.raises(ConfigError, match="no known format"):
        build(tmp_path / "x.bin", **NAMES)
    with pytest.raises(ConfigError, match="format 'zip' is not known"):
        build(tmp_path, format="zip", **NAMES)
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "x.tar.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(ConfigError, match="compressed"):
        build(tmp_path / "g", **NAMES)


def test_the_format_is_told_by_content_where_the_name_tells_nothing(tmp_path: Path) -> None:
    write_tar(tmp_path / "data", [("1.cls", b"1")])
    assert build(tmp_path / "data", **NAMES).shards[0].format == "tar"


@pytest.mark.parametrize("bad", [{"name": "a/b"}, {"version": ""}, {"split": "middle"}])
def test_bad_arguments_are_refused(tmp_path: Path, bad: dict[str, str]) -> None:
    _shards(tmp_path, [1])
    with pytest.raises(ConfigError):
        build(tmp_path, **{**NAMES, **bad})  # type: ignore[arg-type]


def test_content_ids_are_of_the_bytes_and_fast_ids_of_the_file(tmp_path: Path) -> None:
    path = _shards(tmp_path, [1])[0]
    first, fast = build(path, **NAMES), build(path, fast_id=True, **NAMES)
    moved = path.rename(tmp_path / "moved.tar")
    again = build(moved, **NAMES)
    assert again.digest == first.digest and again.locations != first.locations
    os.utime(moved, ns=(1, 1))
    assert build(moved, **NAMES).digest == first.digest
    assert build(moved, fast_id=True, **NAMES).digest != fast.digest
    assert verify(fast)[0].what == "missing"


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    paths = _shards(tmp_path, list(range(12)))
    seen: list[tuple[int, int]] = []
    build(paths, progress=lambda done, total: seen.append((done, total)), **NAMES)
    total = sum(p.stat().st_size for p in paths)
    assert seen[-1] == (total, total) and seen == sorted(seen)


def test_a_shard_written_to_during_the_build_is_noticed(tmp_path: Path) -> None:
    path = _shards(tmp_path, [1])[0]
    source = open_shard(f"file://{path}")
    try:
        path.write_bytes(path.read_bytes() + b"more")
        with pytest.raises(ShardChanged, match="changed while it was read"):
            source.check_unchanged()
    finally:
        source.close()


def test_a_large_shard_takes_little_memory(tmp_path: Path) -> None:
    """1 GiB in one member, a hole on disk: hashed and indexed in one pass, in chunks."""
    path = tmp_path / "big.tar"
    info = tarfile.TarInfo("a.bin")
    info.size = 1 << 30
    with path.open("wb") as file:
        file.write(info.tobuf())
        file.seek((1 << 30) + 512)
        file.write(tar_bytes([("b.cls", b"7")]))
    script = (
        "import resource, sys\nfrom manifests import build\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "m = build(sys.argv[1], name='d', version='1')\n"
        "print(m.rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=120, check=True
    )
    rows, grown = map(int, done.stdout.split())
    assert rows == 2 and grown < 64 << 10  # KiB


# -- image folders -----------------------------------------------------------------------------------------------------


def _picture(path: Path, value: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    out = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(out, "PNG")
    path.write_bytes(out.getvalue())
    return path


def test_classes_are_numbered_by_sorted_folder_name_empty_ones_too(tmp_path: Path) -> None:
    """The part of case 49 that a manifest holds: the numbers are written into it and can be given for another split."""
    for name in ("10", "9", "é", "A", "a"):
        _picture(tmp_path / "train" / name / "deep" / "x.png")
    (tmp_path / "train" / "empty").mkdir()
    (tmp_path / "train" / "note.txt").write_text("no picture")
    manifest = build(tmp_path / "train", **NAMES)
    assert manifest.labels == {"label": {"10": 0, "9": 1, "A": 2, "a": 3, "empty": 4, "é": 5}}
    assert [(r["__key__"], r["label"]) for r in read_manifest(manifest)] == [
        ("10/deep/x.png", 0), ("9/deep/x.png", 1), ("A/deep/x.png", 2), ("a/deep/x.png", 3), ("é/deep/x.png", 5),
    ]  # fmt: skip
    assert any("note.txt" in w for w in manifest.warnings)
    for name in ("A", "é"):
        _picture(tmp_path / "val" / name / "y.png")
    val = build(tmp_path / "val", labels=manifest.labels, **NAMES)
    assert [r["label"] for r in read_manifest(val)] == [2, 5]
    _picture(tmp_path / "val" / "new" / "y.png")
    with pytest.raises(ConfigError, match="class folders new are not in the label map"):
        build(tmp_path / "val", labels=manifest.labels, **NAMES)


def test_pictures_in_the_root_have_no_label(tmp_path: Path) -> None:
    _picture(tmp_path / "a.png")
    flat = build(tmp_path, **NAMES)
    assert [f.name for f in flat.fields] == ["image", "__key__"] and flat.labels == {}
    _picture(tmp_path / "cat" / "b.png")
    both = build(tmp_path, **NAMES)
    assert {f.name: f.nullable for f in both.fields} == {"image": False, "label": True, "__key__": False}
    assert ["label" in row for row in read_manifest(both)] == [False, True]


def test_links_in_circles_end(tmp_path: Path) -> None:
    _picture(tmp_path / "cat" / "b.png")
    (tmp_path / "cat" / "again").symlink_to(tmp_path)
    (tmp_path / "dog").symlink_to(tmp_path / "cat")
    assert [r["__key__"] for r in read_manifest(build(tmp_path, **NAMES))] == ["cat/b.png", "dog/b.png"]


def test_one_more_file_changes_one_virtual_shard(tmp_path: Path) -> None:
    for n in range(3000):
        (tmp_path / f"c{n % 3}").mkdir(exist_ok=True)
        (tmp_path / f"c{n % 3}" / f"{n:05d}.png").write_bytes(b"p%d" % n)
    before = build(tmp_path, **NAMES)
    assert 2 <= len(before.shards) <= 12
    assert max(before.shard_rows) <= 2000
    (tmp_path / "c1" / "00400x.png").write_bytes(b"new")
    after = build(tmp_path, **NAMES)
    found = diff(before, after)
    assert (found.changed.shards, found.added.shards, found.removed.shards) == (1, 0, 0)
    assert found.shared.shards == len(before.shards) - 1
    assert after.rows == before.rows + 1
    problems = verify(before)
    assert len(problems) == 1 and problems[0].what == "size"


def test_moving_the_folder_keeps_the_digest(tmp_path: Path) -> None:
    _picture(tmp_path / "one" / "cat" / "b.png")
    before = build(tmp_path / "one", **NAMES)
    (tmp_path / "one").rename(tmp_path / "two")
    after = build(tmp_path / "two", **NAMES)
    assert after.digest == before.digest and after.locations != before.locations
    assert verify(after, content=True) == []


def test_virtual_shards_are_bounded_in_files_and_bytes() -> None:
    rng = np.random.default_rng(3)
    sizes = [*rng.integers(1, 400_000, 4000).tolist(), 500 << 20, *rng.integers(1, 200, 20_000).tolist()]
    files = [PictureFile((f"{n:06d}.png",), size, 0) for n, size in enumerate(sizes)]
    parts = list(cut(files))
    assert [f for part in parts for f in part] == files
    for part in parts:
        assert len(part) <= 2000
        assert len(part) == 1 or sum(f.size for f in part) <= 128 << 20
    assert 10 < len(parts) < 80


def test_a_picture_that_vanishes_is_a_storage_fault(tmp_path: Path) -> None:
    _picture(tmp_path / "cat" / "a.png")
    _picture(tmp_path / "cat" / "b.png")
    manifest = build(tmp_path, **NAMES)
    source = open_shard(manifest.shards[0].uri)
    (tmp_path / "cat" / "a.png").unlink()
    with pytest.raises(ShardMissing, match=r"a\.png"):
        source.read(0, source.size)
    (tmp_path / "cat" / "a.png").write_bytes(b"longer or shorter")
    with pytest.raises(ShardChanged, match=r"a\.png"):
        source.read(0, source.size)
    assert verify(manifest)[0].what == "size"


# -- Arrow files -------------------------------------------------------------------------------------------------------


def _arrow(path: Path, table: pa.Table) -> Path:
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([{"a": 1}]), "'x' has the type struct"),
        (pa.array([[("a", 1)]], pa.map_(pa.utf8(), pa.int32())), "'x' has the type map"),
        (pa.array([1], pa.timestamp("s")), "'x' has the type timestamp"),
        (pa.array([1], pa.decimal128(5)), "'x' has the type decimal"),
        (pa.array([["a"]]), "'x' has the type list<item: string>"),
        (pa.array([[[1]]]), "'x' has the type list<item: list"),
        (pa.nulls(1), "'x' has the type null"),
        (pa.array([1]).dictionary_encode(), "'x' has the type dictionary"),
    ],
)
def test_columns_that_are_no_fields_are_named_with_their_type(tmp_path: Path, column: pa.Array, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(_arrow(tmp_path / "x.arrow", pa.table({"ok": [1], "x": column})), **NAMES)
    assert words in str(caught.value) and "x.arrow" in str(caught.value)


@pytest.mark.parametrize("name", ["__id__", "__pad__", "__epoch__", "__source__", "__sub__"])
def test_reserved_column_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        build(_arrow(tmp_path / "x.arrow", pa.table({name: [1]})), **NAMES)
    twice = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(ConfigError, match="two columns"):
        build(_arrow(tmp_path / "x.arrow", twice), **NAMES)


def test_types_that_conflict_name_both_shards(tmp_path: Path) -> None:
    one = _arrow(tmp_path / "1.arrow", pa.table({"x": pa.array([1], pa.int32())}))
    two = _arrow(tmp_path / "2.arrow", pa.table({"x": pa.array([1.5])}))
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, **NAMES)
    assert all(word in str(caught.value) for word in (str(one), str(two), "int32", "float64"))


def test_columns_are_united_and_empty_files_count_nothing(tmp_path: Path) -> None:
    _arrow(tmp_path / "1.arrow", pa.table({"x": pa.array([1, None])}))
    _arrow(tmp_path / "2.ipc", pa.table({"x": pa.array([], pa.utf8())}))
    _arrow(tmp_path / "3.feather", pa.table({"x": pa.array([3]), "y": ["a"]}))
    manifest = build(tmp_path, **NAMES)
    assert {f.name: (f.dtype or f.kind, f.nullable) for f in manifest.fields} == {
        "x": ("int64", True),
        "y": ("string", True),
    }
    assert read_manifest(manifest) == [{"x": 1}, {}, {"x": 3, "y": "a"}]
    assert [w for w in manifest.warnings if "2.ipc has no samples" in w]


def test_feather_streams_and_cut_files(tmp_path: Path) -> None:
    table = pa.table({"x": list(range(1000)), "s": [str(n) for n in range(1000)]})
    pa.feather.write_feather(table, str(tmp_path / "x.feather"))  # lz4
    assert read_manifest(build(tmp_path / "x.feather", **NAMES)) == table.to_pylist()
    whole = (tmp_path / "x.feather").read_bytes()
    (tmp_path / "x.feather").write_bytes(whole[:-20])
    with pytest.raises(ConfigError, match="it was cut, or its writer was not closed"):
        build(tmp_path / "x.feather", **NAMES)
    with pa.ipc.new_stream(str(tmp_path / "s.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ConfigError, match="it is an Arrow stream"):
        build(tmp_path / "s.arrow", **NAMES)


def test_nulls_inside_lists_are_bad_rows(tmp_path: Path) -> None:
    path = _arrow(
        tmp_path / "x.arrow",
        pa.table(
            {
                "t": pa.array([[1, 2], None, [3, None], [5, 6]], pa.list_(pa.int32(), 2)),
                "r": pa.array([[1], [], [2, 3], [None, 4]], pa.list_(pa.int32())),
            }
        ),
    )
    manifest = build(path, **NAMES)
    found = read("arrow", path.read_bytes(), [3, 2, 1, 0])
    assert found.bad == {0: "field 'r' has a null inside its list", 1: "field 't' has a null inside its list"}
    assert found.columns["t"].to_pylist() == [[5, 6], None, None, [1, 2]]
    assert found.columns["r"].to_pylist() == [None, [2, 3], [], [1]]
    assert {f.name: f.nullable for f in manifest.fields} == {"t": True, "r": False}


def test_text_that_is_not_utf8_is_a_bad_row(tmp_path: Path) -> None:
    raw = pa.array([b"ok", b"\xff", b"fine"], pa.binary())
    text = pa.Array.from_buffers(pa.utf8(), 3, raw.buffers())
    path = _arrow(tmp_path / "x.arrow", pa.table({"s": text}))
    found = read("arrow", path.read_bytes(), [0, 1, 2])
    assert list(found.bad) == [1] and "not UTF-8" in found.bad[1]
    assert found.columns["s"].to_pylist() == ["ok", None, "fine"] and found.keys == ["row 0", "row 1", "row 2"]


def test_dictionaries_with_deltas(tmp_path: Path) -> None:
    kind = pa.dictionary(pa.int8(), pa.utf8())
    first = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(["a", "b"]))
    more = pa.DictionaryArray.from_arrays(pa.array([2, 0, None], pa.int8()), pa.array(["a", "b", "c"]))
    path = tmp_path / "x.arrow"
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_file(str(path), pa.schema([("d", kind)]), options=options) as writer:
        for array in (first, more):
            writer.write_batch(pa.record_batch([array], names=["d"]))
    assert [r.get("d") for r in read_manifest(build(path, **NAMES))] == ["a", "b", "c", "a", None]


def test_every_error_here_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FeedlineError) as caught:
        build(tmp_path / "none.tar", **NAMES)
    assert "\n" not in str(caught.value)


def test_sources_on_other_storage_are_refused_by_name(tmp_path: Path) -> None:
    """An object store is not "a missing shard"; a file:// uri is a path."""
    for source in ("s3://bucket/shards", "http://127.0.0.1/x.tar"):
        with pytest.raises(ConfigError, match="later release"):
            build(source, name="d", version="1")
    write_tar(tmp_path / "a b.tar", [("0.cls", b"1")])
    assert build(f"file://{tmp_path}/a%20b.tar", name="d", version="1").rows == 1
