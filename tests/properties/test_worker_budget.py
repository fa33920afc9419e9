"""Whatever is asked of the budget and the cache, in any order: the sums are right and the limits hold."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from worker.cache import BlockCache
from worker.memory import Budget, Reservation

TOTAL = 1000


class BudgetAndCache(RuleBasedStateMachine):
    """A model: a list of reservations and views that are out, against what the budget says."""

    reservations = Bundle("reservations")
    views = Bundle("views")

    def __init__(self) -> None:
        super().__init__()
        self.budget = Budget(TOTAL)
        self.cache = BlockCache(self.budget)
        self.queued: list[Reservation] = []
        self.out = 0
        self.fetched: list[int] = []

    @rule(target=reservations, size=st.integers(1, 700), first=st.booleans())
    def reserve(self, size: int, first: bool) -> Any:
        before = self.budget.used_by("queue")
        got = (
            self.budget.reserve(size, "queue", "test", 0.0, first=True)
            if first
            else self.budget.try_reserve(size, "queue")
        )
        if got is None:
            assert (before and before + size > TOTAL // 2) or self.budget.used + size > TOTAL
            return None
        if not first and before:
            assert before + size <= TOTAL // 2
            assert self.budget.used <= TOTAL
        self.queued.append(got)
        return got

    @rule(reservation=reservations, size=st.integers(1, 300))
    def resize(self, reservation: Reservation | None, size: int) -> None:
        if reservation is not None:
            reservation.resize(size)

    @rule(reservation=consumes(reservations))
    def release(self, reservation: Reservation | None) -> None:
        if reservation is not None:
            reservation.release()

    def fetch(self, number: int, out: np.ndarray) -> None:
        self.fetched.append(number)
        out[:] = number

    @rule(number=st.integers(0, 15))
    def copy(self, number: int) -> None:
        data = self.cache.copy(("shard", number), 100 + number, lambda out: self.fetch(number, out), 10, 20, first=True)
        assert data.tolist() == [number] * 10

    @rule(target=views, number=st.integers(0, 15))
    def view(self, number: int) -> list[Any]:
        array = self.cache.view(
            ("shard", number), 100 + number, lambda out: self.fetch(number, out), 0, 100, first=True
        )
        return [number, array.data]

    @rule(view=consumes(views))
    def drop_view(self, view: list[Any]) -> None:
        assert view[1].tolist() == [view[0]] * 100
        view.clear()

    @rule()
    def forget(self) -> None:
        self.cache.drop(lambda key: True)
        assert self.cache.stats().blocks == 0

    @rule(number=st.integers(0, 15))
    def offer(self, number: int) -> None:
        evictions = self.cache.stats().evictions
        self.cache.offer(("shard", number), np.full(100 + number, number, np.uint8))
        assert self.cache.stats().evictions == evictions

    @invariant()
    def the_sums_are_right(self) -> None:
        stats = self.cache.stats()
        assert self.budget.used_by("queue") == sum(r.size for r in self.queued)
        assert self.budget.used_by("cache") >= stats.bytes
        assert stats.misses == len(self.fetched)

    def teardown(self) -> None:
        for reservation in self.queued:
            reservation.release()
        self.cache.reclaim(1 << 30)
        stats = self.cache.stats()
        assert stats.bytes == self.budget.used_by("cache") or self.cache.pinned() or stats.blocks == 0
        assert self.budget.used_by("queue") == 0


TestBudgetAndCache = BudgetAndCache.TestCase
TestBudgetAndCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
