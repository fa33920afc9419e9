"""Dynamic order on a real cluster: ranks take rows from a pool as they go; every row once, whatever fails, and a resume
that goes on where it was."""

import os
import re
import signal
import threading
import time
from unittest.mock import ANY

import pytest
from cluster import TestCluster
from training import (
    UNEVEN,
    Rank,
    RankProcess,
    check_audit,
    drain,
    end_fresh,
    flat,
    fresh,
    in_threads,
    make_dataset,
    make_loader,
    run_ranks,
    start_fresh,
)

from manifests.errors import ConfigError, ProtocolError, RankAbsent, ShardMissing, StateIncomplete, StateMismatch
from trainer_client import run as run_module

ROWS = sum(UNEVEN)
SHUFFLES = {
    "none": None,
    "window": {"buffer": 64},
    "interleave": {"buffer": 64, "interleave": 3},
    "within": {"buffer": 24, "within_shard": True},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with TestCluster(workers=2) as found:
        folder = tmp_path_factory.mktemp("numbers")
        found.register(make_dataset(folder / "uneven", UNEVEN))
        found.register(make_dataset(folder / "many", UNEVEN * 5, "many"))
        yield found


def run(cluster, world, **settings):
    return run_ranks(cluster.address, world, order="dynamic", **settings)


# -- every row once ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("tail", ["pad", "drop", "ragged"])
def test_every_row_once(cluster, tail, shuffle):
    for world in (1, 2, 3):
        job = f"once-{tail}-{shuffle}-{world}"
        ranks = run(cluster, world, job=job, tail=tail, shuffle=SHUFFLES[shuffle])
        ids = flat([rank.real for rank in ranks])
        steps = [len(rank.ids) for rank in ranks]
        dropped = ROWS - len(ids)
        if tail == "ragged":
            assert [rank.length for rank in ranks] == [None] * world
            assert all(len(batch) == 4 for rank in ranks for batch in rank.ids[:-1])
        else:
            assert steps == [rank.length for rank in ranks] == [steps[0]] * world
        if tail == "drop":
            assert len(set(ids)) == len(ids) and dropped == ROWS % (4 * world)
        else:
            assert sorted(ids) == list(range(ROWS))
        check_audit(cluster, job, 0, acknowledged=len(ids), dropped=dropped)


def test_epochs_follow_each_other_in_orders_of_their_own(cluster):
    ranks = run(cluster, 2, job="epochs", tail="ragged", epochs=3, shuffle={"buffer": 64})
    ids = flat([rank.real for rank in ranks])
    assert sorted(ids) == sorted([*range(ROWS)] * 3)
    for epoch in range(3):
        check_audit(cluster, "epochs", epoch, acknowledged=ROWS)


def test_the_faster_consumer_gets_more(cluster):
    """Two loops of unequal speed: both end at about the same time, all rows once."""
    ends = {}

    def act(rank):
        settings = {"job": "speeds", "dataset": "many", "order": "dynamic", "tail": "ragged", "shuffle": None}
        with make_loader(cluster.address, rank=rank, world_size=2, **settings) as loader:
            found = drain(loader, delay=(0.002, 0.02)[rank])
            ends[rank] = time.monotonic()
            return found

    fast, slow = in_threads(2, act)
    assert sorted(fast.real + slow.real) == list(range(5 * ROWS))
    assert len(fast.real) > 2 * len(slow.real), (len(fast.real), len(slow.real))
    assert abs(ends[0] - ends[1]) < 0.75, ends
    check_audit(cluster, "speeds", 0, acknowledged=5 * ROWS)


def test_without_quotas_nobody_knows_the_steps(cluster):
    for settings in ({"tail": "ragged"}, {"elastic": True}):
        with make_loader(cluster.address, job="unknown", order="dynamic", **settings) as loader:
            with pytest.raises(TypeError, match="takes rows until there are none"):
                len(loader)
            with pytest.raises(TypeError, match="takes rows until there are none"):
                _ = loader.steps_left
    with make_loader(cluster.address, job="known", order="dynamic") as loader:
        assert len(loader) == loader.steps_left == 50


def test_the_audit_of_each_epoch(cluster, caplog):
    caplog.set_level("INFO", logger="feedline.client")
    run(cluster, 2, job="audited", epochs=2, audit=True)
    lines = {r.getMessage() for r in caplog.records if "of job audited" in r.getMessage()}
    assert any(re.search(r"epoch 0 .* 200 of 200 rows acknowledged, none lost", line) for line in lines), lines
    assert any(re.search(r"epoch 1 .* 200 of 200 rows acknowledged, none lost", line) for line in lines), lines


@pytest.mark.parametrize("order", ["deterministic", "dynamic"])
def test_the_audit_of_an_epoch_with_a_row_twice_and_another_lost(cluster, monkeypatch, order):
    """One id of one batch is another's: at the end of the pass the loop gets an error with shard and counts."""
    calls = []

    def assemble(*arguments):
        batch = run_module.assemble_before(*arguments)
        calls.append(batch)
        if len(calls) == 3:
            batch["__id__"][0] = batch["__id__"][1]
        return batch

    monkeypatch.setattr(run_module, "assemble_before", run_module.assemble, raising=False)
    monkeypatch.setattr(run_module, "assemble", assemble)
    settings = {"job": f"wrong-{order}", "audit": True, "shuffle": None, "order": order}
    with (
        make_loader(cluster.address, **settings) as loader,
        pytest.raises(ProtocolError, match=r"1 rows lost, 1 twice.*shard \d+: 1 lost, 1 twice") as caught,
    ):
        for _ in loader:
            pass
    assert len(calls) == 50 and (caught.value.detail["lost"], caught.value.detail["repeated"]) == (1, 1)


# -- what fails ----------------------------------------------------------------------------------------------------


def test_a_worker_and_the_dispatcher_are_killed(tmp_path):
    """While two ranks read: the worker's reads go elsewhere, and the dispatcher that comes back knows every lane."""
    with TestCluster(workers=2) as cluster:
        cluster.register(make_dataset(tmp_path, UNEVEN * 2))
        seen = [0, 0]
        started = threading.Event()

        def act(rank):
            settings = {"job": "faults", "order": "dynamic", "tail": "ragged", "prefetch": "4KiB"}
            with make_loader(cluster.address, rank=rank, world_size=2, **settings) as loader:
                found = Rank()
                for batch in loader:
                    found.add(batch)
                    seen[rank] += 1
                    if min(seen) >= 5:
                        started.set()
                    time.sleep(0.04)
                return found

        results: list[Rank] = []
        reading = threading.Thread(target=lambda: results.extend(in_threads(2, act)), name="ranks")
        reading.start()
        assert started.wait(20)
        cluster.kill("worker-0")
        cluster.stop_dispatcher()
        time.sleep(0.3)
        cluster.start_dispatcher()  # on this thread: processes end with the thread that started them
        reading.join(60)
        ids = flat([rank.real for rank in results])
        assert sorted(ids) == list(range(2 * ROWS))
        check_audit(cluster, "faults", 0, acknowledged=2 * ROWS)


@pytest.mark.parametrize("order", ["deterministic", "dynamic"])
def test_a_shard_that_is_gone(tmp_path, order):
    """Under "raise" the error of the shard; under "skip" the next row takes the place of each of its rows, they are listed
    as quarantined, and do not count as bad samples."""
    with TestCluster(workers=2) as cluster:
        cluster.register(make_dataset(tmp_path, (20, 12, 20)))
        (tmp_path / "shard-001.tar").unlink()
        settings = {"order": order, "shuffle": None, "lanes": 2, "batch_size": 5}
        with pytest.raises(ShardMissing, match=r"shard-001\.tar"):
            run_ranks(cluster.address, 1, job="raise", **settings)
        ranks = run_ranks(cluster.address, 2, job="skip", on_error="skip", max_bad=0, **settings)
        assert sorted(flat([rank.real for rank in ranks])) == [*range(20), *range(32, 52)]
        assert len({len(rank.ids) for rank in ranks}) == 1
        found = check_audit(cluster, "skip", 0, acknowledged=40, quarantined=12, skipped=0, shards=ANY)
        assert [(one["shard"], one["code"]) for one in found["shards"]] == [(1, "shard-missing")]


# -- resuming ------------------------------------------------------------------------------------------------------


def test_case_1_a_chain_of_resumes_in_fresh_processes(cluster):
    """case 1 in dynamic order: killed three times and resumed from the last state each time, the batches of one rank are
    those of a whole run."""
    settings = {"job": "chain", "order": "dynamic", "shuffle": {"buffer": 64}}
    whole = run_ranks(cluster.address, 1, **{**settings, "job": "chain-whole"})[0].ids
    seen, state = [], None
    for stop in (7, 19, 38, None):
        steps = None if stop is None else stop - len(seen)
        [leg] = fresh(cluster.address, state=state, steps=steps, die=stop is not None, **settings)
        seen += leg.ids
        state = leg.state
    assert seen == whole
    check_audit(cluster, "chain", 0, acknowledged=ROWS, rewound=0)


@pytest.mark.parametrize("tail", ["pad", "drop", "ragged"])
def test_a_state_loaded_at_once_goes_on_with_the_same_batches(cluster, tail):
    """In the same loader, and by as many ranks: nothing lost, nothing twice; with one rank the very same batches."""
    settings = {"tail": tail, "shuffle": {"buffer": 64}, "order": "dynamic", "batch_size": 3}
    [whole] = run_ranks(cluster.address, 1, job=f"at-once-whole-{tail}", **settings)
    with make_loader(cluster.address, job=f"at-once-{tail}", **settings) as loader:
        got = drain(loader, 20).ids
        for steps in (11, None):
            loader.load_state_dict(loader.state_dict())
            got += drain(loader, steps).ids
    assert got == whole.ids
    settings["shuffle"] = {"buffer": 64, "interleave": 2}
    first = run_ranks(cluster.address, 2, job=f"twice-{tail}", steps=9, **settings)
    second = run_ranks(cluster.address, 2, job=f"twice-{tail}", state=[rank.state for rank in first], **settings)
    ids = flat([rank.real for rank in (*first, *second)])
    assert len(ids) == len(set(ids))
    if tail != "ragged":
        assert [len(rank.ids) for rank in second] == [first[0].length - 9] * 2
    if tail != "drop":
        assert sorted(ids) == list(range(ROWS))
    check_audit(cluster, f"twice-{tail}", 0, acknowledged=len(ids), dropped=ROWS - len(ids), rewound=0)


def test_states_gathered_by_a_process_group(cluster, tmp_path):
    """Two processes gather the states of step 7; three ranks go on from the list, whichever process kept it."""
    group = {"store": str(tmp_path / "store"), "gloo_world": 2, "stop": 7, "order": "dynamic", "job": "gathered"}
    processes = [start_fresh(cluster.address, gloo_rank=rank, **group) for rank in range(2)]
    first = [end_fresh(process, 60)[0] for process in processes]
    assert [len(rank.ids) for rank in first] == [7, 7] and first[0].state == first[1].state
    second = run(cluster, 3, job="gathered", state=first[1].state)
    assert sorted(flat([rank.real for rank in (*first, *second)])) == list(range(ROWS))
    check_audit(cluster, "gathered", 0, acknowledged=ROWS, rewound=0)


def test_an_epoch_s_end_is_the_next_one_s_beginning(cluster):
    for tail in ("pad", "ragged"):
        settings = {"tail": tail, "order": "dynamic"}
        first = run_ranks(cluster.address, 2, job=f"end-{tail}", **settings)
        second = run_ranks(cluster.address, 2, job=f"end-{tail}", state=[r.state for r in first], **settings)
        assert sorted(flat([rank.real for rank in second])) == list(range(ROWS))
        check_audit(cluster, f"end-{tail}", 1, acknowledged=ROWS)


@pytest.mark.parametrize("tail", ["pad", "ragged"])
def test_latest_goes_on_where_the_acknowledgements_are(cluster, tail):
    """Two ranks acknowledge by hand after 4 of 6 steps; three go on with what was not acknowledged."""
    settings = {"job": f"latest-{tail}", "order": "dynamic", "tail": tail, "ack": "manual"}

    def act(rank):
        with make_loader(cluster.address, rank=rank, world_size=2, **settings) as loader:
            ids = []
            for step, batch in enumerate(loader, 1):
                ids.append(batch["__id__"].tolist())
                if step == 4:
                    loader.ack()
                if step == 6:
                    break
            return ids

    first = in_threads(2, act)
    sure = flat([flat(ids[:4]) for ids in first])

    def rest(rank):
        with make_loader(cluster.address, rank=rank, world_size=3, resume="latest", **settings) as loader:
            found = drain(loader)
            loader.ack()
            return found

    again = flat([rank.real for rank in in_threads(3, rest)])
    assert sorted(sure + again) == list(range(ROWS))
    check_audit(cluster, f"latest-{tail}", 0, acknowledged=ROWS, rewound=16)


@pytest.mark.parametrize("ack", ["next", "manual"])
@pytest.mark.parametrize(("tail", "world"), [("pad", 2), ("pad", 3), ("ragged", 3)])
def test_latest_after_one_rank_closed_before_the_other(cluster, ack, tail, world):
    """Rank 0 closes with rows it did not acknowledge, then rank 1 goes on: those rows come again."""
    settings = {
        "job": f"closed-{ack}-{tail}-{world}", "order": "dynamic", "tail": tail, "ack": ack, "shuffle": {"buffer": 64},
    }  # fmt: skip
    loaders = [make_loader(cluster.address, rank=rank, world_size=2, **settings) for rank in range(2)]
    passes = in_threads(2, lambda rank: iter(loaders[rank]))
    sure = []
    for rank, steps in ((0, 6), (1, 8)):
        for step in range(steps):
            ids = next(passes[rank])["__id__"].tolist()
            if ack == "manual" and (rank or step < 3):
                loaders[rank].ack()
                sure += ids
            elif ack == "next" and step < steps - 1:
                sure += ids
        loaders[rank].close()

    def rest(rank):
        with make_loader(cluster.address, rank=rank, world_size=world, resume="latest", **settings) as loader:
            found = drain(loader)
            if ack == "manual":
                loader.ack()
            return found

    again = flat([rank.real for rank in in_threads(world, rest)])
    assert sorted(sure + again) == list(range(ROWS))
    check_audit(cluster, settings["job"], 0, acknowledged=ROWS)


def test_states_are_small_and_made_at_once(cluster):
    settings = {"job": "small", "dataset": "many", "order": "dynamic", "shuffle": {"buffer": 64}, "world_size": 1}
    times = []
    with make_loader(cluster.address, rank=0, **settings) as loader:
        for _ in loader:
            started = time.perf_counter()
            state = loader.state_dict()
            times.append(time.perf_counter() - started)
    assert sorted(times)[len(times) // 2] < 0.002
    assert int(state["epoch"]) == 1


def test_steps_left_within_a_resumed_pass(cluster):
    settings = {"order": "dynamic", "epochs": 2}
    ranks = run_ranks(cluster.address, 2, job="left", steps=10, **settings)
    states = [rank.state for rank in ranks]
    for state in (states, states[0]):
        with make_loader(cluster.address, job="left", rank=0, world_size=2, **settings) as loader:
            loader.load_state_dict(state)
            assert (len(loader), loader.steps_left) == (50, 40)


# -- marks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"order": "dynamic"}, {"order": "deterministic", "on_error": "skip"}])
def test_one_state_is_enough_where_the_others_left_marks(tmp_path, settings):
    """Also after the dispatcher was killed and started again; not where a rank did not save at that step."""
    with TestCluster(workers=1) as cluster:
        cluster.register(make_dataset(tmp_path, UNEVEN))
        states = [[None] * 8 for _ in range(3)]
        ids: list[int] = []

        def act(rank):
            with make_loader(cluster.address, job="marks", rank=rank, world_size=3, **settings) as loader:
                for step, batch in enumerate(loader, 1):
                    if step <= 4:
                        ids.extend(batch["__id__"].tolist())
                    if step in (4, 7) or (step == 6 and rank != 1):
                        states[rank][step] = loader.state_dict()
                    if step == 7:
                        break

        in_threads(3, act)
        cluster.restart_dispatcher()
        with pytest.raises(StateIncomplete, match=r"\b1\b"):
            run_ranks(cluster.address, 3, job="marks", state=states[0][6], **settings)
        with pytest.raises(StateIncomplete, match="0"):
            alone = {**states[2][4], "job": "no-such-job"}
            run_ranks(cluster.address, 3, job="marks-elsewhere", state=alone, **settings)
        # each rank from a state of its own, and fewer ranks from one of them
        rest = in_threads(3, lambda rank: resume_rank(cluster, rank, 3, states[rank][4], steps=3, **settings))
        assert sorted({*ids, *flat([one.real for one in rest])}) == sorted([*ids, *flat([one.real for one in rest])])
        last = run_ranks(cluster.address, 2, job="marks", state=rest[1].state, **settings)
        every = [*ids, *flat([one.real for one in (*rest, *last)])]
        assert sorted(every) == list(range(ROWS))
        check_audit(cluster, "marks", 0, acknowledged=ROWS)


def resume_rank(cluster, rank, world, state, steps, **settings):
    with make_loader(cluster.address, job="marks", rank=rank, world_size=world, **settings) as loader:
        loader.load_state_dict(state)
        return drain(loader, steps)


def test_states_of_different_steps_name_ranks_and_steps(cluster):
    states = []
    for steps in (5, 6):
        states += [
            rank.state for rank in run_ranks(cluster.address, 2, job=f"steps-{steps}", steps=steps, order="dynamic")
        ]
    mixed = [states[0], {**states[3], "job": states[0]["job"]}]
    with make_loader(cluster.address, job="mixed", order="dynamic") as loader:
        with pytest.raises(StateMismatch, match="rank 0 at step 5, rank 1 at step 6"):
            loader.load_state_dict(mixed)
        with pytest.raises(ConfigError, match="elastic=True needs order='dynamic'"):
            make_loader(cluster.address, elastic=True)


# -- a rank is gone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "signal_number"), [("deterministic", signal.SIGKILL), ("dynamic", signal.SIGSTOP)])
def test_case_13_a_consumer_stops(cluster, tmp_path, order, signal_number):
    """case 13: one of two ranks is killed or stopped at step 3: the other gets an error that names it within its lease
    and timeout, and what it got until then is on record."""
    job = f"silent-{order}-{signal_number.name}"
    settings = {"job": job, "order": order, "world_size": 2, "timeout": 2.5, "epochs": None}
    with RankProcess(cluster.address, tmp_path / "diary", rank=1, hold=3, **settings) as other:
        with make_loader(cluster.address, rank=0, **settings) as loader:
            rank = Rank()
            with pytest.raises(RankAbsent, match=rf"rank 1 .* process {other.process.pid} on ") as caught:
                for batch in loader:
                    rank.add(batch)
                    if len(rank.ids) == 1:
                        other.wait_for(3)
                        os.kill(other.process.pid, signal_number)
                        began = time.monotonic()
                    time.sleep(0.02)
            assert 2.0 < time.monotonic() - began < 8.0
            assert caught.value.detail["pid"] == other.process.pid
            done = len(rank.ids)
        [found] = [r for j in cluster.status()["jobs"] if j["name"] == job for r in j["ranks"] if r["rank"] == 0]
        assert found["epoch"] * 25 + found["step"] == done, found
        os.kill(other.process.pid, signal.SIGCONT) if signal_number == signal.SIGSTOP else None


def test_case_13_a_rank_that_never_connects(cluster):
    """case 13: the others are told within join_timeout."""
    started = time.monotonic()
    with (
        pytest.raises(RankAbsent, match=r"rank 1 of job alone did not join within 1 s"),
        make_loader(cluster.address, job="alone", rank=0, world_size=2, order="dynamic", join_timeout=1.0) as loader,
    ):
        next(iter(loader))
    assert time.monotonic() - started < 5
