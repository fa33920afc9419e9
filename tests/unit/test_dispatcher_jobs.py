"""Every rule for opening a job: new generation, join, repeat, restart, rewind, refusals, latest."""

import pytest
from core_bench import LEASE, Bench, Rank, make_manifest, whole_taken

from manifests.errors import ConfigError, Fenced, JobBusy, JobMismatch, StateMismatch, UnknownDataset
from manifests.wire import messages as m


@pytest.fixture
def bench():
    return Bench()


def checkpoint(ranks, epoch=0, step=1, **fields):
    return m.StartPoint(
        kind="checkpoint",
        epoch=epoch,
        step=step,
        taken=whole_taken(ranks),
        generation=ranks[0].opened.generation,
        **fields,
    )


# -- filling in


def test_the_first_open_draws_the_seed_and_keeps_it(bench):
    first = bench.open(drawn_seed=11)
    assert first.generation == 1 and first.settings.seed == 11 and first.absent == ()
    bench.report(first, leaving=True)
    assert bench.open(uid="later", drawn_seed=12).settings.seed == 11


def test_an_explicit_seed_wins(bench):
    assert bench.open(seed=5).settings.seed == 5


@pytest.mark.parametrize("world, lanes", [(1, 12), (3, 12), (5, 60), (8, 24)])
def test_default_lanes(bench, world, lanes):
    assert bench.open(world_size=world).settings.lanes == lanes


def test_world_size_must_divide_lanes(bench):
    with pytest.raises(ConfigError, match=r"does not divide 10 lanes.*1, 2, 5, 10"):
        bench.open(world_size=3, lanes=10)


def test_case_5_a_state_whose_lanes_the_world_size_does_not_divide_names_those_that_do(bench):
    start = m.StartPoint(kind="checkpoint", taken=(0,) * 12)
    with pytest.raises(StateMismatch, match=r"world size 5 does not divide 12 lanes.*1, 2, 3, 4, 6, 12"):
        bench.open(world_size=5, start=start)


def test_counts_must_match_the_lanes(bench):
    with pytest.raises(StateMismatch, match="counts for 3 lanes"):
        bench.open(lanes=12, start=m.StartPoint(kind="checkpoint", taken=(0, 0, 0)))


def test_counts_past_the_lane_are_refused(bench):
    with pytest.raises(StateMismatch, match="not inside an epoch"):
        bench.open(lanes=12, start=m.StartPoint(kind="checkpoint", taken=(50,) + (0,) * 11))


def test_unknown_manifest(bench):
    with pytest.raises(UnknownDataset):
        bench.open(sources=(m.Source(digest="sha256:" + "0" * 64),))


def test_case_11_a_dataset_without_rows_is_an_error_at_the_start():
    bench = Bench([0, 0])
    with pytest.raises(ConfigError, match="no rows"):
        bench.open()


@pytest.mark.parametrize(
    "bad",
    [
        {"batch_size": 0},
        {"epochs": 0},
        {"world_size": 0},
        {"elastic": True},
        {"elastic": True, "order": "dynamic", "tail": "drop"},
        {"sources": (m.Source(digest="sha256:a"), m.Source(digest="sha256:b"))},
    ],
)
def test_settings_that_cannot_work(bench, bad):
    with pytest.raises(ConfigError):
        bench.open(**bad)
    assert not bench.state.jobs.by_name


def test_rank_outside_the_world(bench):
    with pytest.raises(ConfigError, match="rank 2 of world size 2"):
        bench.open(rank=2, world_size=2)


# -- joining


def test_ranks_join_and_then_none_is_absent(bench):
    first = bench.open(0, world_size=2)
    assert first.absent == (1,)
    second = bench.open(1, world_size=2)
    assert second.generation == 1 and second.absent == ()


def test_the_same_open_again_changes_nothing(bench):
    bench.open(0, world_size=2, nonce="a")
    bench.open(1, world_size=2, nonce="b")
    before = dict(bench.stored)
    again = bench.open(0, world_size=2, nonce="a")
    assert again.generation == 1 and again.absent == () and bench.stored == before


