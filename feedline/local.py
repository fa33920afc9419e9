"""A local cluster as processes of this one: etcd, dispatchers, workers. What ``feedline up`` and the tests run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from manifests.errors import DispatcherUnavailable, FeedlineError
from manifests.wire import messages as m
from manifests.wire.connection import Address, parse_address
from manifests.wire.flight import Connection, PeerSilent, PeerUnreachable

from .children import Child, ChildFailed, child_environment, end_all, python_command
from .client import Client
from .etcd import Etcd, start_members

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
        listen: address of the first dispatcher, port 0 for a free one; further ones take the ports behind it, or free
            ones. Workers listen on the same host, on free ports.
        lease: what ``--lease`` both get, None: their default.
        etcd_binary: as ``etcd.find_binary``.
        etcd_members: 1, or 3 for tests.
        fsync: False only for data that may be lost with the machine.
        echo: where log lines of dispatchers and workers go besides their files.
        arguments: further arguments for dispatchers and workers alike.
        dispatcher_arguments: further arguments for dispatchers.
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
        etcd_members: int = 1,
        fsync: bool = True,
        echo: TextIO | None = None,
        arguments: Sequence[str] = (),
        dispatcher_arguments: Sequence[str] = (),
        worker_arguments: Sequence[str] = (),
    ) -> None:
        self.data = data
        self.memory = memory
        self.listen: Address = parse_address(listen, what="--listen")
        self.logs = data / "logs"
        self._arguments = [*arguments, *(["--lease", lease] if lease else [])]
        # the etcd is this cluster's own, so its history may go
        self._dispatcher_arguments = ["--owns-etcd", *dispatcher_arguments]
        self._worker_arguments = list(worker_arguments)
        self._echo = echo
        self._numbers = {"dispatcher": 0, "worker": 0}
        # a folder that is there already keeps its mode: it may be the user's own
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        names = ["etcd"] if etcd_members == 1 else [f"etcd-{number}" for number in range(etcd_members)]
        self.etcds = [
            Etcd(data / name, log=self.logs / f"{name}.log", name=name, binary=etcd_binary, fsync=fsync)
            for name in names
        ]
        self.dispatchers: list[Member] = []
        self.workers: list[Member] = []

    def __repr__(self) -> str:
        return f"LocalCluster({self.etcd}, dispatchers={len(self.dispatchers)}, workers={len(self.workers)})"

    @property
    def etcd(self) -> Etcd:
        """The first etcd, mostly the only one."""
        return self.etcds[0]

    @property
    def address(self) -> str:
        """The dispatchers' addresses: ``grpc://HOST:PORT[,HOST:PORT..]``."""
        return "grpc://" + ",".join(member.address.removeprefix("grpc://") for member in self.dispatchers)

    @property
    def children(self) -> list[Child]:
        """All processes that were started, ended or not."""
        etcd = [etcd.child for etcd in self.etcds if etcd.started]
        return [*etcd, *(member.child for member in (*self.dispatchers, *self.workers))]

    def start(self, workers: int, dispatchers: int = 1) -> None:
        """Start everything and wait until one dispatcher leads and ``workers`` workers are registered.

        Raises:
            StartFailed, EtcdFailed: a process did not start; what was started is ended.
        """
        try:
            self.start_etcd()
            self.add_dispatchers(dispatchers)
            self.add_workers(workers)
        except BaseException:
            self.end()
            raise

    def start_etcd(self) -> None:
        """Start etcd, on the data that is there."""
        try:
            if len(self.etcds) > 1 and not self.etcd.started:
                start_members(self.etcds)
                return
            # a member alone is not healthy: all have to be there
            ended = [etcd for etcd in self.etcds if not etcd.started or etcd.child.poll() is not None]
            for etcd in ended:
                etcd.launch()
            for etcd in ended:
                etcd.wait()
        except ChildFailed as failed:
            raise StartFailed(failed) from None

    def add_dispatchers(self, count: int) -> list[Member]:
        """Start dispatchers, all at once, and wait until all serve and one of them leads."""
        first = len(self.dispatchers)
        for number in range(count):
            port = self.listen.port and self.listen.port + number
            self._begin_dispatcher(str(Address(self.listen.host, port)), self._name("dispatcher"))
        self._wait_dispatchers(range(first, first + count))
        return self.dispatchers[first:]

    def add_dispatcher(
        self, listen: str | None = None, *, etcd: str | None = None, arguments: Sequence[str] = ()
    ) -> Member:
        """Start one more on ``listen`` (default: a free port) and wait until it serves. ``etcd``: by these addresses."""
        place = listen or str(Address(self.listen.host, 0))
        self._begin_dispatcher(place, self._name("dispatcher"), etcd, arguments)
        self._wait_dispatchers(range(len(self.dispatchers) - 1, len(self.dispatchers)))
        return self.dispatchers[-1]

    def restart_dispatcher(self, name: str) -> Member:
        """Start a dispatcher that has ended again, on the address it had, and wait until it serves and one leads."""
        index = next(i for i, member in enumerate(self.dispatchers) if member.child.name == name)
        self._begin_dispatcher(self.dispatchers[index].address, name, at=index)
        self._wait_dispatchers(range(index, index + 1))
        return self.dispatchers[index]

    def _begin_dispatcher(
        self, listen: str, name: str, etcd: str | None = None, arguments: Sequence[str] = (), at: int | None = None
    ) -> None:
        members = ",".join(str(member.address) for member in self.etcds)
        child = self._child(
            name,
            "dispatcher",
            ["--etcd", etcd or members, "--store", str(self.data / "store"), "--listen", listen,
             *self._dispatcher_arguments, *arguments],
            _DISPATCHER_READY,
        )  # fmt: skip
        # known to ``end`` before anything can go wrong
        member = Member(child, "")
        if at is None:
            self.dispatchers.append(member)
        else:
            self.dispatchers[at] = member

    def _wait_dispatchers(self, which: range) -> None:
        for index in which:
            child = self.dispatchers[index].child
            self.dispatchers[index] = Member(child, self._ready(child)[0])
        deadline = time.monotonic() + START_TIMEOUT
        while self.leader() is None:
            if time.monotonic() > deadline:
                raise FeedlineError(f"no dispatcher leads after {START_TIMEOUT:g} s", remedy=f"see {self.logs}")
            time.sleep(_PAUSE)

    def leader(self, timeout: float = 0.5) -> Member | None:
        """The dispatcher that leads, None for none; each is asked for at most ``timeout`` seconds."""
        for member in self.dispatchers:
            if member.child.poll() is not None:
                continue
            with contextlib.closing(Connection(parse_address(member.address))) as connection:
                try:
                    reply: m.HelloReply = connection.call(m.Hello(), m.HelloReply, timeout)
                except (PeerUnreachable, PeerSilent, DispatcherUnavailable):
                    continue
            if reply.term and reply.leader == reply.id:
                return member
        return None

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
        end_all([etcd.child for etcd in self.etcds if etcd.started], ETCD_GRACE * share)
