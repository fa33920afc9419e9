"""A real cluster for tests: etcd, dispatchers and workers as processes that a test can kill, pause and restart.

    with TestCluster(workers=2) as cluster:
        cluster.register(manifest)
        cluster.kill("worker-0")
        assert cluster.audit("job")["lost"] == 0

Names of processes: ``etcd`` (of three: ``etcd-0`` to ``etcd-2``), ``dispatcher-0``, ``worker-0``, ``worker-1``, .. in the
order they were started. On a failure inside the ``with`` block the ends of all logs are printed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from feedline.children import Child, Janitor
from feedline.client import Client
from feedline.local import LocalCluster, Member
from manifests.manifest import Manifest
from manifests.wire import messages as m


class TestCluster:
    """See the module's text.

    Args:
        workers: how many to start.
        memory: memory of each worker.
        dispatchers: how many to start.
        etcd_members: 1 or 3.
        lease: lease of leader, workers and ranks; short, so that tests of it are short.
        folder: where data and logs go; None: a temporary folder, removed at the end.
        arguments: further arguments of every worker.
        dispatcher_arguments: further arguments of every dispatcher, e.g. ``("--compact-every", "200ms")``.
    """

    __test__ = False  # not a test case, whatever its name says

    def __init__(
        self,
        workers: int = 1,
        *,
        dispatchers: int = 1,
        etcd_members: int = 1,
        memory: str = "256MiB",
        lease: str = "2s",
        folder: Path | None = None,
        arguments: tuple[str, ...] = (),
        dispatcher_arguments: tuple[str, ...] = (),
    ) -> None:
        self._workers = workers
        self._dispatchers = dispatchers
        self._janitor: Janitor | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="feedline-test-")) if folder is None else folder
        if folder is None:
            # also when the test run is killed
            self._janitor = Janitor(self.folder)
        self.local = LocalCluster(
            self.folder, memory=memory, lease=lease, fsync=False, etcd_members=etcd_members,
            worker_arguments=arguments, dispatcher_arguments=dispatcher_arguments,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"TestCluster({self.local!r})"

    def __enter__(self) -> TestCluster:
        try:
            self.local.start(self._workers, self._dispatchers)
        except BaseException:
            self.print_logs()
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and kind.__name__ != "Skipped":
            self.print_logs()
        for child in self.local.children:
            # a paused process ends only once it goes on
            if child.poll() is None:
                child.resume()
        self.local.end()
        self._remove()

    def _remove(self) -> None:
        if self._janitor is not None:
            self._janitor.close()

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """What clients connect to, ``grpc://HOST:PORT[,HOST:PORT..]``."""
        return self.local.address

    @property
    def workers(self) -> list[Member]:
        """All workers that were started, dead ones too."""
        return self.local.workers

    def child(self, name: str) -> Child:
        """The process of that name; a restarted one is the newest."""
        for child in reversed(self.local.children):
            if child.name == name:
                return child
        raise KeyError(f"no process {name!r}; there are {[child.name for child in self.local.children]}")

    def worker(self, name: str) -> Member:
        """The worker of that name (``worker-0``) or id."""
        return next(w for w in self.local.workers if name in (w.child.name, w.id))

    def client(self, timeout: float = 10.0) -> Client:
        """A control connection; close it."""
        return self.local.client(timeout)

    # -- what tests do to it ---------------------------------------------------------------------------------------

    def add_worker(self, *arguments: str) -> Member:
        """Start one more worker and wait until it is registered."""
        return self.local.add_workers(1, *arguments)[0]

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is gone."""
        child = self.child(name)
        child.process.kill()
        child.process.wait()
        child.join()

    def terminate(self, name: str, grace: float = 10.0) -> int:
        """SIGTERM, SIGKILL after ``grace`` seconds. Returns the exit status."""
        return self.child(name).end(grace)

    def pause(self, name: str) -> None:
        """SIGSTOP: it is there, and silent from the moment this returns."""
        self.child(name).pause()

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self.child(name).resume()

    def restart(self, name: str, *, kill: bool = True) -> None:
        """End a dispatcher or etcd that still runs (SIGKILL, or SIGTERM with ``kill=False``), and start it where it was."""
        child = self.child(name)
        if child.poll() is None and kill:
            self.kill(name)
        else:
            child.end(10.0)
        if name.startswith("dispatcher"):
            self.local.restart_dispatcher(name)
        else:
            self.local.start_etcd()

    def restart_dispatcher(self, *, kill: bool = True) -> None:
        """End the dispatcher (SIGKILL, or SIGTERM with ``kill=False``) and start it on the same port and etcd."""
        self.stop_dispatcher(kill=kill)
        self.start_dispatcher()

    def stop_dispatcher(self, *, kill: bool = True) -> None:
        """End the dispatcher."""
        name = self.local.dispatchers[-1].child.name
        if kill:
            self.kill(name)
        else:
            self.terminate(name)

    def start_dispatcher(self) -> None:
        """Start it again on the port it had."""
        self.local.restart_dispatcher(self.local.dispatchers[-1].child.name)

    def restart_etcd(self) -> None:
        """SIGKILL etcd and start it on the same data and port."""
        self.kill("etcd")
        self.local.start_etcd()

    def wipe_etcd(self) -> None:
        """End etcd, delete its data, and start an empty one on the same port."""
        self.local.etcd.wipe()
        self.local.start_etcd()

    def register(self, manifest: Manifest) -> m.DatasetRegistered:
        """Upload a manifest and give it its name."""
        with self.client() as client:
            return client.register(manifest)

    # -- what tests see of it --------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The document of ``feedline status --json``."""
        with self.client() as client:
            return client.document(m.GetStatus())

    def leader(self) -> str | None:
        """Name of the dispatcher that leads, None for none right now."""
        found = self.local.leader()
        return None if found is None else found.child.name

    def wait_leader(self, *, other_than: str | None = None, timeout: float = 15.0) -> str:
        """Wait until a dispatcher leads, another one than ``other_than``, and return its name."""
        found: list[str | None] = [None]

        def leads() -> bool:
            found[0] = self.leader()
            return found[0] is not None and found[0] != other_than

        self.wait_for(f"a leader other than {other_than}" if other_than else "a leader", leads, timeout)
        return str(found[0])

    def audit(self, job: str, epoch: int | None = None) -> dict[str, Any]:
        """The document of ``feedline audit JOB --json``."""
        with self.client() as client:
            return client.document(m.GetAudit(job=job, epoch=epoch))

    def wait_for(self, what: str, condition: Callable[[], bool], timeout: float = 15.0) -> None:
        """Wait until ``condition()``; fail naming ``what`` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {timeout:g} s")
            time.sleep(0.05)

    def wait_workers(self, count: int, timeout: float = 15.0) -> None:
        """Wait until exactly ``count`` workers are up."""
        self.wait_for(
            f"{count} workers up", lambda: sum(w["state"] == "up" for w in self.status()["workers"]) == count, timeout
        )

    def print_logs(self, lines: int = 60) -> None:
        """The ends of all logs, to stderr."""
        for path in sorted(self.local.logs.glob("*.log")):
            if path.name.startswith("etcd"):
                continue
            text = path.read_text(errors="replace").splitlines()
            print(f"--- {path.name} (last {lines} of {len(text)} lines)", *text[-lines:], sep="\n", file=sys.stderr)
