"""A leg in dynamic order: what it asks for, when it is over, and the part it has in a state."""

import numpy as np
import pytest
from dynamic_cases import Game, in_turn
from order_cases import Case

from manifests.errors import ProtocolError, StateMismatch
from manifests.granted import Piece, encode_pieces
from manifests.wire import messages as m
from manifests.wire.messages import Shuffle
from trainer_client import dynamic_state
from trainer_client.auditing import judge
from trainer_client.dynamic import DynamicLeg
from trainer_client.marks import Mark
from trainer_client.session import Position
from trainer_client.state import load

#: 80 rows; one rank's window is 10, two ranks' 5
CASE = Case((20,) * 4, seed=3, shuffle=Shuffle(buffer=10))


def make(tail="ragged", world=2, rank=0, batch=4, **more) -> DynamicLeg:
    return DynamicLeg(
        lambda epoch: CASE.plan,
        seed=CASE.seed,
        shuffle=CASE.shuffle,
        epoch=0,
        rank=rank,
        world_size=world,
        batch_size=batch,
        tail=tail,
        **more,
    )


def granted(have: int, *stretches: tuple[int, int], cut=False, number=0, place=0, **more) -> m.Grants:
    pieces, index = [], have
    for start, stop in stretches:
        pieces.append(Piece(index, start, stop, 0))
        index += stop - start
    if cut:
        pieces.append(Piece(index, 0, 0, 0))
    lane = m.LaneGrants(rank=0, number=number, dropped=have, place=place, pieces=encode_pieces(pieces))
    return m.Grants(lane=lane, **more)


def test_rows_are_certain_once_no_other_can_overtake_them():
    leg = make()
    assert (leg.certain, leg.candidates, leg.have, leg.final) == (0, 0, 0, False)
    assert leg.wanted(6) == 11
    assert leg.take(granted(0, (0, 12)))
    assert leg.candidates == leg.have == 12 and 7 <= leg.certain <= 12
    assert leg.wanted(6) == 12 and leg.wanted(20) == 25
    assert len(leg.refs(0, 100)[0]) == leg.certain
    # the same answer again
    assert not leg.take(granted(0, (0, 12)))
    assert leg.take(granted(0, (0, 12), (30, 32))) and leg.have == 14


def test_a_leg_without_quotas_ends_when_an_ask_after_all_was_handed_out_gave_nothing():
    leg = make()
    leg.take(granted(0, (0, 12), cut=True))
    assert leg.certain == 12 and not leg.final
    assert leg.wanted(100) == 12, "nothing more is asked for while rows are left"
    leg.place(4)
    assert not leg.take(granted(12)) and not leg.final
    leg.need(16, 12)  # all are handed out, and the loop waits for a batch
    assert leg.wanted(0) == 13 and leg.place(12) == 12
    # rows came back meanwhile
    assert leg.take(granted(12, (40, 43), cut=True)) and not leg.final
    leg.need(16, 12)
    leg.place(12)
    assert leg.take(granted(15)) and leg.final
    assert leg.candidates == leg.certain == 15
    assert leg.ends_at(Position(4, 15)) and not leg.ends_at(Position(4, 14))
    assert leg.ends_everywhere(Position(4, 15)) is False, "the other rank may go on"
    assert make(world=1).batch_rows(1000) == 4


def test_an_answer_without_rows_that_waits_for_something_is_no_end():
    leg = make()
    leg.take(granted(0, cut=True))
    leg.need(4, 0)
    leg.place(0)
    assert not leg.take(m.Grants(waiting="rank 1 has not joined", waiting_code="rank-absent")) and not leg.final
    assert leg.take(granted(0)) and leg.final and leg.candidates == 0


def test_rows_that_are_passed_over_count_for_the_place_told():
    leg = make()
    leg.take(granted(0, (0, 12), cut=True))
    leg.need(14, 10)
    assert leg.place(3) == 10
    assert leg.own_taken(3).tolist() == [3], "the books tell what was handed out"


