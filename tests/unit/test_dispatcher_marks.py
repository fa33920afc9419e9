"""Marks: the state of one rank is completed with the positions that the others saved at the same step."""

import numpy as np
import pytest
from core_bench import Bench, DynamicRank, Rank, start_of, whole_taken

from dispatcher.marks import KEPT_MARKS
from manifests.errors import JobMismatch, ProtocolError, StateIncomplete, StateMismatch
from manifests.wire import messages as m

DYNAMIC = {"order": "dynamic", "shuffle": m.Shuffle(buffer=24), "lanes": 24}


@pytest.fixture
def bench():
    bench = Bench([10] * 8)
    bench.worker()
    return bench


def dynamic_ranks(bench, world=2, steps=3):
    for r in range(world):
        found = bench.open(r, world_size=world, **DYNAMIC)
    ranks = [DynamicRank(bench, found, r) for r in range(world)]
    for rank in ranks:
        while rank.step < steps:
            if not rank.hand():
                rank.ask(9)
        rank.send(marks=(rank.mark(),))
    return ranks


def reopen(bench, starts, prefix="v", **settings):
    """All ranks of a new generation open, each with its own start point; the answer to the last."""
    bench.wait(11)
    for r, start in enumerate(starts):
        found = bench.open(r, f"{prefix}{r}", world_size=len(starts), start=start, **settings)
    return found


def lone(ranks, r):
    return start_of([ranks[r]])


def test_each_rank_may_come_with_its_own_state_and_they_are_equal_once_completed(bench):
    ranks = dynamic_ranks(bench)
    starts = [lone(ranks, r) for r in range(2)]
    assert [start.missing for start in starts] == [(1,), (0,)] and starts[0].ranges != starts[1].ranges
    found = reopen(bench, starts, **DYNAMIC)
    assert found.generation == 2 and found.absent == ()
    assert found.start == start_of(ranks) and found.start.missing == ()
    after = [DynamicRank(bench, found, r, uid=f"v{r}") for r in range(2)]
    for rank in after:
        rank.finish()
    assert sorted(p for rank in (*ranks, *after) for _, p in rank.rows) == list(range(80))


def test_a_lone_state_goes_on_with_another_world_size(bench):
    ranks = dynamic_ranks(bench, world=4)
    found = reopen(bench, [lone(ranks, 2)] * 3, **DYNAMIC)
    assert found.start.ranges == start_of(ranks).ranges and found.start.lanes == ()


def test_a_state_without_its_marks_names_the_ranks(bench):
    ranks = dynamic_ranks(bench, world=4)
    ranks[0].ask(9)
    ranks[0].hand()
    ranks[0].send(marks=(ranks[0].mark(),))
    with pytest.raises(StateIncomplete, match="ranks 1, 2, 3") as caught:
        reopen(bench, [lone(ranks, 0)] * 4, **DYNAMIC)
    assert caught.value.detail["ranks"] == [1, 2, 3] and "list of the states" in (caught.value.remedy or "")


def test_a_rank_that_comes_with_another_position_is_refused(bench):
    ranks = dynamic_ranks(bench)
    early = lone(ranks, 1)
    for rank in ranks:
        while rank.step < 5:
            if not rank.hand():
                rank.ask(9)
        rank.send(marks=(rank.mark(),))
    bench.wait(11)
    bench.open(0, "v0", world_size=2, start=lone(ranks, 0), **DYNAMIC)
    with pytest.raises(JobMismatch, match="step"):
        bench.open(1, "v1", world_size=2, start=early, **DYNAMIC)


def test_the_last_names_are_kept_and_survive_generations_and_take_overs(bench):
    ranks = dynamic_ranks(bench)
    for step in range(4, 4 + KEPT_MARKS):
        for rank in ranks:
            while rank.step < step:
                if not rank.hand():
                    rank.ask(9)
            rank.send(marks=(rank.mark(),))
    marks = [key for key in bench.stored if "/marks/" in key]
    assert len(marks) == 2 * KEPT_MARKS and not any("/1/0/3/" in key for key in marks)
    start = lone(ranks, 0)
    assert reopen(bench, [start] * 2, **DYNAMIC).generation == 2
    bench.reload()
    assert reopen(bench, [start] * 2, "w", **DYNAMIC).generation == 3  # a resume may be repeated


def test_a_mark_older_than_all_that_are_kept_is_let_go(bench):
    ranks = dynamic_ranks(bench)
    for step in range(10, 10 + KEPT_MARKS):
        bench.report(ranks[0].opened, 0, marks=(m.EpochProgress(epoch=0, step=step, handed=(0,)),))
    bench.report(ranks[0].opened, 0, marks=(m.EpochProgress(epoch=0, step=1, handed=(0,)),))
    assert not any("/1/0/1/" in key for key in bench.stored)


def test_marks_belong_to_the_job_the_state_names_and_end_with_it(bench):
    ranks = dynamic_ranks(bench)
    start = lone(ranks, 0)
    for r in range(2):
        found = bench.open(r, f"o{r}", job="other", world_size=2, start=start, **DYNAMIC)
    assert found.start.ranges == start_of(ranks).ranges
    bench.wait(8 * 24 * 3600)
    assert not any("/marks/" in key for key in bench.stored)


def test_marks_of_another_order_complete_nothing(bench):
    ranks = dynamic_ranks(bench)
    with pytest.raises(StateIncomplete):
        reopen(bench, [lone(ranks, 0)] * 2, seed=5, **DYNAMIC)


def test_deterministic_states_after_skips_are_completed_too(bench):
    for r in range(2):
        found = bench.open(r, world_size=2, on_error="skip", lanes=12)
    ranks = [Rank(bench, found, r) for r in range(2)]
    for rank in ranks:
        rank.hand(skip=rank.rank)
        mark = m.EpochProgress(epoch=0, step=1, handed=tuple(rank.handed.tolist()))
        rank.send(marks=(mark,))
    starts = []
    for rank in ranks:
        taken = np.zeros(12, np.int64)
        taken[rank.own] = rank.handed
        starts.append(
            m.StartPoint(
                kind="checkpoint", step=1, taken=tuple(taken.tolist()), generation=1, job="train", world_size=2, skip=True,
                missing=(1 - rank.rank,),
            )
        )  # fmt: skip
    again = reopen(bench, starts, on_error="skip", lanes=12)
    assert again.start.taken == whole_taken(ranks) and again.absent == ()


@pytest.mark.parametrize(
    "mark",
    [
        m.EpochProgress(epoch=-1, handed=(0,)),
        m.EpochProgress(epoch=0, handed=(0, 0)),
        m.EpochProgress(epoch=0, handed=(-1,)),
        m.EpochProgress(epoch=0, handed=(0,), before=b"\x80"),
        m.EpochProgress(epoch=0, handed=(0,), lane=m.LaneGrants(rank=0, pieces=b"1")),
    ],
)
def test_marks_that_are_no_position_are_refused(bench, mark):
    ranks = dynamic_ranks(bench)
    with pytest.raises(ProtocolError):
        bench.report(ranks[0].opened, 0, marks=(mark,))


def test_a_mark_that_does_not_fit_the_state_is_refused(bench):
    ranks = dynamic_ranks(bench)
    bench.report(ranks[1].opened, 1, marks=(m.EpochProgress(epoch=0, step=3, handed=(50,), lane=ranks[1].mark().lane),))
    with pytest.raises(StateMismatch):
        reopen(bench, [lone(ranks, 0)] * 2, **DYNAMIC)
