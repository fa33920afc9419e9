"""Group commit: which puts and deletes go into one transaction. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from .effects import Delete, Effect, Put
from .store import MAX_BYTES, MAX_OPERATIONS, commit_bytes


def transactions(done: list[list[Effect]]) -> Iterator[tuple[dict[str, bytes], set[str]]]:
    """Puts and deletes of events in order, in groups that each fit a commit. The effects of one event stay together,
    unless they alone do not fit: then puts come first, so that what is deleted was replaced before."""
    puts: dict[str, bytes] = {}
    deletes: set[str] = set()
    for effects in done:
        more, gone = _net(effects)
        if not more and not gone:
            continue
        if (puts or deletes) and not _fits({**puts, **more}, (deletes | gone) - set(more)):
            yield puts, deletes
            puts, deletes = {}, set()
        if not _fits(more, gone):
            yield from _cut(more, gone)
            continue
        for key in gone:
            puts.pop(key, None)
        puts.update(more)
        deletes = (deletes | gone) - set(puts)
    if puts or deletes:
        yield puts, deletes


def _net(effects: list[Effect]) -> tuple[dict[str, bytes], set[str]]:
    puts: dict[str, bytes] = {}
    deletes: set[str] = set()
    for effect in effects:
        if isinstance(effect, Put):
            puts.pop(effect.key, None)
            puts[effect.key] = effect.value
            deletes.discard(effect.key)
        elif isinstance(effect, Delete):
            puts.pop(effect.key, None)
            deletes.add(effect.key)
    return puts, deletes


def _fits(puts: dict[str, bytes], deletes: set[str]) -> bool:
    return len(puts) + len(deletes) <= MAX_OPERATIONS and commit_bytes(puts, deletes) <= MAX_BYTES


def _cut(puts: dict[str, bytes], deletes: set[str]) -> Iterator[tuple[dict[str, bytes], set[str]]]:
    part: dict[str, bytes] = {}
    for key, value in puts.items():
        if part and not _fits({**part, key: value}, set()):
            yield part, set()
            part = {}
        part[key] = value
    if part:
        yield part, set()
    names = sorted(deletes)
    for at in range(0, len(names), MAX_OPERATIONS):
        yield {}, set(names[at : at + MAX_OPERATIONS])
