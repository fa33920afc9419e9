"""How rows come to the loop while workers are slow, shards are unequal or unreadable, and the dispatcher is away."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import TestCluster
from training import check_audit, in_threads, make_dataset, make_loader, run_ranks

from manifests.wire import messages as m
from trainer_client import ClientOptions
from trainer_client.control import Control
from trainer_client.errors import FeedlineError, NoWorker, ShardMissing, WaitTimeout

ROWS = 2400
SHARDS = 60


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TestCluster]:
    """Two workers and 2400 rows of 4 KB in 60 shards."""
    with TestCluster(workers=2) as found:
        found.register(make_dataset(tmp_path / "numbers", [ROWS // SHARDS] * SHARDS, size=4000))
        yield found


def loop(loader: Any, act: Any = lambda step: None, pause: float = 0.0) -> tuple[list[int], float]:
    """Ids of a pass, and the longest time a batch took. ``act(step)`` after each."""
    ids: list[int] = []
    slowest, last = 0.0, time.monotonic()
    for step, batch in enumerate(loader):
        slowest = max(slowest, time.monotonic() - last)
        ids += batch["__id__"].tolist()
        act(step)
        time.sleep(pause)
        last = time.monotonic()
    return ids, slowest


class Freezing(threading.Thread):
    """Stops a worker for ``still`` seconds and lets it go on for ``going``, again and again."""

    def __init__(self, cluster: TestCluster, name: str, still: float, going: float) -> None:
        super().__init__(name=f"freeze-{name}")
        self._cluster, self._victim, self._still, self._going = cluster, name, still, going
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.is_set():
            self._cluster.pause(self._victim)
            self._end.wait(self._still)
            self._cluster.resume(self._victim)
            self._end.wait(self._going)

    def __enter__(self) -> Freezing:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join(10.0)


# -- slow workers


def test_rows_of_a_worker_that_hangs_are_read_from_another(
    cluster: TestCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that does nothing for less than the stall time does not hold up the loop, and is not told of as failed."""
    caplog.set_level(logging.INFO, "feedline.client")
    resumed = threading.Timer(2.5, lambda: cluster.resume("worker-0"))

    def act(step: int) -> None:
        if step == 20:
            cluster.pause("worker-0")
            resumed.start()

    with make_loader(cluster.address, batch_size=8, prefetch="256KiB", options=ClientOptions(stall=8.0)) as loader:
        ids, slowest = loop(loader, act, pause=0.02)
        hedges = loader._run.feed_stats()[0].hedges  # type: ignore[union-attr]
    resumed.join()
    assert sorted(ids) == list(range(ROWS))
    assert slowest < 1.5, f"a batch took {slowest:.1f} s"
    told = [record for record in caplog.records if "rows are read from worker" in record.message]
    assert len(told) == hedges > 0
    assert not any(worker["failures"] for worker in cluster.status()["workers"])
    check_audit(cluster, "job")


def test_a_worker_that_is_always_slow_serves_little(cluster: TestCluster) -> None:
    """It runs a tenth of the time: the other one has most of the work, and the loop goes on at its speed."""
    with (
        make_loader(cluster.address, batch_size=8, prefetch="256KiB", epochs=2) as loader,
        Freezing(cluster, "worker-0", 0.9, 0.1),
    ):
        started = time.monotonic()
        ids, _ = loop(loader)
        took = time.monotonic() - started
    assert sorted(ids) == sorted([*range(ROWS)] * 2)
    assert took < 15.0, f"{took:.1f} s"
    served = _served(cluster)
    assert served[cluster.worker("worker-0").id] < 0.4 * sum(served.values()), served
    speeds = {w["id"]: w["read_bytes_per_s"] for w in cluster.status()["workers"]}
    slow, fast = (speeds[cluster.worker(name).id] for name in ("worker-0", "worker-1"))
    assert slow is not None and fast is not None and slow < fast, "clients tell the dispatcher how fast workers are"
    check_audit(cluster, "job", 1)


def _served(cluster: TestCluster, expected: int = 0) -> dict[str, int]:
    """Bytes each worker sent, as told by heartbeats; waits until they told of ``expected`` bytes."""

    def told() -> bool:
        return sum(w["bytes_served"] for w in cluster.status()["workers"]) >= expected

    cluster.wait_for("heartbeats", told)
    return {w["id"]: w["bytes_served"] for w in cluster.status()["workers"]}


def test_no_worker_is_idle_beside_one_huge_shard(tmp_path: Path) -> None:
    """Case 9: nine tenths of the bytes lie in one shard; its rows come from all workers, each a good part."""
    rows = [10, 20, 10, 1300, 30, 10, 20, 40]
    size = sum(rows) << 16
    with TestCluster(workers=3) as cluster:
        cluster.register(make_dataset(tmp_path / "numbers", rows, size=1 << 16))
        for job in ("cold", "warm"):
            before = _served(cluster, size if job == "warm" else 0)
            with make_loader(cluster.address, job=job, batch_size=20, shuffle={"buffer": 64}) as loader:
                ids, _ = loop(loader)
            assert sorted(ids) == list(range(sum(rows)))
        after = _served(cluster, 2 * size)
    served = {name: after[name] - before[name] for name in after}
    assert min(served.values()) > 0.1 * sum(served.values()), served


