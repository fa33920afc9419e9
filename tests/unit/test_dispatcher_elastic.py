"""Elastic jobs: ranks that die, what becomes of their rows, and who takes their place."""

import pytest
from core_bench import LEASE, Bench, DynamicRank

from manifests.errors import Fenced, JobMismatch
from manifests.wire import messages as m

ELASTIC = {"order": "dynamic", "elastic": True, "shuffle": None, "lanes": 24, "epochs": 3}


@pytest.fixture
def bench():
    bench = Bench([10] * 8)
    bench.worker()
    return bench


def start(bench, world=2, **settings):
    for r in range(world):
        found = bench.open(r, world_size=world, **{**ELASTIC, **settings})
    return [DynamicRank(bench, found, r) for r in range(world)]


def silence(bench, *living):
    """More than a lease passes, in which only these are heard."""
    for _ in range(3):
        bench.wait(LEASE / 2)
        for rank in living:
            rank.send()


def some_rows(rank, batches=2, acked=1):
    rank.ask(12)
    for batch in range(batches):
        assert rank.hand()
        if batch + 1 == acked:
            rank.ack()
    rank.send()


def test_rows_of_a_dead_rank_that_were_not_acknowledged_go_to_the_others(bench):
    dead, other = start(bench)
    some_rows(dead)
    some_rows(other)
    silence(bench, other)
    assert any(
        "2 rows it had not acknowledged" in text or "rows it had not acknowledged" in text for text in bench.logs
    )
    other.finish()
    assert sorted([p for _, p in (*dead.rows[:2], *other.rows)]) == list(range(80))
    document = bench.audit()
    assert (document["acknowledged"], document["rewound"], document["lost"], document["repeated"]) == (80, 2, 0, 0)
    assert document["state"] == "complete"


def test_a_dead_rank_is_fenced_also_by_the_next_dispatcher(bench):
    dead, other = start(bench)
    some_rows(dead)
    silence(bench, other)
    bench.reload()
    for say in (dead.send, lambda: dead.ask(3)):
        with pytest.raises(Fenced, match="its rows were given to the other ranks"):
            say()
    with pytest.raises(Fenced):
        bench.open(0, "u0", nonce=bench.state.jobs.by_name["train"].members[0].nonce, world_size=2, **ELASTIC)


def test_a_rank_that_was_only_slow_goes_on(bench):
    slow, other = start(bench)
    some_rows(slow)
    for _ in range(3):
        bench.wait(LEASE - 1)
        other.send()
        slow.send()
    assert not bench.state.jobs.by_name["train"].members[0].gone


def test_when_nobody_lives_nothing_is_taken_away_and_latest_goes_on(bench):
    ranks = start(bench)
    for rank in ranks:
        some_rows(rank)
    bench.wait(3 * LEASE)
    assert not any(member.gone for member in bench.state.jobs.by_name["train"].members.values())
    for r in range(2):
        found = bench.open(r, f"v{r}", world_size=2, start=m.StartPoint(kind="latest"), **ELASTIC)
    assert found.generation == 2
    after = [DynamicRank(bench, found, r, uid=f"v{r}") for r in range(2)]
    for rank in after:
        rank.finish()
    assert bench.audit(epoch=0)["acknowledged"] == 80 and bench.audit(epoch=0)["rewound"] == 4


def test_a_new_holder_joins_the_running_generation_with_a_lane_of_its_own(bench):
    dead, other = start(bench)
    some_rows(dead)
    some_rows(other)
    silence(bench, other)
    found = bench.open(0, "new", world_size=2, **ELASTIC)
    assert found.generation == 1 and found.absent == ()
    fresh = DynamicRank(bench, found, 0, uid="new")
    reply = fresh.ask(3)
    assert reply.lane is not None and reply.lane.number == 2 and fresh.lane.number == 2
    for rank in (other, fresh):
        rank.finish()
    assert sorted(p for _, p in (*dead.rows[:2], *other.rows, *fresh.rows)) == list(range(80))
    assert bench.audit()["acknowledged"] == 80


def test_a_restart_that_knows_its_old_process_to_be_dead_need_not_wait_for_the_lease(bench):
    dead, other = start(bench)
    some_rows(dead)
    found = bench.open(0, "new", world_size=2, dead=("u0",), **ELASTIC)
    assert found.generation == 1
    with pytest.raises(Fenced):
        dead.send()
    for rank in (other, DynamicRank(bench, found, 0, uid="new")):
        rank.finish()
    assert bench.audit()["acknowledged"] == 80


