"""The workers: who is there, how they are, and which of them may serve a shard. Memory only.

(unknown) --register--> up <--heartbeat--> draining --leave--> (unknown)
                        up, draining --lease over--> lost --register, heartbeat--> up
suspect: a client could not reach it; not used until its next heartbeat
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from manifests.errors import ConfigError
from manifests.wire import messages as m

from . import events, limits
from .effects import Outbox

#: a worker that a client avoids is used as a last resort only if it was heard within this many seconds
FRESH = 2.0
#: seconds a lost worker stays in the list
FORGET = 600.0
#: ms of reading over which a worker's speed is averaged
SPEED_MS = 10_000
#: seconds after which a speed is not known any more, so that a worker that got little because of it is tried again
SPEED_KEPT = 60.0
#: share by which a speed has to change before placement takes note of it
SPEED_STEP = 0.05
#: bytes per ms that no worker exceeds
MOST_SPEED = 1e8
#: different failure codes counted per worker
KEPT_CODES = 32
#: failure codes that mean nothing answered at the worker's address
UNREACHABLE = frozenset({"unreachable", "peer-unreachable", "refused"})


@dataclass(slots=True)
class Worker:
    """One worker as the dispatcher sees it. Times are on the driver's monotonic clock."""

    message: m.RegisterWorker
    heard: float
    beat: m.Heartbeat | None = None
    draining: bool = False
    lost: bool = False
    suspect: bool = False
    failures: dict[str, int] = field(default_factory=dict)
    #: how grants name it
    ref: m.WorkerRef = field(init=False)
    #: bytes read and ms that took, both weighted by how long ago that was, and when it was last told
    _moved: float = 0.0
    _spent: float = 0.0
    _measured: float = 0.0
    # the speed that placement took note of
    _noted: float = 0.0

    def __post_init__(self) -> None:
        self.ref = m.WorkerRef(id=self.message.id, address=self.message.address)

    def measure(self, speed: m.WorkerSpeed, at: float) -> bool:
        """A client tells how fast it read; whether that changed the worker's speed by ``SPEED_STEP`` or more."""
        known = at <= self.speed_until
        keep = math.exp(-speed.ms / SPEED_MS)
        self._moved = self._moved * keep + min(float(speed.bytes), speed.ms * MOST_SPEED)
        self._spent = self._spent * keep + speed.ms
        self._measured = at
        now = self._moved / self._spent
        if known and abs(now - self._noted) < SPEED_STEP * self._noted:
            return False
        self._noted = now
        return True

    @property
    def speed_until(self) -> float:
        """When its speed will not be known any more, if it is not measured again."""
        return self._measured + SPEED_KEPT if self._spent else -math.inf

    def speed(self, at: float) -> float | None:
        """Bytes per ms of lately, over all jobs; None: not known."""
        return self._moved / self._spent if at <= self.speed_until else None

    @property
    def state(self) -> Literal["up", "draining", "lost"]:
        if self.lost:
            return "lost"
        return "draining" if self.draining else "up"

    @property
    def capabilities(self) -> tuple[str, ...]:
        beat = self.beat
        return beat.capabilities if beat is not None and beat.capabilities else self.message.capabilities

    def can_read(self, shard_format: str) -> bool:
        """Whether it reads this format: ``format:NAME`` capabilities, or any format when it lists none."""
        formats = _formats(self.capabilities)
        return not formats or shard_format in formats


@lru_cache(maxsize=256)
def _formats(capabilities: tuple[str, ...]) -> frozenset[str]:
    return frozenset(c.removeprefix("format:") for c in capabilities if c.startswith("format:"))


