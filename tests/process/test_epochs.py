"""Whole epochs on a real cluster: every row once over all ranks, equal steps, the tails, several epochs, the books."""

import math
import threading
import time
import warnings

import pytest
import torch
from cluster import TestCluster
from training import UNEVEN, Rank, check_audit, drain, flat, in_threads, make_dataset, make_loader, merged, run_ranks

from manifests.errors import ConfigError, FeedlineError, FeedlineWarning
from trainer_client import RemoteDataset

ROWS = sum(UNEVEN)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with TestCluster(workers=2) as found:
        folder = tmp_path_factory.mktemp("numbers")
        found.register(make_dataset(folder / "uneven", UNEVEN))
        found.register(make_dataset(folder / "few", (5, 3), "few"))
        yield found


@pytest.fixture(scope="module", params=[1, 3], ids=["one-worker", "three-workers"])
def other_cluster(request, tmp_path_factory):
    """Clusters of one and of three workers, beside the one of two."""
    with TestCluster(workers=request.param) as found:
        found.register(make_dataset(tmp_path_factory.mktemp("numbers"), UNEVEN))
        yield found


def every_row_once(cluster, world: int) -> list[Rank]:
    job = f"once-{world}"
    ranks = run_ranks(cluster.address, world, job=job, batch_size=7, prefetch="4KiB")
    assert sorted(flat([rank.real for rank in ranks])) == list(range(ROWS))
    steps = math.ceil(math.ceil(ROWS / world) / 7)
    for rank in ranks:
        assert rank.length == len(rank.ids) == steps
        assert sum(map(len, rank.ids)) == math.ceil(ROWS / world)
        assert all(len(ids) == 7 for ids in rank.ids[:-1])
    padded = math.ceil(ROWS / world) * world - ROWS
    check_audit(cluster, job, 0, rows=ROWS, acknowledged=ROWS, handed_out=ROWS, padded=padded, open=0)
    return ranks


@pytest.fixture(scope="module")
def with_two_workers(cluster):
    """What each world size sees with two workers."""
    return {world: every_row_once(cluster, world) for world in (1, 2, 3)}


def test_every_row_once_over_all_ranks(with_two_workers):
    assert set(with_two_workers) == {1, 2, 3}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_case_17_the_order_does_not_depend_on_the_number_of_workers(other_cluster, with_two_workers, world):
    """case 17: with one worker and with three, each rank gets the rows in the order it gets them in with two."""
    ranks = every_row_once(other_cluster, world)
    assert [rank.ids for rank in ranks] == [rank.ids for rank in with_two_workers[world]]


