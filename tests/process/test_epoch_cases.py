"""Hard cases of epochs, ranks and settings on a real cluster: 8 to 12, 14, 16 and 18; who holds a rank, and fences."""

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from cluster import TestCluster
from training import (
    UNEVEN,
    check_audit,
    drain,
    end_fresh,
    flat,
    in_threads,
    make_dataset,
    make_loader,
    merged,
    run_ranks,
    start_fresh,
)

from manifests.errors import (
    ConfigError,
    FeedlineWarning,
    JobBusy,
    JobMismatch,
    RankAbsent,
    UnknownDataset,
    WaitTimeout,
)
from manifests.manifest import Manifest

ROWS = sum(UNEVEN)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with TestCluster(workers=3) as found:
        folder = tmp_path_factory.mktemp("numbers")
        for name, rows in {
            "numbers": UNEVEN,
            "one-shard": (12,),
            "four-shards": (1, 7, 40, 97),
            "eight": (3, 5),
            "fifty": (20, 13, 17),
            "forty": (11, 29),
        }.items():
            found.register(make_dataset(folder / name, rows, name))
        yield found


# -- split over ranks ----------------------------------------------------------------------------------------------


def test_case_8_one_shard_two_real_processes_with_a_collective_in_every_step(cluster, tmp_path):
    """case 8: fewer shards than readers. Both ranks take the same number of steps, so no all-reduce waits for ever."""
    processes = [
        start_fresh(
            cluster.address,
            store=str(tmp_path / "store"),
            gloo_rank=rank,
            gloo_world=2,
            dataset="one-shard",
            job="gloo",
            batch_size=2,
        )
        for rank in range(2)
    ]
    ranks = [end_fresh(process, 45)[0] for process in processes]
    assert [len(rank.ids) for rank in ranks] == [rank.length for rank in ranks] == [3, 3]
    assert sorted(flat([rank.real for rank in ranks])) == list(range(12))
    check_audit(cluster, "gloo", 0, acknowledged=12)


@pytest.mark.parametrize(("world", "batch", "tail"), [(3, 16, "pad"), (3, 16, "drop"), (2, 5, "pad"), (2, 4, "drop")])
def test_case_9_uneven_shards_give_even_steps(cluster, world, batch, tail):
    """case 9: shards of 1, 7, 40 and 97 rows; every rank takes len(loader) steps."""
    job = f"even-{world}-{batch}-{tail}"
    ranks = run_ranks(cluster.address, world, dataset="four-shards", job=job, batch_size=batch, tail=tail)
    steps = math.ceil(math.ceil(145 / world) / batch) if tail == "pad" else 145 // (world * batch)
    assert [len(rank.ids) for rank in ranks] == [rank.length for rank in ranks] == [steps] * world
    ids = flat([rank.real for rank in ranks])
    assert len(ids) == len(set(ids)) == (145 if tail == "pad" else steps * world * batch)
    check_audit(cluster, job, 0, dropped=145 - len(ids))


def test_case_10_drop_is_per_job_not_per_worker(tmp_path):
    """case 10: 46 rows in batches of 8 are 5 full batches with 5, 3 and 1 workers; 30 in batches of 16 are one."""
    with TestCluster(workers=5) as found:
        found.register(make_dataset(tmp_path / "a", (9, 1, 20, 0, 16), "forty-six"))
        found.register(make_dataset(tmp_path / "b", (3,) * 10, "thirty"))
        [rank] = run_ranks(found.address, dataset="thirty", job="thirty", batch_size=16, tail="drop")
        assert [len(ids) for ids in rank.ids] == [16]
        check_audit(found, "thirty", 0, dropped=14)
        seen = []
        for left in (5, 3, 1):
            while len([w for w in found.workers if w.child.poll() is None]) > left:
                found.terminate(next(w.child.name for w in found.workers if w.child.poll() is None))
            job = f"forty-six-{left}"
            [rank] = run_ranks(found.address, dataset="forty-six", job=job, batch_size=8, tail="drop")
            assert [len(ids) for ids in rank.ids] == [8] * 5 and rank.length == 5
            check_audit(found, job, 0, dropped=6, acknowledged=40)
            seen.append(rank.ids)
        assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("spread", ["one-each", "all-in-one"])
