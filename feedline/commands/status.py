"""``feedline status``: the dispatcher, etcd, workers, jobs and datasets."""

from __future__ import annotations

import argparse
from typing import Any

from manifests.units import format_size
from manifests.wire import messages as m

from ..client import connect
from ..options import add_dispatcher
from ..output import print_json, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the dispatcher is."""
    parser.add_argument("address", nargs="?", metavar="ADDRESS", help="the dispatcher, the same as --dispatcher")
    add_dispatcher(parser)


def run(args: argparse.Namespace) -> int:
    """Print the whole status."""
    document = fetch(args)
    if args.json:
        print_json(document)
    else:
        print("\n\n".join([_head(document), workers_table(document), jobs_table(document), _datasets(document)]))
    return 0


def fetch(args: argparse.Namespace) -> dict[str, Any]:
    """The status document."""
    with connect(args) as client:
        return client.document(m.GetStatus())


def _head(document: dict[str, Any]) -> str:
    dispatcher, etcd = document["dispatcher"], document["etcd"]
    state = "ok" if etcd["ok"] else "NOT OK"
    return (
        f"dispatcher  {dispatcher['address']}  leader {dispatcher['leader'] or '-'}  term {dispatcher['term']}\n"
        f"etcd        {state}  members {etcd['members']}  {format_size(etcd['db_bytes'])}"
    )


def workers_table(document: dict[str, Any]) -> str:
    """One line per worker."""
    rows = [
        (w["id"], w["address"], w["state"], format_size(w["cache_bytes"]), ",".join(w["capabilities"]))
        for w in document["workers"]
    ]
    return table(("WORKER", "ADDRESS", "STATE", "CACHE", "CAPABILITIES"), rows) if rows else "no workers"


def jobs_table(document: dict[str, Any]) -> str:
    """One line per rank of each job."""
    rows: list[tuple[object, ...]] = []
    for job in document["jobs"]:
        ranks = job["ranks"] or [{}]
        steps = "-" if job["steps_per_epoch"] is None else job["steps_per_epoch"]
        for rank in ranks:
            waiting = f"{rank['waiting_for']} {rank['waiting_s']:.1f} s" if rank.get("waiting_for") else ""
            step = f"{rank['step']}/{steps}" if "step" in rank else ""
            rows.append(
                (job["name"], job["dataset"], job["generation"], job["state"], rank.get("rank"), rank.get("state"),
                 rank.get("epoch", job["epoch"]), step, rank.get("rows"), waiting)
            )  # fmt: skip
    head = ("JOB", "DATASET", "GEN", "STATE", "RANK", "RANK STATE", "EPOCH", "STEP", "ROWS", "WAITING FOR")
    return table(head, rows) if rows else "no jobs"


def _datasets(document: dict[str, Any]) -> str:
    rows = [
        (f"{d.get('name')}@{d.get('version')}", d.get("rows"), d.get("shards"), d.get("digest"))
        for d in document["datasets"]
    ]
    return table(("DATASET", "ROWS", "SHARDS", "DIGEST"), rows) if rows else "no datasets"
