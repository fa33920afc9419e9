"""Holding the grants a rank needs next: asked for ahead, renewed before they expire, asked again after a failure; in
dynamic order also the rows, in the same messages."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from manifests.errors import DispatcherUnavailable, FeedlineError, ShardChanged, ShardMissing, ShardQuarantined
from manifests.log import cause
from manifests.wire import messages as m

from .avoid import Avoided
from .control import Closed, Control
from .dynamic import AnyLeg, DynamicLeg
from .seat import Seat
from .speeds import Speeds

log = logging.getLogger("feedline.client")

#: shards asked for in one message, and held at the most
ASK, HOLD = 128, 512
#: shards given back in one message
_DONE = 1024
#: seconds before expiry at which a grant that is still needed is asked for again
_RENEW = 45.0
#: seconds between asks that bring nothing, first and largest
_BACKOFF = (0.05, 0.5)
#: seconds for which one ask looks for a dispatcher before it is made again with what is needed then
_ONE_ASK = 5.0


@dataclass(frozen=True)
class Held:
    """A grant this rank holds."""

    shard: int
    workers: tuple[m.WorkerRef, ...]
    signed: bytes
    expires: float  # monotonic seconds of this process


class _Pause:
    """When to ask again after an ask that brought nothing."""

    def __init__(self) -> None:
        self.until = 0.0
        self._next = _BACKOFF[0]

    def longer(self) -> None:
        self.until = time.monotonic() + self._next
        self._next = min(self._next * 2, _BACKOFF[1])

    def end(self) -> None:
        self.until, self._next = 0.0, _BACKOFF[0]


class GrantKeeper:
    """Asks for the shards of one epoch on a thread of its own.

    ``want`` says what is needed, in order; ``held`` what is there. ``waiting`` tells why something is missing.

    Args:
        leg: what is handed out; in dynamic order it takes what is answered.
        avoided: workers to leave alone. speeds: what reads showed of workers; told with every ask.
        reach: in dynamic order, how many rows of the read stream are to be certain, and how many were handed out.
        changed: called when something is there that was not. failed: called with the error that ends the loader.
    """

    def __init__(
        self,
        control: Control,
        leg: AnyLeg,
        *,
        seat: Seat,
        epoch: int,
        avoided: Avoided,
        speeds: Speeds,
        reach: Callable[[], tuple[int, int]],
        changed: Callable[[], None],
        failed: Callable[[FeedlineError], None],
    ) -> None:
        self._control = control
        self._lane = leg if isinstance(leg, DynamicLeg) else None
        self._seat, self._epoch = seat, epoch
        self._avoided = avoided
        self._speeds = speeds
        self._reach = reach
        self._changed = changed
        self._failed = failed
        self._wake = threading.Condition()
        self._wanted: list[int] = []
        self._held: dict[int, Held] = {}
        self._failures: dict[tuple[str, int, str], m.ReadFailure] = {}
        self._told: dict[int, int] = {}
        self._done: list[int] = []
        self._for_shards, self._for_rows = _Pause(), _Pause()
        self._closing = False
        #: shards that are in quarantine, and the error their rows have
        self.quarantined: dict[int, FeedlineError] = {}
        self.waiting = ""
        self.waiting_code = ""
        self._thread = threading.Thread(target=self._run, name=f"feedline-grants-{epoch}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"GrantKeeper(epoch {self._epoch}, {len(self._held)} held, {len(self._wanted)} wanted)"

    def want(self, shards: Iterable[int]) -> None:
        """Shards needed from now on, first needed first; replaces the last list."""
        with self._wake:
            wanted = dict.fromkeys(shards)
            self._wanted = [s for s in wanted if s not in self.quarantined][:HOLD]
            for shard in [s for s in self._held if s not in wanted]:
                del self._held[shard]
                self._done.append(shard)
            self._wake.notify_all()

    def look(self, *, at_once: bool = False) -> None:
        """The reach may have changed. ``at_once``: the loop waits, so ask without a pause."""
        with self._wake:
            if at_once:
                self._for_rows.end()
            self._wake.notify_all()

    def held(self, shards: Iterable[int]) -> dict[int, Held]:
        """Grants for ``shards`` that are there and will not expire within seconds."""
        soon = time.monotonic() + 2.0
        with self._wake:
            found = {s: held for s in shards if (held := self._held.get(s)) is not None}
        return {s: held for s, held in found.items() if held.expires > soon}

    def failed_on(self, failure: m.ReadFailure) -> None:
        """Tell the dispatcher that a read failed; a grant for the shard it names is asked for again."""
        with self._wake:
            if len(self._failures) < 64:
                self._failures[failure.worker, failure.shard, failure.code] = failure
            self._held.pop(failure.shard, None)
            self._wake.notify_all()

    def times_told(self, shard: int) -> int:
        """How often the dispatcher was told that ``shard`` failed, and did not put it in quarantine."""
        with self._wake:
            return self._told.get(shard, 0)

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

    def _missing(self, now: float) -> list[int]:
        avoided = self._avoided.workers()
        out = []
        for shard in self._wanted:
            held = self._held.get(shard)
            usable = held is not None and any(w.id not in avoided for w in held.workers)
            if not usable or (held is not None and held.expires < now + _RENEW):
                out.append(shard)
                if len(out) == ASK:
                    break
        return out

    def _rows(self) -> int:
        """Rows the lane should have, 0 if it has them."""
        leg = self._lane
        if leg is None or leg.final:
            return 0
        wanted = leg.wanted(self._reach()[0])
        return wanted if wanted > leg.have else 0

    def _next(self) -> m.AskGrants | None:
        """What to ask now; waits until there is something. None: closed."""
        with self._wake:
            while not self._closing:
                now = time.monotonic()
                shards, rows = self._missing(now), self._rows()
                due = [pause.until for pause, some in ((self._for_shards, shards), (self._for_rows, rows)) if some]
                if due and min(due) <= now:
                    return self._message(
                        shards if self._for_shards.until <= now else [], rows if self._for_rows.until <= now else 0
                    )
                self._wake.wait(min(1.0, min(due) - now) if due else 1.0)
            return None

    def _message(self, shards: list[int], rows: int) -> m.AskGrants:
        failures, self._failures = tuple(self._failures.values()), {}
        done, self._done = self._done[:_DONE], self._done[_DONE:]
        leg = self._lane if rows else None
        return m.AskGrants(
            job=self._seat.job,
            generation=self._seat.generation,
            rank=self._seat.rank,
            holder=self._seat.holder,
            epoch=self._epoch,
            shards=tuple(m.ShardAsk(source=0, shard=s) for s in shards),
            avoid=tuple(sorted(self._avoided.workers())),
            failures=failures,
            done=tuple(m.ShardAsk(source=0, shard=s) for s in done),
            speeds=self._speeds.take(),
            have=leg.have if leg is not None else 0,
            want=rows,
            place=leg.place(self._reach()[1]) if leg is not None else 0,
        )

    def _run(self) -> None:
        while (message := self._next()) is not None:
            try:
                with cause("") as cause_id:
                    message = msgspec.structs.replace(message, cause=cause_id)
                    reply: m.Grants = self._control.call(message, m.Grants, timeout=_ONE_ASK)
            except Closed:
                return
            except DispatcherUnavailable:  # what is held carries the loop; how long it may wait is not for us to say
                self._undelivered(message)
                continue
            except FeedlineError as error:
                self._failed(error)
                return
            try:
                self._take(message, reply)
            except FeedlineError as error:
                self._failed(error)
                return
            self._changed()

    def _undelivered(self, message: m.AskGrants) -> None:
        self._speeds.put_back(message.speeds)
        with self._wake:
            self._done = [ask.shard for ask in message.done] + self._done
            self._failures = {(f.worker, f.shard, f.code): f for f in message.failures} | self._failures

    def _take(self, message: m.AskGrants, reply: m.Grants) -> None:
        now = time.monotonic()
        grown = self._lane is not None and self._lane.take(reply)
        avoided = self._avoided.workers()
        unusable = [grant for grant in reply.grants if all(w.id in avoided for w in grant.workers)]
        # the dispatcher names a worker that this rank avoids only if it has no other, and heard of it just now
        self._avoided.only({w.id for grant in unusable for w in grant.workers})
        with self._wake:
            for grant in reply.grants:
                expires = now + (grant.expires_ms - reply.now_ms) / 1000
                self._held[grant.shard] = Held(grant.shard, grant.workers, grant.signed, expires)
            for failure in message.failures:
                self._told[failure.shard] = self._told.get(failure.shard, 0) + 1
            for found in reply.quarantined:
                if found.shard not in self.quarantined:
                    log.warning("shard %d is in quarantine: %s", found.shard, found.reason or found.code)
                    self.quarantined[found.shard] = quarantine_error(found)
                self._held.pop(found.shard, None)
            self._wanted = [s for s in self._wanted if s not in self.quarantined]
            if message.shards:
                all_there = len(reply.grants) - len(unusable) + len(reply.quarantined) >= len(message.shards)
                self._for_shards.end() if all_there else self._for_shards.longer()
            if message.want:
                self._for_rows.end() if grown else self._for_rows.longer()
            changed = self.waiting != reply.waiting
            self.waiting, self.waiting_code = reply.waiting, reply.waiting_code
        if changed and reply.waiting:
            log.info("rank %d waits: %s", self._seat.rank, reply.waiting)


def quarantine_error(found: m.QuarantinedShard) -> FeedlineError:
    """What reading a row of this shard raises: what its workers said of it if they found it gone or changed."""
    kind = {ShardMissing.code: ShardMissing, ShardChanged.code: ShardChanged}.get(found.code, ShardQuarantined)
    workers = ", ".join(found.workers)
    return kind(
        f"shard {found.uri or found.shard} cannot be read and is in quarantine",
        cause=f"worker{'s' if len(found.workers) > 1 else ''} {workers}: {found.reason or found.code}",
        remedy="mend it, or pass on_error='skip'",
        detail={
            "shard": found.shard, "uri": found.uri, "workers": list(found.workers), "reason": found.reason,
            "code": found.code,
        },
    )  # fmt: skip
