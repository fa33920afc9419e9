"""Which rows of a chunk go into which read."""

from __future__ import annotations

import numpy as np
import pytest

from manifests.wire.messages import WorkerRef
from trainer_client.cutting import Cut, Source, cut, stretch_rows

WORKERS = tuple(WorkerRef(id=f"w{n}", address=f"127.0.0.1:{n}") for n in range(3))


def source(worker: int, shard: int, **more: object) -> Source:
    return Source((WORKERS[worker],), b"grant %d" % shard, **more)  # type: ignore[arg-type]


def rows_of(cuts: list[Cut], shards: np.ndarray) -> list[int]:
    """All offsets; every one must be read under the grant of its own shard."""
    for one in cuts:
        assert [one.grants[i] for i in one.which.tolist()] == [b"grant %d" % s for s in shards[one.offsets].tolist()]
        assert (np.diff(one.offsets) > 0).all()
    return sorted(offset for one in cuts for offset in one.offsets.tolist())


def test_rows_go_to_the_worker_of_their_shard_and_the_others_wait() -> None:
    """One read per worker holds the rows of all its shards in order; rows without a source are given back."""
    shards = np.array([5, 3, 5, 9, 3, 7, 9, 5], np.int64)
    offsets = np.arange(8, dtype=np.int64)
    cuts, waiting = cut(offsets, shards, offsets, {5: source(0, 5), 3: source(1, 3), 9: source(0, 9)}, 100)
    assert rows_of(cuts, shards) == [0, 1, 2, 3, 4, 6, 7]
    assert waiting.tolist() == [5]
    assert {one.worker.id: one.offsets.tolist() for one in cuts} == {"w0": [0, 2, 3, 6, 7], "w1": [1, 4]}


def test_offsets_need_not_begin_at_zero() -> None:
    """What is left of a chunk is cut as a whole chunk is."""
    shards = np.repeat(np.arange(4, dtype=np.int64), 10)
    offsets = np.array([11, 12, 25, 39], np.int64)
    cuts, waiting = cut(offsets, shards[offsets], offsets % 10, {n: source(n % 2, n) for n in range(4)}, 100)
    assert rows_of(cuts, shards) == [11, 12, 25, 39]
    assert not len(waiting)


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_a_read_has_no_more_rows_than_the_limit(limit: int) -> None:
    shards = np.arange(50, dtype=np.int64) % 7
    offsets = np.arange(50, dtype=np.int64)
    cuts, _ = cut(offsets, shards, offsets, {n: source(n % 3, n) for n in range(7)}, limit)
    assert rows_of(cuts, shards) == list(range(50))
    assert max(len(one.offsets) for one in cuts) <= limit


def test_a_suspect_shard_is_read_alone() -> None:
    """So that an error of the read is an error of that shard."""
    shards = np.array([0, 1, 2, 1, 0], np.int64)
    offsets = np.arange(5, dtype=np.int64)
    cuts, _ = cut(offsets, shards, offsets, {0: source(0, 0), 1: source(0, 1, alone=True), 2: source(0, 2)}, 100)
    assert sorted(one.offsets.tolist() for one in cuts) == [[0, 2, 4], [1, 3]]
    assert rows_of(cuts, shards) == [0, 1, 2, 3, 4]


def test_a_big_shard_is_read_in_stretches_from_all_its_workers() -> None:
    """The worker of a row depends on its place in the shard alone, so the same bytes always come from the same cache."""
    rows = np.arange(1000, dtype=np.int64)
    shards = np.zeros(1000, np.int64)
    big = {0: Source(WORKERS, b"grant 0", stretch=64)}
    cuts, _ = cut(rows, shards, rows, big, 10_000)
    assert rows_of(cuts, shards) == rows.tolist()
    worker = {int(rows[o]): one.worker.id for one in cuts for o in one.offsets}
    assert all(worker[row] == f"w{row // 64 % 3}" for row in range(1000))
    some = np.array([3, 70, 500, 999], np.int64)
    again, _ = cut(np.arange(4), shards[:4], some, big, 10_000)
    assert all(worker[int(some[o])] == one.worker.id for one in again for o in one.offsets)


def test_stretches_are_for_shards_above_64_mib() -> None:
    assert stretch_rows(1 << 14, 4096) == 0
    assert stretch_rows((1 << 14) + 1, 4096) == 8192
    for size in (1, 100, 4097, 150_000, 40 << 20):
        assert 12 << 20 <= stretch_rows(1 << 40, size) * size <= 40 << 20
