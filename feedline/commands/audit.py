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
from ..output import SHOWN, counted, listed, print_json, rest, table

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
    head = f"job {document['job']}  generation {document['generation']}  epoch {document['epoch']}  {_state(document)}"
    parts = [head, table(("COUNT", "ROWS"), [(name, document[name]) for name in _COUNTS])]
    unbalanced = [shard for shard in document["shards"] if "code" not in shard]
    if unbalanced:
        keys = list(dict.fromkeys(key for shard in unbalanced for key in shard))
        rows = [[shard.get(key) for key in keys] for shard in unbalanced]
        parts += ["shards that do not balance:", table([key.upper() for key in keys], rows)]
    return "\n".join([*parts, *_findings(document)])


def _quarantined(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Entries of the shards that rows in quarantine belong to: those with an error's code."""
    return [shard for shard in document["shards"] if "code" in shard]


def _state(document: dict[str, Any]) -> str:
    state: str = document["state"]
    if state != "complete" or not document["quarantined"]:
        return state
    return f"{state} except {counted(len(_quarantined(document)), 'shard')}"


def _findings(document: dict[str, Any]) -> list[str]:
    """What is not as in a complete epoch, a line each."""
    lines = []
    if document["state"] == "running":
        lines.append(f"running: {counted(document['open'], 'row')} not acknowledged yet")
    elif document["state"] == "stopped":
        lines.append(f"stopped: no rank reads it, {counted(document['open'], 'row')} not acknowledged")
    for what in ("lost", "repeated"):
        if document[what]:
            ids = [number for shard in document["shards"] for number in shard.get(what) or ()]
            which = "samples " + listed(ids) if ids else "no rank told which"
            lines.append(f"{what}: {counted(document[what], 'row')}, {which}")
    if document["skipped"]:
        lines.append(f"skipped: {counted(document['skipped'], 'row')}")
        rows = document.get("skipped_rows", [])
        lines += [f"  sample {r['sample_id']}, {r['key']!r} of {r['shard']}: {r['reason']}" for r in rows[:SHOWN]]
        lines += rest(document["skipped"] - min(len(rows), SHOWN))
    shards = _quarantined(document)
    if document["quarantined"]:
        lines.append(f"in quarantine: {counted(document['quarantined'], 'row')} of {counted(len(shards), 'shard')}")
    elif shards:
        whose = "its" if len(shards) == 1 else "their"
        lines.append(f"in quarantine: {counted(len(shards), 'shard')}, and none of {whose} rows was passed over")
    if shards:
        lines += [f"  shard {s['shard']}, {s['uri']}: {s['code']}: {s['reason']}" for s in shards[:SHOWN]]
        lines += rest(len(shards) - SHOWN)
    return lines