# -- the dispatcher is away


@pytest.mark.parametrize("seconds", [8.0, pytest.param(30.0, marks=pytest.mark.slow)])
def test_grants_that_are_held_carry_the_loop(tmp_path: Path, seconds: float) -> None:
    """Case 23: dispatcher and etcd are away; a loop of 100 steps per second does not notice, though hardly any of the
    rows had been read before and the next epoch begins meanwhile."""
    shards = int(20 + 5 * seconds)
    with TestCluster(workers=2) as cluster:
        cluster.register(make_dataset(tmp_path / "numbers", [20] * shards))
        begun = threading.Event()
        slow: list[float] = []
        ids: list[int] = []

        def train() -> None:
            with make_loader(cluster.address, batch_size=2, prefetch="16KiB", epochs=2, timeout=60.0) as loader:
                found, slowest = loop(loader, lambda step: begun.set() if step == 150 else None, pause=0.01)
                ids.extend(found)
                slow.append(slowest)

        training = threading.Thread(target=train)
        training.start()
        assert begun.wait(30.0)
        cluster.pause("etcd")
        cluster.stop_dispatcher()
        training.join(seconds)
        assert training.is_alive(), "the epoch ended before the outage did"
        cluster.resume("etcd")
        cluster.start_dispatcher()
        training.join(60.0)
        assert not training.is_alive()
        assert sorted(ids) == sorted([*range(20 * shards)] * 2)
        assert slow[0] < 1.0, f"a step took {slow[0]:.1f} s"
        check_audit(cluster, "job", 0)
        check_audit(cluster, "job", 1)


# -- shards that cannot be read


def test_the_shard_that_failed_is_the_one_that_is_named(cluster: TestCluster, tmp_path: Path) -> None:
    """Of a read of many shards one fails: that one goes to quarantine, the rows of the others come."""
    (tmp_path / "numbers" / "shard-007.tar").unlink()
    gone = set(range(7 * 40, 8 * 40))
    with make_loader(cluster.address, job="skip", batch_size=8, on_error="skip", tail="ragged") as loader:
        ids, _ = loop(loader)
    assert sorted(ids) == sorted(set(range(ROWS)) - gone)
    (job,) = cluster.status()["jobs"]
    assert [(shard["shard"], shard["code"]) for shard in job["quarantined"]] == [(7, "shard-missing")]
    assert len(job["quarantined"][0]["workers"]) == 2
    started = time.monotonic()
    with (
        make_loader(cluster.address, job="raise", batch_size=8) as loader,
        pytest.raises(ShardMissing, match=r"shard-007\.tar") as caught,
    ):
        loop(loader)
    assert time.monotonic() - started < 5.0
    assert caught.value.detail["shard"] == 7


def test_one_worker_alone_must_fail_twice(cluster: TestCluster, tmp_path: Path) -> None:
    """With one worker a shard goes to quarantine after its second failure, a second later; the loop waits that long."""
    cluster.kill("worker-1")
    cluster.wait_workers(1)
    (tmp_path / "numbers" / "shard-007.tar").unlink()
    with make_loader(cluster.address, batch_size=8, on_error="skip", tail="ragged") as loader:
        ids, slowest = loop(loader)
    assert len(ids) == ROWS - 40
    assert slowest < 5.0
    (job,) = cluster.status()["jobs"]
    assert [shard["shard"] for shard in job["quarantined"]] == [7]


# -- what is waited for


def test_reasons_name_shard_and_worker(cluster: TestCluster) -> None:
    """Case 24: `feedline status` and the error at the deadline tell which shard is waited for, and on whom."""
    cluster.kill("worker-1")
    cluster.wait_workers(1)
    errors: list[FeedlineError] = []

    def train() -> None:
        with make_loader(
            cluster.address, batch_size=8, prefetch="64KiB", timeout=5.0, options=ClientOptions(stall=20.0)
        ) as loader:
            try:
                loop(loader, lambda step: cluster.pause("worker-0") if step == 10 else None)
            except FeedlineError as error:
                errors.append(error)

    training = threading.Thread(target=train)
    training.start()
    name = cluster.worker("worker-0").id

    def waiting() -> str:
        jobs = cluster.status()["jobs"]
        return str(jobs[0]["ranks"][0]["waiting_for"]) if jobs else ""

    cluster.wait_for("a reason", lambda: f"on worker {name}: no sign for" in waiting())
    assert waiting().startswith("shard "), waiting()
    training.join(20.0)
    cluster.resume("worker-0")
    # its lease is over by then, so that there is no worker is as true
    assert isinstance(errors[0], WaitTimeout | NoWorker)
    assert f"on worker {name}: " in str(errors[0]) or "no worker" in str(errors[0])
    assert "shard " in str(errors[0])


