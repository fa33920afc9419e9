"""A bench for the dispatcher's pure core: a state on a hand-wound clock, its store, and ranks that keep honest books."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import numpy as np

from dispatcher import audit, events, records
from dispatcher.effects import Delete, Log, Put, Reply
from dispatcher.library import ShardInfo, ShardOrder
from dispatcher.state import State
from manifests import cursor
from manifests.errors import FeedlineError, UnknownDataset
from manifests.granted import Lane, Piece, decode_pieces, encode_pieces, window_rows
from manifests.identity import id_sum
from manifests.manifest import Manifest, Shard
from manifests.plan import Plan, lane_sizes
from manifests.ranges import Ranges
from manifests.schema import Field
from manifests.wire import messages as m

LEASE = 10.0
SPEC = "sha256:" + "5" * 64


def make_manifest(shard_rows: list[int], name: str = "photos") -> Manifest:
    shards = [
        Shard(
            i, f"/data/{name}-{i}.tar", "tar", rows, 100 * rows, "blake3:" + f"{name}{i}".encode().hex().rjust(64, "0")
        )
        for i, rows in enumerate(shard_rows)
    ]
    return Manifest.from_shards(name, "1", [Field(name="x", kind="scalar", dtype="int64")], shards)


class Shelf:
    """Manifests in memory, as the core's library."""

    def __init__(self) -> None:
        self.manifests: dict[str, Manifest] = {}

    def add(self, manifest: Manifest) -> str:
        self.manifests[manifest.digest] = manifest
        return manifest.digest

    def _get(self, digest: str) -> Manifest:
        if digest not in self.manifests:
            raise UnknownDataset(f"no manifest {digest}")
        return self.manifests[digest]

    def shard(self, digest: str, ordinal: int) -> ShardInfo | None:
        manifest = self._get(digest)
        if not 0 <= ordinal < len(manifest.shards):
            return None
        s = manifest.shards[ordinal]
        return ShardInfo(
            ordinal, s.uri, s.format, s.rows, s.bytes, s.content_id, first_id=int(manifest.first_ids[ordinal])
        )

    def shard_rows(self, digest: str) -> Any:
        return self._get(digest).shard_rows

    def plan(self, digest: str, seed: int, epoch: int, shuffle: m.Shuffle | None) -> ShardOrder:
        return ShardOrder(self.shard_rows(digest), seed, epoch, shuffle)


