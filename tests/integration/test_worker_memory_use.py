"""Memory and sharing while reads run: slow clients, small caches, image folders, specs."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from blake3 import blake3
from worker_kit import Bench, Stored, bench, jpeg, write_arrow, write_tar

from manifests.errors import ConfigError, ProtocolError
from manifests.identity import digest
from manifests.pipeline import DecodeImage, Pipeline, Resize, Select
from manifests.scan import SCANNERS
from manifests.scan.folder import folder_uri, open_folder_shard
from manifests.schema import Field
from manifests.wire import codec
from manifests.wire import messages as m


def numbers(path: Path, rows: int, width: int = 65536) -> Stored:
    values = np.random.default_rng(1).integers(0, 255, (rows, width), np.uint8)
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    write_arrow(path, pa.table({"x": tensor, "n": np.arange(rows)}), chunk=rows)
    return Stored.of(path, "arrow")


def until(check, what: str, timeout: float = 20) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout
    while not check():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.02)


def test_clients_that_take_nothing_stop_nobody_case_25(tmp_path: Path) -> None:
    """case 25: twelve clients read one message and stop; memory levels off, and another client still gets its rows."""
    shard = numbers(tmp_path / "a.arrow", 1024)
    with bench(memory=16 << 20) as made:
        ticket = made.ticket([made.grant(shard, made.spec(shard.fields))])
        stalled = [iter(made.connection.read(ticket)) for _ in range(12)]
        for stream in stalled:
            next(stream)
        levels: list[int] = []

        def level() -> bool:
            time.sleep(0.1)
            levels.append(made.budget.used)
            return len(levels) >= 8 and len(set(levels[-8:])) == 1

        until(level, "memory levels off")
        # half for rows, and over it only the one unit each read may always have
        assert made.budget.used_by("queue") <= (8 << 20) + 12 * 3_300_000
        assert made.read(ticket).table.column("n").to_pylist() == list(range(1024))
        rows = sum(batch.num_rows for stream in stalled for batch, _ in stream)
        assert rows > 12 * 900
        until(lambda: made.budget.used_by("queue") == 0, "queues are empty")


def test_a_cache_of_few_shards_shared_by_many_readers_case_60(tmp_path: Path) -> None:
    """case 60: no shard vanishes under a reader, and the cache is back under its cap at the end."""
    shards = []
    for number in range(12):
        path = tmp_path / f"{number}.tar"
        write_tar(path, [{"bin": bytes([number]) * 100_000} for _ in range(10)])
        shards.append(Stored.of(path))
    with bench(memory=8 << 20) as made:
        spec = made.spec(shards[0].fields)
        grants = [made.grant(shard, spec, first_id=100 * i) for i, shard in enumerate(shards)]
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                for _ in range(2):
                    order = np.random.default_rng(seed).permutation(120)
                    got = made.read(made.ticket(grants, order // 10, order % 10))
                    assert got.ids == (order // 10 * 100 + order % 10).tolist()
                    assert [v[0] for v in got.table.column("bin").to_pylist()] == (order // 10).tolist()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        assert made.cache.stats().bytes <= 8 << 20
        until(lambda: made.cache.pinned() == 0 and made.budget.used <= made.budget.total, "under its cap")


def test_one_cold_shard_and_many_readers_cause_one_fetch_case_59(tmp_path: Path) -> None:
    """case 59: readers of one cold shard share its fetch."""
    write_tar(tmp_path / "a.tar", [{"bin": bytes(1000)} for _ in range(200)])
    shard = Stored.of(tmp_path / "a.tar")
    with bench() as made:
        ticket = made.ticket([made.grant(shard, made.spec(shard.fields))])
        threads = [threading.Thread(target=made.read, args=(ticket,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert made.cache.stats().misses == 1


def test_equal_content_at_two_places_is_kept_once(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [{"bin": bytes(1000)} for _ in range(20)])
    (tmp_path / "b.tar").write_bytes((tmp_path / "a.tar").read_bytes())
    a, b = Stored.of(tmp_path / "a.tar"), Stored.of(tmp_path / "b.tar")
    with bench() as made:
        spec = made.spec(a.fields)
        made.read(made.ticket([made.grant(a, spec)]))
        made.read(made.ticket([made.grant(b, spec)]))
        assert made.cache.stats().blocks == 1


def test_image_folders(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(5):
            (tmp_path / name / f"{i}.jpg").write_bytes(jpeg(i))
    uri = folder_uri(str(tmp_path), "cat/0.jpg", "dog/4.jpg")
    opened = open_folder_shard(uri)
    scan = SCANNERS["folder"](opened)
    shard = Stored(
        tmp_path, "folder", 10, scan.fields, "blake3:" + blake3(opened.read(0, opened.size)).hexdigest(), opened.size
    )
    with bench() as made:
        spec = made.spec(scan.fields, Pipeline([DecodeImage(), Resize((8, 8))]), {"label": {"cat": 4, "dog": 2}})
        got = made.read(made.ticket([made.grant(shard, spec, uri=uri)], [0] * 3, [9, 0, 5]))
        assert got.table.column("label").to_pylist() == [2, 4, 2]
        assert got.table.column("__key__").to_pylist() == ["dog/4.jpg", "cat/0.jpg", "dog/0.jpg"]


def test_specs_are_checked(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [{"jpg": jpeg(0)}])
    shard = Stored.of(tmp_path / "a.tar")
    with bench() as made:
        wrong = digest(b"something else")
        made.blobs[wrong] = codec.encode(m.JobSpec(fields=(shard.fields,), labels=({},)))
        with pytest.raises(ProtocolError, match="is not what came"):
            made.read(made.ticket([made.grant(shard, wrong)]))
        with pytest.raises(ProtocolError, match="no dataset 3"):
            made.read(made.ticket([made.grant(shard, made.spec(shard.fields), source=3)]))
        with pytest.raises(ConfigError, match=r"no field 'cls'.*jpg, __key__"):
            made.read(made.ticket([made.grant(shard, made.spec(shard.fields, Pipeline([Select(["cls"])])))]))
        with pytest.raises(ConfigError, match="s3://"):
            made.read(made.ticket([made.grant(shard, made.spec(shard.fields), uri="s3://bucket/a.tar")]))
        with pytest.raises(ConfigError, match=r"'zip'.*tar"):
            made.read(made.ticket([made.grant(shard, made.spec(shard.fields), format="zip")]))
        with pytest.raises(ProtocolError, match="md5"):
            made.read(made.ticket([made.grant(shard, made.spec(shard.fields), content_id="md5:00")]))


def test_a_shard_without_rows(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow", pa.table({"n": pa.array([], pa.int64())}))
    shard = Stored.of(tmp_path / "a.arrow", "arrow")
    with bench() as made:
        got = list(made.connection.read(made.ticket([made.grant(shard, made.spec(shard.fields))])))
        assert got == []


def test_learned_sizes_keep_messages_small(tmp_path: Path) -> None:
    """Ragged pictures: their size is not known before the first were made."""
    write_tar(tmp_path / "a.tar", [{"jpg": jpeg(i, 200, 300)} for i in range(60)])
    shard = Stored.of(tmp_path / "a.tar")
    with bench() as made:
        got = made.read(made.ticket([made.grant(shard, made.spec(shard.fields, Pipeline([DecodeImage()])))]))
        assert got.ids == list(range(60))
        assert max(batch.nbytes for batch in got.batches) <= 2_500_000
        assert len(got.batches) < 30


def test_fields_a_shard_lacks(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [{"bin": b"x"}])
    write_tar(tmp_path / "b.tar", [{"txt": b"hello", "bin": b"y"}], first=1)
    a, b = Stored.of(tmp_path / "a.tar"), Stored.of(tmp_path / "b.tar")
    fields = (Field(name="bin", kind="bytes"), Field(name="txt", kind="string", nullable=True))
    made: Bench
    with bench() as made:
        spec = made.spec(fields)
        got = made.read(made.ticket([made.grant(a, spec), made.grant(b, spec, first_id=1)], [1, 0], [0, 0]))
        assert got.table.column("txt").to_pylist() == ["hello", None]
        assert got.table.column("bin").to_pylist() == [b"y", b"x"]
