"""Which worker serves a shard. Pure.

A worker that has the shard keeps it. Otherwise: rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings
to increase hit rates", IEEE/ACM ToN 1998) orders the workers for each content id, and the first one below its share of
the load takes it (Mirrokni, Thorup, Zadimoghaddam, "Consistent hashing with bounded loads", SODA 2018). So equal
content goes to the same worker whichever job or rank asks, a worker that comes or goes moves only its own share, and
no worker carries more than ``BALANCE`` times the mean.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence

#: how far above the mean a worker's open shards may be
BALANCE = 1.25
#: workers named in a grant after the first
ALTERNATES = 2


def rank_workers(content_id: str, workers: Collection[str]) -> list[str]:
    """Workers for this content, best first; the same for everybody who asks."""
    return sorted(workers, key=lambda worker: (_weight(worker, content_id), worker), reverse=True)


def _weight(worker: str, content_id: str) -> bytes:
    return hashlib.blake2b(f"{worker}\0{content_id}".encode(), digest_size=8).digest()


def capacity(total: int, workers: int) -> int:
    """Open shards one of ``workers`` may hold when ``total`` are open together (the one being placed included)."""
    return max(1, math.ceil(BALANCE * total / workers))


def place(
    content_id: str, workers: Collection[str], loads: Mapping[str, int], preferred: Sequence[str] = ()
) -> tuple[str, ...]:
    """The worker for this content, and after it up to ``ALTERNATES`` others to try.

    Args:
        workers: ids that may serve it. loads: open shards per worker.
        preferred: workers that have it already, best first; those not in ``workers`` are passed over.

    Returns:
        () when ``workers`` is empty.
    """
    if not workers:
        return ()
    order = rank_workers(content_id, workers)
    first = next((worker for worker in preferred if worker in workers), None)
    if first is None:
        limit = capacity(sum(loads.get(worker, 0) for worker in workers) + 1, len(workers))
        first = next((worker for worker in order if loads.get(worker, 0) < limit), order[0])
    return (first, *[worker for worker in order if worker != first][:ALTERNATES])
