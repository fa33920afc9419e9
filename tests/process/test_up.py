"""``feedline up``: what it prints, how it ends, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from stored_data import write_tar

from manifests import build

FEEDLINE = [sys.executable, "-m", "feedline"]
END_WITHIN = 10.0
CLEAN_WITHIN = 5.0


@contextmanager
def up(*arguments: str, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*FEEDLINE, "up", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


def ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate(timeout=20)[1]
    document: dict[str, Any] = json.loads(line)
    return document


def pids(document: dict[str, Any]) -> list[int]:
    return [part["pid"] for kind in ("etcd", "dispatchers", "workers") for part in document[kind]]


def ports(document: dict[str, Any]) -> list[int]:
    found = [part["address"] for kind in ("etcd", "dispatchers", "workers") for part in document[kind]]
    return [int(address.rpartition(":")[2]) for address in found]


def assert_clean(document: dict[str, Any], *, folder: bool = True) -> None:
    """No process, no listening socket, no temporary folder of it within the time stated."""
    deadline = time.monotonic() + CLEAN_WITHIN
    while True:
        left: list[object] = [pid for pid in pids(document) if psutil.pid_exists(pid)]
        left += [port for port in ports(document) if listens(port)]
        if folder and Path(document["data_dir"]).exists():
            left.append(document["data_dir"])
        if not left:
            return
        assert time.monotonic() < deadline, f"left after {CLEAN_WITHIN:g} s: {left}"
        time.sleep(0.05)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def feedline(*line: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FEEDLINE, *line], capture_output=True, text=True, timeout=60, env={**os.environ, **env}, check=False
    )


def test_text_output_and_sigint(tmp_path: Path) -> None:
    with up("--workers", "1", cwd=tmp_path) as process:
        assert process.stdout is not None
        first, second = process.stdout.readline(), process.stdout.readline()
        assert first.startswith("dispatcher grpc://127.0.0.1:")
        assert second.startswith("ready: 1 workers, etcd http://127.0.0.1:") and second.endswith(f"pid {process.pid}\n")
        address = first.split()[1]
        done = feedline("status", "--json", FEEDLINE_DISPATCHER=address)
        document = json.loads(done.stdout)
        assert done.returncode == 0 and document["schema"] == 1
        assert set(document) >= {"dispatcher", "etcd", "workers", "jobs", "datasets"}
        assert set(document["dispatcher"]) >= {"address", "leader", "term"}
        assert document["etcd"].keys() >= {"members", "ok", "db_bytes"} and document["etcd"]["ok"] is True
        (worker,) = document["workers"]
        assert worker["state"] == "up" and set(worker) >= {"id", "address", "state", "capabilities", "cache_bytes"}
        for command in ("status", "jobs", "workers"):
            done = feedline(command, address)
            assert done.returncode == 0 and done.stdout and not done.stderr
        done = feedline("audit", "nothing", "--dispatcher", address)
        assert done.returncode == 2 and "nothing" in done.stderr and "(feedline jobs lists them)" in done.stderr
        done = feedline("drain", "nothing", "--dispatcher", address)
        assert done.returncode == 2 and "nothing" in done.stderr and "(feedline workers lists them)" in done.stderr
        done = feedline("drain", worker["id"], "--dispatcher", address)
        assert done.returncode == 0 and done.stdout == f"draining {worker['id']}\n"
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        rest, log = process.communicate(timeout=END_WITHIN)
        assert process.returncode == 0 and time.monotonic() - start < END_WITHIN
        assert rest == "" and "Traceback" not in log
        assert "dispatcher-0: " in log and "worker-0: " in log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_every_signal_ends_clean(number: int) -> None:
    """Case 21, for the local cluster: children, ports and the temporary folder go with it, also on SIGKILL."""
    with up("--json", "--workers", "2") as process:
        document = ready(process)
        assert document["event"] == "ready" and document["schema"] == 1
        assert document["dispatcher"] == document["dispatchers"][0]["address"]
        assert [set(worker) for worker in document["workers"]] == [{"id", "address", "pid"}] * 2
        assert all(psutil.pid_exists(pid) for pid in pids(document))
        process.send_signal(number)
        assert process.wait(END_WITHIN) == (0 if number != signal.SIGKILL else -signal.SIGKILL)
        assert_clean(document)


def test_signal_while_starting_ends_clean(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    for delay in (0.3, 0.6, 0.9):
        with up("--workers", "2", env=env) as process:
            time.sleep(delay)
            process.send_signal(signal.SIGTERM)
            assert process.wait(END_WITHIN) == 0
    deadline = time.monotonic() + CLEAN_WITHIN
    while {child.pid for child in psutil.Process().children(recursive=True)} - before or list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_killed_children_are_named_and_it_runs_on() -> None:
    with up("--json", "--workers", "2") as process:
        document = ready(process)
        victim = document["workers"][1]["pid"]
        os.kill(victim, signal.SIGKILL)
        assert process.stderr is not None
        line = next(line for line in process.stderr if "ended" in line)
        assert f"worker-1 (pid {victim}) ended: killed by SIGKILL; not restarted" in line
        assert psutil.pid_exists(document["workers"][0]["pid"]) and process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=END_WITHIN)
        assert process.returncode == 0
        assert_clean(document)


def test_frozen_children_do_not_hold_it_up() -> None:
    with up("--json", "--workers", "1") as process:
        document = ready(process)
        for pid in pids(document):
            os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=END_WITHIN)
        assert process.returncode == 0 and time.monotonic() - start < END_WITHIN
        assert_clean(document)


def test_killed_whole_and_started_again(tmp_path: Path) -> None:
    """Case 20, for the local cluster: after kill -9 of everything the next start works, on the same data folder too."""
    data = tmp_path / "data"
    term = 0
    for _ in range(3):
        with up("--json", "--workers", "1", "--data-dir", str(data)) as process:
            document = ready(process)
            assert document["data_dir"] == str(data.resolve())
            assert (data.stat().st_mode & 0o777) == 0o700 and (data / "etcd").stat().st_mode & 0o077 == 0
            status = json.loads(feedline("status", "--json", "--dispatcher", document["dispatcher"]).stdout)
            assert status["dispatcher"]["term"] > term
            term = status["dispatcher"]["term"]
            tree = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
            for pid in tree:
                os.kill(pid, signal.SIGKILL)
            process.wait(END_WITHIN)
            assert_clean(document, folder=False)
    assert {path.name for path in (data / "logs").iterdir()} == {"etcd.log", "dispatcher-0.log", "worker-0.log"}


def test_temporary_folders_of_dead_owners_are_removed(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with up("--json", "--workers", "0", env=env) as process:
        document = ready(process)
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait(END_WITHIN)
    orphan = Path(document["data_dir"])
    assert orphan.is_dir()
    with up("--json", "--workers", "0", env=env) as process:
        live = Path(ready(process)["data_dir"])
        assert not orphan.exists() and live.is_dir()
        with up("--json", "--workers", "0", env=env) as second:
            ready(second)
            assert live.is_dir()
            second.send_signal(signal.SIGINT)
            second.communicate(timeout=END_WITHIN)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=END_WITHIN)
    assert not live.exists()


def test_a_data_folder_serves_one_cluster_at_a_time(tmp_path: Path) -> None:
    with up("--json", "--workers", "0", "--data-dir", str(tmp_path)) as process:
        ready(process)
        done = feedline("up", "--data-dir", str(tmp_path))
        assert done.returncode == 2 and f"in use: by process {process.pid}" in done.stderr
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=END_WITHIN)


def test_a_child_that_cannot_start_is_exit_1_with_its_log() -> None:
    """Case 24, for the dispatcher: a port in use is an error, never shared silently."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = feedline("up", "--listen", f"127.0.0.1:{port}")
        assert done.returncode == 1 and done.stdout == ""
        last = done.stderr.splitlines()[-1]
        assert last.startswith("feedline: dispatcher-0 ended at once (exit status") and "port in use" in last
        # the log is gone with the temporary folder
        assert "dispatcher-0.log" not in last
        done = feedline("up", "--listen", f"127.0.0.1:{port}", "--json")
        assert done.returncode == 1
        error = json.loads(done.stderr.splitlines()[-1])["error"]
        assert "port in use" in error["message"]


