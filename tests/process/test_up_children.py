"""Child processes: heard, ended, and gone with their parent; the cluster that tests use; the processes by hand."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from cluster import TestCluster
from stored_data import write_tar

from feedline import RemoteDataLoader
from feedline.children import Child, ChildFailed, describe, end_all, shell_status
from feedline.etcd import Etcd
from manifests import build

SLEEP = "import time; print('ready now', flush=True); time.sleep(60)"


def child(tmp_path: Path, code: str, **settings: object) -> Child:
    argv = [sys.executable, "-c", code]
    return Child("kid", argv, log=tmp_path / "logs" / "kid.log", ready=r"ready (\w+)", **settings)  # type: ignore[arg-type]


# -- children ------------------------------------------------------------------------------------------------------


def test_the_ready_line_is_heard_and_everything_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = f"import sys; print('loud', file=sys.stderr); {SLEEP}"
    kid = child(tmp_path, code, echo=sys.stderr)
    assert kid.wait_ready(10)[1] == "now" and "runs" in repr(kid)
    assert kid.end(5) == -signal.SIGTERM and "ended" in repr(kid)
    assert (tmp_path / "logs" / "kid.log").read_text() in ("loud\nready now\n", "ready now\nloud\n")
    assert capsys.readouterr().err == "kid: loud\n"


def test_a_child_that_ends_first_shows_its_last_lines(tmp_path: Path) -> None:
    for end, lines in (("sys.exit('no luck')", ["no luck"]), ("sys.exit(1)", [str(i) for i in range(88, 100)])):
        kid = child(tmp_path, f"import sys; [print(i) for i in range(100)]; {end}")
        try:
            with pytest.raises(ChildFailed, match=r"kid ended at once \(exit status 1\)") as failed:
                kid.wait_ready(10)
            assert list(failed.value.lines) == lines
        finally:
            kid.end(1)


def test_a_child_that_stays_silent_is_named_in_time(tmp_path: Path) -> None:
    kid = child(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(ChildFailed, match=r"kid was not ready within 0.3 s"):
        kid.wait_ready(0.3)
    kid.end(1)


def test_a_child_that_ignores_sigterm_or_is_stopped_ends_too(tmp_path: Path) -> None:
    stubborn = child(tmp_path, f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}")
    paused = child(tmp_path, SLEEP)
    for kid in (stubborn, paused):
        kid.wait_ready(10)
    paused.pause()
    assert psutil.Process(paused.pid).status() == psutil.STATUS_STOPPED
    start = time.monotonic()
    end_all([stubborn, paused], 0.5)
    assert time.monotonic() - start < 3
    assert stubborn.poll() == -signal.SIGKILL and paused.poll() == -signal.SIGTERM


@pytest.mark.parametrize("with_setpriv", [True, False])
def test_children_die_with_a_parent_that_is_killed(with_setpriv: bool, tmp_path: Path) -> None:
    """Case 21: SIGKILL of the parent leaves no orphan, with setpriv and without."""
    if with_setpriv and shutil.which("setpriv") is None:
        pytest.skip("no setpriv here")
    program = (
        "import shutil, sys, time\nfrom pathlib import Path\n"
        + ("" if with_setpriv else "shutil.which = lambda name: None\n")
        + "from feedline.children import Child\n"
        f"kid = Child('kid', [sys.executable, '-c', {SLEEP!r}], log=Path({str(tmp_path)!r}) / 'log', ready='ready')\n"
        "kid.wait_ready(10)\nprint(kid.pid, flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_statuses_in_words_and_as_shells_give_them() -> None:
    assert (
        describe(3) == "exit status 3"
        and describe(-9) == "killed by SIGKILL"
        and describe(-99) == "killed by signal 99"
    )
    assert shell_status(3) == 3 and shell_status(-15) == 143


# -- the cluster that tests use ------------------------------------------------------------------------------------


def texts(folder: Path, rows: int, name: str = "texts") -> Path:
    """A manifest file over one tar of ``rows`` texts."""
    folder.mkdir(exist_ok=True)
    tar = write_tar(folder / f"{name}.tar", [(f"{i:05d}.txt", f"{name} {i}".encode()) for i in range(rows)])
    build(str(tar), name=name, version="1").save(folder / f"{name}.parquet")
    return folder / f"{name}.parquet"


def test_cluster_goes_through_faults(tmp_path: Path) -> None:
    """Cases 19 and 23, in short: workers and dispatcher killed, paused, restarted, etcd restarted; nothing is lost."""
    with TestCluster(workers=2) as cluster:
        loader = RemoteDataLoader(
            cluster.address, dataset=str(texts(tmp_path, 400)), job="job", batch_size=20, shuffle=None, prefetch="64KiB"
        )
        seen: list[int] = []
        with loader:
            for step, batch in enumerate(loader):
                seen += batch["__id__"].tolist()
                if step == 3:
                    cluster.kill("worker-0")
                elif step == 6:
                    cluster.restart_dispatcher()
                elif step == 9:
                    cluster.restart_etcd()
                elif step == 12:
                    cluster.add_worker()
                    cluster.pause("worker-1")
                elif step == 15:
                    cluster.resume("worker-1")
        assert seen == list(range(400))
        books = cluster.audit("job")
        assert (books["state"], books["lost"], books["repeated"], books["acknowledged"]) == ("complete", 0, 0, 400)
        cluster.wait_workers(2)
        assert {w["state"] for w in cluster.status()["workers"] if w["id"] == cluster.workers[2].id} == {"up"}
        cluster.wipe_etcd()
        cluster.wait_for("an empty cluster", lambda: cluster.status()["jobs"] == [])
        cluster.wait_workers(2)


# -- by hand -------------------------------------------------------------------------------------------------------


@contextmanager
def program(tmp_path: Path, name: str, ready: str, *arguments: str) -> Iterator[str]:
    """``feedline NAME ARGUMENTS`` until the block ends. Yields the address of its ready line."""
    argv = [sys.executable, "-m", "feedline", name, *arguments]
    kid = Child(name, argv, log=tmp_path / f"{name}.log", ready=ready)
    try:
        yield kid.wait_ready(30)[1]
        kid.signal(signal.SIGINT)
        assert kid.process.wait(15) == 0
    finally:
        kid.end(1)


def test_the_processes_by_hand(tmp_path: Path) -> None:
    etcd = Etcd(tmp_path / "etcd", log=tmp_path / "etcd.log", fsync=False)
    etcd.start()
    try:
        listed = ["--etcd", str(etcd.address), "--store", str(tmp_path / "store"), "--listen", "127.0.0.1:0"]
        with (
            program(tmp_path, "dispatcher", r"^dispatcher (grpc://\S+)$", *listed) as dispatcher,
            program(tmp_path, "worker", r"^worker (grpc://\S+) id=\S+$", "--dispatcher", dispatcher, "--memory", "64MiB")
            as worker,
        ):  # fmt: skip
            env = {**os.environ, "FEEDLINE_DISPATCHER": dispatcher}
            manifest = texts(tmp_path / "data", 10)
            register = [sys.executable, "-m", "feedline", "manifest", "register", str(manifest)]
            for _ in range(2):
                done = subprocess.run(register, env=env, capture_output=True, text=True, timeout=60, check=True)
                assert done.stdout.startswith("texts@1 sha256:")
            with RemoteDataLoader(dispatcher, dataset="texts", job="j", batch_size=4, shuffle=None) as loader:
                assert [text for batch in loader for text in batch["txt"]] == [f"texts {i}" for i in range(10)]
            audit = [sys.executable, "-m", "feedline", "audit", "j"]
            done = subprocess.run(audit, env=env, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0 and "complete" in done.stdout, done.stderr
            # case 24: a second server on a port is refused, never shares it silently
            taken = ["worker", "--dispatcher", dispatcher, "--listen", worker.removeprefix("grpc://")]
            second = [sys.executable, "-m", "feedline", *taken]
            done = subprocess.run(second, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode != 0 and "port in use" in done.stderr and done.stdout == ""
    finally:
        etcd.stop()


def test_two_workers_of_one_id_are_told(tmp_path: Path) -> None:
    with TestCluster(workers=0) as cluster:
        listed = ["--dispatcher", cluster.address, "--memory", "64MiB", "--id", "same"]
        ready = r"^worker (grpc://\S+) id=same$"
        with (
            program(tmp_path / "one", "worker", ready, *listed),
            program(tmp_path / "two", "worker", ready, *listed),
        ):
            logs = [tmp_path / name / "worker.log" for name in ("one", "two")]
            told = "another worker with this id seems to run"
            cluster.wait_for("both were told", lambda: all(told in log.read_text() for log in logs))
            assert [log.read_text().count(told) for log in logs] == [1, 1]
