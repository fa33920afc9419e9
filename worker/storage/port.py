"""The port shards are fetched through: one stored object, by uri."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]


class StoredObject(Protocol):
    """One shard where it lies. Called from several threads at once.

    Attributes:
        uri: its address, for errors.
        size: bytes, when it was opened.
        etag: content id that is known without reading (``etag:..``).
        stamp: tells this object from one that takes its place later; compared, never shown.
    """

    @property
    def uri(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def etag(self) -> str: ...

    @property
    def stamp(self) -> str: ...

    def fetch(self, offset: int, out: U8) -> None:
        """Fill ``out`` with the bytes from ``offset`` on.

        Raises:
            ShardMissing: gone or not readable. ShardChanged: it is not the object that was opened, or it is shorter.
        """

    def current_stamp(self) -> str:
        """The stamp of what lies at the uri now. Raises ``ShardMissing``."""


class Storage(Protocol):
    """One kind of storage, by uri scheme."""

    #: seconds for which a look at ``current_stamp`` is good enough
    recheck: float

    def open(self, uri: str) -> StoredObject:
        """The object at ``uri``. Raises ``ShardMissing`` or, for a uri that cannot be, ``ConfigError``."""
