"""What the core may look up about manifests: immutable facts, so that a lookup is as pure as an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


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
