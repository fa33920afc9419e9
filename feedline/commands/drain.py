"""``feedline drain WORKER``: no new reads for a worker; it ends when those under way are done."""

from __future__ import annotations

import argparse

from manifests.wire import messages as m

from ..client import advise, connect
from ..options import add_dispatcher
from ..output import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The worker's id."""
    parser.add_argument("worker", metavar="WORKER", help="id of the worker, see feedline workers")
    add_dispatcher(parser)


def run(args: argparse.Namespace) -> int:
    """Ask the dispatcher to drain it."""
    with connect(args) as client, advise("feedline workers lists them"):
        client.call(m.DrainWorker(id=args.worker), m.Done)
    if args.json:
        print_json({"worker": args.worker, "state": "draining"})
    else:
        print(f"draining {args.worker}")
    return 0
