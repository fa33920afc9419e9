"""etcd away, slow, restarted, or one of its three members lost, while a loop reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import etcd_client
import pytest
from cluster import TestCluster
from programs import Program
from reading import Loop
from training import make_dataset

from feedline.etcd import Etcd
from manifests.errors import DispatcherUnavailable
from manifests.wire import messages as m

LEASE = 2.0
ROWS = [30, 10, 40, 25, 15, 30, 10, 40]
TOTAL = sum(ROWS)
#: batches of an epoch
STEPS = TOTAL // 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_dataset(tmp_path_factory.mktemp("etcd"), ROWS)


@pytest.fixture
def start(data: Any) -> Iterator[Callable[..., TestCluster]]:
    made: list[TestCluster] = []

    def begin(**settings: Any) -> TestCluster:
        made.append(TestCluster(**{"workers": 2, "lease": f"{LEASE:g}s", **settings}))
        cluster = made[-1].__enter__()
        cluster.register(data)
        return cluster

    yield begin
    for cluster in made:
        cluster.__exit__(None)


def status_in(cluster: TestCluster, seconds: float) -> dict[str, Any] | None:
    """The status if it comes within these seconds."""
    try:
        with cluster.client(seconds) as client:
            return client.document(m.GetStatus())
    except DispatcherUnavailable:
        return None


def ride_out(cluster: TestCluster, seconds: float, away: Callable[[], object], back: Callable[[], object]) -> None:
    """etcd is away for this long while a loop reads: it goes on with held grants, the leader says that it cannot lead,
    and leads again when etcd is back."""
    loop = Loop(cluster, "away", TOTAL, delay=(seconds + 4) / STEPS)
    loop.wait_steps(5)
    term = cluster.status()["dispatcher"]["term"]
    before = len(loop.times)
    end = time.monotonic() + seconds
    away()
    said: set[str] = set()
    while time.monotonic() < end:
        try:
            with cluster.client(1.0) as client:
                client.document(m.GetStatus())
        except DispatcherUnavailable as error:
            said.add(str(error))
        time.sleep(0.1)
    # at its own pace, but for the moment of the fault
    assert len(loop.times) - before > 0.7 * seconds / ((seconds + 4) / STEPS)
    assert any("etcd" in text for text in said), said
    back()
    began = time.monotonic()
    cluster.wait_leader(timeout=LEASE + 3)
    cluster.wait_workers(2, timeout=LEASE + 3)
    took = time.monotonic() - began
    assert cluster.status()["dispatcher"]["term"] > term
    gap = loop.end()
    assert gap < 2.0, f"a gap of {gap:.2f} s; leads {took:.2f} s after etcd was back"


def test_etcd_hangs_for_ten_seconds(start: Callable[..., TestCluster]) -> None:
    """Case 55: SIGSTOP of etcd for 10 s, with a standby beside the leader."""
    cluster = start(dispatchers=2)
    ride_out(cluster, 10.0, lambda: cluster.pause("etcd"), lambda: cluster.resume("etcd"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["paused", "killed"])
def test_etcd_is_away_for_thirty_seconds(start: Callable[..., TestCluster], fault: str) -> None:
    """Case 55: for 30 s; held grants cover that."""
    cluster = start(dispatchers=2)
    if fault == "paused":
        ride_out(cluster, 30.0, lambda: cluster.pause("etcd"), lambda: cluster.resume("etcd"))
    else:
        ride_out(cluster, 30.0, lambda: cluster.kill("etcd"), lambda: cluster.restart("etcd"))


# -- three members -------------------------------------------------------------------------------------------------


def raft_leader(cluster: TestCluster) -> str:
    """Name of the etcd member that leads etcd."""
    for member in cluster.local.etcds:
        if member.child.poll() is None:
            with etcd_client.connect(member.address) as client:
                status = client.maintenancestub.Status(etcd_client.etcdrpc.StatusRequest(), 5)
            if status.leader == status.header.member_id:
                return member.name
    raise AssertionError("no member leads")


@pytest.mark.parametrize("fault", ["killed", "paused"])
def test_one_of_three_members_is_lost(start: Callable[..., TestCluster], fault: str) -> None:
    """First one that follows, then, after it is back, the one that leads etcd. The loop sees nothing, the control plane
    at most a short pause, and no worker is taken for dead."""
    cluster = start(etcd_members=3)
    loop = Loop(cluster, "members", TOTAL, delay=0.12)
    loop.wait_steps(3)
    slowest = 0.0
    for leads in (False, True):
        leader = raft_leader(cluster)
        victim = leader if leads else next(e.name for e in cluster.local.etcds if e.name != leader)
        act = cluster.kill if fault == "killed" else cluster.pause
        act(victim)
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            began = time.monotonic()
            status = status_in(cluster, 8.0)
            slowest = max(slowest, time.monotonic() - began)
            assert status is not None, f"no status for 8 s after {victim} was {fault}"
            assert all(worker["state"] == "up" for worker in status["workers"])
        if fault == "killed":
            cluster.restart(victim)
        else:
            cluster.resume(victim)
        cluster.wait_for("etcd ok", lambda: cluster.status()["etcd"]["ok"], 10)
    gap = loop.end()
    assert gap < 1.0, f"a gap of {gap:.2f} s"
    assert slowest < 6.0, f"the control plane was away for {slowest:.2f} s"


# -- workers -------------------------------------------------------------------------------------------------------


def test_case_55_a_worker_killed_right_before_an_etcd_restart_is_not_listed_for_long(
    start: Callable[..., TestCluster],
) -> None:
    """etcd gives leases their whole time again when it restarts; what the dispatcher thinks of workers is not in etcd."""
    cluster = start()
    loop = Loop(cluster, "dead", TOTAL, delay=0.08)
    loop.wait_steps(5)
    victim = cluster.worker("worker-0")
    cluster.kill("worker-0")
    died = time.monotonic()
    cluster.restart("etcd")
    cluster.wait_for("it is not up", lambda: _state(cluster, victim.id) != "up", LEASE + 2)
    assert time.monotonic() - died < LEASE + 2
    assert _state(cluster, cluster.worker("worker-1").id) == "up"
    gap = loop.end()
    assert gap < 4.0, f"a gap of {gap:.2f} s"


def _state(cluster: TestCluster, worker: str) -> str:
    status = status_in(cluster, 1.0)
    if status is None:
        return "up"  # nobody says otherwise
    return next((w["state"] for w in status["workers"] if w["id"] == worker), "unknown")


def test_case_54_a_worker_that_was_paused_past_its_lease_comes_back(start: Callable[..., TestCluster]) -> None:
    """SIGSTOP with streams half read, for the lease and 3 s; its shards go to the other one. After SIGCONT it is up again
    and what it still sends is of no consequence."""
    cluster = start()
    loop = Loop(cluster, "half", TOTAL, delay=0.14)
    loop.wait_steps(3)
    victim = cluster.worker("worker-0")
    cluster.pause("worker-0")
    paused = time.monotonic()
    cluster.wait_for("it is lost", lambda: _state(cluster, victim.id) == "lost", LEASE + 2)
    time.sleep(max(0.0, paused + LEASE + 3 - time.monotonic()))
    steps = len(loop.times)
    assert steps < STEPS, "the loop has to be on its way still"
    cluster.resume("worker-0")
    cluster.wait_for("it is back", lambda: _state(cluster, victim.id) == "up", 5)
    gap = loop.end()
    assert gap < 8.0, f"a gap of {gap:.2f} s"


# -- looking -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["killed", "paused"])
def test_status_does_not_call_a_dead_etcd_ok(start: Callable[..., TestCluster], fault: str) -> None:
    """Long before the leader's lease of 30 s ends, and without holding up those who ask."""
    cluster = start(workers=0, lease="30s")
    assert cluster.status()["etcd"] | {"db_bytes": 0} == {"members": 1, "ok": True, "db_bytes": 0}
    (cluster.kill if fault == "killed" else cluster.pause)("etcd")
    began = time.monotonic()
    cluster.wait_for("not ok", lambda: not cluster.status()["etcd"]["ok"], 4.0)
    assert time.monotonic() - began < 4.0
    assert cluster.status()["dispatcher"]["term"] == 1
    if fault == "killed":
        cluster.restart("etcd")
    else:
        cluster.resume("etcd")
    cluster.wait_for("ok again", lambda: cluster.status()["etcd"]["ok"], 5.0)
    assert cluster.status()["dispatcher"]["term"] == 1


