"""Grants: placement, what a rank waits for, fingerprints, expiry, open shards."""

import random
from collections import Counter

import pytest
from core_bench import LEASE, Bench, Rank

from dispatcher import events, status
from dispatcher import grants as grants_module
from dispatcher.grants import EXPIRY_MS, MAX_OPEN
from dispatcher.placement import size_of
from manifests.errors import ConfigError, NoWorker, ProtocolError
from manifests.wire import codec
from manifests.wire import messages as m


@pytest.fixture
def bench():
    bench = Bench()
    bench.worker("w1")
    bench.worker("w2")
    bench.worker("w3")
    return bench


def workers_of(grants):
    return [grant.workers[0].id for grant in grants.grants]


def test_a_grant_has_all_a_worker_needs(bench):
    opened = bench.open(seed=9)
    found = bench.ask(opened, shards=[2, 0])
    assert [grant.shard for grant in found.grants] == [2, 0] and found.waiting == ""
    grant = codec.open_signed(found.grants[0].signed, {"k1": b"s" * 32})
    shard = bench.manifest.shards[2]
    assert (grant.job, grant.generation, grant.rank, grant.epoch, grant.seed) == ("train", 1, 0, 0, 9)
    assert (grant.manifest, grant.shard, grant.uri, grant.format) == (bench.digest, 2, shard.uri, "tar")
    assert (grant.rows, grant.first_row, grant.last_row, grant.first_id) == (4, 0, 4, 8)
    assert (grant.content_id, grant.tenant) == (shard.content_id, "default")
    assert grant.workers == tuple(ref.id for ref in found.grants[0].workers) and len(grant.workers) == 3
    assert found.now_ms == bench.now_ms and grant.expires_ms == bench.now_ms + EXPIRY_MS
    assert found.grants[0].workers[0].address.startswith("127.0.0.1:900")


def test_asking_again_keeps_the_worker_and_renews(bench):
    opened = bench.open()
    first = bench.ask(opened, shards=range(5))
    stored = dict(bench.stored)
    bench.at += 5
    again = bench.ask(opened, shards=range(5))
    assert workers_of(again) == workers_of(first)
    assert again.grants[0].expires_ms == first.grants[0].expires_ms + 5000
    assert bench.stored == stored  # a renewal is not written


def test_ranks_share_the_worker_of_a_shard(bench):
    opened = [bench.open(r, world_size=2) for r in range(2)]
    assert workers_of(bench.ask(opened[0], 0, range(5))) == workers_of(bench.ask(opened[1], 1, range(5)))


def test_an_avoided_worker_is_passed_over_and_used_only_as_a_last_resort(bench):
    opened = bench.open()
    first = workers_of(bench.ask(opened))[0]
    other = workers_of(bench.ask(opened, avoid=(first,)))[0]
    assert other != first
    assert workers_of(bench.ask(opened)) == [other]  # and it stays there
    everyone = ("w1", "w2", "w3")
    assert bench.ask(opened, avoid=everyone).grants
    bench.at += 3  # nobody was heard in the last 2 s
    refused = bench.ask(opened, avoid=everyone)
    assert not refused.grants and refused.waiting == "shard 0: no worker answers this client (tried: w1, w2, w3)"


def test_case_24_an_unreachable_worker_is_named_with_its_address_and_the_others_go_on(bench):
    opened = bench.open()
    first = workers_of(bench.ask(opened))[0]
    failure = m.ReadFailure(worker=first, source=0, shard=0, code="unreachable", message="connection refused")
    again = bench.ask(opened, failures=(failure,))
    assert workers_of(again)[0] != first
    line = next(text for text in bench.logs if "cannot be reached" in text)
    assert first in line and f"127.0.0.1:900{first[1]}" in line and "--advertise" in line
    for _ in range(3):
        bench.ask(opened, failures=(failure,))
    assert sum("cannot be reached" in text for text in bench.logs) == 1
    bench.beat(first)
    assert not bench.state.workers.get(first).suspect
    assert bench.state.workers.get(first).failures == {"unreachable": 4}


