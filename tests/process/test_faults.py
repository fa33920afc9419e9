"""Workers, dispatcher and etcd fail while a loop runs: nothing is lost, nothing comes twice, and it goes on in time."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import TestCluster
from stored_data import write_tar

import manifests
from trainer_client import ClientOptions, RemoteDataLoader
from trainer_client.errors import DispatcherUnavailable, FeedlineError, NoWorker, WaitTimeout

ROWS = 300
SHARDS = 20


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> manifests.Manifest:
    """300 rows of 4 KiB in 20 uneven tar shards."""
    folder = tmp_path_factory.mktemp("faults")
    generator = random.Random(5)
    cuts = sorted(generator.sample(range(1, ROWS), SHARDS - 1))
    bounds = [0, *cuts, ROWS]
    for shard, (first, last) in enumerate(itertools.pairwise(bounds)):
        members = []
        for row in range(first, last):
            members += [(f"{row:05d}.cls", b"%d" % (row % 10)), (f"{row:05d}.bin", generator.randbytes(4096))]
        write_tar(folder / f"s-{shard:02d}.tar", members)
    return manifests.build(str(folder), name="faults", version="1")


@pytest.fixture
def cluster(manifest: manifests.Manifest) -> Iterator[TestCluster]:
    with TestCluster(workers=2) as found:
        found.register(manifest)
        yield found


def loader(cluster: TestCluster, job: str, **settings: object) -> RemoteDataLoader:
    """Small prefetch, so that most rows are still to be read when the fault comes."""
    options = {"batch_size": 5, "seed": 3, "prefetch": "64KiB", "timeout": 30.0} | settings
    return RemoteDataLoader(cluster.address, dataset="faults", job=job, **options)  # type: ignore[arg-type]


def real_ids(batch: dict) -> list[int]:
    return batch["__id__"][~batch["__pad__"]].tolist()


def balanced(cluster: TestCluster, job: str) -> None:
    books = cluster.audit(job)
    assert books["state"] == "complete", books
    assert (books["lost"], books["repeated"], books["acknowledged"]) == (0, 0, ROWS), books


def kill_workers(cluster: TestCluster, seed: int, rounds: int) -> None:
    """Epochs in each of which one of two workers gets SIGKILL at a random batch; a new one is started after each."""
    moments = random.Random(seed)
    expected = None
    for number in range(rounds):
        job = f"kill-{seed}-{number}"
        at = moments.randrange(1, 58)
        victim = moments.choice([w for w in cluster.workers if w.child.poll() is None])
        ids, slowest = [], 0.0
        with loader(cluster, job) as batches:
            last = time.monotonic()
            for step, batch in enumerate(batches):
                slowest = max(slowest, time.monotonic() - last)
                ids += real_ids(batch)
                if step == at:
                    cluster.kill(victim.child.name)
                last = time.monotonic()
        assert sorted(ids) == list(range(ROWS)), cluster.audit(job)
        assert expected is None or ids == expected, "a worker's death changed the order"
        expected = ids
        assert slowest < 4.0, f"round {number}: a gap of {slowest:.1f} s after a refused connection"
        balanced(cluster, job)
        cluster.add_worker()


def test_a_worker_killed_at_random_moments_loses_nothing(cluster: TestCluster, seed: int) -> None:
    """Case 19: SIGKILL of one of two workers at six seeded random batches; delivery goes on at once, each id once."""
    kill_workers(cluster, seed, 6)


@pytest.mark.slow
def test_chaos_workers_killed_twenty_times(cluster: TestCluster, seed: int) -> None:
    """Case 19: the same, twenty times, with a seed of the day."""
    kill_workers(cluster, seed, 20)


@pytest.mark.slow
def test_chaos_every_role_in_turn(cluster: TestCluster, seed: int) -> None:
    """Twelve epochs, in each a random fault on a random role: worker killed or paused, dispatcher killed and restarted,
    etcd killed and restarted."""
    moments = random.Random(seed)
    for number in range(12):
        job = f"chaos-{seed}-{number}"
        fault = moments.choice(["kill", "pause", "dispatcher", "etcd"])
        at = moments.randrange(1, 58)
        victim = moments.choice([w for w in cluster.workers if w.child.poll() is None]).child.name
        ids = []
        with loader(cluster, job) as batches:
            for step, batch in enumerate(batches):
                ids += real_ids(batch)
                if step == at and fault == "kill":
                    cluster.kill(victim)
                elif step == at and fault == "pause":
                    cluster.pause(victim)
                elif step == at and fault == "dispatcher":
                    cluster.restart_dispatcher()
                elif step == at and fault == "etcd":
                    cluster.restart_etcd()
        if fault == "pause":
            cluster.resume(victim)
        if fault == "kill":
            cluster.add_worker()
        assert sorted(ids) == list(range(ROWS)), (fault, at)
        cluster.wait_for("the books", lambda job=job: _complete(cluster, job), 20.0)
        balanced(cluster, job)


def test_a_silent_worker_is_left_within_the_stall_deadline(cluster: TestCluster) -> None:
    """SIGSTOP of one of two workers: its reads move within 5 s, nothing is lost, and it may come back."""
    ids, slowest = [], 0.0
    with loader(cluster, "stop") as batches:
        last = time.monotonic()
        for step, batch in enumerate(batches):
            slowest = max(slowest, time.monotonic() - last)
            ids += real_ids(batch)
            if step == 7:
                cluster.pause("worker-0")
            if step == 50:
                cluster.resume("worker-0")
            last = time.monotonic()
    assert sorted(ids) == list(range(ROWS))
    assert slowest < 8.0, f"a gap of {slowest:.1f} s"
    balanced(cluster, "stop")


def test_the_last_worker_dies_and_a_new_one_comes(cluster: TestCluster) -> None:
    """Case 19: no worker is left for 5 s; the loop waits, named, and goes on."""
    ids: list[int] = []
    reached = threading.Event()

    def train() -> None:
        with loader(cluster, "last") as batches:
            for step, batch in enumerate(batches):
                ids.extend(real_ids(batch))
                if step == 9:
                    reached.set()
                    killed.wait(10.0)

    killed = threading.Event()
    training = threading.Thread(target=train)
    training.start()
    assert reached.wait(20.0)
    cluster.kill("worker-0")
    cluster.kill("worker-1")
    killed.set()
    time.sleep(3.0)
    jobs = cluster.status()["jobs"]
    time.sleep(2.0)
    cluster.add_worker()  # from the main thread: workers end with the thread that started them
    training.join(30.0)
    assert sorted(ids) == list(range(ROWS))
    rank = next(job for job in jobs if job["name"] == "last")["ranks"][0]
    assert rank["state"] == "waiting"
    assert "worker" in rank["waiting_for"], rank
    balanced(cluster, "last")


def test_no_worker_at_all_is_an_error_that_says_so(cluster: TestCluster) -> None:
    """Every wait has a deadline and a named reason: without workers the loop gets NoWorker after ``timeout``."""
    cluster.kill("worker-0")
    cluster.kill("worker-1")
    cluster.wait_workers(0)
    with loader(cluster, "none", timeout=3.0) as batches:
        started = time.monotonic()
        with pytest.raises(NoWorker, match="worker"):
            next(iter(batches))
        assert time.monotonic() - started < 8.0


def test_workers_join_and_leave_while_a_loop_runs(cluster: TestCluster) -> None:
    """A worker added and another drained by SIGTERM mid-epoch: same order as before, nothing lost."""
    with loader(cluster, "calm") as batches:
        calm = [i for batch in batches for i in real_ids(batch)]
    ids: list[int] = []
    with loader(cluster, "moving") as batches:
        for step, batch in enumerate(batches):
            ids += real_ids(batch)
            if step == 10:
                cluster.add_worker()
            if step == 20:
                assert cluster.terminate("worker-0") == 0
            time.sleep(0.01)
    assert ids == calm
    balanced(cluster, "moving")


def test_the_dispatcher_is_killed_and_restarted(cluster: TestCluster) -> None:
    """Case 23: kill -9 of the dispatcher three times mid-epoch; workers register again by themselves, delivery goes on
    within 15 s. With an empty etcd: a typed error, no endless loop."""
    ids, slowest = [], 0.0
    with loader(cluster, "restart") as batches:
        last = time.monotonic()
        for step, batch in enumerate(batches):
            slowest = max(slowest, time.monotonic() - last)
            ids += real_ids(batch)
            if step in (5, 20, 40):
                cluster.restart_dispatcher()
            last = time.monotonic()
    assert sorted(ids) == list(range(ROWS))
    assert slowest < 15.0, f"a gap of {slowest:.1f} s"
    balanced(cluster, "restart")

    with loader(cluster, "wiped", timeout=20.0) as batches:
        iterator = iter(batches)
        next(iterator)
        cluster.stop_dispatcher()
        cluster.wipe_etcd()
        cluster.start_dispatcher()
        started = time.monotonic()
        with pytest.raises(FeedlineError) as caught:
            for _ in iterator:
                pass
        assert time.monotonic() - started < 30.0
        assert caught.value.code in ("fenced", "unknown-dataset"), caught.value


def test_held_grants_carry_the_loop_while_the_dispatcher_is_away(cluster: TestCluster) -> None:
    """Reads go on with held grants: an epoch whose shards were all asked for ends without a dispatcher."""
    ids = []
    batches = loader(cluster, "held")
    for step, batch in enumerate(batches):
        ids += real_ids(batch)
        if step == 20:
            cluster.stop_dispatcher()
    assert sorted(ids) == list(range(ROWS))
    cluster.start_dispatcher()
    batches.close()
    balanced(cluster, "held")


def test_etcd_is_killed_and_restarted(cluster: TestCluster) -> None:
    """etcd away for some seconds: held grants go on, the control plane comes back by itself."""
    ids = []
    with loader(cluster, "etcd") as batches:
        for step, batch in enumerate(batches):
            ids += real_ids(batch)
            if step == 10:
                cluster.kill("etcd")
            if step == 30:
                time.sleep(1.0)
                cluster.local.start_etcd()
    assert sorted(ids) == list(range(ROWS))
    cluster.wait_for("the books", lambda: _complete(cluster, "etcd"), 20.0)
    balanced(cluster, "etcd")


def _complete(cluster: TestCluster, job: str) -> bool:
    try:
        return bool(cluster.audit(job)["state"] == "complete")
    except FeedlineError:
        return False


def test_a_dispatcher_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Which address, and how long it was tried."""
    nobody = RemoteDataLoader("127.0.0.1:1", dataset="faults", job="j", batch_size=4, timeout=1.0)
    started = time.monotonic()
    with pytest.raises(DispatcherUnavailable, match=r"127\.0\.0\.1:1.*tried for 1\.\d s"):
        len(nobody)
    assert time.monotonic() - started < 5.0
    nobody.close()


def test_a_dispatcher_that_hangs_is_named(cluster: TestCluster) -> None:
    """SIGSTOP of the dispatcher: a new loader gets an error within its timeout, not a hang."""
    cluster.pause("dispatcher-0")
    try:
        with loader(cluster, "hang", timeout=2.0) as batches:
            started = time.monotonic()
            with pytest.raises((DispatcherUnavailable, WaitTimeout), match="tried for"):
                iter(batches)
            assert time.monotonic() - started < 10.0
    finally:
        cluster.resume("dispatcher-0")


def test_an_unreachable_worker_is_named_and_gone_round(cluster: TestCluster, manifest: manifests.Manifest) -> None:
    """Case 24: a worker that advertises an address where nobody is: the others carry on, the dispatcher names it."""
    lost = cluster.add_worker("--listen", "127.0.0.1:0", "--advertise", "127.0.0.2:9")
    with loader(cluster, "astray", options=ClientOptions(stall=2.0)) as batches:
        ids = [i for batch in batches for i in real_ids(batch)]
    assert sorted(ids) == list(range(ROWS))
    log = (cluster.local.logs / "dispatcher-0.log").read_text()
    assert lost.id in log and "127.0.0.2:9" in log
    balanced(cluster, "astray")
