"""Settings of a dispatcher process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from manifests.errors import ConfigError
from manifests.wire.connection import Address

from .etcd_access import EtcdAccess

DEFAULT_LISTEN = Address("127.0.0.1", 7070)


@dataclass(frozen=True, kw_only=True)
class DispatcherConfig:
    """Everything a dispatcher needs to know; nothing else is read from the environment.

    Attributes:
        etcd: endpoints of one etcd cluster.
        access: how etcd lets us in.
        owns_etcd: nobody else uses that etcd, so old history may be dropped.
        compact_every: seconds between two times that this is done.
        store: folder for manifests and job specs, shared by all dispatchers of the cluster.
        listen: address to bind; port 0 takes a free one.
        advertise: what clients and workers are told to connect to; None: the bound address, or this host's name when
            all interfaces are bound.
        lease: seconds that the leader, a worker or a rank may be silent.
        start_timeout: seconds to wait for etcd at the start.
        log_format: ``text`` or ``json``.
        debug: debug lines and tracebacks.
        die_with_parent: end when the process that started this one ends (Linux).
    """

    etcd: tuple[Address, ...]
    store: Path
    access: EtcdAccess = field(default_factory=EtcdAccess)
    owns_etcd: bool = False
    compact_every: float = 300.0
    listen: Address = DEFAULT_LISTEN
    advertise: Address | None = None
    lease: float = 10.0
    start_timeout: float = 30.0
    log_format: str = "text"
    debug: bool = False
    die_with_parent: bool = False

    def __post_init__(self) -> None:
        if not self.etcd:
            raise ConfigError("no etcd address", remedy="--etcd HOST:PORT")
        if not 1 <= self.lease <= 3600:
            raise ConfigError(f"lease of {self.lease:g} s", cause="it must be between 1 s and 1 h")
        if self.compact_every <= 0:
            raise ConfigError(f"--compact-every {self.compact_every:g} s is not above zero")
        if self.log_format not in ("text", "json"):
            raise ConfigError(f"log format {self.log_format!r}", remedy="text or json")
        if self.advertise is not None and self.advertise.port == 0:
            raise ConfigError(f"cannot advertise {self.advertise}", cause="port 0 is no address to connect to")
