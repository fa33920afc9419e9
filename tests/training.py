"""Small datasets and training loops for tests of the loader: ranks as threads of this process, or in a fresh process.

Every row of a dataset made here holds its own sample id (field ``id``), so a loop can tell that the content which came
is that of the id it came under.

    python tests/training.py < spec.json > results.json      what ``fresh`` runs
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stored_data import write_tar

import manifests
from manifests.errors import FeedlineError
from manifests.manifest import Manifest
from trainer_client import RemoteDataLoader, Shuffle, gather_states

#: 20 uneven shards, 200 rows
UNEVEN = (7, 1, 30, 13, 2, 0, 9, 21, 2, 18, 1, 1, 16, 5, 40, 3, 8, 4, 12, 7)


def make_dataset(
    folder: Path, rows: Sequence[int], name: str = "numbers", version: str = "1", *, size: int = 40, first: int = 0
) -> Manifest:
    """Tar shards of these many rows; fields ``id`` (int64, counted from ``first``) and ``bin`` (``size`` bytes)."""
    folder.mkdir(parents=True, exist_ok=True)
    number = first
    for shard, count in enumerate(rows):
        members = []
        for row in range(number, number + count):
            members += [(f"{row:06d}.id", str(row).encode()), (f"{row:06d}.bin", bytes([row % 251]) * size)]
        write_tar(folder / f"shard-{shard:03d}.tar", members)
        number += count
    return manifests.build(str(folder), name=name, version=version)


@dataclass
class Rank:
    """What one rank's loop got."""

    #: ids of every batch, pads included
    ids: list[list[int]] = field(default_factory=list)
    #: whether each of them is a pad
    pads: list[list[bool]] = field(default_factory=list)
    #: len(loader), None where it has no end
    length: int | None = None
    #: state_dict() at the end, or gather_states()
    state: Any = None
    #: code and text of the error that ended the loop
    error: tuple[str, str] | None = None

    @property
    def real(self) -> list[int]:
        """Ids without pads, in order."""
        return [
            i
            for ids, pads in zip(self.ids, self.pads, strict=True)
            for i, pad in zip(ids, pads, strict=True)
            if not pad
        ]

    def add(self, batch: Mapping[str, Any]) -> None:
        """Note a batch; its content must be that of its ids."""
        ids = batch["__id__"].tolist()
        assert batch["id"].tolist() == ids
        assert all(data[:1] == bytes([i % 251]) for data, i in zip(batch["bin"], ids, strict=True))
        pads = batch["__pad__"].tolist() if "__pad__" in batch else [False] * len(ids)
        self.ids.append(ids)
        self.pads.append(pads)


def make_loader(address: str, **settings: Any) -> RemoteDataLoader:
    """A loader with defaults that suit tests."""
    chosen: dict[str, Any] = {
        "dataset": "numbers", "job": "job", "batch_size": 4, "seed": 1, "timeout": 30.0, "join_timeout": 20.0, **settings
    }  # fmt: skip
    if isinstance(chosen.get("shuffle"), Mapping):
        chosen["shuffle"] = Shuffle(**chosen["shuffle"])
    return RemoteDataLoader(address, **chosen)


def drain(loader: RemoteDataLoader, steps: int | None = None, delay: float = 0.0) -> Rank:
    """Iterate, up to ``steps`` batches; the state is taken where the loop stops. ``delay``: seconds after each batch."""
    rank = Rank()
    left = steps
    if left != 0:
        for batch in loader:
            rank.add(batch)
            time.sleep(delay)
            left = None if left is None else left - 1
            if left == 0:
                break
    rank.state = loader.state_dict()
    return rank


def in_threads(world: int, act: Callable[[int], Any]) -> list[Any]:
    """``act(rank)`` for every rank at once; the first error is raised once all have ended."""
    results: list[Any] = [None] * world
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank is still waiting after 90 s"
    return results


def run_ranks(
    address: str,
    world: int = 1,
    *,
    steps: int | None = None,
    state: Any = None,
    set_epoch: int | None = None,
    delay: float = 0.0,
    catch: bool = False,
    **settings: Any,
) -> list[Rank]:
    """All ranks of a job: load ``state`` if there is one, take ``steps`` batches (None: the whole pass), close.

    ``catch``: an error ends a rank as a result.
    """

    def act(rank: int) -> Rank:
        with make_loader(address, rank=rank, world_size=world, **settings) as loader:
            if state is not None:
                loader.load_state_dict(state)
            if set_epoch is not None:
                loader.set_epoch(set_epoch)
            try:
                found = drain(loader, steps, delay)
            except FeedlineError as error:
                if not catch:
                    raise
                return Rank(error=(error.code, str(error)))
            with contextlib.suppress(TypeError):
                found.length = len(loader)
            return found

    return in_threads(world, act)


