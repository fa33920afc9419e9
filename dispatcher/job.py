"""One job in memory: its generations, who joined the current one, its open shards and its books."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import books
from .pool import Pool
from .records import (
    EpochRecord,
    GenerationRecord,
    JobRecord,
    MarkRecord,
    MemberRecord,
    QuarantineRecord,
    RankEpochRecord,
)

#: epochs kept per job after they were folded, and generations kept
KEPT_EPOCHS = 1000
KEPT_GENERATIONS = 1000

#: epoch, source, shard
OpenShard = tuple[int, int, int]


@dataclass(slots=True)
class Liveness:
    """What a rank last said; memory only. ``heard``, ``waiting_since``: monotonic seconds; the latter since it joined until
    it first says so."""

    heard: float
    state: str = "reading"
    waiting_for: str = ""
    waiting_since: float = 0.0


@dataclass(slots=True)
class Job:
    """Everything about one job. Members, assignments, liveness, pools and rank books are those of the current generation."""

    record: JobRecord
    generations: dict[int, GenerationRecord] = field(default_factory=dict)
    members: dict[int, MemberRecord] = field(default_factory=dict)
    #: rank -> open shard -> worker id, least recently renewed first
    assignments: dict[int, dict[OpenShard, str]] = field(default_factory=dict)
    liveness: dict[int, Liveness] = field(default_factory=dict)
    #: epoch -> rank -> books
    ranks: dict[int, dict[int, RankEpochRecord]] = field(default_factory=dict)
    #: (generation, epoch) -> books of all ranks
    folded: dict[tuple[int, int], EpochRecord] = field(default_factory=dict)
    #: rank -> epoch it is in, worked out from the books
    epochs: dict[int, int] = field(default_factory=dict)
    #: (generation, source, shard) -> why no worker could read it
    quarantine: dict[tuple[int, int, int], QuarantineRecord] = field(default_factory=dict)
    #: dynamic order: epoch -> its rows, for epochs that somebody asked rows of
    pools: dict[int, Pool] = field(default_factory=dict)
    #: (generation, epoch, step) -> rank -> the position it saved there
    marks: dict[tuple[int, int, int], dict[int, MarkRecord]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def current(self) -> GenerationRecord:
        return self.generations[self.record.generation]

    @property
    def world_size(self) -> int:
        return self.current.settings.world_size

    @property
    def absent(self) -> tuple[int, ...]:
        """Ranks that have not joined the current generation."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.members)

    @property
    def is_dynamic(self) -> bool:
        """Rows come from pools."""
        return self.current.settings.order == "dynamic"

    @property
    def is_elastic(self) -> bool:
        """A rank that dies holds nobody back."""
        return self.current.settings.elastic

    def is_live(self, rank: int, at: float, lease: float) -> bool:
        """Whether the rank joined, did not close, is not gone, and was heard within the lease."""
        member = self.members.get(rank)
        live = self.liveness.get(rank)
        if member is None or member.left or member.gone:
            return False
        return live is not None and at - live.heard <= lease

    def any_live(self, at: float, lease: float) -> bool:
        return any(self.is_live(rank, at, lease) for rank in self.members)

    def staying(self) -> list[int]:
        """Ranks that will go on, as far as is known: that have not closed and are not gone. All that have not joined yet
        are among them."""
        members = self.members
        return [r for r in range(self.world_size) if r not in members or not (members[r].left or members[r].gone)]

    def counted(self) -> list[int]:
        """Ranks whose position is part of the job's: all, but in elastic jobs those that are gone or, if others stay, have
        closed."""
        if not self.is_elastic:
            return list(range(self.world_size))
        kept = [r for r in range(self.world_size) if r not in self.members or not self.members[r].gone]
        return self.staying() or kept or list(range(self.world_size))

    def through(self, epoch: int) -> set[int]:
        """Ranks of an elastic job that will not come back to ``epoch``."""
        if not self.is_elastic:
            return set()
        staying = self.staying()
        return {r for r in range(self.world_size) if r not in staying or self.rank_epoch(r) > epoch}

    def rank_epoch(self, rank: int) -> int:
        """The epoch the rank is in: the one after its last when that is finished or abandoned."""
        return self.epochs.get(rank, self.current.start.epoch)

    def note_epoch(self, rank: int, epoch: int, state: str) -> None:
        """The rank has books in this epoch."""
        self.epochs[rank] = max(self.rank_epoch(rank), epoch + (state != "open"))

    def recount(self) -> None:
        """Work the ranks' epochs out again, after a load or for a new generation."""
        self.epochs = {}
        for epoch, found in self.ranks.items():
            for rank, record in found.items():
                self.note_epoch(rank, epoch, record.progress.state)
        for (generation, epoch), book in self.folded.items():
            if generation == self.record.generation:
                for rank in set(range(self.world_size)) - set(book.unfinished):
                    self.note_epoch(rank, epoch, "finished")
        for rank, member in self.members.items():
            if member.tenure and not any(rank in found for found in self.ranks.values()):
                self.catch_up(rank)

    def catch_up(self, rank: int) -> None:
        """A rank that was taken again begins where the slowest of the others is."""
        others = [self.rank_epoch(other) for other in self.staying() if other != rank]
        self.epochs[rank] = max(self.rank_epoch(rank), min(others, default=0))

    def slowest(self) -> tuple[int, int]:
        """(epoch, rank) of the slowest rank that has not closed; of all ranks when all have."""
        return min((self.rank_epoch(rank), rank) for rank in self.staying() or range(self.world_size))

    def newest_epoch(self) -> int:
        """The newest epoch the current generation has entered."""
        entered = [e for g, e in self.folded if g == self.record.generation]
        return max([self.current.start.epoch, *self.ranks, *entered])

    def book(self, generation: int, epoch: int) -> EpochRecord | None:
        """Books of all ranks in an epoch, None when that generation has none there."""
        if (generation, epoch) in self.folded:
            return self.folded[generation, epoch]
        if generation == self.record.generation and epoch in self.unfolded():
            return self.folding(epoch)
        return None

    def folding(self, epoch: int) -> EpochRecord:
        """The books of the current generation in an epoch, added up as they are now."""
        ranks = self.ranks.get(epoch, {})
        return books.fold(self.current, epoch, ranks, self.pools.get(epoch), self.through(epoch))

    def all_books(self) -> dict[tuple[int, int], EpochRecord]:
        """Every (generation, epoch) with books."""
        found = dict(self.folded)
        for epoch in self.unfolded():
            found[self.record.generation, epoch] = self.folding(epoch)
        return found

    def unfolded(self) -> list[int]:
        """Epochs of the current generation with books that were not folded yet."""
        gone = [epoch for epoch, pool in self.pools.items() if pool.book is not None]
        return sorted({*gone, *(epoch for epoch, ranks in self.ranks.items() if ranks)})

    def open_epoch(self) -> int:
        """The lowest epoch of the current generation that some rank has not finished or abandoned.

        With manual acknowledgements a rank can be in a later epoch while this one is not acknowledged to its end.
        """
        counted = self.counted()
        behind = [
            epoch
            for epoch, ranks in self.ranks.items()
            if any(rank in ranks and ranks[rank].progress.state == "open" for rank in counted)
        ]
        return min([*behind, *(self.rank_epoch(rank) for rank in counted)])

    def position(self) -> tuple[int, int]:
        """(epoch, step) that the record stands at, by acknowledgements."""
        epoch = self.open_epoch()
        book = self.book(self.record.generation, epoch)
        if book is not None:
            return epoch, max(book.acked_step, self._start_step(epoch))
        return epoch, self._start_step(epoch)

    def _start_step(self, epoch: int) -> int:
        return self.current.start.step if epoch == self.current.start.epoch else 0

    def has_progress(self) -> bool:
        """Whether any row was handed out, or the job stands anywhere but at the beginning of epoch 0."""
        start = self.current.start
        if start.step or start.epoch or any(book.step or book.handed_out.count for book in self.folded.values()):
            return True
        if any(pool.book is not None for pool in self.pools.values()):
            return True
        return any(record.progress.step for ranks in self.ranks.values() for record in ranks.values())

    def is_complete(self) -> bool:
        """Whether all ranks took the last epoch of a pass to its end and none began another pass."""
        epochs, first = self.current.settings.epochs, self.current.start.first_epoch
        done = self.open_epoch()
        if not epochs or done <= first or (done - first) % epochs:
            return False
        return not self.ranks.get(done)

    def state(self, at: float, lease: float) -> str:
        """``joining``, ``running``, ``stopped`` or ``complete``."""
        if self.is_complete():
            return "complete"
        if not self.any_live(at, lease):
            return "stopped"
        return "joining" if self.absent else "running"