def test_no_grant_before_all_ranks_joined(bench):
    opened = bench.open(0, world_size=4)
    waits = bench.ask(opened)
    assert (waits.waiting, waits.waiting_code) == ("ranks 1, 2, 3, which have not joined", "rank-absent")
    for rank in (1, 3):
        bench.open(rank, world_size=4)
    assert bench.ask(opened).waiting == "rank 2, which has not joined"
    bench.open(2, world_size=4)
    assert bench.ask(opened).waiting == ""


def test_a_rank_waits_when_it_is_more_than_two_epochs_ahead(bench):
    opened = [bench.open(r, world_size=2, epochs=None) for r in range(2)]
    for epoch in range(3):
        bench.report(opened[0], 0, Rank(bench, opened[0], 0, epoch).finish())
    assert bench.ask(opened[0], 0, epoch=2).waiting == ""
    waits = bench.ask(opened[0], 0, epoch=3)
    assert (waits.waiting, waits.waiting_code) == ("rank 1, which is still in epoch 0", "wait-timeout")
    bench.at += 12
    silent = bench.ask(opened[0], 0, epoch=3)
    assert silent.waiting == "rank 1, which is still in epoch 0 and was not heard for 12 s"
    assert silent.waiting_code == "rank-absent"
    reply = bench.report(opened[1], 1, Rank(bench, opened[1], 1, 0).finish())
    assert (reply.slowest_epoch, reply.slowest_rank) == (1, 1)
    assert bench.ask(opened[0], 0, epoch=3).waiting == ""


def test_a_closed_rank_holds_nobody_up(bench):
    opened = [bench.open(r, world_size=2, epochs=None) for r in range(2)]
    bench.report(opened[1], 1, leaving=True)
    for epoch in range(5):
        bench.report(opened[0], 0, Rank(bench, opened[0], 0, epoch).finish())
    assert bench.ask(opened[0], 0, epoch=5).waiting == ""


def test_no_worker_is_named_with_how_long():
    bench = Bench()
    opened = bench.open()
    bench.wait(4)
    waits = bench.ask(opened)
    assert (waits.waiting, waits.waiting_code) == ("shard 0: no worker has registered for 4 s", "no-worker")
    bench.worker()
    assert bench.ask(opened).grants
    bench.wait(LEASE + 1)
    opened = bench.open(uid="late")
    bench.at += 2
    assert bench.ask(opened, uid="late").waiting == "shard 0: no worker is up for 2 s (1 lost or draining)"


def test_a_format_no_worker_reads(bench):
    for name in ("w1", "w2", "w3"):
        bench.worker(name, capabilities=("format:arrow",))
    assert bench.ask(bench.open()).waiting == "shard 0: no worker that is up reads 'tar' shards"
    bench.beat("w2", capabilities=("format:arrow", "format:tar"))
    assert workers_of(bench.ask(bench.open(uid="b", dead=("u0",)), uid="b")) == ["w2"]


def test_lost_and_draining_workers_get_nothing_new(bench):
    opened = bench.open()
    bench.apply(events.DrainRequested, message=m.DrainWorker(id="w1"))
    assert bench.beat("w1").drain
    bench.at += 6
    bench.beat("w2")
    bench.wait(5)  # w3 was not heard for 11 s
    assert set(workers_of(bench.ask(opened, shards=range(5)))) == {"w2"}
    with pytest.raises(ConfigError, match=r"unknown worker 'w9'.*w1, w2, w3"):
        bench.apply(events.DrainRequested, message=m.DrainWorker(id="w9"))


def test_no_shard_of_that_number(bench):
    opened = bench.open()
    with pytest.raises(ConfigError, match="no shard 5 of source 0"):
        bench.ask(opened, shards=[5])


# -- fingerprints


def test_a_job_that_decodes_keeps_to_one_fingerprint():
    bench = Bench()
    bench.worker("w1", "pillow-1")
    bench.worker("w2", "pillow-2")
    bench.worker("w3", "pillow-2")
    opened = bench.open(decodes=True)
    assert set(workers_of(bench.ask(opened, shards=range(5)))) <= {"w2", "w3"}
    bench.reload()
    bench.worker("w1", "pillow-1")
    waiting = bench.ask(opened).waiting
    assert waiting == "shard 0: no worker with decode fingerprint 'pillow-2' is up; there are 1 of 'pillow-1'"
    bench.worker("w3", "pillow-2")
    assert workers_of(bench.ask(opened)) == ["w3"]


