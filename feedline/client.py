"""How commands talk to the dispatcher."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manifests.errors import ConfigError, DispatcherUnavailable
from manifests.manifest import Manifest
from manifests.units import parse_time
from manifests.wire import messages as m
from manifests.wire.connection import Address, ConnectionOptions, parse_addresses
from manifests.wire.flight import Connection, PeerSilent, PeerUnreachable

from .options import DISPATCHER_VARIABLE

#: pause between rounds over all addresses, seconds
_PAUSE = 0.1
#: seconds one address may take to answer while others are left to try
_ATTEMPT = 2.0
#: seconds the upload of a manifest may take
_UPLOAD = 120.0


class Client:
    """Calls to whichever dispatcher of a list answers. Used by one thread.

    Args:
        addresses: the dispatchers, tried in order.
        timeout: seconds a call may take over all of them.
    """

    def __init__(
        self, addresses: tuple[Address, ...], timeout: float = 5.0, options: ConnectionOptions | None = None
    ) -> None:
        self.addresses = addresses
        self._timeout = timeout
        self._connections = [Connection(address, options) for address in addresses]

    def __repr__(self) -> str:
        return f"Client({','.join(map(str, self.addresses))}, timeout={self._timeout:g})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, message: m.Message, kind: Any) -> Any:
        """Send ``message`` and return the answer, which must be of ``kind``.

        Raises:
            DispatcherUnavailable: no dispatcher answered; names the addresses and how long was tried.
            FeedlineError: what the dispatcher answered.
        """
        return self._try(lambda connection, left: connection.call(message, kind, left), _ATTEMPT)

    def document(self, message: m.Message) -> dict[str, Any]:
        """The JSON document that answers ``message``."""
        answer: m.Document = self.call(message, m.Document)
        found: dict[str, Any] = json.loads(answer.json)
        return found

    def register(self, manifest: Manifest) -> m.DatasetRegistered:
        """Upload a manifest unless the dispatcher has it, and give it its name.

        Raises:
            FeedlineError: refused, e.g. other content under the same name and version.
        """
        have = m.HaveManifest(digest=manifest.digest, locations=manifest.locations)
        known: m.ManifestKnown = self.call(have, m.ManifestKnown)
        if not known.known:
            data = manifest.to_bytes()
            path = f"manifest/{manifest.digest}"
            self._try(lambda connection, _: connection.upload(path, data, _UPLOAD), _UPLOAD)
        message = m.RegisterDataset(name=manifest.name, version=manifest.version, digest=manifest.digest)
        registered: m.DatasetRegistered = self.call(message, m.DatasetRegistered)
        return registered

    def _try(self, call: Any, attempt: float) -> Any:
        """One connection after the other, round and round, until one answers or the time is over."""
        start = time.monotonic()
        deadline = start + self._timeout
        reasons: dict[str, str] = {}
        said: DispatcherUnavailable | None = None
        while True:
            for connection in self._connections:
                left = max(deadline - time.monotonic(), 0.05)
                try:
                    # one silent address must not use up the time of the others
                    return call(connection, min(left, attempt) if len(self._connections) > 1 else left)
                except (PeerUnreachable, PeerSilent) as error:
                    reasons[str(connection.address)] = str(error)
                except DispatcherUnavailable as error:
                    # it answered that it does not lead: another one does, or will
                    reasons[str(connection.address)] = str(error)
                    if error.detail.get("retry"):
                        said = error
            if time.monotonic() + _PAUSE >= deadline:
                break
            time.sleep(_PAUSE)
        if said is not None:
            # it is there and leads, or would: what keeps it from answering is the news
            etcd = "etcd" in said.cause
            remedy = "start etcd, or see that the dispatcher can reach it" if etcd else "see the dispatcher's log"
            raise DispatcherUnavailable(said.message, cause=said.cause, remedy=said.remedy or remedy)
        names = ",".join(str(address) for address in self.addresses)
        raise DispatcherUnavailable(
            f"no dispatcher at {names} answered within {time.monotonic() - start:.1f} s",
            cause="; ".join(reasons.values()),
            remedy="start one, or check --dispatcher and $" + DISPATCHER_VARIABLE,
        )

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            with contextlib.suppress(ConnectionError):
                connection.close()


@contextlib.contextmanager
def connect(args: argparse.Namespace) -> Iterator[Client]:
    """A client for a command's arguments: its ADDRESS or ``--dispatcher``, else ``$FEEDLINE_DISPATCHER``.

    Raises:
        ConfigError: none of them is given; no default is tried.
    """
    text = getattr(args, "address", None) or args.dispatcher or os.environ.get(DISPATCHER_VARIABLE, "")
    if not text.strip():
        raise ConfigError("no dispatcher address", remedy=f"give --dispatcher HOST:PORT or set ${DISPATCHER_VARIABLE}")
    with Client(parse_addresses(text, what="dispatcher address"), parse_time(args.timeout, "--timeout")) as client:
        yield client


@contextlib.contextmanager
def advise(remedy: str) -> Iterator[None]:
    """Add a remedy to a dispatcher's ``ConfigError`` that has none, e.g. for a name that it does not know."""
    try:
        yield
    except ConfigError as error:
        error.remedy = error.remedy or remedy
        raise


def load_manifest(path: str | Path) -> Manifest:
    """The manifest in a file, with the file named in what goes wrong."""
    if not Path(path).is_file():
        raise ConfigError(f"no manifest file {str(path)!r}", remedy="make one with feedline manifest build")
    return Manifest.load(path)
