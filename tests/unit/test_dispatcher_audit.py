"""Audit arithmetic: rewinds, skips, drops, abandoned ranks, lost and repeated rows, folded epochs."""

import msgspec
import numpy as np
import pytest
from core_bench import Bench, DynamicRank, Rank, make_manifest, start_of, sum_of, whole_taken

from dispatcher import job as job_module
from dispatcher import records
from feedline.commands import audit
from manifests.errors import ConfigError, ProtocolError
from manifests.identity import id_sum
from manifests.ranges import Ranges
from manifests.wire import messages as m

ROWS = 24  # of the bench's default manifest


@pytest.fixture
def bench():
    return Bench()


def start_at(ranks, step, epoch=0, **fields):
    return m.StartPoint(
        kind="checkpoint",
        epoch=epoch,
        step=step,
        taken=whole_taken(ranks),
        generation=ranks[0].opened.generation,
        **fields,
    )


def run_epoch(bench, world=1, epoch=0, opened=None, **settings):
    """All ranks take an epoch to its end and close."""
    opened = opened or [bench.open(r, world_size=world, **settings) for r in range(world)]
    for r, found in enumerate(opened):
        bench.report(found, r, Rank(bench, found, r, epoch).finish(settings.get("tail", "pad")))
    return opened


def counts(document):
    keys = ("handed_out", "acknowledged", "lost", "repeated", "skipped", "dropped", "abandoned", "rewound", "open")
    return {key: document[key] for key in keys if document[key]}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_whole_epoch_balances(bench, world):
    run_epoch(bench, world)
    document = bench.audit()
    assert document["state"] == "complete"
    assert counts(document) == {"handed_out": ROWS, "acknowledged": ROWS}
    assert document["shards"] == [] and document["rows"] == ROWS and document["schema"] == 1


def test_the_document_has_exactly_the_contract_s_keys(bench):
    run_epoch(bench)
    assert list(bench.audit()) == [
        "schema", "job", "generation", "epoch", "state", "rows", "handed_out", "acknowledged", "lost", "repeated",
        "skipped", "dropped", "abandoned", "rewound", "quarantined", "padded", "open", "shards",
    ]  # fmt: skip


def test_an_open_epoch_is_running_and_after_the_lease_stopped(bench):
    opened = bench.open()
    rank = Rank(bench, opened, 0)
    rank.hand()
    rank.ack()
    rank.hand()
    rank.send()
    document = bench.audit()
    assert document["state"] == "running"
    assert counts(document) == {"handed_out": 4, "acknowledged": 2, "open": 22}
    bench.at += 11
    assert bench.audit()["state"] == "stopped"


def test_a_job_without_reports_is_all_open(bench):
    bench.open()
    assert counts(bench.audit()) == {"open": ROWS}


def test_unknown_epochs_are_refused(bench):
    bench.open()
    for epoch in (-1, 1):
        with pytest.raises(ConfigError, match="has been in epochs 0 to 0"):
            bench.audit(epoch=epoch)


def test_an_epoch_that_was_skipped_is_refused(bench):
    opened = bench.open(epochs=None)
    run_epoch(bench, opened=[opened])
    run_epoch(bench, epoch=3, opened=[opened])
    with pytest.raises(ConfigError, match="has not entered epoch 2"):
        bench.audit(epoch=2)


# -- tails, skips, abandoned


def test_drop_drops_less_than_a_global_batch(bench):
    opened = [bench.open(r, world_size=2, batch_size=5, tail="drop") for r in range(2)]
    for r, found in enumerate(opened):
        bench.report(found, r, Rank(bench, found, r).finish("drop"))
    document = bench.audit()
    assert document["state"] == "complete"
    assert counts(document) == {"handed_out": 20, "acknowledged": 20, "dropped": 4}


def test_rows_missing_beyond_the_drop_rule_are_lost(bench):
    opened = bench.open(tail="drop", batch_size=2)
    rank = Rank(bench, opened, 0)
    for _ in range(9):
        rank.hand()
    rank.ack()
    rank.send("finished")
    document = bench.audit()
    assert counts(document) == {"handed_out": 18, "acknowledged": 18, "lost": 6}


def test_rows_a_finished_rank_never_handed_out_are_lost(bench):
    opened = bench.open()
    rank = Rank(bench, opened, 0)
    rank.hand()
    rank.ack()
    rank.send("finished")
    assert counts(bench.audit()) == {"handed_out": 2, "acknowledged": 2, "lost": 22}
    assert bench.audit()["shards"][0]["note"] == "22 rows were never handed out"


def test_skipped_rows_are_counted_and_pads_too(bench):
    opened = bench.open(on_error="skip")
    rank = Rank(bench, opened, 0)
    rank.hand(2, skip=3)
    rank.padded = 3
    bench.report(opened, 0, rank.finish())
    document = bench.audit()
    assert counts(document) == {"handed_out": 21, "acknowledged": 21, "skipped": 3}
    assert document["padded"] == 3 and document["state"] == "complete"