def test_an_etcd_of_our_own_is_compacted_and_a_shared_one_is_not(tmp_path: Path, data: Any) -> None:
    with TestCluster(workers=0, lease="1s", dispatcher_arguments=("--compact-every", "300ms")) as cluster:
        cluster.register(data)
        with etcd_client.connect(cluster.local.etcd.address) as client:
            first = _revision(client)
            cluster.wait_for("history is dropped", lambda: _compacted(client, first - 1), 5)
    etcd = Etcd(tmp_path / "etcd", log=tmp_path / "etcd.log", fsync=False)
    etcd.start()
    line = ["--etcd", etcd.address, "--store", tmp_path / "store", "--listen", "127.0.0.1:0", "--lease", "1s"]
    program = Program(*line, "--compact-every", "300ms")
    try:
        with etcd_client.connect(etcd.address) as client:
            first = _revision(client)
            time.sleep(1.5)
            assert not _compacted(client, first - 1)
    finally:
        assert program.end()[0] == 0
        etcd.stop()


def _revision(client: Any) -> int:
    return int(client.get_response("x").header.revision)


def _compacted(client: Any, revision: int) -> bool:
    """Is history up to that revision gone?"""
    request = etcd_client.etcdrpc.RangeRequest(key=b"/feedline/v1/term", revision=revision)
    try:
        client.kvstub.Range(request, 5)
    except Exception as error:
        if "compacted" not in str(error):
            raise
        return True
    return False
