"""The worker as a process: its options, its ready line, its place at the dispatcher, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from worker_kit import Stored, write_arrow

from dispatcher.config import DispatcherConfig
from dispatcher.main import Dispatcher
from dispatcher.memory_store import MemoryBackend, MemoryStore
from manifests.identity import digest
from manifests.scan.local import uri_of
from manifests.wire import codec
from manifests.wire import messages as m
from manifests.wire.connection import Address, parse_address
from manifests.wire.flight import Connection

pytestmark = pytest.mark.process


class Process:
    """``python -m worker`` with its output lines."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "worker", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._pump, args=(self.process.stdout, self.out)),
            threading.Thread(target=self._pump, args=(self.process.stderr, self.err)),
        ]
        for thread in self._threads:
            thread.start()

    def _pump(self, stream, lines: list[str]) -> None:  # type: ignore[no-untyped-def]
        for line in stream:
            lines.append(line.rstrip())
            self._lines.put(line.rstrip())

    def wait_line(self, pattern: str, timeout: float = 20) -> re.Match[str]:
        """The next line of either stream that ``pattern`` is found in."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line {pattern!r} in {self.err + self.out}") from None
            if found := re.search(pattern, line):
                return found

    def end(self, timeout: float = 15) -> int:
        """Wait for the end; the exit status."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            for thread in self._threads:
                thread.join(5)
            self.process.stdout.close()  # type: ignore[union-attr]
            self.process.stderr.close()  # type: ignore[union-attr]
        return status

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.end()


@contextlib.contextmanager
def started(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Process]:
    made = Process(*arguments, env=env)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
            made.end()


@contextlib.contextmanager
def dispatcher(store: Path, listen: str = "127.0.0.1:0", backend: MemoryBackend | None = None) -> Iterator[Dispatcher]:
    config = DispatcherConfig(etcd=(Address("127.0.0.1", 1),), store=store, listen=parse_address(listen), lease=3.0)
    leading = threading.Event()
    made = Dispatcher(config, MemoryStore(backend or MemoryBackend()), lambda address: leading.set())
    try:
        assert leading.wait(10)
        yield made
    finally:
        made.close()


def workers(made: Dispatcher) -> dict[str, dict[str, str]]:
    connection = Connection(made.address)
    try:
        document = json.loads(connection.call(m.GetStatus(), m.Document).json)
    finally:
        connection.close()
    return {worker["id"]: worker for worker in document["workers"]}


def until(check, what: str, timeout: float = 15) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout
    while not check():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.05)


READY = r"^worker (grpc://\S+) id=(\S+)$"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_registers_and_signs_off(tmp_path: Path, number: int) -> None:
    with dispatcher(tmp_path) as made, started("--dispatcher", str(made.address), "--memory", "32MiB") as process:
        address, name = process.wait_line(READY).groups()
        assert re.fullmatch(r"w-[0-9a-f]{8}", name)
        assert process.out == [f"worker {address} id={name}"]
        assert list(workers(made)) == [name]
        connection = Connection(parse_address(address))
        reply = connection.call(m.Hello(), m.HelloReply)
        connection.close()
        assert (reply.role, reply.id) == ("worker", name)
        began = time.monotonic()
        assert process.stop(number) == 0
        assert time.monotonic() - began < 5
        assert workers(made) == {}
        assert not [line for line in process.err if "Traceback" in line]


