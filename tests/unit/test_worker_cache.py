"""The block cache: one fetch per block, pins, eviction, failures."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from manifests.errors import ShardMissing
from worker.cache import BlockCache
from worker.memory import Budget


def filled(value: int):  # type: ignore[no-untyped-def]
    def fetch(out: np.ndarray) -> None:
        out[:] = value

    return fetch


def test_hits_misses_and_eviction_of_the_oldest() -> None:
    cache = BlockCache(Budget(300))
    for number in (0, 1, 2, 0, 3):
        assert cache.copy(("s", number), 100, filled(number), 5, 7).tolist() == [number] * 2
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.evictions, stats.bytes) == (1, 4, 1, 300)
    cache.copy(("s", 0), 100, filled(9), 0, 1)
    assert cache.stats().hits == 2, "block 1 went, not block 0"


def test_a_view_pins_its_block_until_the_last_buffer_goes() -> None:
    budget = Budget(250)
    cache = BlockCache(budget)
    view = cache.view(("s", 0), 100, filled(1), 0, 100)
    data = view.data[10:20]
    del view
    with pytest.raises(ValueError, match="read-only"):
        np.frombuffer(data, np.uint8)[0] = 1
    for number in (1, 2, 3):
        cache.copy(("s", number), 100, filled(number), 0, 1)
    assert cache.pinned() == 1 and data.tolist() == [1] * 10
    cache.drop(lambda key: True)
    assert budget.used == 100, "dropped, but still held by the view"
    del data
    gc.collect()
    assert cache.pinned() == 0 and cache.stats().bytes == 0
    assert budget.used == 0


def test_threads_that_want_one_block_cause_one_fetch() -> None:
    cache = BlockCache(Budget(1000))
    started, release, fetches = threading.Event(), threading.Event(), []

    def fetch(out: np.ndarray) -> None:
        fetches.append(1)
        started.set()
        release.wait(10)
        out[:] = 5

    results: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: results.append(cache.copy(("s", 0), 10, fetch, 0, 3).tolist()))
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    started.wait(5)
    release.set()
    for thread in threads:
        thread.join(5)
    assert results == [[5, 5, 5]] * 5 and len(fetches) == 1


def test_a_failure_reaches_all_and_is_not_kept() -> None:
    budget = Budget(1000)
    cache = BlockCache(budget)
    started, release = threading.Event(), threading.Event()

    def fetch(out: np.ndarray) -> None:
        started.set()
        release.wait(10)
        raise ShardMissing("s is missing", cause="gone")

    errors: list[BaseException] = []

    def want() -> None:
        try:
            cache.copy(("s", 0), 10, fetch, 0, 3)
        except ShardMissing as error:
            errors.append(error)

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait(5)
    release.set()
    for thread in threads:
        thread.join(5)
    assert len(errors) == 4 and {str(error) for error in errors} == {"s is missing: gone"}
    assert budget.used == 0
    assert cache.copy(("s", 0), 10, filled(1), 0, 3).tolist() == [1, 1, 1]


def test_pinned_blocks_that_fill_the_budget_stop_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.cache.blocks.ROOM_TIMEOUT", 0.0)
    budget = Budget(200)
    cache = BlockCache(budget)
    held = [cache.view(("s", number), 100, filled(number), 0, 100) for number in range(2)]
    assert cache.copy(("s", 2), 100, filled(2), 0, 1).tolist() == [2]
    assert budget.overdrafts == 1
    del held
    cache.copy(("s", 3), 100, filled(3), 0, 1)
    assert budget.used <= 200


def test_an_offer_takes_only_free_room() -> None:
    cache = BlockCache(Budget(250))
    data = np.full(100, 7, np.uint8)
    assert cache.offer(("s", 0), data) and cache.offer(("s", 1), data)
    assert not cache.offer(("s", 2), data) and not cache.offer(("s", 1), data)
    data[:] = 0
    assert cache.copy(("s", 0), 100, filled(0), 0, 1).tolist() == [7]
