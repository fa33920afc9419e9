"""Quarantine: which failures put a shard in it, for whom and for how long."""

import pytest
from core_bench import LEASE, Bench
from hypothesis import given
from hypothesis import strategies as st

from dispatcher import events, status
from dispatcher.quarantine import ABOUT_SHARD
from manifests.errors import CODES
from manifests.wire import messages as m


def make(workers=3, shards=5, **settings):
    bench = Bench([1] * shards)
    for number in range(1, workers + 1):
        bench.worker(f"w{number}")
    return bench, bench.open(**settings)


def failure(worker, shard=0, code="shard-missing", message="/data/photos-0.tar is missing: gone"):
    return m.ReadFailure(worker=worker, source=0, shard=shard, code=code, message=message)


def first(reply, shard=0):
    return next(grant.workers[0].id for grant in reply.grants if grant.shard == shard)


def names(reply, shard=0):
    return [ref.id for grant in reply.grants if grant.shard == shard for ref in grant.workers]


def test_after_one_failure_the_shard_is_granted_elsewhere():
    bench, opened = make()
    home = first(bench.ask(opened))
    again = bench.ask(opened, failures=(failure(home),))
    assert home not in names(again) and len(names(again)) == 2 and not again.quarantined
    assert first(bench.ask(opened)) == first(again)  # and it stays there


def test_two_workers_put_a_shard_in_quarantine_and_it_is_granted_to_nobody():
    bench, opened = make(world_size=2)
    opened = bench.open(1, world_size=2)
    home = first(bench.ask(opened, 0, range(3)))
    bench.ask(opened, 1, [0])
    other = first(bench.ask(opened, 0, range(3), failures=(failure(home),)))
    reply = bench.ask(opened, 0, range(3), failures=(failure(other, code="shard-changed", message="x" * 1000),))
    assert [grant.shard for grant in reply.grants] == [1, 2] and reply.waiting == ""
    (found,) = reply.quarantined
    assert (found.source, found.shard, found.uri) == (0, 0, "/data/photos-0.tar")
    assert found.workers == tuple(sorted([home, other])) and found.code in ("shard-missing", "shard-changed")
    assert found.reason == "x" * 300
    assert bench.ask(opened, 1, [0]).quarantined == (found,)
    assert (0, 0, 0) not in bench.state.jobs.by_name["train"].assignments[0]
    assert any("shard 0 (/data/photos-0.tar) is in quarantine" in text for text in bench.logs)
    # more failures on it change nothing
    before = dict(bench.stored)
    bench.ask(opened, 1, [0], failures=(failure("w3"),))
    assert bench.stored == before


def test_it_is_visible_in_the_status():
    bench, opened = make()
    bench.ask(opened, failures=(failure("w1", 3), failure("w2", 3)))
    bench.ask(opened, failures=(failure("w1", 1), failure("w2", 1)))
    document = bench.apply(events.Asked, look=status.collect)
    assert [found["shard"] for found in document["jobs"][0]["quarantined"]] == [1, 3]
    assert document["jobs"][0]["quarantined"][0] == {
        "source": 0, "shard": 1, "uri": "/data/photos-1.tar", "code": "shard-missing",
        "reason": "/data/photos-0.tar is missing: gone", "workers": ["w1", "w2"],
    }  # fmt: skip


def test_it_survives_a_take_over_and_counts_do_not():
    bench, opened = make()
    bench.ask(opened, failures=(failure("w1", 0), failure("w2", 0), failure("w1", 1)))
    bench.reload()
    for name in ("w1", "w2", "w3"):
        bench.worker(name)
    assert [found.shard for found in bench.ask(opened, shards=range(3)).quarantined] == [0]
    assert not bench.ask(opened, shards=[1], failures=(failure("w2", 1),)).quarantined


def test_a_new_generation_starts_without():
    bench, opened = make()
    bench.ask(opened, failures=(failure("w1", 0), failure("w2", 0), failure("w1", 1)))
    bench.report(opened, 0, leaving=True)
    opened = bench.open(uid="again")
    reply = bench.ask(opened, shards=range(2), uid="again", failures=(failure("w2", 1),))
    assert not reply.quarantined and len(reply.grants) == 2
    assert bench.apply(events.Asked, look=status.collect)["jobs"][0]["quarantined"] == []


