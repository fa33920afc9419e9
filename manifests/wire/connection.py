"""Addresses and the one options object that every hop is made with."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """How to connect, the same on every hop (client, worker and command line).

    Attributes:
        max_message: largest gRPC message accepted in either direction, bytes.
        connect_timeout: seconds one attempt at a control call may take.
        tls_roots: reserved; PEM of trusted roots.
        token: reserved; bearer token.
    """

    max_message: int = 64 << 20
    connect_timeout: float = 5.0
    tls_roots: bytes | None = None
    token: str | None = None

    def __post_init__(self) -> None:
        if self.tls_roots is not None or self.token is not None:
            raise ConfigError("TLS and tokens are not there yet", remedy="leave tls and token unset")


@dataclass(frozen=True)
class Address:
    """A host and port as given or listened on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def uri(self) -> str:
        """``grpc://host:port``, as Flight wants it."""
        return f"grpc://{self}"


def parse_address(text: str, *, what: str = "address") -> Address:
    """``HOST:PORT``, ``[V6]:PORT`` or either behind ``grpc://``; blanks around are ignored.

    Raises:
        ConfigError: no port, a port out of range, or an empty host.
    """
    value = text.strip()
    for scheme in ("grpc://", "grpc+tcp://", "http://"):
        value = value.removeprefix(scheme)
    value = value.rstrip("/")
    host, colon, port = value.rpartition(":")
    host = host.strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535 or "/" in host:
        raise ConfigError(f"{what} {text!r} is not HOST:PORT", remedy="write it like 127.0.0.1:7070 or [::1]:7070")
    return Address(host, int(port))


def parse_addresses(text: str | list[str] | tuple[str, ...], *, what: str = "address") -> tuple[Address, ...]:
    """A comma list or list of addresses, at least one."""
    parts = text.split(",") if isinstance(text, str) else list(text)
    found = tuple(parse_address(part, what=what) for part in parts if part.strip())
    if not found:
        raise ConfigError(f"{what} {text!r} names no host", remedy="write it like 127.0.0.1:7070")
    return found