def test_a_new_holder_with_other_settings_or_start_is_refused_while_others_live(bench):
    _, other = start(bench)
    silence(bench, other)
    with pytest.raises(JobMismatch, match="batch_size"):
        bench.open(0, "new", world_size=2, batch_size=7, **ELASTIC)
    with pytest.raises(JobMismatch, match="epoch"):
        bench.open(0, "new", world_size=2, start=m.StartPoint(epoch=1), **ELASTIC)
    with pytest.raises(JobMismatch, match="kind"):
        bench.open(0, "new", world_size=2, start=m.StartPoint(kind="checkpoint", job="x", generation=1), **ELASTIC)
    own = m.StartPoint(kind="checkpoint", job="train", generation=1, world_size=2)
    assert bench.open(0, "new", world_size=2, start=own, **ELASTIC).generation == 1


def test_rows_are_carried_into_the_next_epoch_when_no_rank_is_left_in_theirs(bench):
    dead, other = start(bench)
    some_rows(dead)
    other.finish()
    document = bench.audit(epoch=0)
    assert document["state"] == "running" and document["open"] == 80 - 2 - other.place
    silence(bench, other)
    assert any("carried over into epoch 1" in text for text in bench.logs)
    later = DynamicRank(bench, other.opened, 1, 1)
    reply = later.ask(9)
    assert {p.epoch for p in later.lane.pieces} == {0} and reply.carried
    document = bench.audit(epoch=0)
    missing = 80 - 2 - other.place
    assert document["open"] == missing and document["state"] != "complete" and document["lost"] == 0
    bench.reload()
    bench.worker()
    later.finish()
    carried = [row for row in later.rows if row[0] == 0]
    assert len(carried) == missing and later.rows[: len(carried)] == carried
    assert sorted(p for _, p in (*dead.rows[:2], *other.rows, *carried)) == list(range(80))
    for epoch in (0, 1):
        document = bench.audit(epoch=epoch)
        assert (document["acknowledged"], document["lost"], document["state"]) == (80, 0, "complete")
    assert bench.audit(epoch=0)["rewound"] == 2


def test_carried_rows_go_with_latest(bench):
    dead, other = start(bench)
    some_rows(dead)
    other.finish()
    silence(bench, other)
    later = DynamicRank(bench, other.opened, 1, 1)
    later.ask(6)
    for _ in range(2):
        later.hand()
    later.ack()
    later.hand()
    later.send()
    bench.wait(3 * LEASE)
    found = bench.open(0, "v", world_size=1, start=m.StartPoint(kind="latest"), **ELASTIC)
    assert found.start.epoch == 1 and found.start.carried
    last = DynamicRank(bench, found, 0, uid="v")
    last.finish()
    assert sorted(p for e, p in (*dead.rows[:2], *other.rows, *later.rows[:4], *last.rows) if e == 0) == list(range(80))
    for epoch in (0, 1):
        document = bench.audit(epoch=epoch)
        assert (document["acknowledged"], document["lost"], document["state"]) == (80, 0, "complete"), document


def test_a_dead_rank_holds_back_neither_floor_nor_epochs(bench):
    dead, other = start(bench)
    some_rows(dead)
    silence(bench, other)
    for epoch in range(3):
        rank = DynamicRank(bench, other.opened, 1, epoch) if epoch else other
        while not rank.done:
            if not rank.hand():
                rank.ask(9)
            rank.ack()
            floors = rank.send().floors
        assert floors and floors[0].position > 70
        rank.send("finished")
    assert rank.send("finished").slowest_epoch == 3
    assert bench.audit(epoch=0)["state"] == "complete"
    assert not any("/epochs/0/" in key for key in bench.stored)  # folded


def test_a_new_holder_begins_where_the_others_are(bench):
    dead, other = start(bench)
    some_rows(dead)
    silence(bench, other)
    other.finish()
    later = DynamicRank(bench, other.opened, 1, 1)
    later.ask(3)
    later.send()
    found = bench.open(0, "new", world_size=2, **ELASTIC)
    passing = DynamicRank(bench, found, 0, 0, uid="new")
    assert passing.ask(5).final and passing.done and not passing.rows
    passing.send("finished")
    fresh = DynamicRank(bench, found, 0, 1, uid="new")
    for rank in (fresh, later):
        rank.finish()
    assert bench.audit(epoch=1)["state"] == "complete"
    assert bench.audit(epoch=1)["acknowledged"] == 80


@pytest.mark.parametrize("settings", [ELASTIC, {"lanes": 24}])
def test_silent_ranks_are_named_until_their_rows_are_taken_away(bench, settings):
    for r in range(3):
        found = bench.open(r, world_size=3, **settings)
    bench.report(found, 1, leaving=True)
    bench.at += LEASE + 2
    told = bench.report(found, 0).silent
    assert told == (m.SilentRank(rank=2, silent_ms=12_000, host="box", pid=102),)
    bench.wait(0)
    again = bench.report(found, 0).silent
    assert again == (() if settings is ELASTIC else told)
