"""``python -m dispatcher`` as a process of its own, and asking it."""

import signal
import subprocess
import sys
import threading
import time

from manifests.errors import DispatcherUnavailable
from manifests.wire import messages as m
from manifests.wire.connection import parse_address
from manifests.wire.flight import Connection, PeerSilent, PeerUnreachable


class Program:
    """A dispatcher process; its first line is read within 20 s."""

    def __init__(self, *arguments, wait=True):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dispatcher", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.line = self._line(self.process.stdout) if wait else ""

    def _line(self, stream):
        timer = threading.Timer(20, self.process.kill)
        timer.start()
        try:
            return stream.readline()
        finally:
            timer.cancel()

    def log_line(self):
        """The next line of its log."""
        return self._line(self.process.stderr)

    @property
    def connection(self):
        return Connection(parse_address(self.line.removeprefix("dispatcher ").strip()))

    def end(self, number=signal.SIGTERM, timeout=10):
        if self.process.poll() is None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err


def ask(connection, message, kind, seconds=15.0):
    """The answer, asked for again while nobody leads."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return connection.call(message, kind, timeout=5)
        except (DispatcherUnavailable, PeerUnreachable, PeerSilent):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def leader_of(connection):
    """Whom a dispatcher names as the leader; "" when it does not answer or knows none."""
    try:
        return connection.call(m.Hello(), m.HelloReply, timeout=2).leader
    except (DispatcherUnavailable, PeerUnreachable, PeerSilent):
        return ""


def wait_until(condition, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)
