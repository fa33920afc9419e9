"""The whole of it in two minutes: ``make demo``.

Writes real pictures into tar shards, builds and registers manifests, starts a local cluster with two workers, trains,
stops in the middle of an epoch, kills a worker, resumes in a new process, and asks ``feedline audit`` what was
delivered. The report is printed and written to build/demo.json; the exit status is 1 if a row was lost or repeated, or
the network learnt too little.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from make_digits import write_all

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
FOLDER = BUILD / "demo"
REPORT = BUILD / "demo.json"
FEEDLINE = [sys.executable, "-m", "feedline"]
EPOCHS, BATCH, STOP_AFTER = 10, 32, 110
WANTED = 0.95


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


def feedline(*line: str, statuses: tuple[int, ...] = (0,)) -> str:
    """Run a command. Returns what it prints; ends the demo when its exit status is another than expected."""
    done = subprocess.run([*FEEDLINE, *line], stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    if done.returncode not in statuses:
        raise SystemExit(f"demo: feedline {' '.join(line)}: exit status {done.returncode}")
    return done.stdout


def make_data() -> list[Path]:
    """Shards and manifests below build/demo. Returns the manifests."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    manifests = []
    for name, shards in write_all(FOLDER / "data").items():
        manifest = FOLDER / f"{name}.parquet"
        feedline("manifest", "build", str(shards[0].parent), "--name", name, "--version", "1", "-o", str(manifest))
        manifests.append(manifest)
        say(f"{name}: {len(shards)} shards of {min(s.stat().st_size for s in shards):,} to "
            f"{max(s.stat().st_size for s in shards):,} bytes")  # fmt: skip
    return manifests


class Cluster:
    """``feedline up`` as a process of its own."""

    def __init__(self) -> None:
        log = open(FOLDER / "cluster.log", "w", encoding="utf-8")  # noqa: SIM115 (the child's stderr)
        with log:
            self.process = subprocess.Popen(
                [*FEEDLINE, "up", "--workers", "2", "--json"], stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"demo: the cluster did not start, see {FOLDER / 'cluster.log'}")
        self.ready: dict[str, Any] = json.loads(line)
        os.environ["FEEDLINE_DISPATCHER"] = self.ready["dispatcher"]
        say(f"dispatcher at {self.ready['dispatcher']}, {len(self.ready['workers'])} workers")

    def kill_worker(self) -> None:
        """SIGKILL to the first worker."""
        worker = self.ready["workers"][0]
        os.kill(worker["pid"], signal.SIGKILL)
        say(f"killed worker {worker['id']} (pid {worker['pid']}) with SIGKILL")

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


def train(name: str, *options: str, on_epoch: Any = None) -> dict[str, Any]:
    """One leg of examples/train_digits.py in a new process. ``on_epoch`` is called at each epoch it enters."""
    report = FOLDER / f"{name}.json"
    program = [sys.executable, str(ROOT / "examples" / "train_digits.py")]
    checkpoint = FOLDER / "checkpoint.pt"
    settings = ["--epochs", str(EPOCHS), "--batch-size", str(BATCH), "--checkpoint", str(checkpoint)]
    line = [*program, *settings, "--report", str(report), *options]
    # stderr stays the terminal's: the progress bar
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("epoch ") and on_epoch is not None:
                on_epoch(int(text.split()[1]))
    if process.returncode != 0:
        raise SystemExit(f"demo: training leg {name}: exit status {process.returncode}")
    figures: dict[str, Any] = json.loads(report.read_text())
    return figures


def audit(job: str, epochs: int) -> dict[str, int]:
    """What ``feedline audit`` says, summed over all epochs of a job."""
    total = dict.fromkeys(("rows", "acknowledged", "lost", "repeated", "rewound", "incomplete"), 0)
    for epoch in range(epochs):
        books = json.loads(feedline("audit", job, "--epoch", str(epoch), "--json", statuses=(0, 1, 3)))
        for key in total:
            total[key] += int(books["state"] != "complete") if key == "incomplete" else books[key]
    return total


def main() -> int:
    start = time.monotonic()
    BUILD.mkdir(exist_ok=True)
    REPORT.unlink(missing_ok=True)
    manifests = make_data()
    cluster = Cluster()
    try:
        for manifest in manifests:
            say("registered " + feedline("manifest", "register", str(manifest)).strip())
        first = train("first", "--stop-after", str(STOP_AFTER))
        say(f"first leg: stopped after step {STOP_AFTER}, in the middle of an epoch; state saved")
        entered: list[int] = []

        def kill_in_the_second(epoch: int) -> None:
            # by then reads of this leg are under way on both workers
            entered.append(epoch)
            if len(entered) == 2:
                cluster.kill_worker()

        second = train("second", "--resume", str(FOLDER / "checkpoint.pt"), on_epoch=kill_in_the_second)
        if len(entered) < 2:
            raise SystemExit("demo: the second leg ended before a worker was killed")
        subprocess.run(
            [sys.executable, str(ROOT / "examples" / "read_photos.py")], check=True, stdout=subprocess.DEVNULL
        )
        books = {"digits": audit("digits", EPOCHS), "photos": audit("photos", 1)}
        print(feedline("status"))
    finally:
        cluster.close()
    return report(first, second, books, time.monotonic() - start)


def report(first: dict[str, Any], second: dict[str, Any], books: dict[str, dict[str, int]], seconds: float) -> int:
    """Print and write the figures. Returns the exit status."""
    training = first["seconds"] + second["seconds"]
    waited = sum(leg["wait_share"] * leg["seconds"] for leg in (first, second))
    lost = sum(book["lost"] for book in books.values())
    repeated = sum(book["repeated"] for book in books.values())
    figures = {
        "accuracy": round(second["accuracy"], 4),
        "delivered": sum(book["acknowledged"] for book in books.values()),
        "lost": lost,
        "repeated": repeated,
        "wait_share": round(waited / training, 4),
        "samples_per_s": round((first["rows"] + second["rows"]) / training, 1),
        "seconds": round(seconds, 1),
        "audit": books,
    }
    REPORT.write_text(json.dumps(figures, indent=2) + "\n")
    rows = sum(book["rows"] for book in books.values())
    incomplete = sum(book["incomplete"] for book in books.values())
    print(
        f"\naccuracy on held-out digits   {figures['accuracy']:.1%}"
        f"\ndelivered                     {figures['delivered']:,} of {rows:,} rows in {EPOCHS + 1} epochs"
        f"\nlost, repeated                {lost}, {repeated}"
        f"\nwaited for data               {figures['wait_share']:.1%} of the training time"
        f"\nsamples per second            {figures['samples_per_s']:,.0f}"
        f"\nwhole demo                    {figures['seconds']:.0f} s; figures in {REPORT.relative_to(ROOT)}"
    )
    problems = []
    if figures["accuracy"] < WANTED:
        problems.append(f"accuracy is below {WANTED:.0%}")
    if lost or repeated or incomplete:
        problems.append(f"{lost} rows lost, {repeated} repeated, {incomplete} epochs not complete")
    for problem in problems:
        print(f"demo: FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