def test_a_resume_prefers_the_fingerprint_it_had_and_takes_another_if_that_is_gone():
    bench = Bench()
    bench.worker("w1", "pillow-1")
    bench.worker("w2", "pillow-2")
    bench.worker("w3", "pillow-2")
    opened = bench.open(decodes=True)
    bench.ask(opened)
    rank = Rank(bench, opened, 0)
    rank.hand()
    rank.ack()
    rank.send(leaving=True)
    bench.worker("w1", "pillow-1")
    latest = m.StartPoint(kind="latest")
    again = bench.open(uid="b", decodes=True, start=latest)
    assert workers_of(bench.ask(again, uid="b"))[0] in ("w2", "w3")
    bench.report(again, uid="b", leaving=True)
    bench.apply(events.WorkerLeft, message=m.LeaveWorker(id="w2", incarnation="w2-1"))
    bench.apply(events.WorkerLeft, message=m.LeaveWorker(id="w3", incarnation="w3-1"))
    third = bench.open(uid="c", decodes=True, start=latest)
    assert workers_of(bench.ask(third, uid="c")) == ["w1"]


def test_a_job_without_a_pipeline_takes_any_worker():
    bench = Bench([1] * 60)
    bench.worker("w1", "a")
    bench.worker("w2", "b")
    assert set(workers_of(bench.ask(bench.open(), shards=range(60)))) == {"w1", "w2"}


# -- open shards


def test_open_shards_are_bounded_and_the_oldest_go_first():
    bench = Bench([1] * 700)
    bench.worker()
    opened = bench.open()
    bench.ask(opened, shards=range(400))
    bench.ask(opened, shards=range(300, 700))
    mine = bench.state.jobs.by_name["train"].assignments[0]
    assert len(mine) == MAX_OPEN and (0, 0, 399) in mine and (0, 0, 100) not in mine
    with pytest.raises(ProtocolError, match="600 shards asked for at once: the limit is 512"):
        bench.ask(opened, shards=range(600))


def test_done_shards_and_finished_epochs_are_closed(bench):
    opened = bench.open()
    bench.ask(opened, shards=range(5))
    bench.ask(opened, shards=[3], done=(m.ShardAsk(source=0, shard=0), m.ShardAsk(source=0, shard=9)))
    assert len(bench.state.jobs.by_name["train"].assignments[0]) == 4
    bench.report(opened, 0, Rank(bench, opened, 0).finish())
    assert not bench.state.jobs.by_name["train"].assignments[0] and not bench.state.grants.loads


def test_assignments_survive_a_take_over():
    bench = Bench()
    bench.worker("w1")
    bench.worker("w2")
    opened = bench.open()
    first = workers_of(bench.ask(opened, shards=range(5)))
    loads = dict(bench.state.grants.loads)
    bench.reload()
    assert dict(bench.state.grants.loads) == loads
    assert bench.ask(opened).waiting == "shard 0: no worker has registered for 0 s"
    assert not bench.beat("w1").known
    bench.worker("w2")
    bench.worker("w1")
    assert workers_of(bench.ask(opened, shards=range(5))) == first


# -- stock clients


def test_stock_grants(bench):
    found = bench.apply(events.StockGrantsRequested, manifest=bench.digest, spec="sha256:x", first=1, count=3)
    assert [info.ordinal for _, info in found] == [1, 2, 3]
    grant = codec.open_signed(found[0][0].signed, bench.state.grants.secrets())
    assert (grant.job, grant.spec, grant.manifest, grant.shard, grant.last_row) == ("", "sha256:x", bench.digest, 1, 5)


def test_stock_grants_without_a_worker():
    bench = Bench()
    with pytest.raises(NoWorker, match="no worker has registered"):
        bench.apply(events.StockGrantsRequested, manifest=bench.digest, spec="", first=0, count=1)


# -- loads and speeds


def test_loads_are_bytes_so_that_large_shards_spread():
    """Two shards of 6.4 GB among many small ones: not on one worker, and the small ones go where the large are not."""
    bench = Bench([64_000_000 if number in (3, 11) else 1 for number in range(20)])
    for name in ("w1", "w2", "w3"):
        bench.worker(name)
    found = workers_of(bench.ask(bench.open(), shards=[3, 11, *(n for n in range(20) if n not in (3, 11))]))
    assert found[0] != found[1]
    assert len(set(found)) == 3 and found[2:].count(({"w1", "w2", "w3"} - set(found[:2])).pop()) == 18


