"""What ``feedline audit``, ``status``, ``jobs`` and ``workers`` print for people."""

from __future__ import annotations

from typing import Any

import pytest

from feedline.commands import audit, status
from feedline.output import SHOWN, counted, listed, rest


def books(**changes: Any) -> dict[str, Any]:
    counts = dict.fromkeys(audit._COUNTS, 0)
    document = {"job": "j", "generation": 1, "epoch": 0, "state": "complete", **counts, "shards": [], **changes}
    return {"skipped_rows": [], **document}


def lines_of(**changes: Any) -> list[str]:
    """The text without its table of counts."""
    lines = audit._text(books(**changes)).split("\n")
    return [lines[0], *lines[2 + len(audit._COUNTS) :]]


QUARANTINED = [
    {"source": 0, "shard": 3, "uri": "file:///d/3.tar", "code": "shard-missing", "reason": "3.tar is missing"},
    {"source": 0, "shard": 8, "uri": "file:///d/8.tar", "code": "shard-changed", "reason": "8.tar is damaged"},
]


def test_a_complete_epoch_is_one_word() -> None:
    assert lines_of() == ["job j  generation 1  epoch 0  complete"]


def test_complete_except_shards_in_quarantine_names_each_with_its_error() -> None:
    document = books(quarantined=40, shards=QUARANTINED)
    assert audit.verdict(document) == 3
    assert lines_of(quarantined=40, shards=QUARANTINED) == [
        "job j  generation 1  epoch 0  complete except 2 shards",
        "in quarantine: 40 rows of 2 shards",
        "  shard 3, file:///d/3.tar: shard-missing: 3.tar is missing",
        "  shard 8, file:///d/8.tar: shard-changed: 8.tar is damaged",
    ]
    assert lines_of(quarantined=1, shards=QUARANTINED[:1])[0].endswith("complete except 1 shard")


def test_a_shard_that_stopped_a_job_is_named_though_no_row_was_passed_over() -> None:
    document = books(state="stopped", open=40, shards=QUARANTINED[:1])
    assert audit.verdict(document) == 3
    assert lines_of(state="stopped", open=40, shards=QUARANTINED[:1]) == [
        "job j  generation 1  epoch 0  stopped",
        "stopped: no rank reads it, 40 rows not acknowledged",
        "in quarantine: 1 shard, and none of its rows was passed over",
        "  shard 3, file:///d/3.tar: shard-missing: 3.tar is missing",
    ]
    assert "in quarantine: 2 shards, and none of their rows was passed over" in lines_of(
        state="running", shards=QUARANTINED
    )


def test_many_shards_in_quarantine_are_cut() -> None:
    shards = [{**QUARANTINED[0], "shard": number} for number in range(SHOWN + 5)]
    lines = lines_of(quarantined=99, shards=shards)
    assert len(lines) == 3 + SHOWN and lines[-1] == "  and 5 more"


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ("running", "running: 7 rows not acknowledged yet"),
        ("stopped", "stopped: no rank reads it, 7 rows not acknowledged"),
    ],
)
def test_an_epoch_that_is_not_over(state: str, line: str) -> None:
    assert lines_of(state=state, open=7) == [f"job j  generation 1  epoch 0  {state}", line]
    assert audit.verdict(books(state=state, open=7)) == 3


def test_lost_and_repeated_rows_are_named() -> None:
    shards = [
        {"source": 0, "shard": 1, "planned": 9, "handed_out": 8, "lost": [4], "repeated": []},
        {"source": 0, "shard": 2, "planned": 9, "handed_out": 11, "lost": [], "repeated": list(range(20, 32))},
        *QUARANTINED,
    ]
    lines = lines_of(lost=1, repeated=12, quarantined=40, shards=shards)
    assert "lost: 1 row, samples 4" in lines
    assert "repeated: 12 rows, samples 20, 21, 22, 23, 24, 25, 26, 27, 28, 29 and 2 more" in lines
    assert lines[0].endswith("complete except 2 shards")
    table = lines[lines.index("shards that do not balance:") + 1 :][:3]
    assert table[0].split() == ["SOURCE", "SHARD", "PLANNED", "HANDED_OUT", "LOST", "REPEATED"]
    assert [line.split()[1] for line in table[1:]] == ["1", "2"]  # and none of those in quarantine
    note = [{"source": 0, "shard": None, "note": "3 rows were never handed out"}]
    assert "lost: 3 rows, no rank told which" in lines_of(lost=3, shards=note)


