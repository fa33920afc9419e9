"""Measures what the audit costs: its operations per row, against all CPU that a row costs on its way through the service.

    python benchmarks/audit_cost.py [--batch-size 64] [--rounds 5]

A row's share of the audit is counted, not taken as a difference of two noisy runs: how often each operation runs per batch
or per report (counted in the very run that is measured), times what one costs alone. In the loop's process: the ids that
the plan has are copied out of the chunks, compared with those that came, kept, and added up for a report. In the
dispatcher: the sum over the ids of the plan, once per epoch. The CPU per row is that of loader, worker, dispatcher and etcd
together over an epoch. Prints medians and writes build/audit_cost.json.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
from PIL import Image

import manifests
from feedline.local import LocalCluster
from manifests.identity import id_sum
from manifests.manifest import Manifest
from manifests.pipeline import Pipeline
from manifests.plan import Plan
from manifests.steps import CenterCrop, DecodeImage, Resize
from trainer_client import RemoteDataLoader
from trainer_client.books import Books
from trainer_client.session import Leg, Position

ROOT = Path(__file__).resolve().parent.parent
#: rows whose ids the dispatcher adds up at a time
_SUM = 1 << 18


def pictures(folder: Path) -> Manifest:
    """1024 JPEGs of 96 x 80 in 8 tar shards."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for shard in range(8):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(128):
                coarse = Image.fromarray(random.integers(0, 255, (10, 12, 3), np.uint8))
                out = io.BytesIO()
                coarse.resize((96, 80), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
                info = tarfile.TarInfo(f"{shard}-{number:05d}.jpg")
                info.size = out.tell()
                out.seek(0)
                tar.addfile(info, out)
    return manifests.build(str(folder), name="pictures", version="1")


def arrays(folder: Path) -> Manifest:
    """40,000 rows of 4 KB in 8 Arrow shards."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for shard in range(8):
        column = pa.FixedShapeTensorArray.from_numpy_ndarray(random.integers(0, 200, (5000, 1024)).astype(np.int32))
        schema = pa.schema([("x", column.type)])
        with pa.OSFile(str(folder / f"{shard}.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for at in range(0, len(column), 64):
                writer.write_batch(pa.record_batch([column[at : at + 64]], schema=schema))
    return manifests.build(str(folder), name="rows", version="1")


def cost(act: Callable[[], object], count: int) -> float:
    """CPU seconds of one call."""
    act()
    began = time.process_time()
    for _ in range(count):
        act()
    return (time.process_time() - began) / count


def operations(batch_size: int) -> dict[str, float]:
    """CPU microseconds: ``batch`` (per batch), ``report`` (per report, beside the sums), ``row_sum`` (per row, adding up
    for reports), ``row_audit`` (per row, at the dispatcher)."""
    plan = Plan(np.full(1000, 1000, np.int64), seed=1, epoch=0, shuffle=None, lanes=12)
    leg = Leg(plan, rank=0, world_size=1, batch_size=batch_size, tail="pad", taken=np.zeros(12, np.int64))
    ids = np.arange(100_000, dtype=np.int64)
    shards = ids // 1000
    books = Books(0, leg)
    at = 0

    def hand_out() -> None:
        # as ``Run._hand_out`` does it
        nonlocal at
        at = (at + batch_size) % (len(ids) - batch_size)
        inside = np.arange(at, at + batch_size)
        planned, of = np.empty(batch_size, np.int64), np.empty(batch_size, np.int64)
        planned[0:batch_size], of[0:batch_size] = ids[inside], shards[inside]
        books.acknowledge()
        books.hand_out(planned, ids[at : at + batch_size], 0, [], Position(1, 1), of)

    most = 2000  # below the number at which ids are added up
    per_batch = cost(hand_out, most)
    batches = most + 1
    began = time.process_time()
    books.progress()
    adding = time.process_time() - began
    report = cost(books.progress, 200)
    every = np.arange(_SUM, dtype=np.int64)
    return {
        "batch": 1e6 * per_batch,
        "report": 1e6 * report,
        "row_sum": 1e6 * max(0.0, adding - report) / (batches * batch_size),
        "row_audit": 1e6 * cost(lambda: id_sum(every), 5) / _SUM,
    }


def epoch(
    cluster: LocalCluster, dataset: str, pipeline: Pipeline | None, batch_size: int, job: str
) -> dict[str, float]:
    """CPU microseconds per row over one epoch of all processes, and the batches and reports in it."""
    progress, reports = Books.progress, 0

    def counted(self: Books) -> Any:
        nonlocal reports
        reports += 1
        return progress(self)

    pids = [child.process.pid for child in cluster.children]
    Books.progress = counted  # type: ignore[method-assign]
    try:
        with RemoteDataLoader(
            cluster.address, dataset=dataset, job=job, batch_size=batch_size, pipeline=pipeline, seed=1, audit=True
        ) as loader:
            rows = batches = 0
            before = sum(cpu(pid) for pid in pids) + time.process_time()
            for batch in loader:
                rows, batches = rows + len(batch["__id__"]), batches + 1
            used = sum(cpu(pid) for pid in pids) + time.process_time() - before
    finally:
        Books.progress = progress  # type: ignore[method-assign]
    return {"rows": rows, "batches": batches, "reports": reports, "row_us": 1e6 * used / rows}


def cpu(pid: int) -> float:
    """CPU seconds of a process and its children."""
    process = psutil.Process(pid)
    return sum(t.user + t.system for t in (p.cpu_times() for p in (process, *process.children(recursive=True))))


def share(found: dict[str, float], costs: dict[str, float]) -> dict[str, float]:
    """``audit_us`` per row and ``share`` of the CPU per row."""
    audit = (found["batches"] * costs["batch"] + found["reports"] * costs["report"]) / found["rows"]
    audit += costs["row_sum"] + costs["row_audit"]
    return {**found, "audit_us": audit, "share": audit / found["row_us"]}


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of the audit per row")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    small = Pipeline([DecodeImage(), Resize(72), CenterCrop(64)])
    kinds: tuple[tuple[str, Callable[[Path], Manifest], Pipeline | None], ...] = (
        ("pictures", pictures, small),
        ("rows of 4 KB", arrays, None),
    )
    out: dict[str, Any] = {"batch_size": options.batch_size, "rounds": options.rounds}
    with tempfile.TemporaryDirectory() as place:
        cluster = LocalCluster(Path(place) / "cluster", memory="1GiB", lease="10s", fsync=False)
        cluster.start(1)
        try:
            with cluster.client(30.0) as client:
                for name, make, _ in kinds:
                    client.register(make(Path(place) / name.split()[0]))
            for number in range(options.rounds + 1):  # the first warms up
                costs = operations(options.batch_size)
                for name, _, pipeline in kinds:
                    dataset = name.split()[0]
                    found = epoch(cluster, dataset, pipeline, options.batch_size, f"audit-{dataset}-{number}")
                    if number:
                        for key, value in {**share(found, costs), **costs}.items():
                            out.setdefault(name, {}).setdefault(key, []).append(value)
        finally:
            cluster.end()
    for name, _, _ in kinds:
        figures = out[name] = {key: statistics.median(values) for key, values in out[name].items()}
        print(
            f"{name}: audit {figures['audit_us']:.3f} us of {figures['row_us']:.1f} us CPU per row = "
            f"{100 * figures['share']:.2f} % (batch {figures['batch']:.1f} us, report {figures['report']:.0f} us, adding up "
            f"{1000 * figures['row_sum']:.1f} ns and auditing {1000 * figures['row_audit']:.1f} ns per row)"
        )
    target = ROOT / "build" / "audit_cost.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
