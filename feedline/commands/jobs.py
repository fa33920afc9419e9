"""``feedline jobs``: the jobs part of the status."""

from __future__ import annotations

import argparse

from ..output import print_json
from .status import add_arguments, fetch, jobs_table


def run(args: argparse.Namespace) -> int:
    """Print the list of jobs."""
    document = fetch(args)
    if args.json:
        print_json({"jobs": document["jobs"]})
    else:
        print(jobs_table(document))
    return 0


__all__ = ["add_arguments", "run"]
