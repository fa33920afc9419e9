"""Saving and resuming on a real cluster: before and after together are the epoch, each id once, in the order that an
uninterrupted run has. Hard cases 1 to 7."""

import io
import json
import pickle
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from cluster import TestCluster
from PIL import Image
from stored_data import write_tar
from training import (
    UNEVEN,
    check_audit,
    drain,
    flat,
    fresh,
    in_threads,
    make_dataset,
    make_loader,
    merged,
    run_ranks,
)

import manifests
from manifests.errors import ConfigError, FeedlineWarning, StateIncomplete, StateMismatch
from manifests.pipeline import Pipeline
from manifests.steps import DecodeImage
from trainer_client import Shuffle, gather_states

ROWS = sum(UNEVEN)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with TestCluster(workers=2) as found:
        folder = tmp_path_factory.mktemp("numbers")
        found.register(make_dataset(folder / "uneven", UNEVEN))
        found.register(make_dataset(folder / "four", (24, 24, 24, 24), "four"))
        for rows in (32, 34, 64):
            found.register(make_dataset(folder / str(rows), (rows - 20, 13, 7), f"rows-{rows}"))
        yield found


@pytest.fixture(scope="module")
def whole(cluster):
    """Global batches of an uninterrupted epoch, 12 rows each."""
    return merged(run_ranks(cluster.address, 1, job="whole", batch_size=12))


# -- fresh processes -----------------------------------------------------------------------------------------------


def run_chain(cluster, stops: tuple[int | None, ...], shuffle: dict) -> None:
    settings = {"dataset": "four", "shuffle": shuffle, "batch_size": 4}
    want = flat(run_ranks(cluster.address, job="chain-whole", **settings)[0].ids)
    seen, state = [], None
    for number, stop in enumerate(stops):
        steps = None if stop is None else stop - (0 if state is None else int(state["step"]))
        [leg] = fresh(cluster.address, job="chain", state=state, steps=steps, die=stop is not None, **settings)
        seen += flat(leg.ids)
        state = leg.state
        assert state["generation"] == number + 1
        assert int(state["step"]) == (stop or 0) and state["epoch"] == (stop is None)
    assert seen == want
    check_audit(cluster, "chain", 0, acknowledged=96, handed_out=96, rewound=0)


def test_case_1_chains_of_resumes_in_fresh_processes(tmp_path):
    """case 1: killed again and again and resumed each time from the state of the last leg, the ids in a row are those
    of one whole run. The state that a resumed run saves must count from the epoch's beginning, not from its own.

    As stored with one worker, stopped after 5, 9 and 14 batches; shuffled with three, at five positions.
    """
    chains = [
        (1, (5, 9, 14, None), {"buffer": 0}),
        (3, (1, 6, 12, 17, 23, None), {"buffer": 64, "interleave": 2}),
    ]
    manifest = make_dataset(tmp_path, (24, 24, 24, 24), "four")

    def act(number: int) -> None:
        workers, stops, shuffle = chains[number]
        with TestCluster(workers=workers) as found:
            found.register(manifest)
            run_chain(found, stops, shuffle)

    in_threads(2, act)


def test_five_positions_of_one_run(cluster, whole):
    """Each state of an uninterrupted run, loaded under a job name of its own."""
    states = []
    with make_loader(cluster.address, job="positions", batch_size=12) as loader:
        states += [json.loads(json.dumps(loader.state_dict())) for _ in loader]
    for step in (1, 4, 8, 13, 16):
        [rank] = run_ranks(cluster.address, job=f"position-{step}", batch_size=12, state=states[step - 1])
        assert rank.ids == whole[step:] and rank.length == len(whole)
        check_audit(cluster, f"position-{step}", 0, acknowledged=ROWS)


