"""``python -m worker``: the same as ``feedline worker``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from manifests.program import guarded, run_program
from manifests.units import parse_size, parse_time
from manifests.wire.connection import Address, parse_address, parse_addresses

from .config import WorkerConfig
from .main import run as run_process


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The worker's options."""
    parser.add_argument(
        "--dispatcher", metavar="ADDR[,..]", help="addresses of the dispatchers (default: $FEEDLINE_DISPATCHER)"
    )
    parser.add_argument(
        "--memory", default="1GiB", metavar="SIZE", help="for queues and cache together (default: 1GiB)"
    )
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="address to bind; port 0: any")
    parser.add_argument(
        "--advertise", metavar="HOST[:PORT]", help="address that clients connect to, if not the bound one"
    )
    parser.add_argument("--lease", default="10s", metavar="TIME", help="how long this worker may be silent")
    parser.add_argument("--id", metavar="NAME", help="name of this worker (default: drawn)")
    parser.add_argument("--threads", type=int, metavar="N", help="decode threads (default: one per core)")
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="where to decode; only cpu so far")
    parser.add_argument("--allow", action="append", default=[], metavar="MODULE", help="reserved for PythonMap")
    parser.add_argument("--path", action="append", default=[], metavar="DIR", help="reserved for PythonMap")
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--debug", action="store_true", help="debug lines and tracebacks")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the parent process ends")


def config_from(args: argparse.Namespace) -> WorkerConfig:
    """The configuration that parsed options stand for. Raises ``ConfigError``."""
    dispatchers = args.dispatcher if args.dispatcher is not None else os.environ.get("FEEDLINE_DISPATCHER", "")
    what = "--dispatcher" if args.dispatcher is not None else "$FEEDLINE_DISPATCHER"
    return WorkerConfig(
        dispatchers=parse_addresses(dispatchers, what=what) if dispatchers.strip() else (),
        id=args.id if args.id is not None else f"w-{os.urandom(4).hex()}",
        memory=parse_size(args.memory, "--memory"),
        listen=parse_address(args.listen, what="--listen"),
        advertise=_advertise(args.advertise) if args.advertise else None,
        lease=parse_time(args.lease, "--lease"),
        threads=args.threads if args.threads is not None else _cores(),
        device=args.device,
        allow=tuple(args.allow),
        path=tuple(args.path),
        log_format=args.log_format,
        debug=args.debug,
        die_with_parent=args.die_with_parent,
    )


def _advertise(text: str) -> Address:
    """HOST:PORT, or HOST alone for the bound port."""
    value = text.strip()
    alone = ":" not in value or (value.startswith("[") and value.endswith("]"))
    return parse_address(f"{value}:0" if alone else value, what="--advertise")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse options and serve. Exit status: 0 stopped by a signal, 1 it failed, 2 misuse."""
    return run_program("python -m worker", __doc__, add_arguments, config_from, serve, argv)


def run(args: argparse.Namespace) -> int:
    """Serve as parsed options say; what ``feedline worker`` calls. Raises ``ConfigError`` for misuse."""
    return serve(config_from(args))


def serve(config: WorkerConfig) -> int:
    """Serve until a signal; errors are one line on stderr."""
    return guarded(lambda: run_process(config), config.debug)


if __name__ == "__main__":
    sys.exit(main())
