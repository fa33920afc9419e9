"""Child processes of ``feedline up`` and of the tests: started, heard, ended, and never left behind.

A child dies with its parent, also when that is killed with SIGKILL: the kernel sends the signal (``PR_SET_PDEATHSIG``).
It does so when the *thread* that started the child ends, so start children from the main thread. Each child has a
session of its own, so that Ctrl-C reaches only the parent, which ends its children in order.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal, TextIO

#: lines of a child's log that an error shows
LAST_LINES = 12
#: seconds to wait for a child's output to end after the child did
_JOIN = 2.0

_WRAPPER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class ChildFailed(Exception):
    """A child ended, or did not say that it is ready, within its time. ``lines``: the end of its log."""

    def __init__(self, name: str, what: str, log: Path, lines: Sequence[str]) -> None:
        self.name = name
        self.what = what
        self.log = log
        self.lines = tuple(lines)
        super().__init__(f"{name} {what}")


def dies_with_parent(argv: Sequence[str]) -> list[str]:
    """The command line that runs ``argv`` so that it is killed when the starting thread ends (Linux; else ``argv``)."""
    if sys.platform != "linux":
        return list(argv)
    if setpriv := shutil.which("setpriv"):
        return [setpriv, "--pdeathsig", "KILL", *argv]
    return [sys.executable, "-I", "-S", "-c", _WRAPPER, *argv]


class Child:
    """One running child.

    Args:
        name: how messages name it.
        argv: its command line.
        log: file that gets what it writes to ``stderr`` and ``stdout``, appended.
        ready: the first line that this pattern is found in says that the child serves.
        ready_on: the stream that line comes on.
        env: its environment, None: ours.
        cwd: its folder, None: ours.
        echo: also write its stderr here, each line behind its name.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        ready: str,
        ready_on: Literal["stdout", "stderr"] = "stdout",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        echo: TextIO | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self._ready = re.compile(ready)
        self._ready_on = ready_on
        self._echo = echo
        self._match: re.Match[str] | None = None
        self._last = {kind: deque[str](maxlen=LAST_LINES) for kind in ("stdout", "stderr")}
        self._heard = threading.Event()
        self._lock = threading.Lock()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = open(log, "a", encoding="utf-8", errors="replace", buffering=1)  # noqa: SIM115 (closed in join)
        try:
            self.process = subprocess.Popen(
                dies_with_parent(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=None if env is None else dict(env),
                cwd=cwd,
                start_new_session=True,
                encoding="utf-8",
                errors="replace",
            )
        except BaseException:
            self._file.close()
            raise
        self._open = 2
        self._threads = [
            threading.Thread(target=self._drain, args=(stream, kind), name=f"{name}-{kind}", daemon=True)
            for stream, kind in ((self.process.stdout, "stdout"), (self.process.stderr, "stderr"))
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        status = self.process.poll()
        return f"Child({self.name}, pid={self.pid}, {'runs' if status is None else f'ended {status}'})"

    @property
    def pid(self) -> int:
        """Its process id (the wrapper that sets the death signal becomes the child)."""
        return self.process.pid

    def _drain(self, stream: IO[str], kind: str) -> None:
        """Keep the child's pipe empty. Runs until the child closes it."""
        try:
            for line in stream:
                self._hear(line, kind)
        finally:
            with self._lock:
                self._open -= 1
                last = self._open == 0
            if last:
                self._heard.set()

    def _hear(self, line: str, kind: str) -> None:
        with self._lock:
            self._last[kind].append(line.rstrip())
            first = self._match is None and kind == self._ready_on
            if first:
                self._match = self._ready.search(line)
        self._file.write(line)
        if self._echo is not None and kind == "stderr":
            # one write per line, so that lines of several children do not mix
            self._echo.write(f"{self.name}: {line}")
            self._echo.flush()
        if first and self._match is not None:
            self._heard.set()

    def wait_ready(self, timeout: float) -> re.Match[str]:
        """The match of the ready line. Raises ``ChildFailed`` when the child ends first or stays silent."""
        self._heard.wait(timeout)
        with self._lock:
            match = self._match
        if match is not None:
            return match
        status = self.process.poll()
        if status is None and self._heard.is_set():
            # both pipes are closed: it is about to end
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.process.wait(_JOIN)
        what = f"was not ready within {timeout:g} s" if status is None else f"ended at once ({describe(status)})"
        raise ChildFailed(self.name, what, self.log, self.last_lines())

    def last_lines(self) -> list[str]:
        """The end of what it wrote to stderr; if that is nothing, to stdout."""
        with self._lock:
            return list(self._last["stderr"] or self._last["stdout"])

    def poll(self) -> int | None:
        """Exit status (minus the signal's number), None while it runs."""
        return self.process.poll()

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def pause(self) -> None:
        """SIGSTOP, and wait until no thread of it runs any more (the kernel needs a moment)."""
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + _JOIN
        while _runs(self.pid) and time.monotonic() < deadline:
            time.sleep(0.001)

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def end(self, grace: float) -> int:
        """SIGTERM, then SIGKILL to what still runs after ``grace`` seconds. Returns the exit status."""
        end_all([self], grace)
        status = self.process.poll()
        return 0 if status is None else status

    def join(self) -> None:
        """Wait for its output to end, and close the log. Call after it has ended."""
        deadline = time.monotonic() + _JOIN
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            # a grandchild holds the pipe; its output is of no more interest
            return
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self._file.close()


def _runs(pid: int) -> bool:
    """Is any thread of the process not stopped? False where the system does not tell."""
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            # the state follows the name, which may hold anything, in brackets
            if task.read_text().rpartition(")")[2].split()[0] not in ("T", "t", "Z", "X"):
                return True
    return False


def end_all(children: Sequence[Child], grace: float) -> None:
    """SIGTERM to all, SIGKILL to those that still run after ``grace`` seconds; returns when all have ended."""
    for child in children:
        if child.poll() is None:
            # a stopped process takes the signal only when it goes on
            child.signal(signal.SIGTERM)
            child.signal(signal.SIGCONT)
    deadline = time.monotonic() + grace
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.01, deadline - time.monotonic()))
    for child in children:
        if child.poll() is None:
            child.signal(signal.SIGKILL)
    for child in children:
        child.process.wait()
        child.join()


def describe(status: int) -> str:
    """``exit status 1`` or ``killed by SIGKILL``."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"


def shell_status(status: int) -> int:
    """An exit status as shells give it: 128 + n for signal n."""
    return 128 - status if status < 0 else status


class Janitor:
    """Removes a temporary folder when this process is gone, however it went.

    A small shell waits for the end of a pipe that only this process holds open, so it also notices SIGKILL.
    """

    _SCRIPT = 'trap "" INT TERM HUP; cat >/dev/null; for i in 1 2 3 4 5; do rm -rf -- "$1" && exit 0; sleep 0.3; done'

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", self._SCRIPT, "feedline-janitor", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def close(self) -> None:
        """Remove the folder now and wait for that."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def on_signals(callback: Callable[[int], None], *numbers: int) -> Callable[[], None]:
    """Call ``callback`` for these signals; returns what puts the former handlers back. Main thread only."""
    before = {number: signal.signal(number, lambda number, _frame: callback(number)) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return restore


def python_command(module: str, *arguments: str) -> list[str]:
    """Run one of our modules with this interpreter, whatever lies in the current folder (``-P``)."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(**extra: str) -> dict[str, str]:
    """Our environment with ``extra`` and unbuffered output."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", **extra}
