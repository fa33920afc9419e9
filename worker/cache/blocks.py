"""Raw shard blocks in memory, keyed by content, shared by all jobs and kept when they end.

Threads that want the same block at once cause one fetch; its failure reaches all of them and is not kept. A block in use
(pinned) is never evicted; every other one may be, whenever the budget needs room.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from manifests.errors import WaitTimeout
from manifests.units import format_size

from ..flights import again
from ..memory import Budget, Reservation
from .policy import Lru, Policy

U8 = npt.NDArray[np.uint8]

#: seconds a thread waits for a block that another one fetches
FETCH_TIMEOUT = 120.0
#: seconds a fetch waits for room before it goes over the budget; only pinned blocks can make it wait, and they are
#: given back as units end
ROOM_TIMEOUT = 1.0


class _View(np.ndarray):
    """A part of a block that can be weakly referenced: when the last buffer over it goes, the block is unpinned."""


class _Block:
    __slots__ = ("data", "held", "pins", "reservation")

    def __init__(self, data: U8, reservation: Reservation) -> None:
        self.data = data
        self.pins = 0
        #: whether the cache still knows it
        self.held = False
        self.reservation = reservation


class _Fetch:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the worker started, and what is held now (bytes, blocks)."""

    hits: int
    misses: int
    evictions: int
    bytes: int
    blocks: int


class BlockCache:
    """See the module."""

    def __init__(self, budget: Budget, policy: Policy | None = None) -> None:
        self._budget = budget
        self._policy: Policy = policy or Lru()
        self._lock = threading.Lock()
        self._blocks: dict[Hashable, _Block] = {}
        self._fetches: dict[Hashable, _Fetch] = {}
        #: blocks whose view went; a finalizer may run inside any code, so it takes no lock and only notes the block here
        self._gone: deque[_Block] = deque()
        self._hits = self._misses = self._evictions = self._bytes = 0
        budget.add_reclaimer(self.reclaim)

    def __repr__(self) -> str:
        s = self.stats()
        return f"BlockCache({s.blocks} blocks, {format_size(s.bytes)}, {s.hits} hits, {s.misses} misses)"

    def stats(self) -> CacheStats:
        """The counters now."""
        self._sweep()
        with self._lock:
            return CacheStats(self._hits, self._misses, self._evictions, self._bytes, len(self._blocks))

    def pinned(self) -> int:
        """Blocks in use now."""
        self._sweep()
        with self._lock:
            return sum(block.pins > 0 for block in self._blocks.values())

    def copy(
        self, key: Hashable, size: int, fetch: Callable[[U8], None], begin: int, end: int, *, first: bool = False
    ) -> U8:
        """Bytes ``[begin, end)`` of the block, as a copy. Arguments as for ``view``."""
        block = self._pin(key, size, fetch, first)
        try:
            return block.data[begin:end].copy()
        finally:
            self._unpin(block)

    def view(
        self,
        key: Hashable,
        size: int,
        fetch: Callable[[U8], None],
        begin: int,
        end: int,
        *,
        first: bool = False,
    ) -> U8:
        """Bytes ``[begin, end)`` of the block, without a copy; it stays in memory while the array or a buffer over it lives.

        Args:
            key: content and number of the block.
            size: bytes of the whole block.
            fetch: fills an array of ``size`` bytes; called once for all threads that wait for this block.
            first: never wait for room.
        """
        block = self._pin(key, size, fetch, first)
        view: U8 = block.data[begin:end].view(_View)
        view.flags.writeable = False
        weakref.finalize(view, self._gone.append, block).atexit = False
        return view

    def drop(self, match: Callable[[Hashable], bool]) -> None:
        """Forget the blocks whose key matches; those in use live on, unseen, until they are given back."""
        with self._lock:
            keys = [key for key in self._blocks if match(key)]
            gone = [self._remove(key) for key in keys]
        for block in gone:
            if not block.pins:
                block.reservation.release()

    def reclaim(self, size: int) -> int:
        """Evict about ``size`` bytes of blocks not in use; bytes freed."""
        self._sweep()
        gone: list[_Block] = []
        freed = 0
        with self._lock:
            for key in self._policy.victims():
                if freed >= size:
                    break
                if not self._blocks[key].pins:
                    block = self._remove(key)
                    freed += len(block.data)
                    gone.append(block)
            self._evictions += len(gone)
        for block in gone:
            block.reservation.release()
        return freed

    def offer(self, key: Hashable, data: U8) -> bool:
        """Keep a copy of ``data`` as a block if there is room without evicting anything; says whether it did."""
        if self._budget.used + data.nbytes > self._budget.total:
            return False
        reservation = self._budget.try_reserve(data.nbytes, "cache")
        if reservation is None:
            return False
        with self._lock:
            if key not in self._blocks and key not in self._fetches:
                self._add(key, _Block(data.copy(), reservation))
                return True
        reservation.release()
        return False

    # -- inside ----------------------------------------------------------------------------------------------------

    def _add(self, key: Hashable, block: _Block) -> None:
        self._blocks[key] = block
        block.held = True
        self._bytes += len(block.data)
        self._policy.added(key, len(block.data))

    def _remove(self, key: Hashable) -> _Block:
        block = self._blocks.pop(key)
        block.held = False
        self._bytes -= len(block.data)
        self._policy.removed(key)
        return block

    def _pin(self, key: Hashable, size: int, fetch: Callable[[U8], None], first: bool) -> _Block:
        deadline = time.monotonic() + FETCH_TIMEOUT
        counted = False
        while True:
            with self._lock:
                block = self._blocks.get(key)
                if block is not None:
                    self._hits += not counted
                    self._policy.used(key)
                    block.pins += 1
                    return block
                running = self._fetches.get(key)
                if running is None:
                    mine = self._fetches[key] = _Fetch()
                self._misses += running is None and not counted
                counted = True
            if running is None:
                return self._fetch(key, size, fetch, first, mine)
            if not running.done.wait(max(0.0, deadline - time.monotonic())):
                raise WaitTimeout(f"block {key} did not come within {FETCH_TIMEOUT:.0f} s", cause="storage is slow")
            if running.error is not None:
                raise again(running.error)

    def _fetch(self, key: Hashable, size: int, fetch: Callable[[U8], None], first: bool, mine: _Fetch) -> _Block:
        reservation: Reservation | None = None
        try:
            reservation = self._room(size, key, first)
            data = np.empty(size, np.uint8)
            fetch(data)
            block = _Block(data, reservation)
            block.pins = 1
            with self._lock:
                self._add(key, block)
            return block
        except BaseException as error:
            mine.error = error
            if reservation is not None:
                reservation.release()
            raise
        finally:
            with self._lock:
                del self._fetches[key]
            mine.done.set()

    def _room(self, size: int, key: Hashable, first: bool) -> Reservation:
        try:
            return self._budget.reserve(size, "cache", f"block {key}", 0.0 if first else ROOM_TIMEOUT, first=first)
        except WaitTimeout:
            return self._budget.reserve(size, "cache", f"block {key}", 0.0, first=True)

    def _unpin(self, block: _Block) -> None:
        with self._lock:
            block.pins -= 1
            orphan = not block.pins and not block.held
        if orphan:
            block.reservation.release()
        else:
            self._budget.changed()

    def _sweep(self) -> None:
        """Unpin the blocks whose views went."""
        while self._gone:
            try:
                block = self._gone.popleft()
            except IndexError:  # another thread took the last one
                return
            self._unpin(block)
