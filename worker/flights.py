"""Work that several threads want at once, done once: the first does it, the others wait for its result."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from manifests.errors import FeedlineError, WaitTimeout

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Flight(Generic[V]):
    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: V | None = None
        self.error: BaseException | None = None


class SingleFlight(Generic[K, V]):
    """Results are not kept: keeping is the caller's business. A failure reaches all who waited."""

    def __init__(self, what: str, timeout: float) -> None:
        self._what = what
        self._timeout = timeout
        self._lock = threading.Lock()
        self._flights: dict[K, _Flight[V]] = {}

    def __repr__(self) -> str:
        return f"SingleFlight({self._what}, {len(self._flights)} under way)"

    def do(self, key: K, work: Callable[[], V]) -> V:
        """``work()``, or the result of the thread that is doing it for ``key`` already.

        Raises:
            WaitTimeout: the other thread took longer than the timeout.
        """
        with self._lock:
            flight = self._flights.get(key)
            mine = flight is None
            if flight is None:
                flight = self._flights[key] = _Flight()
        if mine:
            return self._do(key, flight, work)
        if not flight.done.wait(self._timeout):
            raise WaitTimeout(f"{self._what} {key} took more than {self._timeout:.0f} s")
        if flight.error is not None:
            raise again(flight.error)
        return flight.value  # type: ignore[return-value]

    def _do(self, key: K, flight: _Flight[V], work: Callable[[], V]) -> V:
        try:
            flight.value = work()
            return flight.value
        except BaseException as error:
            flight.error = error
            raise
        finally:
            with self._lock:
                del self._flights[key]
            flight.done.set()


def again(error: BaseException) -> BaseException:
    """The error for another thread: an object of its own, because a traceback belongs to one thread."""
    return copy.copy(error) if isinstance(error, FeedlineError) else error
