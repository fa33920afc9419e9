"""``feedline manifest``: what it prints, its JSON documents and its exit statuses. Registering is tested where a
dispatcher runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stored_data import write_tar

from feedline.cli import main
from manifests import Manifest


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for n in range(12):
        write_tar(folder / f"x-{n}.tar", [(f"{n}.cls", b"%d" % n), (f"{n}.jpg", b"p")])
    return folder


def _run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    status = main(["manifest", *map(str, argv)])
    return status, *capsys.readouterr()


def _build(capsys: pytest.CaptureFixture[str], src: Path, out: Path, *more: str) -> tuple[int, str, str]:
    return _run(capsys, "build", src, "--name", "photos", "--version", "2026-08-20", "-o", out, *more)


def _json(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


def test_build_and_show(capsys: pytest.CaptureFixture[str], shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.parquet"
    status, text, errors = _build(capsys, shards, out)
    digest = Manifest.load(out).digest
    assert (status, errors) == (0, "")
    assert text.splitlines()[0] == f"photos@2026-08-20 {digest}" and "12 shards, 12 rows" in text
    status, text, _ = _run(capsys, "show", out)
    assert status == 0 and "x-9.tar" in text and "and 2 more" in text and "int64" in text
    status, text, _ = _run(capsys, "show", out, "--json", "--shards", "1")
    document = _json(text)
    assert document["schema"] == 1 and document["digest"] == digest
    assert (document["rows"], document["shards"], document["bytes"]) == (12, 12, 12 * 10240)
    assert [f["name"] for f in document["fields"]] == ["cls", "jpg", "__key__"]
    assert document["shards_listed"][0]["uri"].endswith("/x-0.tar") and len(document["shards_listed"]) == 1


def test_build_options_and_warnings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("1.a.jpg", b"1"), ("noext", b"")])
    status, text, errors = _build(
        capsys, path, tmp_path / "m", "--json", "--split", "last", "--fast-id", "--format", "tar"
    )
    document = _json(text)
    assert status == 0 and document["file"] == str(tmp_path / "m") and len(document["warnings"]) == 1
    assert errors.startswith("feedline: warning: ") and "noext" in errors
    shard = Manifest.load(tmp_path / "m").shards[0]
    assert shard.format == "tar-last" and shard.content_id.startswith("etag:")


def test_several_files_as_the_shell_expands_them(
    capsys: pytest.CaptureFixture[str], shards: Path, tmp_path: Path
) -> None:
    files = [str(shards / f"x-{n}.tar") for n in (3, 1)]
    status = main(["manifest", "build", *files, "--name", "a", "--version", "1", "-o", str(tmp_path / "m")])
    assert status == 0 and [s.uri[-7:] for s in Manifest.load(tmp_path / "m").shards] == ["x-3.tar", "x-1.tar"]
    capsys.readouterr()


def test_labels_from_another_manifest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for split, names in (("train", "abc"), ("val", "c")):
        for name in names:
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "x.png").write_bytes(b"p")
    assert _build(capsys, tmp_path / "train", tmp_path / "t")[0] == 0
    assert _build(capsys, tmp_path / "val", tmp_path / "v", "--labels-from", str(tmp_path / "t"))[0] == 0
    assert Manifest.load(tmp_path / "v").labels == {"label": {"a": 0, "b": 1, "c": 2}}


def test_diff(capsys: pytest.CaptureFixture[str], shards: Path, tmp_path: Path) -> None:
    _build(capsys, shards, tmp_path / "a")
    (shards / "x-3.tar").unlink()
    write_tar(shards / "x-4.tar", [("new.cls", b"1"), ("new.jpg", b"q"), ("new2.cls", b"1"), ("new2.jpg", b"q")])
    write_tar(shards / "x-99.tar", [("99.cls", b"9"), ("99.jpg", b"q")])
    _build(capsys, shards, tmp_path / "b")
    status, text, _ = _run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--json")
    document = _json(text)
    assert status == 0 and document["schema"] == 1 and document["same"] is False
    rows = {
        part: (document[part]["shards"], document[part]["rows"]) for part in ("added", "removed", "changed", "shared")
    }
    assert rows == {"added": (1, 1), "removed": (1, 1), "changed": (1, 2), "shared": (10, 10)}
    assert document["added"]["bytes"] == 10240
    status, text, _ = _run(capsys, "diff", tmp_path / "a", tmp_path / "a")
    assert status == 0 and "same digest" in text


def test_verify(capsys: pytest.CaptureFixture[str], shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "m"
    _build(capsys, shards, out)
    assert _run(capsys, "verify", out)[0] == 0
    assert _run(capsys, "verify", out, "--content")[0] == 0
    (shards / "x-0.tar").unlink()
    data = bytearray((shards / "x-1.tar").read_bytes())
    data[600] ^= 1
    (shards / "x-1.tar").write_bytes(bytes(data))
    status, text, _ = _run(capsys, "verify", out)
    assert status == 1 and "x-0.tar" in text and "1 of 12 shards" in text
    status, text, _ = _run(capsys, "verify", out, "--content", "--json")
    document = _json(text)
    assert status == 1 and document["ok"] is False
    assert [(p["ordinal"], p["what"]) for p in document["problems"]] == [(0, "missing"), (1, "content")]


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        ((), 2, "ACTION"),
        (("show",), 2, "FILE"),
        (("show", "none.parquet"), 2, "none.parquet"),
        (("build", "none.tar", "--name", "a", "--version", "1", "-o", "x"), 1, "none.tar"),
        (("build", "none.tar", "--name", "a/b", "--version", "1", "-o", "x"), 2, "a/b"),
        (("build", "none.tar", "--name", "a", "--version", "1", "-o", "x", "--format", "zip"), 2, "zip"),
        (("build", "none.tar", "--name", "a"), 2, "--version"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], status: int, words: str
) -> None:
    found, text, errors = _run(capsys, *argv)
    assert (found, text) == (status, "") and words in errors and errors.count("\n") == 1
    found, text, errors = _run(capsys, *argv, "--json")
    assert found == status and set(_json(errors)["error"]) == {"code", "message", "remedy"}


def test_registering_needs_an_address(capsys: pytest.CaptureFixture[str], shards: Path, tmp_path: Path) -> None:
    _build(capsys, shards, tmp_path / "m")
    status, _, errors = _run(capsys, "register", tmp_path / "m")
    assert status == 2 and "no dispatcher address" in errors
    status, _, errors = _run(capsys, "register", tmp_path / "m", "--dispatcher", "127.0.0.1:1", "--timeout", "300ms")
    assert status == 1 and "127.0.0.1:1" in errors