@pytest.mark.parametrize(("tail", "quota"), [("pad", 40), ("drop", 40)])
def test_with_quotas_the_end_is_known_from_the_start(tail, quota):
    leg = make(tail, batch=5)
    assert (leg.quota, leg.steps, leg.last_step) == (quota, 8, 8)
    assert leg.wanted(1000) == 40
    leg.take(granted(0, (0, 40), cut=True))
    assert leg.final and leg.candidates == 40 and leg.certain > 1 << 60
    assert leg.ends_at(Position(8, 40)) and leg.ends_everywhere(Position(8, 40))
    shards, rows = leg.refs(38, 6)
    pads = [(int(s), int(r)) for s, r in zip(shards[2:], rows[2:], strict=True)]
    assert pads == [CASE.order[q * 2] for q in range(4)]
    assert leg.epochs(38, 6).tolist() == [0] * 6


def test_a_rank_without_rows_has_nothing_to_ask_for():
    leg = make("pad", world=100, rank=90)
    assert leg.final and leg.candidates == 0 and leg.quota == 1 and leg.wanted(1) == 0


def test_a_start_lane_is_asked_for_once_even_if_it_is_whole():
    start = m.LaneGrants(rank=0, number=0, place=4, pieces=encode_pieces([Piece(0, 0, 44, 0), Piece(44, 0, 0, 0)]))
    leg = make("pad", before=None, start=start)
    assert leg.candidates == leg.certain == 40 and not leg.final and leg.wanted(1) == 45
    leg.take(granted(44, final=True, place=4))
    assert leg.final and leg.wanted(100) == 44


def test_a_rank_of_an_elastic_job_that_was_taken_over_gets_another_lane():
    start = m.LaneGrants(rank=0, number=0, place=4, pieces=encode_pieces([Piece(0, 0, 20, 0)]))
    leg = make(elastic=True, start=start)
    assert leg.certain == 0 and not len(leg.refs(0, 10)[0]), "nothing before the dispatcher was asked"
    leg.take(granted(0, (50, 60), cut=True, number=2))
    assert leg.own_taken(0).tolist() == [0] and leg.certain == 10
    with pytest.raises(ProtocolError, match=r"rank 0 got pieces of lane 4: its lane is 2"):
        leg.take(granted(10, (60, 62), number=4))


def test_pieces_that_do_not_continue_the_lane_are_refused():
    leg = make()
    leg.take(granted(0, (0, 12)))
    with pytest.raises(ProtocolError, match="do not continue the lane"):
        leg.take(m.Grants(lane=m.LaneGrants(rank=0, dropped=12, pieces=encode_pieces([Piece(13, 40, 44, 0)]))))


def test_floors_of_other_epochs_and_lower_ones_are_no_news():
    leg = make()
    leg.take(granted(0, (0, 20), (20, 40)))
    _, before = leg.saved(Position)
    for floor in (m.Floor(epoch=1, position=20, step=9), m.Floor(epoch=0, position=0, step=9)):
        leg.take_floor(floor)
    assert leg.saved(Position)[1] is before
    leg.take(m.Grants(floor=m.Floor(epoch=0, position=20, step=3)))
    _, saved = leg.saved(Position)
    assert (saved.floor, saved.floor_step, saved.lane.dropped) == (20, 3, 20) and leg.have == 40
    leg.take_floor(m.Floor(epoch=0, position=20, step=5))
    assert leg.saved(Position)[1].floor_step == 3


def test_marks_tell_what_a_state_does():
    leg = make()
    leg.take(granted(0, (0, 20), (20, 40)))
    leg.take_floor(m.Floor(epoch=0, position=20, step=2))
    position, saved = leg.saved(lambda: Position(7, 28))
    mark = Mark(0, leg, position, saved)
    message = mark.message()
    assert mark.key == (0, 7) == (message.epoch, message.step)
    assert message.handed == (28,) and message.lane is not None and message.lane.place == 28
    assert (message.lane.dropped, message.lane.pieces, message.floor_step) == (20, saved.lane.pieces, 2)
    assert dynamic_state.Ranges.decode(message.before).values().tolist() == list(range(20))