def test_an_open_that_was_long_on_its_way_rewinds_nothing(bench):
    bench.open(0, nonce="a")
    bench.open(0, nonce="b")
    before = dict(bench.stored)
    with pytest.raises(Fenced, match="not the last one of its loader"):
        bench.open(0, nonce="a")
    assert bench.stored == before
    assert bench.open(0, nonce="b").generation == 2


def test_case_18_ranks_that_disagree_are_refused_with_the_difference(bench):
    bench.open(0, world_size=2, seed=1)
    with pytest.raises(JobMismatch, match="seed: job has 1, this rank asks 2"):
        bench.open(1, world_size=2, seed=2)
    with pytest.raises(JobMismatch, match="batch_size: job has 2, this rank asks 16") as caught:
        bench.open(1, world_size=2, seed=1, batch_size=16)
    assert caught.value.detail["differences"] == ["batch_size"]
    assert caught.value.detail["holders"] == [{"rank": 0, "uid": "u0", "host": "box", "pid": 100}]
    other = bench.shelf.add(make_manifest([9], "other"))
    with pytest.raises(JobMismatch, match="sources: job has"):
        bench.open(1, world_size=2, seed=1, sources=(m.Source(digest=other),))
    assert bench.open(1, world_size=2).settings.seed == 1  # a rank without a seed takes the job's


def test_another_start_point_is_refused_with_the_difference(bench):
    bench.open(0, world_size=2)
    start = m.StartPoint(kind="checkpoint", epoch=1, step=4, taken=(0,) * 12)
    with pytest.raises(JobMismatch, match="kind: job has fresh, this rank asks checkpoint"):
        bench.open(1, world_size=2, start=start)


def test_same_place_but_other_counts_is_refused(bench):
    start = m.StartPoint(kind="checkpoint", step=1, taken=(1,) * 12)
    bench.open(0, world_size=2, start=start)
    with pytest.raises(JobMismatch, match="rows taken"):
        bench.open(1, world_size=2, start=m.StartPoint(kind="checkpoint", step=1, taken=(0,) + (1,) * 11))


def test_latest_joins_latest_only(bench):
    latest = m.StartPoint(kind="latest")
    bench.open(0, world_size=2, start=latest)
    with pytest.raises(JobMismatch, match="start: job has latest, this rank asks fresh"):
        bench.open(1, world_size=2)
    assert bench.open(1, world_size=2, start=latest).absent == ()


# -- restart, rewind, busy


def test_a_live_holder_makes_the_rank_busy(bench):
    bench.open(0, "first")
    bench.at += 3
    with pytest.raises(JobBusy, match="process 100 on box") as caught:
        bench.open(0, "second")
    detail = caught.value.detail
    assert (detail["host"], detail["pid"], detail["heard_ms"], detail["lease_ms"]) == ("box", 100, 3000, 10000)


def test_a_restart_after_the_lease_opens_a_generation_and_fences_the_old_holder(bench):
    bench.worker()
    old = bench.open(0, "first")
    bench.ask(old, uid="first")
    bench.at += LEASE + 0.1
    new = bench.open(0, "second")
    assert new.generation == 2
    with pytest.raises(Fenced) as caught:
        bench.ask(old, uid="first")
    assert caught.value.detail == {"generation": 2}
    with pytest.raises(Fenced):
        bench.report(old, uid="first")


def test_a_holder_known_to_be_dead_needs_no_wait(bench):
    bench.open(0, "first")
    assert bench.open(0, "second", dead=("first",)).generation == 2


def test_messages_renew_the_lease(bench):
    opened = bench.open(0, "first")
    for _ in range(4):
        bench.at += LEASE * 0.8
        bench.report(opened, uid="first")
    with pytest.raises(JobBusy):
        bench.open(0, "second")


def test_closing_gives_the_rank_back_at_once(bench):
    opened = bench.open(0, "first")
    bench.report(opened, uid="first", leaving=True)
    assert bench.open(0, "second").generation == 2


