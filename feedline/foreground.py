"""The command that ``feedline up -- CMD`` runs: in a session of its own, signalled and ended as a whole.

A session of its own keeps what CMD starts in one process group that holds nothing else, and keeps a terminal's Ctrl-C
from it: that reaches only ``up``, which passes it on, so CMD gets it once. CMD still reads and writes the terminal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .children import dies_with_parent, shell_status

_PAUSE = 0.05
#: seconds that killed processes get to disappear
_GONE = 1.0


class _Guard:
    """Kills a process group when this process is gone, however it went: a small shell waits for the end of a pipe.

    The last line it got is the group's number; empty: nothing to kill.
    """

    _SCRIPT = 'trap "" INT TERM HUP; while read -r line; do group=$line; done; [ -z "$group" ] || kill -KILL "-$group"'

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", self._SCRIPT, "feedline-guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "group": ""},
            start_new_session=True,
            cwd="/",
        )

    def watch(self, group: int | None) -> None:
        """Kill this group at the end; None: none."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(b"\n" if group is None else b"%d\n" % group)
                self._process.stdin.flush()

    def close(self) -> None:
        """End it; the group is left alone."""
        self.watch(None)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Foreground:
    """A running command. Start it from the main thread, as it dies with the thread that starts it; ``end`` it.

    Args:
        argv: its command line.
        env: its environment.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        # before the command, so that nothing of it is ever unwatched for long
        self._guard = _Guard()
        try:
            self._process = subprocess.Popen(dies_with_parent(argv), env=dict(env), start_new_session=True)
        except BaseException:
            self._guard.close()
            raise
        self._guard.watch(self.pid)

    def __repr__(self) -> str:
        return f"Foreground(pid={self.pid})"

    @property
    def pid(self) -> int:
        """Its process id, also the number of its group and session."""
        return self._process.pid

    def runs(self) -> bool:
        """Does the command itself run? It is not waited for, so that its number stays that of the group."""
        if self._process.returncode is not None:
            return False
        if not hasattr(os, "waitid"):
            return self._process.poll() is None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def group_runs(self) -> bool:
        """Does anything of its group run?"""
        if not Path("/proc/self/stat").exists():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, 0)
                return True
            return False
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                # state, parent, group and session follow the name, which may hold anything, in brackets
                state, _, group, session = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
                if int(group) == int(session) == self.pid and state not in ("Z", "X"):
                    return True
        return False

    def signal(self, number: int) -> None:
        """Send a signal to all of its group, as a terminal does."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def end(self, grace: float) -> int:
        """End what is left of it: SIGTERM, ``grace`` seconds (0: no SIGTERM), SIGKILL.

        Returns:
            The command's exit status as shells give it.
        """
        if grace and self.group_runs():
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)
            self._wait_gone(grace)
        if self.group_runs():
            self.signal(signal.SIGKILL)
            self._wait_gone(_GONE)
        # from here on the number may be another's
        self._guard.close()
        return shell_status(self._process.wait())

    def _wait_gone(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.group_runs() and time.monotonic() < deadline:
            time.sleep(_PAUSE)
