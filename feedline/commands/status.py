"""``feedline status``: the dispatcher, etcd, workers, jobs and datasets."""

from __future__ import annotations

import argparse
from typing import Any

from manifests.units import format_size
from manifests.wire import messages as m

from ..client import connect
from ..options import add_dispatcher
from ..output import SHOWN, print_json, rest, table


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
        (w["id"], w["address"], _worker_state(w), format_size(w["cache_bytes"]), w.get("open_shards"), _speed(w),
         sum(w.get("failures", {}).values()), ",".join(w["capabilities"]))
        for w in document["workers"]
    ]  # fmt: skip
    head = ("WORKER", "ADDRESS", "STATE", "CACHE", "SHARDS", "SPEED", "FAILED", "CAPABILITIES")
    return table(head, rows) if rows else "no workers"


def _worker_state(worker: dict[str, Any]) -> str:
    return f"{worker['state']}, unreachable" if worker.get("suspect") and worker["state"] == "up" else worker["state"]


def _speed(worker: dict[str, Any]) -> str | None:
    speed = worker.get("read_bytes_per_s")
    return f"{format_size(speed)}/s" if speed is not None else None


def jobs_table(document: dict[str, Any]) -> str:
    """One line per rank of each job, and one for all that a rank waits for and each shard in quarantine."""
    rows: list[tuple[object, ...]] = []
    for job in document["jobs"]:
        steps = "" if job["steps_per_epoch"] is None else f"/{job['steps_per_epoch']}"
        for rank in job["ranks"] or [{}]:
            step = f"{rank['step']}{steps}" if "step" in rank else ""
            rows.append(
                (job["name"], job["dataset"], job["generation"], job["state"], rank.get("rank"), rank.get("state"),
                 rank.get("epoch", job["epoch"]), step, rank.get("rows"))
            )  # fmt: skip
    if not rows:
        return "no jobs"
    head = ("JOB", "DATASET", "GEN", "STATE", "RANK", "RANK STATE", "EPOCH", "STEP", "ROWS")
    return "\n".join([table(head, rows), *_waits(document), *_quarantined(document)])


def _waits(document: dict[str, Any]) -> list[str]:
    waits = [
        f"job {job['name']} rank {rank['rank']} waits for {rank['waiting_for']} (since {rank['waiting_s']:.1f} s)"
        for job in document["jobs"]
        for rank in job["ranks"]
        if rank.get("waiting_for")
    ]
    return [*waits[:SHOWN], *rest(len(waits) - SHOWN)]


def _quarantined(document: dict[str, Any]) -> list[str]:
    lines = []
    for job in document["jobs"]:
        shards = job.get("quarantined", [])
        lines += [
            f"job {job['name']} shard {shard['shard']} is in quarantine, {shard['uri']}: {shard['code']} on "
            f"{', '.join(shard['workers'])}: {shard['reason']}"
            for shard in shards[:SHOWN]
        ]
        lines += rest(job.get("quarantined_shards", len(shards)) - SHOWN)
    return lines


def _datasets(document: dict[str, Any]) -> str:
    rows = [
        (f"{d.get('name')}@{d.get('version')}", d.get("rows"), d.get("shards"), d.get("digest"))
        for d in document["datasets"]
    ]
    return table(("DATASET", "ROWS", "SHARDS", "DIGEST"), rows) if rows else "no datasets"