def test_skipped_rows_not_acknowledged_are_still_open(bench):
    opened = bench.open(on_error="skip")
    rank = Rank(bench, opened, 0)
    rank.hand(2, skip=1)
    rank.ack()
    rank.hand(2, skip=1)
    rank.send()
    assert counts(bench.audit()) == {"handed_out": 4, "acknowledged": 2, "skipped": 1, "open": 21}


def test_a_rank_that_leaves_early_abandons_its_rows(bench):
    opened = [bench.open(r, world_size=2) for r in range(2)]
    bench.report(opened[0], 0, Rank(bench, opened[0], 0).finish())
    early = Rank(bench, opened[1], 1)
    early.hand()
    early.ack()
    early.hand()
    early.send("abandoned")
    document = bench.audit()
    assert document["state"] == "complete"
    assert counts(document) == {"handed_out": 16, "acknowledged": 14, "abandoned": 10}


# -- start points


def test_rows_past_a_start_point_are_rewound(bench):
    opened = bench.open()
    rank = Rank(bench, opened, 0)
    for _ in range(3):
        rank.hand()
    start = start_at([rank], 3)
    for _ in range(4):
        rank.hand()
    rank.send()
    again = bench.open(uid="new", dead=("u0",), start=start)
    second = Rank(bench, again, 0)
    bench.report(again, 0, second.finish(), uid="new")
    document = bench.audit()
    assert document["generation"] == 2 and document["state"] == "complete"
    assert counts(document) == {"handed_out": 32, "acknowledged": 24, "rewound": 8}


def test_a_start_point_vouches_for_rows_no_report_told_of(bench):
    opened = bench.open()
    rank = Rank(bench, opened, 0)
    rank.hand()
    rank.ack()
    rank.send()
    rank.hand()
    rank.hand()
    again = bench.open(uid="new", dead=("u0",), start=start_at([rank], 3))
    second = Rank(bench, again, 0)
    bench.report(again, 0, second.finish(), uid="new")
    assert counts(bench.audit()) == {"handed_out": 24, "acknowledged": 24}


def test_a_chain_follows_parents_not_numbers(bench):
    """Generation 3 goes on from a later checkpoint of generation 1: what generation 2 handed out is rewound."""
    opened = bench.open()
    rank = Rank(bench, opened, 0)
    rank.hand()
    early = start_at([rank], 1)
    for _ in range(4):
        rank.hand()
    late = start_at([rank], 5)
    rank.send()
    second_open = bench.open(uid="b", dead=("u0",), start=early)
    second = Rank(bench, second_open, 0)
    second.hand()
    bench.report(second_open, 0, second.progress(), uid="b")
    third_open = bench.open(uid="c", dead=("b",), start=late)
    third = Rank(bench, third_open, 0)
    bench.report(third_open, 0, third.finish(), uid="c")
    assert counts(bench.audit()) == {"handed_out": 26, "acknowledged": 24, "rewound": 2}


def test_resume_on_another_world_size_balances(bench):
    opened = [bench.open(r, world_size=2) for r in range(2)]
    ranks = [Rank(bench, found, r) for r, found in enumerate(opened)]
    for rank in ranks:
        for _ in range(3):
            rank.hand()
    start = start_at(ranks, 3)
    for rank in ranks:
        rank.hand()
        rank.ack()
        rank.send()
    again = [bench.open(r, f"v{r}", world_size=3, start=start, dead=("u0", "u1"), epochs=4) for r in range(3)]
    for r, found in enumerate(again):
        bench.report(found, r, Rank(bench, found, r).finish(), uid=f"v{r}")
    assert counts(bench.audit()) == {"handed_out": 28, "acknowledged": 24, "rewound": 4}


def test_skipped_rows_before_and_after_a_start_point(bench):
    opened = bench.open(on_error="skip")
    rank = Rank(bench, opened, 0)
    rank.hand(2, skip=1)
    start = start_at([rank], 1)
    rank.hand(2, skip=2)
    rank.ack()
    rank.send()
    again = bench.open(uid="new", dead=("u0",), start=start, on_error="skip")
    second = Rank(bench, again, 0)
    second.hand(2, skip=2)
    bench.report(again, 0, second.finish(), uid="new")
    assert counts(bench.audit()) == {"handed_out": 23, "acknowledged": 21, "skipped": 3, "rewound": 2}


def test_a_start_point_voids_abandoned_rows_after_it(bench):
    opened = bench.open()
    rank = Rank(bench, opened, 0)
    rank.hand()
    start = start_at([rank], 1)
    rank.hand()
    rank.ack()
    rank.send("abandoned")
    assert bench.audit()["abandoned"] == 20
    again = bench.open(start=start)
    bench.report(again, 0, Rank(bench, again, 0).finish())
    assert counts(bench.audit()) == {"handed_out": 26, "acknowledged": 24, "rewound": 2}


