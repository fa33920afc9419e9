"""What the client says when it cannot go on: who, for what, why, and one remedy."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from manifests.errors import DispatcherUnavailable, ShardChanged
from manifests.plan import Plan
from manifests.schema import Field
from manifests.wire import messages as m
from manifests.wire.connection import ConnectionOptions, parse_address
from trainer_client import reporter as reporter_module
from trainer_client.avoid import Avoided
from trainer_client.budget import Budget
from trainer_client.control import Control
from trainer_client.feed import Feed
from trainer_client.grants import GrantKeeper, quarantine_error
from trainer_client.reads import ReadPool
from trainer_client.reporter import Reporter
from trainer_client.seat import Seat
from trainer_client.session import Leg
from trainer_client.speeds import Speeds
from trainer_client.trouble import Trouble

SEAT = Seat(job="train", generation=1, rank=0, holder="u")


@pytest.fixture
def away() -> Iterator[Control]:
    """A dispatcher that is not there."""
    with socket.socket() as taken:  # bound and not listened on: refused, and nobody else gets it
        taken.bind(("127.0.0.1", 0))
        control = Control([parse_address(f"127.0.0.1:{taken.getsockname()[1]}")], ConnectionOptions())
        yield control
        control.close()


def leg() -> Leg:
    plan = Plan(np.array([8, 8], np.int64), seed=1, epoch=0, shuffle=None, lanes=1)
    return Leg(plan, rank=0, world_size=1, batch_size=4, tail="pad", taken=np.zeros(1, np.int64))


def test_a_deadline_names_the_job(away: Control) -> None:
    pool = ReadPool(1, ConnectionOptions(), stall=5.0, timeout=5.0)
    feed = Feed(
        leg(), epoch=3, fields=[Field(name="x", kind="scalar", dtype="int64")], control=away, pool=pool,
        budget=Budget(1 << 20), seat=SEAT, stall=5.0, timeout=0.5, fatal=lambda error: None,
    )  # fmt: skip
    try:
        feed.begin_wait()
        with pytest.raises(DispatcherUnavailable, match=r"^rank 0 of job train waited \d\.\d s for rows of epoch 3: "):
            feed.wait(0, 0, lambda: None)
    finally:
        feed.close()
        pool.close()
        feed.join(10)


def test_a_shard_that_changed_has_one_remedy(away: Control) -> None:
    """What a worker said of it goes to the dispatcher without the worker's own remedy, and comes back as a reason."""
    avoided = Avoided()
    keeper = GrantKeeper(
        away, leg(), seat=SEAT, epoch=0, avoided=avoided, speeds=Speeds(), reach=lambda: (0, 0),
        changed=lambda: None, failed=lambda error: None,
    )  # fmt: skip
    try:
        error = ShardChanged(
            "file:///d/1.tar changed since its manifest was built",
            cause="expected 9 bytes, found 8",
            remedy="build and register the manifest again",
        )
        assert Trouble(keeper, avoided).failed("w1", [1], error) == ()
        (told,) = keeper._failures.values()
    finally:
        keeper.close()
        keeper.join(10)
    assert told.message == "file:///d/1.tar changed since its manifest was built: expected 9 bytes, found 8"
    found = m.QuarantinedShard(
        source=0, shard=1, uri="file:///d/1.tar", code=told.code, reason=told.message, workers=("w1", "w2")
    )
    assert str(quarantine_error(found)) == (
        "shard file:///d/1.tar cannot be read and is in quarantine: workers w1, w2: file:///d/1.tar changed since its "
        "manifest was built: expected 9 bytes, found 8 (mend it, or pass on_error='skip')"
    )


def test_acknowledgements_that_are_not_delivered_are_told_of_once(
    away: Control, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once per ``ack()``; when the outage lasts, again after a while."""
    reporter = Reporter(
        away, job="train", generation=1, rank=0, holder="u", lease=10.0, status=lambda: ("reading", "", 0.0),
        answered=lambda reply: None, fatal=lambda error: None,
    )  # fmt: skip

    def lines() -> int:
        return sum("acknowledgements were not delivered" in record.message for record in caplog.records)

    try:
        with caplog.at_level(logging.WARNING, "feedline.client"):
            assert not any(reporter.flush(0.2) for _ in range(4))
            assert lines() == 1
            monkeypatch.setattr(reporter_module, "TOLD_EVERY", 0.0)
            assert not reporter.flush(0.2)
            assert lines() == 2
    finally:
        away.close()
        reporter.close()