class Bench:
    """One dispatcher core. Every event is followed by ``State.check`` and by the store taking its puts and deletes."""

    def __init__(self, shard_rows: list[int] | None = None) -> None:
        self.shelf = Shelf()
        self.manifest = make_manifest(shard_rows or [3, 5, 4, 1, 11])
        self.digest = self.shelf.add(self.manifest)
        self.at = 100.0
        self.stored: dict[str, bytes] = {}
        self.logs: list[str] = []
        self._numbers = itertools.count(1)
        self._nonces = itertools.count(1)
        self._ids: dict[Any, list[int]] = {}
        self.state = State(self.shelf, LEASE)
        self.state.load({}, self.at)
        self.apply(events.KeyDrawn, id="k1", secret=b"s" * 32)

    @property
    def now_ms(self) -> int:
        return 1_700_000_000_000 + round(self.at * 1000)

    def apply(self, kind: type[events.Event], **fields: Any) -> Any:
        number = next(self._numbers)
        event = kind(at=self.at, now_ms=self.now_ms, request=number, cause=f"c{number}", **fields)
        answers = []
        for effect in self.state.apply(event):
            if isinstance(effect, Put):
                self.stored[effect.key] = effect.value
            elif isinstance(effect, Delete):
                self.stored.pop(effect.key, None)
            elif isinstance(effect, Log):
                self.logs.append(effect.text)
            elif isinstance(effect, Reply):
                assert effect.request == number
                answers.append(effect.answer)
        self.state.check()
        durable = self.state.durable()
        kept = {k: v for k, v in self.stored.items() if "/assignments/" not in k}
        assert durable == kept, (sorted(set(durable) ^ set(kept)), "memory and store differ")
        assert len(answers) <= 1
        if answers and isinstance(answers[0], FeedlineError):
            raise answers[0]
        return answers[0] if answers else None

    def wait(self, seconds: float) -> None:
        self.at += seconds
        self.apply(events.TimePassed)

    def reload(self) -> None:
        """Another dispatcher takes over: all it knows is in the store."""
        self.state = State(self.shelf, LEASE)
        for effect in self.state.load(self.stored, self.at):
            if isinstance(effect, Delete):
                self.stored.pop(effect.key, None)
        self.state.check()

    # -- workers

    def worker(self, name: str = "w1", fingerprint: str = "pillow-1", **fields: Any) -> m.WorkerWelcome:
        fields = {"incarnation": f"{name}-1", "address": f"127.0.0.1:{9000 + int(name[1:])}", **fields}
        return self.apply(events.WorkerRegistered, message=m.RegisterWorker(id=name, fingerprint=fingerprint, **fields))

    def beat(self, name: str = "w1", **fields: Any) -> m.WorkerWelcome:
        fields = {"incarnation": f"{name}-1", **fields}
        return self.apply(events.WorkerHeartbeatReceived, message=m.Heartbeat(id=name, **fields))

    # -- jobs

    def settings(self, **fields: Any) -> m.JobSettings:
        defaults: dict[str, Any] = {
            "sources": (m.Source(digest=self.digest, name="photos", version="1"),),
            "spec": SPEC,
            "pipeline": "",
            "batch_size": 2,
        }
        return m.JobSettings(**{**defaults, **fields})

    def open(
        self,
        rank: int = 0,
        uid: str = "",
        *,
        job: str = "train",
        nonce: str = "",
        start: m.StartPoint | None = None,
        dead: tuple[str, ...] = (),
        decodes: bool = False,
        drawn_seed: int = 77,
        **settings: Any,
    ) -> m.JobOpened:
        ask = m.OpenJob(
            job=job,
            rank=rank,
            holder=m.Holder(uid=uid or f"u{rank}", host="box", pid=100 + rank),
            nonce=nonce or f"n{next(self._nonces):06}",
            settings=self.settings(**settings),
            start=start or m.StartPoint(),
            dead=dead,
        )
        known = [s.digest in self.shelf.manifests for s in ask.settings.sources]
        unknown = tuple(s.digest for s, there in zip(ask.settings.sources, known) if not there)
        rows = sum(self.shelf.manifests[s.digest].rows for s, there in zip(ask.settings.sources, known) if there)
        return self.apply(
            events.JobOpenRequested, message=ask, drawn_seed=drawn_seed, decodes=decodes, unknown=unknown, rows=rows
        )

    def ask(self, opened: m.JobOpened, rank: int = 0, shards: Any = (0,), uid: str = "", **fields: Any) -> m.Grants:
        fields = {"epoch": opened.start.epoch, **fields}
        message = m.AskGrants(
            job=opened.job,
            generation=opened.generation,
            rank=rank,
            holder=uid or f"u{rank}",
            shards=tuple(m.ShardAsk(source=0, shard=s) for s in shards),
            **fields,
        )
        return self.apply(events.GrantsRequested, message=message)

    def report(self, opened: m.JobOpened, rank: int = 0, *epochs: m.EpochProgress, uid: str = "", **fields: Any) -> Any:
        message = m.Report(
            job=opened.job, generation=opened.generation, rank=rank, holder=uid or f"u{rank}", epochs=epochs, **fields
        )
        return self.apply(events.ProgressReported, message=message)

    def id_of(self, settings: m.JobSettings, epoch: int, position: int) -> int:
        """Sample id at a plan position."""
        name = (settings.seed or 0, epoch, settings.shuffle)
        if name not in self._ids:
            plan = Plan(self.manifest.shard_rows, seed=name[0], epoch=epoch, shuffle=name[2], lanes=1)
            self._ids[name] = plan.ids(*plan.plan_rows(np.arange(plan.rows))).tolist()
        return self._ids[name][position]

    def audit(self, job: str = "train", epoch: int | None = None) -> dict[str, Any]:
        found = self.state.jobs.by_name[job]
        document = audit.audit(audit.snapshot(found, self.at, LEASE), epoch, self.shelf.shard_rows)
        parts = ("acknowledged", "lost", "skipped", "dropped", "abandoned", "quarantined", "open")
        assert document["rows"] == sum(document[name] for name in parts), document
        return document