def test_the_only_worker_must_say_so_twice_a_second_apart():
    bench, opened = make(workers=1)
    for _ in range(3):
        reply = bench.ask(opened, failures=(failure("w1"), failure("w1")))
        assert first(reply) == "w1" and not reply.quarantined  # and it is asked again
    bench.at += 0.9
    assert not bench.ask(opened, failures=(failure("w1"),)).quarantined
    bench.at += 0.1
    assert bench.ask(opened, failures=(failure("w1"),)).quarantined[0].workers == ("w1",)


def test_one_of_several_workers_may_say_so_as_often_as_it_likes():
    bench, opened = make(workers=2)
    for _ in range(5):
        bench.at += 2
        assert first(bench.ask(opened, failures=(failure("w1"),))) == "w2"


def test_workers_that_could_not_read_it_are_no_others():
    """One that is lost, drains, cannot be reached or reads other formats: the one that is left is the only one."""
    bench, opened = make(workers=1)
    bench.worker("w2", capabilities=("format:arrow",))
    bench.worker("w3")
    bench.worker("w4")
    bench.apply(events.DrainRequested, message=m.DrainWorker(id="w3"))
    unreachable = failure("w4", code="unreachable")
    bench.ask(opened, failures=(failure("w1"), unreachable))
    bench.at += 1
    assert bench.ask(opened, failures=(failure("w1"),)).quarantined


def test_the_job_of_another_fingerprint_has_its_own_only_worker():
    bench = Bench([1] * 3)
    bench.worker("w1", "pillow-1")
    bench.worker("w2", "pillow-2")
    opened = bench.open(decodes=True)
    only = first(bench.ask(opened))
    bench.ask(opened, failures=(failure(only),))
    bench.at += 1
    assert bench.ask(opened, failures=(failure(only),)).quarantined


def test_which_codes_are_about_a_shard():
    assert set(CODES) > ABOUT_SHARD
    assert not ABOUT_SHARD & {"no-worker", "access-denied", "protocol-error", "wait-timeout", "bad-sample"}


FAULTS = sorted(set(CODES) - ABOUT_SHARD) + ["unreachable", "silent", "refused", "internal", "no-memory", ""]


@given(st.data())
def test_a_chaos_of_faults_puts_no_shard_in_quarantine(data):
    """Whatever kills, hangs and refusals clients tell of, by any workers and ranks: only answers about the shard count."""
    bench, _ = make(shards=3, world_size=2)
    opened = bench.open(1, world_size=2)
    for _ in range(data.draw(st.integers(1, 20))):
        what = data.draw(st.sampled_from(["fail", "fail", "fail", "time", "beat", "restart"]))
        worker = data.draw(st.sampled_from(["w1", "w2", "w3"]))
        if what == "fail":
            found = tuple(
                failure(data.draw(st.sampled_from(["w1", "w2", "w3"])), data.draw(st.integers(-1, 3)), code)
                for code in data.draw(st.lists(st.sampled_from(FAULTS), max_size=4))
            )
            reply = bench.ask(opened, data.draw(st.integers(0, 1)), range(3), failures=found)
            assert not reply.quarantined
        elif what == "time":
            bench.wait(data.draw(st.sampled_from([1.0, LEASE / 2, LEASE + 1])))
            for rank in range(2):  # the ranks go on
                bench.report(opened, rank)
        elif what == "beat":
            bench.beat(worker)
        else:
            bench.worker(worker)
    assert not bench.state.jobs.by_name["train"].quarantine


@pytest.mark.parametrize(
    "source, shard, worker", [(0, 9, "w1"), (1, 0, "w1"), (-1, 0, "w1"), (0, -1, "w1"), (0, 0, "w9")]
)
def test_failures_on_what_is_not_there_count_for_nothing(source, shard, worker):
    bench, opened = make()
    before = dict(bench.stored)
    for code in sorted(ABOUT_SHARD):
        told = m.ReadFailure(worker=worker, source=source, shard=shard, code=code)
        also = m.ReadFailure(worker="w2", source=source, shard=shard, code=code)
        assert not bench.ask(opened, shards=(), failures=(told, also if worker != "w9" else told)).quarantined
    assert bench.stored == before and not bench.state.jobs.by_name["train"].quarantine
