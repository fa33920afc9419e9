"""Lanes as the dispatcher keeps them: what has left is worked out from the pieces near a place, as ``Lane`` has it."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from dispatcher.held import PART, Held
from manifests.errors import ProtocolError
from manifests.granted import Lane, Piece, encode_pieces, group_rows, rows_before
from manifests.plan import merged_evenly
from manifests.ranges import Ranges

SEED, EPOCH, NUMBER = 7, 2, 1


def history(rows: int, draw: random.Random, interleave: int, odd: float = 0.2) -> list[list[Piece]]:
    """Grants in groups: positions that mostly ascend, some given back by others, some of an earlier epoch, some cuts."""
    out, index, position = [], 0, 100
    while index < rows:
        first, group = index, []
        for _ in range(draw.randint(1, interleave)):
            size, epoch = draw.randint(1, 9), EPOCH - 1 if draw.random() < odd / 2 else EPOCH
            start = position + 20_000 if draw.random() < odd else position
            group.append(Piece(first, start, start + size, epoch))
            index, position = index + size, position + size + draw.choice([0, 0, 3])
        if draw.random() < 0.2:
            group.append(Piece(index, 0, 0, EPOCH))
        out.append(group)
    return out


@pytest.mark.parametrize("sizes", [[5], [4, 4], [1, 9, 3], [7, 1, 1, 50, 50], [64] * 8, [1] * 20])
def test_parts_of_a_group_are_those_of_the_whole(sizes):
    starts = np.cumsum([0, *sizes]).tolist()
    group = [Piece(0, start, start + size, EPOCH) for start, size in zip(starts, sizes)]
    whole = merged_evenly(np.array(sizes)).tolist()
    for stop in range(sum(sizes) + 1):
        before = [sum(a <= row < b for row in whole[:stop]) for a, b in itertools.pairwise(starts)]
        assert rows_before(sizes, stop) == before
        for first in (0, stop // 2, max(0, stop - 3), stop):
            assert group_rows(group, first, stop)[:, 0].tolist() == whole[first:stop]


@pytest.mark.parametrize("window", [0, 1, 6, 40])
@pytest.mark.parametrize("interleave", [1, 3])
def test_what_has_left_is_as_the_lane_says(window, interleave):
    for seed in range(15):
        draw = random.Random(seed)
        held = Held(seed=SEED, epoch=EPOCH, number=NUMBER, window=window)
        lane = Lane(seed=SEED, epoch=EPOCH, number=NUMBER, window=window)
        place = floor = 0
        for group in history(150, draw, interleave):
            held.extend(group)
            lane.extend(group)
            assert (held.length, held.certain, held.pieces) == (lane.length, lane.certain, lane.pieces)
            place = draw.randint(place, lane.certain)
            for at in {place, lane.certain}:
                assert held.left(at) == lane.left(at)
                assert held.lowest(at) == lane.lowest(at)
            if draw.random() < 0.3:
                floor = max(floor, lane.lowest(place) or 0)
                assert held.forget(floor) == (lane.forget(floor) is not lane)
                lane = lane.forget(floor)
                assert held.dropped == lane.dropped
                assert held.pieces == lane.pieces
                assert held.after(place) == encode_pieces(p for p in lane.pieces if p.index >= place)


def test_parts_are_what_the_lane_is_made_of_again():
    for seed in range(15):
        draw = random.Random(seed)
        held, stored = Held(seed=SEED, epoch=EPOCH, number=NUMBER, window=3), {}
        for group in history(1500, draw, 2, odd=0.0):
            count = held.count
            held.extend(group)
            written = dict(held.parts(count))
            assert len(written) <= 2 and all(len(part) <= PART * 32 for part in written.values())
            stored |= written
            if draw.random() < 0.1:
                held.forget(held.lowest(max(0, held.certain - 30)) or 0)
                stored = {part: data for part, data in stored.items() if part >= held.forgotten // PART}
            assert stored == dict(held.parts())
        again = Held(seed=SEED, epoch=EPOCH, number=NUMBER, window=3, dropped=held.dropped, forgotten=held.forgotten)
        again.restore(data for _, data in sorted(stored.items()))
        assert again.pieces == held.pieces and dict(again.parts()) == stored
        assert held.forgotten > PART
        for place in range(held.dropped, held.certain, 17):
            assert (again.left(place), again.lowest(place)) == (held.left(place), held.lowest(place))


def test_a_lane_that_ended_keeps_what_had_left():
    held = Held(seed=SEED, epoch=EPOCH, number=NUMBER, window=0)
    held.extend([Piece(0, 0, 10, EPOCH), Piece(10, 20, 30, EPOCH)])
    held.ended = 12
    assert held.left(30) == Ranges.of([(0, 10), (20, 22)]) and held.lowest(5) == 5 and held.lowest(12) is None
    assert not held.forget(100) and held.own() == [(EPOCH, 0, 10), (EPOCH, 20, 22)]


@pytest.mark.parametrize("bad", [[Piece(1, 0, 3, EPOCH)], [Piece(0, 0, 3, EPOCH), Piece(2, 0, 0, EPOCH)]])
def test_pieces_that_do_not_continue_the_lane_are_refused(bad):
    with pytest.raises(ProtocolError):
        Held(seed=SEED, epoch=EPOCH, number=NUMBER, window=0).extend(bad)


def test_stored_pieces_are_as_sent():
    held = Held(seed=SEED, epoch=EPOCH, number=NUMBER, window=0)
    pieces = [Piece(0, 5, 9, EPOCH), Piece(4, 20, 30, EPOCH - 1), Piece(14, 0, 0, EPOCH)]
    held.extend(pieces)
    assert held.after(0) == encode_pieces(pieces) and held.after(4) == encode_pieces(pieces[1:])