class Rank:
    """A rank's books of one epoch of one generation, kept from the plan as an honest client does."""

    def __init__(self, bench: Bench, opened: m.JobOpened, rank: int, epoch: int | None = None) -> None:
        self.bench, self.opened, self.rank = bench, opened, rank
        settings, start = opened.settings, opened.start
        self.epoch = start.epoch if epoch is None else epoch
        here = self.epoch == start.epoch
        self.plan = Plan(
            bench.manifest.shard_rows,
            seed=settings.seed or 0,
            epoch=self.epoch,
            shuffle=settings.shuffle,
            lanes=settings.lanes or 1,
        )
        lanes = settings.lanes or 1
        self.own = cursor.own_lanes(rank, settings.world_size, lanes)
        self.sizes = self.plan.lane_sizes()[self.own]
        taken = np.asarray(start.taken if here and start.taken else [0] * lanes, np.int64)
        self.start = taken[self.own]
        self.handed = self.start.copy()
        self.acked = self.start.copy()
        self.ids: list[int] = []
        self.planned: list[int] = []
        self.acked_ids: list[int] = []
        self.skipped: list[m.SkippedRow] = []
        self.acked_skipped = 0
        self.step = self.acked_step = start.step if here else 0
        self.padded = 0

    @property
    def left(self) -> int:
        return int((self.sizes - self.handed).sum())

    def hand(self, rows: int | None = None, skip: int = 0) -> list[int]:
        """One batch: ``rows`` good rows (default batch_size) and ``skip`` bad ones before them."""
        want = (self.opened.settings.batch_size if rows is None else rows) + skip
        places, index = cursor.sequence(self.sizes, self.handed, want)
        ids = [int(self.plan.lane_ids(int(self.own[p]), int(i), 1)[0]) for p, i in zip(places, index)]
        self.handed = cursor.advance(self.sizes, self.handed, want)
        for bad in ids[:skip]:
            self.skipped.append(m.SkippedRow(sample_id=bad, key=str(bad), shard="s", reason="truncated"))
        self.ids += ids[skip:]
        self.planned += ids[skip:]
        self.step += 1
        return ids[skip:]

    def ack(self) -> None:
        self.acked = self.handed.copy()
        self.acked_ids = list(self.ids)
        self.acked_step = self.step
        self.acked_skipped = len(self.skipped)

    def finish(self, tail: str = "pad") -> m.EpochProgress:
        """Hand out and acknowledge all that the tail rule gives."""
        batch = self.opened.settings.batch_size
        while self.left >= (batch if tail == "drop" else 1):
            self.hand(min(batch, self.left))
        self.ack()
        return self.progress("finished")

    def progress(self, state: Any = "open", **changes: Any) -> m.EpochProgress:
        fields: dict[str, Any] = {
            "epoch": self.epoch,
            "step": self.step,
            "acked_step": self.acked_step,
            "handed": tuple(self.handed.tolist()),
            "acked": tuple(self.acked.tolist()),
            "source": sum_of(self.planned),
            "handed_out": sum_of(self.ids),
            "acknowledged": sum_of(self.acked_ids),
            "skipped": tuple(self.skipped),
            "acked_skipped": self.acked_skipped,
            "padded": self.padded,
            "state": state,
        }
        return m.EpochProgress(**{**fields, **changes})

    def send(self, state: Any = "open", **fields: Any) -> Any:
        return self.bench.report(self.opened, self.rank, self.progress(state), **fields)


