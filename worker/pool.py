"""Threads shared fairly: each read has a lane, and free threads take one task from each lane in turn."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger("worker.pool")

Task = Callable[[], None]


class Lane:
    """Tasks of one read, started in order, at most ``limit`` at once."""

    def __init__(self, pool: FairPool, limit: int) -> None:
        self._pool = pool
        self._limit = limit
        self._tasks: deque[Task] = deque()
        self._running = 0
        self._queued = False  # waits for its turn
        self._closed = False

    def __repr__(self) -> str:
        return f"Lane({len(self._tasks)} waiting, {self._running} running)"

    def submit(self, *tasks: Task) -> None:
        """Queue tasks; after ``close`` they are dropped. A task must not raise."""
        with self._pool._changed:
            if self._closed:
                return
            self._tasks.extend(tasks)
            self._pool._ready(self)

    def close(self) -> None:
        """Drop what has not begun; does not wait for what has."""
        with self._pool._changed:
            self._closed = True
            self._tasks.clear()


class FairPool:
    """``threads`` threads named ``name-N``."""

    def __init__(self, threads: int, name: str) -> None:
        self.name = name
        self._changed = threading.Condition()
        self._turn: deque[Lane] = deque()
        self._closed = False
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"FairPool({self.name}, {len(self._threads)} threads, {len(self._turn)} lanes in turn)"

    def lane(self, limit: int = 1 << 30) -> Lane:
        """A new lane."""
        return Lane(self, limit)

    def close(self, timeout: float = 5.0) -> bool:
        """End the threads once their task is done; True if all ended within ``timeout`` seconds."""
        with self._changed:
            self._closed = True
            self._turn.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _ready(self, lane: Lane) -> None:
        """Let ``lane`` wait for its turn if it may start a task; the lock is held."""
        if lane._tasks and lane._running < lane._limit and not lane._queued and not self._closed:
            lane._queued = True
            self._turn.append(lane)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._turn and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                lane = self._turn.popleft()
                lane._queued = False
                if not lane._tasks:
                    continue
                task = lane._tasks.popleft()
                lane._running += 1
                self._ready(lane)
            try:
                task()
            except Exception:
                log.exception("a task of %s failed", self.name)
            with self._changed:
                lane._running -= 1
                self._ready(lane)