def speeds(**found):
    return tuple(m.WorkerSpeed(worker=name, bytes=size, ms=1000) for name, size in found.items())


def test_a_slow_worker_gets_less_and_recovers():
    bench = Bench([1] * 400)
    for name in ("w1", "w2", "w3"):
        bench.worker(name)
    opened = bench.open()
    told = speeds(w1=100_000_000, w2=20_000_000, w3=100_000_000)
    found = workers_of(bench.ask(opened, shards=range(300), speeds=told))
    assert 20 <= found.count("w2") <= 35
    read = {w["id"]: w["read_bytes_per_s"] for w in status_of(bench)["workers"]}
    assert read == {"w1": 100_000_000, "w2": 20_000_000, "w3": 100_000_000}
    assert {w["id"]: w["open_shards"] for w in status_of(bench)["workers"]} == {n: found.count(n) for n in sorted(read)}
    # nothing was heard of its speed for a minute: it counts as the others
    bench.at += 61
    for name in ("w1", "w2", "w3"):
        bench.beat(name)
    all_done = tuple(m.ShardAsk(source=0, shard=number) for number in range(300))
    found = workers_of(bench.ask(opened, shards=range(100, 400), done=all_done))
    assert found.count("w2") > 70


def test_speeds_are_averaged_over_time_and_jobs():
    bench = Bench()
    bench.worker("w1")
    opened = [bench.open(job="a"), bench.open(job="b")]
    bench.ask(opened[0], speeds=speeds(w1=1_000_000))
    bench.ask(opened[1], speeds=speeds(w1=3_000_000))
    rate = bench.state.workers.get("w1").speed(bench.at)
    assert 1000 < rate < 3000
    for _ in range(60):
        bench.ask(opened[1], speeds=speeds(w1=3_000_000))
    assert bench.state.workers.get("w1").speed(bench.at) == pytest.approx(3000, rel=0.01)
    for _ in range(60):  # it stalls
        bench.ask(opened[1], speeds=speeds(w1=0))
    assert bench.state.workers.get("w1").speed(bench.at) < 30


def test_speeds_that_say_nothing_or_too_much():
    bench = Bench()
    bench.worker("w1")
    opened = bench.open()
    nothing = (m.WorkerSpeed(worker="w1", bytes=5, ms=0), m.WorkerSpeed(worker="w9", bytes=5, ms=1))
    bench.ask(opened, speeds=nothing)
    assert bench.state.workers.get("w1").speed(bench.at) is None
    bench.ask(opened, speeds=(m.WorkerSpeed(worker="w1", bytes=1 << 62, ms=1 << 62),))
    bench.ask(opened, speeds=(m.WorkerSpeed(worker="w1", bytes=1 << 62, ms=1),))
    assert 0 < bench.state.workers.get("w1").speed(bench.at) <= 1e8


def test_a_rank_with_a_shard_elsewhere_keeps_it_and_others_follow_while_there_is_room():
    bench = Bench([1] * 40)
    bench.worker("w1")
    opened = [bench.open(r, world_size=2) for r in range(2)]
    bench.ask(opened[0], 0, range(40))  # all on the only worker
    bench.worker("w2")
    assert set(workers_of(bench.ask(opened[0], 0, range(40)))) == {"w1"}
    found = workers_of(bench.ask(opened[1], 1, range(40)))
    assert found.count("w2") >= 8 and found.count("w1") >= 20


def test_a_manifest_that_is_gone_costs_assignments_but_no_take_over():
    bench = Bench()
    bench.worker("w1")
    opened = bench.open()
    bench.ask(opened, shards=range(5))
    gone = bench.shelf.manifests.pop(bench.digest)
    bench.reload()
    assert not bench.state.grants.loads
    bench.shelf.manifests[bench.digest] = gone
    bench.worker("w1")
    assert len(bench.ask(opened, shards=range(5)).grants) == 5


