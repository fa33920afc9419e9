"""One rank of a training job as a process: it writes down every batch it gets and saves its state every few steps.

    python tests/trainer.py < spec.json

Lines of ``FOLDER/rank-R.jsonl``: {"leg", "epoch", "step", "ids", "pads", "epochs"}, written before the next batch is
asked for; ``FOLDER/state-R-E-S.json`` for every ``every`` steps of an epoch, written in whole or not at all. Line "error"
at the end if the loop ended with one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from training import make_loader

from manifests.errors import FeedlineError


class Trainer:
    """A rank that runs, or ran.

    Args:
        folder: where it writes. leg: number of this start. state: what to load. settings: of the loader.
    """

    def __init__(self, folder: Path, rank: int, leg: int, *, state: Any = None, **settings: Any) -> None:
        self.folder, self.rank, self.leg = folder, rank, leg
        spec = {"folder": str(folder), "rank": rank, "leg": leg, "state": state, "settings": settings}
        self._log = (folder / f"rank-{rank}-{leg}.log").open("wb")
        self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stderr=self._log)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(spec).encode())
        self.process.stdin.close()

    def wait(self, timeout: float) -> int:
        """Its exit status."""
        try:
            return self.process.wait(timeout)
        finally:
            self._log.close()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        self._log.close()

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    @property
    def log(self) -> str:
        """End of what it wrote to stderr."""
        return (self.folder / f"rank-{self.rank}-{self.leg}.log").read_text(errors="replace")[-3000:]


def batches(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Every batch the rank got, over all its starts, in order. A line that was being written at a kill is left out:
    nobody saw that batch to its end."""
    path = folder / f"rank-{rank}.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.split("\n")[:-1]]
    return [line for line in lines if "ids" in line]


def errors(folder: Path, rank: int) -> list[dict[str, Any]]:
    """How its loops ended, where it was with an error."""
    path = folder / f"rank-{rank}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [found for line in text.split("\n")[:-1] if "error" in (found := json.loads(line))]


def saved(folder: Path, world: int) -> tuple[int, int] | None:
    """(epoch, step) of the last place at which all ranks saved a state."""
    places = []
    for rank in range(world):
        names = [path.stem.split("-") for path in folder.glob(f"state-{rank}-*.json")]
        places.append({(int(name[2]), int(name[3])) for name in names})
    return max(set.intersection(*places), default=None)


def states(folder: Path, world: int, place: tuple[int, int]) -> list[Any]:
    """The states of all ranks saved there."""
    return [json.loads((folder / f"state-{rank}-{place[0]}-{place[1]}.json").read_text()) for rank in range(world)]


def _main() -> None:
    spec = json.load(sys.stdin)
    folder, rank = Path(spec["folder"]), spec["rank"]
    settings = dict(spec["settings"])
    address, delay, every = settings.pop("address"), settings.pop("delay", 0.0), settings.pop("every", 0)
    with (folder / f"rank-{rank}.jsonl").open("a") as out:

        def write(line: dict[str, Any]) -> None:
            out.write(json.dumps({"leg": spec["leg"], **line}) + "\n")
            out.flush()

        try:
            with make_loader(address, rank=rank, **settings) as loader:
                if spec["state"] is not None:
                    loader.load_state_dict(spec["state"])
                before = loader.state_dict()
                for batch in loader:
                    state = loader.state_dict()
                    # the batch belongs to the epoch in which the state before it was
                    epoch, step = before["epoch"], int(before["step"])
                    pads = batch["__pad__"].tolist() if "__pad__" in batch else []
                    epochs = batch["__epoch__"].tolist() if "__epoch__" in batch else []
                    assert batch["id"].tolist() == batch["__id__"].tolist()
                    write(
                        {"epoch": epoch, "step": step, "ids": batch["__id__"].tolist(), "pads": pads, "epochs": epochs}
                    )
                    before = state
                    if every and int(state["step"]) % every == 0:
                        name = f"state-{rank}-{state['epoch']}-{int(state['step'])}.json"
                        (folder / f"{name}.new").write_text(json.dumps(state))
                        os.replace(folder / f"{name}.new", folder / name)
                    time.sleep(delay)
        except FeedlineError as error:
            write({"error": error.code, "text": str(error)})
            raise


if __name__ == "__main__":
    _main()
