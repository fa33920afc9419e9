"""How to be let in by etcd: certificates and a user; and what is wrong when it does not let us in.

etcd's client tells little more than "unavailable" about a failed handshake, so ``diagnose`` does one by itself and says
what it was.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from manifests.errors import ConfigError
from manifests.wire.connection import Address

#: seconds one probe may take
_PATIENCE = 1.0
#: what OpenSSL says about an answer that is none of TLS, and about none
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH", "UNEXPECTED_EOF")


@dataclass(frozen=True, kw_only=True)
class EtcdAccess:
    """What every connection to etcd uses.

    Attributes:
        ca: PEM file of the authority that signed the members' certificates; None: no TLS.
        cert, key: PEM files of our own certificate and its key, both or none (mutual TLS).
        user, password: for an etcd with authentication, both or none; only over TLS.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: str = ""
    password: str = ""

    def __post_init__(self) -> None:
        for flag, path in (("--etcd-ca", self.ca), ("--etcd-cert", self.cert), ("--etcd-key", self.key)):
            if path is not None:
                _check_readable(flag, path)
        if (self.cert is None) != (self.key is None):
            raise ConfigError("only one of --etcd-cert and --etcd-key", remedy="give both")
        if self.cert is not None and self.ca is None:
            raise ConfigError("--etcd-cert without --etcd-ca", remedy="name the authority of etcd's certificate, too")
        if self.user and not self.password:
            raise ConfigError(
                f"no password for the etcd user {self.user}",
                remedy="set $FEEDLINE_ETCD_PASSWORD or give --etcd-password-file",
            )
        if self.password and not self.user:
            raise ConfigError("an etcd password without a user", remedy="give --etcd-user")
        if self.user and self.ca is None:
            raise ConfigError(
                "--etcd-user without TLS",
                cause="the password would travel in clear, and the etcd client refuses to send its token so",
                remedy="serve etcd with TLS and give --etcd-ca",
            )
        if self.ca is not None:
            self._context(self.ca)

    def __repr__(self) -> str:
        # never the password
        return f"EtcdAccess(ca={self.ca}, cert={self.cert}, user={self.user!r})"

    def _context(self, ca: Path) -> ssl.SSLContext:
        """As a client sets TLS up. Raises ``ConfigError`` for files that hold something else."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        what = f"--etcd-ca {ca}"
        try:
            context.load_verify_locations(cafile=ca)
            if self.cert is not None:
                what = f"--etcd-cert {self.cert} and --etcd-key {self.key}"
                context.load_cert_chain(self.cert, self.key)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"{what} cannot be used", cause=_text(error), remedy="give PEM files") from None
        return context

    def diagnose(self, address: Address, name: str) -> str:
        """What keeps us from a connection, "" when nothing definite is found. ``name``: host the certificate must be for."""
        try:
            with socket.create_connection((address.host, address.port), _PATIENCE) as plain:
                plain.settimeout(_PATIENCE)
                if self.ca is None:
                    return _speaks_tls(plain)
                return self._handshake(plain, self.ca, name)
        except OSError:
            return ""  # not reachable: the client's own words say so

    def _handshake(self, plain: socket.socket, ca: Path, name: str) -> str:
        context = self._context(ca)
        context.set_alpn_protocols(["h2"])
        try:
            with context.wrap_socket(plain, server_hostname=name) as secure:
                # with TLS 1.3 the server judges our certificate after the handshake, and sends an alert
                secure.recv(1)
        except ssl.SSLCertVerificationError as error:
            return f"its certificate is not accepted: {error.verify_message}"
        except TimeoutError:
            return ""
        except ssl.SSLError as error:
            reason = _text(error)
            if any(word in reason for word in _NOT_TLS):
                return "it does not speak TLS, or ends such connections at once"
            if "ALERT" in reason:
                ours = f"our certificate {self.cert}" if self.cert is not None else "us without --etcd-cert"
                return f"it refuses {ours}: {reason}"
            return f"no TLS connection: {reason}"
        except ConnectionResetError:
            return "it does not speak TLS, or ends such connections at once"
        return ""


def _speaks_tls(plain: socket.socket) -> str:
    """Does a server that we would talk to in clear want TLS?"""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with context.wrap_socket(plain):
            pass
    except ssl.SSLError as error:
        # a server of TLS that wants a certificate answers with an alert, any other one with something else
        if "ALERT" not in _text(error):
            return ""
    except OSError:
        return ""
    return "it speaks TLS (give --etcd-ca)"


def _check_readable(flag: str, path: Path) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read", cause=error.strerror or str(error)) from None


def _text(error: Exception) -> str:
    return str(getattr(error, "reason", "") or getattr(error, "strerror", "") or error)