def test_a_broken_etcd_is_exit_1_with_its_log(tmp_path: Path) -> None:
    broken = tmp_path / "etcd"
    broken.write_text("#!/bin/sh\necho no luck today >&2\nexit 7\n")
    broken.chmod(0o755)
    done = feedline("up", "--etcd-binary", str(broken))
    assert done.returncode == 1
    assert "etcd ended at once (exit status 7): no luck today" in done.stderr


def test_a_command_runs_with_the_address_and_gives_its_status(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    # a user's own worker.py beside the script must not be what `up` runs
    (tmp_path / "worker.py").write_text("raise SystemExit('not this one')\n")
    script.write_text(
        "import os, sys\nprint('address', os.environ['FEEDLINE_DISPATCHER'], sys.argv[1:])\nsys.exit(7)\n"
    )
    done = subprocess.run(
        [*FEEDLINE, "up", "--workers", "1", "--", sys.executable, str(script), "--json", "--", "-x"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert done.returncode == 7, done.stderr
    address = lines[0].split()[1]
    assert lines[2] == f"address {address} ['--json', '--', '-x']"
    done = feedline("up", "--workers", "0", "--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    assert done.returncode == 128 + signal.SIGKILL


def test_a_signal_ends_the_command_too(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with up("--workers", "0", "--json", "--", sys.executable, "-c", code) as process:
        document = ready(process)
        deadline = time.monotonic() + 10
        while not (mark.exists() and mark.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=END_WITHIN)
        assert process.returncode == 128 + signal.SIGTERM and time.monotonic() - start < END_WITHIN
        assert not psutil.pid_exists(int(mark.read_text()))
        assert_clean(document)


def started(process: subprocess.Popen[str], mark: Path) -> dict[str, Any]:
    """The ready document, once the command wrote its pid to ``mark``."""
    document = ready(process)
    deadline = time.monotonic() + 10
    while not (mark.exists() and mark.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return document


SAVES = """
import os, pathlib, signal, sys, time
mark, dispatcher = pathlib.Path(sys.argv[1]), os.environ["FEEDLINE_DISPATCHER"]
got = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: got.append(number))
mark.write_text(str(os.getpid()))
while not got:
    time.sleep(0.02)
time.sleep(float(sys.argv[2]))
from feedline.client import Client
from manifests.wire import messages as m
from manifests.wire.connection import parse_addresses
with Client(parse_addresses(dispatcher)) as client:
    workers = [w["state"] for w in client.document(m.GetStatus())["workers"]]
mark.with_name("saved").write_text(f"{got} {workers}")
sys.exit(5)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_has_time_to_save_and_the_cluster_stays(number: int, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    with up("--workers", "1", "--json", "--", sys.executable, "-c", SAVES, str(mark), "5") as process:
        document = started(process, mark)
        start = time.monotonic()
        process.send_signal(number)
        process.communicate(timeout=END_WITHIN + 2)
        # its own status, and it got the signal once
        assert process.returncode == 5 and time.monotonic() - start < END_WITHIN
        assert (tmp_path / "saved").read_text() == f"[{int(number)}] ['up']"
        assert_clean(document)


def test_a_command_that_does_not_end_is_killed_in_time(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    line = f"trap '' TERM INT; echo $$ >{mark}; sleep 47; true"
    with up("--workers", "1", "--json", "--", "sh", "-c", line) as process:
        document = started(process, mark)
        # frozen children need killing too
        for pid in pids(document):
            os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=END_WITHIN + 2)
        assert process.returncode == 128 + signal.SIGKILL and 6 < time.monotonic() - start < END_WITHIN
        assert_clean(document)
        assert not group_of(mark)


def group_of(mark: Path) -> list[psutil.Process]:
    """What runs in the process group of the pid in ``mark``."""
    group = int(mark.read_text())
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, None])
def test_what_the_command_started_ends_with_it(number: int | None, tmp_path: Path) -> None:
    """Also when ``up`` is killed, and when the command leaves something behind (None)."""
    mark = tmp_path / "pid"
    line = f"sleep 43 & echo $$ >{mark}; sleep {'0.5' if number is None else '43'}; exit 3"
    with up("--workers", "0", "--json", "--", "sh", "-c", line) as process:
        document = started(process, mark)
        assert len(group_of(mark)) >= 2
        if number is not None:
            process.send_signal(number)
        process.wait(END_WITHIN)
        wanted = 3 if number is None else -number if number == signal.SIGKILL else 128 + number
        assert process.returncode == wanted
        assert_clean(document)
        deadline = time.monotonic() + CLEAN_WITHIN
        while group_of(mark):
            assert time.monotonic() < deadline, group_of(mark)
            time.sleep(0.05)


def test_the_terminals_interrupt_reaches_the_command_once(tmp_path: Path) -> None:
    """Ctrl-C on a terminal that ``up`` is in the foreground of."""
    mark = tmp_path / "pid"
    argv = [*FEEDLINE, "up", "--workers", "1", "--", sys.executable, "-c", SAVES, str(mark), "0.5"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(argv[0], argv)
    try:
        deadline = time.monotonic() + 30
        while not (mark.exists() and mark.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.write(terminal, b"\x03")
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            assert time.monotonic() < deadline
            with suppress(OSError):
                if select.select([terminal], [], [], 0.05)[0]:
                    os.read(terminal, 4096)
        assert os.waitstatus_to_exitcode(ended[1]) == 5
        pid = 0
        assert (tmp_path / "saved").read_text() == f"[{int(signal.SIGINT)}] ['up']"
    finally:
        os.close(terminal)
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.mark.slow
def test_an_etcd_that_is_away_is_what_status_says() -> None:
    with up("--json", "--workers", "0") as process:
        document = ready(process)
        os.kill(document["etcd"][0]["pid"], signal.SIGKILL)
        # it answers from memory until its lease is over
        deadline = time.monotonic() + 30
        status = ("status", "--dispatcher", document["dispatcher"], "--timeout", "1s")
        while "cannot answer now" not in feedline(*status).stderr:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        for line in (("status",), ("audit", "j")):
            done = feedline(*line, "--dispatcher", document["dispatcher"], "--timeout", "2s")
            assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
            assert "cannot answer now: etcd at" in done.stderr and "(start etcd, or see" in done.stderr, done.stderr
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=END_WITHIN)
        assert process.returncode == 0


def test_datasets_are_registered_before_it_is_ready(tmp_path: Path) -> None:
    files = []
    for name in ("one", "two"):
        write_tar(tmp_path / f"{name}.tar", [(f"{i}.txt", f"{name} {i}".encode()) for i in range(5)])
        build(str(tmp_path / f"{name}.tar"), name=name, version="1").save(tmp_path / f"{name}.parquet")
        files += ["--register", str(tmp_path / f"{name}.parquet")]
    with up("--json", "--workers", "1", *files) as process:
        document = ready(process)
        status = json.loads(feedline("status", "--json", "--dispatcher", document["dispatcher"]).stdout)
        assert [(d["name"], d["version"], d["rows"]) for d in status["datasets"]] == [("one", "1", 5), ("two", "1", 5)]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=END_WITHIN)
        assert process.returncode == 0


def test_variables_for_etcd_do_not_reach_the_embedded_one() -> None:
    """ETCD_* of the surroundings would contradict the arguments it is started with."""
    done = subprocess.run(
        [sys.executable, "-m", "feedline", "up", "--workers", "0", "--", "true"],
        env={**os.environ, "ETCD_NAME": "x", "ETCD_DATA_DIR": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
