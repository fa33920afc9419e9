"""The worker's place at its dispatcher: registration, heartbeats, signing keys, and dispatcher time.

    away --register--> member --heartbeat, every third of the lease--> member
    member --nobody answers--> away;  member --"not known"--> away (a dispatcher that was restarted or took over)

One thread does all of it and tries for as long as the process lives, the addresses in turn. An outage is logged when it
begins, every 30 s, and when it ends, not on every try. Reads go on during an outage: keys and clock offset stay as they were.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from manifests import log as logs
from manifests.errors import DispatcherUnavailable, FeedlineError, ProtocolError
from manifests.wire import messages as m
from manifests.wire.connection import Address, ConnectionOptions
from manifests.wire.flight import Connection, PeerSilent, PeerUnreachable

log = logging.getLogger("worker.membership")

#: longest time between heartbeats, seconds
BEAT = 1.0
#: first and longest wait between tries while nobody answers, seconds
BACKOFF = (0.1, 2.0)
#: seconds one control call may take
CALL_TIMEOUT = 3.0
#: seconds between two log lines about one outage
REMIND = 30.0
#: heartbeats in a row that find a just made registration gone, until another worker of that id is suspected
FORGOTTEN = 3
#: seconds between two calls of ``refresh`` that ask
REFRESH = 1.0

#: what one heartbeat says about load
Load = Callable[[], dict[str, Any]]


class Membership:
    """See the module. Call ``start`` once, ``leave`` at the end."""

    def __init__(
        self,
        worker: str,
        dispatchers: tuple[Address, ...],
        register: m.RegisterWorker,
        load: Load,
        lease: float,
        options: ConnectionOptions | None = None,
    ) -> None:
        self._worker = worker
        self._register = register
        self._load = load
        self._options = options or ConnectionOptions(connect_timeout=CALL_TIMEOUT)
        self._connections = [Connection(address, self._options) for address in dispatchers]
        self._lock = threading.Lock()
        self._at = 0  # the dispatcher in use
        self._keys: dict[str, bytes] = {}
        self._offset_ms = time.time() * 1000 - time.monotonic() * 1000
        self._beat = min(BEAT, lease / 3)
        self._refreshed = -REFRESH
        self._outage = 0.0  # when it began, 0: none
        self._reminded = 0.0  # when it was last logged
        self._forgotten = 0  # heartbeats in a row that were not known, each after a registration that was taken
        self._wake = threading.Event()
        self._closed = False
        self.draining = False
        #: the dispatcher asked this worker to drain
        self.told_to_drain = threading.Event()
        #: set while registered
        self.registered = threading.Event()
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    def __repr__(self) -> str:
        state = "member" if self.registered.is_set() else "away"
        return f"Membership({self._worker} at {self._connections[self._at].address}, {state})"

    # -- what reads ask (``Authority``) ----------------------------------------------------------------------------

    def signing_keys(self) -> dict[str, bytes]:
        """Signing keys by id, as last heard."""
        with self._lock:
            return self._keys

    def now_ms(self) -> int:
        """Dispatcher time, from the last heartbeat on by this process's own clock."""
        with self._lock:
            return int(time.monotonic() * 1000 + self._offset_ms)

    def refresh(self) -> None:
        """Ask for newer keys, at most once a second; when nobody answers, what is known stays."""
        with self._lock:
            now = time.monotonic()
            if now - self._refreshed < REFRESH:
                return
            self._refreshed = now
        try:
            self._heartbeat()
        except (FeedlineError, OSError) as error:
            log.warning("could not ask for newer keys: %s", error)

    def blob(self, digest: str) -> bytes:
        """A blob from the dispatcher.

        Raises:
            DispatcherUnavailable: none of the dispatchers answered. FeedlineError: what one answered.
        """
        reply: m.Blob = self._call(m.GetBlob(digest=digest, cause=logs.current_cause()), m.Blob)
        return reply.data

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to register."""
        self._thread.start()

    def drain(self) -> None:
        """Tell the dispatcher, now and with every heartbeat, that no work should be placed here."""
        self.draining = True
        self._wake.set()

    def leave(self) -> None:
        """Sign off and end; at most a few seconds."""
        self._closed = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(CALL_TIMEOUT + 1)
        if self.registered.is_set():
            message = m.LeaveWorker(id=self._worker, incarnation=self._register.incarnation)
            try:
                self._connections[self._at].call(message, m.Done, timeout=1.0)
            except (FeedlineError, OSError) as error:
                log.info("could not sign off: %s", error)
        self.registered.clear()
        for connection in self._connections:
            connection.close()

    def _run(self) -> None:
        pause = BACKOFF[0]
        while not self._closed:
            try:
                with logs.cause(""):
                    self._turn()
                pause = BACKOFF[0]
                wait = self._beat
            except (FeedlineError, OSError) as error:
                self._lost(error)
                wait, pause = pause, min(pause * 2, BACKOFF[1])
            except Exception:
                log.exception("heartbeat failed")
                wait, pause = pause, min(pause * 2, BACKOFF[1])
            self._wake.wait(wait)
            self._wake.clear()

    def _turn(self) -> None:
        if self.registered.is_set() and self._heartbeat():
            return
        message = self._changed(self._register, draining=self.draining)
        welcome, began, ended = self._timed(message)
        if not welcome.known:
            raise ProtocolError("the dispatcher did not take the registration")
        self._heard(welcome, began, ended)
        again = self.registered.is_set()
        self.registered.set()
        log.info(
            "%s at dispatcher %s", "registered again" if again else "registered", self._connections[self._at].address
        )

    def _heartbeat(self) -> bool:
        """False when the dispatcher does not know this worker."""
        beat = m.Heartbeat(
            id=self._worker,
            incarnation=self._register.incarnation,
            draining=self.draining,
            capabilities=self._register.capabilities,
            cause=logs.current_cause(),
            **self._load(),
        )
        welcome, began, ended = self._timed(beat)
        if welcome.known:
            self._forgotten = 0
            self._heard(welcome, began, ended)
        else:
            self._forgotten += 1
            if self._forgotten == FORGOTTEN:
                log.warning(
                    "the dispatcher lost the registration of worker %s %d times in a row: another worker with this id "
                    "seems to run; give each worker an --id of its own",
                    self._worker, FORGOTTEN,
                )  # fmt: skip
            log.info("dispatcher %s does not know this worker: registering again", self._connections[self._at].address)
        return welcome.known

    def _timed(self, message: m.Message) -> tuple[m.WorkerWelcome, float, float]:
        began = time.monotonic() * 1000
        welcome: m.WorkerWelcome = self._call(message, m.WorkerWelcome)
        return welcome, began, time.monotonic() * 1000

    def _heard(self, welcome: m.WorkerWelcome, began: float, ended: float) -> None:
        with self._lock:
            self._offset_ms = welcome.now_ms - (began + ended) / 2
            self._keys = dict(welcome.keys)
            if welcome.lease_ms:
                self._beat = min(BEAT, welcome.lease_ms / 3000)
            outage, self._outage = self._outage, 0.0
        if outage:
            log.info("dispatcher answers again after %.1f s", time.monotonic() - outage)
        if welcome.drain:
            self.told_to_drain.set()

    def _lost(self, error: BaseException) -> None:
        with self._lock:
            now = time.monotonic()
            first = not self._outage
            if first:
                self._outage = now
            remind = now - self._reminded >= REMIND
            if first or remind:
                self._reminded = now
            lasted = now - self._outage
        if first:
            log.warning("no dispatcher: %s; trying on", error)
        elif remind:
            log.warning("still no dispatcher after %.0f s: %s; trying on", lasted, error)
        else:
            log.debug("still no dispatcher: %s", error)

    def _call(self, message: m.Message, kind: Any) -> Any:
        """Ask the dispatcher in use; where it does not answer or does not lead, the next one, each once."""
        errors: list[str] = []
        for step in range(len(self._connections)):
            with self._lock:
                at = (self._at + step) % len(self._connections)
            try:
                reply = self._connections[at].call(message, kind, timeout=CALL_TIMEOUT)
            except (PeerUnreachable, PeerSilent, DispatcherUnavailable) as error:
                errors.append(str(error))
                continue
            if at != self._at:
                with self._lock:
                    self._at = at
                log.info("dispatcher is now %s", self._connections[at].address)
            return reply
        raise DispatcherUnavailable("no dispatcher answers", cause="; ".join(errors))

    @staticmethod
    def _changed(message: m.RegisterWorker, **values: Any) -> m.RegisterWorker:
        return msgspec.structs.replace(message, cause=logs.current_cause(), **values)


def registration(
    worker: str, address: Address, memory: int, capabilities: tuple[str, ...], fingerprint: str
) -> m.RegisterWorker:
    """The message that registers this process."""
    return m.RegisterWorker(
        id=worker,
        incarnation=os.urandom(8).hex(),
        address=str(address),
        host=socket.gethostname(),
        pid=os.getpid(),
        memory_bytes=memory,
        capabilities=capabilities,
        fingerprint=fingerprint,
    )
