"""What status, audit and errors say of a job that stands still, on real processes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from cluster import TestCluster

import manifests
from feedline.commands import audit as audit_command
from feedline.commands.status import jobs_table
from trainer_client import RemoteDataLoader, RemoteDataset
from trainer_client.errors import ShardChanged


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    with TestCluster(workers=2) as found:
        yield found


def make(folder: Path, shards: int = 3) -> manifests.Manifest:
    """Eight rows per shard. No two datasets share content: caches know shards by it."""
    folder.mkdir()
    for number in range(shards):
        rows = range(8 * number, 8 * (number + 1))
        table = pa.table({"x": pa.array(rows, pa.int64()), "of": [folder.name] * 8})
        with pa.OSFile(str(folder / f"{number}.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    return manifests.build(str(folder), name=folder.name, version="1")


def job_of(cluster: TestCluster, name: str) -> dict[str, Any] | None:
    return next((job for job in cluster.status()["jobs"] if job["name"] == name), None)


def waited(cluster: TestCluster, name: str) -> float:
    """Seconds rank 0 of the job has waited, 0.0 when the job is not there."""
    job = job_of(cluster, name)
    return float(job["ranks"][0]["waiting_s"]) if job is not None else 0.0


def test_status_tells_which_rank_has_not_joined(cluster: TestCluster, tmp_path: Path) -> None:
    cluster.register(make(tmp_path / "joining"))
    settings: dict[str, Any] = {"dataset": "joining", "job": "joining", "batch_size": 4, "world_size": 2, "timeout": 20}
    ids: list[list[int]] = [[], []]

    def read(rank: int) -> None:
        with RemoteDataLoader(cluster.address, rank=rank, **settings) as loader:
            ids[rank] = [i for batch in loader for i in batch["__id__"].tolist()]

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(2)]
    threads[0].start()
    try:
        cluster.wait_for("rank 0 waits", lambda: waited(cluster, "joining") > 1)
        document = cluster.status()
        job = next(job for job in document["jobs"] if job["name"] == "joining")
        assert job["state"] == "joining" and [rank["state"] for rank in job["ranks"]] == ["waiting", "absent"]
        assert job["ranks"][0]["waiting_for"] == "rank 1, which has not joined"
        assert "job joining rank 0 waits for rank 1, which has not joined (since " in jobs_table(document)
    finally:
        threads[1].start()
        for thread in threads:
            thread.join(30)
    assert sorted(ids[0] + ids[1]) == list(range(24))
    job = job_of(cluster, "joining")
    assert job is not None and not any(rank["waiting_for"] for rank in job["ranks"])


def test_a_job_that_a_shard_stopped_says_which(cluster: TestCluster, tmp_path: Path) -> None:
    """The error has one remedy, and the audit names the shard though its rows were not passed over."""
    manifest = make(tmp_path / "stopped")
    cluster.register(manifest)
    changed = tmp_path / "stopped" / "1.arrow"
    data = bytearray(changed.read_bytes())
    data[-100] ^= 0xFF
    changed.write_bytes(data)
    settings: dict[str, Any] = {"dataset": "stopped", "job": "stopped", "batch_size": 4, "timeout": 20}
    with (
        RemoteDataLoader(cluster.address, **settings) as loader,
        pytest.raises(ShardChanged, match=r"1\.arrow") as caught,
    ):
        list(loader)
    assert caught.value.remedy == "mend it, or pass on_error='skip'"
    assert str(caught.value).count("(") == 1 and "register the manifest again" not in str(caught.value)
    books = cluster.audit("stopped")
    assert books["state"] == "stopped" and books["quarantined"] == 0
    (shard,) = books["shards"]
    assert (shard["source"], shard["shard"], shard["uri"]) == (0, 1, manifest.shards[1].uri)
    assert shard["code"] == "shard-changed" and "1.arrow" in shard["reason"]
    assert audit_command.verdict(books) == 3
    assert f"  shard 1, {shard['uri']}: shard-changed: {shard['reason']}" in audit_command._text(books).split("\n")


def test_the_dataset_form_acknowledges_and_counts(cluster: TestCluster, tmp_path: Path) -> None:
    cluster.register(make(tmp_path / "wrapped"))
    with RemoteDataset(
        cluster.address, dataset="wrapped", job="wrapped", batch_size=4, ack="manual", timeout=20
    ) as dataset:
        assert dataset.steps_left == len(dataset) == 6
        batches = iter(dataset)
        next(batches)
        next(batches)
        assert dataset.steps_left == 4
        assert cluster.audit("wrapped")["acknowledged"] == 0
        dataset.ack()
        assert cluster.audit("wrapped")["acknowledged"] == 8
        assert set(dataset.stats()) == set(dataset.loader.stats())


def test_each_outage_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However often the loop acknowledges while the dispatcher is away."""
    with TestCluster(workers=1) as cluster:
        cluster.register(make(tmp_path / "outage"))
        with RemoteDataLoader(
            cluster.address, dataset="outage", job="outage", batch_size=4, ack="manual", timeout=30
        ) as loader:
            batches = iter(loader)
            next(batches)
            loader.ack()
            reporter = loader._run.reporter  # type: ignore[union-attr]
            for outage in (1, 2):
                cluster.stop_dispatcher()
                with caplog.at_level(logging.WARNING, "feedline.client"):
                    assert not any(reporter.flush(0.3) for _ in range(3))
                told = [r for r in caplog.records if "acknowledgements were not delivered" in r.message]
                assert len(told) == outage
                cluster.start_dispatcher()
                loader.ack()
            assert sum(1 for _ in batches) == 5
