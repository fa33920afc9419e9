"""Options that several commands share."""

from __future__ import annotations

import argparse
from typing import NoReturn

from manifests.errors import ConfigError

#: environment variable with the dispatcher's addresses, read only by commands
DISPATCHER_VARIABLE = "FEEDLINE_DISPATCHER"


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are ``ConfigError``s, so that they print as one line or as JSON like all others."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, remedy=f"see {self.prog} --help")


def add_common(parser: argparse.ArgumentParser) -> None:
    """``--json`` and ``--debug``. Options a command has already are left as they are."""
    _add(parser, "--json", action="store_true", help="print one JSON document; errors are JSON on stderr")
    _add(parser, "--debug", action="store_true", help="show tracebacks and debug log lines")


def add_dispatcher(parser: argparse.ArgumentParser) -> None:
    """Where the dispatcher is, and how long to try."""
    _add(
        parser,
        "--dispatcher",
        metavar="HOST:PORT[,..]",
        help=f"addresses of the dispatcher (default: ${DISPATCHER_VARIABLE})",
    )
    _add(parser, "--timeout", default="5s", metavar="TIME", help="how long to try to reach it (default: 5s)")


def _add(parser: argparse.ArgumentParser, flag: str, **settings: object) -> None:
    if flag not in parser._option_string_actions:
        parser.add_argument(flag, **settings)  # type: ignore[arg-type]
