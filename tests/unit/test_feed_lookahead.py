"""Rows and shards known ahead of what was planned."""

from __future__ import annotations

import numpy as np
import pytest

from manifests.plan import Plan
from manifests.wire.messages import Shuffle
from trainer_client.lookahead import LookAhead
from trainer_client.session import Leg

ROWS = np.array([7, 1, 30, 13, 2, 0, 9, 21, 2, 18, 1, 1, 16, 5, 40, 3, 8, 4, 12, 7], np.int64)


def leg(tail: str = "ragged") -> Leg:
    plan = Plan(ROWS, seed=3, epoch=0, shuffle=Shuffle(buffer=16, interleave=2), lanes=4)
    return Leg(plan, rank=0, world_size=2, batch_size=4, tail=tail, taken=np.zeros(4, np.int64))


@pytest.mark.parametrize("grow", [0, 1, 5])
def test_what_is_taken_is_the_read_stream(grow: int) -> None:
    """However far it looks in whatever steps, what it gives is the leg's own sequence, and the shards ahead are those
    of the rows that follow, in order."""
    found = leg()
    shards, rows = found.refs(0, found.candidates)
    ahead = LookAhead(found)
    place = 0
    for count in [3, 1, 20, 7, 40, 100, 100]:
        for _ in range(grow):
            ahead.grow(found.candidates, 9)
        some_shards, some_rows = ahead.take(count, found.candidates)
        assert some_shards.tolist() == shards[place : place + count].tolist()
        assert some_rows.tolist() == rows[place : place + count].tolist()
        place += len(some_rows)
        assert (ahead.taken, ahead.rows) == (place, ahead.end - place)
        needed = set(shards[place : ahead.end].tolist())
        assert set(ahead.shards(1000)) == needed
        assert ahead.shards(3) == ahead.shards(1000)[:3]
        assert len(needed) <= ahead.shard_count
    assert place == found.candidates
    assert ahead.shards(10) == [] and ahead.shard_count == 0
    assert not ahead.grow(found.candidates)


def test_no_row_after_the_limit_is_looked_at() -> None:
    """In dynamic order rows after it are not certain yet."""
    ahead = LookAhead(leg("pad"))
    assert len(ahead.take(50, 20)[0]) == 20
    assert not ahead.grow(20)
    assert ahead.grow(21)
    assert len(ahead.take(50, 21)[0]) == 1
