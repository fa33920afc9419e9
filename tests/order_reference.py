"""An executable reference of the order rules, written for reading: lists, loops, one row at a time.

It shares no code with the product but the keyed random numbers (passed in as functions), and the tests hold the product
against it: rows of every rank and step, over a grid of sizes, worlds, batches, lanes, tails, skips and resumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


def plan_order(
    shard_rows: Sequence[int],
    shard_key: Callable[[int], int] | None,
    row_key: Callable[[int, int], int] | None = None,
) -> list[tuple[int, int]]:
    """(shard, row) in plan order: shards by key, rows of a shard as stored or by key. No key: the manifest's order."""
    shards = list(range(len(shard_rows)))
    if shard_key is not None:
        shards.sort(key=lambda s: (shard_key(s), s))
    out = []
    for shard in shards:
        rows = list(range(shard_rows[shard]))
        if row_key is not None:
            rows.sort(key=lambda r, s=shard: (row_key(s, r), r))
        out += [(shard, row) for row in rows]
    return out


def cut_lanes(plan: Sequence[tuple[int, int]], lanes: int) -> list[list[tuple[int, int]]]:
    """Contiguous ranges; the first ``len(plan) % lanes`` lanes hold one row more."""
    base, extra = divmod(len(plan), lanes)
    out, at = [], 0
    for lane in range(lanes):
        size = base + (1 if lane < extra else 0)
        out.append(list(plan[at : at + size]))
        at += size
    return out


def interleave(rows: Sequence[tuple[int, int]], mixed: int) -> list[tuple[int, int]]:
    """Groups of ``mixed`` neighbouring shards, each group's shards spread evenly over the group."""
    runs: list[list[tuple[int, int]]] = []
    for row in rows:
        if not runs or runs[-1][0][0] != row[0]:
            runs.append([])
        runs[-1].append(row)
    out: list[tuple[int, int]] = []
    for at in range(0, len(runs), mixed):
        keyed = [
            ((j + 0.5) / len(run), n, row) for n, run in enumerate(runs[at : at + mixed]) for j, row in enumerate(run)
        ]
        out += [row for _, _, row in sorted(keyed, key=lambda item: item[:2])]
    return out


def window(rows: Sequence[tuple[int, int]], reach: int, u: Callable[[int], float]) -> list[tuple[int, int]]:
    """Row k leaves at key k + reach * u(k)."""
    return [rows[k] for k in sorted(range(len(rows)), key=lambda k: (k + reach * u(k), k))]


@dataclass
class Leg:
    """One generation's part of an epoch: every rank's rows per step, and the counts after it."""

    steps: list[list[list[tuple[tuple[int, int], bool]]]] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    planned: int = 0


def run(
    plan: Sequence[tuple[int, int]],
    lanes: Sequence[Sequence[tuple[int, int]]],
    world: int,
    batch: int,
    tail: str = "pad",
    bad: frozenset[tuple[int, int]] = frozenset(),
    taken: Sequence[int] | None = None,
    max_steps: int | None = None,
) -> Leg:
    """Hand out one leg. ``taken`` None: the epoch's beginning. A pad is the next good row of the rank's pad sequence."""
    total = len(plan)
    fresh = taken is None
    counts = [0] * len(lanes) if taken is None else list(taken)
    mine = [[lane for lane in range(len(lanes)) if lane % world == rank] for rank in range(world)]
    open_rows = [sum(len(lanes[lane]) - counts[lane] for lane in own) for own in mine]
    if tail == "pad":
        quotas = [math.ceil(total / world) if fresh else max(open_rows)] * world
    elif tail == "drop":
        full = total // (world * batch) if fresh else min(open_rows) // batch
        quotas = [full * batch] * world
    else:
        quotas = open_rows
    leg = Leg(planned=max(math.ceil(quota / batch) for quota in quotas))
    pads = [0] * world
    for step in range(leg.planned if max_steps is None else min(max_steps, leg.planned)):
        ranks = []
        for rank in range(world):
            rows: list[tuple[tuple[int, int], bool]] = []
            want = max(0, min(batch, quotas[rank] - step * batch))
            while len(rows) < want:
                candidates = [lane for lane in mine[rank] if counts[lane] < len(lanes[lane])]
                if candidates:
                    lane = min(candidates, key=lambda c: (counts[c], c))
                    row = lanes[lane][counts[lane]]
                    counts[lane] += 1
                    if row not in bad:
                        rows.append((row, False))
                elif tail == "ragged":
                    break
                else:
                    row = plan[(pads[rank] * world + rank + pads[rank] // total) % total]
                    pads[rank] += 1
                    if row not in bad:
                        rows.append((row, True))
            ranks.append(rows)
        leg.steps.append(ranks)
    leg.taken = counts
    return leg


def dynamic_lane(
    order: Sequence[tuple[int, int]], pieces: Sequence[tuple[int, int, int]], reach: int, u: Callable[[int], float]
) -> list[tuple[int, int]]:
    """Rows of one rank in dynamic order, as they leave. ``pieces``: (lane index of the group's first row, first and last
    plan position plus one); an empty one is a cut, which rows do not pass."""
    stretches: list[list[tuple[float, tuple[int, int]]]] = [[]]
    index = at = 0
    while at < len(pieces):
        group = [piece for piece in pieces[at:] if piece[0] == pieces[at][0] and piece[1] < piece[2]]
        if not group:
            stretches.append([])
            at += 1
            continue
        spread = [
            ((j + 0.5) / (stop - start), n, order[start + j])
            for n, (_, start, stop) in enumerate(group)
            for j in range(stop - start)
        ]
        for _, _, row in sorted(spread, key=lambda item: item[:2]):
            stretches[-1].append((index + reach * u(index), row))
            index += 1
        at += len(group)
    return [row for stretch in stretches for _, row in sorted(stretch, key=lambda item: item[0])]
