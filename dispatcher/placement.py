"""Which worker serves a shard. Pure.

Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM ToN 1998) orders
the workers for each content id, and the first one that has room takes the shard (Mirrokni, Thorup, Zadimoghaddam,
"Consistent hashing with bounded loads", SODA 2018). So equal content goes to the same worker whichever job or rank asks,
and a worker that comes or goes moves only its own share.

Loads are the bytes of open shards, and a worker's share of them follows its measured speed. A worker has room for a
shard while it then holds at most ``BALANCE`` times its share, rounded up to whole shards of that size. One that has the
shard open already is taken first, and may hold ``HOME_BALANCE`` times its share; a rank keeps the worker it was given.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from manifests.identity import mix64

#: how far above its share a worker's open bytes may be
BALANCE = 1.25
#: the same for a worker that has the shard
HOME_BALANCE = 1.5
#: workers named in a grant after the first
ALTERNATES = 2
#: bytes that a shard counts at least
LEAST = 1 << 20
#: weight of the slowest worker, however slow; the fastest one's is 1
FLOOR = 1 / 8


def size_of(shard_bytes: int) -> int:
    """Bytes that a shard counts in loads."""
    return max(LEAST, shard_bytes)


def weights(speeds: Mapping[str, float | None]) -> dict[str, float]:
    """Weight of each worker, ``FLOOR`` to 1: its speed over the fastest one's.

    Args:
        speeds: bytes per ms; None: not known, taken as the median of those known.
    """
    known = sorted(speed for speed in speeds.values() if speed is not None)
    if not known or known[-1] <= 0:
        return dict.fromkeys(speeds, 1.0)
    median, best = known[len(known) // 2], known[-1]
    return {name: max(FLOOR, (median if speed is None else speed) / best) for name, speed in speeds.items()}


@lru_cache(maxsize=4096)
def _worker_key(worker: str) -> int:
    return _key(worker)


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Fleet:
    """Workers that may serve a shard, and the room they have.

    Args:
        weights: worker id -> weight.
        loads: worker id -> open bytes; read again for each placement, so that what was placed counts.
        coming: bytes that are about to be placed together, see ``expect``.
    """

    def __init__(self, weights: Mapping[str, float], loads: Mapping[str, int], coming: int = 0) -> None:
        self._weights = weights
        self._loads = loads
        self._names = sorted(weights)
        self._ids = np.array(self._names, object)
        self._keys = np.array([_worker_key(name) for name in self._names], np.uint64)
        self._nothing = [0] * len(self._names)
        self._weight = sum(weights.values())
        self.expect(coming)

    def __repr__(self) -> str:
        return f"Fleet({len(self._names)} workers)"

    def expect(self, coming: int) -> None:
        """So many bytes are about to be placed together: shares are worked out from them and the loads as they are now."""
        total = sum(map(self._loads.get, self._names, self._nothing)) + coming
        #: open bytes that belong to a worker of weight 1
        self._share = total / self._weight if self._weight else 0.0

    def limit(self, worker: str, size: int, balance: float = BALANCE) -> int:
        """Most bytes that the worker may have open when it takes a shard of ``size``: whole shards of that size."""
        return max(1, math.ceil(balance * self._share * self._weights[worker] / size)) * size

    def orders(self, content_ids: Sequence[str]) -> list[list[str]]:
        """For each content the workers, best first: the same for everybody who asks."""
        content = np.array([_key(content_id) for content_id in content_ids], np.uint64)
        scores = mix64(self._keys[None, :] ^ content[:, None])
        order: list[list[str]] = self._ids[np.argsort(scores, axis=1)[:, ::-1]].tolist()
        return order

    def place(
        self,
        order: Sequence[str],
        size: int,
        *,
        own: str | None = None,
        homes: Iterable[str] = (),
        without: Collection[str] = (),
    ) -> tuple[str, ...]:
        """The worker for a shard, and after it up to ``ALTERNATES`` others to try.

        Args:
            order: of its content, from ``orders``.
            size: bytes it counts.
            own: the worker that the asking rank has it from.
            homes: workers that have it open, best first.
            without: workers that failed on it: named only when there are no others.

        Returns:
            () when there is no worker.
        """
        if not order:
            return ()
        if without:
            order = [name for name in order if name not in without] or order
        named = set(order) if without else self._weights
        if own is not None and own in named:
            first = own
        else:
            first = self._first(order, size, [name for name in homes if name in named])
        return (first, *[name for name in order[: ALTERNATES + 1] if name != first][:ALTERNATES])

    def _first(self, order: Sequence[str], size: int, homes: Iterable[str]) -> str:
        loads = self._loads
        for name in homes:
            if loads.get(name, 0) + size <= self.limit(name, size, HOME_BALANCE):
                return name
        for name in order:
            if loads.get(name, 0) + size <= self.limit(name, size):
                return name
        return min(order, key=lambda name: (loads.get(name, 0) + size) / self._weights[name])


def rank_workers(content_id: str, workers: Collection[str]) -> list[str]:
    """Workers for this content, best first, when none of them has anything to do."""
    return Fleet(dict.fromkeys(workers, 1.0), {}).orders([content_id])[0]