# -- states --------------------------------------------------------------------------------------------------------


def states(world=2, steps=3, tail="pad"):
    game = Game(CASE, world, 4, tail)
    game.run(in_turn(), steps)
    return game.states()


@pytest.mark.parametrize(
    "change",
    [
        {"floor": 5},
        {"floor": "5"},
        {"floor": "0000000000000081"},
        {"floor_step": "-000000000000001"},
        {"before": "zz"},
        {"before": "80"},
        {"before": "00ff7f"},
        {"carried": "00"},
        {"lane": None},
        {"lane": {}},
        {"quotas": 1},
        {"ended": None},
        {"next_first": -1},
        {"next_first": True},
    ],
)
def test_damaged_parts_are_named_as_such(change):
    state = states()[0]
    with pytest.raises(StateMismatch, match="state is damaged"):
        load({**state, "dynamic": {**state["dynamic"], **change}})
    with pytest.raises(StateMismatch, match="state is damaged"):
        load({key: value for key, value in state.items() if key != "dynamic"})


@pytest.mark.parametrize(
    "change",
    [
        {"number": "0"},
        {"number": -1},
        {"dropped": "0000000000000013"},
        {"place": "0000000000000079"},
        {"pieces": "00"},
        {"pieces": encode_pieces([Piece(1, 0, 4, 0)]).hex()},
        {"pieces": encode_pieces([Piece(0, 0, 400, 0)]).hex()},
    ],
)
def test_damaged_lanes_are_named_as_such(change):
    state = states()[0]
    part = state["dynamic"]
    with pytest.raises(StateMismatch, match="state is damaged"):
        load({**state, "dynamic": {**part, "lane": {**part["lane"], **change}}})


def test_lanes_go_on_only_where_they_fit():
    found = states(tail="ragged")
    start = load(found).start
    assert [lane.rank for lane in start.lanes] == [0, 1] and start.taken == ()

    def kept(world=2, tail="ragged", *, of=start, quotas=True, elastic=False):
        settings = m.JobSettings(
            sources=(), spec="", pipeline="", order="dynamic", world_size=world, tail=tail, elastic=elastic
        )
        return bool(dynamic_state.start_for(of, settings, CASE.total, quotas=quotas).lanes)

    assert kept() and kept(tail="pad") and kept(elastic=True)
    assert not kept(world=3)
    lone = load(found[0]).start
    assert lone.missing == (1,) and kept(of=lone) and kept(tail="pad", of=lone)
    assert not kept(tail="pad", of=lone, quotas=False)
    # a lane that holds more than its rank may hand out with quotas
    greedy = Game(CASE, 2, 4, "ragged", ahead=60)
    greedy.step(0)
    start = load(greedy.states()).start
    assert len(np.frombuffer(start.lanes[0].pieces, "<i8")) and kept(of=start)
    assert kept(tail="pad", of=start) == (greedy.ranks[0].leg.have - 4 <= 38)


def test_the_audit_s_judgement():
    document = {"epoch": 3, "job": "j", "lost": 0, "repeated": 0, "shards": []}
    assert judge(document) is None
    shards = [{"source": 0, "shard": n, "lost": [1], "repeated": [2, 3]} for n in range(7)]
    error = judge({**document, "lost": 7, "repeated": 14, "shards": shards})
    assert error is not None and error.detail["epoch"] == 3
    assert "epoch 3 of job j was not handed out as planned: 7 rows lost, 14 twice" in str(error)
    assert "shard 4: 1 lost, 2 twice; and 2 more" in str(error) and "shard 5" not in str(error)
    error = judge({**document, "lost": 1, "shards": [{"shard": None, "note": "1 rows were never handed out"}]})
    assert "1 rows were never handed out" in str(error)