@pytest.mark.parametrize(
    "tail, expected",
    [("pad", {"handed_out": 24, "acknowledged": 24}), ("drop", {"handed_out": 20, "acknowledged": 20, "dropped": 4})],
)
def test_an_epoch_before_the_start_point_is_complete_even_if_the_last_report_is_missing(bench, tail, expected):
    opened = bench.open(epochs=3, tail=tail, batch_size=10)
    rank = Rank(bench, opened, 0)
    rank.hand()
    rank.ack()
    rank.send()
    start = m.StartPoint(kind="checkpoint", epoch=1, step=0, taken=(0,) * 12, generation=1)
    bench.open(uid="new", dead=("u0",), start=start, epochs=3, tail=tail, batch_size=10)
    document = bench.audit(epoch=0)
    assert document["state"] == "complete" and counts(document) == expected


def test_epochs_after_a_start_point_are_void(bench):
    opened = bench.open(epochs=3)
    first = Rank(bench, opened, 0)
    first.hand()
    start = start_at([first], 1)
    bench.report(opened, 0, first.finish())
    second = Rank(bench, opened, 0, epoch=1)
    second.hand()
    bench.report(opened, 0, second.progress())
    again = bench.open(start=start, epochs=3)
    assert bench.audit()["epoch"] == 0
    bench.report(again, 0, Rank(bench, again, 0).finish())
    next_epoch = Rank(bench, again, 0, epoch=1)
    bench.report(again, 0, next_epoch.finish())
    assert counts(bench.audit(epoch=0)) == {"handed_out": 46, "acknowledged": 24, "rewound": 22}
    assert counts(bench.audit(epoch=1)) == {"handed_out": 26, "acknowledged": 24, "rewound": 2}


def test_a_state_of_another_job_vouches_for_what_came_before(bench):
    opened = bench.open(job="other")
    rank = Rank(bench, opened, 0)
    for _ in range(3):
        rank.hand()
    again = bench.open(start=start_at([rank], 3), seed=opened.settings.seed)
    bench.report(again, 0, Rank(bench, again, 0).finish())
    assert counts(bench.audit()) == {"handed_out": 24, "acknowledged": 24}


def test_a_fresh_start_begins_a_new_line(bench):
    run_epoch(bench)
    again = bench.open(uid="new", dead=("u0",))
    assert counts(bench.audit()) == {"open": 24}
    bench.report(again, 0, Rank(bench, again, 0).finish(), uid="new")
    assert counts(bench.audit()) == {"handed_out": 24, "acknowledged": 24}


# -- going to another epoch


def fresh(epoch):
    return m.StartPoint(kind="fresh", epoch=epoch, first_epoch=epoch)


WHOLE = {"handed_out": ROWS, "acknowledged": ROWS}


def test_going_back_to_an_epoch_before_the_first_one_leaves_every_epoch_auditable(bench):
    """Epoch 3, then set_epoch(1): both can be audited, and without a number the audit is that of epoch 1."""
    run_epoch(bench, opened=[bench.open(start=fresh(3))], epoch=3)
    run_epoch(bench, opened=[bench.open(start=fresh(1))], epoch=1)
    assert bench.audit()["epoch"] == 1
    for epoch in (None, 1, 3):
        document = bench.audit(epoch=epoch)
        assert document["state"] == "complete" and counts(document) == WHOLE
    with pytest.raises(ConfigError, match="has not entered epoch 2"):
        bench.audit(epoch=2)
    with pytest.raises(ConfigError, match="has no epoch 0: it has been in epochs 1 to 3"):
        bench.audit(epoch=0)


def test_a_fresh_start_at_a_later_epoch_vouches_for_nothing(bench):
    """One batch of epoch 0, then set_epoch(5) twice: epoch 0 stays abandoned, epoch 3 was never entered."""
    opened = bench.open()
    rank = Rank(bench, opened, 0)
    rank.hand()
    rank.ack()
    rank.send("abandoned")
    run_epoch(bench, opened=[opened], epoch=5)
    run_epoch(bench, opened=[bench.open(start=fresh(5))], epoch=5)
    assert counts(bench.audit(epoch=0)) == {"handed_out": 2, "acknowledged": 2, "abandoned": 22}
    assert counts(bench.audit(epoch=5)) == WHOLE
    for epoch in (1, 3, 4):
        with pytest.raises(ConfigError, match=f"has not entered epoch {epoch}"):
            bench.audit(epoch=epoch)


def test_an_epoch_left_open_by_an_older_generation_is_stopped_not_running(bench):
    opened = bench.open()
    rank = Rank(bench, opened, 0)
    rank.hand()
    rank.send()
    bench.open(start=fresh(5))
    document = bench.audit(epoch=0)
    assert document["state"] == "stopped" and counts(document) == {"handed_out": 2, "open": ROWS}
    assert bench.audit()["epoch"] == 5 and counts(bench.audit()) == {"open": ROWS}


def test_a_saved_state_vouches_only_for_epochs_its_line_was_in(bench):
    """Epochs 0 and 3 were read, 1 and 2 jumped over: a state of epoch 4 vouches for 0 and 3 alone."""
    opened = bench.open(epochs=None)
    run_epoch(bench, epoch=0, opened=[opened])
    run_epoch(bench, epoch=3, opened=[opened])
    bench.open(start=m.StartPoint(kind="checkpoint", epoch=4, taken=(0,) * 12, generation=1, first_epoch=3))
    assert counts(bench.audit(epoch=0)) == counts(bench.audit(epoch=3)) == WHOLE
    for epoch in (1, 2):
        with pytest.raises(ConfigError, match=f"has not entered epoch {epoch}"):
            bench.audit(epoch=epoch)


