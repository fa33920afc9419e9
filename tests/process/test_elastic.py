"""Other world sizes than before, and jobs that lose and regain ranks while they run, on a real cluster."""

import os
import re
import signal
import time

import pytest
from cluster import TestCluster
from training import UNEVEN, RankProcess, check_audit, flat, in_threads, make_dataset, make_loader, run_ranks

from manifests.errors import Fenced

ROWS = sum(UNEVEN)
RAGGED = {"tail": "ragged", "order": "dynamic"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with TestCluster(workers=2) as found:
        found.register(make_dataset(tmp_path_factory.mktemp("numbers"), UNEVEN))
        yield found


# -- from 4 ranks to 2, 3 and 8 ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(cluster):
    """Order, on_error -> ids that 4 ranks had after 5 steps, and their states."""
    out = {}
    for order, on_error in (("deterministic", "raise"), ("deterministic", "skip"), ("dynamic", "raise")):
        job = f"four-{order}-{on_error}"
        settings = {"job": job, "order": order, "on_error": on_error, "lanes": 24, "shuffle": {"buffer": 96}}
        ranks = run_ranks(cluster.address, 4, steps=5, **settings)
        out[order, on_error] = flat([rank.real for rank in ranks]), [rank.state for rank in ranks], settings
    return out


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize(
    ("order", "on_error", "how"),
    [
        ("deterministic", "raise", "list"),
        ("deterministic", "raise", "lone"),
        ("deterministic", "skip", "marks"),
        ("dynamic", "raise", "list"),
        ("dynamic", "raise", "marks"),
    ],
)
def test_four_ranks_become_other_many(cluster, saved, order, on_error, how, world):
    """From the list of all states, from one that is enough, from one that marks complete; under a job name that the
    dispatcher has never seen. Nothing lost, nothing twice, equal steps."""
    ids, states, settings = saved[order, on_error]
    job = f"{order}-{on_error}-{how}-{world}"
    state = states[::-1] if how == "list" else states[world % 4]
    second = run_ranks(cluster.address, world, state=state, **{**settings, "job": job})
    assert sorted(ids + flat([rank.real for rank in second])) == list(range(ROWS))
    assert len({len(rank.ids) for rank in second}) == 1
    check_audit(cluster, job, 0, acknowledged=ROWS)


# -- ranks that die ------------------------------------------------------------------------------------------------


def check_ids(acked: list[int], others: list[int], may_repeat: list[int]) -> None:
    """Every row was handed out; ``acked`` ones once, and twice at most those of ``may_repeat``."""
    every = acked + others
    assert set(every) == set(range(ROWS))
    assert len(every) == len(set(every)), "a row that was acknowledged was handed out again"
    assert set(may_repeat) <= set(others), "a row that was not acknowledged did not come again"


def wait_given_up(cluster, job: str, rank: int) -> None:
    """Wait until the dispatcher has given the rank's rows to others."""
    log = cluster.local.logs / "dispatcher-0.log"
    line = re.compile(rf"job {job}: rank {rank} .* go to the other ranks")
    cluster.wait_for(f"rank {rank} is given up", lambda: line.search(log.read_text()) is not None)


def test_the_others_take_over_what_a_killed_rank_had(cluster, tmp_path):
    """One of three ranks is killed in the middle of the epoch: the others get its rows, and rows that it had
    acknowledged do not come again."""
    job = "killed"
    common = {"job": job, "world_size": 3, "elastic": True, "ack": "manual", **RAGGED}
    with RankProcess(cluster.address, tmp_path / "diary", rank=2, delay=0.02, ack_every=3, **common) as victim:

        def act(rank):
            with make_loader(cluster.address, rank=rank, **common) as loader:
                ids = []
                for batch in loader:
                    ids += batch["__id__"].tolist()
                    assert batch["__epoch__"].tolist() == [0] * len(batch["__id__"])
                    loader.ack()
                    if rank == 0 and len(ids) == 8:
                        victim.wait_for(5)
                        victim.kill()
                        wait_given_up(cluster, job, 2)
                    time.sleep(0.02)
                loader.ack()
                return ids

        ids = flat(in_threads(2, act))
    sure = flat([batch["ids"] for batch in victim.batches[: victim.acked]])
    unsure = flat([batch["ids"] for batch in victim.batches[victim.acked :]])
    check_ids(sure, ids, unsure)
    found = check_audit(cluster, job, 0, acknowledged=ROWS)
    assert found["rewound"] <= 3 * 4


def test_a_new_process_takes_the_place_of_a_stopped_one(cluster, tmp_path):
    """In the second epoch: it joins the running generation, with rows of its own, and the stopped one is fenced when it
    goes on. Rows that were acknowledged come once."""
    job = "again"
    common = {"job": job, "world_size": 2, "elastic": True, "ack": "manual", "epochs": 2, **RAGGED}
    with (
        RankProcess(cluster.address, tmp_path / "first", rank=1, delay=0.05, **common) as first,
        make_loader(cluster.address, rank=0, **common) as loader,
    ):
        rows: list[tuple[int, int]] = []
        second = None
        for batch in loader:
            rows += zip(batch["__epoch__"].tolist(), batch["__id__"].tolist(), strict=True)
            loader.ack()
            begun = any(1 in one["epochs"] for one in first.batches)
            if second is None and begun and rows[-1][0] == 1:
                os.kill(first.process.pid, signal.SIGSTOP)
                second = RankProcess(cluster.address, tmp_path / "second", rank=1, delay=0.02, **common)
                second.wait_for(3)
                os.kill(first.process.pid, signal.SIGCONT)
            time.sleep(0.06)
        loader.ack()
        assert second is not None, "one rank was through before the other had begun"
        with second:
            end = second.finish()
        assert end["error"] is None
        assert first.finish()["error"][0] == Fenced.code

    def pairs(batches):
        return [pair for one in batches for pair in zip(one["epochs"], one["ids"], strict=True)]

    sure, unsure = pairs(first.batches[: first.acked]), pairs(first.batches[first.acked :])
    others = rows + pairs(second.batches)
    assert sorted(sure + others) == [(epoch, i) for epoch in range(2) for i in range(ROWS)]
    assert set(unsure) <= set(others)
    for epoch in range(2):
        check_audit(cluster, job, epoch, acknowledged=ROWS, generation=1)


def test_what_the_last_rank_leaves_is_carried_into_the_next_epoch(cluster, tmp_path):
    """The other rank is in the next epoch already: what the killed one had not acknowledged comes there, under its own
    epoch's number."""
    job = "carried"
    common = {"job": job, "world_size": 2, "elastic": True, "ack": "manual", "batch_size": 8, **RAGGED}
    rows: list[tuple[int, int]] = []
    with (
        RankProcess(cluster.address, tmp_path / "diary", rank=1, hold=2, passes=2, **common) as victim,
        make_loader(cluster.address, rank=0, **common) as loader,
    ):
        for number in range(2):
            for batch in loader:
                rows += zip(batch["__epoch__"].tolist(), batch["__id__"].tolist(), strict=True)
                loader.ack()
                if number == 1 and victim.process.poll() is None:
                    victim.wait_for(2)
                    victim.kill()
                    wait_given_up(cluster, job, 1)
            loader.ack()
    own = flat([batch["ids"] for batch in victim.batches[: victim.acked]])
    assert victim.acked == 2 and len(own) == 16
    first = [i for epoch, i in rows if epoch == 0]
    assert sorted(first + own) == list(range(ROWS))
    assert sorted(i for epoch, i in rows if epoch == 1) == list(range(ROWS))
    later = [at for at, (epoch, _) in enumerate(rows) if epoch == 0][-1]
    assert later >= len(first), "nothing was carried over"
    check_audit(cluster, job, 1, acknowledged=ROWS)
    found = check_audit(cluster, job, 0)
    assert found["acknowledged"] + found.get("carried", 0) >= len(own), found


def test_elastic_jobs_keep_their_pad_column(cluster):
    """Under tail "pad" the column is there, and never true: no quotas, no pads."""
    settings = {"job": "pads", "order": "dynamic", "elastic": True, "tail": "pad", "batch_size": 7}
    ranks = run_ranks(cluster.address, 2, **settings)
    assert sorted(flat([flat(rank.ids) for rank in ranks])) == list(range(ROWS))
    assert not any(flat([flat(rank.pads) for rank in ranks]))
    check_audit(cluster, "pads", 0, acknowledged=ROWS, padded=0)