def test_skipped_rows_are_named_with_their_reason() -> None:
    rows = [{"sample_id": n, "key": f"k{n}", "shard": "file:///d/0.tar", "reason": "truncated"} for n in range(30)]
    lines = lines_of(skipped=50, skipped_rows=rows)
    assert lines[1] == "skipped: 50 rows"
    assert lines[2] == "  sample 0, 'k0' of file:///d/0.tar: truncated"
    assert len(lines) == 3 + SHOWN and lines[-1] == f"  and {50 - SHOWN} more"
    assert lines_of(skipped=1, skipped_rows=rows[:1])[1:] == ["skipped: 1 row", lines[2]]


def job(**changes: Any) -> dict[str, Any]:
    rank = {"rank": 3, "state": "waiting", "epoch": 1, "step": 3, "rows": 48, "waiting_for": "", "waiting_s": 0.0}
    return {
        "name": "resnet-17", "dataset": "d@1", "digest": "sha256:0", "generation": 2, "state": "running", "epoch": 1,
        "steps_per_epoch": 10, "ranks": [rank], **changes,
    }  # fmt: skip


def test_steps_that_nobody_knows_are_left_out() -> None:
    (line,) = status.jobs_table({"jobs": [job(steps_per_epoch=None)]}).split("\n")[1:]
    assert line.split()[7] == "3"
    (line,) = status.jobs_table({"jobs": [job()]}).split("\n")[1:]
    assert line.split()[7] == "3/10"


def test_a_rank_that_waits_has_a_line() -> None:
    waiting = {**job()["ranks"][0], "waiting_for": "shard 812: no worker has registered for 4 s", "waiting_s": 4.26}
    text = status.jobs_table({"jobs": [job(ranks=[waiting, {**waiting, "rank": 4, "waiting_for": ""}])]})
    wanted = "job resnet-17 rank 3 waits for shard 812: no worker has registered for 4 s (since 4.3 s)"
    assert text.split("\n")[3:] == [wanted]
    many = status.jobs_table({"jobs": [job(ranks=[{**waiting, "rank": rank} for rank in range(256)])]}).split("\n")
    assert len(many) == 1 + 256 + SHOWN + 1 and many[-1] == f"  and {256 - SHOWN} more"


def test_shards_in_quarantine_have_a_line() -> None:
    shard = {**QUARANTINED[0], "workers": ["w1", "w2"]}
    text = status.jobs_table({"jobs": [job(quarantined=[shard], quarantined_shards=1)]})
    assert text.split("\n")[-1] == (
        "job resnet-17 shard 3 is in quarantine, file:///d/3.tar: shard-missing on w1, w2: 3.tar is missing"
    )
    many = status.jobs_table({"jobs": [job(quarantined=[shard] * 1000, quarantined_shards=5000)]})
    assert many.split("\n")[-1] == f"  and {5000 - SHOWN} more"


def test_workers_show_what_they_do() -> None:
    worker = {
        "id": "w1", "address": "h:1", "state": "up", "cache_bytes": 1 << 20, "capabilities": ["cpu", "format:tar"],
        "open_shards": 12, "read_bytes_per_s": 50 << 20, "failures": {"unreachable": 2, "silent": 1}, "suspect": True,
    }  # fmt: skip
    head, row = status.workers_table({"workers": [worker]}).split("\n")
    assert head.split() == ["WORKER", "ADDRESS", "STATE", "CACHE", "SHARDS", "SPEED", "FAILED", "CAPABILITIES"]
    assert "up, unreachable" in row and "50" in row and "/s" in row and " 12 " in row and " 3 " in row
    lost = status.workers_table({"workers": [{**worker, "state": "lost", "read_bytes_per_s": None}]})
    assert "unreachable" not in lost and "/s" not in lost
    assert status.workers_table({"workers": []}) == "no workers"


def test_words_for_numbers() -> None:
    assert (counted(1, "row"), counted(0, "row")) == ("1 row", "0 rows")
    assert listed([1, 2]) == "1, 2" and listed(range(12)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
    assert rest(0) == [] and rest(-3) == [] and rest(2) == ["  and 2 more"]