def test_a_saved_state_vouches_for_epochs_of_its_pass_that_no_report_told_of(bench):
    opened = bench.open(epochs=None)
    run_epoch(bench, epoch=0, opened=[opened])
    bench.open(uid="new", dead=("u0",), start=m.StartPoint(kind="checkpoint", epoch=2, taken=(0,) * 12, generation=1))
    assert counts(bench.audit(epoch=1)) == WHOLE


def test_a_state_of_an_older_line_brings_that_line_back(bench):
    """Epoch 0 whole and a state in epoch 1; set_epoch(0) for one batch; the state again: epoch 0 is whole."""
    opened = bench.open(epochs=None)
    run_epoch(bench, epoch=0, opened=[opened])
    rank = Rank(bench, opened, 0, epoch=1)
    rank.hand()
    state = start_at([rank], 1, epoch=1)
    rank.send("abandoned")
    again = bench.open(start=fresh(0))
    second = Rank(bench, again, 0)
    second.hand()
    second.ack()
    second.send("abandoned")
    assert counts(bench.audit(epoch=0)) == {"handed_out": 2, "acknowledged": 2, "abandoned": 22}
    third = bench.open(start=state)
    bench.report(third, 0, Rank(bench, third, 0).finish())
    assert counts(bench.audit(epoch=0)) == {"handed_out": 26, "acknowledged": 24, "rewound": 2}
    assert counts(bench.audit(epoch=1)) == WHOLE


# -- parents that are none


@pytest.mark.parametrize("change", [{"lanes": 4}, {"seed": 78}, {"shuffle": None}])
@pytest.mark.parametrize("named", ["", "train", "other"])
def test_a_parent_with_other_settings_is_none(bench, change, named):
    """A state of another job, or of a former one of this name, finds a generation 1 that has another order."""
    mine = bench.open(**change)
    first = Rank(bench, mine, 0)
    first.hand()
    first.send(leaving=True)
    other = bench.open(job="other", lanes=12, seed=77)
    rank = Rank(bench, other, 0)
    for _ in range(3):
        rank.hand()
    again = bench.open(start=start_at([rank], 3, job=named), lanes=12, seed=77)
    bench.report(again, 0, Rank(bench, again, 0).finish())
    assert counts(bench.audit()) == WHOLE


def test_a_parent_with_other_data_is_none(bench):
    mine = bench.open(sources=(m.Source(digest=bench.shelf.add(make_manifest([40], "other"))),))
    bench.report(mine, leaving=True)
    other = bench.open(job="other", seed=77)
    rank = Rank(bench, other, 0)
    rank.hand()
    again = bench.open(start=start_at([rank], 1), seed=77)
    bench.report(again, 0, Rank(bench, again, 0).finish())
    assert counts(bench.audit()) == WHOLE


def test_a_generation_of_another_job_is_no_parent_even_if_all_settings_are_the_same(bench):
    """What this job's own generation 1 handed out has nothing to do with the other job's state."""
    mine = bench.open(seed=77)
    first = Rank(bench, mine, 0)
    first.hand(10)
    first.send(leaving=True)
    other = bench.open(job="other", seed=77)
    rank = Rank(bench, other, 0)
    rank.hand()
    again = bench.open(start=start_at([rank], 1, job="other"), seed=77)
    bench.report(again, 0, Rank(bench, again, 0).finish())
    assert counts(bench.audit()) == WHOLE


def test_a_state_before_the_start_of_the_generation_it_names_has_no_parent(bench):
    """Its counts lie before generation 2's own start point, so it cannot have been taken there."""
    run_epoch(bench, epochs=3)
    bench.open(start=m.StartPoint(kind="checkpoint", step=6, taken=(1,) * 12, generation=1))
    again = bench.open(start=m.StartPoint(kind="checkpoint", step=1, taken=(1, 1) + (0,) * 10, generation=2))
    bench.report(again, 0, Rank(bench, again, 0).finish())
    assert counts(bench.audit()) == WHOLE


# -- unequal ranks


def test_rows_that_uneven_acknowledgements_leave_over_are_dropped(bench):
    """drop, two ranks, rank 0 acknowledged more before both stopped: rank 1 drops its surplus by rule."""
    opened = [bench.open(r, world_size=2, tail="drop") for r in range(2)]
    for r, steps in ((0, 5), (1, 2)):
        rank = Rank(bench, opened[r], r)
        for _ in range(steps):
            rank.hand()
        rank.ack()
        rank.send(leaving=True)
    latest = m.StartPoint(kind="latest")
    again = [bench.open(r, f"v{r}", world_size=2, tail="drop", start=latest) for r in range(2)]
    assert "6 rows of it will be dropped" in again[0].warning
    for r, found in enumerate(again):
        rank = Rank(bench, found, r)
        rank.hand()  # rank 0 has one batch left, so both hand out one
        rank.ack()
        rank.send("finished", uid=f"v{r}")
    document = bench.audit()
    assert document["state"] == "complete"
    assert counts(document) == {"handed_out": 18, "acknowledged": 18, "dropped": 6}


