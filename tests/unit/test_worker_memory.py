"""The byte budget: who gets through, who waits, and why."""

from __future__ import annotations

import threading

import pytest

from manifests.errors import WaitTimeout
from worker.memory import Budget, Cancelled


def test_reservations_come_and_go() -> None:
    budget = Budget(1000)
    first = budget.try_reserve(400, "cache")
    assert first is not None and budget.used == 400
    assert budget.try_reserve(601, "cache") is None
    first.resize(100)
    with budget.reserve(900, "cache", "test", 0.0):
        assert budget.used == 1000
    first.release()
    first.release()
    first.resize(50)
    assert budget.used == 0


def test_queues_take_at_most_half() -> None:
    budget = Budget(1000)
    held = budget.try_reserve(400, "queue")
    assert held is not None
    assert budget.try_reserve(101, "queue") is None
    assert budget.try_reserve(600, "cache") is not None


def test_the_first_always_gets_through() -> None:
    budget = Budget(100)
    held = [budget.reserve(90, "queue", "unit", 0.0, first=True) for _ in range(3)]
    assert budget.used == 270 and budget.overdrafts == 2
    for reservation in held:
        reservation.release()
    assert budget.used == 0
    assert budget.try_reserve(5000, "cache") is not None, "alone, even what is larger than everything"


def test_a_wait_ends_with_its_reason() -> None:
    budget = Budget(100)
    budget.try_reserve(100, "cache")
    with pytest.raises(WaitTimeout, match=r"block 7.*--memory"):
        budget.reserve(10, "cache", "block 7", 0.0)
    with pytest.raises(Cancelled):
        budget.reserve(10, "cache", "block 7", 10.0, cancelled=lambda: True)


def test_a_waiter_gets_what_is_released() -> None:
    budget = Budget(100)
    held = budget.try_reserve(100, "cache")
    assert held is not None
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(budget.reserve(60, "cache", "test", 30.0).size))
    thread.start()
    held.release()
    thread.join(5)
    assert got == [60] and budget.used == 60


def test_reclaimers_are_asked_before_anybody_waits() -> None:
    budget = Budget(100)
    blocks = [budget.try_reserve(25, "cache") for _ in range(4)]

    def reclaim(size: int) -> int:
        freed = 0
        while blocks and freed < size:
            block = blocks.pop(0)
            assert block is not None
            freed += block.size
            block.release()
        return freed

    budget.add_reclaimer(reclaim)
    assert budget.try_reserve(40, "queue") is not None
    assert len(blocks) == 2 and budget.used == 90
    assert budget.try_reserve(20, "queue") is None, "queues are over their half, which no block can change"
    assert len(blocks) == 2
