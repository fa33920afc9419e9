"""The port every stored format is read through: ``Bytes`` in, a row index out.

The manifest builder calls a scanner once per shard to count rows and find the fields; a worker calls the same scanner
on first read to learn where each row lies. Both must come to the same result from the same bytes, so a scanner is a
pure function of ``Bytes``: no clock, no settings beyond the format name, no look at the shard's neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import ShardChanged
from ..schema import Field

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]

#: names a stored field may not have, because batches carry columns of these names
RESERVED = frozenset({"__id__", "__pad__", "__epoch__", "__source__", "__sub__"})

#: what a note is about; the builder words its warnings and errors by it
NoteKind = Literal[
    "not-this-format", "unsupported", "damaged", "cut", "unclosed", "trailing", "duplicate", "ignored", "slow"
]


class Bytes(Protocol):
    """Random access to the bytes of one shard. May be called from several threads at once.

    An implementation may also have an attribute ``name`` (str), which error messages then use.
    """

    @property
    def size(self) -> int:
        """Bytes there are."""

    def read(self, offset: int, length: int) -> memoryview:
        """Bytes ``[offset, offset + length)``; fewer only where the shard ends. Storage faults raise ``ShardMissing``
        or ``ShardChanged``."""


class ShardIndex(Protocol):
    """Where the rows of one shard lie. Cheap to hold; what else is in it is the format's own business."""

    @property
    def rows(self) -> int:
        """Rows in the shard."""

    @property
    def nbytes(self) -> int:
        """Memory the index takes, for whoever caches it."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something in a shard that its owner should know.

    ``not-this-format`` and ``unsupported`` make a build fail; the other kinds become warnings. ``lost``: samples that
    are dropped because of it, as far as that is known.
    """

    kind: NoteKind
    text: str
    offset: int = -1
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Scan:
    """What a scanner found: the index, the fields of this shard alone (sorted, ``__key__`` last), and notes."""

    index: ShardIndex
    fields: tuple[Field, ...]
    notes: tuple[Note, ...] = ()


#: a scanner reads as little as it can: headers and footers, no sample data
Scanner = Callable[[Bytes], Scan]


def name_of(source: Bytes) -> str:
    """What to call ``source`` in an error."""
    return str(getattr(source, "name", "") or "shard")


def read_exactly(source: Bytes, offset: int, length: int) -> memoryview:
    """``length`` bytes, or ``ShardChanged`` where the shard ends before."""
    data = source.read(offset, length)
    if len(data) != length:
        raise ShardChanged(
            f"{name_of(source)} is shorter than its index says",
            cause=f"{length} bytes at {offset} gave {len(data)}",
            remedy="build the manifest again",
        )
    return data


class Window:
    """Small forward reads of ``source`` served from larger ones, so that headers of small members cost few calls."""

    def __init__(self, source: Bytes, most: int = 1 << 16) -> None:
        self._source = source
        self._most = most
        self._start = 0
        self._data = memoryview(b"")
        self._span = most

    def read(self, offset: int, length: int) -> memoryview:
        """As ``Bytes.read``. A jump over more than a window makes the next one small: its rest would not be used."""
        begin = offset - self._start
        if begin < 0 or begin + length > len(self._data):
            jumped = begin > len(self._data) + self._most
            self._span = 1024 if jumped else min(self._most, self._span * 4)
            self._start, begin = offset, 0
            self._data = self._source.read(offset, max(length, self._span))
        return self._data[begin : begin + length]
