"""The order of rows: the product against the executable reference, and against the rules themselves."""

import itertools
import math

import numpy as np
import order_reference as reference
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_cases import Case, bad_rows, cases, counts_after, hand_out, real, tails, worlds

from manifests import cursor
from manifests.errors import ConfigError
from manifests.plan import Plan, lane_sizes
from manifests.wire.messages import Shuffle
from trainer_client.session import steps_per_epoch

UNEVEN = (7, 1, 40, 13, 22, 0, 9, 31, 2, 18)


def pairs(rows) -> list[tuple[int, int]]:
    return list(zip(*(part.tolist() for part in rows), strict=True))


def same_as_reference(case: Case, found, want: reference.Leg, tail: str) -> None:
    for rank, one in enumerate(found):
        steps = [step[rank] for step in want.steps]
        if tail == "ragged":  # a rank that is through hands out no empty batch
            steps = [batch for batch in steps if batch]
        assert one.batches == steps, (case, rank)


# -- against the reference -----------------------------------------------------------------------------------------


@given(cases, st.data())
@settings(max_examples=150)
def test_lanes_hold_the_reference_s_rows_from_any_place(case, data):
    for lane, want in enumerate(case.lane_lists):
        assert pairs(case.plan.lane_rows(lane, 0, 10**6)) == want
        assert case.plan.lane_size(lane) == len(want)
        first = data.draw(st.integers(0, len(want)))
        count = data.draw(st.integers(0, len(want) + 2))
        assert pairs(case.plan.lane_rows(lane, first, count)) == want[first : first + count]
        assert case.plan.lane_ids(lane, first, count).tolist() == case.ids(want[first : first + count])
    assert case.plan.lane_sizes().tolist() == [len(rows) for rows in case.lane_lists]


@given(cases, st.data())
@settings(max_examples=250)
def test_every_rank_and_step_of_a_chain_of_resumes_is_the_reference_s(case, data):
    """Three legs with world size, batch size and tail drawn anew for each, with and without rows that are skipped."""
    bad = data.draw(bad_rows(case))
    taken = None
    for leg in range(3):
        world, batch = data.draw(worlds(case)), data.draw(st.integers(1, 5))
        tail = data.draw(tails)
        most = data.draw(st.integers(0, 4)) if leg < 2 else None
        want = case.reference_run(world, batch, tail, bad=bad, taken=taken, max_steps=most)
        legs = [case.leg(rank, world, batch, tail, taken) for rank in range(world)]
        found = hand_out(legs, bad, most, look=data.draw(st.sampled_from([0, 1, 7])))
        same_as_reference(case, found, want, tail)
        assert counts_after(found) == want.taken
        if not bad and len({len(one.batches) for one in found}) == 1:
            for one in found:  # without skips every rank can tell where the others are
                position = one.session.position
                assert one.leg.taken(position.read, position.steps).tolist() == want.taken
        taken = want.taken