def test_case_11_datasets_smaller_than_one_global_batch(cluster, tmp_path, spread):
    """case 11: 1 to 5 rows for 2 ranks of 4: equal steps, every row once. With drop no rank has a step, and is told."""
    for rows in range(1, 6):
        name = f"tiny-{spread}-{rows}"
        cluster.register(make_dataset(tmp_path / name, (1,) * rows if spread == "one-each" else (rows,), name))
        ranks = run_ranks(cluster.address, 2, dataset=name, job=name, epochs=2)
        assert [len(rank.ids) for rank in ranks] == [rank.length for rank in ranks] == [2, 2]
        half = -(-rows // 2)
        for epoch in (0, 1):
            assert [len(rank.ids[epoch]) for rank in ranks] == [half, half]
            real = [i for rank in ranks for i, pad in zip(rank.ids[epoch], rank.pads[epoch], strict=True) if not pad]
            assert sorted(real) == list(range(rows))
            check_audit(cluster, name, epoch, acknowledged=rows, padded=2 * half - rows)
        with pytest.warns(
            FeedlineWarning, match=rf"has no step: {rows} rows are fewer than one batch of 4 on each of 2"
        ):
            ranks = run_ranks(cluster.address, 2, dataset=name, job=f"{name}-drop", tail="drop")
        assert [rank.ids for rank in ranks] == [[], []] and ranks[0].length == 0
        check_audit(cluster, f"{name}-drop", 0, dropped=rows)


def test_case_11_without_end_a_pass_without_steps_is_an_error(cluster, tmp_path):
    """case 11: epochs=None over an epoch that has no step would spin for ever."""
    cluster.register(make_dataset(tmp_path, (3,), "three"))
    loader = make_loader(cluster.address, dataset="three", job="three", tail="drop", epochs=None)
    with loader, pytest.raises(ConfigError, match="no step"):
        iter(loader)


def test_case_11_a_dataset_without_rows_is_refused_at_start(cluster, tmp_path):
    """case 11: no rows at all: refused when the manifest is built, and by the loader should there be such a manifest."""
    with pytest.raises(ConfigError, match="no samples"):
        make_dataset(tmp_path, (0,), "empty")
    whole = make_dataset(tmp_path, (1,), "empty")
    shard = replace(whole.shards[0], rows=0)
    empty = Manifest.from_shards("empty", "1", whole.fields, [shard])
    empty.save(tmp_path / "empty.parquet")
    loader = make_loader(cluster.address, dataset=str(tmp_path / "empty.parquet"), job="empty")
    with loader, pytest.raises(ConfigError, match="no rows"):
        iter(loader)


# -- iterating -----------------------------------------------------------------------------------------------------


def test_case_12_a_loop_left_early_and_begun_again(cluster):
    """case 12: leave after 0, 1, 3 and 9 of 10 batches, again and again; each time the next epoch begins, and nothing
    of the old one shows up in it."""
    settings = {"dataset": "forty", "batch_size": 4}
    with make_loader(cluster.address, job="whole-epochs", epochs=6, **settings) as loader:
        ids = drain(loader).ids
    epochs = [ids[at : at + 10] for at in range(0, 60, 10)]
    for stop in (0, 1, 3, 9):
        with make_loader(cluster.address, job=f"left-{stop}", **settings) as loader:
            for epoch in range(5):
                iterator = iter(loader)
                got = [next(iterator)["__id__"].tolist() for _ in range(stop)]
                assert got == epochs[epoch][:stop]
            assert drain(loader).ids == epochs[5]
        for epoch in range(5):
            check_audit(cluster, f"left-{stop}", epoch, acknowledged=4 * stop, abandoned=40 - 4 * stop)


def test_case_12_only_one_of_two_ranks_leaves_early(cluster):
    """case 12: the other rank is not held up, and both begin again."""
    started = time.monotonic()

    def act(rank: int) -> list[list[list[int]]]:
        with make_loader(
            cluster.address, rank=rank, world_size=2, dataset="forty", job="one-leaves", batch_size=2
        ) as loader:
            return [drain(loader, 1 if rank == 0 and epoch < 4 else None).ids for epoch in range(5)]

    zero, one = in_threads(2, act)
    assert [len(ids) for ids in zero] == [1, 1, 1, 1, 10] and [len(ids) for ids in one] == [10] * 5
    assert sorted(flat(zero[4]) + flat(one[4])) == list(range(40))
    assert time.monotonic() - started < 30
    check_audit(cluster, "one-leaves", 0, acknowledged=22, abandoned=18)
    check_audit(cluster, "one-leaves", 4, acknowledged=40)


def test_an_old_iterator_is_over_once_a_new_one_began(cluster):
    with make_loader(cluster.address, job="old-iterator") as loader:
        old = iter(loader)
        next(old)
        new = iter(loader)
        with pytest.raises(ConfigError, match="this iteration is over"):
            next(old)
        next(new)


def test_case_14_as_many_epochs_as_were_asked_for(cluster):
    """case 14: 25 epochs without end pass; epochs=3 are three."""
    with make_loader(cluster.address, dataset="eight", job="endless", epochs=None) as loader:
        found = drain(loader, 50)
        assert found.state["epoch"] == 25
    for epoch in range(25):
        assert sorted(flat(found.ids[2 * epoch : 2 * epoch + 2])) == list(range(8))
    [rank] = run_ranks(cluster.address, dataset="eight", job="three-epochs", epochs=3)
    assert len(rank.ids) == 6 and rank.length == 6


def test_case_14_the_interpreter_ends_while_an_endless_pass_is_open(cluster):
    """case 14: ten batches without end, then the program is over; nothing keeps it, and its rank was given back."""
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from training import make_loader
loader = make_loader({cluster.address!r}, dataset="eight", job="open", epochs=None)
for step, batch in enumerate(loader, 1):
    if step == 10:
        break
print(time.time(), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=40)
    ended = time.time()
    assert done.returncode == 0 and done.stderr == ""
    assert ended - float(done.stdout) < 5
    [job] = [job for job in cluster.status()["jobs"] if job["name"] == "open"]
    assert [rank["state"] for rank in job["ranks"]] == ["done"]


def test_case_16_every_epoch_has_the_order_a_fresh_process_gives_it(cluster):
    """case 16: three epochs of one long-lived loader and its workers differ, and equal fresh starts there."""
    with make_loader(cluster.address, dataset="fifty", job="long", epochs=3, batch_size=10) as loader:
        ids = drain(loader).ids
    epochs = [ids[:5], ids[5:10], ids[10:]]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    processes = {
        epoch: start_fresh(cluster.address, dataset="fifty", job=f"fresh-{epoch}", batch_size=10, set_epoch=epoch)
        for epoch in (1, 2)  # epoch 0 is a fresh start already
    }
    for epoch, process in processes.items():
        [rank] = end_fresh(process)
        assert rank.ids == epochs[epoch]


# -- who takes part ------------------------------------------------------------------------------------------------


def join_rank_0(cluster, job: str, **settings) -> tuple[threading.Thread, list]:
    """Rank 0 of 2 waits for rank 1; returns its thread and what became of it."""
    outcome: list = []

    def loop() -> None:
        try:
            outcome.append(run_one(cluster, 0, job=job, **settings))
        except Exception as error:  # looked at by the test
            outcome.append(error)

    thread = threading.Thread(target=loop, name="rank-0")
    thread.start()
    cluster.wait_for("rank 0 joined", lambda: any(found["name"] == job for found in cluster.status()["jobs"]))
    return thread, outcome


def run_one(cluster, rank: int, *, state=None, **settings):
    with make_loader(cluster.address, rank=rank, world_size=2, **settings) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return drain(loader)


@pytest.mark.parametrize(
    ("name", "change", "difference"),
    [
        ("seed", {"seed": 2}, "seed: job has 1, this rank asks 2"),
        ("batch", {"batch_size": 5}, "batch_size: job has 4, this rank asks 5"),
        ("data", {"dataset": "fifty"}, "sources: job has"),
        ("tail", {"tail": "drop"}, "tail: job has 'pad', this rank asks 'drop'"),
        ("shuffle", {"shuffle": None}, "shuffle: job has Shuffle.*this rank asks None"),
        ("ack", {"ack": "manual"}, "ack: job has 'next', this rank asks 'manual'"),
    ],
)
def test_case_18_a_rank_with_other_settings_is_refused_with_the_difference(cluster, name, change, difference):
    """case 18: the plan is the job's; a rank that asks for another is told what differs, and rank 0 that it is absent."""
    job = f"disagree-{name}"
    thread, outcome = join_rank_0(cluster, job, join_timeout=0.8)
    with pytest.raises(JobMismatch, match=difference) as caught:
        run_one(cluster, 1, **{"job": job, **change})
    assert len(caught.value.detail["differences"]) == 1
    thread.join(10)
    assert isinstance(outcome[0], RankAbsent) and outcome[0].detail == {"absent": [1]}


def test_case_18_a_rank_without_a_seed_takes_the_job_s(cluster):
    """case 18: no seed given is no disagreement."""
    thread, outcome = join_rank_0(cluster, "unset", join_timeout=20.0)
    one = run_one(cluster, 1, job="unset", seed=None)
    thread.join(20)
    assert one.state["identity"]["seed"] == outcome[0].state["identity"]["seed"] == 1
    assert sorted(one.real + outcome[0].real) == list(range(ROWS))


def test_a_rank_with_another_start_point_is_refused(cluster):
    ranks = run_ranks(cluster.address, 2, job="start-source", steps=3)
    thread, outcome = join_rank_0(cluster, "start", state=ranks[0].state, join_timeout=1.5)
    with pytest.raises(JobMismatch, match="kind: job has checkpoint, this rank asks fresh"):
        run_one(cluster, 1, job="start")
    thread.join(10)
    assert isinstance(outcome[0], RankAbsent)


def test_a_device_setting_may_differ_between_ranks(cluster):
    thread, outcome = join_rank_0(cluster, "memory", prefetch="1MiB")
    one = run_one(cluster, 1, job="memory", prefetch="32KiB", timeout=15.0)
    thread.join(20)
    assert sorted(one.real + outcome[0].real) == list(range(ROWS))


def test_ranks_that_do_not_come_are_named(cluster):
    started = time.monotonic()
    loader = make_loader(cluster.address, rank=1, world_size=3, job="absent", join_timeout=1.0)
    with loader, pytest.raises(RankAbsent, match="rank 0, 2 of job absent did not join within 1 s") as caught:
        iter(loader)
    assert 0.9 < time.monotonic() - started < 4
    assert caught.value.detail == {"absent": [0, 2]}


def test_a_rank_that_is_held_by_a_living_process_is_refused_at_once(cluster):
    """JobBusy names host and pid, without waiting for a lease; the holder is not disturbed."""
    with make_loader(cluster.address, job="busy") as holder:
        iterator = iter(holder)
        got = [next(iterator)]
        started = time.monotonic()
        with pytest.raises(JobBusy, match=rf"held by process {os.getpid()} on {socket.gethostname()}") as caught:
            run_ranks(cluster.address, job="busy")
        assert time.monotonic() - started < 2
        assert caught.value.detail["pid"] == os.getpid()
        got += iterator
    assert sorted(i for batch in got for i in batch["__id__"].tolist()) == list(range(ROWS))
    # closed: the next one need not wait at all
    started = time.monotonic()
    with pytest.warns(FeedlineWarning, match="starting afresh"):
        run_ranks(cluster.address, job="busy", steps=1)
    assert time.monotonic() - started < 1.5


def test_a_holder_that_was_silent_past_its_lease_is_fenced(cluster):
    """Stopped for longer than its lease, another one takes over; when it goes on, its next batch is an error."""
    process = start_fresh(cluster.address, job="fenced", batch_size=1, delay=0.03, catch=True)
    try:

        def steps() -> int:
            return max(
                [r["step"] for j in cluster.status()["jobs"] if j["name"] == "fenced" for r in j["ranks"]], default=0
            )

        cluster.wait_for("it has begun", lambda: steps() >= 3)
        process.send_signal(signal.SIGSTOP)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FeedlineWarning)
            started = time.monotonic()
            [rank] = run_ranks(cluster.address, job="fenced", batch_size=50, steps=1)
            assert time.monotonic() - started < 6
        assert len(rank.ids) == 1
    finally:
        process.send_signal(signal.SIGCONT)
    [old] = end_fresh(process)
    assert old.error is not None and old.error[0] == "fenced"
    assert "generation 1" in old.error[1] and "generation 2" in old.error[1]