class DynamicRank:
    """A rank's part of one epoch in dynamic order, as an honest client has it: its lane is worked out from the pieces."""

    def __init__(self, bench: Bench, opened: m.JobOpened, rank: int, epoch: int | None = None, uid: str = "") -> None:
        self.bench, self.opened, self.rank, self.uid = bench, opened, rank, uid or f"u{rank}"
        settings, start = opened.settings, opened.start
        self.epoch = start.epoch if epoch is None else epoch
        here = self.epoch == start.epoch
        rows = bench.manifest.rows
        self.window = window_rows(settings.shuffle, rows, settings.world_size)
        self.taken = Ranges.decode(start.ranges) if here else Ranges.of([])
        mine = [grants for grants in start.lanes if grants.rank == rank] if here else []
        self.begun = mine[0].place if mine else 0
        self.lane = (
            Lane.restore(mine[0], seed=settings.seed or 0, epoch=self.epoch, window=self.window)
            if mine
            else self._new_lane(rank)
        )
        self.quota: int | None = None
        if not settings.elastic and settings.tail != "ragged":
            self.quota = int(lane_sizes(rows - len(self.taken), settings.world_size)[rank])
        self.place = self.acked = self.begun
        self.step = self.acked_step = start.step if here else 0
        self.first_step = self.step
        self.rows: list[tuple[int, int]] = []  # (epoch, position) handed out, in order
        self.acked_rows = 0
        self.passed: dict[int, m.SkippedRow] = {}  # index in rows -> skipped
        self.final = self.over = False
        self.floor = m.Floor(epoch=self.epoch, position=0, step=0)
        #: pieces of earlier epochs that this one hands out, as last told; None before the first answer
        self.carried: bytes | None = None

    def _new_lane(self, number: int) -> Lane:
        settings = self.opened.settings
        return Lane(seed=settings.seed or 0, epoch=self.epoch, number=number, window=self.window)

    # -- asking

    def ask(self, more: int, lose: bool = False) -> m.Grants:
        """Ask for ``more`` rows than are known; ``lose``: the answer does not arrive."""
        found = self.bench.ask(
            self.opened,
            self.rank,
            (),
            uid=self.uid,
            epoch=self.epoch,
            have=self.lane.length,
            want=self.lane.length + more,
            place=self.place,
        )
        if not lose:
            self.take(found)
        return found

    def take(self, found: m.Grants) -> None:
        assert not found.waiting, found
        assert found.lane is not None
        self.carried = found.carried
        if found.floor is not None:
            self.forget(found.floor)
        length = self.lane.length
        at_end = length - self.place < self.opened.settings.batch_size and self.lane.ends_with_cut
        if found.lane.number != self.lane.number and not found.final:
            assert not self.rows
            self.lane, self.begun = self._new_lane(found.lane.number), found.lane.place
            self.place = self.acked = self.begun
        if found.lane.pieces and found.lane.dropped > self.lane.length:
            return
        self.lane.extend(p for p in decode_pieces(found.lane.pieces) if p.index >= self.lane.length)
        if self.quota is not None:
            assert self.lane.length - self.begun <= self.quota
        self.final |= found.final
        nothing = self.quota is None and at_end and self.lane.length == length
        if found.final or nothing or (self.quota is not None and self.lane.length - self.begun >= self.quota):
            self.over = True
            if self.lane.certain < self.lane.length:
                self.lane.extend([Piece(self.lane.length, 0, 0, self.epoch)])

    def forget(self, floor: m.Floor) -> None:
        if floor.epoch == self.epoch and floor.position > self.floor.position:
            self.floor = floor
            self.lane = self.lane.forget(floor.position)

    # -- handing out

    @property
    def steps(self) -> int | None:
        """Steps of this leg, None without quotas."""
        settings = self.opened.settings
        if self.quota is None:
            return None
        left = self.bench.manifest.rows - len(self.taken)
        if settings.tail == "drop":
            return left // (settings.world_size * settings.batch_size)
        return math.ceil(math.ceil(left / settings.world_size) / settings.batch_size)

    @property
    def done(self) -> bool:
        """All batches were handed out."""
        if self.steps is None:
            return self.over and self.place == self.lane.length
        return self.step - self.first_step >= self.steps

    def hand(self) -> int:
        """One batch, if its rows are certain; rows handed out."""
        batch = self.opened.settings.batch_size
        known = self.lane.certain - self.place
        if self.done or (known < batch and not self.over):
            return 0
        positions, epochs = self.lane.leave(self.place, min(batch, known))
        self.rows += zip(epochs.tolist(), positions.tolist())
        self.place += len(positions)
        self.step += 1
        return len(positions)

    def skip(self) -> None:
        """The next row is bad: passed over."""
        if self.done or self.lane.certain == self.place:
            return
        positions, epochs = self.lane.leave(self.place, 1)
        row = (int(epochs[0]), int(positions[0]))
        if row[0] != self.epoch:
            return
        self.passed[len(self.rows)] = m.SkippedRow(sample_id=self.ids([row])[0], key="k", shard="s", reason="cut")
        self.rows.append(row)
        self.place += 1

    def ack(self) -> None:
        self.acked, self.acked_step, self.acked_rows = self.place, self.step, len(self.rows)

    def unacked(self) -> list[tuple[int, int]]:
        return self.rows[self.acked_rows :]

    # -- telling

    def ids(self, rows: list[tuple[int, int]]) -> list[int]:
        return [self.bench.id_of(self.opened.settings, epoch, position) for epoch, position in rows]

    def _sums(self, stop: int) -> tuple[m.IdSum, dict[int, m.IdSum]]:
        by_epoch: dict[int, list[tuple[int, int]]] = {}
        for at, row in enumerate(self.rows[:stop]):
            if at not in self.passed:
                by_epoch.setdefault(row[0], []).append(row)
        sums = {epoch: sum_of(self.ids(rows)) for epoch, rows in by_epoch.items()}
        return sums.pop(self.epoch, m.IdSum()), sums

    def progress(self, state: Any = "open") -> m.EpochProgress:
        handed, carried = self._sums(len(self.rows))
        acked, carried_acked = self._sums(self.acked_rows)
        return m.EpochProgress(
            epoch=self.epoch,
            step=self.step,
            acked_step=self.acked_step,
            handed=(self.place,),
            acked=(self.acked,),
            source=handed,
            handed_out=handed,
            acknowledged=acked,
            skipped=tuple(self.passed.values()),
            acked_skipped=sum(at < self.acked_rows for at in self.passed),
            state=state,
            carried=tuple(
                m.CarriedSum(epoch=epoch, handed_out=found, acknowledged=carried_acked.get(epoch, m.IdSum()))
                for epoch, found in sorted(carried.items())
            ),
        )

    def send(self, state: Any = "open", **fields: Any) -> m.Reported:
        found: m.Reported = self.bench.report(self.opened, self.rank, self.progress(state), uid=self.uid, **fields)
        for floor in found.floors:
            self.forget(floor)
        return found

    def mark(self) -> m.EpochProgress:
        """The state now, as a mark."""
        lane = self.lane.grants(self.rank, self.place)
        before = self.taken | Ranges.of([(0, self.floor.position)])
        return m.EpochProgress(
            epoch=self.epoch,
            step=self.step,
            handed=(self.place,),
            lane=lane,
            before=before.encode(),
            floor_step=self.floor.step,
        )

    def finish(self) -> None:
        """Ask, hand out and acknowledge to the end of the epoch."""
        for _ in range(10_000):
            if self.done:
                break
            if not self.hand():
                self.ask(self.window + self.opened.settings.batch_size)
        assert self.done, self.lane
        self.ack()
        self.send("finished")