def test_the_address_may_come_from_the_environment(tmp_path: Path) -> None:
    with (
        dispatcher(tmp_path) as made,
        started("--id", "w-env", env={"FEEDLINE_DISPATCHER": f"127.0.0.1:1, {made.address}"}) as process,
    ):
        assert process.wait_line(READY)[2] == "w-env"
        assert process.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "FEEDLINE_DISPATCHER"),
        (["--dispatcher", "nowhere"], "HOST:PORT"),
        (["--dispatcher", "a:1", "--memory", "12"], "too little"),
        (["--dispatcher", "a:1", "--memory", "much"], "not a size"),
        (["--dispatcher", "a:1", "--device", "gpu:0"], "comes later"),
        (["--dispatcher", "a:1", "--threads", "0"], "--threads 0"),
        (["--dispatcher", "a:1", "--id", "a b"], "'a b'"),
        (["--dispatcher", "a:1", "--listen", "127.0.0.1"], "--listen"),
        (["--dispatcher", "a:1", "--lease", "soon"], "--lease"),
        (["--bogus"], "--bogus"),
    ],
)
def test_misuse_is_one_line_and_exit_2(arguments: list[str], word: str) -> None:
    with started(*arguments) as process:
        assert process.end() == 2
        assert word in process.err[-1]
        assert not [line for line in process.err if "Traceback" in line]


def test_a_port_in_use_is_named_case_24(tmp_path: Path) -> None:
    """case 24: the second worker on one port ends with "port in use", it does not share it."""
    with dispatcher(tmp_path) as made, started("--dispatcher", str(made.address)) as first:
        port = parse_address(first.wait_line(READY)[1]).port
        with started("--dispatcher", str(made.address), "--listen", f"127.0.0.1:{port}") as second:
            assert second.end() == 1
            assert re.search(rf"^error: .*127.0.0.1:{port}.*port in use", second.err[-1])
        assert first.stop() == 0


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--listen", "0.0.0.0:0", "--advertise", "127.0.0.2"], r"127\.0\.0\.2:[1-9]\d*"),
        (["--listen", "0.0.0.0:0", "--advertise", "127.0.0.2:0"], r"127\.0\.0\.2:[1-9]\d*"),
        (["--advertise", " example.test:99 "], r"example\.test:99"),
        (["--listen", "0.0.0.0:0"], r"(?!0\.0\.0\.0).+:[1-9]\d*"),
    ],
)
def test_what_is_advertised_case_24(tmp_path: Path, options: list[str], wanted: str) -> None:
    """case 24: bound and advertised address are two things; port 0 stands for the real one."""
    with dispatcher(tmp_path) as made, started("--dispatcher", str(made.address), *options) as process:
        address, name = process.wait_line(READY).groups()
        assert re.fullmatch("grpc://" + wanted, address)
        assert workers(made)[name]["address"] == address.removeprefix("grpc://")
        assert process.stop() == 0


def test_registers_again_by_itself_case_23(tmp_path: Path) -> None:
    """case 23: the dispatcher goes away and comes back, with and without its data; an outage is logged once."""
    backend = MemoryBackend()
    with dispatcher(tmp_path / "a", backend=backend) as made:
        listen = str(made.address)
        process = Process("--dispatcher", f"127.0.0.1:1,{listen}", "--id", "w-1")
        try:
            process.wait_line(READY)
        except BaseException:
            process.process.kill()
            process.end()
            raise
    try:
        time.sleep(3)
        for store in (backend, MemoryBackend()):
            with dispatcher(tmp_path / "b", listen=listen, backend=store) as made:
                until(lambda made=made: "w-1" in workers(made), "registered again")
                if store is not backend:
                    assert process.stop() == 0
        lost = [line for line in process.err if "no dispatcher" in line]
        assert 1 <= len(lost) <= 2, process.err  # the second outage may be shorter than a heartbeat
        assert len([line for line in process.err if "answers again after" in line]) == len(lost)
    finally:
        if process.process.poll() is None:
            process.process.kill()
            process.end()


def test_waits_for_a_dispatcher_that_is_not_there_yet(tmp_path: Path) -> None:
    with dispatcher(tmp_path) as made:
        listen = str(made.address)
    with started("--dispatcher", listen) as process:
        process.wait_line("no dispatcher")
        assert not process.out
        with dispatcher(tmp_path, listen=listen):
            process.wait_line(READY)
            assert process.stop() == 0