def test_a_rank_two_epochs_ahead_waits_and_names_the_slowest(cluster):
    settings = {"dataset": "forty", "job": "ahead", "batch_size": 10, "epochs": 6}
    begun = threading.Event()
    waited: list[str] = []

    def act(rank: int) -> int:
        with make_loader(cluster.address, rank=rank, world_size=2, timeout=2.0, **settings) as loader:
            iterator = iter(loader)
            steps = 0
            if rank == 1:
                next(iterator)
                begun.wait(20)
                return 1
            try:
                for _ in iterator:
                    steps += 1
            except WaitTimeout as error:
                waited.append(str(error))
                begun.set()
                time.sleep(0.5)
            for _ in iterator:  # rank 1 has closed: it is done, not slow
                steps += 1
            return steps

    assert in_threads(2, act) == [12, 1]
    assert "rank 1, which is still in epoch 0" in waited[0]


def test_an_unknown_dataset_names_those_that_exist(cluster):
    loader = make_loader(cluster.address, dataset="nothing", job="nothing")
    with loader, pytest.raises(UnknownDataset, match=r"nothing.*eight.*numbers"):
        iter(loader)


def test_merged_batches_of_a_second_epoch(cluster):
    """The rule for global batches holds in every epoch."""
    one = merged(run_ranks(cluster.address, 1, job="second-1", batch_size=12, set_epoch=1))
    four = merged(run_ranks(cluster.address, 4, job="second-4", batch_size=3, set_epoch=1))
    assert one == four
