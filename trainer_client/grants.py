"""Holding the grants a rank needs next: asked for ahead, renewed before they expire, asked again after a failure."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from manifests.errors import FeedlineError
from manifests.log import cause
from manifests.wire import messages as m

from .control import Closed, Control

log = logging.getLogger("feedline.client")

#: shards asked for in one message, and held at the most
ASK = 128
#: seconds before expiry at which a grant that is still needed is asked for again
_RENEW = 45.0
#: seconds between asks while the dispatcher has no worker, first and largest
_BACKOFF = (0.05, 0.5)


@dataclass(frozen=True)
class Held:
    """A grant this rank holds."""

    shard: int
    workers: tuple[m.WorkerRef, ...]
    signed: bytes
    expires: float  # monotonic seconds of this process


class GrantKeeper:
    """Asks for the shards of one epoch on a thread of its own.

    ``want`` says what is needed, in order; ``held`` what is there. ``waiting`` tells why something is missing.
    """

    def __init__(
        self,
        control: Control,
        *,
        job: str,
        generation: int,
        rank: int,
        holder: str,
        epoch: int,
        timeout: float,
        changed: Callable[[], None],
        failed: Callable[[FeedlineError], None],
    ) -> None:
        self._control = control
        self._job, self._generation, self._rank, self._holder, self._epoch = job, generation, rank, holder, epoch
        self._timeout = timeout
        self._changed = changed
        self._failed = failed
        self._wake = threading.Condition()
        self._wanted: list[int] = []
        self._held: dict[int, Held] = {}
        self._avoid: dict[str, float] = {}
        self._failures: list[m.ReadFailure] = []
        self._done: list[int] = []
        self._closing = False
        self.waiting = ""
        self.waiting_code = ""
        self._thread = threading.Thread(target=self._run, name=f"feedline-grants-{epoch}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"GrantKeeper(epoch {self._epoch}, {len(self._held)} held, {len(self._wanted)} wanted)"

    def want(self, shards: Iterable[int]) -> None:
        """Needed from now on, first needed first; replaces the last list."""
        with self._wake:
            self._wanted = list(dict.fromkeys(shards))[:ASK]
            for shard in [s for s in self._held if s not in set(self._wanted)]:
                del self._held[shard]
                self._done.append(shard)
            self._wake.notify_all()

    def held(self, shard: int) -> Held | None:
        """The grant for ``shard``, if there is one that will not expire within seconds."""
        with self._wake:
            found = self._held.get(shard)
            return found if found is not None and found.expires > time.monotonic() + 2.0 else None

    def avoid(self, worker: str, seconds: float, failure: m.ReadFailure | None = None) -> None:
        """Do not read from ``worker`` for a while; grants that name it first are asked for again."""
        with self._wake:
            self._avoid[worker] = time.monotonic() + seconds
            if failure is not None and len(self._failures) < 64:
                self._failures.append(failure)
            self._wake.notify_all()

    def avoided(self) -> set[str]:
        """Workers to leave alone at the moment."""
        now = time.monotonic()
        with self._wake:
            return {w for w, until in self._avoid.items() if until > now}

    def drop(self, shard: int) -> None:
        """The grant for ``shard`` was refused: ask for a new one."""
        with self._wake:
            self._held.pop(shard, None)
            self._wake.notify_all()

    def close(self) -> None:
        """Stop asking."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    def join(self, timeout: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout)

    # -- own thread

    def _missing(self) -> list[int]:
        now = time.monotonic()
        avoided = {w for w, until in self._avoid.items() if until > now}
        out = []
        for shard in self._wanted:
            held = self._held.get(shard)
            usable = held is not None and any(w.id not in avoided for w in held.workers)
            if not usable or (held is not None and held.expires < now + _RENEW):
                out.append(shard)
        return out

    def _run(self) -> None:
        pause = _BACKOFF[0]
        while True:
            with self._wake:
                while not self._closing and not self._missing():
                    self._wake.wait(1.0)
                if self._closing:
                    return
                shards = self._missing()
                failures, self._failures = tuple(self._failures), []
                done, self._done = self._done, []
            try:
                with cause("") as cause_id:
                    granted = self._ask(shards, failures, done, cause_id)
            except Closed:
                return
            except FeedlineError as error:
                self._failed(error)
                return
            if granted:
                pause = _BACKOFF[0]
                continue
            with self._wake:
                if self._closing:
                    return
                self._wake.wait(pause)
            pause = min(pause * 2, _BACKOFF[1])

    def _ask(self, shards: list[int], failures: tuple[m.ReadFailure, ...], done: list[int], cause_id: str) -> bool:
        message = m.AskGrants(
            cause=cause_id,
            job=self._job,
            generation=self._generation,
            rank=self._rank,
            holder=self._holder,
            epoch=self._epoch,
            shards=tuple(m.ShardAsk(source=0, shard=s) for s in shards),
            avoid=tuple(sorted(self.avoided())),
            failures=failures,
            done=tuple(m.ShardAsk(source=0, shard=s) for s in done),
        )
        reply: m.Grants = self._control.call(message, m.Grants, timeout=self._timeout)
        now = time.monotonic()
        with self._wake:
            for grant in reply.grants:
                expires = now + (grant.expires_ms - reply.now_ms) / 1000
                self._held[grant.shard] = Held(grant.shard, grant.workers, grant.signed, expires)
            changed = self.waiting != reply.waiting
            self.waiting, self.waiting_code = reply.waiting, reply.waiting_code
        if changed and reply.waiting:
            log.info("rank %d waits: %s", self._rank, reply.waiting)
        self._changed()
        return len(reply.grants) == len(shards)