def test_told_to_drain_it_ends(tmp_path: Path) -> None:
    with dispatcher(tmp_path) as made, started("--dispatcher", str(made.address)) as process:
        name = process.wait_line(READY)[2]
        connection = Connection(made.address)
        connection.call(m.DrainWorker(id=name), m.Done)
        connection.close()
        until(lambda: workers(made)[name]["state"] == "draining", "draining")
        assert process.end(20) == 0
        assert workers(made) == {}


@contextlib.contextmanager
def reading(
    made: Dispatcher, address: str, name: str, folder: Path
) -> Iterator[Iterator[tuple[pa.RecordBatch, object]]]:
    """A read of 40 MB in 2000 rows on the worker, with a grant signed by the dispatcher's own key."""
    write_arrow(folder / "a.arrow", pa.table({"x": pa.array(["v" * 20_000] * 2000, pa.large_string())}))
    stored = Stored.of(folder / "a.arrow", "arrow")
    control, data = Connection(made.address), Connection(parse_address(address))
    try:
        spec = codec.encode(m.JobSpec(fields=(stored.fields,), labels=({},)))
        control.call(m.PutBlob(digest=digest(spec), data=spec), m.Done)
        spy = m.RegisterWorker(id="spy", incarnation="1", address="127.0.0.1:9")
        welcome = control.call(spy, m.WorkerWelcome)
        control.call(m.LeaveWorker(id="spy", incarnation="1"), m.Done)
        key, secret = next(iter(welcome.keys.items()))
        grant = m.Grant(
            job="j", tenant="t", generation=1, rank=0, epoch=0, seed=0, source=0, manifest="m", spec=digest(spec),
            shard=0, uri=uri_of(stored.path), format="arrow", rows=2000, bytes=stored.size,
            content_id=stored.content_id, first_id=0, last_row=2000, workers=(name,), expires_ms=welcome.now_ms + 60_000,
        )  # fmt: skip
        yield iter(data.read(codec.encode(m.ReadTicket(grants=(codec.sign(grant, key, secret),)))))
    finally:
        control.close()
        data.close()


def test_finishes_a_read_before_it_ends(tmp_path: Path) -> None:
    with dispatcher(tmp_path / "store") as made, started("--dispatcher", str(made.address)) as process:
        address, name = process.wait_line(READY).groups()
        with reading(made, address, name, tmp_path) as stream:
            rows = next(stream)[0].num_rows
            process.process.send_signal(signal.SIGTERM)
            process.wait_line("finishes 1 reads")
            rows += sum(batch.num_rows for batch, _ in stream)
            assert rows == 2000
            assert process.end() == 0


def test_a_second_signal_ends_it_though_a_client_takes_nothing(tmp_path: Path) -> None:
    with dispatcher(tmp_path / "store") as made, started("--dispatcher", str(made.address)) as process:
        address, name = process.wait_line(READY).groups()
        with reading(made, address, name, tmp_path) as stream:
            next(stream)
            process.process.send_signal(signal.SIGTERM)
            process.wait_line("finishes 1 reads")
            process.process.send_signal(signal.SIGTERM)
            assert process.end(12) == 0
            assert workers(made) == {}


def test_ends_with_its_parent() -> None:
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-m', 'worker', '--dispatcher', '127.0.0.1:1', '--die-with-parent'])\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stderr is not None
    try:
        pid = int(parent.stdout.readline())
        for line in parent.stderr:
            if "serves at" in line:
                break
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        parent.stderr.close()
    until(lambda: _gone(pid), "the worker ended")


def _gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_options_without_an_effect_yet_say_so(tmp_path: Path) -> None:
    with dispatcher(tmp_path) as leader:
        arguments = ("--dispatcher", str(leader.address), "--allow", "steps.mine", "--path", str(tmp_path))
        with started(*arguments) as process:
            process.wait_line("--allow and --path .* no effect yet")
            process.wait_line(r"^worker grpc://")
            assert process.stop() == 0
