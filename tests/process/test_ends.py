"""Ends that are easy to get wrong: shutdowns on the other side, shares of unequal size, skips just before a kill, a
callback that raises, a place given back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import TestCluster
from stored_data import write_tar

import manifests
from trainer_client import RemoteDataLoader
from trainer_client.errors import RankAbsent, StateIncomplete, TooManyBadSamples


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[manifests.Manifest]:
    """``plain`` (300 rows in 20 shards), ``tiny-N`` (N rows in one), ``bad`` (16 rows, 1 to 3 unreadable)."""
    folder = tmp_path_factory.mktemp("ends")
    (folder / "plain").mkdir()
    for shard in range(20):
        rows = range(shard * 15, shard * 15 + 15)
        write_tar(folder / "plain" / f"{shard:02d}.tar", [(f"{row:04d}.cls", b"%d" % row) for row in rows])
    made = [manifests.build(str(folder / "plain"), name="plain", version="1")]
    for count in (3, 5, 14):
        path = write_tar(folder / f"tiny-{count}.tar", [(f"{count}-{row}.cls", b"1") for row in range(count)])
        made.append(manifests.build(str(path), name=f"tiny-{count}", version="1"))
    one = [(f"o{row}.cls", b"7" if row == 3 else b"x") for row in range(5)]
    made.append(manifests.build(str(write_tar(folder / "one.tar", one)), name="one-good", version="1"))
    path = write_tar(folder / "bad.tar", [(f"{row:02d}.cls", b"x" if row in (1, 2, 3) else b"7") for row in range(16)])
    return [*made, manifests.build(str(path), name="bad", version="1")]


@pytest.fixture(scope="module")
def cluster(data: list[manifests.Manifest]) -> Iterator[TestCluster]:
    with TestCluster(workers=2) as found:
        for manifest in data:
            found.register(manifest)
        yield found


@pytest.fixture
def own_cluster(data: list[manifests.Manifest]) -> Iterator[TestCluster]:
    """For tests that replace its processes."""
    with TestCluster(workers=1) as found:
        found.register(data[0])
        yield found


def load(cluster: TestCluster, dataset: str, job: str, **settings: Any) -> RemoteDataLoader:
    settings = {"batch_size": 4, "timeout": 20.0, "shuffle": None, "seed": 1} | settings
    return RemoteDataLoader(cluster.address, dataset=dataset, job=job, **settings)


def real(batch: dict[str, Any]) -> list[int]:
    ids = batch["__id__"]
    return ids[~batch["__pad__"]].tolist() if "__pad__" in batch else ids.tolist()


def on_ranks(world: int, work: Any) -> list[Any]:
    """Run ``work(rank)`` on a thread per rank; results in rank order, the first exception raised."""
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_a_dispatcher_that_is_asked_to_end_ends_no_thread_of_a_trainer(own_cluster: TestCluster) -> None:
    """SIGTERM cancels calls under way; the trainer takes that for a broken connection and goes on with the next one."""
    ids: list[int] = []
    with load(own_cluster, "plain", "sigterm", batch_size=2, prefetch="1KiB") as loader:
        for step, batch in enumerate(loader):
            ids += real(batch)
            if step in (10, 50, 90, 130):
                own_cluster.restart_dispatcher(kill=False)
    assert sorted(ids) == list(range(300))
    books = own_cluster.audit("sigterm")
    assert (books["state"], books["lost"], books["repeated"]) == ("complete", 0, 0)


@pytest.mark.parametrize("who", ["rank 0", "rank 1", "both"])
def test_a_rank_with_a_smaller_share_saves_a_place_inside_the_epoch(cluster: TestCluster, who: str) -> None:
    """Ragged, three rows on two ranks: rank 1 is through after one step, rank 0 is not. Whichever state is loaded, the
    third row comes."""
    job = f"ragged-{who[-1]}"

    def first(rank: int) -> tuple[list[int], dict[str, Any]]:
        with load(cluster, "tiny-3", job, rank=rank, world_size=2, batch_size=1, tail="ragged") as loader:
            ids = real(next(iter(loader)))
            return ids, loader.state_dict()

    begun = on_ranks(2, first)
    states = [state for _, state in begun]
    chosen = {"rank 0": states[0], "rank 1": states[1], "both": states}[who]

    def second(rank: int) -> list[int]:
        with load(cluster, "tiny-3", job, rank=rank, world_size=2, batch_size=1, tail="ragged") as loader:
            loader.load_state_dict(chosen)
            return [i for batch in loader for i in real(batch)]

    rest = on_ranks(2, second)
    assert sorted(i for ids in [*(ids for ids, _ in begun), *rest] for i in ids) == [0, 1, 2]
    books = cluster.audit(job, 0)
    assert (books["state"], books["acknowledged"], books["lost"], books["repeated"]) == ("complete", 3, 0, 0)


def test_ragged_states_at_the_very_end_fit_together(cluster: TestCluster) -> None:
    """Ranks end at different steps; the list of what they then say is the beginning of the next epoch."""

    def whole(rank: int) -> dict[str, Any]:
        with load(cluster, "tiny-3", "ends", rank=rank, world_size=2, batch_size=1, tail="ragged") as loader:
            list(loader)
            return loader.state_dict()

    states = on_ranks(2, whole)
    joined = load(cluster, "tiny-3", "ends", rank=0, world_size=2, batch_size=1, tail="ragged")
    joined.load_state_dict(states)
    assert (joined.state_dict()["epoch"], int(joined.state_dict()["step"])) == (1, 0)
    joined.close()


def test_under_skip_a_lone_state_of_a_rank_that_is_through_is_not_enough(cluster: TestCluster) -> None:
    """The other rank saved none there, so there is no mark to complete it."""

    def part(rank: int) -> dict[str, Any] | None:
        with load(
            cluster, "tiny-5", "lone", rank=rank, world_size=2, batch_size=1, tail="ragged", on_error="skip"
        ) as loader:
            for _, _ in zip(range(2), loader):
                pass
            return loader.state_dict() if rank == 1 else None

    states = on_ranks(2, part)
    with load(cluster, "tiny-5", "lone", rank=0, world_size=2, batch_size=1, on_error="skip") as loader:
        loader.load_state_dict(states[1])
        with pytest.raises(StateIncomplete, match="ranks 0:"):
            next(iter(loader))


SKIPS = """
import json, os, signal, sys
from trainer_client import RemoteDataLoader
loader = RemoteDataLoader(
    sys.argv[1], dataset="bad", job="killed", batch_size=4, shuffle=None, seed=1, on_error="skip", max_bad=3, timeout=20
)
for batch in loader:
    ids = batch["__id__"][~batch["__pad__"]].tolist()
    print(json.dumps([ids, loader.state_dict()]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_rows_skipped_just_before_a_kill_are_on_record(cluster: TestCluster) -> None:
    """A state counts skipped rows as taken; the audit must know that they were skipped, even if the process dies right
    after the state was saved."""
    done = subprocess.run(
        [sys.executable, "-c", SKIPS, cluster.address],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    ids, state = json.loads(done.stdout)
    with load(cluster, "bad", "killed", on_error="skip", max_bad=3) as loader:
        loader.load_state_dict(state)
        ids += [i for batch in loader for i in real(batch)]
    assert sorted(ids) == [0, *range(4, 16)]
    books = cluster.audit("killed")
    assert (books["state"], books["acknowledged"], books["skipped"], books["lost"]) == ("complete", 13, 3, 0), books


def test_a_bad_row_is_charged_once_also_when_pads_meet_it(cluster: TestCluster) -> None:
    """Pads repeat rows from the beginning; a bad one among them is passed over and is no further bad sample."""
    with load(cluster, "bad", "pads", batch_size=5, on_error="skip", max_bad=3) as loader:
        batches = list(loader)
    assert [len(batch["__id__"]) for batch in batches] == [5, 5, 5, 1]
    assert sum(int(batch["__pad__"].sum()) for batch in batches) == 3
    assert not {1, 2, 3} & {i for batch in batches for i in batch["__id__"].tolist()}


def test_one_good_row_fills_every_pad(cluster: TestCluster) -> None:
    """Four of five rows are bad; a rank whose own rows are all bad repeats the good one, flagged."""

    def work(rank: int) -> list[tuple[int, bool]]:
        with load(
            cluster, "one-good", "one", rank=rank, world_size=2, batch_size=5, on_error="skip", max_bad=5
        ) as loader:
            return [
                pair
                for batch in loader
                for pair in zip(batch["__id__"].tolist(), batch["__pad__"].tolist(), strict=True)
            ]

    assert on_ranks(2, work) == [[(3, True)] * 3, [(3, False), (3, True), (3, True)]]
    books = cluster.audit("one")
    assert (books["state"], books["acknowledged"], books["skipped"], books["lost"]) == ("complete", 1, 4, 0)


def test_no_good_row_at_all_is_an_error(cluster: TestCluster, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "none.tar", [(f"n{row}.cls", b"x") for row in range(4)])
    cluster.register(manifests.build(str(path), name="none-good", version="1"))
    with (
        load(cluster, "none-good", "none", on_error="skip", max_bad=1.0) as loader,
        pytest.raises(TooManyBadSamples, match="no row"),
    ):
        list(loader)


def test_a_collate_that_raises_keeps_its_batch(cluster: TestCluster) -> None:
    """The position moves only once the batch is made: what raised is handed out by the next call."""
    failures = iter([False, True, False, False, False, False])

    def collate(batch: dict[str, Any]) -> dict[str, Any]:
        if next(failures):
            raise RuntimeError("not this time")
        return batch

    with load(cluster, "tiny-14", "collate", collate=collate) as loader:
        iterator = iter(loader)
        ids = real(next(iterator))
        before = loader.state_dict()
        with pytest.raises(RuntimeError):
            next(iterator)
        assert loader.state_dict() == before
        ids += [i for batch in iterator for i in real(batch)]
    assert ids == list(range(14))


def test_a_rank_that_gives_up_waiting_gives_its_place_back(cluster: TestCluster) -> None:
    """After RankAbsent another start of the job does not have to wait for the lease."""
    with (
        load(cluster, "tiny-5", "absent", rank=0, world_size=2, join_timeout=0.5) as alone,
        pytest.raises(RankAbsent, match="rank 1"),
    ):
        iter(alone)
    started = time.monotonic()
    with load(cluster, "tiny-5", "absent") as loader:
        assert len(list(loader)) == 2
    assert time.monotonic() - started < 1.5


def test_close_takes_five_seconds_at_most_without_a_dispatcher(own_cluster: TestCluster) -> None:
    loader = load(own_cluster, "plain", "away", batch_size=2)
    next(iter(loader))
    own_cluster.stop_dispatcher()
    try:
        started = time.monotonic()
        loader.close()
        assert time.monotonic() - started < 6.5
    finally:
        own_cluster.start_dispatcher()


def test_more_shards_than_grants_are_held_at_once(own_cluster: TestCluster, tmp_path: Path) -> None:
    """A stretch of rows over hundreds of tiny shards is read in waves of grants."""
    for shard in range(300):
        write_tar(tmp_path / f"{shard}.tar", [(f"{shard:03d}-{row}.cls", b"1") for row in range(2)])
    own_cluster.register(manifests.build(str(tmp_path), name="many", version="1"))
    with load(own_cluster, "many", "many", batch_size=64, shuffle=None) as loader:
        assert [i for batch in loader for i in real(batch)] == list(range(600))
