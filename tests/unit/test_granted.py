"""Lanes of the dynamic order against the rule written out row by row."""

from __future__ import annotations

import random

import numpy as np
import pytest

from manifests.errors import ProtocolError
from manifests.granted import Lane, Piece, decode_pieces, encode_pieces, window_rows
from manifests.identity import random_unit, stream_key
from manifests.ranges import Ranges
from manifests.wire.messages import Shuffle

SEED, EPOCH, NUMBER = 7, 2, 1


def made(window: int, dropped: int = 0) -> Lane:
    return Lane(seed=SEED, epoch=EPOCH, number=NUMBER, window=window, dropped=dropped)


def cut_up(rows: int, seed: int, interleave: int = 1, cuts: bool = False) -> list[list[Piece]]:
    """Grants of ``rows`` rows of plan positions 100 .. in groups, some followed by a cut."""
    draw, out, index, position = random.Random(seed), [], 0, 100
    while index < rows:
        group, first = [], index
        for _ in range(draw.randint(1, interleave)):
            size = draw.randint(1, 9)
            group.append(Piece(first, position, position + size, EPOCH))
            index, position = index + size, position + size + draw.choice([0, 0, 3])
        out.append(group)
        if cuts and draw.random() < 0.2:
            out[-1].append(Piece(index, 0, 0, EPOCH))
    return out


def by_the_rule(groups: list[list[Piece]], window: int) -> list[int]:
    """Positions in leaving order: merged groups, keys, cuts."""
    lane: list[tuple[int, float, int, int]] = []
    stretch = index = 0
    for group in groups:
        inside = [p for p in group if not p.is_cut]
        rows = [((j + 0.5) / len(p), at, p.start + j) for at, p in enumerate(inside) for j in range(len(p))]
        for _, _, position in sorted(rows):
            u = random_unit(stream_key("window", SEED, EPOCH, NUMBER), index, 1)[0]
            lane.append((stretch, index + window * u, index, position))
            index += 1
        stretch += any(p.is_cut for p in group)
    return [row[3] for row in sorted(lane)]


@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize("interleave", [1, 3])
@pytest.mark.parametrize("cuts", [False, True])
def test_rows_leave_by_the_rule_however_they_were_granted(window, interleave, cuts):
    for seed in range(20):
        groups = cut_up(120, seed, interleave, cuts)
        want = by_the_rule(groups, window)
        lane, draw, seen = made(window), random.Random(seed), 0
        for at in range(len(groups)):
            lane.extend(groups[at])
            assert lane.certain <= lane.length
            assert lane.certain >= lane.length - window - 1
            seen = draw.randint(seen, lane.certain)
            assert lane.leave(0, lane.certain)[0].tolist() == want[: lane.certain]
        lane.extend([Piece(lane.length, 0, 0, EPOCH)])
        assert lane.certain == lane.length == len(want)
        assert lane.leave(0, 10**6)[0].tolist() == want
        for place in (0, 1, seen, lane.length):
            gone = set(want[:place])
            assert set(lane.left(place).values().tolist()) == gone
            rest = sorted(set(want) - gone)
            assert lane.lowest(place) == (rest[0] if rest else None)
            assert [p for _, a, b in lane.remaining(place) for p in range(a, b)] == rest


@pytest.mark.parametrize("window", [0, 7])
def test_what_was_forgotten_changes_nothing_that_comes_after(window):
    for seed in range(20):
        groups = [[Piece(p.index, p.start, p.stop, EPOCH) for p in group] for group in cut_up(200, seed, 2, True)]
        lane = made(window)
        for group in groups:
            lane.extend(group)
        want = lane.leave(0, 10**6)[0].tolist()
        place = lane.certain // 2
        floor = lane.lowest(place) or 10**6
        short = lane.forget(floor)
        again = Lane.restore(short.grants(3, place), seed=SEED, epoch=EPOCH, window=window)
        for one in (short, again):
            assert one.length == lane.length and one.certain == lane.certain
            assert one.leave(place, 10**6)[0].tolist() == want[place : lane.certain]
            assert (one.left(place) | Ranges.of([(0, floor)])) == (lane.left(place) | Ranges.of([(0, floor)]))
            assert one.remaining(place) == lane.remaining(place)
            assert one.lowest(place) == lane.lowest(place)
            one.extend([Piece(one.length, 5000, 5009, EPOCH), Piece(one.length + 9, 0, 0, EPOCH)])
            assert one.length == lane.length + 9
        if window == 0 and place > 30:
            assert short.dropped > 0


def test_rows_of_another_epoch_are_kept_apart():
    lane = made(0)
    lane.extend([Piece(0, 10, 13, EPOCH - 1), Piece(3, 10, 12, EPOCH), Piece(5, 0, 0, EPOCH)])
    positions, epochs = lane.leave(0, 5)
    assert positions.tolist() == [10, 11, 12, 10, 11]
    assert epochs.tolist() == [1, 1, 1, 2, 2]
    assert lane.left(4).values().tolist() == [10]
    assert lane.remaining(2) == [(1, 12, 13), (2, 10, 12)]
    assert lane.lowest(4) == 11
    assert lane.forget(100) is lane  # nobody can tell from a floor whether rows of another epoch were handed out


def test_pieces_that_do_not_continue_the_lane_are_refused():
    for wrong in ([Piece(1, 0, 2, EPOCH)], [Piece(0, 0, 2, EPOCH), Piece(3, 2, 4, EPOCH)], [Piece(4, 0, 0, EPOCH)]):
        with pytest.raises(ProtocolError):
            made(0).extend(wrong)
    for data in (b"1", b"\xff" * 32, encode_pieces([Piece(0, 4, 2, 0)])):
        with pytest.raises(ProtocolError):
            decode_pieces(data)


def test_the_window_leaves_most_of_a_small_epoch_to_others():
    assert window_rows(None, 10**6, 2) == 0
    assert window_rows(Shuffle(buffer=4096), 10**6, 4) == 1024
    assert window_rows(Shuffle(buffer=4096), 800, 4) == 25


def test_a_lane_of_many_pieces_grows_quickly():
    lane = made(64)
    lane.extend(Piece(k * 10, k * 10, k * 10 + 10, EPOCH) for k in range(20_000))
    assert lane.certain >= 200_000 - 65
    assert np.array_equal(np.sort(lane.leave(0, lane.certain)[0])[:100_000], np.arange(100_000))
