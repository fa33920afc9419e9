"""The program ``feedline``: finds the command, runs it, turns errors into one line and an exit status.

Exit status: 0 done, 1 it failed, 2 it was misused, 130 interrupted; ``audit`` and ``up`` have more, see there. Each
command is a module of ``feedline.commands`` with ``add_arguments(parser)`` and ``run(args) -> int``; only the one that
runs is imported, so that ``feedline manifest`` needs neither etcd nor torch.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from .options import Parser

#: command -> what it does
COMMANDS = {
    "up": "run a local cluster: etcd, dispatcher and workers",
    "dispatcher": "run a dispatcher",
    "worker": "run a worker",
    "manifest": "build, show, compare, verify and register manifests",
    "status": "show the dispatcher, etcd, workers, jobs and datasets",
    "jobs": "list jobs",
    "workers": "list workers",
    "drain": "take a worker out of service",
    "audit": "check that a job's epoch was delivered, each row once",
}
#: commands that serve until a signal; their options are those of ``python -m NAME``
SERVERS = ("dispatcher", "worker")
#: commands of the public contract that are not there yet
LATER = ("pack", "doctor", "cache", "trace", "bench")
#: commands that take the user's own command behind ``--``
_RUN_OTHERS = ("up",)
_INTERRUPTED = 130


class Command(Protocol):
    """A module of ``feedline.commands``. One that runs a command of the user's gets it as ``args.cmd``."""

    def add_arguments(self, parser: Parser) -> None: ...

    def run(self, args: object) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's). Returns the exit status."""
    line = list(sys.argv[1:] if argv is None else argv)
    own = line[: line.index("--")] if "--" in line else line
    debug = "--debug" in own
    restore = _end_early(line) if _wanted(line) in _RUN_OTHERS else None
    # behind the handlers: these take most of the time until the command runs
    from manifests.errors import ConfigError, FeedlineError

    from .output import print_error

    try:
        return _run(line)
    except FeedlineError as error:
        if debug:
            raise
        print_error(error, "--json" in own)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # the reader of our output went away; keep the interpreter's last flush from failing too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        failure = FeedlineError(f"{type(error).__name__}: {error}", remedy="--debug shows where")
        print_error(failure, "--json" in own)
        return 1
    finally:
        if restore is not None:
            restore()


def _wanted(line: list[str]) -> str | None:
    """The command's name."""
    return next((word for word in line if not word.startswith("-")), None)


def _end_early(line: list[str]) -> Callable[[], None]:
    """Make a signal end this process as ``up`` would, until that has its own handlers: nothing is started yet.

    Returns what puts the former handlers back.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def end(number: int, _frame: object) -> None:
        os._exit(128 + number if "--" in line else 0)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return restore


def _run(line: list[str]) -> int:
    # late for the same reason
    from manifests.errors import ConfigError

    from .options import Parser, add_common

    wanted = _wanted(line)
    if wanted in LATER:
        raise ConfigError(f"feedline {wanted} is not there yet", cause="it comes in a later release")
    parser = Parser(prog="feedline", description="Keeps GPUs fed: data workers for PyTorch training.")
    parser.add_argument("--version", action="version", version=f"feedline {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    chosen: Command | None = None
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == wanted:
            chosen = cast("Command", importlib.import_module(f".commands.{name}", __package__))
            chosen.add_arguments(sub)
            if name not in SERVERS:
                add_common(sub)
    cmd: list[str] | None = None
    if wanted in _RUN_OTHERS and "--" in line:
        split = line.index("--")
        line, cmd = line[:split], line[split + 1 :]
    args = parser.parse_args(line)
    args.cmd = cmd
    if chosen is None:
        parser.print_help(sys.stderr)
        return 2
    return chosen.run(args)


def _version() -> str:
    # late for the same reason
    import importlib.metadata

    return importlib.metadata.version("feedline")


if __name__ == "__main__":
    sys.exit(main())
