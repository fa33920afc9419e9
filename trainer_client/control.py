"""Talking to the dispatcher: one call that finds it, waits for it within a deadline, and names what is wrong meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

from manifests.errors import DispatcherUnavailable, FeedlineError
from manifests.wire import messages as m
from manifests.wire.connection import Address, ConnectionOptions, parse_address
from manifests.wire.flight import Connection, PeerSilent, PeerUnreachable, ReadCancelled

#: seconds between tries, first and largest
_BACKOFF = (0.05, 1.0)


class Closed(Exception):
    """This side is closing; the call was given up."""


class Control:
    """The dispatcher behind one or more addresses. Thread-safe.

    ``trouble`` is "" or why calls fail at the moment, since when; the loader shows it while it waits.
    """

    def __init__(self, addresses: Sequence[Address], options: ConnectionOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._order = list(addresses)
        self._connections: dict[Address, Connection] = {}
        self._closing = threading.Event()
        self._since: float | None = None
        self._why = ""

    def __repr__(self) -> str:
        return f"Control({', '.join(map(str, self._order))}, {self.trouble or 'well'})"

    @property
    def trouble(self) -> str:
        """Why the last call failed and for how long calls have, "" when the last one was answered."""
        since, why = self._since, self._why
        return "" if since is None else f"{why} for {time.monotonic() - since:.1f} s"

    def call(self, message: m.Message, kind: Any, *, timeout: float, one_call: float = 5.0) -> Any:
        """Send ``message``, trying every address again and again for up to ``timeout`` seconds.

        Raises:
            DispatcherUnavailable: nobody answered as leader in that time; names the addresses and how long was tried.
            FeedlineError: what the dispatcher answered. Closed: ``close`` was called.
        """
        started = time.monotonic()
        deadline = started + timeout
        pause = _BACKOFF[0]
        while True:
            left = deadline - time.monotonic()
            for address in self._addresses():
                if self._closing.is_set():
                    raise Closed
                try:
                    reply = self._connection(address).call(message, kind, max(0.05, min(one_call, left)))
                except (PeerUnreachable, PeerSilent) as error:
                    self._failed(str(error))
                except DispatcherUnavailable as error:
                    self._failed(str(error))
                    self._follow(error.detail.get("leader"))
                except ReadCancelled:
                    raise Closed from None
                else:
                    self._since = None
                    self._prefer(address)
                    return reply
            left = deadline - time.monotonic()
            if left <= 0:
                names = ", ".join(map(str, self._addresses()))
                raise DispatcherUnavailable(
                    f"no dispatcher answered at {names}",
                    cause=f"tried for {time.monotonic() - started:.1f} s; {self._why}",
                    remedy="check that `feedline dispatcher` or `feedline up` runs there and the address is right",
                )
            self._closing.wait(min(left, pause * (0.5 + random.random())))
            pause = min(pause * 2, _BACKOFF[1])

    def download(self, what: str, timeout: float) -> bytes:
        """Bytes the dispatcher offers under a ticket such as ``manifest/<digest>``."""
        return self._stream(lambda connection, left: connection.download(what, left), timeout)

    def upload(self, what: str, data: bytes, timeout: float) -> None:
        """Send bytes to be kept under a path such as ``manifest/<digest>``."""
        self._stream(lambda connection, left: connection.upload(what, data, left) or b"", timeout)

    def _stream(self, act: Any, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        while True:
            # A control call first: it finds the leader and fails with a full explanation.
            self.call(m.Hello(), m.HelloReply, timeout=max(0.1, deadline - time.monotonic()))
            try:
                done: bytes = act(self._connection(self._addresses()[0]), max(0.1, deadline - time.monotonic()))
                return done
            except (PeerUnreachable, PeerSilent, DispatcherUnavailable) as error:
                self._failed(str(error))
                if time.monotonic() >= deadline:
                    raise DispatcherUnavailable("transfer with the dispatcher failed", cause=str(error)) from None
                self._closing.wait(0.2)

    def close(self) -> None:
        """Give up calls under way and close the connections."""
        self._closing.set()
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.close()

    def _addresses(self) -> list[Address]:
        with self._lock:
            return list(self._order)

    def _prefer(self, address: Address) -> None:
        with self._lock:
            if self._order[0] != address:
                self._order.remove(address)
                self._order.insert(0, address)

    def _follow(self, leader: Any) -> None:
        """Try the leader a standby named first."""
        if not leader:
            return
        try:
            address = parse_address(str(leader))
        except FeedlineError:
            return
        with self._lock:
            if address not in self._order:
                self._order.append(address)
        self._prefer(address)

    def _connection(self, address: Address) -> Connection:
        with self._lock:
            if self._closing.is_set():
                raise Closed
            if address not in self._connections:
                self._connections[address] = Connection(address, self._options)
            return self._connections[address]

    def _failed(self, why: str) -> None:
        self._why = why
        if self._since is None:
            self._since = time.monotonic()
