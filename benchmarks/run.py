"""Measures feedline on this machine, each figure beside what it is compared with, in the same run.

    python benchmarks/run.py [NAME ..] [--rounds 5]      all, or: transport tokens decode position control
    python benchmarks/run.py --soak [--minutes 15]       memory, threads and descriptors over a long loop

Prints a table of medians and writes build/bench.json (or build/soak.json). Ratios are taken round by round, so that a
machine whose speed drifts does not decide.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import cases  # noqa: E402  (beside this file)
import soak  # noqa: E402

CASES: dict[str, Callable[[cases.Bench], dict[str, float]]] = {
    "transport": cases.transport,
    "tokens": cases.tokens,
    "decode": cases.decode,
    "position": cases.position,
    "control": cases.control,
}


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    import numpy
    import PIL
    import pyarrow
    import torch

    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyarrow": pyarrow.__version__,
        "numpy": numpy.__version__,
        "pillow": PIL.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*CASES, []], help="which to run; none: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--soak", action="store_true")
    parser.add_argument("--minutes", type=float, default=15.0)
    args = parser.parse_args()
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    if args.soak:
        with tempfile.TemporaryDirectory(prefix="feedline-bench-") as folder:
            found = soak.run(Path(folder), args.minutes)
        (build / "soak.json").write_text(json.dumps({"machine": machine(), "soak": found}, indent=2))
        print(json.dumps(found, indent=2))
        return 0
    results: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="feedline-bench-") as folder, cases.Bench(Path(folder)) as bench:
        for name in args.names or list(CASES):
            CASES[name](bench)  # warms up: caches, imports, connections
            rounds = [CASES[name](bench) for _ in range(args.rounds)]
            results[name] = {key: [r[key] for r in rounds] for key in rounds[0]}
            print(name)
            for key, values in results[name].items():
                print(f"  {key:44s} {statistics.median(values):12.3f}   ({min(values):.3f} .. {max(values):.3f})")
    (build / "bench.json").write_text(json.dumps({"machine": machine(), "results": results}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
