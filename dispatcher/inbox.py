"""Requests on their way to the driver's thread, each with a place for its answer."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from manifests.errors import DispatcherUnavailable

from . import events

#: requests that may wait at once
SIZE = 4096


@dataclass
class Waiting:
    """A request. ``event``: makes it, on the driver's thread. ``cause``: the id that its log lines carry."""

    event: Callable[..., events.Event]
    cause: str = ""
    future: Future[Any] = field(default_factory=Future)


class Inbox:
    """A bounded queue: put into by any thread, emptied by the driver's."""

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._queue: queue.Queue[Waiting | None] = queue.Queue(size)

    def __len__(self) -> int:
        return self._queue.qsize()

    def put(self, waiting: Waiting, timeout: float) -> None:
        """Raises ``DispatcherUnavailable`` when there is no room within ``timeout`` seconds."""
        try:
            self._queue.put(waiting, timeout=timeout)
        except queue.Full:
            raise DispatcherUnavailable(
                "the dispatcher is overloaded", cause=f"{self._size} requests wait", detail={"retry": True}
            ) from None

    def wake(self) -> None:
        """Have ``gather`` return at once."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # then it has something to return anyway

    def gather(self, most: int, timeout: float) -> list[Waiting]:
        """The next requests, at most so many; [] after ``timeout`` seconds without any."""
        found: list[Waiting] = []
        try:
            item = self._queue.get(timeout=timeout)
            while True:
                if item is not None:
                    found.append(item)
                if item is None or len(found) >= most:
                    break
                item = self._queue.get_nowait()
        except queue.Empty:
            pass
        return found

    def take_all(self) -> list[Waiting]:
        """All that wait now."""
        found: list[Waiting] = []
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return found
            if item is not None:
                found.append(item)