def test_what_a_rank_waits_for_names_the_shard():
    bench = Bench([1] * 20)
    opened = bench.open()
    bench.wait(4)
    assert bench.ask(opened, shards=[12, 3]).waiting == "shard 12: no worker has registered for 4 s"
    bench.worker("w1", capabilities=("format:arrow",))
    assert bench.ask(opened, shards=[3]).waiting == "shard 3: no worker that is up reads 'tar' shards"


def status_of(bench):
    return bench.apply(events.Asked, look=status.collect)


def test_open_bytes_are_those_of_the_open_shards_whatever_happens():
    bench = Bench([(number * 7919) % 60_000 + 1 for number in range(40)])
    for name in ("w1", "w2", "w3"):
        bench.worker(name)
    opened = [bench.open(r, world_size=2) for r in range(2)]
    draw = random.Random(5)
    for turn in range(120):
        rank = draw.randrange(2)
        fail = (failure(draw.choice(["w1", "w2", "w3"]), draw.randrange(40)),) if turn % 9 == 0 else ()
        bench.ask(
            opened[rank],
            rank,
            draw.sample(range(40), draw.randrange(12)),
            avoid=tuple(draw.sample(["w1", "w2", "w3"], draw.randrange(2))),
            done=tuple(m.ShardAsk(source=0, shard=number) for number in draw.sample(range(40), 6)),
            failures=fail,
        )
        if turn % 40 == 39:
            bench.reload()
            for name in ("w1", "w2", "w3"):
                bench.worker(name)
        expected = Counter()
        for mine in bench.state.jobs.by_name["train"].assignments.values():
            for (_, _, shard), worker in mine.items():
                expected[worker] += size_of(bench.manifest.shards[shard].bytes)
        assert bench.state.grants.open.bytes == expected and sum(expected.values())
    for rank in range(2):
        bench.report(opened[rank], rank, leaving=True)
    assert (
        not bench.state.grants.open.bytes and not bench.state.grants.open._open and not bench.state.grants.open._homes
    )


def failure(worker, shard):
    return m.ReadFailure(worker=worker, source=0, shard=shard, code="shard-missing", message="gone")


# -- what is kept ready for placement


def _chosen(seed: int) -> list[object]:
    """The workers that ranks of two jobs get while workers come, go, slow down and fail."""
    draw, bench, out = random.Random(seed), Bench([4] * 40), []
    bench.worker("w1")
    jobs = [bench.open(job=name, decodes=name == "b") for name in ("a", "b")]
    for _ in range(150):
        name, what = f"w{draw.randint(1, 6)}", draw.random()
        if what < 0.12:
            formats = ("format:tar",) if draw.random() < 0.8 else ("format:parquet",)
            bench.worker(name, fingerprint=draw.choice(["p1", "p2"]), capabilities=formats)
        elif what < 0.24:
            bench.beat(name, draining=draw.random() < 0.3)
        elif what < 0.28:
            bench.apply(events.WorkerLeft, message=m.LeaveWorker(id=name, incarnation=f"{name}-1"))
        elif what < 0.33:
            bench.wait(draw.choice([1, 6, 61]))
        else:
            failures = (
                [m.ReadFailure(source=0, shard=0, worker=name, code="unreachable")] if draw.random() < 0.1 else []
            )
            speeds = (
                [m.WorkerSpeed(worker=name, bytes=10**6 << draw.randint(0, 6), ms=200_000)]
                if draw.random() < 0.3
                else []
            )
            avoid = (f"w{draw.randint(1, 6)}",) if draw.random() < 0.2 else ()
            shards = [draw.randrange(40) for _ in range(3)]
            found = draw.choice(jobs)
            reply = bench.ask(found, 0, shards, failures=tuple(failures), speeds=tuple(speeds), avoid=avoid)
            out.append([[worker.id for worker in grant.workers] for grant in reply.grants] or reply.waiting)
    return out


def test_what_is_kept_ready_for_placement_follows_every_change_of_the_workers(monkeypatch):
    kept = [_chosen(seed) for seed in range(12)]
    assert sum(isinstance(one, list) for found in kept for one in found) > 300
    monkeypatch.setattr(grants_module, "KEPT_FLEETS", -1)
    assert [_chosen(seed) for seed in range(12)] == kept
