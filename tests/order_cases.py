"""Cases for tests of the order: the same epoch for the product and for the reference, and both handing it out.

A *case* is shard sizes, seed, epoch, shuffle and lanes. ``Case.plan`` is the product's plan; ``Case.order`` and
``Case.lane_lists`` are the reference's. ``hand_out`` runs the product's sessions the way ``Run`` does: each asks for a
stretch of its read stream, learns which rows are good, and takes a batch or asks for more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import order_reference as reference
from hypothesis import strategies as st

from manifests.identity import random_u64, random_unit, stream_key
from manifests.plan import Plan
from manifests.wire.messages import Shuffle
from trainer_client.session import Leg, Position, Session

Row = tuple[int, int]
#: one batch: ((shard, row), is it a pad)
Batch = list[tuple[Row, bool]]


@dataclass(frozen=True)
class Case:
    rows: tuple[int, ...]
    seed: int = 1
    epoch: int = 0
    shuffle: Shuffle | None = Shuffle()  # noqa: RUF009  (frozen)
    lanes: int = 12

    @property
    def total(self) -> int:
        return sum(self.rows)

    @cached_property
    def plan(self) -> Plan:
        return Plan(
            np.array(self.rows, np.int64), seed=self.seed, epoch=self.epoch, shuffle=self.shuffle, lanes=self.lanes
        )

    @cached_property
    def order(self) -> list[Row]:
        """The reference's plan order."""
        if self.shuffle is None:
            return reference.plan_order(self.rows, None)
        keys = random_u64(stream_key("shard-order", self.seed, self.epoch), 0, len(self.rows)).tolist()

        def row_key(shard: int, row: int) -> int:
            return int(random_u64(stream_key("row-order", self.seed, self.epoch, shard), row, 1)[0])

        return reference.plan_order(self.rows, keys.__getitem__, row_key if self.shuffle.within_shard else None)

    @cached_property
    def lane_lists(self) -> list[list[Row]]:
        """The reference's lanes, rows in the order they leave."""
        if self.shuffle is None:
            return [self.order[lane :: self.lanes] for lane in range(self.lanes)]
        reach = self.shuffle.buffer // self.lanes
        out = []
        for lane, rows in enumerate(reference.cut_lanes(self.order, self.lanes)):
            units = random_unit(stream_key("window", self.seed, self.epoch, lane), 0, len(rows)).tolist()
            mixed = reference.interleave(rows, self.shuffle.interleave)
            out.append(reference.window(mixed, reach, units.__getitem__))
        return out

    def reference_run(self, world: int, batch: int, tail: str = "pad", **settings: object) -> reference.Leg:
        return reference.run(self.order, self.lane_lists, world, batch, tail, **settings)  # type: ignore[arg-type]

    def leg(
        self, rank: int, world: int, batch: int, tail: str = "pad", taken: Sequence[int] | None = None, first: int = 0
    ) -> Leg:
        counts = np.array([0] * self.lanes if taken is None else taken, np.int64)
        return Leg(self.plan, rank=rank, world_size=world, batch_size=batch, tail=tail, taken=counts, first_step=first)

    def ids(self, rows: Sequence[Row]) -> list[int]:
        starts = np.concatenate([[0], np.cumsum(self.rows)])
        return [int(starts[shard]) + row for shard, row in rows]


@dataclass
class HandedOut:
    """What one rank's session handed out."""

    session: Session
    batches: list[Batch] = field(default_factory=list)

    @property
    def leg(self) -> Leg:
        return self.session.leg


def take(session: Session, bad: frozenset[Row] = frozenset(), look: int = 0) -> Batch | None:
    """The next batch, None at the end. ``look``: rows looked at beyond those asked for."""
    while not session.finished:
        count = session.leg.batch_rows(session.position.steps) + look
        while True:
            shards, rows = session.leg.refs(session.position.read, count)
            refs = list(zip(shards.tolist(), rows.tolist(), strict=True))
            got = session.next_batch(np.array([ref not in bad for ref in refs], bool))
            if got is not None:
                break
            count += 3
        offsets, position = got
        place = session.position.read
        session.position = position
        if len(offsets):
            return [(refs[i], place + i >= session.leg.candidates) for i in offsets.tolist()]
    return None


def hand_out(
    legs: Sequence[Leg],
    bad: frozenset[Row] = frozenset(),
    max_steps: int | None = None,
    position: Callable[[int], Position] = lambda rank: Position(),
    look: int = 0,
) -> list[HandedOut]:
    """Every rank's batches, each rank on its own, ``max_steps`` at the most."""
    out = []
    for rank, leg in enumerate(legs):
        handed = HandedOut(Session(leg, position(rank)))
        while max_steps is None or len(handed.batches) < max_steps:
            batch = take(handed.session, bad, look)
            if batch is None:
                break
            handed.batches.append(batch)
        out.append(handed)
    return out


def counts_after(handed: Sequence[HandedOut]) -> list[int]:
    """Rows taken per lane, each lane told by its own rank."""
    leg = handed[0].leg
    out = [0] * leg.plan.lanes
    for one in handed:
        for lane, count in zip(one.leg.own, one.leg.own_taken(one.session.position.read), strict=True):
            out[int(lane)] = int(count)
    return out


def real(batches: Sequence[Batch]) -> list[Row]:
    """Rows without pads, in order."""
    return [row for batch in batches for row, pad in batch if not pad]


# -- strategies ----------------------------------------------------------------------------------------------------

LANES = (1, 2, 3, 4, 6, 12)

shuffles = st.one_of(
    st.none(),
    st.builds(
        Shuffle,
        buffer=st.sampled_from([0, 1, 8, 24, 100, 4096]),
        interleave=st.integers(1, 4),
        within_shard=st.booleans(),
    ),
)

cases = st.builds(
    Case,
    rows=st.lists(st.sampled_from([0, 1, 2, 3, 5, 9, 17]), min_size=1, max_size=7).map(tuple).filter(lambda r: sum(r)),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 5),
    shuffle=shuffles,
    lanes=st.sampled_from(LANES),
)

tails = st.sampled_from(["pad", "drop", "ragged"])


def worlds(case: Case) -> st.SearchStrategy[int]:
    """World sizes that the case's lanes allow."""
    return st.sampled_from([world for world in range(1, case.lanes + 1) if case.lanes % world == 0])


def bad_rows(case: Case) -> st.SearchStrategy[frozenset[Row]]:
    """Rows that cannot be used: mostly none, never all."""
    some = st.sets(st.sampled_from(case.order), max_size=max(0, min(12, case.total - 1)))
    return st.one_of(st.just(frozenset()), some.map(frozenset)).filter(lambda bad: len(bad) < case.total)
