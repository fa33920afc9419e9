"""Fair threads."""

from __future__ import annotations

import threading

from worker.pool import FairPool


def test_lanes_take_turns() -> None:
    pool = FairPool(1, "test")
    order: list[str] = []
    started, release, done = threading.Event(), threading.Event(), threading.Event()
    first, second, third = pool.lane(), pool.lane(), pool.lane()

    def gate() -> None:
        started.set()
        release.wait(10)

    first.submit(gate)
    started.wait(5)
    first.submit(*[lambda i=i: order.append(f"a{i}") for i in range(4)])  # type: ignore[misc]
    second.submit(*[lambda i=i: order.append(f"b{i}") for i in range(2)])  # type: ignore[misc]
    third.submit(lambda: order.append("c0"))
    release.set()
    last = pool.lane()
    while not done.is_set():
        last.submit(lambda: done.set() if len(order) == 7 else None)
        done.wait(0.01)
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    assert pool.close()


def test_a_lane_runs_no_more_than_its_limit() -> None:
    pool = FairPool(4, "test")
    running, most, left = 0, 0, threading.Semaphore(0)
    lock = threading.Lock()
    gate = threading.Barrier(2)

    def task() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        gate.wait(10)
        with lock:
            running -= 1
        left.release()

    lane = pool.lane(limit=2)
    lane.submit(*[task] * 8)
    for _ in range(8):
        assert left.acquire(timeout=10)
    assert most == 2
    assert pool.close()


def test_closed_lanes_and_failing_tasks(caplog: object) -> None:
    pool = FairPool(1, "test")
    started, release, after = threading.Event(), threading.Event(), threading.Event()
    lane, other = pool.lane(), pool.lane()

    def fails() -> None:
        started.set()
        release.wait(10)
        raise ValueError("x")

    lane.submit(fails)
    started.wait(5)
    ran: list[int] = []
    lane.submit(lambda: ran.append(1))
    lane.close()
    lane.submit(lambda: ran.append(2))
    other.submit(after.set)
    release.set()
    assert after.wait(5) and not ran
    assert pool.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("test-")]
