"""Cutting rows of a chunk into reads by worker. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from manifests.wire.messages import WorkerRef

I64 = npt.NDArray[np.int64]

#: bytes of rows above which a shard is read from all workers its grant names, and bytes of the stretches
_BIG = 64 << 20
_STRETCH = 24 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """Where one shard may be read from.

    ``workers``: at least one, the first is taken. ``stretch``: rows after which the next of the workers takes its turn,
    0: one worker reads it all. ``alone``: in a read that holds no other shard.
    """

    workers: tuple[WorkerRef, ...]
    grant: bytes
    stretch: int = 0
    alone: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """One read. ``offsets``: as given to ``cut``, int64 [rows]; ``which``: index into ``grants`` per row, int64 [rows]."""

    worker: WorkerRef
    grants: tuple[bytes, ...]
    offsets: I64
    which: I64


def stretch_rows(rows: int, row_bytes: float) -> int:
    """Rows of a stretch of a shard of ``rows`` rows: a power of two, 17 to 34 MB; 0 for a shard that is not big."""
    if rows * row_bytes <= _BIG:
        return 0
    return int(2 ** max(0, round(math.log2(_STRETCH / max(row_bytes, 1.0)))))


def cut(offsets: I64, shards: I64, rows: I64, sources: Mapping[int, Source], limit: int) -> tuple[list[Cut], I64]:
    """Reads of at most ``limit`` rows for the rows at ``offsets``, and the offsets whose shard has no source.

    Args:
        offsets, shards, rows: where the rows belong, their shards, their rows there; int64 [rows] each.
    """
    distinct, place = np.unique(shards, return_inverse=True)
    groups: dict[tuple[str, int], int] = {}
    workers: list[WorkerRef] = []

    def group_of(worker: WorkerRef, shard: int) -> int:
        found = groups.setdefault((worker.id, shard), len(workers))
        if found == len(workers):
            workers.append(worker)
        return found

    numbers = np.full(len(distinct), -1, np.int64)
    turns: list[tuple[int, int]] = []
    for index, shard in enumerate(distinct.tolist()):
        source = sources.get(shard)
        if source is None:
            continue
        alone = shard if source.alone else -1
        if source.stretch and len(source.workers) > 1:
            turns.append((index, alone))
        else:
            numbers[index] = group_of(source.workers[0], alone)
    mine = numbers[place]
    for index, alone in turns:
        source = sources[int(distinct[index])]
        here = np.flatnonzero(place == index)
        turn = rows[here] // source.stretch % len(source.workers)
        for number in np.unique(turn).tolist():
            mine[here[turn == number]] = group_of(source.workers[number], alone)
    cuts = []
    for number, worker in enumerate(workers):
        inside = np.flatnonzero(mine == number)
        for at in range(0, len(inside), limit):
            part = inside[at : at + limit]
            used, which = np.unique(place[part], return_inverse=True)
            grants = tuple(sources[shard].grant for shard in distinct[used].tolist())
            cuts.append(Cut(worker, grants, offsets[part], which.astype(np.int64)))
    return cuts, offsets[mine < 0]
