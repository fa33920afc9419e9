"""The status document: what a rank waits for before all have joined, and steps where there are some to count."""

from __future__ import annotations

from typing import Any

import pytest
from core_bench import LEASE, Bench

from dispatcher import events, reasons, status
from feedline.commands.status import jobs_table

LANES = 24


def document(bench: Bench) -> dict[str, Any]:
    return status.collect(bench.state, events.Asked(at=bench.at, now_ms=bench.now_ms, look=lambda: None))


def ranks_of(bench: Bench) -> list[dict[str, Any]]:
    (job,) = document(bench)["jobs"]
    ranks: list[dict[str, Any]] = job["ranks"]
    return ranks


def waits_of(bench: Bench) -> list[tuple[str, str, float]]:
    return [(rank["state"], rank["waiting_for"], rank["waiting_s"]) for rank in ranks_of(bench)]


ABSENT = ("absent", "", 0.0)


def test_a_rank_waits_for_those_that_have_not_joined() -> None:
    bench = Bench()
    bench.open(0, world_size=3, nonce="n")
    bench.at += 4
    bench.open(0, world_size=3, nonce="n")  # asks again until all have joined
    both = "ranks 1, 2, which have not joined"
    assert waits_of(bench) == [("waiting", both, 4.0), ABSENT, ABSENT]
    assert f"job train rank 0 waits for {both} (since 4.0 s)" in jobs_table(document(bench))
    bench.open(1, world_size=3)
    found = waits_of(bench)
    assert [rank[:2] for rank in found[:2]] == [("waiting", "rank 2, which has not joined")] * 2
    assert found[2] == ABSENT
    bench.open(2, world_size=3)
    assert waits_of(bench) == [("reading", "", 0.0)] * 3


def test_the_document_of_a_rank_that_waits_has_the_contract_s_keys() -> None:
    bench = Bench()
    bench.open(0, world_size=2)
    assert list(ranks_of(bench)[0]) == [
        "rank", "state", "epoch", "step", "rows", "waiting_for", "waiting_s", "host", "pid",
    ]  # fmt: skip


def test_a_rank_that_closed_or_is_silent_waits_for_nobody() -> None:
    bench = Bench()
    first = bench.open(0, world_size=3)
    bench.open(1, world_size=3)
    bench.report(first, 0, leaving=True)
    assert [rank[0] for rank in waits_of(bench)] == ["done", "waiting", "absent"]
    bench.at += LEASE + 1
    assert waits_of(bench) == [("done", "", 0.0), ABSENT, ABSENT]


def test_a_rank_still_waits_after_a_take_over() -> None:
    bench = Bench()
    bench.open(0, world_size=2)
    bench.reload()
    assert waits_of(bench)[0][:2] == ("waiting", "rank 1, which has not joined")
    assert waits_of(bench)[0][2] >= 0.0


def test_eight_ranks_that_have_not_joined_are_named() -> None:
    assert reasons.not_joined(range(1, 9)) == "ranks 1, 2, 3, 4, 5, 6, 7, 8, which have not joined"
    assert reasons.not_joined(range(1, 13)) == "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 4 more, which have not joined"


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"order": "dynamic", "tail": "ragged", "lanes": LANES}, None),
        ({"order": "dynamic", "elastic": True, "lanes": LANES}, None),
        ({"order": "dynamic", "lanes": LANES}, 6),
        ({"order": "dynamic", "tail": "drop", "lanes": LANES}, 6),
        ({"tail": "ragged"}, 6),
    ],
)
def test_steps_are_told_where_ranks_have_quotas(settings: dict[str, Any], steps: int | None) -> None:
    """24 rows for 2 ranks in batches of 2; without quotas a rank takes rows until there are none."""
    bench = Bench()
    for rank in range(2):
        bench.open(rank, world_size=2, **settings)
    found = document(bench)
    assert found["jobs"][0]["steps_per_epoch"] == steps
    line = jobs_table(found).split("\n")[1].split()
    assert line[7] == ("0" if steps is None else "0/6")
