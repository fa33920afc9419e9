"""What a rank has handed out and had acknowledged in one epoch: the figures `feedline audit` folds together.

Two sums are kept apart on purpose. *source* is over the ids that the plan has at the places taken; *handed out* is over
the ids found in the batches, as the workers wrote them. They are equal exactly when every row came once. Where they are
not, the shard's books are kept in detail.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from manifests.identity import id_sum
from manifests.wire.messages import EpochProgress, IdSum, ShardSum, SkippedRow

from .dynamic import AnyLeg
from .session import Position

I64 = npt.NDArray[np.int64]
_MOST_NAMED = 100


@dataclass(frozen=True)
class _Snapshot:
    position: Position
    total: IdSum
    skipped: int


_NOTHING = _Snapshot(Position(), IdSum(), 0)


class Books:
    """Books of one leg. One thread hands out and acknowledges; any thread may ask for ``progress``."""

    def __init__(self, epoch: int, leg: AnyLeg) -> None:
        self.epoch = epoch
        self._leg = leg
        self._lock = threading.Lock()
        self._handed = _NOTHING
        self._acked = _NOTHING
        self._source = IdSum()
        self._skipped: list[SkippedRow] = []
        self._padded = 0
        self._unbalanced: list[ShardSum] = []
        self._abandoned = False
        self._finished = False

    def hand_out(
        self, planned: I64, found: I64, pads: int, skipped: Sequence[SkippedRow], position: Position, shards: I64
    ) -> None:
        """One batch was handed over.

        Args:
            planned: ids the plan has for the batch's rows, without pads, int64 [rows]. shards: their shard ordinals.
            found: ids in the batch, without pads, int64 [rows].
            pads: flagged repeats in it. skipped: bad rows passed over since the last batch.
        """
        wrong = [] if np.array_equal(planned, found) else _compare(planned, found, shards)
        with self._lock:
            self._source = _add(self._source, planned)
            self._handed = _Snapshot(position, _add(self._handed.total, found), self._handed.skipped + len(skipped))
            self._skipped += skipped
            self._padded += pads
            self._unbalanced += wrong

    def skip(self, skipped: Sequence[SkippedRow], position: Position) -> None:
        """Bad rows were passed over at the end, with no batch after them."""
        with self._lock:
            self._skipped += skipped
            self._handed = _Snapshot(position, self._handed.total, self._handed.skipped + len(skipped))

    def acknowledge(self) -> None:
        """Everything handed out so far is acknowledged."""
        with self._lock:
            self._acked = self._handed

    def finish(self) -> None:
        """The leg was handed out to its end; it counts as finished once that is acknowledged."""
        with self._lock:
            self._finished = True

    def abandon(self) -> None:
        """The loop left the epoch early and went on."""
        with self._lock:
            self._abandoned = True

    def progress(self) -> EpochProgress:
        """The cumulative report."""
        with self._lock:
            handed, acked = self._handed, self._acked
            done = self._finished and acked == handed
            return EpochProgress(
                epoch=self.epoch,
                step=self._leg.first_step + handed.position.steps,
                acked_step=self._leg.first_step + acked.position.steps,
                handed=tuple(self._leg.own_taken(handed.position.read).tolist()),
                acked=tuple(self._leg.own_taken(acked.position.read).tolist()),
                source=self._source,
                handed_out=handed.total,
                acknowledged=acked.total,
                skipped=tuple(self._skipped),
                acked_skipped=acked.skipped,
                padded=self._padded,
                unbalanced=tuple(self._unbalanced),
                state="finished" if done else "abandoned" if self._abandoned else "open",
            )


def _add(total: IdSum, ids: I64) -> IdSum:
    return IdSum(count=total.count + len(ids), value=(total.value + id_sum(ids)) % (1 << 64))


def _compare(planned: I64, found: I64, shards: I64) -> list[ShardSum]:
    want, have = Counter(planned.tolist()), Counter(found.tolist())
    lost, extra = want - have, have - want
    shard_of = dict(zip(planned.tolist(), shards.tolist(), strict=True))
    out = []
    for shard in sorted({shard_of.get(i, -1) for i in (*lost, *extra)}):
        gone = tuple(i for i in lost.elements() if shard_of[i] == shard)[:_MOST_NAMED]
        twice = tuple(i for i in extra.elements() if shard_of.get(i, -1) == shard)[:_MOST_NAMED]
        here = int((shards == shard).sum())
        out.append(
            ShardSum(
                source=0, shard=shard, planned=here, handed_out=here - len(gone) + len(twice), lost=gone, repeated=twice
            )
        )
    return out
