"""Shards in use: opened, checked against their content id, indexed; bytes come through the block cache.

A shard that fits in one block (32 MiB, or an eighth of the memory if that is less) is hashed each time it is fetched. A
larger one is hashed once, in one pass at its first opening that also keeps a hash per block; from then on every block
fetched is checked against its own. ``etag:`` ids are compared with what the storage says. So bytes are never served that
are not those of the manifest, and never a mixture.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from manifests.errors import FeedlineError, ProtocolError, ShardChanged
from manifests.units import format_size
from manifests.wire.messages import Grant

from .cache import BlockCache
from .flights import SingleFlight
from .formats import Format, format_of
from .memory import Budget, Cancelled, Reservation
from .storage import StoredObject, storage_of

U8 = npt.NDArray[np.uint8]

#: largest block, bytes
BLOCK = 32 << 20
#: seconds a thread waits for another one that opens the same shard (a hash over all of it, and its index)
OPEN_TIMEOUT = 600.0
_SUM = 16


class _Hash(Protocol):
    def update(self, data: Any, /) -> Any: ...

    def hexdigest(self) -> str: ...


def block_size(memory: int) -> int:
    """Bytes of a cache block on a worker with this much memory."""
    return max(64 << 10, min(BLOCK, memory // 8))


_here = threading.local()


def fetched_here() -> int:
    """Bytes this thread has read from storage so far."""
    return getattr(_here, "fetched", 0)


def _count_fetched(size: int) -> None:
    _here.fetched = fetched_here() + size


class OpenShard:
    """One shard, ready for reading. Immutable but for ``checked``."""

    def __init__(self, grant: Grant, stored: StoredObject, block: int, cache: BlockCache) -> None:
        self.uri = grant.uri
        self.content_id = grant.content_id
        #: what ``Shards`` keeps it under
        self.place = (grant.uri, grant.content_id, grant.format)
        self.stored = stored
        self.size = stored.size
        self.format: Format = format_of(grant.format)
        self._block = block
        self._cache = cache
        # an etag tells versions of one object apart, not objects
        self.key = grant.content_id if not grant.content_id.startswith("etag:") else f"{grant.content_id} {grant.uri}"
        #: hash of each block of a shard of more than one
        self.sums: list[bytes] = []
        self.index: Any = None
        #: memory held for index and sums
        self.reservation: Reservation | None = None
        #: when the storage was last asked whether this is still the object, monotonic seconds
        self.checked = time.monotonic()

    def __repr__(self) -> str:
        return f"OpenShard({self.uri}, {format_size(self.size)}, {self.blocks} blocks)"

    @property
    def blocks(self) -> int:
        """Blocks it has."""
        return -(-self.size // self._block)

    @property
    def nbytes(self) -> int:
        """Memory that index and sums take."""
        return int(getattr(self.index, "nbytes", 0)) + _SUM * len(self.sums) + 512

    def reader(self, first: bool = False) -> ShardBytes:
        """``Bytes`` for one unit of work; ``first``: it never waits for memory."""
        return ShardBytes(self, first)

    def read(self, number: int, begin: int, end: int, first: bool) -> U8:
        """Bytes ``[begin, end)`` of one block. A large part is a view that pins the block, a small one a copy that
        does not, so that what is held is never much more than what is used."""
        size = min(self._block, self.size - number * self._block)
        take = self._cache.view if (end - begin) * 4 >= size else self._cache.copy
        return take((self.key, number), size, lambda out: self._fetch(number, out), begin, end, first=first)

    def _fetch(self, number: int, out: U8) -> None:
        self.stored.fetch(number * self._block, out)
        _count_fetched(len(out))
        if self.content_id.startswith("etag:"):
            return
        if self.sums:
            if blake3(out.data).digest(length=_SUM) != self.sums[number]:
                raise ShardChanged(
                    f"{self.uri} changed",
                    cause=f"bytes from {number * self._block} on are not those that were checked",
                    remedy="build the manifest again",
                )
        elif self.blocks <= 1:
            found = hasher(self.content_id)
            found.update(out.data)
            check_content(self.uri, self.content_id, found)

    def verify(self, budget: Budget) -> None:
        """Hash all of a shard of several blocks and keep the hash of each. Blocks are kept where there is room."""
        whole = hasher(self.content_id, wide=True)
        sums: list[bytes] = []
        with budget.reserve(self._block, "cache", f"hashing {self.uri}", 0.0, first=True):
            buffer = np.empty(self._block, np.uint8)
            for number in range(self.blocks):
                data = buffer[: min(self._block, self.size - number * self._block)]
                self.stored.fetch(number * self._block, data)
                _count_fetched(len(data))
                whole.update(data.data)
                sums.append(blake3(data.data).digest(length=_SUM))
                self._cache.offer((self.key, number), data)
        try:
            check_content(self.uri, self.content_id, whole)
        except ShardChanged:
            self._cache.drop(lambda key: isinstance(key, tuple) and key[0] == self.key)
            raise
        self.sums = sums


class ShardBytes:
    """The bytes of a shard for one unit of work, with the time it took to get them."""

    def __init__(self, shard: OpenShard, first: bool) -> None:
        self._shard = shard
        self._first = first
        self.name = shard.uri
        self.size = shard.size
        #: nanoseconds spent waiting for blocks
        self.fetch_ns = 0

    def __repr__(self) -> str:
        return f"ShardBytes({self.name})"

    def read(self, offset: int, length: int) -> memoryview:
        """See ``manifests.scan.port.Bytes``."""
        end = min(offset + length, self.size)
        if offset >= end:
            return memoryview(b"")
        began = time.perf_counter_ns()
        block = self._shard._block
        first, last = offset // block, (end - 1) // block
        if first == last:
            data = self._shard.read(first, offset - first * block, end - first * block, self._first)
            # from now on this unit may hold a block that others wait for, so it must not wait itself
            self._first = True
        else:
            data = np.empty(end - offset, np.uint8)
            for number in range(first, last + 1):
                begin, stop = max(offset, number * block), min(end, (number + 1) * block)
                data[begin - offset : stop - offset] = self._shard.read(
                    number, begin - number * block, stop - number * block, self._first
                )
        self.fetch_ns += time.perf_counter_ns() - began
        return data.data


class Shards:
    """Opens shards, keeps the indexes of those used last (at most an eighth of the memory)."""

    def __init__(self, budget: Budget, cache: BlockCache) -> None:
        self._budget = budget
        self._cache = cache
        self._block = block_size(budget.total)
        self._most = max(1 << 20, budget.total // 8)
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, str, str], OpenShard] = OrderedDict()
        self._held = 0
        self._flights: SingleFlight[tuple[str, str, str], OpenShard] = SingleFlight("opening shard", OPEN_TIMEOUT)

    def __repr__(self) -> str:
        return f"Shards({len(self._open)} open, {format_size(self._held)} of indexes)"

    def open(self, grant: Grant, cancelled: Callable[[], bool] = lambda: False) -> OpenShard:
        """The shard of ``grant``, checked and indexed; opened at most once at a time.

        Raises:
            ShardMissing, ShardChanged: it is not there, or not what the grant says. Cancelled.
        """
        key = (grant.uri, grant.content_id, grant.format)
        with self._lock:
            shard = self._open.get(key)
            if shard is not None:
                self._open.move_to_end(key)
        if shard is not None and not self._replaced(shard):
            return self._checked(shard, grant)
        if cancelled():
            raise Cancelled("opening a shard")
        return self._checked(self._flights.do(key, lambda: self._make(key, grant)), grant)

    def close(self) -> None:
        """Forget all shards."""
        with self._lock:
            gone, self._held = list(self._open.values()), 0
            self._open.clear()
        for shard in gone:
            if shard.reservation is not None:
                shard.reservation.release()

    def _replaced(self, shard: OpenShard) -> bool:
        """Whether something else lies at its uri now; if so, what is kept of it goes."""
        now = time.monotonic()
        if now - shard.checked < storage_of(shard.uri).recheck:
            return False
        try:
            if shard.stored.current_stamp() == shard.stored.stamp:
                shard.checked = now
                return False
        except FeedlineError:
            self._forget(shard)
            raise
        self._forget(shard)
        return True

    def _forget(self, shard: OpenShard) -> None:
        with self._lock:
            if self._open.get(shard.place) is shard:
                del self._open[shard.place]
                self._held -= shard.nbytes
        if shard.reservation is not None:
            shard.reservation.release()
        self._cache.drop(lambda k: isinstance(k, tuple) and k[0] == shard.key)

    def _checked(self, shard: OpenShard, grant: Grant) -> OpenShard:
        _compare(grant.uri, "bytes", grant.bytes, shard.size)
        _compare(grant.uri, "rows", grant.rows, shard.index.rows)
        return shard

    def _make(self, key: tuple[str, str, str], grant: Grant) -> OpenShard:
        stored = storage_of(grant.uri).open(grant.uri)
        _compare(grant.uri, "bytes", grant.bytes, stored.size)
        shard = OpenShard(grant, stored, self._block, self._cache)
        if grant.content_id.startswith("etag:"):
            if stored.etag != grant.content_id:
                raise _changed(grant.uri, grant.content_id, stored.etag)
        elif shard.blocks > 1:
            shard.verify(self._budget)
        shard.index = shard.format.scan(shard.reader(first=True)).index
        _compare(grant.uri, "rows", grant.rows, shard.index.rows)
        shard.reservation = self._budget.reserve(shard.nbytes, "index", "row index", 0.0, first=True)
        self._keep(key, shard)
        return shard

    def _keep(self, key: tuple[str, str, str], shard: OpenShard) -> None:
        gone: list[OpenShard] = []
        with self._lock:
            before = self._open.pop(key, None)
            if before is not None:
                gone.append(before)
                self._held -= before.nbytes
            self._open[key] = shard
            self._held += shard.nbytes
            while self._held > self._most and len(self._open) > 1:
                _, oldest = self._open.popitem(last=False)
                self._held -= oldest.nbytes
                gone.append(oldest)
        for old in gone:
            if old.reservation is not None:
                old.reservation.release()


def hasher(content_id: str, wide: bool = False) -> _Hash:
    """A hash of the kind ``content_id`` has; ``wide``: on all cores, for much data at once."""
    kind = content_id.partition(":")[0]
    if kind == "blake3":
        made: _Hash = blake3(max_threads=blake3.AUTO) if wide else blake3()
        return made
    if kind == "sha256":
        return hashlib.sha256()
    raise ProtocolError(f"content id {content_id!r} is of no known kind", remedy="blake3, sha256 or etag")


def check_content(uri: str, expected: str, found: _Hash) -> None:
    """Raise ``ShardChanged`` unless ``found`` has come to ``expected``."""
    kind, _, wanted = expected.partition(":")
    if found.hexdigest() != wanted:
        raise _changed(uri, expected, f"{kind}:{found.hexdigest()}")


def _changed(uri: str, expected: str, found: str) -> ShardChanged:
    return ShardChanged(
        f"{uri} changed since its manifest was built",
        cause=f"expected {expected}, found {found}",
        remedy="build and register the manifest again",
        detail={"uri": uri, "expected": expected, "found": found},
    )


def _compare(uri: str, what: str, expected: int, found: int) -> None:
    if expected != found:
        raise _changed(uri, f"{expected} {what}", f"{found} {what}")
