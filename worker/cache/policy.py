"""Which block goes first: the port for eviction policies, and plain LRU.

A policy is called under the cache's lock: it must be quick and must not call back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Protocol


class Policy(Protocol):
    """Order of eviction. Every key is told once when it comes and once when it goes."""

    def added(self, key: Hashable, size: int) -> None:
        """A block of ``size`` bytes came in."""

    def used(self, key: Hashable) -> None:
        """A block that is there was asked for."""

    def removed(self, key: Hashable) -> None:
        """A block went, evicted or dropped."""

    def victims(self) -> Iterator[Hashable]:
        """Keys in the order they should go; the cache skips those in use and stops when it has enough."""


class Lru:
    """The block not asked for the longest time goes first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Hashable, None] = OrderedDict()

    def added(self, key: Hashable, size: int) -> None:
        self._keys[key] = None

    def used(self, key: Hashable) -> None:
        self._keys.move_to_end(key)

    def removed(self, key: Hashable) -> None:
        del self._keys[key]

    def victims(self) -> Iterator[Hashable]:
        return iter(list(self._keys))