def test_global_batches_are_equal_for_all_world_sizes(cluster):
    batches = {
        world: merged(run_ranks(cluster.address, world, job=f"global-{world}", batch_size=12 // world))
        for world in (1, 2, 3, 4)
    }
    assert all(found == batches[1] for found in batches.values())
    assert sorted(flat(batches[1])) == list(range(ROWS))


def test_one_rank_without_shuffle_reads_in_order(cluster):
    [rank] = run_ranks(cluster.address, 1, job="plain", shuffle=None, batch_size=16)
    assert flat(rank.ids) == list(range(ROWS))


def test_tail_drop(cluster):
    ranks = run_ranks(cluster.address, 3, job="drop", tail="drop", batch_size=7)
    steps = ROWS // 21
    for rank in ranks:
        assert [len(ids) for ids in rank.ids] == [7] * steps and rank.length == steps
    ids = flat([flat(rank.ids) for rank in ranks])
    assert len(ids) == len(set(ids)) == steps * 21
    check_audit(cluster, "drop", 0, dropped=ROWS - steps * 21, acknowledged=steps * 21, padded=0)


def test_tail_ragged(cluster):
    ranks = run_ranks(cluster.address, 3, job="ragged", tail="ragged", batch_size=7)
    assert sorted(flat([flat(rank.ids) for rank in ranks])) == list(range(ROWS))
    sizes = [sum(map(len, rank.ids)) for rank in ranks]
    assert max(sizes) - min(sizes) == 1
    assert (
        [rank.length for rank in ranks] == [len(rank.ids) for rank in ranks] == [math.ceil(size / 7) for size in sizes]
    )
    check_audit(cluster, "ragged", 0, acknowledged=ROWS, padded=0)


def test_batches_hold_tensors_and_lists(cluster):
    with make_loader(cluster.address, job="shapes", batch_size=5) as loader:
        batch = next(iter(loader))
    assert set(batch) == {"id", "bin", "__key__", "__id__", "__pad__"}
    assert batch["id"].dtype == batch["__id__"].dtype == torch.int64 and batch["id"].shape == (5,)
    assert batch["__pad__"].dtype == torch.bool and not batch["__pad__"].any()
    assert [type(value) for value in batch["bin"]] == [bytes] * 5
    assert batch["__key__"] == [f"{i:06d}" for i in batch["__id__"].tolist()]


@pytest.mark.parametrize(
    ("tail", "on_error", "there"),
    [("drop", "raise", False), ("ragged", "raise", False), ("drop", "skip", True), ("ragged", "skip", True)],
)
def test_the_pad_flag_is_there_where_pads_can_be(cluster, tail, on_error, there):
    with make_loader(cluster.address, job=f"flag-{tail}-{on_error}", tail=tail, on_error=on_error) as loader:
        assert ("__pad__" in next(iter(loader))) == there


def test_collate(cluster):
    with make_loader(cluster.address, job="collate", collate=lambda batch: sum(batch["id"].tolist())) as loader:
        sums = list(loader)
    assert sum(sums) == sum(range(ROWS))


def test_as_a_torch_dataset(cluster):
    """Wrapped in a DataLoader without batching, in this process."""
    dataset = RemoteDataset(cluster.address, dataset="numbers", job="wrapped", batch_size=16, seed=1, timeout=20.0)
    try:
        batches = [batch["__id__"].tolist() for batch in torch.utils.data.DataLoader(dataset, batch_size=None)]
        assert sorted(flat(batches))[: ROWS - 1] == list(range(ROWS))[: ROWS - 1]
        assert len(batches) == len(dataset) == 13
        state = dataset.state_dict()
        assert state["epoch"] == 1
    finally:
        dataset.close()


# -- several epochs ------------------------------------------------------------------------------------------------


def test_a_pass_of_several_epochs_and_the_next(cluster):
    with make_loader(cluster.address, job="passes", epochs=3, batch_size=32) as loader:
        steps = math.ceil(ROWS / 32)
        assert len(loader) == loader.steps_left == 3 * steps
        first, left = Rank(), []
        for batch in loader:
            first.add(batch)
            left.append(loader.steps_left)
        assert left[:-1] == list(range(3 * steps - 1, 0, -1))
        epochs = [flat(first.ids[at : at + steps]) for at in range(0, 3 * steps, steps)]
        second = drain(loader)
        epochs += [flat(second.ids[at : at + steps]) for at in range(0, 3 * steps, steps)]
        assert second.state["epoch"] == 6
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    for epoch in range(6):
        check_audit(cluster, "passes", epoch, acknowledged=ROWS)


def test_every_for_is_the_next_epoch_and_set_epoch_overrides_it_once(cluster):
    with make_loader(cluster.address, job="set-epoch", batch_size=50) as loader:
        zero, one = flat(drain(loader).ids), flat(drain(loader).ids)
        loader.set_epoch(4)
        four = drain(loader)
        assert four.state["epoch"] == 5
        five = flat(drain(loader).ids)
        loader.set_epoch(0)  # back: a new generation
        assert flat(drain(loader).ids) == zero
        assert flat(drain(loader).ids) == one
    assert len({tuple(ids) for ids in (zero, one, flat(four.ids), five)}) == 4
    with make_loader(cluster.address, job="set-epoch-4", batch_size=50) as loader:
        loader.set_epoch(4)
        assert drain(loader).ids == four.ids


def test_manual_acks_cover_epochs_that_are_behind(cluster):
    """ack() acknowledges every batch handed out so far, also those of the epoch before."""
    with make_loader(cluster.address, job="manual", epochs=2, batch_size=50, ack="manual") as loader:
        for step, _ in enumerate(loader, 1):
            if step == 5:
                assert cluster.audit("manual", 0)["acknowledged"] == 0
                loader.ack()
                assert cluster.audit("manual", 0)["acknowledged"] == ROWS
                assert cluster.audit("manual", 1)["acknowledged"] == 50
        loader.ack()
    check_audit(cluster, "manual", 0, acknowledged=ROWS)
    check_audit(cluster, "manual", 1, acknowledged=ROWS)


def test_ack_needs_manual(cluster):
    with make_loader(cluster.address, job="not-manual") as loader, pytest.raises(ConfigError, match="ack='manual'"):
        loader.ack()


def test_no_end_has_no_len(cluster):
    with make_loader(cluster.address, job="endless", epochs=None) as loader:
        with pytest.raises(TypeError, match="no end"):
            len(loader)
        with pytest.raises(TypeError, match="no end"):
            _ = loader.steps_left


# -- figures and ends ----------------------------------------------------------------------------------------------


def test_stats(cluster):
    with make_loader(cluster.address, job="stats") as loader:
        before = loader.stats()
        assert set(before) == {
            "wait_share",
            "step_s",
            "rows_per_s",
            "bytes_per_s",
            "queue_bytes",
            "hot_share",
            "workers",
        }
        assert before["rows_per_s"] == before["step_s"] == 0.0
        found = drain(loader)
        after = loader.stats()
    assert len(found.ids) == 50
    assert 0 <= after["wait_share"] <= 1 and after["rows_per_s"] > 0 and after["bytes_per_s"] > 0
    assert after["workers"] >= 1 and after["step_s"] > 0


def test_status_shows_the_job(cluster):
    run_ranks(cluster.address, 2, job="shown", batch_size=10)
    [job] = [job for job in cluster.status()["jobs"] if job["name"] == "shown"]
    assert job["dataset"] == "numbers@1" and job["steps_per_epoch"] == 10 and job["generation"] == 1
    assert [(rank["rank"], rank["state"], rank["step"]) for rank in job["ranks"]] == [(0, "done", 10), (1, "done", 10)]


def test_a_closed_loader_is_final(cluster):
    loader = make_loader(cluster.address, job="closed")
    iterator = iter(loader)
    next(iterator)
    loader.close()
    loader.close()
    with pytest.raises(ConfigError, match="closed"):
        next(iterator)
    with pytest.raises(ConfigError, match="closed"):
        iter(loader)


@pytest.fixture
def paused_workers(cluster):
    for worker in cluster.workers:
        cluster.pause(worker.child.name)
    yield
    for worker in cluster.workers:
        cluster.resume(worker.child.name)
    cluster.wait_workers(len(cluster.workers))


def test_a_loop_that_waits_can_be_saved_and_closed_by_another_thread(cluster, paused_workers):
    """The state is there at once; after close() the loop gets an error at once, not after its timeout."""
    with make_loader(cluster.address, job="woken", timeout=20.0) as loader:
        outcome: list[BaseException] = []

        def loop() -> None:
            try:
                next(iter(loader))
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=loop, name="loop")
        thread.start()
        cluster.wait_for("the loop waits", lambda: "Leg" in repr(loader))
        started = time.monotonic()
        assert int(loader.state_dict()["step"]) == 0
        assert time.monotonic() - started < 0.5
        loader.close()
        thread.join(5)
        assert not thread.is_alive()
        assert isinstance(outcome[0], ConfigError) and "closed" in str(outcome[0])


def test_a_loop_that_waits_for_ranks_can_be_closed_by_another_thread(cluster):
    with make_loader(cluster.address, job="lonely", rank=0, world_size=2, join_timeout=20.0) as loader:
        outcome: list[BaseException] = []

        def loop() -> None:
            try:
                iter(loader)
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=loop, name="loop")
        thread.start()
        cluster.wait_for("rank 0 joined", lambda: any(j["name"] == "lonely" for j in cluster.status()["jobs"]))
        assert int(loader.state_dict()["step"]) == 0
        loader.close()
        thread.join(5)
        assert not thread.is_alive()
        assert isinstance(outcome[0], FeedlineError) and "closed" in str(outcome[0])


