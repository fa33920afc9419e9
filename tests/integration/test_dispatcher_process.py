"""``python -m dispatcher`` on a real etcd: what it prints, how it ends, what it says when it cannot start, kill -9."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from programs import Program, ask, leader_of, wait_until

from feedline.etcd import Etcd
from manifests.errors import DispatcherUnavailable, FeedlineError
from manifests.wire import messages as m

pytestmark = pytest.mark.process


@pytest.fixture
def etcd(tmp_path):
    server = Etcd(tmp_path / "etcd", log=tmp_path / "etcd.log", fsync=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def program(tmp_path):
    made = []

    def start(*arguments, **fields):
        made.append(Program("--store", tmp_path / "store", *arguments, **fields))
        return made[-1]

    yield start
    for found in made:
        if found.process.poll() is None:
            found.process.kill()
        found.process.communicate(timeout=10)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_prints_one_line_when_it_serves_and_ends_fast_on_a_signal(etcd, program, number):
    found = program("--etcd", etcd.address, "--listen", "127.0.0.1:0")
    assert re.fullmatch(r"dispatcher grpc://127\.0\.0\.1:[0-9]+\n", found.line)
    connection = found.connection
    assert connection.call(m.Hello(), m.HelloReply).term == 1
    connection.close()
    begin = time.monotonic()
    code, out, err = found.end(number)
    assert (code, out) == (0, "") and "Traceback" not in err
    assert time.monotonic() - begin < 5
    assert all(re.search(r"\[[0-9a-f-]+\]", line) for line in err.splitlines())  # each line has a cause id


def test_case_24_bound_and_advertised_address_differ(etcd, program):
    found = program("--etcd", etcd.address, "--listen", "0.0.0.0:0", "--advertise", " 127.0.0.2:7999 ")
    assert found.line == "dispatcher grpc://127.0.0.2:7999\n"


def test_case_24_ipv6(etcd, program):
    found = program("--etcd", etcd.address, "--listen", "[::1]:0")
    connection = found.connection
    assert connection.call(m.Hello(), m.HelloReply).leader.startswith("[::1]:")
    connection.close()


def test_case_20_after_kill_9_the_next_one_leads_at_once_with_the_same_record(etcd, program):
    """The lease of the dead process still runs for 10 s, but on one host the kernel tells that it is gone."""
    port = free_port()
    first = program("--etcd", etcd.address, "--listen", f"127.0.0.1:{port}")
    with_first = first.connection
    ask(with_first, m.RegisterWorker(id="w1", incarnation="1", address="127.0.0.1:1"), m.WorkerWelcome)
    keys = ask(with_first, m.Heartbeat(id="w1", incarnation="1"), m.WorkerWelcome).keys
    first.end(signal.SIGKILL)
    with_first.close()
    begin = time.monotonic()
    second = program("--etcd", etcd.address, "--listen", f"127.0.0.1:{port}")
    assert second.line and time.monotonic() - begin < 6
    connection = second.connection
    assert not ask(connection, m.Heartbeat(id="w1", incarnation="1"), m.WorkerWelcome).known
    again = ask(connection, m.RegisterWorker(id="w1", incarnation="1", address="127.0.0.1:1"), m.WorkerWelcome)
    assert again.keys == keys and ask(connection, m.Hello(), m.HelloReply).term == 2
    connection.close()


def test_a_paused_leader_is_deposed_and_refuses_when_it_comes_back(etcd, program):
    """Case 54: SIGSTOP past the lease; the standby leads, and the old one answers nothing as leader afterwards."""
    first = program("--etcd", etcd.address, "--listen", "127.0.0.1:0", "--lease", "2s")
    second = program("--etcd", etcd.address, "--listen", "127.0.0.1:0", "--lease", "2s")
    old, new = first.connection, second.connection
    assert leader_of(old) == leader_of(new) == str(old.address)
    register = m.RegisterWorker(id="w1", incarnation="1", address="127.0.0.1:1")
    try:
        first.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: leader_of(new) == str(new.address))
        assert ask(new, register, m.WorkerWelcome).known
        first.process.send_signal(signal.SIGCONT)
        with pytest.raises(FeedlineError) as caught:
            old.call(register, m.WorkerWelcome, timeout=8)
        assert isinstance(caught.value, DispatcherUnavailable)
        # it becomes a standby that names the leader
        wait_until(lambda: leader_of(old) == str(new.address))
        with pytest.raises(DispatcherUnavailable, match=f"{new.address} leads"):
            old.call(m.GetStatus(), m.Document, timeout=8)
        assert ask(new, m.Hello(), m.HelloReply).term == 2
        assert old.call(m.Hello(), m.HelloReply, timeout=8).term == 0
    finally:
        old.close()
        new.close()


def test_it_rides_out_an_etcd_that_is_away(etcd, program):
    found = program("--etcd", etcd.address, "--listen", "127.0.0.1:0", "--lease", "3s")
    connection = found.connection
    try:
        etcd.kill()
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            try:
                connection.call(m.GetStatus(), m.Document, timeout=5)
                time.sleep(0.1)
            except DispatcherUnavailable as error:
                last = str(error)
                if str(etcd.address) in last:
                    break
        assert str(etcd.address) in last
        etcd.start()
        assert ask(connection, m.GetStatus(), m.Document, 20)
    finally:
        connection.close()


def test_a_port_in_use_is_one_line_and_exit_1(etcd, program):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        found = program("--etcd", etcd.address, "--listen", f"127.0.0.1:{port}")
        code, out, err = found.end()
    assert (code, found.line + out) == (1, "")
    last = err.strip().splitlines()[-1]
    assert "port in use" in last and str(port) in last and "Traceback" not in err


def test_etcd_not_reachable_names_the_address_and_how_long_was_tried(tmp_path, program, monkeypatch):
    port = free_port()
    code = (
        "import dispatcher.__main__ as p, dataclasses, sys\n"
        "import argparse\n"
        "parser = argparse.ArgumentParser(); p.add_arguments(parser)\n"
        f"args = parser.parse_args(['--etcd', '127.0.0.1:{port}', '--store', {str(tmp_path)!r}, '--listen', '127.0.0.1:0'])\n"
        "sys.exit(p.serve(dataclasses.replace(p.config_from(args), start_timeout=2.0)))\n"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and time.monotonic() - begin < 15
    last = done.stderr.strip().splitlines()[-1]
    assert f"etcd at 127.0.0.1:{port} does not answer: tried for 2 s" in last and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [[], ["--etcd", "nowhere"], ["--etcd", "a:1", "--lease", "0s"], ["--etcd", "a:1", "--listen", "x"], ["--nope"]],
)
def test_misuse_is_exit_2(arguments):
    done = subprocess.run([sys.executable, "-m", "dispatcher", *arguments], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr


def test_it_ends_with_its_parent(etcd, tmp_path):
    """Case 21: the parent is killed; with --die-with-parent nothing is left."""
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-m', 'dispatcher', *sys.argv[1:]], stdout=subprocess.PIPE, text=True)\n"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)\n"
    )
    arguments = ["--etcd", str(etcd.address), "--listen", "127.0.0.1:0", "--store", str(tmp_path), "--die-with-parent"]
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate(timeout=10)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "Z":
                return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the dispatcher outlived its parent")