def test_a_reason_for_want_of_workers_names_the_shard(cluster: TestCluster) -> None:
    cluster.kill("worker-0")
    cluster.kill("worker-1")
    cluster.wait_workers(0)
    with (
        make_loader(cluster.address, batch_size=8, timeout=2.0) as loader,
        pytest.raises(FeedlineError, match=r"shard \d+.*worker") as caught,
    ):
        loop(loader)
    assert caught.value.code == "no-worker"
    assert str(caught.value).count("shard") == 1, str(caught.value)


# -- dynamic order


def test_dynamic_order_shares_the_end_of_an_epoch(cluster: TestCluster) -> None:
    """Without quotas the faster of two ranks takes more, every row comes once, and nobody waits at the end."""
    delays = (0.0, 0.02)

    def act(rank: int) -> tuple[list[int], float]:
        with make_loader(
            cluster.address, rank=rank, world_size=2, order="dynamic", tail="ragged", batch_size=8, prefetch="256KiB"
        ) as loader:
            return loop(loader, pause=delays[rank])

    (fast, slowest), (slow, slowest_too) = in_threads(2, act)
    assert sorted(fast + slow) == list(range(ROWS))
    assert len(fast) > 1.5 * len(slow), (len(fast), len(slow))
    assert max(slowest, slowest_too) < 3.0
    check_audit(cluster, "job")


@pytest.mark.parametrize("tail", ["pad", "drop", "ragged"])
def test_dynamic_order_survives_a_worker_and_the_dispatcher(cluster: TestCluster, tail: str) -> None:
    """Rows of the lane are asked for again after the dispatcher comes back; none is lost or comes twice."""
    ids: list[list[int]] = [[], []]
    begun = threading.Barrier(3)

    def act(rank: int) -> None:
        with make_loader(
            cluster.address, rank=rank, world_size=2, order="dynamic", tail=tail, batch_size=8, prefetch="64KiB"
        ) as loader:
            ids[rank], _ = loop(loader, lambda step: begun.wait(30.0) if step == 5 else None, pause=0.005)

    training = threading.Thread(target=lambda: in_threads(2, act))
    training.start()
    begun.wait(30.0)
    cluster.kill("worker-0")
    cluster.restart_dispatcher()
    training.join(60.0)
    assert sorted(ids[0] + ids[1]) == list(range(ROWS))
    check_audit(cluster, "job")


def test_dynamic_order_of_many_small_epochs(cluster: TestCluster) -> None:
    """Each epoch of a pass hands out every row once, over three ranks."""
    ranks = run_ranks(cluster.address, 3, order="dynamic", tail="ragged", epochs=3, batch_size=50)
    found = sorted(i for rank in ranks for i in rank.real)
    assert found == sorted([*range(ROWS)] * 3)


@pytest.mark.parametrize(("order", "world"), [("deterministic", 1), ("dynamic", 2)])
def test_more_shards_come_next_than_grants_are_held(tmp_path: Path, order: str, world: int) -> None:
    """Small rows in 2,500 shards: one stretch of planned rows lies in more shards than a rank holds grants for, and the
    loop is slow enough for all of them to be held at first."""
    with TestCluster(workers=2) as cluster:
        cluster.register(make_dataset(tmp_path / "tiny", (3,) * 2500))
        found = run_ranks(cluster.address, world, order=order, batch_size=64, delay=0.03, timeout=10.0, job="tiny")
        assert sorted(i for rank in found for i in rank.real) == list(range(7500))


def test_the_only_worker_may_fall_silent_and_come_back(cluster: TestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no other one to go to, so it is asked again as soon as it lives, and not without a pause meanwhile."""
    cluster.kill("worker-1")
    cluster.wait_workers(1)
    asks = 0
    call = Control.call

    def counted(self: Control, message: m.Message, *arguments: Any, **named: Any) -> Any:
        nonlocal asks
        asks += isinstance(message, m.AskGrants)
        return call(self, message, *arguments, **named)

    monkeypatch.setattr(Control, "call", counted)
    timer = threading.Timer(3.0, lambda: cluster.resume("worker-0"))

    def pause() -> None:
        cluster.pause("worker-0")
        timer.start()

    with make_loader(
        cluster.address, batch_size=8, prefetch="16KiB", timeout=30.0, options=ClientOptions(stall=1.0)
    ) as loader:
        ids, longest = loop(loader, lambda step: pause() if step == 10 else None)
    timer.join()
    assert sorted(ids) == list(range(ROWS))
    assert longest < 7.0, f"a gap of {longest:.1f} s for a pause of 3 s"
    assert asks < 200, f"{asks} asks"
