"""The store folder as several dispatchers share it."""

import logging

import pytest
from core_bench import make_manifest

from dispatcher import files as files_module
from dispatcher.files import Files
from manifests.errors import ProtocolError
from manifests.manifest import Manifest, Shard


def moved(manifest: Manifest, folder: str) -> Manifest:
    shards = [
        Shard(s.ordinal, s.uri.replace("/data/", folder), s.format, s.rows, s.bytes, s.content_id)
        for s in manifest.shards
    ]
    return Manifest.from_shards(manifest.name, manifest.version, list(manifest.fields), shards)


def test_data_that_another_dispatcher_was_told_to_be_elsewhere_is_found_there(tmp_path, monkeypatch, caplog):
    """A standby that led before must not go on with the places it knew then."""
    monkeypatch.setattr(files_module, "LOOK", 0.0)
    first, second = Files(tmp_path), Files(tmp_path)
    manifest = make_manifest([3, 5])
    digest = manifest.digest
    first.store_manifest(digest, manifest.to_bytes())
    for one in (first, second):
        assert one.manifest(digest).shards[1].uri == one.shard(digest, 1).uri == "/data/photos-1.tar"
    there = moved(manifest, "/moved/")
    assert there.digest == digest
    with caplog.at_level(logging.WARNING, "dispatcher.files"):
        second.store_manifest(digest, there.to_bytes())
    assert "/moved/photos-0.tar instead of /data/photos-0.tar" in caplog.text
    for one in (first, second):
        assert one.manifest(digest).shards[1].uri == one.shard(digest, 1).uri == "/moved/photos-1.tar"
        assert one.has_manifest(digest, there.locations) and not one.has_manifest(digest, manifest.locations)


def test_a_folder_that_is_away_for_a_moment_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "LOOK", 0.0)
    files = Files(tmp_path)
    manifest = make_manifest([3, 5])
    files.store_manifest(manifest.digest, manifest.to_bytes())
    place = next((tmp_path / "manifests").glob("*.parquet"))
    place.rename(tmp_path / "away")
    assert files.manifest(manifest.digest).rows == 8
    (tmp_path / "away").rename(place)
    assert files.manifest(manifest.digest).rows == 8


def test_a_damaged_manifest_is_mended_by_registering_it_again(tmp_path):
    manifest = make_manifest([3, 5])
    Files(tmp_path).store_manifest(manifest.digest, manifest.to_bytes())
    place = next((tmp_path / "manifests").glob("*.parquet"))
    place.write_bytes(b"not a manifest")
    files = Files(tmp_path)
    with pytest.raises(ProtocolError):
        files.manifest(manifest.digest)
    files.store_manifest(manifest.digest, manifest.to_bytes())
    assert files.manifest(manifest.digest).rows == 8


def test_the_file_is_looked_at_once_a_second_only(tmp_path, monkeypatch):
    files = Files(tmp_path)
    manifest = make_manifest([3, 5])
    files.store_manifest(manifest.digest, manifest.to_bytes())
    monkeypatch.setattr(Files, "_file", lambda self, digest: pytest.fail("it was looked at"))
    for _ in range(100):
        files.manifest(manifest.digest)
