"""``feedline audit JOB``: was each row of an epoch delivered, and once?

Exit status 0: the epoch is complete, nothing lost, nothing repeated. 1: rows were lost or repeated. 3: not complete, or
complete except for quarantined shards. 2: misuse, also a job that does not exist.
"""

from __future__ import annotations

import argparse
from typing import Any

from manifests.wire import messages as m

from ..client import advise, connect
from ..options import add_dispatcher
from ..output import print_json, table

COMPLETE, UNBALANCED, UNFINISHED = 0, 1, 3
_COUNTS = (
    "rows", "handed_out", "acknowledged", "lost", "repeated", "skipped", "dropped", "abandoned", "rewound",
    "quarantined", "open", "padded",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The job and the epoch."""
    parser.add_argument("job", metavar="JOB", help="name of the job")
    parser.add_argument("--epoch", type=_epoch, metavar="E", help="the epoch (default: the newest it has entered)")
    add_dispatcher(parser)


def _epoch(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not an epoch, a whole number from 0 on")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Print the books of one epoch."""
    with connect(args) as client, advise("feedline jobs lists them"):
        document = client.document(m.GetAudit(job=args.job, epoch=args.epoch))
    if args.json:
        print_json(document)
    else:
        print(_text(document))
    return verdict(document)


def verdict(document: dict[str, Any]) -> int:
    """The exit status that goes with an audit document."""
    if document["lost"] or document["repeated"]:
        return UNBALANCED
    if document["state"] != "complete" or document["quarantined"]:
        return UNFINISHED
    return COMPLETE


def _text(document: dict[str, Any]) -> str:
    head = f"job {document['job']}  generation {document['generation']}  epoch {document['epoch']}  {document['state']}"
    parts = [head, table(("COUNT", "ROWS"), [(name, document[name]) for name in _COUNTS])]
    if document["shards"]:
        keys = list(document["shards"][0])
        rows = [[shard.get(key) for key in keys] for shard in document["shards"]]
        parts += ["shards that do not balance:", table([key.upper() for key in keys], rows)]
    return "\n".join(parts)
