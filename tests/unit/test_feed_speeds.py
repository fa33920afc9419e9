"""Figures that steer the feed: speeds of workers, pace of the loop, workers to leave alone."""

from __future__ import annotations

import pytest

from manifests.errors import ShardChanged, ShardMissing, ShardQuarantined
from manifests.wire import messages as m
from trainer_client.avoid import Avoided
from trainer_client.grants import quarantine_error
from trainer_client.speeds import Pace, Speeds

WORKERS = [m.WorkerRef(id=f"w{n}", address=f"127.0.0.1:{n}") for n in range(3)]


def test_speeds_are_told_once() -> None:
    """Bytes and time per worker, reads that were given up too; what was not delivered is told again."""
    speeds = Speeds()
    speeds.note("w1", 1000, 0.5, whole=True)
    speeds.note("w0", 10, 2.0, whole=False)
    speeds.note("w1", 500, 0.25, whole=True)
    told = speeds.take()
    assert told == (m.WorkerSpeed(worker="w0", bytes=10, ms=2000), m.WorkerSpeed(worker="w1", bytes=1500, ms=750))
    assert speeds.take() == ()
    speeds.put_back(told)
    assert speeds.take() == told


def test_the_usual_time_is_that_of_reads_that_ended() -> None:
    speeds = Speeds()
    assert speeds.usual == 0.5
    speeds.note("w0", 0, 60.0, whole=False)
    for seconds in (0.01, 0.02, 5.0):
        speeds.note("w0", 1, seconds, whole=True)
    assert speeds.usual == 0.02


def test_pauses_are_not_the_pace() -> None:
    """100 rows per second, with an evaluation of ten minutes in between."""
    pace = Pace()
    now = 0.0
    for step in range(200):
        now += 600.0 if step == 100 else 0.1
        pace.took(10, now)
        assert (pace.rate is None) == (step < 5)
    assert pace.rate == pytest.approx(100.0)


def test_the_pace_follows_the_loop() -> None:
    """After a minute at another speed the old one has little weight."""
    pace = Pace()
    now = 0.0
    for step in range(1200):
        now += 0.1
        pace.took(10 if step < 600 else 50, now)
    assert pace.rate is not None
    assert 450 < pace.rate <= 500


def test_workers_are_left_alone_for_a_shard_or_for_all() -> None:
    avoided = Avoided()
    assert avoided.usable(WORKERS, 1) == WORKERS
    avoided.shard("w0", 1, 60.0)
    assert [w.id for w in avoided.usable(WORKERS, 1)] == ["w1", "w2"]
    assert [w.id for w in avoided.usable(WORKERS, 2)] == ["w0", "w1", "w2"]
    avoided.worker("w1", 60.0)
    assert avoided.workers() == {"w1"}
    assert [w.id for w in avoided.usable(WORKERS, 1)] == ["w2"]
    avoided.worker("w1", 0.0)
    assert [w.id for w in avoided.usable(WORKERS, 1)] == ["w1", "w2"]


def test_a_slow_worker_is_the_last_choice_and_still_one() -> None:
    avoided = Avoided()
    avoided.slow("w0")
    assert [w.id for w in avoided.usable(WORKERS, 1)] == ["w1", "w2"]
    assert [w.id for w in avoided.usable(WORKERS[:1], 1)] == ["w0"]
    assert avoided.workers() == set(), "it did not fail: grants that name it are good"
    avoided.well("w0")
    assert avoided.usable(WORKERS, 1) == WORKERS


@pytest.mark.parametrize(
    ("code", "kind"),
    [("shard-missing", ShardMissing), ("shard-changed", ShardChanged), ("protocol-error", ShardQuarantined)],
)
def test_the_error_of_a_shard_in_quarantine(code: str, kind: type[Exception]) -> None:
    """It is what the workers said, and names uri, workers and reason."""
    found = m.QuarantinedShard(
        source=0, shard=7, uri="/data/7.tar", code=code, reason="no such file", workers=("a", "b")
    )
    error = quarantine_error(found)
    assert type(error) is kind
    assert "/data/7.tar" in str(error) and "workers a, b: no such file" in str(error)
    assert (error.detail["shard"], error.detail["workers"]) == (7, ["a", "b"])