@pytest.mark.parametrize("tail", ["pad", "drop", "ragged"])
@pytest.mark.parametrize("shuffle", [None, Shuffle(buffer=8), Shuffle(buffer=30, interleave=2, within_shard=True)])
def test_a_grid_of_sizes_is_the_reference_s(tail, shuffle):
    for total, world, batch in itertools.product((1, 2, 5, 12, 31, 46), (1, 2, 3, 4), (1, 4, 5)):
        rows = tuple(part for part in (total // 3, 0, total - total // 3) if part or total)
        case = Case(rows, seed=total, shuffle=shuffle)
        want = case.reference_run(world, batch, tail)
        found = hand_out([case.leg(rank, world, batch, tail) for rank in range(world)])
        same_as_reference(case, found, want, tail)
        assert counts_after(found) == want.taken


# -- the rules -----------------------------------------------------------------------------------------------------


@given(cases)
@settings(max_examples=150)
def test_every_row_is_in_one_lane_once(case):
    rows = [row for lane in range(case.lanes) for row in pairs(case.plan.lane_rows(lane, 0, 10**6))]
    assert sorted(rows) == sorted((s, r) for s, n in enumerate(case.rows) for r in range(n))


@given(cases)
@settings(max_examples=150)
def test_no_row_moves_more_than_its_lane_s_share_of_the_buffer(case):
    if case.shuffle is None:
        return
    reach = case.shuffle.buffer // case.lanes
    still = Case(
        case.rows, case.seed, case.epoch, Shuffle(0, case.shuffle.interleave, case.shuffle.within_shard), case.lanes
    )
    for lane in range(case.lanes):
        before = {row: k for k, row in enumerate(pairs(still.plan.lane_rows(lane, 0, 10**6)))}
        after = pairs(case.plan.lane_rows(lane, 0, 10**6))
        assert all(abs(place - before[row]) <= reach for place, row in enumerate(after))


def test_the_manifest_s_order_without_shuffle():
    """One rank sees the rows in order; W ranks see them as a sampler does that deals them out in turn."""
    case = Case((3, 0, 5, 4), shuffle=None, lanes=6)
    for world in (1, 2, 3):
        for rank, one in enumerate(hand_out([case.leg(rank, world, 2) for rank in range(world)])):
            assert case.ids(real(one.batches)) == list(range(rank, 12, world))


def test_orders_differ_between_epochs_and_seeds():
    def ids_of(case: Case) -> tuple[int, ...]:
        return tuple(int(i) for lane in range(case.lanes) for i in case.plan.lane_ids(lane, 0, 100))

    ids = [
        ids_of(Case(UNEVEN, seed, epoch, shuffle))
        for seed in (1, 2)
        for epoch in (0, 1, 2)
        for shuffle in (Shuffle(), Shuffle(buffer=0))
    ]
    assert len(set(ids)) == len(ids)


def test_a_shuffle_mixes_over_the_whole_buffer():
    """With a buffer of the whole epoch, stored neighbours leave far apart."""
    case = Case((2400,), shuffle=Shuffle(buffer=2400), lanes=12)
    ids = case.plan.lane_ids(0, 0, 200)
    assert np.median(np.abs(np.diff(ids))) > 20


def test_interleaved_shards_last_as_long_as_each_other():
    case = Case((30, 90), shuffle=Shuffle(buffer=0, interleave=2), lanes=1)
    shards = case.plan.lane_rows(0, 0, 120)[0]
    for quarter in np.split(shards, 4):
        assert 6 <= int((quarter == 0).sum()) <= 9


@pytest.mark.parametrize("shuffle", [None, Shuffle(buffer=24), Shuffle(buffer=4096, interleave=3, within_shard=True)])
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_global_batches_are_those_of_one_rank_for_every_world_size(shuffle, tail):
    """``stack(dim=1).flatten(0, 1)`` over the ranks' batches, at one G = world size * batch size."""
    case = Case(UNEVEN, seed=5, epoch=2, shuffle=shuffle)
    merged = {}
    for world in (1, 2, 3, 4, 6, 12):
        found = hand_out([case.leg(rank, world, 12 // world, tail) for rank in range(world)])
        steps = list(zip(*(one.batches for one in found), strict=True))
        merged[world] = [[row for slot in zip(*ranks, strict=True) for row, pad in slot if not pad] for ranks in steps]
    assert all(batches == merged[1] for batches in merged.values())
    if tail == "pad":
        assert sorted(row for batch in merged[1] for row in batch) == sorted(case.order)


@given(cases, st.data())
@settings(max_examples=150)
def test_global_batches_stay_the_same_after_a_resume_to_another_world_size(case, data):
    before, after = data.draw(worlds(case)), data.draw(worlds(case))
    size = before * after  # rows of a global batch, in both
    total = data.draw(st.integers(0, max(0, case.total // size)))
    whole = real(hand_out([case.leg(0, 1, size)])[0].batches)
    first = hand_out([case.leg(rank, before, after) for rank in range(before)], max_steps=total)
    taken = counts_after(first)
    second = hand_out([case.leg(rank, after, before, taken=taken) for rank in range(after)])
    seen = []
    for part in (first, second):
        for ranks in zip(*(one.batches for one in part), strict=True):
            seen += [row for slot in zip(*ranks, strict=True) for row, pad in slot if not pad]
    assert seen == whole


@given(cases, st.data())
@settings(max_examples=200)
def test_equal_steps_and_every_row_once(case, data):
    world, batch, tail = data.draw(worlds(case)), data.draw(st.integers(1, 6)), data.draw(tails)
    bad = data.draw(bad_rows(case))
    found = hand_out([case.leg(rank, world, batch, tail) for rank in range(world)], bad)
    rows = [row for one in found for row in real(one.batches)]
    assert len(rows) == len(set(rows)) and not set(rows) & bad
    per_rank = math.ceil(case.total / world)
    for rank, one in enumerate(found):
        sizes = [len(b) for b in one.batches]
        assert all(size == batch for size in sizes[:-1])
        if tail == "pad":
            assert sum(sizes) == per_rank and len(sizes) == math.ceil(per_rank / batch)
        elif tail == "drop":
            assert sizes == [batch] * (case.total // (world * batch))
        if tail == "ragged":
            assert not any(pad for b in one.batches for _, pad in b)
        elif not bad or tail == "pad":
            # a resume from nothing and the whole pass agree on the number of steps
            assert len(sizes) == steps_per_epoch(case.total, world, batch, tail, rank, case.lanes)
    if tail in ("pad", "ragged"):
        assert set(rows) == set(case.order) - bad
    elif not bad:
        assert case.total - len(rows) < world * batch
    if tail == "ragged" and not bad:
        handed = [sum(map(len, one.batches)) for one in found]
        assert sum(handed) == case.total and max(handed) - min(handed) <= math.ceil(case.lanes / world)


@given(cases, st.data())
@settings(max_examples=150)
def test_pads_are_flagged_and_follow_the_rule(case, data):
    """The q-th pad of rank r is row (q * W + r) mod N of the plan."""
    world, batch = data.draw(worlds(case)), data.draw(st.integers(1, 6))
    for rank, one in enumerate(hand_out([case.leg(rank, world, batch) for rank in range(world)])):
        pads = [row for b in one.batches for row, pad in b if pad]
        if len(pads) * world <= case.total:
            assert pads == [case.order[(q * world + rank) % case.total] for q in range(len(pads))]
        flags = [pad for b in one.batches for _, pad in b]
        assert flags == sorted(flags), "pads come last"


def test_ragged_quotas_of_a_whole_epoch_differ_by_at_most_one_row():
    for total, world in itertools.product(range(1, 40), (1, 2, 3, 4, 6)):
        case = Case((total,))
        quotas = [case.leg(rank, world, 4, "ragged").quota for rank in range(world)]
        assert sum(quotas) == total and max(quotas) - min(quotas) <= 1


def test_case_9_steps_are_the_same_on_all_ranks_over_a_grid():
    """case 9: for every number of rows, world, batch and tail each rank takes the steps that len() promises."""
    for total, world, batch in itertools.product(range(1, 41), (1, 2, 3), (1, 4, 5)):
        case = Case((total - total // 2, total // 2), seed=total)
        for tail in ("pad", "drop"):
            found = hand_out([case.leg(rank, world, batch, tail) for rank in range(world)])
            steps = {len(one.batches) for one in found}
            assert steps == {steps_per_epoch(total, world, batch, tail, 0, 12)}, (total, world, batch, tail)
            rows = [row for one in found for row in real(one.batches)]
            dropped = total - len(set(rows))
            assert len(rows) == len(set(rows))
            assert dropped == 0 if tail == "pad" else dropped < world * batch


# -- counts --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.data())
def test_the_cursor_jumps_to_where_walking_leads(sizes, data):
    sizes = np.array(sizes, np.int64)
    taken = np.array([data.draw(st.integers(0, int(size))) for size in sizes], np.int64)
    count = data.draw(st.integers(0, int(sizes.sum()) + 3))
    walked, visits = taken.copy(), []
    for _ in range(count):
        open_lanes = [lane for lane in range(len(sizes)) if walked[lane] < sizes[lane]]
        if not open_lanes:
            break
        lane = min(open_lanes, key=lambda one: (walked[one], one))
        visits.append((lane, int(walked[lane])))
        walked[lane] += 1
    assert cursor.advance(sizes, taken, count).tolist() == walked.tolist()
    assert pairs(cursor.sequence(sizes, taken, count)) == visits


def test_lane_helpers():
    assert cursor.default_lanes(1) == 12 and cursor.default_lanes(8) == 24 and cursor.default_lanes(5) == 60
    assert cursor.own_lanes(1, 3, 12).tolist() == [1, 4, 7, 10]
    assert cursor.divisors(12) == [1, 2, 3, 4, 6, 12] and cursor.divisors(1) == [1]
    assert lane_sizes(14, 4).tolist() == [4, 4, 3, 3]


@pytest.mark.parametrize(("lanes", "epoch"), [(0, 0), (-1, 0), (12, -1)])
def test_a_plan_that_cannot_be(lanes, epoch):
    with pytest.raises(ConfigError, match=f"{lanes} lanes and epoch {epoch}"):
        Plan(np.array([3]), seed=1, epoch=epoch, shuffle=None, lanes=lanes)


def test_a_plan_of_many_shards_is_read_anywhere_at_once():
    """A million shards: any stretch of a lane costs about its own length."""
    rows = np.full(1_000_000, 100, np.int64)
    plan = Plan(rows, seed=3, epoch=1, shuffle=Shuffle(buffer=4096, interleave=4), lanes=12)
    ids = plan.lane_ids(7, 5_000_000, 1000)
    assert len(set(ids.tolist())) == 1000
    assert plan.lane_ids(7, 5_000_500, 500).tolist() == ids[500:].tolist()
