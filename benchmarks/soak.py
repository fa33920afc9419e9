"""A long loop over a cluster: does anything grow?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import cases
import numpy as np
import psutil

import manifests


def _sample(process: psutil.Process) -> dict[str, float]:
    with process.oneshot():
        return {
            "rss_mib": process.memory_info().rss / (1 << 20),
            "threads": process.num_threads(),
            "files": process.num_fds(),
        }


def run(folder: Path, minutes: float) -> dict[str, Any]:
    """Train on pictures for ``minutes``; slopes over the last half in MiB per hour, threads and descriptors at both
    ends, per process."""
    with cases.Bench(folder) as bench:
        names = {"client": psutil.Process()}
        names |= {child.name: psutil.Process(child.pid) for child in bench.cluster.children if child.poll() is None}
        series: dict[str, list[tuple[float, dict[str, float]]]] = {name: [] for name in names}
        pipeline = manifests.Pipeline([manifests.DecodeImage(), manifests.Resize((224, 224))])
        start = last = time.monotonic()
        rows = 0
        with bench.loader("jpeg", 32, pipeline=pipeline, epochs=None) as loader:
            for batch in loader:
                rows += len(batch["__id__"])
                now = time.monotonic()
                if now - last >= 1.0:
                    last = now
                    for name, process in names.items():
                        series[name].append((now - start, _sample(process)))
                if now - start > minutes * 60:
                    break
    found: dict[str, Any] = {"minutes": minutes, "rows": rows, "processes": {}}
    for name, samples in series.items():
        half = samples[len(samples) // 2 :]
        slope = np.polyfit([t for t, _ in half], [s["rss_mib"] for _, s in half], 1)[0] * 3600
        found["processes"][name] = {
            "rss_mib_per_hour": round(float(slope), 2),
            "rss_mib_end": round(half[-1][1]["rss_mib"], 1),
            "threads": [half[0][1]["threads"], half[-1][1]["threads"]],
            "files": [half[0][1]["files"], half[-1][1]["files"]],
        }
    return found
