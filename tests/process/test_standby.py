"""Several dispatchers on one etcd: one leads, and when it is killed, ended, paused or cut off, another one goes on with
the whole state, while a loop reads."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import etcd_client
import pytest
from cluster import TestCluster
from reading import Loop, hello
from relay import Relay
from training import make_dataset, make_loader

from dispatcher.leader import LeaderRecord
from feedline.etcd import Etcd
from feedline.local import Member
from manifests.errors import DispatcherUnavailable
from manifests.wire import messages as m
from manifests.wire.connection import parse_address
from manifests.wire.flight import Connection, PeerSilent

#: seconds; what ``TestCluster`` gives leader, workers and ranks
LEASE = 2.0
#: seconds after the lease's end within which a standby leads
WITHIN = 3.0
ROWS = [30, 10, 40, 25, 15, 30, 10, 40]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_dataset(tmp_path_factory.mktemp("standby"), ROWS)


@pytest.fixture
def cluster(data: Any) -> Iterator[TestCluster]:
    with TestCluster(workers=2, dispatchers=2, lease=f"{LEASE:g}s") as found:
        found.register(data)
        yield found


def other(cluster: TestCluster, name: str) -> Member:
    return next(member for member in cluster.local.dispatchers if member.child.name != name)


def call(member: Member, message: m.Message, kind: Any) -> Any:
    connection = Connection(parse_address(member.address))
    try:
        return connection.call(message, kind, 5.0)
    finally:
        connection.close()


def take_over(cluster: TestCluster, act: Callable[[str], object]) -> tuple[str, str, float]:
    """Do ``act`` to the leader. Returns its name, that of the next one, and after how many seconds that one leads."""
    old = cluster.wait_leader()
    standby = other(cluster, old)
    began = time.monotonic()
    act(old)
    deadline = began + LEASE + WITHIN + 10
    while True:
        reply = hello(standby)
        if reply is not None and reply.term and reply.leader == reply.id:
            return old, standby.child.name, time.monotonic() - began
        assert time.monotonic() < deadline, f"{standby} does not lead: {reply}"
        time.sleep(0.02)


def test_a_standby_serves_and_names_the_leader(cluster: TestCluster) -> None:
    name = cluster.wait_leader()
    leader, standby = cluster.local.leader(), other(cluster, name)
    assert leader is not None and leader.address != standby.address
    reply = hello(standby)
    assert reply is not None and reply.term == 0 and f"grpc://{reply.leader}" == leader.address
    with pytest.raises(DispatcherUnavailable, match="is not the leading dispatcher") as caught:
        call(standby, m.GetStatus(), m.Document)
    assert caught.value.detail["leader"] == reply.leader
    # a client that knows only the standby finds the leader, and so do commands that know both
    with make_loader(standby.address, job="follow") as loader:
        assert sum(len(batch["__id__"]) for batch in loader) == sum(ROWS)
    assert f"grpc://{cluster.status()['dispatcher']['leader']}" == leader.address


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_leader_that_ends_is_followed_at_once_while_a_loop_reads(cluster: TestCluster, number: int) -> None:
    """Case 20: on one host the kernel tells that the old one is gone; with SIGTERM it resigns. Twice, so that both have
    led; the state goes with it."""
    loop = Loop(cluster, "ends", sum(ROWS))
    loop.wait_steps(5)
    for _ in range(2):
        before = cluster.status()
        old, new, seconds = take_over(cluster, lambda name: cluster.child(name).signal(number))
        assert seconds < WITHIN, f"{new} leads {seconds:.2f} s after {old}"
        cluster.wait_workers(2)
        after = cluster.status()
        assert after["datasets"] == before["datasets"]
        assert [job["generation"] for job in after["jobs"]] == [job["generation"] for job in before["jobs"]]
        assert after["dispatcher"]["term"] == before["dispatcher"]["term"] + 1
        cluster.restart(old)
        loop.wait_steps(5)
    loop.end()


def test_a_paused_leader_is_deposed_and_becomes_a_standby(cluster: TestCluster) -> None:
    """Case 54 for dispatchers: SIGSTOP past the lease while a loop reads. Asked at every moment after SIGCONT, the old one
    never answers as leader again, and writes nothing."""
    loop = Loop(cluster, "paused", sum(ROWS), delay=0.06)
    loop.wait_steps(5)
    old, new, seconds = take_over(cluster, cluster.pause)
    assert seconds < LEASE + WITHIN, f"{new} leads {seconds:.2f} s after the pause began"
    term = cluster.status()["dispatcher"]["term"]
    loop.wait_steps(5)
    member = next(d for d in cluster.local.dispatchers if d.child.name == old)
    leader = cluster.local.leader()
    assert leader is not None
    cluster.resume(old)
    deadline = time.monotonic() + 10
    while True:
        reply = hello(member)
        assert reply is None or (reply.term == 0 and reply.leader != reply.id), reply
        with pytest.raises((DispatcherUnavailable, PeerSilent)):
            call(member, m.RegisterWorker(id="ghost", incarnation="1", address="127.0.0.1:1"), m.WorkerWelcome)
        if reply is not None and f"grpc://{reply.leader}" == leader.address:
            break
        assert time.monotonic() < deadline, f"{old} does not name {new}: {reply}"
    status = cluster.status()
    assert status["dispatcher"]["term"] == term and "ghost" not in [w["id"] for w in status["workers"]]
    assert "steps down" in (cluster.local.logs / f"{old}.log").read_text()
    loop.end()


def test_a_leader_of_another_host_that_vanished_is_followed_after_its_lease(tmp_path: Path) -> None:
    """Nobody on this host can tell that it is dead: its lease decides."""
    etcd = Etcd(tmp_path / "etcd", log=tmp_path / "etcd.log", fsync=False)
    etcd.start()
    record = LeaderRecord(address="10.255.255.1:7070", run="elsewhere", process='{"host":"h","pid":1,"kernel":"k"}')
    with etcd_client.connect(etcd.address) as client:
        lease = client.lease(3)
        client.put("/feedline/v1/leader", record.encode(), lease)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "dispatcher", "--etcd", str(etcd.address), "--store", str(tmp_path / "store"), "--listen",
         "127.0.0.1:0", "--lease", "2s"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("dispatcher ").strip()
        connection = Connection(parse_address(address))
        assert connection.call(m.Hello(), m.HelloReply, 5).leader == "10.255.255.1:7070"
        while connection.call(m.Hello(), m.HelloReply, 5).term == 0:
            assert time.monotonic() - began < lease.ttl + WITHIN
            time.sleep(0.05)
        assert time.monotonic() - began > lease.ttl - 1
        connection.close()
    finally:
        process.terminate()
        process.communicate(timeout=10)
        etcd.stop()


def test_the_leader_key_is_deleted_by_hand(cluster: TestCluster) -> None:
    """Case 55, "a key vanished": the leader notices, and one of the dispatchers leads again with the state intact."""
    loop = Loop(cluster, "deleted", sum(ROWS))
    loop.wait_steps(5)
    before = cluster.status()
    with etcd_client.connect(cluster.local.etcd.address) as client:
        assert client.delete("/feedline/v1/leader")
    cluster.wait_for("a new term", lambda: _term(cluster) > before["dispatcher"]["term"], LEASE + WITHIN)
    loop.end()
    after = cluster.status()
    assert after["datasets"] == before["datasets"]
    assert [job["generation"] for job in after["jobs"]] == [job["generation"] for job in before["jobs"]]


def _term(cluster: TestCluster) -> int:
    leader = cluster.local.leader()
    reply = hello(leader) if leader is not None else None
    return reply.term if reply is not None else 0


def test_case_53_a_dispatcher_that_was_cut_off_sees_what_happened_meanwhile(tmp_path: Path) -> None:
    """There is no watch to lose: a dispatcher whose way to etcd is cut steps down, and reads everything anew when it leads
    again. Meanwhile the other one leads, workers come and go, a hundred keys are written and etcd is compacted."""
    first = make_dataset(tmp_path / "one", [4, 4])
    second = make_dataset(tmp_path / "two", [5], name="later")
    with TestCluster(workers=0, lease=f"{LEASE:g}s") as cluster:
        etcd = cluster.local.etcd.address
        cluster.register(first)
        with Relay((etcd.host, etcd.port)) as relay:
            behind = cluster.local.add_dispatcher(etcd="{}:{}".format(*relay.address))
            cluster.terminate("dispatcher-0")
            assert cluster.wait_leader() == behind.child.name == "dispatcher-1"
            cluster.restart("dispatcher-0")
            cluster.add_worker()
            cluster.add_worker()
            relay.hold_answers()
            assert cluster.wait_leader(other_than="dispatcher-1") == "dispatcher-0"
            cluster.add_worker()
            assert cluster.terminate("worker-0") == 0
            cluster.register(second)
            with etcd_client.connect(etcd) as client:
                for number in range(100):
                    client.put(f"/somebody/else/{number}", "x")
                client.compact(client.get("/somebody/else/99")[1].mod_revision)
            relay.cut()
            relay.mend()
            cluster.wait_for("the leader is named", lambda: _names(cluster, behind) == "dispatcher-0", LEASE + WITHIN)
            cluster.kill("dispatcher-0")
            assert cluster.wait_leader(timeout=WITHIN) == "dispatcher-1"
            wanted = {cluster.worker("worker-1").id, cluster.worker("worker-2").id}
            cluster.wait_for("the workers that are there", lambda: _up(cluster) == wanted, 2 * LEASE)
            assert {d["name"] for d in cluster.status()["datasets"]} == {"numbers", "later"}


def _names(cluster: TestCluster, member: Member) -> str:
    """Name of the process that this dispatcher says leads."""
    reply = hello(member)
    addresses = {d.address: d.child.name for d in cluster.local.dispatchers}
    return addresses.get(f"grpc://{reply.leader}", "") if reply is not None else ""


def _up(cluster: TestCluster) -> set[str]:
    return {worker["id"] for worker in cluster.status()["workers"] if worker["state"] == "up"}


def test_up_with_two_dispatchers(tmp_path: Path) -> None:
    """``feedline up --dispatchers 2``: both are in the ready line, one of them dies and is named, the other goes on."""
    command = [sys.executable, "-m", "feedline", "up", "--dispatchers", "2", "--workers", "1"]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            document = json.loads(process.stdout.readline())
            one, two = (d["address"] for d in document["dispatchers"])
            assert document["dispatcher"] == f"{one},{two.removeprefix('grpc://')}"
            leads = [_says(d["address"]).term > 0 for d in document["dispatchers"]]
            assert sorted(leads) == [False, True]
            victim = document["dispatchers"][leads.index(True)]
            subprocess.run(["kill", "-KILL", str(victim["pid"])], check=True)
            done = subprocess.run(
                [sys.executable, "-m", "feedline", "status", "--json", "--dispatcher", document["dispatcher"], "--timeout",
                 "10s"],
                capture_output=True, text=True, timeout=30,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["dispatcher"]["term"] == 2
            named = next(line for line in process.stderr if "not restarted" in line)
            assert f"pid {victim['pid']}" in named and "dispatcher-" in named and "SIGKILL" in named
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=15)
            assert process.returncode == 0
        finally:
            if process.poll() is None:
                process.kill()


def _says(address: str) -> m.HelloReply:
    connection = Connection(parse_address(address))
    try:
        reply: m.HelloReply = connection.call(m.Hello(), m.HelloReply, 5)
        return reply
    finally:
        connection.close()