def test_rows_missing_beyond_what_uneven_ranks_leave_over_are_lost(bench):
    start = m.StartPoint(kind="checkpoint", step=3, taken=(2, 1) * 3 + (1,) * 6)
    opened = [bench.open(r, world_size=2, tail="drop", start=start) for r in range(2)]
    for r, found in enumerate(opened):
        rank = Rank(bench, found, r)
        rank.hand()
        rank.ack()
        rank.send("finished")
    # 15 rows before; rank 0 has 3 left and rank 1 has 6: one batch each, 1 + 4 rows left over
    assert counts(bench.audit()) == {"handed_out": 19, "acknowledged": 19, "dropped": 5}
    opened = [bench.open(r, f"v{r}", world_size=2, tail="drop", start=start, dead=("u0", "u1")) for r in range(2)]
    for r, found in enumerate(opened):
        rank = Rank(bench, found, r)
        if r == 0:
            rank.hand()
        rank.ack()
        rank.send("finished", uid=f"v{r}")
    document = bench.audit()
    assert (document["dropped"], document["lost"]) == (5, 2)


def test_ranks_with_nothing_left_at_the_start_point_balance(bench):
    """ragged: a state inside the epoch in which rank 0 is through and rank 1 is not."""
    opened = [bench.open(r, world_size=2, tail="ragged") for r in range(2)]
    ranks = [Rank(bench, found, r) for r, found in enumerate(opened)]
    bench.report(opened[0], 0, ranks[0].finish("ragged"))
    ranks[1].hand()
    start = start_at(ranks, 6)
    ranks[1].hand()
    ranks[1].send()
    again = [bench.open(r, f"v{r}", world_size=2, tail="ragged", start=start, dead=("u0", "u1")) for r in range(2)]
    second = [Rank(bench, found, r) for r, found in enumerate(again)]
    bench.report(again[0], 0, second[0].progress("finished"), uid="v0")
    status = next(found for found in bench.state.jobs.by_name["train"].ranks[0].values() if found.rank == 0)
    assert status.progress.step == 6 and counts(bench.audit())["open"] == 10
    bench.report(again[1], 1, second[1].finish("ragged"), uid="v1")
    document = bench.audit()
    assert document["state"] == "complete"
    assert counts(document) == {"handed_out": 26, "acknowledged": 24, "rewound": 2}
    assert bench.state.jobs.by_name["train"].state(bench.at, 10) == "complete"
    again = bench.open(0, "w0", world_size=2, tail="ragged", start=m.StartPoint(kind="latest"), dead=("v0", "v1"))
    assert (again.start.epoch, sum(again.start.taken), again.start.job) == (1, 0, "train")
    assert counts(bench.audit(epoch=0)) == {"handed_out": 26, "acknowledged": 24, "rewound": 2}


# -- wrong books


def test_a_lost_and_a_repeated_row_are_found_without_details(bench):
    """The rank says that all is well, but its batches held one row twice and lacked another."""
    opened = bench.open()
    rank = Rank(bench, opened, 0)
    good = rank.finish()
    ids = [*rank.ids[:-1], rank.ids[0]]
    bench.report(opened, 0, msgspec.structs.replace(good, handed_out=sum_of(ids), acknowledged=sum_of(ids)))
    document = bench.audit()
    assert document["state"] == "complete"
    assert (document["lost"], document["repeated"], document["acknowledged"]) == (1, 1, 23)
    assert document["shards"] == [
        {"source": 0, "shard": None, "note": "the ids handed out are not those of the plan; no rank told which"}
    ]


def test_details_give_exact_counts(bench):
    opened = bench.open()
    rank = Rank(bench, opened, 0)
    good = rank.finish()
    ids = [i for i in range(24) if i not in (3, 4, 5)] + [0]
    details = (
        m.ShardSum(source=0, shard=0, planned=3, handed_out=4, repeated=(0,)),
        m.ShardSum(source=0, shard=1, planned=5, handed_out=2, lost=(3, 4, 5)),
    )
    bench.report(opened, 0, msgspec.structs.replace(good, handed_out=sum_of(ids), unbalanced=details))
    document = bench.audit()
    assert (document["lost"], document["repeated"], document["acknowledged"]) == (3, 1, 21)
    assert document["handed_out"] == 22 == document["acknowledged"] + document["repeated"]
    assert [entry["shard"] for entry in document["shards"]] == [0, 1]


def test_details_that_do_not_explain_the_sum_count_at_least_one_more(bench):
    opened = bench.open()
    good = Rank(bench, opened, 0).finish()
    ids = [i for i in range(24) if i not in (3, 10)] + [0]
    details = (m.ShardSum(source=0, shard=1, planned=5, handed_out=4, lost=(3,)),)
    bench.report(opened, 0, msgspec.structs.replace(good, handed_out=sum_of(ids), unbalanced=details))
    document = bench.audit()
    assert document["lost"] == 2 and document["repeated"] == 1


