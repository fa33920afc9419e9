"""Which generations an audit of one epoch goes through. Pure.

Of all generations the newest that says anything about the epoch decides: one with books there, one whose start point
lies inside it, the current one if it starts there, or one whose start point lies past it and so vouches for it. From
there the line goes back along parents, as long as start points lie inside the epoch.

A start point vouches for an earlier epoch only if its parents lead to a generation that was in that epoch. A fresh
start has no parent and vouches for nothing, at whatever epoch it begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from . import books
from .pool import taken_before
from .records import EpochRecord, GenerationRecord

Generations = Mapping[int, GenerationRecord]
Parents = Mapping[int, GenerationRecord | None]
Books = Mapping[tuple[int, int], EpochRecord]


@dataclass(frozen=True)
class Line:
    """``legs``: generations in the epoch, oldest first; each but the first starts inside it, in the one before.

    ``vouched``: a later start point lies past the epoch. ``root``: number of the oldest ancestor; books that newer
    generations off the line have of this epoch are void.
    """

    legs: tuple[GenerationRecord, ...]
    vouched: bool
    root: int


def find(generations: Generations, found_books: Books, current: int, epoch: int) -> Line | None:
    """The line of ``epoch``; None when no generation entered it."""
    parents = {number: parent_of(generations, generation) for number, generation in generations.items()}
    for number in sorted(generations, reverse=True):
        generation = generations[number]
        here = (number, epoch) in found_books or starts_inside(generation, epoch)
        if here or (number == current and generation.start.epoch == epoch):
            return _from(parents, generation, epoch, vouched=False)
        last = _vouched_for(parents, found_books, generation, epoch)
        if last is not None:
            return _from(parents, last, epoch, vouched=True)
    return None


def entered(generations: Generations, found_books: Books, current: int) -> tuple[int, int]:
    """The lowest and the highest epoch that the records tell of."""
    epochs = {epoch for _, epoch in found_books} | {generations[current].start.epoch}
    epochs |= {g.start.epoch for g in generations.values() if starts_inside(g, g.start.epoch)}
    return min(epochs), max(epochs)


def starts_inside(generation: GenerationRecord, epoch: int) -> bool:
    """Whether rows of the epoch lie before the start point, and the epoch was not over there."""
    return generation.start.epoch == epoch and generation.start.inside


def parent_of(generations: Generations, generation: GenerationRecord) -> GenerationRecord | None:
    """The generation a start point was taken in; None if it is fresh, or its parent is not in this record.

    A number alone says little: the state may be of another job, or of one of this name that is gone. So the parent must
    have the same order of the same rows, and start no later.
    """
    start = generation.start
    if start.kind == "fresh" or start.job not in ("", generation.job) or start.generation >= generation.number:
        return None
    parent = generations.get(start.generation)
    if parent is None or _order(parent) != _order(generation):
        return None
    before = parent.start
    if before.epoch > start.epoch:
        return None
    if before.epoch == start.epoch and generation.settings.order == "dynamic":
        if taken_before(parent, start.epoch) - taken_before(generation, start.epoch):
            return None
    elif before.epoch == start.epoch:
        counts = books.start_counts(parent, start.epoch), books.start_counts(generation, start.epoch)
        if counts[0].shape != counts[1].shape or bool(np.any(counts[0] > counts[1])):
            return None
    return parent


def leads_to(generations: Generations, generation: GenerationRecord, ancestor: GenerationRecord) -> bool:
    """Whether the parents of a generation lead to ``ancestor``."""
    at: GenerationRecord | None = generation
    while at is not None and at.number > ancestor.number:
        at = parent_of(generations, at)
    return at is not None and at.number == ancestor.number


def _order(generation: GenerationRecord) -> tuple[object, ...]:
    settings = generation.settings
    digests = tuple(source.digest for source in settings.sources)
    return (digests, generation.rows, settings.seed, settings.lanes, settings.shuffle, settings.order)


def _ancestors(parents: Parents, generation: GenerationRecord) -> Iterator[GenerationRecord]:
    """The generation itself, its parent, and so on."""
    at: GenerationRecord | None = generation
    while at is not None:
        yield at
        at = parents[at.number]


def _from(parents: Parents, last: GenerationRecord, epoch: int, *, vouched: bool) -> Line:
    legs: list[GenerationRecord] = []
    root = last.number
    for generation in _ancestors(parents, last):
        root = generation.number
        if not legs or starts_inside(legs[-1], epoch):
            legs.append(generation)
    return Line(tuple(legs[::-1]), vouched, root)


def _vouched_for(
    parents: Parents, found_books: Books, generation: GenerationRecord, epoch: int
) -> GenerationRecord | None:
    """The generation whose rows in an earlier epoch this one's start point acknowledges."""
    if generation.start.epoch <= epoch:
        return None
    child = generation
    for at in list(_ancestors(parents, generation))[1:]:
        if at.start.epoch <= epoch:
            # Reports may be missing when a process was killed. A saved state tells in which epoch its pass began, and a
            # pass goes through all epochs; "latest" stands where reports led, so it knows no more than they did.
            passed = not child.latest and child.start.first_epoch <= epoch
            known = (at.number, epoch) in found_books or at.start.epoch == epoch
            return at if known or passed else None
        child = at
    return None