def merged(ranks: Sequence[Rank]) -> list[list[int]]:
    """Global batches: ``stack(batches, dim=1).flatten(0, 1)``, without pads."""
    out = []
    for step in range(len(ranks[0].ids)):
        columns = [list(zip(rank.ids[step], rank.pads[step], strict=True)) for rank in ranks]
        out.append([i for slot in zip(*columns, strict=True) for i, pad in slot if not pad])
    return out


def flat(batches: Sequence[Sequence[int]]) -> list[int]:
    """All ids of all batches."""
    return [i for batch in batches for i in batch]


# -- fresh processes -----------------------------------------------------------------------------------------------


def start_fresh(address: str, world: int = 1, *, die: bool = False, **settings: Any) -> subprocess.Popen[str]:
    """``run_ranks`` in a new interpreter. ``die``: it ends without closing anything."""
    spec = {"address": address, "world": world, "die": die, "settings": settings}
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(spec))
    process.stdin.close()
    process.stdin = None
    return process


def end_fresh(process: subprocess.Popen[str], timeout: float = 60.0) -> list[Rank]:
    """Wait for it and read what its ranks got."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"not through after {timeout:g} s: {err[-3000:]}") from None
    assert process.returncode == 0, err[-3000:]
    return [Rank(**one) for one in json.loads(out)]


def fresh(address: str, world: int = 1, **settings: Any) -> list[Rank]:
    """``run_ranks`` in a new interpreter, waited for."""
    return end_fresh(start_fresh(address, world, **settings))


def _main() -> None:
    spec = json.load(sys.stdin)
    ranks: list[Rank] = []
    if "diary" in spec:
        _keep_diary(spec["address"], Path(spec["diary"]), **spec["settings"])
        return
    if spec["settings"].get("store"):
        ranks = [_with_gloo(spec["address"], **spec["settings"])]
    elif not spec["die"]:
        ranks = run_ranks(spec["address"], spec["world"], **spec["settings"])
    else:
        ranks = _without_close(spec["address"], spec["world"], **spec["settings"])
    json.dump([asdict(rank) for rank in ranks], sys.stdout)
    sys.stdout.flush()
    if spec["die"]:
        os._exit(0)  # no exit hooks: like a kill, but for the results


def _without_close(
    address: str,
    world: int,
    *,
    steps: int,
    state: Any = None,
    acks: Sequence[int] = (),
    linger: float = 0.0,
    **settings: Any,
) -> list[Rank]:
    """``steps`` batches of each rank, ``ack()`` after those numbered in ``acks``, loaders left open; ``linger`` seconds
    in which reports go out."""

    def act(rank: int) -> Rank:
        loader = make_loader(address, rank=rank, world_size=world, **settings)
        _kept.append(loader)
        if state is not None:
            loader.load_state_dict(state)
        found = Rank()
        for number, batch in enumerate(loader, 1):
            found.add(batch)
            if number in acks:
                loader.ack()
            if number == steps:
                break
        found.state = loader.state_dict()
        time.sleep(linger)
        return found

    return in_threads(world, act)


# -- one rank in a process that a test may kill --------------------------------------------------------------------


class RankProcess:
    """One rank in a process of its own that writes down each batch when it has it, so that nothing of what it got is lost
    when it is killed.

    Args:
        diary: the file. delay: seconds after each batch. ack_every: batches after which ``ack()`` is called (manual).
        hold: after how many batches it stops asking, and stays; None: never.
    """

    def __init__(
        self,
        address: str,
        diary: Path,
        *,
        delay: float = 0.0,
        ack_every: int = 1,
        hold: int | None = None,
        **settings: Any,
    ) -> None:
        self.diary = diary
        own = {"delay": delay, "ack_every": ack_every, "hold": hold}
        spec = {"address": address, "diary": str(diary), "settings": {**own, **settings}}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(spec))
        self.process.stdin.close()

    def lines(self) -> list[dict[str, Any]]:
        """What it wrote down until now."""
        text = self.diary.read_text() if self.diary.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    @property
    def batches(self) -> list[dict[str, Any]]:
        """``ids``, ``pads`` and ``epochs`` of every batch it got."""
        return [line for line in self.lines() if "ids" in line]

    @property
    def acked(self) -> int:
        """Batches it surely acknowledged."""
        return max([line["acked"] for line in self.lines() if "acked" in line], default=0)

    @property
    def end(self) -> dict[str, Any] | None:
        """``state`` and ``error`` (code and text, or None), once its loop is over."""
        return next((line for line in self.lines() if "state" in line), None)

    def wait_for(self, batches: int, timeout: float = 30.0) -> None:
        """Wait until it got so many batches."""
        self._wait(lambda: len(self.batches) >= batches, f"{batches} batches", timeout)

    def wait_end(self, timeout: float = 40.0) -> dict[str, Any]:
        """Wait until its loop is over."""
        self._wait(lambda: self.end is not None, "an end", timeout)
        found = self.end
        assert found is not None
        return found

    def _wait(self, condition: Callable[[], bool], what: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {timeout:g} s: {self.lines()[-2:]}"
            if self.process.poll() is not None and not condition():
                assert self.process.stderr is not None
                raise AssertionError(
                    f"no {what}, it ended with {self.process.returncode}: {self.process.stderr.read()}"
                )
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(10)
        self._close()

    def finish(self, timeout: float = 40.0) -> dict[str, Any]:
        """Wait until its loop and then the process is over."""
        found = self.wait_end(timeout)
        self.process.wait(20)
        self._close()
        return found

    def _close(self) -> None:
        if self.process.stderr is not None:
            self.process.stderr.close()

    def __enter__(self) -> RankProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._close()


def _keep_diary(
    address: str,
    path: Path,
    *,
    delay: float,
    ack_every: int,
    hold: int | None,
    state: Any = None,
    passes: int = 1,
    **settings: Any,
) -> None:
    with path.open("a") as diary, make_loader(address, **settings) as loader:

        def write(**line: Any) -> None:
            diary.write(json.dumps(line) + "\n")
            diary.flush()

        error = None
        if state is not None:
            loader.load_state_dict(state)
        try:
            number = 0
            for batch in (batch for _ in range(passes) for batch in loader):
                found = Rank()
                found.add(batch)
                epochs = batch["__epoch__"].tolist() if "__epoch__" in batch else []
                write(ids=found.ids[0], pads=found.pads[0], epochs=epochs)
                number += 1
                if settings.get("ack") == "manual" and number % ack_every == 0:
                    loader.ack()
                    write(acked=number)
                while hold is not None and number >= hold:
                    time.sleep(1.0)
                time.sleep(delay)
            if settings.get("ack") == "manual":
                loader.ack()
                write(acked=number)
        except FeedlineError as found_error:
            error = found_error.code, str(found_error)
        write(state=loader.state_dict(), error=error)


def _with_gloo(
    address: str, *, store: str, gloo_rank: int, gloo_world: int, stop: int | None = None, **settings: Any
) -> Rank:
    """One rank of a process group, whose rank and size the loader finds out itself; an all-reduce after every step.
    ``stop``: after how many steps it ends, with the states of all ranks as its state."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=gloo_rank, world_size=gloo_world)
    with make_loader(address, **settings) as loader:
        found = Rank(length=len(loader))
        for batch in loader:
            found.add(batch)
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == gloo_world
            if len(found.ids) == 1:
                states = gather_states(loader)
                assert [state["rank"] for state in states] == list(range(gloo_world))
                assert {int(state["step"]) for state in states} == {1}
            if len(found.ids) == stop:
                break
        found.state = loader.state_dict() if stop is None else gather_states(loader)
    dist.destroy_process_group()
    return found


_kept: list[RemoteDataLoader] = []


# -- audits --------------------------------------------------------------------------------------------------------


def check_audit(cluster: Any, job: str, epoch: int | None = None, **expected: Any) -> dict[str, Any]:
    """The audit of an epoch that is complete: nothing lost, nothing twice, the sums add up."""
    document = cluster.audit(job, epoch)
    deadline = time.monotonic() + 5
    while document["state"] != expected.get("state", "complete") and time.monotonic() < deadline:
        time.sleep(0.05)  # a report may still be on its way
        document = cluster.audit(job, epoch)
    wanted = {"state": "complete", "lost": 0, "repeated": 0, "shards": [], **expected}
    assert {key: document[key] for key in wanted} == wanted, document
    parts = ("acknowledged", "lost", "skipped", "dropped", "abandoned", "quarantined", "open")
    assert document["rows"] == sum(document[part] for part in parts), document
    return document


if __name__ == "__main__":
    _main()
