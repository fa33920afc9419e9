"""A loader that lives for many epochs keeps nothing of those that are over."""

from __future__ import annotations

import gc
from pathlib import Path

from cluster import TestCluster
from stored_data import write_tar

import manifests
from manifests.wire import messages as m
from trainer_client import RemoteDataLoader
from trainer_client.books import Books
from trainer_client.chunks import Chunk
from trainer_client.feed import Feed


def test_ended_epochs_leave_nothing_behind(tmp_path: Path) -> None:
    """Case 14: 120 epochs of an endless loader; reports, books, feeds and chunks of the old ones are gone, and etcd's
    database is small."""
    write_tar(tmp_path / "a.tar", [(f"{row}.cls", b"1") for row in range(8)])
    with TestCluster(workers=1) as cluster:
        cluster.register(manifests.build(str(tmp_path), name="long", version="1"))
        with RemoteDataLoader(
            cluster.address, dataset="long", job="long", batch_size=4, epochs=None, timeout=20
        ) as loader:
            for step, _ in enumerate(loader):
                if step == 240:
                    break
            loader._run.reporter.flush(5.0)  # type: ignore[union-attr]
            gc.collect()
            alive = [type(found) for found in gc.get_objects()]
            for kind, most in ((m.EpochProgress, 12), (Books, 4), (Feed, 3), (Chunk, 8)):
                assert alive.count(kind) <= most, f"{alive.count(kind)} {kind.__name__} are left"
        assert cluster.audit("long", 100)["state"] == "complete"
        assert cluster.status()["etcd"]["db_bytes"] < 4 << 20
