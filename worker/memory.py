"""One budget of bytes for everything a worker holds: rows in the making, rows waiting to be sent, cached blocks.

Rules, so that nothing waits for ever:
- Rows for clients ("queue") may take at most half of the budget, so a slow client never starves the fetching of blocks.
- A request made with ``first=True`` always gets through, even over the budget: it is the one unit a read needs to move.
- Cached blocks are given back when somebody else needs the room (reclaimers), oldest first.
- All other requests wait for room, at most their ``timeout``, and then raise ``WaitTimeout`` with their reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from manifests.errors import WaitTimeout
from manifests.units import format_size

#: seconds between looks at ``cancelled`` while waiting
_LOOK = 0.1

#: frees about that many bytes and says how many it freed; called without any lock of the budget held
Reclaimer = Callable[[int], int]


class Cancelled(Exception):
    """The one who waited is gone."""


class Budget:
    """See the module. Safe to use from any thread."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._used = {"queue": 0, "cache": 0, "index": 0}
        self._over = 0
        self._changed = threading.Condition()
        self._reclaimers: list[Reclaimer] = []

    def __repr__(self) -> str:
        used = ", ".join(f"{kind} {format_size(size)}" for kind, size in self._used.items())
        return f"Budget({format_size(self.total)}: {used})"

    @property
    def used(self) -> int:
        """Bytes reserved now."""
        with self._changed:
            return sum(self._used.values())

    @property
    def overdrafts(self) -> int:
        """How often a request went through without room."""
        return self._over

    def used_by(self, kind: str) -> int:
        """Bytes reserved now for "queue" (rows), "cache" (blocks) or "index" (row indexes)."""
        with self._changed:
            return self._used[kind]

    def add_reclaimer(self, reclaimer: Reclaimer) -> None:
        """Have ``reclaimer`` asked for room before anybody waits. Called while the worker is put together."""
        self._reclaimers.append(reclaimer)

    def limit(self, kind: str) -> int:
        """Most bytes that ``kind`` may take."""
        return self.total // 2 if kind == "queue" else self.total

    def try_reserve(self, size: int, kind: str) -> Reservation | None:
        """``size`` bytes if there is room for them now or after reclaiming, else None."""
        while not self._take(size, kind, False):
            if not self._reclaim(size, kind):
                return None
        return Reservation(self, size, kind)

    def reserve(
        self,
        size: int,
        kind: str,
        reason: str,
        timeout: float,
        *,
        first: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> Reservation:
        """``size`` bytes, waiting for room.

        Raises:
            WaitTimeout: no room within ``timeout`` seconds. Cancelled: ``cancelled()`` said so meanwhile.
        """
        deadline = time.monotonic() + timeout
        while True:
            got = self.try_reserve(size, kind)
            if got is not None:
                return got
            if first and self._take(size, kind, True):
                return Reservation(self, size, kind)
            if cancelled is not None and cancelled():
                raise Cancelled(reason)
            left = deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeout(
                    f"no room for {format_size(size)} within {timeout:.0f} s",
                    cause=f"{reason}; {self!r}",
                    remedy="give the worker more with --memory",
                )
            with self._changed:
                if not self._fits(size, kind):
                    self._changed.wait(min(left, _LOOK))

    def changed(self) -> None:
        """Wake those who wait: something became reclaimable."""
        with self._changed:
            self._changed.notify_all()

    def _fits(self, size: int, kind: str) -> bool:
        """A request larger than its limit fits when its kind holds nothing else."""
        used = sum(self._used.values())
        within = self._used[kind] + size <= self.limit(kind) or not self._used[kind]
        return within and (used + size <= self.total or not used)

    def _take(self, size: int, kind: str, force: bool) -> bool:
        with self._changed:
            fits = self._fits(size, kind)
            if not fits and not force:
                return False
            self._over += not fits
            self._used[kind] += size
            return True

    def _give(self, size: int, kind: str) -> None:
        with self._changed:
            self._used[kind] -= size
            if size > 0:
                self._changed.notify_all()

    def _reclaim(self, size: int, kind: str) -> bool:
        with self._changed:
            if self._used[kind] and self._used[kind] + size > self.limit(kind) and kind != "cache":
                return False
            need = sum(self._used.values()) + size - self.total
        if need <= 0:
            return True  # room came meanwhile
        return any(reclaimer(need) > 0 for reclaimer in self._reclaimers)


class Reservation:
    """Bytes taken from a budget; give them back with ``release`` (twice is no harm) or as a context manager."""

    def __init__(self, budget: Budget, size: int, kind: str) -> None:
        self._budget = budget
        self._kind = kind
        self._lock = threading.Lock()
        self._size = size

    def __repr__(self) -> str:
        return f"Reservation({format_size(self._size)} {self._kind})"

    @property
    def size(self) -> int:
        """Bytes held, 0 after ``release``."""
        return self._size

    def resize(self, size: int) -> None:
        """Hold ``size`` bytes from now on. Growing goes through at once: the memory is taken already."""
        with self._lock:
            if self._size:
                grown, self._size = size - self._size, size
                self._budget._give(-grown, self._kind)

    def release(self) -> None:
        """Give everything back."""
        with self._lock:
            size, self._size = self._size, 0
        if size:
            self._budget._give(size, self._kind)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