def test_a_restarted_rank_of_a_live_job_fences_the_others(bench):
    bench.worker()
    a, b = bench.open(0, world_size=2), bench.open(1, world_size=2)
    bench.ask(a, 0)
    new = bench.open(0, "again", world_size=2, dead=("u0",))
    assert new.generation == 2 and new.absent == (1,)
    with pytest.raises(Fenced):
        bench.ask(b, 1)
    assert bench.open(1, world_size=2).absent == ()


def test_before_anything_was_granted_a_new_holder_takes_its_place(bench):
    bench.open(0, world_size=2)
    bench.open(1, world_size=2)
    new = bench.open(0, "again", world_size=2, dead=("u0",))
    assert new.generation == 1 and new.absent == ()
    with pytest.raises(Fenced, match="not held by this loader"):
        bench.report(new, 0, uid="u0")


def test_a_rewind_by_the_same_holder_is_a_new_generation(bench):
    opened = bench.open(0)
    rank = Rank(bench, opened, 0)
    rank.hand()
    rank.ack()
    rank.send()
    assert bench.open(0, start=checkpoint([rank])).generation == 2


def test_both_ranks_rewind(bench):
    a, b = bench.open(0, world_size=2), bench.open(1, world_size=2)
    start = m.StartPoint(kind="checkpoint", step=1, taken=(1,) * 12, generation=1)
    assert bench.open(0, world_size=2, start=start).generation == 2
    joined = bench.open(1, world_size=2, start=start)
    assert joined.generation == 2 and joined.absent == ()
    for rank, opened in ((0, a), (1, b)):
        with pytest.raises(Fenced):
            bench.report(opened, rank)


def test_another_world_size_while_the_job_runs_is_busy_and_later_a_new_generation(bench):
    bench.open(0, world_size=2)
    bench.open(1, world_size=2)
    with pytest.raises(JobBusy) as caught:
        bench.open(2, world_size=3)
    dead = tuple(holder["uid"] for holder in caught.value.detail["holders"])
    assert bench.open(2, world_size=3, dead=dead).generation == 2


def test_a_fresh_start_over_a_record_warns_and_names_it(bench):
    opened = bench.open(0)
    rank = Rank(bench, opened, 0)
    rank.hand()
    rank.ack()
    rank.send(leaving=True)
    again = bench.open(0, "later")
    assert again.warning == "job train had generation 1 at epoch 0 step 1; starting afresh"
    bench.report(again, uid="later", leaving=True)
    assert bench.open(0, "third").warning == "job train had generation 1 at epoch 0 step 1; starting afresh".replace(
        "generation 1 at epoch 0 step 1", "generation 2 at epoch 0 step 0"
    )


def test_a_loader_that_goes_to_another_epoch_itself_is_not_warned(bench):
    """set_epoch opens a generation from the same loader; only another one hears that it starts afresh."""
    opened = bench.open(0)
    rank = Rank(bench, opened, 0)
    rank.hand()
    rank.ack()
    rank.send()
    start = m.StartPoint(kind="fresh", epoch=3, first_epoch=3)
    again = bench.open(0, start=start)
    assert again.generation == 2 and again.start == start and again.warning == ""
    bench.report(again, leaving=True)
    later = bench.open(0, "later")
    assert later.warning == "job train had generation 2 at epoch 3 step 0; starting afresh"


@pytest.mark.parametrize("fields", [{"epoch": -1}, {"step": 1}, {"taken": (1,) * 12}])
def test_a_fresh_start_is_the_beginning_of_an_epoch(bench, fields):
    with pytest.raises(ConfigError, match="must be the beginning of an epoch"):
        bench.open(start=m.StartPoint(kind="fresh", **fields))
    assert not bench.state.jobs.by_name


def test_ranks_join_a_fresh_start_at_one_epoch_only(bench):
    bench.open(0, world_size=2, start=m.StartPoint(kind="fresh", epoch=3, first_epoch=3))
    with pytest.raises(JobMismatch, match="epoch: job has 3, this rank asks 0"):
        bench.open(1, world_size=2)


