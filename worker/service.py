"""What a worker offers over Flight: reads, and who it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pyarrow as pa

from manifests import log as logs
from manifests.errors import ConfigError, ProtocolError
from manifests.wire import messages as m

from .reads import Reads


class Service:
    """``manifests.wire.flight.Handler`` of a worker; called on Flight's threads."""

    def __init__(self, worker: str, reads: Reads) -> None:
        self._worker = worker
        self._reads = reads

    def __repr__(self) -> str:
        return f"Service({self._worker}, {self._reads!r})"

    def handle(self, message: m.Request) -> m.Message:
        """Answer a control message; a worker knows ``Hello`` only."""
        with logs.cause(message.cause):
            if isinstance(message, m.Hello):
                return m.HelloReply(role="worker", id=self._worker, version=_version())
        raise ProtocolError(f"a worker does not answer {type(message).__name__}", remedy="send it to the dispatcher")

    def read(
        self, ticket: bytes, cancelled: Callable[[], bool]
    ) -> tuple[pa.Schema, Iterator[tuple[pa.RecordBatch, m.ReadPart | None]]]:
        """Begin the read that a ticket asks for."""
        return self._reads.open(ticket, cancelled)

    def store(self, path: tuple[str, ...], data: bytes) -> None:
        """Workers keep no uploads."""
        raise ConfigError(f"a worker takes no uploads ({'/'.join(path)})", remedy="send it to the dispatcher")

    def flights(self) -> Iterable[Any]:
        """Workers list nothing: datasets are the dispatcher's business."""
        raise ConfigError("a worker lists no datasets", remedy="ask the dispatcher")

    def flight_info(self, path: tuple[str, ...]) -> Any:
        """As ``flights``."""
        raise ConfigError(f"a worker describes no datasets ({'/'.join(path)})", remedy="ask the dispatcher")


def _version() -> str:
    try:
        return version("feedline")
    except PackageNotFoundError:
        return "unknown"