class Workers:
    """Registry of workers."""

    def __init__(self, out: Outbox, lease: float, keys: Callable[[], dict[str, bytes]]) -> None:
        self._out = out
        self._lease = lease
        self._keys = keys
        self.by_id: dict[str, Worker] = {}
        #: grows whenever another set of workers may serve, or their speeds changed
        self.version = 0
        self._drains: set[str] = set()
        #: when the last usable worker went away, or this dispatcher began to lead
        self._none_since: float | None = None

    def start(self, at: float) -> None:
        """This dispatcher begins to lead: nobody has registered yet."""
        self._none_since = at

    # -- events

    def on_register(self, event: events.WorkerRegistered) -> None:
        message = event.message
        limits.check_worker(message)
        old = self.by_id.get(message.id)
        if old is not None and old.message.incarnation != message.incarnation and not old.lost:
            self._out.log(
                logging.WARNING,
                f"worker {message.id} registered from {message.address} while the one at {old.message.address} was "
                "last seen up: taken as its restart",
            )
        draining = message.draining or message.id in self._drains
        self.by_id[message.id] = Worker(message, heard=event.at, draining=draining)
        self._changed(event.at)
        self._out.log(logging.INFO, f"worker {message.id} registered, advertised address {message.address}")
        self._welcome(event, known=True, drain=message.id in self._drains)

    def on_heartbeat(self, event: events.WorkerHeartbeatReceived) -> None:
        beat = event.message
        limits.check_beat(beat)
        worker = self.by_id.get(beat.id)
        if worker is None or worker.message.incarnation != beat.incarnation:
            self._welcome(event, known=False, drain=False)
            return
        if worker.lost:
            self._out.log(logging.INFO, f"worker {beat.id} is back")
        before = (worker.lost, worker.suspect, worker.draining, worker.capabilities)
        worker.heard, worker.beat = event.at, beat
        worker.lost = worker.suspect = False
        worker.draining = beat.draining or beat.id in self._drains
        if before != (False, False, worker.draining, worker.capabilities):
            self._changed(event.at)
        self._welcome(event, known=True, drain=beat.id in self._drains)

    def on_left(self, event: events.WorkerLeft) -> None:
        worker = self.by_id.get(event.message.id)
        if worker is not None and worker.message.incarnation == event.message.incarnation:
            del self.by_id[event.message.id]
            self._drains.discard(event.message.id)
            self._out.log(logging.INFO, f"worker {event.message.id} left")
            self._changed(event.at)
        self._out.reply(event.request, m.Done())

    def on_drain(self, event: events.DrainRequested) -> None:
        worker = self.by_id.get(event.message.id)
        if worker is None:
            known = ", ".join(sorted(self.by_id)) or "none"
            raise ConfigError(f"unknown worker {event.message.id!r}", cause=f"registered workers: {known}")
        self._drains.add(event.message.id)
        worker.draining = True
        self._changed(event.at)
        self._out.log(logging.INFO, f"worker {event.message.id} drains")
        self._out.reply(event.request, m.Done())

    def on_time(self, at: float) -> None:
        changed = False
        for name, worker in list(self.by_id.items()):
            if not worker.lost and at - worker.heard > self._lease:
                worker.lost = changed = True
                self._out.log(
                    logging.WARNING,
                    f"worker {name} at {worker.message.address} is lost: not heard for {at - worker.heard:.1f} s",
                )
            elif worker.lost and at - worker.heard > self._lease + FORGET:
                del self.by_id[name]
                self._drains.discard(name)
        if changed:
            self._changed(at)

    def on_failure(self, failure: m.ReadFailure, job: str) -> None:
        """A client's read failed on a worker."""
        worker = self.by_id.get(failure.worker)
        if worker is None:
            return
        code = failure.code if failure.code in worker.failures or len(worker.failures) < KEPT_CODES else "other"
        worker.failures[code] = count = worker.failures.get(code, 0) + 1
        if failure.code in UNREACHABLE and not worker.suspect:
            worker.suspect = True
            self.version += 1
            if count & (count - 1):  # it answers heartbeats but no client: say so less and less often
                return
            self._out.log(
                logging.WARNING,
                f"worker {failure.worker} cannot be reached by job {job} at its advertised address "
                f"{worker.message.address}: {failure.message or failure.code} (set --advertise if it is wrong)",
            )
        elif failure.code not in UNREACHABLE:
            self._out.log(
                logging.INFO,
                f"job {job}: read of shard {failure.shard} failed on worker {failure.worker}: {failure.code} "
                f"{failure.message}",
            )

    def on_speed(self, speed: m.WorkerSpeed, at: float) -> None:
        """A client tells how fast it read from a worker since it last did."""
        worker = self.by_id.get(speed.worker)
        if worker is not None and speed.ms > 0:
            self.version += worker.measure(speed, at)

    # -- who may serve

    def up(self) -> list[Worker]:
        """Workers that take new shards and are thought to be reachable."""
        return [worker for worker in self._usable() if not worker.suspect]

    def candidates(self, at: float, avoid: Collection[str]) -> list[Worker]:
        """Workers that take new shards; those a client avoids only when there is no other, and heard just now."""
        usable = self._usable()
        found = [w for w in usable if w.message.id not in avoid and not w.suspect]
        return found or [w for w in usable if at - w.heard <= FRESH]

    def none_reason(self, at: float, avoid: Collection[str] = ()) -> str:
        """Why there is no worker now."""
        usable = self._usable()
        if usable:
            names = ", ".join(sorted(w.message.id for w in usable)[:5])
            return f"no worker answers this client (tried: {names})"
        seconds = at - self._none_since if self._none_since is not None else 0.0
        if not self.by_id:
            return f"no worker has registered for {seconds:.0f} s"
        return f"no worker is up for {seconds:.0f} s ({len(self.by_id)} lost or draining)"

    def get(self, name: str) -> Worker | None:
        return self.by_id.get(name)

    def _usable(self) -> list[Worker]:
        return [w for w in self.by_id.values() if not w.lost and not w.draining]

    def _changed(self, at: float) -> None:
        """Another set of workers may serve."""
        self.version += 1
        if self._usable():
            self._none_since = None
        elif self._none_since is None:
            self._none_since = at

    def _welcome(self, event: events.Event, *, known: bool, drain: bool) -> None:
        self._out.reply(
            event.request,
            m.WorkerWelcome(
                known=known,
                now_ms=event.now_ms,
                lease_ms=round(self._lease * 1000),
                keys=self._keys() if known else {},
                drain=drain,
            ),
        )
