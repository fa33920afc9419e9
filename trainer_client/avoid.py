"""Where not to read for a while: workers that broke or went silent, workers on which one shard failed, and, where there
is a choice, slow ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from manifests.wire import messages as m

#: seconds for which a slow worker is the last choice, first and largest
_SLOW_FOR = (1.0, 16.0)
#: seconds for which a worker is left alone though there is no other one that could be asked
_ALONE = 1.0


class Avoided:
    """Workers to leave alone. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: dict[str, tuple[float, float]] = {}  # since, until
        self._pairs: dict[tuple[str, int], float] = {}
        self._slow: dict[str, tuple[float, float]] = {}

    def __repr__(self) -> str:
        return f"Avoided({', '.join(sorted(self.workers()))})"

    def worker(self, worker: str, seconds: float) -> None:
        """Do not read from ``worker`` for a while."""
        now = time.monotonic()
        with self._lock:
            self._workers[worker] = now, now + seconds

    def only(self, workers: Iterable[str]) -> None:
        """There are no others, and they gave a sign of life to the dispatcher: they are left alone for a moment only."""
        with self._lock:
            for worker in workers:
                if worker in self._workers:
                    since, until = self._workers[worker]
                    self._workers[worker] = since, min(until, since + _ALONE)

    def shard(self, worker: str, shard: int, seconds: float) -> None:
        """Do not read ``shard`` from ``worker`` for a while."""
        now = time.monotonic()
        with self._lock:
            self._pairs = {pair: until for pair, until in self._pairs.items() if until > now}
            self._pairs[worker, shard] = now + seconds

    def slow(self, worker: str) -> None:
        """Another worker was faster with the rows ``worker`` had been asked for: the others are asked first for a
        while, longer each time."""
        with self._lock:
            _, seconds = self._slow.get(worker, (0.0, _SLOW_FOR[0]))
            self._slow[worker] = (time.monotonic() + seconds, min(2 * seconds, _SLOW_FOR[1]))

    def well(self, worker: str) -> None:
        """``worker`` did what it was asked for."""
        with self._lock:
            self._slow.pop(worker, None)

    def workers(self) -> set[str]:
        """Workers to leave alone now."""
        now = time.monotonic()
        with self._lock:
            return {worker for worker, (_, until) in self._workers.items() if until > now}

    def usable(self, workers: Iterable[m.WorkerRef], shard: int) -> list[m.WorkerRef]:
        """Those of ``workers`` that ``shard`` may be read from now, in their order; slow ones only if all are."""
        now = time.monotonic()
        with self._lock:
            found = [
                w
                for w in workers
                if self._workers.get(w.id, (0.0, 0.0))[1] <= now and self._pairs.get((w.id, shard), 0.0) <= now
            ]
            return [w for w in found if self._slow.get(w.id, (0.0, 0.0))[0] <= now] or found
