"""What the workers have to do: the shards that ranks hold grants for. Counts over all jobs, memory only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from .library import ShardInfo
from .placement import size_of


class Loads:
    """Open shards by worker and by content."""

    def __init__(self) -> None:
        #: worker -> open shards
        self.shards: Counter[str] = Counter()
        #: worker -> bytes of its open shards, as ``placement.size_of`` counts them
        self.bytes: Counter[str] = Counter()
        self._homes: dict[str, dict[str, int]] = {}
        #: (manifest digest, ordinal) -> the shard, and how often it is open
        self._open: dict[tuple[str, int], tuple[ShardInfo, int]] = {}

    def __repr__(self) -> str:
        return f"Loads({sum(self.shards.values())} open shards, {len(self.shards)} workers)"

    def add(self, digest: str, info: ShardInfo, worker: str) -> None:
        """The shard was opened on the worker."""
        _, count = self._open.get((digest, info.ordinal), (info, 0))
        self._open[digest, info.ordinal] = (info, count + 1)
        self._count(info, worker, 1)

    def remove(self, digest: str, ordinal: int, worker: str) -> None:
        """The shard was closed there."""
        info, count = self._open.pop((digest, ordinal))
        if count > 1:
            self._open[digest, ordinal] = (info, count - 1)
        self._count(info, worker, -1)

    def homes(self, content_id: str) -> Mapping[str, int]:
        """Workers that have the content open, and how often."""
        return self._homes.get(content_id, {})

    def _count(self, info: ShardInfo, worker: str, change: int) -> None:
        content = info.content_id
        homes = self._homes.get(content)
        if homes is None:
            homes = self._homes[content] = {}
        shards, here = self.shards.get(worker, 0) + change, homes.get(worker, 0) + change
        if shards:
            self.shards[worker] = shards
            self.bytes[worker] = self.bytes.get(worker, 0) + change * size_of(info.bytes)
        else:
            del self.shards[worker], self.bytes[worker]
        if here:
            homes[worker] = here
        else:
            del homes[worker]
            if not homes:
                del self._homes[content]
