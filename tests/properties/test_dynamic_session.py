"""Dynamic order without processes: the client's legs against the dispatcher's pool, in any order of asks and batches, held
against the rule written out row by row; and what states of it make when they are loaded."""

import json
import pickle

import numpy as np
import order_reference as reference
import pytest
from dynamic_cases import Game, in_turn, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from order_cases import Case, bad_rows, cases, tails, worlds

from manifests.errors import StateMismatch
from manifests.granted import Piece, decode_pieces, encode_pieces
from manifests.identity import random_unit, stream_key
from manifests.wire.messages import Shuffle
from trainer_client.state import load

UNEVEN = Case((7, 1, 20, 13, 0, 6), seed=4, epoch=1, shuffle=Shuffle(buffer=24, interleave=2))


def any_order(data):
    return lambda going: data.draw(st.sampled_from(going))


def check_whole(game: Game, bad=frozenset()) -> None:
    """All that a tail promises of an epoch from its beginning."""
    case, ranks = game.case, game.ranks
    world, batch, tail = len(ranks), game.settings.batch_size, game.settings.tail
    rows = game.all_real()
    assert len(rows) == len(set(rows)) and not bad & set(rows)
    sizes = [[len(b) for b in one.batches] for one in ranks]
    if tail == "ragged":
        assert set(rows) == set(case.order) - bad
        assert all(size == batch for one in sizes for size in one[:-1])
        assert not any(pad for one in ranks for b in one.batches for _, pad in b)
    else:
        assert all(one == sizes[0] for one in sizes)
        each = -(-case.total // world) if tail == "pad" else case.total // (world * batch) * batch
        assert sum(sizes[0]) == each
        if tail == "pad":
            assert set(rows) == set(case.order) - bad
        elif not bad:
            assert len(rows) == world * each


@given(cases, tails, st.data())
@settings(max_examples=60)
def test_every_row_once_whoever_is_faster(case, tail, data):
    world, batch = data.draw(worlds(case)), data.draw(st.integers(1, 4))
    bad = data.draw(bad_rows(case))
    game = Game(case, world, batch, tail, bad=bad, ahead=data.draw(st.sampled_from([0, 5, 100])))
    game.run(any_order(data))
    check_whole(game, bad)


@given(cases, tails, st.data())
@settings(max_examples=30)
def test_rows_leave_by_the_rule(case, tail, data):
    """What a rank hands out is its pieces, group by group, through the keyed window, cuts kept apart."""
    world = data.draw(worlds(case))
    game = Game(case, world, 2, tail)
    game.run(any_order(data))
    for rank, one in enumerate(game.ranks):
        held = game.pool.lanes.get(rank)
        pieces = [] if held is None else [(p.index, p.start, p.stop) for p in held.lane.pieces]
        reach = 0 if case.shuffle is None else min(case.shuffle.buffer // world, case.total // (8 * world))
        key = stream_key("window", case.seed, case.epoch, rank)
        want = reference.dynamic_lane(case.order, pieces, reach, lambda k, key=key: float(random_unit(key, k, 1)[0]))
        assert one.real == want[: len(one.real)]
        if tail != "drop":
            assert len(one.real) == len(want)


@given(cases, st.data())
@settings(max_examples=30)
def test_pads_are_those_of_the_deterministic_order(case, data):
    world = data.draw(worlds(case))
    game = Game(case, world, 3)
    game.run(any_order(data))
    for rank, one in enumerate(game.ranks):
        pads = [row for batch in one.batches for row, pad in batch if pad]
        assert pads == [case.order[(q * world + rank + q // case.total) % case.total] for q in range(len(pads))]


@given(cases, tails, st.data())
@settings(max_examples=60)
def test_chains_of_states_over_world_sizes(case, tail, data):
    """Saved after any batch and loaded by as many ranks or others, again and again: every row once."""
    bad = data.draw(bad_rows(case))
    seen, start = [], None
    for leg in range(4):
        world, batch = data.draw(worlds(case)), data.draw(st.integers(1, 4))
        last = leg == 3
        now = "ragged" if last else tail
        game = Game(case, world, batch, now, start=start, bad=bad, number=leg + 1)
        game.pool.check()
        steps = None if last else data.draw(st.integers(0, 3))
        game.run(any_order(data), steps)
        seen += game.all_real()
        states = json.loads(json.dumps(game.states()))
        if data.draw(st.booleans()):
            game.floor()
            small = game.states()
            assert sorted(rows_of(case, load(small).start.ranges)) == sorted(rows_of(case, load(states).start.ranges))
            states = small
        if all(state["dynamic"]["ended"] for state in states):
            break
        data.draw(st.randoms()).shuffle(states)
        loaded = load(states)
        start = loaded.start
        assert load(loaded.state) == load([loaded.state] * world) == loaded and start.missing == ()
        assert set(rows_of(case, start.ranges)) >= set(seen)
        assert set(rows_of(case, start.ranges)) - set(seen) <= bad
    assert len(seen) == len(set(seen))
    if tail != "drop" or last:
        assert set(seen) == set(case.order) - bad


@pytest.mark.parametrize("tail", ["pad", "drop", "ragged"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_saved_and_loaded_at_once_the_same_batches_come(world, tail):
    """What was certain when the states were saved comes as it would have; with one rank that is all of it, unless shards
    are interleaved, where it depends on the asks which are in one group."""
    plain = Case(UNEVEN.rows, seed=4, epoch=1, shuffle=Shuffle(buffer=24))
    for case, k in ((case, k) for case in (UNEVEN, plain) for k in range(1, 20 // world, 2)):
        game = Game(case, world, 2, tail, ahead=6)
        game.run(in_turn(), k)
        game.floor()
        known = [
            list(
                zip(
                    *map(
                        np.ndarray.tolist,
                        one.leg.refs(one.session.position.read, one.leg.certain if not one.leg.final else 8),
                    )
                )
            )
            for one in game.ranks
        ]
        again = Game(case, world, 2, tail, start=load(game.states()).start, ahead=6, number=2)
        before = [len(one.batches) for one in game.ranks]
        game.run(in_turn())
        again.run(in_turn())
        for one, other, rows, at in zip(game.ranks, again.ranks, known, before, strict=True):
            rest = [row for batch in one.batches[at:] for row, _ in batch]
            now = [row for batch in other.batches for row, _ in batch]
            sure = min(len(rows), len(rest))
            assert now[:sure] == rest[:sure] == rows[:sure]
            if world == 1 and case is plain:
                assert now == rest
            if tail != "ragged":
                assert len(other.batches) == len(one.batches) - at
                assert other.leg.last_step == one.leg.last_step


@pytest.mark.parametrize("elastic", [False, True])
def test_unequal_steps_go_together_where_the_floors_allow_it(elastic):
    tail = "pad" if elastic else "ragged"
    game = Game(UNEVEN, 2, 2, tail, elastic=elastic)
    for rank in (0, 0, 0, 1, 0, 1):
        game.step(rank)
    states = game.states()
    assert [int(s["step"]) for s in states] == [4, 2]
    start = load(states).start
    assert sorted(rows_of(UNEVEN, start.ranges)) == sorted(game.all_real()) and start.step == 4
    again = Game(UNEVEN, 3, 2, tail, elastic=elastic, start=start, number=2)
    again.run(in_turn())
    assert sorted(game.all_real() + again.all_real()) == sorted(UNEVEN.order)
    # a floor that was reached after the step of the other state
    late = {**states[0], "step": "0000000000000009"}
    late["dynamic"] = {**late["dynamic"], "floor": "0000000000000001", "floor_step": "0000000000000008"}
    with pytest.raises(StateMismatch, match=r"ranks 0, 1 lie too far apart.* rank 1 is at step 2, rank 0 at step 9"):
        load([late, states[1]])


def test_rows_that_went_from_a_rank_that_left_to_another_are_granted_anew():
    """One rank saves and closes, the other gets what it had not handed out, and saves later."""
    game = Game(UNEVEN, 2, 2, "ragged", ahead=10)
    for rank in (0, 1, 0):
        game.step(rank)
    early = game.states()[0]
    game.pool.end(0, game.ranks[0].place)
    for _ in range(15):
        game.step(1)
    start = load([early, game.states()[1]]).start
    assert sorted(rows_of(UNEVEN, start.ranges)) == sorted(game.all_real()) and start.lanes == ()
    again = Game(UNEVEN, 2, 2, "ragged", start=start, number=2)
    again.run(in_turn())
    assert sorted(game.all_real() + again.all_real()) == sorted(UNEVEN.order)


def test_equal_steps_are_required_of_jobs_with_quotas():
    game = Game(UNEVEN, 2, 2)
    for rank in (0, 1, 0):
        game.step(rank)
    with pytest.raises(StateMismatch, match="rank 0 at step 2, rank 1 at step 1"):
        load(game.states())


def test_a_lone_state_lacks_the_other_ranks():
    game = Game(UNEVEN, 3, 2)
    game.run(in_turn(), 2)
    states = game.states()
    loaded = load(states[1])
    assert loaded.start.missing == (0, 2) and load(loaded.state) == loaded
    assert [lane.rank for lane in loaded.start.lanes] == [1]
    assert load(states[::2]).start.missing == (1,)
    # nothing was taken: there is nothing to lack
    assert load(Game(UNEVEN, 3, 2).states()[1]).start.missing == ()
    alone = Game(UNEVEN, 1, 2)
    alone.run(in_turn(), 3)
    assert load(alone.states()[0]).start.missing == ()


def test_all_ranks_through_is_the_next_epoch_s_beginning():
    game = Game(UNEVEN, 2, 3, "ragged")
    game.run(in_turn())
    start = load(game.states()).start
    assert (start.epoch, start.step, start.ranges, start.missing) == (2, 0, b"", ())
    # one that is through goes with one that is not, and with one that is in the next epoch
    behind = Game(UNEVEN, 2, 3, "ragged")
    while behind.step(0) is not None:
        pass
    states = behind.states()
    assert (states[0]["dynamic"]["ended"], states[1]["dynamic"]["ended"]) == (True, False)
    assert load(states).start.epoch == 1
    following = Game(Case(UNEVEN.rows, seed=4, epoch=2, shuffle=UNEVEN.shuffle), 2, 3, "ragged")
    following.step(1)
    ahead = {**following.states()[1], "first_epoch": 1}
    joined = load([game.states()[0], ahead]).start
    assert (joined.epoch, joined.step) == (2, 1)
    with pytest.raises(StateMismatch, match="rank 0 at epoch 1 step"):
        load([{**game.states()[0], "dynamic": {**game.states()[0]["dynamic"], "ended": False}}, ahead])


def test_rows_carried_over_come_once_with_their_epoch():
    """An elastic job starts with rows of the epoch before; a state within takes along those that were not handed out."""
    before = Case(UNEVEN.rows, seed=4, epoch=0, shuffle=UNEVEN.shuffle)
    pieces = encode_pieces([Piece(0, 3, 9, 0), Piece(0, 30, 34, 0)])
    start = load(Game(UNEVEN, 2, 2, elastic=True).states()).start
    game = Game(UNEVEN, 2, 2, elastic=True, start=type(start)(epoch=1, first_epoch=1, carried=pieces))
    game.run(in_turn(), 2)
    for one in game.ranks:
        one.leg._carried = pieces
        one.leg._saved = one.leg._save()
    start = load(game.states()).start
    again = Game(UNEVEN, 3, 2, elastic=True, start=start, number=2)
    again.run(in_turn())
    got = [(row, e) for g in (game, again) for one in g.ranks for row, e in zip(one.real, one.epochs, strict=True)]
    carried = sorted(before.order[p] for p in (*range(3, 9), *range(30, 34)))
    assert sorted(row for row, epoch in got if epoch == 0) == carried
    assert sorted(row for row, epoch in got if epoch == 1) == sorted(UNEVEN.order)
    first = sum(e == 0 for one in game.ranks for e in one.epochs)
    assert 0 < first < 10 and sum(len(p) for p in decode_pieces(start.carried)) == 10 - first


def test_the_size_of_a_state_does_not_grow_with_the_position():
    case = Case((100,) * 60, shuffle=Shuffle(buffer=64))
    game = Game(case, 2, 10)
    sizes = []
    for step in range(1, 280):
        game.run(in_turn(), step)
        game.floor()
        if step % 30 == 0:
            sizes.append(max(len(pickle.dumps(state)) for state in game.states()))
    assert max(sizes) < 1.5 * min(sizes) < 6000, sizes


def test_a_lane_with_another_number_begins_anew():
    """A rank of an elastic job that is taken again by a new process does not go on with the lane of the old one."""
    game = Game(UNEVEN, 2, 2, elastic=True)
    game.run(in_turn(), 2)
    start = load(game.states()).start
    again = Game(UNEVEN, 2, 2, elastic=True, start=start, number=2)
    again.pool.give_back(again.pool.settle(1, again.pool.lanes[1].begun))
    again.pool.hold(1, 1)
    again.run(in_turn())
    assert again.ranks[1].leg._lane.number == 3
    assert sorted(game.all_real() + again.all_real()) == sorted(UNEVEN.order)
