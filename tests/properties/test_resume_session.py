"""One resume property for the pure session: saved after every k and loaded again, the tail is the same and so is the
form of the state. States go through the functions that ``state_dict`` and ``load_state_dict`` use."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_cases import Case, HandedOut, bad_rows, cases, counts_after, hand_out, real, worlds

from manifests.wire.messages import Shuffle
from trainer_client.session import Position, Session
from trainer_client.state import VERSION, encode_step, encode_taken, load


def state_of(one: HandedOut, case: Case, *, skip: bool = False) -> dict:
    """What ``state_dict`` returns at this place."""
    leg, position = one.leg, one.session.position
    return {
        "version": VERSION,
        "dataset": "numbers@1",
        "identity": {"lanes": case.lanes, "seed": case.seed},
        "generation": 1,
        "epoch": case.epoch,
        "step": encode_step(leg.first_step + position.steps),
        "first_epoch": case.epoch,
        "rank": leg.rank,
        "world_size": leg.world_size,
        "taken": encode_taken(leg.taken(position.read, position.steps).tolist()),
        "skip": skip,
    }


UNEVEN = Case((7, 1, 20, 13, 0, 6), seed=4, epoch=1, shuffle=Shuffle(buffer=24, interleave=2))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("tail", ["pad", "drop", "ragged"])
def test_saved_after_every_k_the_tail_is_the_same(world, tail):
    batch = 3
    legs = [UNEVEN.leg(rank, world, batch, tail) for rank in range(world)]
    whole = hand_out(legs)
    shapes = set()
    for k in range(min(len(one.batches) for one in whole)):
        first = hand_out(legs, max_steps=k)
        states = [state_of(one, UNEVEN) for one in first]
        # without skips each rank's state alone tells what all of them together do
        starts = [load(state).start for state in states] + [load(states).start]
        assert {start.taken for start in starts} == {tuple(counts_after(first))}
        assert {start.step for start in starts} == {k}
        resumed = hand_out([UNEVEN.leg(rank, world, batch, tail, starts[0].taken, k) for rank in range(world)])
        for one, again in zip(whole, resumed, strict=True):
            assert real(again.batches) == real(one.batches[k:])
            if tail != "ragged":
                assert len(again.batches) == len(one.batches) - k
                assert again.leg.last_step == one.leg.last_step
        shapes |= {(tuple(state), len(pickle.dumps(state)), len(json.dumps(state["taken"]))) for state in states}
        assert json.loads(json.dumps(states)) == states
    assert len(shapes) == 1


@given(cases, st.data())
@settings(max_examples=150)
def test_a_chain_of_states_with_skips(case, data):
    """Under skip each rank passes over rows of its own: the list of all states goes on exactly where they were."""
    bad = data.draw(bad_rows(case))
    seen, taken, step = [], None, 0
    for leg in range(4):
        world, batch = data.draw(worlds(case)), data.draw(st.integers(1, 4))
        legs = [case.leg(rank, world, batch, "pad", taken, step) for rank in range(world)]
        most = data.draw(st.integers(0, 3)) if leg < 3 else None
        found = hand_out(legs, bad, most)
        seen += [row for one in found for row in real(one.batches)]
        if leg < 3 and all(one.session.finished for one in found):
            break
        states = [state_of(one, case, skip=True) for one in found]
        data.draw(st.randoms()).shuffle(states)
        start = load(states).start
        assert list(start.taken) == counts_after(found) and start.skip and start.world_size == world
        taken, step = list(start.taken), start.step
    assert len(seen) == len(set(seen))
    assert set(seen) == set(case.order) - bad


@given(cases, st.data())
@settings(max_examples=100)
def test_a_lone_state_under_skip_names_the_ranks_it_lacks(case, data):
    world = data.draw(worlds(case))
    found = hand_out([case.leg(rank, world, 1) for rank in range(world)], max_steps=1)
    state = state_of(found[data.draw(st.integers(0, world - 1))], case, skip=True)
    if world == 1:
        assert load(state).start.taken == tuple(counts_after(found))
        return
    assert load(state).start.missing == tuple(rank for rank in range(world) if rank != state["rank"])


@given(cases, st.data())
@settings(max_examples=100)
def test_a_session_goes_on_from_its_own_position(case, data):
    """Within a leg a position is enough: no walk from the start, pads and skipped rows included."""
    bad = data.draw(bad_rows(case))
    world, batch = data.draw(worlds(case)), data.draw(st.integers(1, 4))
    rank = data.draw(st.integers(0, world - 1))
    leg = case.leg(rank, world, batch)
    whole = hand_out([leg], bad)[0]
    at = data.draw(st.integers(0, len(whole.batches)))
    first = hand_out([leg], bad, at)[0]
    position = Position(first.session.position.steps, first.session.position.read)
    assert hand_out([leg], bad, position=lambda _: position)[0].batches == whole.batches[at:]


def test_case_5_other_world_sizes_take_over_every_row():
    """case 5: 64 rows saved by two ranks after three steps are shared out anew to one rank, and to three, and back."""
    case = Case((20, 30, 14), seed=3, shuffle=Shuffle(buffer=60))
    for before, after in ((2, 1), (1, 2), (2, 3), (3, 4), (4, 12)):
        first = hand_out([case.leg(rank, before, 4) for rank in range(before)], max_steps=3)
        start = load(state_of(first[-1], case)).start
        second = hand_out([case.leg(rank, after, 5, taken=start.taken) for rank in range(after)])
        rows = [row for one in (*first, *second) for row in real(one.batches)]
        assert sorted(rows) == sorted(case.order), (before, after)
        assert len({len(one.batches) for one in second}) == 1


def test_the_size_at_90_percent_is_that_at_10_percent():
    case = Case((70_000, 30_000), shuffle=Shuffle(buffer=4096))
    sizes = set()
    for share in (0.001, 0.1, 0.5, 0.9, 0.999):
        steps = int(share * 100_000)
        leg = case.leg(0, 1, 1)
        state = state_of(HandedOut(Session(leg, Position(steps, steps))), case)
        assert int(state["step"]) == steps
        sizes.add((len(pickle.dumps(state)), len(json.dumps(state))))
    assert len(sizes) == 1


def test_counts_in_a_state_are_as_large_as_any_dataset():
    taken = [0, 1, 2**40, 2**62]
    state = state_of(hand_out([UNEVEN.leg(0, 1, 3)], max_steps=0)[0], UNEVEN)
    state["identity"]["lanes"] = 4
    assert load({**state, "taken": encode_taken(np.array(taken))}).start.taken == tuple(taken)
