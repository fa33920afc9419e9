"""What the programs of all packages share: options in, an exit status out, errors as one line on stderr."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from .errors import ConfigError, FeedlineError

C = TypeVar("C")


def run_program(
    name: str,
    description: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    config_from: Callable[[argparse.Namespace], C],
    serve: Callable[[C], int],
    argv: Sequence[str] | None,
) -> int:
    """Parse ``argv`` and serve. Exit status: that of ``serve``, 2 for misuse."""
    parser = argparse.ArgumentParser(prog=name, description=description)
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        config = config_from(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return serve(config)


def guarded(act: Callable[[], int], debug: bool) -> int:
    """The status of ``act``; 1 and one line on stderr if it raises a ``FeedlineError``, with a traceback for ``debug``."""
    try:
        return act()
    except FeedlineError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 1
