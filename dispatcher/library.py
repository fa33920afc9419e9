"""What the core may look up about manifests: immutable facts, so that a lookup is as pure as an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from manifests.plan import Plan
from manifests.wire.messages import Shuffle


@dataclass(frozen=True, slots=True)
class ShardInfo:
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

    def plan(self, digest: str, seed: int, epoch: int, shuffle: Shuffle | None) -> Plan:
        """The order of shards in an epoch, to find the shard at a plan position; see ``shard_plan``."""


def shard_plan(shard_rows: npt.NDArray[np.int64], seed: int, epoch: int, shuffle: Shuffle | None) -> Plan:
    """A plan whose ``plan_rows`` gives places inside shards as they are stored, also for ``within_shard``, so that no shard
    need be put in order to find where it begins and ends. Makes about 5 million shards a second; a look-up is a search."""
    whole = msgspec.structs.replace(shuffle, within_shard=False) if shuffle is not None else None
    return Plan(shard_rows, seed=seed, epoch=epoch, shuffle=whole, lanes=1)


def shard_at(plan: Plan, position: int) -> tuple[int, int]:
    """(ordinal of the shard at this plan position, plan position where it begins), with a plan of ``shard_plan``."""
    shards, rows = plan.plan_rows(np.array([position], np.int64))
    return int(shards[0]), position - int(rows[0])
