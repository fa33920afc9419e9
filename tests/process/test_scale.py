"""What the control plane keeps grows with ranks and open grants, not with the shards of a dataset."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import psutil
import pyarrow as pa
import pytest
from cluster import TestCluster

from manifests import Field, Manifest
from manifests.identity import digest
from manifests.wire import codec
from manifests.wire import messages as m


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    with TestCluster(workers=1) as found:
        yield found


def big_manifest(shards: int) -> Manifest:
    """A manifest of shards that are nowhere: the control plane never looks at them."""
    numbers = range(shards)
    table = pa.table(
        {
            "uri": pa.array([f"file:///nowhere/{n:07d}.tar" for n in numbers], pa.large_utf8()),
            "format": pa.array(["tar"] * shards).dictionary_encode(),
            "rows": np.full(shards, 100, np.int64),
            "bytes": np.full(shards, 1 << 20, np.int64),
            "content_id": pa.array([f"blake3:{n:064x}" for n in numbers], pa.large_utf8()),
        }
    )
    return Manifest(f"big-{shards}", "1", (Field("cls", "scalar", "int64"),), {}, table)


def play(cluster: TestCluster, manifest: Manifest) -> tuple[int, int]:
    """Open a job, ask for 100 shards twenty times with acknowledgements between. Growth of (dispatcher's resident
    bytes, etcd's database bytes) while the job runs."""
    dispatcher = psutil.Process(cluster.child("dispatcher-0").pid)
    spec = codec.encode(m.JobSpec(fields=(manifest.fields,), labels=({},)))
    holder = m.Holder(uid="somebody", host="here", pid=1)
    with cluster.client() as client:
        client.register(manifest)
        client.call(m.PutBlob(digest=digest(spec), data=spec), m.Done)
        settings = m.JobSettings(
            sources=(m.Source(digest=manifest.digest),), spec=digest(spec), pipeline="none", batch_size=100
        )
        opened = client.call(
            m.OpenJob(job=manifest.name, rank=0, holder=holder, nonce="n", settings=settings), m.JobOpened
        )
        memory, database = dispatcher.memory_info().rss, cluster.status()["etcd"]["db_bytes"]
        for turn in range(20):
            first = turn * len(manifest.shards) // 20
            wanted = tuple(m.ShardAsk(source=0, shard=first + n) for n in range(min(100, len(manifest.shards) // 20)))
            grants = client.call(
                m.AskGrants(
                    job=manifest.name,
                    generation=opened.generation,
                    rank=0,
                    holder="somebody",
                    epoch=0,
                    shards=wanted,
                    done=tuple(
                        m.ShardAsk(source=0, shard=max(0, n.shard - len(manifest.shards) // 20)) for n in wanted
                    ),
                ),
                m.Grants,
            )
            assert len(grants.grants) == len(wanted), grants.waiting
            taken = (turn * 10,) * 12
            progress = m.EpochProgress(epoch=0, step=turn, acked_step=turn, handed=taken, acked=taken)
            client.call(
                m.Report(
                    job=manifest.name, generation=opened.generation, rank=0, holder="somebody", epochs=(progress,)
                ),
                m.Reported,
            )
        return dispatcher.memory_info().rss - memory, cluster.status()["etcd"]["db_bytes"] - database


def test_a_job_costs_the_same_over_any_number_of_shards(cluster: TestCluster) -> None:
    """2,000 and 200,000 shards: the same job moves etcd's database by about as much, and the dispatcher's memory by no
    more than some megabytes once the manifest is there."""
    few_memory, few_database = play(cluster, big_manifest(2_000))
    many_memory, many_database = play(cluster, big_manifest(200_000))
    assert many_database <= few_database + (256 << 10), (few_database, many_database)
    assert many_memory <= max(few_memory, 0) + (24 << 20), (few_memory, many_memory)
