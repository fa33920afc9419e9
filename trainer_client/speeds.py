"""How fast workers bring rows and how fast the loop takes them. Thread-safe; times come from the caller."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Iterable

from manifests.wire import messages as m

#: seconds a read is taken to need while none has ended
_UNKNOWN = 0.5
#: seconds of the loop's time that count for its pace, about
_MEMORY = 20.0
#: a longer gap between two batches is a pause, not the pace; seconds
_PAUSE = 5.0
#: seconds the loop must have been seen for before its pace is told
_ENOUGH = 0.5


class Speeds:
    """What the reads of one loader showed of the workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[int, float]] = {}
        self._ended: deque[float] = deque(maxlen=64)

    def note(self, worker: str, size: int, seconds: float, *, whole: bool) -> None:
        """A read took ``seconds`` and brought ``size`` bytes; ``whole``: all it was to bring."""
        with self._lock:
            before = self._seen.get(worker, (0, 0.0))
            self._seen[worker] = (before[0] + size, before[1] + seconds)
            if whole:
                self._ended.append(seconds)

    @property
    def usual(self) -> float:
        """Seconds a read usually takes: the median of the last 64."""
        with self._lock:
            return statistics.median(self._ended) if self._ended else _UNKNOWN

    def take(self) -> tuple[m.WorkerSpeed, ...]:
        """What was noted since the last call."""
        with self._lock:
            seen, self._seen = self._seen, {}
        return tuple(m.WorkerSpeed(worker=w, bytes=size, ms=round(s * 1000)) for w, (size, s) in sorted(seen.items()))

    def put_back(self, speeds: Iterable[m.WorkerSpeed]) -> None:
        """These were not delivered."""
        for speed in speeds:
            self.note(speed.worker, speed.bytes, speed.ms / 1000, whole=False)


class Pace:
    """Rows per second the loop takes, lately; pauses of the loop do not count."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._rows = self._seconds = 0.0

    def took(self, rows: int, now: float) -> None:
        """The loop took ``rows`` rows; ``now`` is any steady clock, in seconds."""
        last, self._last = self._last, now
        if last is None:
            return
        if now - last > _PAUSE:
            return
        self._rows += rows
        self._seconds += now - last
        if self._seconds > _MEMORY:
            self._rows, self._seconds = self._rows / 2, self._seconds / 2

    @property
    def rate(self) -> float | None:
        """Rows per second, None: not seen for long enough."""
        return self._rows / self._seconds if self._seconds >= _ENOUGH else None
