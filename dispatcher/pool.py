"""The pool of one epoch in dynamic order: what no rank was granted yet, and the lanes of those that were. Pure.

Every plan position of the epoch is in one place: it is free, in one rank's lane, settled (handed out for good, before the
generation or by a lane that is no more), or away (carried over into a later epoch). What lies below the floor all ranks
have handed out, and lanes forget it. Rows carried over from earlier epochs are handed out first and are counted apart.

Ranks get pieces by guided self-scheduling: early ones are large, those at the end small, so that all end together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain

import msgspec

from manifests.granted import Piece, decode_pieces, window_rows
from manifests.plan import lane_sizes
from manifests.ranges import Ranges, encode_bounds
from manifests.wire import messages as m

from .held import PART, Held
from .records import EpochRecord, GenerationRecord, LanePartRecord, LaneRecord, PoolRecord, RankEpochRecord
from .stretches import Stretch, count, decode_stretches, encode_stretches, left_rows, merged, union, without

#: pieces in one answer
MAX_PIECES = 512
#: pieces of a lane that are kept: a rank that has so many waits for the floor
MAX_KEPT = 30_000

#: (epoch, plan position) -> where the shard at that position ends, and the most rows of it that one piece may have
Bounds = Callable[[int, int], tuple[int, int]]


class Pool:
    """Rows of one epoch of one generation."""

    def __init__(self, generation: GenerationRecord, epoch: int) -> None:
        settings, start = generation.settings, generation.start
        self.generation = generation
        self.epoch = epoch
        self.rows = generation.rows
        self.world_size = settings.world_size
        self.window = window_rows(settings.shuffle, generation.rows, settings.world_size)
        self.lanes: dict[int, Held] = {}
        self.settled = Ranges.of([])
        #: positions that were carried over into a later epoch
        self.away = Ranges.of([])
        self.floor = 0
        self.floor_step = 0
        # step the floor was last worked out for, and a rank whose lane held it then
        self._tried, self._slow = 0, -1
        #: rows of earlier epochs to hand out first, and all that ever were here and are not settled
        self.carried: list[Stretch] = []
        self.carried_in: list[Stretch] = []
        #: books of ranks that are gone for good
        self.book: EpochRecord | None = None
        # free stretches, highest first
        self._free: list[tuple[int, int]] = []
        self.free_rows = 0
        self._starts_here = epoch == start.epoch
        self._quotas: list[int] | None = None
        if has_quotas(settings):
            left = self.rows - len(taken_before(generation, epoch))
            self._quotas = lane_sizes(left, settings.world_size).tolist()

    def __repr__(self) -> str:
        return f"Pool(epoch {self.epoch}, {self.free_rows} rows free, {len(self.lanes)} lanes, floor {self.floor})"

    @classmethod
    def begin(cls, generation: GenerationRecord, epoch: int) -> Pool:
        """The pool as it is before anybody asked."""
        pool, start = cls(generation, epoch), generation.start
        taken = taken_before(generation, epoch)
        pool.floor, pool.floor_step = taken.floor, start.step if pool._starts_here else 0
        pool.settled, held, in_lanes = taken, Ranges.of([]), list[Stretch]()
        if pool._starts_here:
            pool.carried_in = decode_stretches(start.carried)
            for grants in start.lanes:
                pool.lanes[grants.rank] = found = pool._restore(grants)
                if pool._quotas is not None:
                    found.limit = grants.place + pool._quotas[grants.rank]
                    if found.is_full and not found.ends_with_cut:
                        found.extend([Piece(found.length, 0, 0, epoch)])
                lane = found.lane
                pool.settled -= lane.left(found.begun)
                rest = lane.remaining(found.begun)
                held |= Ranges.of((a, b) for e, a, b in rest if e == epoch)
                in_lanes += [s for s in rest if s[0] != epoch]
        pool._set_free((taken | held).gaps(pool.rows))
        pool.carried = without(pool.carried_in, in_lanes)
        return pool

    @classmethod
    def load(
        cls,
        generation: GenerationRecord,
        record: PoolRecord,
        lanes: Iterable[LaneRecord],
        parts: Iterable[LanePartRecord] = (),
    ) -> Pool:
        """The pool that records tell of. ``parts``: of lanes that do not hold their pieces themselves."""
        pool = cls(generation, record.epoch)
        pool._set_free(Ranges.decode(record.free))
        pool.carried = decode_stretches(record.carried)
        pool.carried_in = decode_stretches(record.carried_in)
        pool.settled, pool.away = Ranges.decode(record.settled), Ranges.decode(record.away)
        pool.floor, pool.floor_step, pool.book = record.floor, record.floor_step, record.book
        by_rank: dict[int, list[LanePartRecord]] = {}
        for part in parts:
            by_rank.setdefault(part.rank, []).append(part)
        for found in lanes:
            held = pool._restore(found.lane, found.forgotten)
            if mine := by_rank.get(found.lane.rank):
                held.restore(part.pieces for part in sorted(mine, key=lambda part: part.part))
            held.limit, held.ended = found.limit, found.ended
            pool.lanes[found.lane.rank] = held
        return pool

    def _restore(self, grants: m.LaneGrants, forgotten: int = 0) -> Held:
        held = self._lane(grants.number, dropped=grants.dropped, forgotten=forgotten, begun=grants.place)
        held.extend(decode_pieces(grants.pieces))
        return held

    def _lane(self, number: int, **fields: int) -> Held:
        seed = self.generation.settings.seed or 0
        return Held(seed=seed, epoch=self.epoch, number=number, window=self.window, **fields)

    # -- records

    def record(self) -> PoolRecord:
        return PoolRecord(
            job=self.generation.job,
            generation=self.generation.number,
            epoch=self.epoch,
            free=encode_bounds(chain.from_iterable(reversed(self._free))),
            carried=encode_stretches(self.carried),
            carried_in=encode_stretches(self.carried_in),
            settled=self.settled.encode(),
            away=self.away.encode(),
            floor=self.floor,
            floor_step=self.floor_step,
            book=self.book,
        )

    def whole_lane(self, rank: int) -> LaneRecord:
        """The lane of ``rank`` in one record with all its pieces: mind their number."""
        held = self.lanes[rank]
        return msgspec.structs.replace(self.lane_record(rank), forgotten=0, lane=held.grants(rank, held.begun))

    def lane_record(self, rank: int) -> LaneRecord:
        held = self.lanes[rank]
        return LaneRecord(
            job=self.generation.job,
            generation=self.generation.number,
            epoch=self.epoch,
            lane=m.LaneGrants(rank=rank, number=held.number, dropped=held.dropped, place=held.begun),
            forgotten=held.forgotten,
            limit=held.limit,
            ended=held.ended,
        )

    def lane_parts(self, rank: int, first: int = 0) -> Iterator[LanePartRecord]:
        """The parts of the lane with pieces that are numbered ``first`` or later."""
        for part, pieces in self.lanes[rank].parts(first):
            yield self._part(rank, part, pieces)

    def _part(self, rank: int, part: int, pieces: bytes = b"") -> LanePartRecord:
        return LanePartRecord(
            job=self.generation.job,
            generation=self.generation.number,
            epoch=self.epoch,
            rank=rank,
            number=self.lanes[rank].number,
            part=part,
            pieces=pieces,
        )

    def lane_keys(self, rank: int) -> list[str]:
        """Where the lane of ``rank`` is stored."""
        return [self.lane_record(rank).key, *(part.key for part in self.lane_parts(rank))]

    # -- what is free

    @property
    def free(self) -> Ranges:
        """Plan positions that no rank has."""
        return Ranges.of(self._free)

    @property
    def is_empty(self) -> bool:
        """Nothing can be granted now."""
        return not self._free and not self.carried

    def _set_free(self, free: Ranges) -> None:
        self._free = list(free)[::-1]
        self.free_rows = len(free)

    def give_back(self, rows: Iterable[Stretch]) -> None:
        """Rows that somebody had are free again; those of earlier epochs come first."""
        own = [(start, stop) for epoch, start, stop in rows if epoch == self.epoch]
        if own:
            self._set_free(self.free | Ranges.of(own))
        self.carried = union(self.carried, [s for s in rows if s[0] != self.epoch])

    def carry_in(self, rows: list[Stretch]) -> None:
        """Rows of earlier epochs are to be handed out in this one."""
        self.carried = union(self.carried, rows)
        self.carried_in = union(self.carried_in, rows)

    def carry_out(self) -> list[Stretch]:
        """Take all that is free out, to be handed out in a later epoch."""
        rows = [*self.carried, *((self.epoch, start, stop) for start, stop in self._free[::-1])]
        self.carried_in = without(self.carried_in, self.carried)
        self.carried = []
        self.away |= self.free
        self._set_free(Ranges.of([]))
        return rows

    # -- granting

    def hold(self, rank: int, tenure: int) -> Held:
        """The lane of ``rank``, a new one if it has none. ``tenure``: holders of the rank before, in this generation."""
        held = self.lanes.get(rank)
        if held is None:
            held = self.lanes[rank] = self._lane(rank + self.world_size * tenure)
            held.limit = self._quotas[rank] if self._quotas is not None else None
        return held

    def is_at_most(self, held: Held, more: int = 0) -> bool:
        """The lane, with so many pieces more, may not keep another group."""
        shuffle = self.generation.settings.shuffle
        return len(held.pieces) + more + (shuffle.interleave if shuffle is not None else 1) > MAX_KEPT

    def grant(self, held: Held, want: int, place: int, bounds: Bounds) -> bool:
        """Give the lane more pieces until it has ``want`` rows or may have no more; whether that changed anything.

        Args:
            place: rows of the lane handed out.
        """
        batch = self.generation.settings.batch_size
        shuffle = self.generation.settings.shuffle
        mixed = shuffle.interleave if shuffle is not None else 1
        length, found = held.length, list[Piece]()
        while length < want and not self.is_empty and not held.is_full:
            if len(found) >= MAX_PIECES or self.is_at_most(held, len(found)):
                break
            rows = self.free_rows + count(self.carried) if self.carried else self.free_rows
            share = math.ceil(rows / (2 * self.world_size))
            most = max(self.window + 2 * batch, share) - (length - place)
            if held.limit is not None:
                most = held.limit - length
            if most <= 0:
                break
            group = self._group(length, mixed, max(batch, share), most, bounds)
            found += group
            length += sum([piece.stop - piece.start for piece in group])
        if held.ended is not None:
            return False
        over = self.is_empty or (held.limit is not None and length >= held.limit)
        if over and (found or not held.ends_with_cut):
            found.append(Piece(length, 0, 0, self.epoch))
        if found:
            held.extend(found)
        return bool(found)

    def _group(self, index: int, mixed: int, guided: int, most: int, bounds: Bounds) -> list[Piece]:
        """Up to ``mixed`` pieces of as many shards, of at most ``guided`` rows each and ``most`` together. One at least."""
        if self.carried:
            epoch, start, stop = self.carried[0]
            end, limit = bounds(epoch, start)
            end = min(end, stop, start + min(limit, guided, most))
            self.carried[0:1] = [(epoch, end, stop)] if end < stop else []
            return [Piece(index, start, end, epoch)]
        group: list[Piece] = []
        free = self._free
        each, after = min(guided, math.ceil(most / mixed)), 0
        while len(group) < mixed and most > 0:
            at = len(free) - 1
            while at >= 0 and free[at][1] <= after:
                at -= 1
            if at < 0:
                break
            first, last = free[at]
            start = max(first, after)
            after, limit = bounds(self.epoch, start)
            end = min(last, after, start + min(limit, each, most))
            if start == first and end < last:
                free[at] = (end, last)
            else:
                free[at : at + 1] = [(a, b) for a, b in ((end, last), (first, start)) if a < b]
            self.free_rows -= end - start
            most -= end - start
            group.append(Piece(index, start, end, self.epoch))
        return group

    # -- ranks that leave

    def end(self, rank: int, place: int) -> bool:
        """The rank hands out no more than the first ``place`` rows of its lane: without quotas the others get the rest.
        Whether that changed anything."""
        held = self.lanes.get(rank)
        if held is None or self._quotas is not None or held.ended is not None or place >= held.length:
            return False
        rest = held.lane.remaining(place)
        held.ended = place
        self.give_back(rest)
        return True

    def settle(self, rank: int, place: int) -> list[Stretch]:
        """The lane of ``rank`` is no more; its first ``place`` rows are settled. Returns the others."""
        held = self.lanes.pop(rank)
        gone = left_rows(held.lane, place if held.ended is None else min(place, held.ended))
        self.settled |= Ranges.of((a, b) for e, a, b in gone if e == self.epoch)
        self.carried_in = without(self.carried_in, [s for s in gone if s[0] != self.epoch])
        return without(held.own(), gone)

    # -- how far ranks are

    def advance(self, ranks: Mapping[int, RankEpochRecord], waited_for: Collection[int]) -> dict[int, list[str]] | None:
        """Work the floor out again. ``ranks``: their books; ``waited_for``: those that will go on in this epoch.

        Returns:
            Ranks whose lanes forgot something, each with the keys of the parts that it needs no more; None when the floor
            stayed.
        """
        base = self.generation.start.step if self._starts_here else 0
        steps = [ranks[rank].progress.acked_step if rank in ranks else base for rank in waited_for]
        step = min(steps, default=0)
        if step <= max(self.floor_step, self._tried):
            return None
        self._tried = step
        found = [self.rows, *(bounds[0] for bounds in self._free[-1:]), *self.away.bounds[:1, 0].tolist()]
        if min(found) <= self.floor:
            return None
        # the lane that held the floor last time first: mostly it still does
        for rank in sorted(self.lanes, key=lambda rank: rank != self._slow):
            held = self.lanes[rank]
            # every batch has this many rows or, where some were skipped, more places
            place = held.begun + (step - base) * self.generation.settings.batch_size
            book = ranks.get(rank)
            lowest = held.lowest(min(place, book.progress.handed[0] if book is not None else held.begun))
            if lowest is not None and lowest < min(found):
                self._slow = rank
                if lowest <= self.floor:
                    return None
                found.append(lowest)
        self.floor, self.floor_step = min(found), step
        self.settled -= Ranges.of([(0, self.floor)])
        forgot = {}
        for rank, held in self.lanes.items():
            before = held.forgotten // PART
            if held.forget(self.floor):
                gone = range(before, held.forgotten // PART)
                forgot[rank] = [self._part(rank, part).key for part in gone]
        return forgot

    def taken(self, ranks: Mapping[int, RankEpochRecord]) -> tuple[Ranges, Ranges]:
        """Plan positions handed out, and those acknowledged, since the epoch began."""
        sure = self.settled | Ranges.of([(0, self.floor)])
        handed, acked = [sure], [sure]
        for rank, held in self.lanes.items():
            book = ranks.get(rank)
            acked.append(held.left(book.progress.acked[0] if book is not None else held.begun))
            handed.append(held.left(book.progress.handed[0]) if book is not None else acked[-1])
        return merged(handed), merged(acked)

    # -- invariants

    def check(self) -> None:
        """Raise ``RuntimeError`` unless every row is in one place."""
        lanes = [s for held in self.lanes.values() for s in held.own()]
        parts = [*self.free, *self.away, *self.settled, *((a, b) for e, a, b in lanes if e == self.epoch)]
        above = [(max(start, self.floor), stop) for start, stop in parts if stop > self.floor]
        rows, whole = sum(stop - start for start, stop in above), Ranges.of(above)
        if self._free and self._free[-1][0] < self.floor:
            raise RuntimeError(f"{self!r}: row {self._free[-1][0]} is free")
        if rows != len(whole) or whole != Ranges.of([(self.floor, self.rows)]):
            raise RuntimeError(f"{self!r}: {rows} rows above the floor, {len(whole)} different ones")
        if self.free_rows != len(self.free):
            raise RuntimeError(f"{self!r}: {len(self.free)} rows are free")
        carried = [s for s in lanes if s[0] != self.epoch]
        if union(self.carried, carried) != self.carried_in or count(self.carried) + count(carried) != count(
            self.carried_in
        ):
            raise RuntimeError(f"{self!r}: carried {self.carried_in}, free of them {self.carried}, in lanes {carried}")
        if self._quotas is not None:
            open_rows = sum(self._quotas[rank] for rank in range(self.world_size) if rank not in self.lanes)
            open_rows += sum((held.limit or 0) - held.length for held in self.lanes.values())
            if open_rows != self.free_rows:
                raise RuntimeError(f"{self!r}: quotas allow {open_rows} rows more")


def has_quotas(settings: m.JobSettings) -> bool:
    """Whether each rank has its number of rows in an epoch."""
    return not settings.elastic and settings.tail != "ragged"


def taken_before(generation: GenerationRecord, epoch: int) -> Ranges:
    """Plan positions of the epoch that lie before the generation's start point."""
    start = generation.start
    if epoch < start.epoch:
        return Ranges.of([(0, generation.rows)])
    return Ranges.decode(start.ranges) if epoch == start.epoch else Ranges.of([])
