"""The dispatcher process: puts store, driver, service and server together, and takes them apart again."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from manifests import log
from manifests.errors import DispatcherUnavailable, FeedlineError
from manifests.wire.connection import Address
from manifests.wire.flight import Server

from .config import DispatcherConfig
from .driver import Driver
from .files import Files
from .identity import agree
from .service import Service
from .store import Store

_log = logging.getLogger("dispatcher")

_PR_SET_PDEATHSIG = 1
#: hosts that mean "all interfaces"
_ANY = ("0.0.0.0", "::", "")


class Dispatcher:
    """A running dispatcher; ``close`` ends it.

    Args:
        store: owned by this object from here on.
        on_leading: called with the advertised address each time this process begins to lead.

    Raises:
        ConfigError: the port is in use, or the store folder cannot be written. What else keeps it from working comes
            later, as ``driver.failure``.
    """

    def __init__(
        self, config: DispatcherConfig, store: Store, on_leading: Callable[[Address], None] = lambda address: None
    ) -> None:
        self.config = config
        self._store = store
        files = Files(config.store)
        self.driver = Driver(
            store,
            files,
            lease=config.lease,
            on_leading=lambda: on_leading(self.address),
            admit=self._admit,
            compact_every=config.compact_every if config.owns_etcd else None,
        )
        self.server = Server(Service(self.driver, files), config.listen)
        self.address = config.advertise or _reachable(self.server.address)
        self.driver.start(str(self.address))

    def __repr__(self) -> str:
        return f"Dispatcher({self.address}, {self.driver!r})"

    def _admit(self) -> None:
        cluster = agree(self._store, self.config.store, self._etcd)
        _log.debug("cluster %s", cluster)

    @property
    def _etcd(self) -> str:
        return ",".join(map(str, self.config.etcd))

    def check(self) -> None:
        """Raise what ended the driver, if anything did."""
        failure = self.driver.failure
        if isinstance(failure, FeedlineError):
            raise failure
        if failure is not None:
            raise DispatcherUnavailable("the dispatcher failed", cause=repr(failure))

    def wait_until_serving(self, timeout: float, stop: threading.Event) -> None:
        """Wait until it leads or stands by.

        Raises:
            DispatcherUnavailable: the store did not answer within ``timeout`` seconds, or refuses. ConfigError: it must
                not work on that store.
        """
        started = time.monotonic()
        while not stop.is_set() and not self.driver.serves.wait(0.05):
            self.check()
            if time.monotonic() - started > timeout and not self.driver.reached_store.is_set():
                raise DispatcherUnavailable(
                    f"etcd at {self._etcd} does not answer",
                    cause=f"tried for {timeout:g} s: {self.driver.trouble}",
                    remedy="start etcd, or give its address with --etcd",
                )

    def close(self) -> None:
        """Resign, stop serving, close the store. Safe to call twice."""
        self.driver.close()
        self.server.stop()
        self._store.close()


def _reachable(bound: Address) -> Address:
    return Address(socket.gethostname(), bound.port) if bound.host in _ANY else bound


def run(config: DispatcherConfig, store: Store) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status; prints one line when it leads, or stands by.

    Raises:
        FeedlineError: it could not start.
    """
    log.setup(config.log_format, config.debug)
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    if config.die_with_parent:
        die_with_parent()
    with log.cause(""):
        try:
            dispatcher = Dispatcher(config, store)
        except FeedlineError:
            store.close()
            raise
        try:
            dispatcher.wait_until_serving(config.start_timeout, stop)
            if not stop.is_set():
                print(f"dispatcher {dispatcher.address.uri}", flush=True)
            while not stop.wait(0.2):
                dispatcher.check()
        finally:
            _log.info("stops")
            dispatcher.close()
    return 0


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent ends (Linux; nothing elsewhere)."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
