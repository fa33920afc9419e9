"""``feedline manifest register`` against a real dispatcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster import TestCluster
from stored_data import write_tar

from feedline.cli import main
from manifests import Manifest, build


def test_register_again_and_under_other_content(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first, second = tmp_path / "first.parquet", tmp_path / "second.parquet"
    build(write_tar(tmp_path / "a.tar", [("1.cls", b"1")]), name="d", version="1").save(first)
    build(write_tar(tmp_path / "b.tar", [("2.cls", b"2")]), name="d", version="1").save(second)
    digest = Manifest.load(first).digest
    with TestCluster(workers=1) as cluster:
        where = ["--dispatcher", cluster.address]

        def register(path: Path, *more: str) -> tuple[int, str, str]:
            status = main(["manifest", "register", str(path), *where, *more])
            return status, *capsys.readouterr()

        assert register(first) == (0, f"d@1 {digest}\n", "")
        status, text, _ = register(first, "--json")
        assert status == 0
        assert json.loads(text) == {"schema": 1, "name": "d", "version": "1", "digest": digest, "new": False}
        status, text, errors = register(second)
        assert (status, text) == (1, "") and "registered with other content" in errors
        status, text, errors = register(second, "--json")
        assert status == 1 and "remedy" in json.loads(errors)["error"]
