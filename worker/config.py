"""Settings of a worker process."""

from __future__ import annotations

from dataclasses import dataclass

from manifests.errors import ConfigError
from manifests.identity import check_name
from manifests.units import format_size
from manifests.wire.connection import Address

#: least memory a worker can work with, bytes
LEAST_MEMORY = 8 << 20
DEFAULT_LISTEN = Address("127.0.0.1", 0)


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Everything a worker needs to know; nothing else is read from the environment.

    Attributes:
        dispatchers: addresses, tried in this order, then in turn.
        memory: bytes for queues and cache together; the process itself takes about 150 MiB more.
        listen: address to bind; port 0 takes a free one.
        advertise: what clients are told to connect to; None: the bound address, or this host's name when all interfaces
            are bound. Port 0 stands for the bound port.
        lease: seconds the worker may be silent, until the dispatcher says what it is.
        id: name of this worker.
        threads: decode threads.
        device: "cpu"; others come later.
        allow: reserved: modules that may be loaded for PythonMap.
        path: reserved: folders those modules are in.
        drain: seconds that reads under way get to end when the worker is told to stop.
        log_format: ``text`` or ``json``.
        debug: debug lines and tracebacks.
        die_with_parent: end when the process that started this one ends (Linux).
    """

    dispatchers: tuple[Address, ...]
    id: str
    memory: int = 1 << 30
    listen: Address = DEFAULT_LISTEN
    advertise: Address | None = None
    lease: float = 10.0
    threads: int = 1
    device: str = "cpu"
    allow: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    drain: float = 30.0
    log_format: str = "text"
    debug: bool = False
    die_with_parent: bool = False

    def __post_init__(self) -> None:
        if not self.dispatchers:
            raise ConfigError(
                "no dispatcher address", remedy="--dispatcher HOST:PORT, or set FEEDLINE_DISPATCHER to it"
            )
        check_name(self.id, "worker id")
        if self.memory < LEAST_MEMORY:
            raise ConfigError(
                f"--memory {format_size(self.memory)} is too little", remedy=f"use {format_size(LEAST_MEMORY)} or more"
            )
        if not 1 <= self.lease <= 3600:
            raise ConfigError(f"lease of {self.lease:g} s", cause="it must be between 1 s and 1 h")
        if not 1 <= self.threads <= 1024:
            raise ConfigError(f"--threads {self.threads}", remedy="use 1 to 1024")
        if self.device != "cpu":
            raise ConfigError(f"--device {self.device} is not there yet, it comes later", remedy="leave it out, or cpu")
        if self.log_format not in ("text", "json"):
            raise ConfigError(f"log format {self.log_format!r}", remedy="text or json")
