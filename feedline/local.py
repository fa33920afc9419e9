"""A local cluster as processes of this one: etcd, dispatchers, workers. What ``feedline up`` and the tests run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from manifests.errors import FeedlineError
from manifests.wire import messages as m
from manifests.wire.connection import Address, parse_address

from .children import Child, ChildFailed, child_environment, end_all, python_command
from .client import Client
from .etcd import Etcd

#: seconds a dispatcher or worker may take until it serves
START_TIMEOUT = 30.0
#: seconds that workers, dispatchers and etcd get to end by themselves; together under the 10 s that ``up`` promises
WORKER_GRACE, DISPATCHER_GRACE, ETCD_GRACE = 3.0, 2.0, 2.0
GRACE = WORKER_GRACE + DISPATCHER_GRACE + ETCD_GRACE
_DISPATCHER_READY = r"^dispatcher (grpc://\S+)"
_WORKER_READY = r"^worker (grpc://\S+) id=(\S+)"
_PAUSE = 0.05


class StartFailed(FeedlineError):
    """A process of the cluster did not start; ``lines`` is the end of its log."""

    def __init__(self, failed: ChildFailed) -> None:
        super().__init__(f"{failed.name} {failed.what}", cause=_last(failed), remedy=f"see {failed.log}")
        self.lines = failed.lines


def _last(failed: ChildFailed) -> str:
    """The last thing it said, as the cause."""
    return next((line.strip() for line in reversed(failed.lines) if line.strip()), "")


@dataclass(frozen=True)
class Member:
    """A dispatcher or worker that serves.

    Attributes:
        child: its process.
        address: where it serves, ``grpc://HOST:PORT``.
        id: the worker's id, "" for a dispatcher.
    """

    child: Child
    address: str
    id: str = ""


class LocalCluster:
    """Starts and ends the processes. Use from the main thread only (children die with the thread that starts them).

    Args:
        data: folder for etcd's data, the store and the logs; made with mode 0700 if missing.
        memory: what ``--memory`` each worker gets.
        listen: address of the dispatcher; workers listen on the same host, on free ports.
        lease: what ``--lease`` both get, None: their default.
        etcd_binary: as ``etcd.find_binary``.
        fsync: False only for data that may be lost with the machine.
        echo: where log lines of dispatchers and workers go besides their files.
        arguments: further arguments for dispatchers and workers alike.
        worker_arguments: further arguments for workers.
    """

    def __init__(
        self,
        data: Path,
        *,
        memory: str = "1GiB",
        listen: str = "127.0.0.1:0",
        lease: str | None = None,
        etcd_binary: str | None = None,
        fsync: bool = True,
        echo: TextIO | None = None,
        arguments: Sequence[str] = (),
        worker_arguments: Sequence[str] = (),
    ) -> None:
        self.data = data
        self.memory = memory
        self.listen: Address = parse_address(listen, what="--listen")
        self.logs = data / "logs"
        self._arguments = [*arguments, *(["--lease", lease] if lease else [])]
        self._worker_arguments = list(worker_arguments)
        self._echo = echo
        self._numbers = {"dispatcher": 0, "worker": 0}
        # a folder that is there already keeps its mode: it may be the user's own
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.etcd = Etcd(data / "etcd", log=self.logs / "etcd.log", binary=etcd_binary, fsync=fsync)
        self.dispatchers: list[Member] = []
        self.workers: list[Member] = []

    def __repr__(self) -> str:
        return f"LocalCluster({self.etcd}, dispatchers={len(self.dispatchers)}, workers={len(self.workers)})"

    @property
    def address(self) -> str:
        """The dispatchers' addresses, comma list."""
        return ",".join(member.address for member in self.dispatchers)

    @property
    def children(self) -> list[Child]:
        """All processes that were started, ended or not."""
        etcd = [self.etcd.child] if self.etcd.started else []
        return [*etcd, *(member.child for member in (*self.dispatchers, *self.workers))]

    def start(self, workers: int) -> None:
        """Start everything and wait until ``workers`` workers are registered.

        Raises:
            StartFailed, EtcdFailed: a process did not start; what was started is ended.
        """
        try:
            self.start_etcd()
            self.add_dispatcher()
            self.add_workers(workers)
        except BaseException:
            self.end()
            raise

    def start_etcd(self) -> None:
        """Start etcd, on the data that is there."""
        try:
            self.etcd.start()
        except ChildFailed as failed:
            raise StartFailed(failed) from None

    def add_dispatcher(self, listen: str | None = None, name: str | None = None) -> Member:
        """Start a dispatcher on ``listen`` (default: the cluster's) and wait until it serves."""
        child = self._child(
            name or self._name("dispatcher"),
            "dispatcher",
            ["--etcd", str(self.etcd.address), "--store", str(self.data / "store"), "--listen",
             listen or str(self.listen)],
            _DISPATCHER_READY,
        )  # fmt: skip
        member = Member(child, self._ready(child)[0])
        self.dispatchers.append(member)
        return member

    def add_workers(self, count: int = 1, *arguments: str) -> list[Member]:
        """Start workers, all at once, and wait until they are registered."""
        children = [
            self._child(
                self._name("worker"),
                "worker",
                ["--dispatcher", self.address, "--memory", self.memory, "--listen",
                 str(Address(self.listen.host, 0)), *self._worker_arguments, *arguments],
                _WORKER_READY,
            )
            for _ in range(count)
        ]  # fmt: skip
        # known to ``end`` before anything can go wrong
        first = len(self.workers)
        self.workers += [Member(child, "") for child in children]
        for index, child in enumerate(children, first):
            address, name = self._ready(child)
            self.workers[index] = Member(child, address, name)
        added = self.workers[first:]
        self._wait_registered({member.id for member in added})
        return added

    def _name(self, kind: str) -> str:
        number = self._numbers[kind]
        self._numbers[kind] += 1
        return f"{kind}-{number}"

    def _child(self, name: str, module: str, arguments: Sequence[str], ready: str) -> Child:
        return Child(
            name,
            python_command(module, *arguments, *self._arguments),
            log=self.logs / f"{name}.log",
            ready=ready,
            env=child_environment(),
            echo=self._echo,
        )

    def _ready(self, child: Child) -> tuple[str, ...]:
        try:
            return child.wait_ready(START_TIMEOUT).groups()
        except ChildFailed as failed:
            child.end(0.5)
            raise StartFailed(failed) from None

    def _wait_registered(self, wanted: set[str]) -> None:
        """A worker that serves may be a moment away from being known to the dispatcher."""
        if not wanted:
            return
        deadline = time.monotonic() + START_TIMEOUT
        with self.client() as client:
            while True:
                up = {w["id"] for w in client.document(m.GetStatus())["workers"] if w["state"] == "up"}
                if wanted <= up:
                    return
                for member in self.workers:
                    if member.id in wanted and member.child.poll() is not None:
                        failed = ChildFailed(
                            member.child.name, "ended before it was registered", member.child.log,
                            member.child.last_lines(),
                        )  # fmt: skip
                        raise StartFailed(failed)
                if time.monotonic() > deadline:
                    missing = ", ".join(sorted(wanted - up))
                    raise FeedlineError(f"workers {missing} were not registered within {START_TIMEOUT:g} s")
                time.sleep(_PAUSE)

    def client(self, timeout: float = 10.0) -> Client:
        """A client of this cluster's dispatchers."""
        return Client(tuple(parse_address(member.address) for member in self.dispatchers), timeout)

    def end(self, within: float = GRACE) -> None:
        """End all processes in order: workers, dispatchers, etcd. What needs longer than ``within`` s is killed."""
        share = within / GRACE
        end_all([member.child for member in self.workers], WORKER_GRACE * share)
        end_all([member.child for member in self.dispatchers], DISPATCHER_GRACE * share)
        self.etcd.stop(ETCD_GRACE * share)