def test_a_process_that_dies_is_resumed_from_its_last_state_by_other_ranks(cluster, whole):
    """Two ranks die after step 6 of which the state of step 4 was kept; three ranks of a new process go on from there."""
    with warnings.catch_warnings():
        first = fresh(cluster.address, 2, job="died", batch_size=6, steps=4, die=True)
        assert merged(first) == whole[:4]
        again = fresh(cluster.address, 2, job="died", batch_size=6, steps=2, state=first[1].state, die=True, linger=1.2)
        assert merged(again) == whole[4:6]
        rest = fresh(cluster.address, 3, job="died", batch_size=4, state=first[0].state)
    assert merged(rest) == whole[4:]
    check_audit(cluster, "died", 0, acknowledged=ROWS, rewound=24, handed_out=ROWS + 24)


# -- other world and batch sizes -----------------------------------------------------------------------------------


def test_a_chain_over_world_sizes_keeps_the_global_batches(cluster, whole):
    """1 rank of 12, then 2 of 6, 3 of 4, 4 of 3: global batches of 12 rows all along."""
    seen, state = [], None
    for world, steps in ((1, 3), (2, 5), (3, 1), (4, None)):
        ranks = run_ranks(cluster.address, world, job="worlds", batch_size=12 // world, state=state, steps=steps)
        seen += merged(ranks)
        state = ranks[-1].state
        assert len({len(rank.ids) for rank in ranks}) == 1
    assert seen == whole
    check_audit(cluster, "worlds", 0, acknowledged=ROWS, rewound=0)


def test_other_batch_sizes(cluster):
    want = flat(run_ranks(cluster.address, 1, job="sizes-whole", batch_size=12)[0].ids)
    seen, state = [], None
    for size, steps in ((5, 7), (16, 2), (3, 11), (50, None)):
        [rank] = run_ranks(cluster.address, 1, job="sizes", batch_size=size, state=state, steps=steps)
        seen += flat(rank.ids)
        state = rank.state
    assert seen == want
    check_audit(cluster, "sizes", 0, acknowledged=ROWS)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_case_5_another_world_size_takes_every_row_over(cluster, before, after):
    """case 5: saved by some ranks after 3 steps, resumed by fewer or more: no rank's rest is left behind."""
    job = f"world-{before}-{after}"
    settings = {"job": job, "dataset": "rows-64", "batch_size": 4}
    first = run_ranks(cluster.address, before, steps=3, **settings)
    second = run_ranks(cluster.address, after, state=[rank.state for rank in first], **settings)
    ids = flat([rank.real for rank in (*first, *second)])
    assert sorted(ids) == list(range(64))
    assert len({len(rank.ids) for rank in second}) == 1
    check_audit(cluster, job, 0, acknowledged=64)


def test_case_5_a_world_size_that_does_not_fit_is_refused_with_those_that_do(cluster):
    """case 5: never a silent partial load."""
    [rank] = run_ranks(cluster.address, 1, job="lanes", steps=2)
    with pytest.raises(StateMismatch, match=r"world_size 5 .* 12 lanes .*1, 2, 3, 4, 6, 12"):
        run_ranks(cluster.address, 5, job="lanes-5", state=rank.state, steps=1, join_timeout=5.0)


def test_ragged_and_drop_after_a_resume(cluster):
    for tail in ("ragged", "drop"):
        settings = {"job": f"tail-{tail}", "tail": tail}
        first = run_ranks(cluster.address, 2, batch_size=7, steps=5, **settings)
        second = run_ranks(cluster.address, 3, batch_size=6, state=first[0].state, **settings)
        ids = flat([flat(rank.ids) for rank in (*first, *second)])
        assert len(ids) == len(set(ids))
        if tail == "ragged":
            assert sorted(ids) == list(range(ROWS))
            check_audit(cluster, "tail-ragged", 0, acknowledged=ROWS)
        else:
            # 130 rows are left in 12 lanes: 43 or 44 for each rank, 7 full batches
            assert [len(rank.ids) for rank in second] == [7] * 3
            check_audit(cluster, "tail-drop", 0, dropped=ROWS - len(ids), acknowledged=len(ids))


# -- the order and the position ------------------------------------------------------------------------------------


def test_case_2_the_shuffle_buffer_is_part_of_the_position(cluster):
    """case 2: around the size of the shuffle buffer and far from it, before and after are the epoch in its order."""
    settings = {"shuffle": Shuffle(buffer=64), "batch_size": 1, "lanes": 1}
    states, ids = {}, []
    with make_loader(cluster.address, job="buffer", **settings) as loader:
        for batch in loader:
            ids += batch["__id__"].tolist()
            if len(ids) in (1, 63, 64, 65, 150, 199):
                states[len(ids)] = loader.state_dict()
    assert sorted(ids) == list(range(ROWS)) and ids != sorted(ids)
    with make_loader(cluster.address, job="buffer-again", **settings) as loader:
        for position, state in states.items():
            loader.load_state_dict(state)
            assert flat(drain(loader).ids) == ids[position:], position


def test_case_3_the_state_counts_what_the_loop_received(cluster):
    """case 3: however much is fetched ahead, a resume starts with the batch after the last one handed over; also from
    a state that another thread takes while the loop waits for the next batch."""
    settings = {"batch_size": 8, "prefetch": "64MiB"}
    want = run_ranks(cluster.address, 1, job="ahead-whole", **settings)[0].ids
    taken: dict[int, list[dict]] = {}
    step = 0
    stop = threading.Event()

    def save() -> None:
        while not stop.wait(0.001):
            before = step
            state = loader.state_dict()
            if before == step:  # not while the number changed
                taken.setdefault(before, []).append(state)

    with make_loader(cluster.address, job="ahead", **settings) as loader:
        iterator = iter(loader)
        thread = threading.Thread(target=save, name="saver")
        thread.start()
        for _ in range(3):
            time.sleep(0.1)  # the prefetch is full
            next(iterator)
            step += 1
            time.sleep(0.02)
        state = loader.state_dict()
        stop.set()
        thread.join(5)
        assert int(state["step"]) == 3
        # between two batches the position is that of the first or, once the second was taken over, of the second
        assert all(int(s["step"]) in (number, number + 1) for number, states in taken.items() for s in states)
        loader.load_state_dict(state)
        assert drain(loader).ids == want[3:]
        in_flight = taken[2][0]
        loader.load_state_dict(in_flight)
        assert drain(loader).ids == want[int(in_flight["step"]) :]


@pytest.mark.parametrize("rows", [32, 34])
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_case_4_both_sides_of_an_epoch_s_end_are_one_state(cluster, rows, tail):
    """case 4: saved (a) after the last batch and (b) after the loop was told of the end, the next epoch follows in its
    own order and full length. In epochs 0 and 2, with and without a remainder."""
    settings = {"dataset": f"rows-{rows}", "tail": tail, "batch_size": 8}
    name = f"{rows}-{tail}"
    states, epochs = {}, []
    with make_loader(cluster.address, job=f"end-{name}", **settings) as loader:
        for epoch in range(4):
            ids = []
            for batch in loader:
                ids.append(batch["__id__"].tolist())
                if len(ids) == len(loader):
                    states[epoch, "a"] = loader.state_dict()
            states[epoch, "b"] = loader.state_dict()
            epochs.append(ids)
    steps = rows // 8 + (tail == "pad" and rows % 8 > 0)
    assert [len(ids) for ids in epochs] == [steps] * 4
    for epoch in (0, 2):
        assert states[epoch, "a"] == states[epoch, "b"]
        assert (states[epoch, "a"]["epoch"], int(states[epoch, "a"]["step"])) == (epoch + 1, 0)
        with make_loader(cluster.address, job=f"end-{name}-{epoch}", **settings) as loader:
            loader.load_state_dict(states[epoch, "a"])
            assert len(loader) == loader.steps_left == steps
            assert drain(loader).ids == epochs[epoch + 1]
            assert drain(loader).ids == (epochs[epoch + 2] if epoch == 0 else drain_epoch(loader, epoch + 2))


def drain_epoch(loader, epoch: int) -> list[list[int]]:
    loader.set_epoch(epoch)
    return drain(loader).ids


def test_a_pass_of_several_epochs_ends_where_it_would_have_ended(cluster):
    settings = {"epochs": 3, "batch_size": 32}
    with make_loader(cluster.address, job="pass", **settings) as loader:
        want, states = [], []
        for batch in loader:
            want.append(batch["__id__"].tolist())
            states.append(loader.state_dict())
    for at in (2, 6, 9, 13):
        with make_loader(cluster.address, job=f"pass-{at}", **settings) as loader:
            loader.load_state_dict(states[at])
            assert loader.steps_left == len(want) - at - 1
            assert drain(loader).ids == want[at + 1 :]
    # at the very end: the next pass, whole
    with make_loader(cluster.address, job="pass-end", **settings) as loader:
        loader.load_state_dict(states[-1])
        assert loader.steps_left == 21
        found = drain(loader)
        assert len(found.ids) == 21 and found.state["epoch"] == 6


def test_case_6_a_state_of_other_data_or_settings_is_refused_with_the_difference(cluster, tmp_path):
    """case 6: a shard more, two shards swapped, a sample edited, another seed: each is refused. A folder that moved,
    and the same files under another name, are the same data."""
    rows = (9, 5, 12)
    manifest = make_dataset(tmp_path / "base", rows, "base")
    more = make_dataset(tmp_path / "more", (*rows, 3), "more")
    edited_folder = tmp_path / "edited"
    make_dataset(edited_folder, rows)
    path = edited_folder / "shard-001.tar"
    path.write_bytes(path.read_bytes().replace(bytes([10]) * 40, bytes([11]) * 40))
    edited = manifests.build(str(edited_folder), name="edited", version="1")
    swapped_folder = tmp_path / "swapped"
    make_dataset(swapped_folder, rows)
    (swapped_folder / "shard-000.tar").rename(swapped_folder / "x")
    (swapped_folder / "shard-001.tar").rename(swapped_folder / "shard-000.tar")
    (swapped_folder / "x").rename(swapped_folder / "shard-001.tar")
    swapped = manifests.build(str(swapped_folder), name="swapped", version="1")
    for one in (manifest, more, edited, swapped):
        cluster.register(one)
    [rank] = run_ranks(cluster.address, 1, job="base", dataset="base", steps=2)
    want = run_ranks(cluster.address, 1, job="base-whole", dataset="base")[0].ids

    for name in ("more", "edited", "swapped"):
        with make_loader(cluster.address, job=f"other-{name}", dataset=name) as loader:
            loader.load_state_dict(rank.state)
            with pytest.raises(StateMismatch, match=r"manifests: state has .*sha256"):
                iter(loader)
    for change, named in (
        ({"seed": 2}, "seed: state has 1, this loader 2"),
        ({"shuffle": None}, "shuffle: state has"),
        ({"lanes": 24}, "lanes: state has 12, this loader 24"),
        ({"pipeline": Pipeline([])}, None),
    ):
        with make_loader(cluster.address, **{"job": "other", "dataset": "base", **change}) as loader:
            loader.load_state_dict(rank.state)
            if named is None:  # an empty pipeline is the stored fields
                len(loader)
                continue
            with pytest.raises(StateMismatch, match=named):
                len(loader)

    (tmp_path / "base").rename(tmp_path / "elsewhere")
    moved = manifests.build(str(tmp_path / "elsewhere"), name="moved", version="7")
    cluster.register(moved)
    [rest] = run_ranks(cluster.address, 1, job="base", dataset="moved", state=rank.state)
    assert rest.ids == want[2:]
    check_audit(cluster, "base", 0, acknowledged=sum(rows))


def test_case_7_a_loaded_state_takes_effect_whenever_it_is_loaded(cluster, whole):
    """case 7: before the first iteration, after an abandoned one, after len(), and twice; the next iter() starts there."""
    settings = {"batch_size": 12}
    [rank] = run_ranks(cluster.address, 1, job="when-source", steps=5, **settings)
    [other] = run_ranks(cluster.address, 1, job="when-other", steps=9, **settings)
    with make_loader(cluster.address, job="when", **settings) as loader:
        loader.load_state_dict(other.state)
        loader.load_state_dict(rank.state)  # the last one counts
        assert loader.state_dict() == rank.state
        iterator = iter(loader)
        assert [next(iterator)["__id__"].tolist() for _ in range(2)] == whole[5:7]
        loader.load_state_dict(rank.state)  # the iteration under way is over
        with pytest.raises(ConfigError, match="rewound"):
            next(iterator)
        assert len(loader) == len(whole)
        assert loader.state_dict() == rank.state
        assert drain(loader).ids == whole[5:]
        loader.load_state_dict(other.state)
        assert drain(loader, 1).ids == whole[9:10]
    with pytest.raises(ConfigError, match="closed"):
        loader.load_state_dict(rank.state)
    again = pickle.loads(pickle.dumps(make_with_state(cluster, rank.state, settings)))
    with again:
        assert drain(again).ids == whole[5:]


def make_with_state(cluster, state, settings):
    loader = make_loader(cluster.address, job="pickled", **settings)
    loader.load_state_dict(state)
    return loader


def test_a_loader_pickled_in_the_middle_goes_on_there(cluster, whole):
    with make_loader(cluster.address, job="mid-pickle", batch_size=12) as loader:
        assert drain(loader, 3).ids == whole[:3]
        data = pickle.dumps(loader)
    with pickle.loads(data) as again:
        assert drain(again).ids == whole[3:]


def test_ranks_rewind_one_after_the_other(cluster, whole):
    """The first rank to rewind opens a generation; the other, still in the old one, joins it when it rewinds too."""
    both = threading.Barrier(2)

    def act(rank: int):
        with make_loader(cluster.address, rank=rank, world_size=2, job="rewinds", batch_size=6) as loader:
            states = []
            for step, _ in enumerate(loader, 1):
                states.append(loader.state_dict())
                if step == 5:
                    break
            both.wait(10)
            time.sleep(1.2 * rank)  # reports of the old generation are refused meanwhile
            loader.load_state_dict(states[1])
            return drain(loader)

    assert merged(in_threads(2, act)) == whole[2:]
    # rank 0 reported its three batches before it rewound; those of rank 1 may not have been told in time
    assert check_audit(cluster, "rewinds", 0, acknowledged=ROWS)["rewound"] in range(18, 37)


def test_a_rewind_in_the_same_process_is_counted(cluster):
    with make_loader(cluster.address, job="rewind-here", batch_size=12) as loader:
        first = drain(loader, 2).state
        loader.load_state_dict(first)
        five = drain(loader, 5).ids
        loader.load_state_dict(first)
        assert drain(loader).ids[:5] == five
    check_audit(cluster, "rewind-here", 0, acknowledged=ROWS, rewound=60)


def test_a_rest_too_small_for_a_batch_is_passed_over(cluster):
    """Resumed with larger batches and drop, this epoch has no full batch left: the next one begins."""
    settings = {"dataset": "rows-32", "tail": "drop", "batch_size": 10}
    [rank] = run_ranks(cluster.address, job="rest", **{**settings, "batch_size": 6}, steps=4)
    with make_loader(cluster.address, job="rest", epochs=None, **settings) as loader:
        loader.load_state_dict(rank.state)
        found = drain(loader, 3)
    assert found.state["epoch"] == 2 and sum(map(len, found.ids)) == 30
    check_audit(cluster, "rest", 0, acknowledged=24, dropped=8)


def test_larger_batches_than_any_epoch_has_are_an_error_without_end(cluster):
    [rank] = run_ranks(cluster.address, job="no-batch", dataset="rows-32", steps=2)
    settings = {"dataset": "rows-32", "tail": "drop", "batch_size": 100, "job": "no-batch"}
    with make_loader(cluster.address, epochs=None, **settings) as loader:
        loader.load_state_dict(rank.state)
        with pytest.raises(ConfigError, match="no step"):
            iter(loader)


def test_set_epoch_after_a_load(cluster):
    [rank] = run_ranks(cluster.address, 1, job="epoch-source", steps=5)
    want = run_ranks(cluster.address, 1, job="epoch-3", set_epoch=3)[0].ids
    with make_loader(cluster.address, job="epoch-load", seed=None) as loader:
        loader.load_state_dict(rank.state)
        loader.set_epoch(3)
        assert drain(loader).ids == want


# -- the state itself ----------------------------------------------------------------------------------------------


def test_the_state_is_small_plain_and_quick(cluster, tmp_path):
    with make_loader(cluster.address, job="size", batch_size=2) as loader:
        states = []
        for step, _ in enumerate(loader, 1):
            if step in (1, 10, 90, 99):
                states.append(loader.state_dict())
        spent = []
        for _ in range(200):
            started = time.perf_counter()
            loader.state_dict()
            spent.append(time.perf_counter() - started)
    assert sorted(spent)[100] < 0.002
    assert len({len(pickle.dumps(state)) for state in states}) == len({len(json.dumps(state)) for state in states}) == 1
    for state in states:
        assert json.loads(json.dumps(state)) == state
        torch.save({"loader": state}, tmp_path / "state.pt")
        assert torch.load(tmp_path / "state.pt", weights_only=True)["loader"] == state


def test_states_of_several_ranks(cluster):
    """Under "raise" any rank's state tells the whole position: all ranks hold the same counts."""
    ranks = run_ranks(cluster.address, 3, job="several", steps=4)
    assert {rank.state["taken"] for rank in ranks} == {ranks[0].state["taken"]}
    assert [rank.state["rank"] for rank in ranks] == [0, 1, 2]
    with make_loader(cluster.address, job="several-alone") as loader:
        assert gather_states(loader)[0]["identity"] is None
    mixed = run_ranks(cluster.address, 3, job="several-on", steps=1, state=ranks[2].state)
    with (
        make_loader(cluster.address, job="several-mixed") as loader,
        pytest.raises(StateMismatch, match="rank 0 at step 4, rank 1 at step 5"),
    ):
        loader.load_state_dict([ranks[0].state, mixed[1].state])


@pytest.fixture(scope="module")
def pictures(cluster, tmp_path_factory):
    """60 pictures, six of which are broken; returns the ids of those."""
    folder = tmp_path_factory.mktemp("pictures")
    broken = {3, 17, 18, 19, 41, 58}
    random = np.random.default_rng(5)
    for shard, ids in enumerate((range(25), range(25, 33), range(33, 60))):
        members = []
        for i in ids:
            out = io.BytesIO()
            Image.fromarray(random.integers(0, 255, (4, 4, 3), np.uint8)).save(out, "png")
            members.append((f"{i:03d}.png", b"\x89PNG broken" if i in broken else out.getvalue()))
        write_tar(folder / f"{shard}.tar", members)
    cluster.register(manifests.build(str(folder), name="pictures", version="1"))
    return broken


def test_resume_under_skip_takes_all_ranks_states(cluster, pictures):
    """Ranks skip rows of their own, so one state is not enough; the list of all goes on exactly, at any world size."""
    settings = {
        "job": "skip", "dataset": "pictures", "pipeline": Pipeline([DecodeImage()]), "on_error": "skip", "max_bad": 6
    }  # fmt: skip

    def ranks_of(world: int, steps: int | None, state, batch: int):
        def act(rank: int):
            with make_loader(cluster.address, rank=rank, world_size=world, batch_size=batch, **settings) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                ids = []
                for number, batch_ in enumerate(loader, 1):
                    ids += batch_["__id__"][~batch_["__pad__"]].tolist()
                    if number == steps:
                        break
                return ids, loader.state_dict()

        return in_threads(world, act)

    first = ranks_of(2, 3, None, 5)
    alone = make_loader(cluster.address, **settings, batch_size=4, rank=0, world_size=1)
    alone.load_state_dict({**first[1][1], "job": "elsewhere"})  # a job that left no marks
    with alone, pytest.raises(StateIncomplete, match=r"ranks 0: .* no marks"):
        iter(alone)
    states = [state for _, state in first]
    second = ranks_of(3, 1, states, 4)
    third = ranks_of(1, None, [state for _, state in second][::-1], 4)
    ids = flat([ids for ids, _ in (*first, *second, *third)])
    assert sorted(ids) == sorted(set(range(60)) - pictures)
    check_audit(cluster, "skip", 0, acknowledged=54, skipped=6, rewound=0)
    # joined states are one that is complete, so a save before the first batch is not less than what was loaded
    with make_loader(cluster.address, **{**settings, "job": "skip-again"}, batch_size=4) as loader:
        loader.load_state_dict(states)
        joined = loader.state_dict()
    with make_loader(cluster.address, **{**settings, "job": "skip-again"}, batch_size=4) as loader:
        loader.load_state_dict(joined)
        rest = flat([batch["__id__"][~batch["__pad__"]].tolist() for batch in loader])
    assert sorted(flat([ids for ids, _ in first]) + rest) == sorted(set(range(60)) - pictures)


# -- latest --------------------------------------------------------------------------------------------------------


def test_latest_continues_after_the_last_acknowledged_batch(cluster, whole):
    """With manual acks nothing is lost, and what was handed out after the last one comes again."""
    [first] = fresh(cluster.address, job="latest", batch_size=12, ack="manual", acks=[4], steps=6, die=True, linger=1.2)
    assert first.ids == whole[:6]
    [second] = run_ranks(cluster.address, job="latest", batch_size=12, ack="manual", resume="latest", seed=None)
    assert second.ids == whole[4:]
    document = cluster.audit("latest", 0)
    assert document["acknowledged"] == 48 and document["rewound"] == 24 and document["lost"] == 0
    with make_loader(cluster.address, job="latest", batch_size=12, ack="manual", resume="latest") as loader:
        iterator = iter(loader)
        assert next(iterator)["__id__"].tolist() == whole[4]
        for _ in iterator:
            pass
        loader.ack()
    check_audit(cluster, "latest", 0, acknowledged=ROWS)


def test_latest_does_not_jump_over_an_epoch_that_was_not_acknowledged(cluster):
    """A loop that is in epoch 1 while its last ack was in epoch 0 goes on in epoch 0."""
    settings = {"job": "latest-epochs", "batch_size": 50, "ack": "manual", "epochs": 2}
    [first] = fresh(cluster.address, acks=[2], steps=6, die=True, **settings)
    [second] = run_ranks(cluster.address, resume="latest", **settings)
    assert second.ids[:4] == first.ids[2:6]
    assert len(second.ids) == 6


def test_latest_of_several_ranks_at_another_world_size(cluster, whole):
    first = fresh(
        cluster.address, 2, job="latest-2", batch_size=6, ack="manual", acks=[3], steps=5, die=True, linger=1.2
    )
    assert merged(first) == whole[:5]
    second = run_ranks(cluster.address, 3, job="latest-2", batch_size=4, resume="latest")
    assert merged(second) == whole[3:]
    check_audit(cluster, "latest-2", 0, acknowledged=ROWS, rewound=24)


def test_latest_of_a_job_without_record_starts_afresh(cluster, whole):
    [rank] = run_ranks(cluster.address, job="latest-new", batch_size=12, resume="latest")
    assert rank.ids == whole


def test_latest_after_the_end_is_the_next_epoch(cluster):
    with make_loader(cluster.address, job="latest-end", batch_size=50) as loader:
        drain(loader)
        second = drain(loader)
    [rank] = run_ranks(cluster.address, job="latest-end-source", batch_size=50, set_epoch=2)
    [third] = run_ranks(cluster.address, job="latest-end", batch_size=50, resume="latest")
    assert third.ids == rank.ids and second.state["epoch"] == 2


def test_latest_on_other_data_is_refused(cluster):
    run_ranks(cluster.address, job="latest-data", steps=2)
    with pytest.raises(StateMismatch, match="sources"):
        run_ranks(cluster.address, job="latest-data", dataset="four", resume="latest")


def test_a_state_loaded_over_a_newer_record_does_not_warn(cluster):
    """A rewind to a checkpoint is what was asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FeedlineWarning)
        [rank] = run_ranks(cluster.address, job="rewind", steps=3)
        run_ranks(cluster.address, job="rewind", steps=9, state=rank.state)
        [rest] = run_ranks(cluster.address, job="rewind", state=rank.state)
    assert len(rest.ids) == 47
    check_audit(cluster, "rewind", 0, acknowledged=ROWS, rewound=36)
