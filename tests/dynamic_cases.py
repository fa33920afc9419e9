"""Generations of a job in dynamic order, without processes: the client's legs and the dispatcher's pool, asked and
answered in any order a test likes. One epoch of one case each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from order_cases import Batch, Case, Row

from dispatcher.pool import Pool
from dispatcher.records import GenerationRecord, RankEpochRecord
from manifests.plan import Plan
from manifests.ranges import Ranges
from manifests.wire import messages as m
from trainer_client import dynamic_state
from trainer_client.dynamic import DynamicLeg
from trainer_client.session import Session
from trainer_client.state import VERSION, encode_step, identity_of


def settings_of(case: Case, world: int, batch: int, tail: str = "pad", elastic: bool = False) -> m.JobSettings:
    return m.JobSettings(
        sources=(m.Source(digest="sha256:aa"),),
        spec="sha256:bb",
        pipeline="sha256:cc",
        seed=case.seed,
        order="dynamic",
        shuffle=case.shuffle,
        lanes=case.lanes,
        batch_size=batch,
        world_size=world,
        tail=tail,  # type: ignore[arg-type]
        elastic=elastic,
    )


@dataclass
class Rank:
    leg: DynamicLeg
    session: Session
    batches: list[Batch] = field(default_factory=list)
    #: the epoch of every row handed out
    epochs: list[int] = field(default_factory=list)

    @property
    def place(self) -> int:
        return int(self.leg.own_taken(self.session.position.read)[0])

    @property
    def real(self) -> list[Row]:
        return [row for batch in self.batches for row, pad in batch if not pad]


class Game:
    """One generation of ``case`` in its epoch.

    Args:
        start: where it starts, None: at the epoch's beginning. bad: rows that cannot be used. ahead: rows of the read
            stream that a rank wants to know beyond its next batch.
    """

    def __init__(
        self,
        case: Case,
        world: int,
        batch: int,
        tail: str = "pad",
        *,
        elastic: bool = False,
        start: m.StartPoint | None = None,
        bad: frozenset[Row] = frozenset(),
        ahead: int = 0,
        number: int = 1,
    ) -> None:
        self.case, self.bad, self.ahead, self.number = case, bad, ahead, number
        self.settings = settings_of(case, world, batch, tail, elastic)
        start = m.StartPoint(epoch=case.epoch, first_epoch=case.epoch) if start is None else start
        if start.kind == "checkpoint":
            start = dynamic_state.start_for(start, self.settings, case.total, quotas=True)
        self.start = start
        self.generation = GenerationRecord(
            job="job", number=number, settings=self.settings, start=self.start, rows=case.total
        )
        self.pool = Pool.begin(self.generation, case.epoch)
        self.ranks = []
        for rank in range(world):
            leg = DynamicLeg.of(self.plan, self.settings, self.start, epoch=case.epoch, rank=rank)
            self.ranks.append(Rank(leg, Session(leg)))
        self._ends: dict[int, Any] = {}

    def plan(self, epoch: int) -> Plan:
        case = self.case
        if epoch == case.epoch:
            return case.plan
        return Plan(np.array(case.rows, np.int64), seed=case.seed, epoch=epoch, shuffle=case.shuffle, lanes=case.lanes)

    def _bounds(self, epoch: int, position: int) -> tuple[int, int]:
        """See ``dispatcher.pool.Bounds``."""
        if epoch not in self._ends:
            shards = self.plan(epoch).plan_rows(np.arange(self.case.total, dtype=np.int64))[0]
            last = np.flatnonzero(np.diff(shards, append=-1)) + 1  # plan positions at which shards end
            self._ends[epoch] = last
        last = self._ends[epoch]
        return int(last[np.searchsorted(last, position, side="right")]), 1 << 40

    def ask(self, rank: int, more: int = 0) -> bool:
        """One ask of ``rank``, as the feed makes it; ``more``: rows beyond what it needs. Whether anything changed."""
        one = self.ranks[rank]
        have = one.leg.have
        want = one.leg.wanted(one.session.position.read + self.ahead + more)
        place = one.leg.place(one.session.position.read)
        held = self.pool.hold(rank, 0)
        self.pool.grant(held, want, place, self._bounds)
        lane = m.LaneGrants(rank=rank, number=held.lane.number, dropped=have, place=held.begun, pieces=held.after(have))
        return one.leg.take(m.Grants(lane=lane, final=held.is_full, carried=b""))

    def step(self, rank: int) -> Batch | None:
        """The next batch of ``rank``, None at its end."""
        one = self.ranks[rank]
        leg, session = one.leg, one.session
        look = leg.batch_rows(session.position.steps)
        idle = 0
        while not session.finished:
            place = session.position.read
            count = max(0, min(look, leg.certain - place))
            shards, rows = leg.refs(place, count)
            refs = list(zip(shards.tolist(), rows.tolist(), strict=True))
            got = session.next_batch(np.array([ref not in self.bad for ref in refs], bool))
            if got is not None:
                offsets, session.position = got
                one.epochs += leg.epochs(place, count)[offsets].tolist()
                if not len(offsets):
                    return None
                batch = [(refs[i], place + i >= leg.candidates) for i in offsets.tolist()]
                one.batches.append(batch)
                return batch
            if count == look or leg.final:
                look += 3
            else:
                idle = 0 if self.ask(rank) else idle + 1
                assert idle < 5, f"rank {rank} asks and gets nothing: {leg!r}, {self.pool!r}"
        return None

    def run(self, choose: Callable[[list[int]], int], steps: int | None = None) -> None:
        """Ranks take batches in the order that ``choose`` gives (of those not through), ``steps`` each at the most."""
        going = set(range(len(self.ranks)))
        while going:
            rank = choose(sorted(going))
            one = self.ranks[rank]
            if (steps is not None and len(one.batches) >= steps) or self.step(rank) is None:
                going.discard(rank)
        self.pool.check()

    def all_real(self) -> list[Row]:
        return [row for one in self.ranks for row in one.real]

    def floor(self) -> m.Floor:
        """Everything handed out is acknowledged; the floor that follows, told to all ranks."""
        books = {}
        for rank, one in enumerate(self.ranks):
            step = one.leg.first_step + one.session.position.steps
            progress = m.EpochProgress(
                epoch=self.case.epoch, step=step, acked_step=step, handed=(one.place,), acked=(one.place,)
            )
            books[rank] = RankEpochRecord(
                job="job", generation=self.number, epoch=self.case.epoch, rank=rank, progress=progress
            )
        self.pool.advance(books, range(len(self.ranks)))
        floor = m.Floor(epoch=self.case.epoch, position=self.pool.floor, step=self.pool.floor_step)
        for one in self.ranks:
            one.leg.take_floor(floor)
        return floor

    def states(self) -> list[dict[str, Any]]:
        """What ``state_dict`` of every rank returns, but where all are through with the epoch."""
        out = []
        quotas = not self.settings.elastic and self.settings.tail != "ragged"
        for rank, one in enumerate(self.ranks):
            position, saved = one.leg.saved(lambda one=one: one.session.position)  # type: ignore[misc]
            out.append(
                {
                    "version": VERSION,
                    "dataset": "numbers@1",
                    "identity": identity_of(self.settings),
                    "generation": self.number,
                    "epoch": self.case.epoch,
                    "step": encode_step(one.leg.first_step + position.steps),
                    "first_epoch": self.case.epoch,
                    "rank": rank,
                    "world_size": len(self.ranks),
                    "taken": "",
                    "rows": self.case.total,
                    "job": "job",
                    "skip": bool(self.bad),
                    "dynamic": dynamic_state.encode(
                        saved,
                        one.place,
                        quotas=quotas,
                        ended=one.leg.ends_at(position),
                        next_first=self.case.epoch,
                    ),
                }
            )
        return out


def rows_of(case: Case, ranges: bytes) -> list[Row]:
    """The rows at these plan positions."""
    return [case.order[position] for position in Ranges.decode(ranges).values().tolist()]


def in_turn() -> Callable[[list[int]], int]:
    """Ranks one after the other."""
    last = [-1]

    def choose(going: Sequence[int]) -> int:
        last[0] = next((rank for rank in going if rank > last[0]), going[0])
        return last[0]

    return choose