def test_a_loop_left_with_its_last_batch_is_through(cluster):
    """A loop that counts its batches and breaks with the last has finished the epoch, not abandoned it."""
    with make_loader(cluster.address, job="counted", batch_size=50) as loader:
        for _ in range(2):
            assert len(drain(loader, 4).ids) == 4
        drain(loader)
    for epoch in range(3):
        check_audit(cluster, "counted", epoch, acknowledged=ROWS, abandoned=0)


def test_a_fresh_start_over_a_record_warns(cluster):
    run_ranks(cluster.address, 1, job="again", steps=3)
    with pytest.warns(FeedlineWarning, match=r"generation 1 at epoch 0 step \d.*afresh"):
        [rank] = run_ranks(cluster.address, 1, job="again")
    assert sorted(rank.real) == list(range(ROWS))
    audit = check_audit(cluster, "again", 0, acknowledged=ROWS)
    assert audit["generation"] == 2


def test_two_jobs_share_a_dataset(cluster):
    def act(number: int):
        with warnings.catch_warnings():
            return run_ranks(cluster.address, 1, job=f"share-{number}", seed=number)[0]

    one, two = in_threads(2, act)
    assert sorted(one.real) == sorted(two.real) and one.ids != two.ids


def test_a_manifest_file_instead_of_a_name(cluster, tmp_path):
    manifest = make_dataset(tmp_path / "data", (4, 5), "unregistered")
    manifest.save(tmp_path / "data.parquet")
    [rank] = run_ranks(cluster.address, 1, job="file", dataset=str(tmp_path / "data.parquet"))
    assert sorted(rank.real) == list(range(9))


def test_a_seed_that_was_not_given_is_drawn_and_kept(cluster):
    first = run_ranks(cluster.address, 2, job="drawn", seed=None, batch_size=25)
    seed = first[0].state["identity"]["seed"]
    assert first[1].state["identity"]["seed"] == seed and isinstance(seed, int)
    other = run_ranks(cluster.address, 2, job="drawn-again", seed=seed, batch_size=25)
    assert [rank.ids for rank in other] == [rank.ids for rank in first]
