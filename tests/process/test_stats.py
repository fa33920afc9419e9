"""The figures a loader gives of itself."""

from __future__ import annotations

import time
from pathlib import Path

from cluster import TestCluster
from stored_data import write_tar

import manifests
from trainer_client import RemoteDataLoader


def test_stats_of_a_cold_and_a_hot_job(tmp_path: Path) -> None:
    """The first job reads from storage, the second from the worker's memory; waiting and pauses are told apart."""
    for shard in range(6):
        write_tar(tmp_path / f"{shard}.tar", [(f"{shard}-{row:03d}.bin", bytes([row]) * 2000) for row in range(40)])
    with TestCluster(workers=1) as cluster:
        cluster.register(manifests.build(str(tmp_path), name="stats", version="1"))
        with RemoteDataLoader(cluster.address, dataset="stats", job="cold", batch_size=10, timeout=20) as loader:
            before = loader.stats()
            assert set(before) == {
                "wait_share", "step_s", "rows_per_s", "bytes_per_s", "queue_bytes", "hot_share", "workers",
            }  # fmt: skip
            assert set(before.values()) == {0}
            list(loader)
            cold = loader.stats()
        with RemoteDataLoader(cluster.address, dataset="stats", job="hot", batch_size=10, timeout=20) as loader:
            for step, _ in enumerate(loader):
                if step < 5:
                    time.sleep(0.2)
                    paused = loader.stats()
            hot = loader.stats()
            time.sleep(0.3)
            assert loader.stats()["rows_per_s"] == hot["rows_per_s"], "the clock runs while no pass does"
    assert cold["hot_share"] < 0.9
    assert hot["hot_share"] == 1.0
    assert hot["wait_share"] < 0.5 and paused["wait_share"] < 0.5, "a slow loop is not a wait"
    assert 0 < hot["rows_per_s"] < 240 and hot["step_s"] > 0.04
    assert hot["workers"] == 1
