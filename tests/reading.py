"""A training loop that reads in a thread while a test does something to the cluster."""

from __future__ import annotations

import threading
import time
from typing import Any

from cluster import TestCluster
from training import Rank, check_audit, make_loader

from feedline.local import Member
from manifests.errors import DispatcherUnavailable
from manifests.wire import messages as m
from manifests.wire.connection import parse_address
from manifests.wire.flight import Connection, PeerSilent, PeerUnreachable


class Loop:
    """A loop over one epoch of ``rows`` rows in a thread, so slow that faults come while it reads."""

    def __init__(self, cluster: TestCluster, job: str, rows: int, *, delay: float = 0.03, **settings: Any) -> None:
        self.rank = Rank()
        #: monotonic times at which batches came
        self.times: list[float] = []
        self.failure: BaseException | None = None
        self._cluster, self._job, self._rows, self._delay = cluster, job, rows, delay
        self._loader = make_loader(cluster.address, job=job, prefetch="64KiB", **settings)
        self._thread = threading.Thread(target=self._run, name=f"loop-{job}")
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._loader as loader:
                for batch in loader:
                    self.times.append(time.monotonic())
                    self.rank.add(batch)
                    time.sleep(self._delay)
        except BaseException as error:
            self.failure = error

    def wait_steps(self, count: int, timeout: float = 30.0) -> None:
        """Until ``count`` more batches came."""
        goal, deadline = len(self.times) + count, time.monotonic() + timeout
        while len(self.times) < goal and self._thread.is_alive():
            assert time.monotonic() < deadline, f"{len(self.times)} of {goal} batches after {timeout:g} s"
            time.sleep(0.01)
        assert self.failure is None, self.failure

    def end(self, timeout: float = 60.0) -> float:
        """Wait for the end; every row came once. Returns the longest time between two batches."""
        self._thread.join(timeout)
        assert not self._thread.is_alive() and self.failure is None, self.failure
        assert sorted(self.rank.real) == list(range(self._rows))
        check_audit(self._cluster, self._job)
        return max(after - before for before, after in zip(self.times, self.times[1:]))


def hello(member: Member, timeout: float = 1.0) -> m.HelloReply | None:
    """What a dispatcher says of itself; None when it does not answer."""
    connection = Connection(parse_address(member.address))
    try:
        reply: m.HelloReply = connection.call(m.Hello(), m.HelloReply, timeout)
        return reply
    except (PeerUnreachable, PeerSilent, DispatcherUnavailable):
        return None
    finally:
        connection.close()