def test_a_client_that_plans_another_order_is_found(bench):
    """Both of the rank's own sums agree, but they are not the plan's."""
    opened = bench.open()
    rank = Rank(bench, opened, 0)
    rank.hand(12)
    rank.ack()
    wrong = sorted(set(range(24)) - set(rank.ids))[:12]
    bench.report(opened, 0, rank.progress(source=sum_of(wrong), handed_out=sum_of(wrong)))
    document = bench.audit()
    assert document["lost"] == document["repeated"] == 1
    assert "planned" in document["shards"][0]["note"]


@pytest.mark.parametrize(
    "change", [{"handed": (1,)}, {"acked": (9,) * 12}, {"handed": (3,) * 12}, {"acked_skipped": 1}, {"epoch": -1}]
)
def test_books_that_cannot_be_are_refused(bench, change):
    opened = bench.open()
    rank = Rank(bench, opened, 0)
    with pytest.raises(ProtocolError, match="books of rank 0"):
        bench.report(opened, 0, msgspec.structs.replace(rank.progress(), **change))
    assert not bench.state.jobs.by_name["train"].ranks


def test_a_late_report_changes_nothing(bench):
    opened = bench.open()
    rank = Rank(bench, opened, 0)
    rank.hand()
    early = rank.progress()
    rank.hand()
    rank.ack()
    bench.report(opened, 0, rank.progress())
    before = bench.audit()
    bench.report(opened, 0, early)
    assert bench.audit() == before


# -- folding


def test_old_epochs_are_folded_and_audit_the_same(bench):
    opened = [bench.open(r, world_size=2, epochs=None) for r in range(2)]
    before = {}
    for epoch in range(5):
        run_epoch(bench, epoch=epoch, opened=opened)
        before[epoch] = counts(bench.audit(epoch=epoch))
    job = bench.state.jobs.by_name["train"]
    assert sorted(job.ranks) == [3, 4] and sorted(job.folded) == [(1, 0), (1, 1), (1, 2)]
    for epoch in range(5):
        assert counts(bench.audit(epoch=epoch)) == before[epoch] == {"handed_out": 24, "acknowledged": 24}
    bench.reload()
    assert bench.audit(epoch=1)["acknowledged"] == 24
    assert job.slowest()[0] == bench.state.jobs.by_name["train"].slowest()[0] == 5


def test_a_folded_epoch_keeps_what_was_abandoned_skipped_and_lost(bench):
    opened = bench.open(epochs=None, on_error="skip")
    rank = Rank(bench, opened, 0)
    rank.hand(2, skip=2)
    rank.ack()
    rank.send("abandoned")
    for epoch in (1, 2):
        run_epoch(bench, epoch=epoch, opened=[opened])
    assert (1, 0) in bench.state.jobs.by_name["train"].folded
    assert counts(bench.audit(epoch=0)) == {"handed_out": 2, "acknowledged": 2, "skipped": 2, "abandoned": 20}


def test_the_store_does_not_grow_with_steps_or_epochs(bench, monkeypatch):
    monkeypatch.setattr("dispatcher.progress.KEPT_EPOCHS", 10)
    opened = bench.open(epochs=None)
    sizes = []
    for epoch in range(40):
        rank = Rank(bench, opened, 0, epoch)
        for _ in range(12):
            rank.hand()
            rank.ack()
            rank.send()
        rank.send("finished")
        sizes.append((len(bench.stored), sum(map(len, bench.stored.values()))))
    assert sizes[-1][0] == sizes[20][0]
    assert sizes[-1][1] < sizes[20][1] * 1.1
    assert job_module.KEPT_EPOCHS == 1000


def test_many_rows_are_summed_in_pieces():
    bench = Bench([100_000] * 6)
    opened = bench.open(seed=1)
    rank = Rank(bench, opened, 0)
    ids = np.arange(600_000, dtype=np.int64)

    whole = m.IdSum(count=600_000, value=id_sum(ids))
    full = tuple(rank.sizes.tolist())
    bench.report(
        opened,
        0,
        rank.progress("finished", handed=full, acked=full, source=whole, handed_out=whole, acknowledged=whole),
    )
    assert counts(bench.audit()) == {"handed_out": 600_000, "acknowledged": 600_000}


# -- quarantine


def quarantine(bench, shard):
    """The shard is in quarantine for the current generation."""
    job = bench.state.jobs.by_name["train"]
    found = m.QuarantinedShard(
        source=0,
        shard=shard,
        uri=f"/data/photos-{shard}.tar",
        code="shard-missing",
        reason="not there",
        workers=("w1",),
    )
    record = records.QuarantineRecord(job="train", generation=job.record.generation, shard=found)
    job.quarantine[record.generation, 0, shard] = record
    bench.stored[record.key] = records.encode(record)


def ids_of_shard(bench, shard):
    first = int(bench.manifest.first_ids[shard])
    return range(first, first + int(bench.manifest.shard_rows[shard]))


def without_shard(bench, rank, ids, acked=True):
    """A rank's report, with these ids passed over because of quarantine."""
    good = [i for i in rank.ids if i not in ids]
    gone = Ranges.members(np.array([i for i in rank.ids if i in ids], np.int64)).encode()
    return rank.progress(
        "finished" if acked else "open",
        source=sum_of(good),
        handed_out=sum_of(good),
        acknowledged=sum_of(good if acked else []),
        quarantined=gone,
        acked_quarantined=gone if acked else b"",
    )