def test_case_23_with_an_empty_store_the_trainer_gets_a_typed_error(bench):
    opened = bench.open(0)
    bench.stored.clear()
    bench.reload()
    with pytest.raises(Fenced, match="not known to this dispatcher"):
        bench.report(opened)


# -- latest


LATEST = m.StartPoint(kind="latest")


def test_latest_without_a_record_is_fresh(bench):
    assert bench.open(start=LATEST).start.kind == "fresh"


def test_latest_is_the_acknowledged_position_in_the_lowest_open_epoch(bench):
    opened = [bench.open(r, world_size=2) for r in range(2)]
    ranks = [Rank(bench, o, r) for r, o in enumerate(opened)]
    for rank in ranks:
        rank.hand()
        rank.ack()
        rank.hand()
    ranks[0].send()
    ranks[1].send()
    bench.report(opened[0], 0, leaving=True)
    bench.report(opened[1], 1, leaving=True)
    again = bench.open(0, "later", start=LATEST, world_size=2)
    assert (again.start.kind, again.start.epoch, again.start.step, again.start.generation) == ("checkpoint", 0, 1, 1)
    assert sum(again.start.taken) == 4
    assert again.settings.seed == opened[0].settings.seed


def test_latest_after_going_to_an_epoch_stays_there(bench):
    opened = bench.open(start=m.StartPoint(kind="fresh", epoch=3, first_epoch=3))
    bench.report(opened, leaving=True)
    again = bench.open(uid="later", start=LATEST)
    assert (again.start.epoch, again.start.first_epoch, again.start.job, again.warning) == (3, 3, "train", "")


def test_latest_counts_a_finished_rank_as_through(bench):
    opened = [bench.open(r, world_size=2) for r in range(2)]
    ranks = [Rank(bench, o, r) for r, o in enumerate(opened)]
    ranks[0].finish()
    ranks[0].send("finished")
    ranks[1].hand()
    ranks[1].ack()
    ranks[1].send()
    again = bench.open(0, "later", start=LATEST, world_size=2, dead=("u0", "u1"))
    assert [again.start.taken[lane] for lane in ranks[0].own] == ranks[0].sizes.tolist()
    assert sum(again.start.taken[lane] for lane in ranks[1].own) == 2


def test_latest_after_a_whole_epoch_is_the_next_one(bench):
    opened = bench.open(epochs=2)
    Rank(bench, opened, 0).finish()
    rank = Rank(bench, opened, 0)
    bench.report(opened, 0, rank.finish(), leaving=True)
    again = bench.open(uid="later", start=LATEST, epochs=2)
    assert (again.start.epoch, again.start.step, sum(again.start.taken), again.start.first_epoch) == (1, 0, 0, 0)


def test_latest_after_the_last_epoch_begins_another_pass(bench):
    opened = bench.open()
    bench.report(opened, 0, Rank(bench, opened, 0).finish(), leaving=True)
    again = bench.open(uid="later", start=LATEST)
    assert (again.start.epoch, again.start.first_epoch) == (1, 1)


def test_latest_on_other_data_or_another_order_is_refused(bench):
    opened = bench.open(seed=3)
    rank = Rank(bench, opened, 0)
    rank.hand()
    rank.ack()
    rank.send(leaving=True)
    with pytest.raises(StateMismatch, match="seed: job has 3, this rank asks 4"):
        bench.open(uid="later", start=LATEST, seed=4)
    with pytest.raises(StateMismatch, match="shuffle"):
        bench.open(uid="later", start=LATEST, shuffle=None)
    assert bench.open(uid="later", start=LATEST, batch_size=7).generation == 2


# -- jobs that ended


def test_ended_jobs_are_kept_seven_days(bench):
    opened = bench.open()
    rank = Rank(bench, opened, 0)
    rank.hand()
    rank.send(leaving=True)
    bench.wait(6.9 * 86400)
    assert "train" in bench.state.jobs.by_name
    bench.wait(0.2 * 86400)
    assert not bench.state.jobs.by_name
    assert not [key for key in bench.stored if key.startswith("jobs/")]
