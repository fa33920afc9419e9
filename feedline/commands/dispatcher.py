"""``feedline dispatcher``: the same as ``python -m dispatcher``."""

from __future__ import annotations

import argparse

from dispatcher import __main__ as program


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The dispatcher's own options."""
    program.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    return program.serve(program.config_from(args))