def start_of(ranks: list[DynamicRank], **fields: Any) -> m.StartPoint:
    """The start point that the states of these ranks make; ranks of the job that are not among them are missing."""
    first = ranks[0]
    taken = Ranges.of([])
    for rank in ranks:
        taken |= Ranges.decode(rank.mark().before) | rank.lane.left(rank.place)
    world = first.opened.settings.world_size
    start = m.StartPoint(
        kind="checkpoint",
        epoch=first.epoch,
        step=max(rank.step for rank in ranks),
        first_epoch=first.opened.start.first_epoch,
        generation=first.opened.generation,
        job=first.opened.job,
        world_size=world,
        ranges=taken.encode(),
        lanes=tuple(rank.lane.grants(rank.rank, rank.place) for rank in ranks),
        missing=tuple(sorted(set(range(world)) - {rank.rank for rank in ranks})),
        carried=_still_carried(ranks),
    )
    return msgspec.structs.replace(start, **fields)


def _still_carried(ranks: list[DynamicRank]) -> bytes:
    told = [piece for rank in ranks for piece in decode_pieces(rank.carried or b"")]
    out = []
    for epoch in sorted({piece.epoch for piece in told}):
        gone = np.array([p for rank in ranks for e, p in rank.rows if e == epoch], np.int64)
        of_it = Ranges.of((piece.start, piece.stop) for piece in told if piece.epoch == epoch)
        out += [Piece(0, start, stop, epoch) for start, stop in of_it - Ranges.members(gone)]
    return encode_pieces(out)


def sum_of(ids: list[int]) -> m.IdSum:
    return m.IdSum(count=len(ids), value=id_sum(np.array(ids, np.int64)))


def whole_taken(ranks: list[Rank]) -> tuple[int, ...]:
    """Rows taken per lane over all ranks: what a checkpoint now would hold."""
    lanes = ranks[0].opened.settings.lanes or 1
    out = np.zeros(lanes, np.int64)
    for rank in ranks:
        out[rank.own] = rank.handed
    return tuple(out.tolist())


__all__ = [
    "LEASE", "SPEC", "Bench", "DynamicRank", "Rank", "Shelf", "make_manifest", "records", "start_of", "sum_of", "whole_taken",
]  # fmt: skip
