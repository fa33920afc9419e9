"""The driver: the one thread that owns the state, and the only one that talks to the store about it.

    request threads --submit--> inbox --> apply each --> commit all puts and deletes --> replies
                                            |  LeaderLost, CommitUnknown, StoreUnavailable, lease over
                                            v
                              drop the state, fail what waits, campaign again, load

A reply leaves only after what it promises is in the store. The lease is judged by this process's own monotonic clock,
counted from before the call that renewed it: from then on nothing is answered, whatever else happens.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from manifests import log
from manifests.errors import ConfigError, DispatcherUnavailable, FeedlineError, ProtocolError

from . import events
from .effects import Effect, Log, Reply
from .groups import transactions
from .inbox import Inbox, Waiting
from .leader import LeaderRecord, Leadership
from .library import Library
from .state import State
from .store import CommitUnknown, LeaderLost, Store, StoreFull, StoreInfo, StoreRefused, StoreUnavailable, Term
from .upkeep import Upkeep

_log = logging.getLogger("dispatcher.driver")

#: events applied before a commit
GROUP = 256
#: seconds between two ``TimePassed``
TICK = 0.5
#: seconds between two campaigns of a standby
CAMPAIGN = 0.5
#: seconds a request may wait for the driver
PATIENCE = 4.0
_LEASE_OVER = "its lease could have ended"


class _StepDown(Exception):
    """This process may not lead any more; the text says why."""


class Driver:
    """Owns the state while this process leads.

    Args:
        store: where records live; used by the driver's thread, and for looks and compactions by ``Upkeep``'s.
        library: facts about manifests.
        lease: seconds of the leadership lease, and of workers' and ranks' leases.
        clock: monotonic seconds. wall: ms since 1970, read once.
        on_leading: called on the driver's thread each time this process begins to lead.
        admit: called on the driver's thread before the first campaign and before each term; raises ``ConfigError`` for
            a store that this dispatcher must not work on.
        compact_every: as for ``Upkeep``.

    ``start`` once, ``close`` once; ``submit`` from any thread in between.
    """

    def __init__(
        self,
        store: Store,
        library: Library,
        *,
        lease: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        on_leading: Callable[[], None] = lambda: None,
        admit: Callable[[], None] = lambda: None,
        compact_every: float | None = None,
    ) -> None:
        self._store = store
        self._library = library
        self._clock = clock
        self._wall_start, self._clock_start = wall(), clock()
        self._on_leading = on_leading
        self._admit = admit
        self.lease = lease
        self._leadership = Leadership(store, lease, clock)
        self._upkeep = Upkeep(store, self._commits, compact_every=compact_every)
        self._inbox = Inbox()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dispatcher-driver", daemon=True)
        self._trouble, self._remedy = "this dispatcher is starting", ""
        #: set while this process leads; changed by the driver's thread only
        self.state: State | None = None
        self._sequence = 0
        #: first error that ended the thread
        self.failure: BaseException | None = None
        #: the store let us take part in a campaign
        self.reached_store = threading.Event()
        #: this process leads or stands by
        self.serves = threading.Event()

    def __repr__(self) -> str:
        return f"Driver({self._leadership!r}, inbox {len(self._inbox)}, {self.state!r})"

    @property
    def record(self) -> LeaderRecord:
        """What this process writes about itself when it leads."""
        return self._leadership.record

    @property
    def term(self) -> Term | None:
        """The term, while this process leads and its lease surely runs."""
        return self._leadership.term

    @property
    def leader(self) -> str:
        """Address of the present leader, "" when not known."""
        return self._leadership.leader

    @property
    def info(self) -> StoreInfo:
        """How the store was a moment ago."""
        return self._upkeep.info

    @property
    def trouble(self) -> str:
        """Why this process does not lead now."""
        return self._trouble

    # -- any thread

    def start(self, address: str) -> None:
        """Begin to campaign. ``address``: what clients are told to connect to."""
        self._leadership.record = LeaderRecord.of_this_process(address)
        self._thread.start()
        self._upkeep.start()

    def submit(self, make: Callable[..., events.Event], *, timeout: float = PATIENCE) -> Any:
        """Let the state take an event in, and wait for the answer.

        Args:
            make: called with ``at``, ``now_ms``, ``request`` and ``cause``, on the driver's thread.

        Raises:
            FeedlineError: the answer. DispatcherUnavailable: this process does not lead, or was too slow.
        """
        self.check_leading()
        waiting = Waiting(make, cause=log.current_cause())
        self._inbox.put(waiting, timeout)
        if self._closing.is_set():
            self._fail(waiting)
        try:
            return waiting.future.result(timeout)
        except FutureTimeout:
            raise DispatcherUnavailable(
                f"the dispatcher did not answer within {timeout:g} s",
                cause=self._trouble or "its store is slow to take commits",
                detail={"retry": True},
            ) from None

    def check_leading(self) -> None:
        """Raise ``DispatcherUnavailable`` unless this process leads."""
        if self.state is None or self._leadership.over:
            raise self._unavailable()

    def _unavailable(self) -> DispatcherUnavailable:
        leader = self.leader
        if leader and leader != self.record.address:
            return DispatcherUnavailable(
                f"{self.record.address} is not the leading dispatcher",
                cause=f"{leader} leads",
                detail={"leader": leader},
            )
        return DispatcherUnavailable(
            f"dispatcher {self.record.address} cannot answer now",
            cause=self._trouble or _LEASE_OVER,
            remedy=self._remedy,
            detail={"leader": "", "retry": True},
        )

    def _commits(self) -> int | None:
        return self._sequence if self.state is not None else None

    def close(self, timeout: float = 5.0) -> None:
        """Resign and end the thread; waiting callers get ``DispatcherUnavailable``."""
        self._closing.set()
        self._inbox.wake()
        self._upkeep.close()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        self._refuse(self._inbox.take_all())

    # -- the driver's thread

    def now(self) -> tuple[float, int]:
        """(monotonic seconds, dispatcher time in ms)."""
        at = self._clock()
        return at, self._wall_start + round((at - self._clock_start) * 1000)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                if self._campaign():
                    self._lead()
        except FeedlineError as error:
            # told by whoever started this process
            self.failure = error
        except BaseException as error:
            self.failure = error
            _log.exception("the driver ended")
        finally:
            self._step_down("this dispatcher is stopping")

    def _campaign(self) -> bool:
        """One try to lead. False: not now; some time was waited.

        Raises:
            FeedlineError: this dispatcher must not work on that store, or at the start: cannot.
        """
        try:
            if not self.reached_store.is_set():
                self._check_store()
            leads = self._leadership.campaign()
            self.reached_store.set()
            if not leads:
                self._trouble, self._remedy = f"{self.leader or 'another dispatcher'} leads", ""
                self.serves.set()
                self._closing.wait(CAMPAIGN)
                return False
            # an etcd may be another one than before
            self._admit()
            self._begin(*self._store.load())
            return True
        except (StoreUnavailable, LeaderLost, CommitUnknown, _StepDown) as error:
            if not self.reached_store.is_set() and isinstance(error, StoreRefused | StoreFull):
                raise DispatcherUnavailable(str(error), remedy=error.remedy) from None
            if self._trouble != str(error):
                _log.warning("cannot lead: %s", error)
            self._step_down(error)
            self._closing.wait(CAMPAIGN)
            return False

    def _check_store(self) -> None:
        """At the start. Checked again once the store has the cluster's id, which tells etcds apart for certain."""
        self._store.check()
        self._admit()
        self._store.check()

    def _begin(self, stored: dict[str, bytes], sequence: int) -> None:
        state = State(self._library, self.lease)
        at, now_ms = self.now()
        try:
            effects = state.load(stored, at)
        except ProtocolError as error:
            raise ConfigError(
                "the records in etcd cannot be read", cause=str(error),
                remedy="run the release that wrote them, or a newer one; see the dispatcher's log",
            ) from None  # fmt: skip
        self._sequence = sequence
        secret = os.urandom(32)
        effects += state.apply(
            events.KeyDrawn(at=at, now_ms=now_ms, id=os.urandom(4).hex(), secret=secret, cause=log.current_cause())
        )
        self._perform([effects], {})
        self.state = state
        self._trouble = self._remedy = ""
        _log.info("leads term %d with %d records", self._leading_term().number, len(stored))
        self.serves.set()
        self._on_leading()

    def _lead(self) -> None:
        """Take events until this process may not lead any more."""
        state = self.state
        if state is None:
            return
        ticked = self._clock()
        try:
            while not self._closing.is_set():
                group = self._inbox.gather(GROUP, TICK)
                at, now_ms = self.now()
                if self._leadership.over:
                    self._refuse(group)
                    raise _StepDown(self._why_over())
                self._renew()
                self._take(state, group)
                # after what came before it, and not for the time that the store took: nobody was silent then
                if at - ticked >= TICK and len(group) < GROUP:
                    self._perform([state.apply(events.TimePassed(at=at, now_ms=now_ms))], {})
                    ticked = at
        except (StoreUnavailable, LeaderLost, CommitUnknown, _StepDown) as error:
            _log.warning("steps down: %s", error)
            self._step_down(error)
        except Exception as error:
            # the memory state may be half changed: what is in the store is right
            _log.exception("steps down after an internal error")
            self._step_down(f"internal error: {error}")
            self._closing.wait(CAMPAIGN)

    def _renew(self) -> None:
        trouble = self._leadership.renew()
        if trouble and not self._trouble:
            _log.warning("cannot renew the lease: %s", trouble)
        self._trouble = trouble

    def _take(self, state: State, group: list[Waiting]) -> None:
        requests = dict(enumerate(group, 1))
        done: list[list[Effect]] = []
        try:
            for number, waiting in requests.items():
                at, now_ms = self.now()
                event = waiting.event(at=at, now_ms=now_ms, request=number, cause=waiting.cause)
                try:
                    done.append(state.apply(event))
                except Exception as error:
                    waiting.future.set_exception(
                        ProtocolError(f"the dispatcher failed on {type(event).__name__}", cause=repr(error))
                    )
                    raise
            self._perform(done, requests)
        except BaseException as error:
            self._note(error)
            self._refuse(waiting for waiting in group if not waiting.future.done())
            raise

    def _perform(self, done: list[list[Effect]], requests: dict[int, Waiting]) -> None:
        """Commit what the events put and delete, in as few transactions as fit, and then reply."""
        for puts, deletes in transactions(done):
            self._sequence = self._store.commit(self._leading_term(), self._sequence, puts, deletes)
        if self._leadership.over:
            raise _StepDown(self._why_over())
        for effect in (effect for effects in done for effect in effects):
            if isinstance(effect, Log):
                with log.cause(effect.cause or "-"):
                    _log.log(effect.level, "%s", effect.text)
            elif isinstance(effect, Reply) and effect.request in requests:
                future = requests[effect.request].future
                if isinstance(effect.answer, FeedlineError):
                    future.set_exception(effect.answer)
                else:
                    future.set_result(effect.answer)

    def _leading_term(self) -> Term:
        term = self.term
        if term is None:
            raise _StepDown(_LEASE_OVER)
        return term

    def _why_over(self) -> str:
        return f"{_LEASE_OVER}: {self._trouble}" if self._trouble else _LEASE_OVER

    def _note(self, why: BaseException | str) -> None:
        """Keep why this process does not lead, for those who ask."""
        self._trouble = str(why)
        self._remedy = why.remedy if isinstance(why, StoreUnavailable) else ""

    def _step_down(self, why: BaseException | str) -> None:
        self.state = None
        self._note(why)
        self._refuse(self._inbox.take_all())
        self._leadership.resign()

    def _refuse(self, group: Iterable[Waiting]) -> None:
        for waiting in group:
            self._fail(waiting)

    def _fail(self, waiting: Waiting) -> None:
        if not waiting.future.done():
            waiting.future.set_exception(
                DispatcherUnavailable(
                    f"dispatcher {self.record.address} stopped leading before it answered",
                    cause=self._trouble,
                    remedy=self._remedy or "ask again",
                    detail={"leader": "", "retry": True},
                )
            )
