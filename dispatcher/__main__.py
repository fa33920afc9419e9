"""``python -m dispatcher``: the same as ``feedline dispatcher``."""

from __future__ import annotations

import os

# the etcd3 package's messages load only with the pure-Python protobuf; has to be set before anything imports protobuf
os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from manifests.errors import ConfigError
from manifests.program import guarded, run_program
from manifests.units import parse_time
from manifests.wire.connection import parse_address, parse_addresses

from .config import DispatcherConfig
from .etcd_access import EtcdAccess
from .main import run as run_process

#: environment variable with the password of --etcd-user
PASSWORD_VARIABLE = "FEEDLINE_ETCD_PASSWORD"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The dispatcher's options."""
    parser.add_argument("--etcd", required=True, metavar="HOST:PORT[,..]", help="endpoints of the etcd cluster")
    parser.add_argument("--etcd-ca", type=Path, metavar="FILE", help="authority of etcd's certificates (PEM): use TLS")
    parser.add_argument("--etcd-cert", type=Path, metavar="FILE", help="this dispatcher's certificate for etcd (PEM)")
    parser.add_argument("--etcd-key", type=Path, metavar="FILE", help="key of that certificate (PEM)")
    parser.add_argument("--etcd-user", metavar="NAME", help=f"etcd user; its password is in ${PASSWORD_VARIABLE}, or")
    parser.add_argument("--etcd-password-file", type=Path, metavar="FILE", help="in the first line of this file")
    # what `feedline up` says about the etcd that it started
    parser.add_argument("--owns-etcd", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compact-every", default="300s", help=argparse.SUPPRESS)
    parser.add_argument("--store", metavar="DIR", help="folder for manifests (default: ~/.local/share/feedline/store)")
    parser.add_argument("--listen", default="127.0.0.1:7070", metavar="HOST:PORT", help="address to bind")
    parser.add_argument("--advertise", metavar="HOST:PORT", help="address that others connect to, if not the bound one")
    parser.add_argument(
        "--lease", default="10s", metavar="TIME", help="how long a leader, worker or rank may be silent"
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--debug", action="store_true", help="debug lines and tracebacks")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the parent process ends")


def config_from(args: argparse.Namespace) -> DispatcherConfig:
    """The configuration that parsed options stand for. Raises ``ConfigError``."""
    return DispatcherConfig(
        etcd=parse_addresses(args.etcd, what="--etcd"),
        access=EtcdAccess(
            ca=args.etcd_ca,
            cert=args.etcd_cert,
            key=args.etcd_key,
            user=args.etcd_user or "",
            password=_password(args.etcd_user, args.etcd_password_file),
        ),
        owns_etcd=args.owns_etcd,
        compact_every=parse_time(args.compact_every, "--compact-every"),
        store=_store_folder(args.store) if args.store else _default_store(),
        listen=parse_address(args.listen, what="--listen"),
        advertise=parse_address(args.advertise, what="--advertise") if args.advertise else None,
        lease=parse_time(args.lease, "--lease"),
        log_format=args.log_format,
        debug=args.debug,
        die_with_parent=args.die_with_parent,
    )


def _password(user: str | None, file: Path | None) -> str:
    """From the file, else from the environment if there is a user."""
    if file is None:
        return os.environ.get(PASSWORD_VARIABLE, "") if user else ""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--etcd-password-file {file} cannot be read", cause=str(error)) from None
    if not lines or not lines[0]:
        raise ConfigError(f"--etcd-password-file {file} has no password in its first line")
    return lines[0]


def _store_folder(text: str) -> Path:
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "file":
        text = rest
    elif separator:
        raise ConfigError(
            f"--store {text!r} is not a folder",
            cause=f"stores at {scheme}:// come in a later release",
            remedy="give a folder that all dispatchers reach",
        )
    return Path(text)


def _default_store() -> Path:
    base = os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    return Path(base) / "feedline" / "store"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse options and serve. Exit status: 0 stopped by a signal, 1 it failed, 2 misuse."""
    return run_program("python -m dispatcher", __doc__, add_arguments, config_from, serve, argv)


def run(args: argparse.Namespace) -> int:
    """Serve as parsed options say; what ``feedline dispatcher`` calls. Raises ``ConfigError`` for misuse."""
    return serve(config_from(args))


def serve(config: DispatcherConfig) -> int:
    """Serve on the configured etcd until a signal; errors are one line on stderr."""

    def act() -> int:
        # here and not above: it loads gRPC and etcd's messages, which a wrong option should not have to wait for
        from .etcd_store import EtcdStore

        return run_process(config, EtcdStore(config.etcd, access=config.access))

    return guarded(act, config.debug)


if __name__ == "__main__":
    sys.exit(main())
