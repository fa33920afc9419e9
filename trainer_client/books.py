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
from manifests.ranges import Ranges
from manifests.wire.messages import CarriedSum, EpochProgress, IdSum, ShardSum, SkippedRow

from .dynamic import AnyLeg
from .session import Position

I64 = npt.NDArray[np.int64]
_MOST_NAMED = 100


#: batches after which their ids are added up at the latest; otherwise when a report is due
_MOST_OPEN = 4096


@dataclass(frozen=True)
class _Batch:
    """Ids of one batch, without pads, int64 [rows]. ``epochs``: of each row, None: all of this epoch."""

    planned: I64
    found: I64
    epochs: I64 | None


@dataclass(frozen=True)
class _Mark:
    """Where books stand beside their sums."""

    position: Position
    skipped: int = 0
    quarantined: int = 0


_NOTHING = _Mark(Position())


class Books:
    """Books of one leg. One thread hands out and acknowledges; any thread may ask for ``progress``.

    Handing out only keeps the ids; they are added up many batches at a time, when a report is due.
    """

    def __init__(self, epoch: int, leg: AnyLeg) -> None:
        self.epoch = epoch
        self._leg = leg
        self._lock = threading.Lock()
        self._handed = self._acked = _NOTHING
        #: batches not added up yet, and how many of them, from the first on, are acknowledged
        self._open: list[_Batch] = []
        self._open_acked = 0
        self._source = _Sums()
        #: of batches that were acknowledged, and of those handed out after them
        self._sums, self._unacked = _Sums(), _Sums()
        self._skipped: list[SkippedRow] = []
        self._quarantined: list[int] = []
        self._padded = 0
        self._unbalanced: list[ShardSum] = []
        self._abandoned = False
        self._finished = False

    def hand_out(
        self,
        planned: I64,
        found: I64,
        pads: int,
        skipped: Sequence[SkippedRow],
        position: Position,
        shards: I64,
        quarantined: Sequence[int] = (),
        epochs: I64 | None = None,
    ) -> None:
        """One batch was handed over.

        Args:
            planned: ids the plan has for the batch's rows, without pads, int64 [rows]; kept. shards: their shard
                ordinals. epochs: the epoch of each row, None: this one.
            found: ids in the batch, without pads, int64 [rows].
            pads: flagged repeats in it. skipped: bad rows passed over since the last batch. quarantined: ids of rows
                passed over because their shard is in quarantine.
        """
        wrong: list[ShardSum] = []
        if found.shape == planned.shape and found.tobytes() == planned.tobytes():
            found = planned  # the loop may change its own
        else:
            wrong, found = _compare(planned, found, shards), found.copy()
        with self._lock:
            self._open.append(_Batch(planned, found, epochs))
            self._passed_over(skipped, quarantined, position)
            self._padded += pads
            self._unbalanced += wrong
            if len(self._open) >= _MOST_OPEN:
                self._add_up()

    def skip(self, skipped: Sequence[SkippedRow], position: Position, quarantined: Sequence[int] = ()) -> None:
        """Rows were passed over at the end, with no batch after them."""
        with self._lock:
            self._passed_over(skipped, quarantined, position)

    def _passed_over(self, skipped: Sequence[SkippedRow], quarantined: Sequence[int], position: Position) -> None:
        self._skipped += skipped
        self._quarantined += quarantined
        self._handed = _Mark(position, len(self._skipped), len(self._quarantined))

    def acknowledge(self) -> None:
        """Everything handed out so far is acknowledged."""
        with self._lock:
            self._acked = self._handed
            self._open_acked = len(self._open)
            if self._unacked.by_epoch:
                self._sums.merge(self._unacked)
                self._unacked = _Sums()

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
            self._add_up()
            handed, acked = self._handed, self._acked
            done = self._finished and acked == handed
            here = self.epoch
            return EpochProgress(
                epoch=here,
                step=self._leg.first_step + handed.position.steps,
                acked_step=self._leg.first_step + acked.position.steps,
                handed=tuple(self._leg.own_taken(handed.position.read).tolist()),
                acked=tuple(self._leg.own_taken(acked.position.read).tolist()),
                source=self._source.of(here),
                handed_out=_plus(self._sums.of(here), self._unacked.of(here)),
                acknowledged=self._sums.of(here),
                skipped=tuple(self._skipped),
                acked_skipped=acked.skipped,
                padded=self._padded,
                unbalanced=tuple(self._unbalanced),
                state="finished" if done else "abandoned" if self._abandoned else "open",
                quarantined=_ids(self._quarantined),
                acked_quarantined=_ids(self._quarantined[: acked.quarantined]),
                carried=tuple(
                    CarriedSum(
                        epoch=epoch,
                        handed_out=_plus(self._sums.of(epoch), self._unacked.of(epoch)),
                        acknowledged=self._sums.of(epoch),
                    )
                    for epoch in sorted((self._sums.by_epoch.keys() | self._unacked.by_epoch.keys()) - {here})
                ),
            )

    def _add_up(self) -> None:
        parts = ((self._open[: self._open_acked], self._sums), (self._open[self._open_acked :], self._unacked))
        for batches, total in parts:
            if batches:
                total.add(self.epoch, [(b.found, b.epochs) for b in batches])
                self._source.add(self.epoch, [(b.planned, b.epochs) for b in batches])
        self._open, self._open_acked = [], 0


class _Sums:
    """Sums of ids, per epoch."""

    def __init__(self) -> None:
        self.by_epoch: dict[int, IdSum] = {}

    def of(self, epoch: int) -> IdSum:
        return self.by_epoch.get(epoch, _ZERO)

    def add(self, epoch: int, batches: Sequence[tuple[I64, I64 | None]]) -> None:
        """Add ids of batches; those without epochs are of ``epoch``."""
        self._put(epoch, [ids for ids, epochs in batches if epochs is None])
        for ids, epochs in batches:
            if epochs is not None:
                # ids that were not planned are this epoch's
                known = epochs if len(epochs) == len(ids) else np.full(len(ids), epoch, np.int64)
                for number in np.unique(known).tolist():
                    self._put(number, [ids[known == number]])

    def merge(self, other: _Sums) -> None:
        for epoch, more in other.by_epoch.items():
            self.by_epoch[epoch] = _plus(self.of(epoch), more)

    def _put(self, epoch: int, ids: Sequence[I64]) -> None:
        if ids:
            every = np.concatenate(ids)
            self.by_epoch[epoch] = _plus(self.of(epoch), IdSum(count=len(every), value=id_sum(every)))


_ZERO = IdSum()


def _plus(one: IdSum, other: IdSum) -> IdSum:
    return IdSum(count=one.count + other.count, value=(one.value + other.value) % (1 << 64))


def _ids(members: Sequence[int]) -> bytes:
    return Ranges.members(np.array(members, np.int64)).encode() if members else b""


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
