"""``feedline workers``: the workers part of the status."""

from __future__ import annotations

import argparse

from ..output import print_json
from .status import add_arguments, fetch, workers_table


def run(args: argparse.Namespace) -> int:
    """Print the list of workers."""
    document = fetch(args)
    if args.json:
        print_json({"workers": document["workers"]})
    else:
        print(workers_table(document))
    return 0


__all__ = ["add_arguments", "run"]
