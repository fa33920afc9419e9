"""Shards by ordinal are those of the columns, however these are cut into chunks."""

import pickle

import numpy as np
import pyarrow as pa
import pytest

from manifests import Field, Manifest
from manifests.shards import Shard


def manifest_of(count: int, chunk: int) -> Manifest:
    rows = [
        Shard(n, f"/data/ü{n}.tar", "tar" if n % 3 else "parquet", n, 10 * n, f"blake3:{n:064x}") for n in range(count)
    ]
    whole = Manifest.from_shards("d", "1", [Field("x", "scalar", "int64")], rows)
    parts = [whole.table.slice(at, chunk) for at in range(0, count, chunk)]
    table = pa.concat_tables(parts) if parts else whole.table
    return Manifest("d", "1", whole.fields, {}, table)


@pytest.mark.parametrize(("count", "chunk"), [(0, 1), (1, 1), (7, 2), (100, 33), (100, 1000)])
def test_one_by_one_as_all_at_once(count, chunk):
    shards = manifest_of(count, chunk).shards
    every = list(shards)
    assert [shards[n] for n in range(count)] == every == [shards[n - count] for n in range(count)]
    assert [shard.ordinal for shard in every] == list(range(count))
    for start, stop in ((0, count), (count // 3, count // 2), (count // 2, count), (count, count)):
        part = shards[start:stop]
        assert [part[n] for n in range(len(part))] == every[start:stop] == list(part)
    assert list(shards[::2]) == every[::2]
    for outside in (count, -count - 1):
        with pytest.raises(IndexError):
            shards[outside]


def test_a_manifest_whose_shards_were_looked_at_can_be_pickled():
    manifest = manifest_of(10, 3)
    assert manifest.shards[4].uri == "/data/ü4.tar"
    again = pickle.loads(pickle.dumps(manifest))
    assert list(again.shards) == list(manifest.shards) and again.digest == manifest.digest
    assert np.array_equal(again.first_ids, manifest.first_ids)
