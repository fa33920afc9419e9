"""What the core may look up about manifests: immutable facts, so that a lookup is as pure as an argument."""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from manifests.plan import Plan
from manifests.wire.messages import Shuffle

#: shards looked up at a time, and kept
_AHEAD, _KEPT = 32, 8192


class ShardInfo(msgspec.Struct, frozen=True, gc=False):
    """One shard of a manifest, as a grant names it. ``first_id``: sample id of its row 0."""

    ordinal: int
    uri: str
    format: str
    rows: int
    bytes: int
    content_id: str
    first_id: int


class Library(Protocol):
    """Manifests by digest. Raises ``UnknownDataset`` for a digest that is not in the store folder."""

    def shard(self, digest: str, ordinal: int) -> ShardInfo | None:
        """A shard, None when the manifest has no such ordinal."""

    def shard_rows(self, digest: str) -> npt.NDArray[np.int64]:
        """Rows per shard, int64 [shards]."""

    def plan(self, digest: str, seed: int, epoch: int, shuffle: Shuffle | None) -> ShardOrder:
        """Where the shards lie in the plan of an epoch."""


class ShardOrder:
    """Finds the shard at a plan position. Making one takes 0.2 s for 1,000,000 shards. For one thread.

    Args:
        shard_rows: int64 [shards]. seed, epoch, shuffle: as in ``Plan``.
    """

    def __init__(self, shard_rows: npt.NDArray[np.int64], seed: int, epoch: int, shuffle: Shuffle | None) -> None:
        # rows within shards as stored, so that no shard need be put in order to see where it begins
        whole = msgspec.structs.replace(shuffle, within_shard=False) if shuffle is not None else None
        self._plan = Plan(shard_rows, seed=seed, epoch=epoch, shuffle=whole, lanes=1)
        mean = max(1, self._plan.rows // max(1, int(np.count_nonzero(shard_rows))))
        self._ahead = np.arange(_AHEAD, dtype=np.int64) * mean
        #: plan position where a shard begins -> its ordinal
        self._found: dict[int, int] = {}

    def at(self, position: int) -> tuple[int, int]:
        """(ordinal of the shard at this plan position, plan position where it begins)."""
        known = self._found.get(position)
        if known is not None:
            return known, position
        # those after it will be asked for next
        places = np.minimum(position + self._ahead, self._plan.rows - 1)
        shards, rows = self._plan.plan_rows(places)
        starts = (places - rows).tolist()
        if len(self._found) > _KEPT:
            self._found.clear()
        ordinals = shards.tolist()
        self._found.update(zip(starts, ordinals))
        return ordinals[0], starts[0]
