"""A TCP relay between a client and a server that a test can cut, or make deaf in one direction."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading


class Relay:
    """Forwards connections on ``address`` to ``target`` (host, port). Use as a context manager.

    ``hold_answers()``: what the server sends is kept back. ``cut()``: all connections end, new ones are refused until
    ``mend()``, which also lets answers pass again.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._servers: set[socket.socket] = set()
        self._holding = False
        self._refusing = False
        self._dropping = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._closing = False
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Where clients connect."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._wake.send(b"x")
        self._thread.join(5)
        for end in (self._listener, self._wake, self._woken):
            end.close()
        self._selector.close()

    def hold_answers(self) -> None:
        """Keep back what the server sends from now on."""
        with self._lock:
            self._holding = True

    def cut(self) -> None:
        """End all connections, with what was kept back, and refuse new ones."""
        with self._lock:
            self._refusing = self._dropping = True
        self._wake.send(b"c")

    def mend(self) -> None:
        """Forward again."""
        with self._lock:
            self._refusing = self._holding = False

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(0.05):
                end = key.fileobj
                if end is self._listener:
                    self._accept()
                elif end is self._woken:
                    self._woken.recv(100)
                    if self._dropping:
                        self._dropping = False
                        self._drop_all()
                elif isinstance(end, socket.socket) and end in self._pairs:
                    self._forward(end)
            if self._closing:
                self._drop_all()
                return

    def _drop_all(self) -> None:
        for end in list(self._pairs):
            self._drop(end)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        with self._lock:
            refusing = self._refusing
        try:
            if refusing:
                raise OSError("refused")
            server = socket.create_connection(self._target, 2)
        except OSError:
            client.close()
            return
        self._pairs[client], self._pairs[server] = server, client
        self._servers.add(server)
        for end in (client, server):
            self._selector.register(end, selectors.EVENT_READ)

    def _forward(self, end: socket.socket) -> None:
        with self._lock:
            holding = self._holding
        try:
            data = end.recv(1 << 16)
            if not data:
                raise OSError("closed")
            if not (holding and end in self._servers):
                self._pairs[end].sendall(data)
        except OSError:
            self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        if end not in self._pairs:
            return
        other = self._pairs.pop(end)
        for one in (end, other):
            if one is not None:
                self._pairs.pop(one, None)
                self._servers.discard(one)
                with contextlib.suppress(KeyError):
                    self._selector.unregister(one)
                one.close()