@pytest.mark.parametrize("world", [1, 3])
def test_quarantined_rows_are_counted_and_their_shards_listed(bench, world):
    opened = [bench.open(r, world_size=world) for r in range(world)]
    quarantine(bench, 1)
    for r, found in enumerate(opened):
        rank = Rank(bench, found, r)
        rank.finish()
        bench.report(found, r, without_shard(bench, rank, ids_of_shard(bench, 1)))
    document = bench.audit()
    assert counts(document) == {"handed_out": 19, "acknowledged": 19}
    assert document["quarantined"] == 5 and document["state"] == "complete"
    assert document["shards"] == [
        {"source": 0, "shard": 1, "uri": "/data/photos-1.tar", "code": "shard-missing", "reason": "not there"}
    ]


def test_quarantined_rows_not_acknowledged_are_still_open(bench):
    opened = bench.open()
    quarantine(bench, 4)
    rank = Rank(bench, opened, 0)
    rank.hand(20)
    bench.report(opened, 0, without_shard(bench, rank, ids_of_shard(bench, 4), acked=False))
    document = bench.audit()
    passed = sum(i in ids_of_shard(bench, 4) for i in rank.ids)
    assert passed and counts(document) == {"handed_out": 20 - passed, "open": 24} and document["quarantined"] == 0


def test_a_start_point_splits_quarantined_rows_too(bench):
    opened = bench.open()
    quarantine(bench, 4)
    rank = Rank(bench, opened, 0)
    rank.hand(8)
    start = start_at([rank], 1)
    before = list(rank.ids)
    rank.hand(8)
    bench.report(opened, 0, without_shard(bench, rank, ids_of_shard(bench, 4), acked=False))
    again = bench.open(0, "v", start=start, dead=("u0",))
    rank = Rank(bench, again, 0)
    rank.finish()
    bench.report(again, 0, rank.progress("finished"), uid="v")
    document = bench.audit()
    passed = sum(i in ids_of_shard(bench, 4) for i in before)
    assert passed and document["quarantined"] == passed and document["acknowledged"] == ROWS - passed
    assert document["lost"] == document["repeated"] == 0 and document["state"] == "complete"


LISTED_1 = {"source": 0, "shard": 1, "uri": "/data/photos-1.tar", "code": "shard-missing", "reason": "not there"}


def test_a_shard_that_stopped_the_job_is_listed_though_no_row_was_passed_over(bench):
    """Under on_error="raise" the loop ends at its first row."""
    opened = bench.open()
    rank = Rank(bench, opened, 0)
    rank.hand(4)
    rank.ack()
    rank.send()
    quarantine(bench, 1)
    assert bench.audit()["state"] == "running" and bench.audit()["shards"] == [LISTED_1]
    bench.report(opened, 0, leaving=True)
    document = bench.audit()
    assert document["state"] == "stopped" and document["shards"] == [LISTED_1] and document["quarantined"] == 0
    bench.reload()
    assert bench.audit()["shards"] == [LISTED_1]
    # the next generation reads it again
    again = bench.open(start=m.StartPoint(kind="latest"), uid="v")
    assert bench.audit()["shards"] == []
    rank = Rank(bench, again, 0)
    rank.finish()
    bench.report(again, 0, rank.progress("finished"), uid="v")
    document = bench.audit()
    assert document["state"] == "complete" and document["shards"] == [] and document["quarantined"] == 0


def test_a_shard_that_failed_after_its_rows_were_delivered_takes_nothing_from_a_complete_epoch(bench):
    opened = bench.open(epochs=2)
    run_epoch(bench, opened=[opened])
    quarantine(bench, 1)
    assert bench.audit(epoch=0)["shards"] == [] and bench.audit(epoch=0)["quarantined"] == 0
    rank = Rank(bench, opened, 0, epoch=1)
    rank.hand(2)
    rank.send()
    assert bench.audit(epoch=1)["shards"] == [LISTED_1]
    assert bench.audit(epoch=0)["state"] == "complete" and audit.verdict(bench.audit(epoch=0)) == 0
    assert audit.verdict(bench.audit(epoch=1)) == 3


def test_dynamic_a_shard_that_stopped_the_job_is_listed(bench):
    ranks = dynamic(bench)
    hand(ranks[0], 1)
    ranks[0].send()
    quarantine(bench, 1)
    assert bench.audit()["shards"] == [LISTED_1] and bench.audit()["quarantined"] == 0


def test_rows_acknowledged_as_quarantined_must_have_been_passed_over(bench):
    opened = bench.open()
    rank = Rank(bench, opened, 0)
    rank.hand()
    with pytest.raises(ProtocolError, match="quarantine"):
        bench.report(opened, 0, rank.progress(acked_quarantined=Ranges.of([(0, 2)]).encode()))


# -- dynamic order


def dynamic(bench, world=2, **settings):
    bench.worker()
    settings = {"order": "dynamic", "shuffle": m.Shuffle(buffer=8, within_shard=True), "lanes": 24, **settings}
    for r in range(world):
        found = bench.open(r, world_size=world, **settings)
    return [DynamicRank(bench, found, r) for r in range(world)]


def hand(rank, steps):
    for _ in range(steps):
        while not rank.hand():
            rank.ask(9)


def test_dynamic_rows_in_the_middle_of_an_epoch(bench):
    ranks = dynamic(bench)
    for rank in ranks:
        hand(rank, 2)
        rank.ack()
        hand(rank, 1)
        rank.send()
    assert counts(bench.audit()) == {"handed_out": 12, "acknowledged": 8, "open": 16}
    assert bench.audit()["state"] == "running"


def test_dynamic_skipped_rows_are_counted(bench):
    ranks = dynamic(bench, on_error="skip")
    hand(ranks[0], 1)
    ranks[0].skip()
    for rank in ranks:
        rank.finish()
    assert counts(bench.audit()) == {"handed_out": 23, "acknowledged": 23, "skipped": 1}


def test_dynamic_quarantined_rows_are_counted(bench):
    ranks = dynamic(bench)
    quarantine(bench, 4)
    gone = ids_of_shard(bench, 4)
    for rank in ranks:
        while not rank.done:
            if not rank.hand():
                rank.ask(9)
        rank.ack()
        ids = rank.ids(rank.rows)
        good = [i for i in ids if i not in gone]
        passed = Ranges.members(np.array([i for i in ids if i in gone], np.int64)).encode()
        sums = dict.fromkeys(("source", "handed_out", "acknowledged"), sum_of(good))
        progress = msgspec.structs.replace(
            rank.progress("finished"), quarantined=passed, acked_quarantined=passed, **sums
        )
        bench.report(rank.opened, rank.rank, progress)
    document = bench.audit()
    assert counts(document) == {"handed_out": 13, "acknowledged": 13} and document["quarantined"] == 11
    assert [shard["shard"] for shard in document["shards"]] == [4] and document["state"] == "complete"


def test_dynamic_ids_that_are_not_the_plan_s_are_lost_and_repeated(bench):
    ranks = dynamic(bench, world=1)
    rank = ranks[0]
    while not rank.done:
        if not rank.hand():
            rank.ask(9)
    rank.ack()
    ids = rank.ids(rank.rows)
    wrong = sum_of([ids[0], *ids[:-1]])
    bench.report(rank.opened, 0, msgspec.structs.replace(rank.progress("finished"), handed_out=wrong))
    assert (bench.audit()["lost"], bench.audit()["repeated"]) == (1, 1)


def test_dynamic_rows_that_no_rank_handed_out_are_lost(bench):
    ranks = dynamic(bench)
    hand(ranks[0], 2)
    ranks[0].ack()
    ranks[0].send("finished")
    ranks[1].finish()
    document = bench.audit()
    assert (document["acknowledged"], document["lost"]) == (16, 8)
    assert document["shards"][0]["note"] == "8 rows were never handed out"


def test_dynamic_a_start_point_acknowledges_what_lies_before_it_and_voids_the_rest(bench):
    ranks = dynamic(bench)
    for rank in ranks:
        hand(rank, 2)
    start = start_of(ranks)
    for rank in ranks:
        hand(rank, 1)
        rank.send()
    bench.wait(11)
    for r in range(3):
        found = bench.open(
            r,
            f"v{r}",
            world_size=3,
            start=start,
            order="dynamic",
            lanes=24,
            shuffle=m.Shuffle(buffer=8, within_shard=True),
        )
    assert counts(bench.audit()) == {"handed_out": 12, "acknowledged": 8, "rewound": 4, "open": 16}
    for r in range(3):
        DynamicRank(bench, found, r, uid=f"v{r}").finish()
    assert counts(bench.audit()) == {"handed_out": 28, "acknowledged": 24, "rewound": 4}
    assert bench.audit()["state"] == "complete"


def test_dynamic_a_later_epoch_s_start_point_vouches_for_this_one(bench):
    ranks = dynamic(bench, epochs=3)
    for rank in ranks:
        hand(rank, 3)
        rank.send()  # the rest was handed out, but the processes were killed before they told
    start = m.StartPoint(kind="checkpoint", epoch=1, generation=1, job="train", world_size=2)
    bench.wait(11)
    bench.open(0, "v", start=start, order="dynamic", lanes=24, shuffle=m.Shuffle(buffer=8, within_shard=True), epochs=3)
    document = bench.audit(epoch=0)
    assert counts(document) == {"handed_out": 24, "acknowledged": 24} and document["state"] == "complete"


def test_dynamic_folded_epochs_keep_their_audit(bench):
    ranks = dynamic(bench, epochs=5)
    for epoch in range(4):
        for rank in ranks:
            DynamicRank(bench, rank.opened, rank.rank, epoch).finish()
    assert (1, 0) in bench.state.jobs.by_name["train"].folded and not any("/epochs/0/" in key for key in bench.stored)
    for epoch in range(4):
        assert counts(bench.audit(epoch=epoch)) == {"handed_out": 24, "acknowledged": 24}
