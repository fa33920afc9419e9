"""Reads over a real Flight server: order, idempotence, tickets, bad pictures, changed shards, memory."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
from worker_kit import KEY, Bench, Stored, bench, jpeg, write_arrow, write_tar

from manifests.errors import AccessDenied, NoWorker, ProtocolError, ShardChanged, ShardMissing
from manifests.pipeline import DecodeImage, HorizontalFlip, Normalize, Pipeline, RandomResizedCrop, Resize, Select
from manifests.scan.local import uri_of
from manifests.wire import codec
from manifests.wire import messages as m
from manifests.wire.connection import Address
from manifests.wire.flight import Connection, Server
from worker.service import Service

ARRAYS = Pipeline([DecodeImage(), Resize((24, 32)), Select(["image", "cls", "__key__"])])
RANDOM = Pipeline([DecodeImage(), RandomResizedCrop(16), HorizontalFlip(), Normalize(0.5, 0.25), Select(["image"])])


@pytest.fixture
def one() -> Iterator[Bench]:
    with bench() as made:
        yield made


def pictures(path: Path, count: int, first: int = 0, bad: dict[int, bytes] | None = None) -> Stored:
    write_tar(
        path,
        [{"jpg": (bad or {}).get(i, jpeg(i)), "cls": str(i % 10).encode()} for i in range(first, first + count)],
        first,
    )
    return Stored.of(path)


def holds_nothing(made: Bench) -> None:
    """Within 5 s no read is under way and no memory or block is held for one."""
    deadline = time.monotonic() + 5
    while (made.reads.stats().active or made.budget.used_by("queue")) and time.monotonic() < deadline:
        time.sleep(0.02)
    gc.collect()
    assert made.reads.stats().active == 0
    assert made.budget.used_by("queue") == 0
    assert made.cache.pinned() == 0


def test_rows_come_in_the_order_asked_for(one: Bench, tmp_path: Path) -> None:
    a, b = pictures(tmp_path / "a.tar", 30), pictures(tmp_path / "b.tar", 20, first=100)
    spec = one.spec(a.fields, ARRAYS)
    grants = [one.grant(a, spec, first_id=0), one.grant(b, spec, first_id=1000, shard=1)]
    rng = np.random.default_rng(0)
    which = rng.integers(0, 2, 200)
    rows = np.where(which == 0, rng.integers(0, 30, 200), rng.integers(0, 20, 200))
    got = one.read(one.ticket(grants, which, rows))
    assert got.ids == (which * 1000 + rows).tolist()
    assert got.done == 200 and not got.bad
    assert got.table.column("__key__").to_pylist() == [f"s{i:06d}" for i in (which * 100 + rows)]
    assert got.table.column("cls").to_pylist() == ((which * 100 + rows) % 10).tolist()
    pixels = got.tensor("image")
    assert pixels.shape == (200, 24, 32, 3)
    again = {}
    for i, position in zip(got.ids, range(200)):
        assert np.array_equal(pixels[position], again.setdefault(i, pixels[position]))


def test_without_rows_a_ticket_reads_all_of_its_grants(one: Bench, tmp_path: Path) -> None:
    shard = pictures(tmp_path / "a.tar", 12)
    spec = one.spec(shard.fields)
    got = one.read(one.ticket([one.grant(shard, spec, first_row=2, last_row=5), one.grant(shard, spec, first_id=50)]))
    assert got.ids == [2, 3, 4, *range(50, 62)]
    assert got.table.column_names == ["cls", "jpg", "__key__", "__id__"]
    assert got.table.column("jpg")[0].as_py() == jpeg(2)


def test_the_same_ticket_gives_the_same_bytes_on_any_worker_case_15(one: Bench, tmp_path: Path) -> None:
    """case 15: draws depend on (seed, epoch, sample id) only."""
    shard = pictures(tmp_path / "a.tar", 40)
    spec = one.spec(shard.fields, RANDOM)
    ticket = one.ticket([one.grant(shard, spec, workers=("w-1", "w-2"))])
    first, second = one.read(ticket), one.read(ticket)
    with bench(worker="w-2", threads=1) as other:
        other.spec(shard.fields, RANDOM)
        rows = list(reversed(range(40)))
        third = other.read(other.ticket([one.grant(shard, spec, workers=("w-2",))], [0] * 40, rows))
    assert np.array_equal(first.tensor("image"), second.tensor("image"))
    assert np.array_equal(first.tensor("image"), third.tensor("image")[::-1])
    epoch = one.read(one.ticket([one.grant(shard, spec, epoch=1)])).tensor("image")
    seed = one.read(one.ticket([one.grant(shard, spec, seed=8)])).tensor("image")
    for other_draw in (epoch, seed):
        assert sum(np.array_equal(x, y) for x, y in zip(first.tensor("image"), other_draw)) == 0


def test_a_read_may_span_epochs(one: Bench, tmp_path: Path) -> None:
    shard = pictures(tmp_path / "a.tar", 6)
    spec = one.spec(shard.fields, RANDOM)
    grants = [one.grant(shard, spec), one.grant(shard, spec, epoch=1)]
    both = one.read(one.ticket(grants, [0] * 6 + [1] * 6, [*range(6), *range(6)]))
    alone = [one.read(one.ticket([grant])).tensor("image") for grant in grants]
    assert np.array_equal(both.tensor("image"), np.concatenate(alone))


def test_several_reads_at_once(one: Bench, tmp_path: Path) -> None:
    shard = pictures(tmp_path / "a.tar", 60)
    spec = one.spec(shard.fields, ARRAYS)
    wanted = one.read(one.ticket([one.grant(shard, spec)])).tensor("image")
    results: dict[int, np.ndarray] = {}

    def work(start: int) -> None:
        rows = [(start + i) % 60 for i in range(60)]
        got = one.read(one.ticket([one.grant(shard, spec)], [0] * 60, rows))
        assert got.ids == rows
        results[start] = got.tensor("image")

    threads = [threading.Thread(target=work, args=(start,)) for start in range(0, 60, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 6
    for start, pixels in results.items():
        assert np.array_equal(pixels, np.roll(wanted, -start, axis=0))
    assert one.cache.stats().misses == 1
    holds_nothing(one)


# -- tickets -------------------------------------------------------------------------------------------------------


def test_tickets_that_are_refused(one: Bench, tmp_path: Path) -> None:
    shard = pictures(tmp_path / "a.tar", 10)
    spec = one.spec(shard.fields)
    good = one.grant(shard, spec)

    def refused(ticket: bytes, word: str) -> None:
        with pytest.raises(AccessDenied, match=word):
            one.read(ticket)

    forged = codec.encode(m.ReadTicket(grants=(codec.sign(good, "1", b"x" * 32),)))
    refused(forged, "signature")
    signed = codec.decode(codec.sign(good, "1", KEY), m.SignedGrant)
    altered = codec.encode(one.grant(shard, spec, tenant="mallory"))
    refused(codec.encode(m.ReadTicket(grants=(codec.encode(m.SignedGrant(
        key="1", signature=signed.signature, payload=altered)),))), "signature")  # fmt: skip
    refused(codec.encode(m.ReadTicket(grants=(codec.sign(good, "unknown", KEY),))), "lacks")
    assert one.ring.asked == 1
    refused(one.ticket([one.grant(shard, spec, expires_ms=int(time.time() * 1000) - 1)]), "expired")
    refused(one.ticket([one.grant(shard, spec, workers=("w-9",))]), "w-9")
    narrow = one.grant(shard, spec, first_row=3, last_row=6)
    for row in (2, 6, -1):
        refused(one.ticket([narrow], [0], [row]), "outside")
    assert one.read(one.ticket([narrow], [0, 0], [5, 3])).ids == [5, 3]


def test_expiry_is_in_dispatcher_time_and_cuts_no_read_that_began(one: Bench, tmp_path: Path) -> None:
    shard = pictures(tmp_path / "a.tar", 200)
    spec = one.spec(shard.fields, Pipeline([DecodeImage(), Resize((256, 256))]))
    ticket = one.ticket([one.grant(shard, spec)])
    stream = iter(one.connection.read(ticket))
    batch, part = next(stream)
    one.ring.ahead_ms = 61_000
    rows = batch.num_rows + sum(batch.num_rows for batch, _ in stream)
    assert rows == 200 and part is not None
    with pytest.raises(AccessDenied, match="expired"):
        one.read(ticket)


@pytest.mark.parametrize(
    "ticket", [b"", b"FL\x01\xc1", b"FL\x09abc", b"\x00" * 200, codec.encode(m.ReadTicket(grants=()))]
)
def test_garbage_is_a_protocol_error(one: Bench, ticket: bytes) -> None:
    with pytest.raises(ProtocolError):
        one.read(ticket)


def test_malformed_rows(one: Bench, tmp_path: Path) -> None:
    shard = pictures(tmp_path / "a.tar", 4)
    grant = codec.sign(one.grant(shard, one.spec(shard.fields)), "1", KEY)
    for which, rows in ((b"\0\0\0\0", b"\0" * 16), (b"\0\0\0", b"\0" * 8), (b"\7\0\0\0", b"\0" * 8)):
        with pytest.raises(ProtocolError, match="malformed"):
            one.read(codec.encode(m.ReadTicket(grants=(grant,), which=which, rows=rows)))


def test_a_worker_answers_hello_and_nothing_else(one: Bench) -> None:
    reply = one.connection.call(m.Hello(), m.HelloReply)
    assert (reply.role, reply.id) == ("worker", "w-1")
    with pytest.raises(ProtocolError, match="GetStatus"):
        one.connection.call(m.GetStatus(), m.Document)


# -- content errors ------------------------------------------------------------------------------------------------


def test_bad_pictures_harm_no_other_case_32(one: Bench, tmp_path: Path) -> None:
    """case 32: exactly the bad ones are named, the others come unchanged, twice."""
    bad = {13: b"", 14: b"\x01\x92\x83\xf4\x05\xa6\x07\x18\xc9\x1a", 40: b"<html>not here</html>"}
    good, spoilt = pictures(tmp_path / "good.tar", 64), pictures(tmp_path / "spoilt.tar", 64, bad=bad)
    spec = one.spec(good.fields, ARRAYS)
    wanted = one.read(one.ticket([one.grant(good, spec)])).tensor("image")
    for _ in range(2):
        got = one.read(one.ticket([one.grant(spoilt, spec, first_id=100)]))
        left = [i for i in range(64) if i not in bad]
        assert got.ids == [100 + i for i in left]
        assert np.array_equal(got.tensor("image"), wanted[left])
        assert [(b.position, b.sample_id, b.key) for b in got.bad] == [(i, 100 + i, f"s{i:06d}") for i in bad]
        assert {b.shard for b in got.bad} == {uri_of(spoilt.path)}
        assert [b.reason.split(":")[0] for b in got.bad] == ["field 'jpg'"] * 3
        assert "0 bytes" in got.bad[0].reason and "text" in got.bad[2].reason
        assert got.done == 64


def test_every_row_bad(one: Bench, tmp_path: Path) -> None:
    shard = pictures(tmp_path / "a.tar", 5, bad=dict.fromkeys(range(5), b"no"))
    got = one.read(one.ticket([one.grant(shard, one.spec(shard.fields, ARRAYS))]))
    assert got.ids == [] and len(got.bad) == 5 and got.done == 5


def test_a_missing_field_names_what_the_row_has(one: Bench, tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [{"jpg": jpeg(0), "cls": b"1"}, {"jpeg": jpeg(1), "txt": b"x", "cls": b"2"}])
    shard = Stored.of(tmp_path / "a.tar")
    spec = one.spec(shard.fields, Pipeline([DecodeImage("jpg"), Select(["image"])]))
    got = one.read(one.ticket([one.grant(shard, spec)]))
    assert got.ids == [0]
    assert got.bad[0].key == "s000001"
    assert got.bad[0].reason == "field 'jpg' is null; the row has cls, jpeg, txt, __key__"


# -- storage errors ------------------------------------------------------------------------------------------------


def test_a_missing_shard_is_named(one: Bench, tmp_path: Path) -> None:
    shard = pictures(tmp_path / "a.tar", 5)
    ticket = one.ticket([one.grant(shard, one.spec(shard.fields))])
    shard.path.rename(tmp_path / "b.tar")
    with pytest.raises(ShardMissing, match=r"a\.tar"):
        one.read(ticket)
    (tmp_path / "b.tar").rename(shard.path)
    assert len(one.read(ticket).ids) == 5
    shard.path.unlink()
    with pytest.raises(ShardMissing, match=r"a\.tar"):
        one.read(ticket)


@pytest.mark.parametrize("blocks", ["one", "many"])
def test_a_shard_overwritten_with_the_same_size(blocks: str, tmp_path: Path) -> None:
    with bench(memory=(64 << 20) if blocks == "one" else (8 << 20)) as made:
        count = 20 if blocks == "one" else 500
        write_tar(tmp_path / "a.tar", [{"bin": bytes([i % 251]) * 4096} for i in range(count)])
        shard = Stored.of(tmp_path / "a.tar")
        assert blocks == "one" or shard.size > (1 << 20)
        ticket = made.ticket([made.grant(shard, made.spec(shard.fields))])
        assert len(made.read(ticket).ids) == count
        data = bytearray(shard.path.read_bytes())
        data[1000] ^= 1
        shard.path.write_bytes(data)
        with pytest.raises(ShardChanged, match=r"a\.tar.*expected blake3:.*found blake3:"):
            made.read(ticket)
        data[1000] ^= 1
        shard.path.write_bytes(data)
        assert len(made.read(ticket).ids) == count


def test_a_shard_of_another_length(one: Bench, tmp_path: Path) -> None:
    shard = pictures(tmp_path / "a.tar", 5)
    spec = one.spec(shard.fields)
    shard.path.write_bytes(shard.path.read_bytes() + b"\0" * 512)
    with pytest.raises(ShardChanged, match="bytes"):
        one.read(one.ticket([one.grant(shard, spec)]))
    with pytest.raises(ShardChanged, match=r"expected 6 rows, found 5 rows"):
        other = Stored.of(shard.path)
        one.read(one.ticket([one.grant(other, spec, rows=6)]))


def test_an_etag_shard_that_was_touched(one: Bench, tmp_path: Path) -> None:
    shard = pictures(tmp_path / "a.tar", 5)
    stat = shard.path.stat()
    grant = one.grant(shard, one.spec(shard.fields), content_id=f"etag:{stat.st_size}-{stat.st_mtime_ns}")
    assert len(one.read(one.ticket([grant])).ids) == 5
    shard.path.touch()
    with pytest.raises(ShardChanged, match="etag"):
        one.read(one.ticket([grant]))


def test_an_error_in_the_middle_ends_the_stream_with_it(one: Bench, tmp_path: Path) -> None:
    a, b = pictures(tmp_path / "a.tar", 30), pictures(tmp_path / "b.tar", 30)
    spec = one.spec(a.fields, Pipeline([DecodeImage(), Resize((256, 256))]))
    b.path.unlink()
    ids: list[int] = []
    with pytest.raises(ShardMissing, match=r"b\.tar"):
        for batch, _ in one.connection.read(one.ticket([one.grant(a, spec), one.grant(b, spec, first_id=30)])):
            ids += batch.column("__id__").to_pylist()
    assert ids == list(range(len(ids))) and len(ids) <= 30
    holds_nothing(one)


# -- memory and pace -----------------------------------------------------------------------------------------------


def numbers(path: Path, rows: int, width: int) -> Stored:
    rng = np.random.default_rng(1)
    values = rng.integers(0, 255, (rows, width), np.uint8)
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    write_arrow(path, pa.table({"x": tensor, "n": np.arange(rows)}), chunk=rows)
    return Stored.of(path, "arrow")


def test_a_large_shard_in_little_memory(tmp_path: Path) -> None:
    """A shard of 64 MiB on a worker of 8 MiB: right values, and memory that does not follow the shard."""
    shard = numbers(tmp_path / "a.arrow", 1024, 65536)
    with bench(memory=8 << 20) as made:
        spec = made.spec(shard.fields)
        ticket = made.ticket([made.grant(shard, spec)])
        process = psutil.Process()
        made.read(made.ticket([made.grant(shard, spec)], [0], [0]))
        gc.collect()
        base, peak, count, total = process.memory_info().rss, 0, 0, 0
        for batch, _ in made.connection.read(ticket):
            count += batch.num_rows
            total += int(batch.column("n").to_numpy().sum())
            assert batch.nbytes <= 2_500_000
            peak = max(peak, process.memory_info().rss)
        assert count == 1024 and total == 1024 * 1023 // 2
        assert peak - base < 40 << 20
        assert made.cache.stats().bytes <= 8 << 20
        assert made.cache.stats().evictions > 0
        rows = np.random.default_rng(2).permutation(1024)[:60]
        got = made.read(made.ticket([made.grant(shard, spec)], [0] * 60, rows.tolist()))
        assert got.table.column("n").to_pylist() == rows.tolist()


def test_messages_are_cut_and_a_large_row_passes_case_50(one: Bench, tmp_path: Path) -> None:
    """case 50: a row of 6 MB among small ones passes; other messages stay at their size."""
    sizes = [100, 6_000_000, 100, 900_000, 900_000, 900_000, 900_000, 5]
    write_tar(tmp_path / "a.tar", [{"bin": bytes([i]) * size} for i, size in enumerate(sizes)])
    shard = Stored.of(tmp_path / "a.tar")
    got = one.read(one.ticket([one.grant(shard, one.spec(shard.fields))]))
    assert [len(v) for v in got.table.column("bin").to_pylist()] == sizes
    assert all(batch.nbytes <= 2_500_000 for batch in got.batches if batch.num_rows > 1)
    assert [part.done for part in got.parts] == sorted(part.done for part in got.parts)


def test_leaving_in_the_middle_gives_everything_back_case_51(tmp_path: Path) -> None:
    """case 51: after a client cancels, closes or drops its reader, the worker stops and holds nothing for it."""
    shard = numbers(tmp_path / "a.arrow", 512, 65536)
    with bench(memory=64 << 20) as made:
        spec = made.spec(shard.fields)
        ticket = made.ticket([made.grant(shard, spec)])
        for how in ("cancel", "drop", "close") * 5:
            connection = Connection(made.server.address)
            stream = connection.read(ticket)
            next(iter(stream))
            if how == "cancel":
                stream.cancel()
            del stream
            gc.collect()
            connection.close()
        holds_nothing(made)


def test_signs_of_life_while_nothing_is_ready(one: Bench, tmp_path: Path) -> None:
    shard = pictures(tmp_path / "a.tar", 3)
    release = threading.Event()
    blocker = one.io.lane()
    for _ in range(4):
        blocker.submit(lambda: (release.wait(10), None)[1])
    threading.Timer(2.5, release.set).start()
    got = one.read(one.ticket([one.grant(shard, one.spec(shard.fields, ARRAYS))]))
    signs = [part.done for batch, part in zip(got.batches, got.parts) if not batch.num_rows]
    assert signs in ([0], [0, 0], [0, 0, 0])  # two, give or take a slow machine
    assert got.ids == [0, 1, 2]
    stages = got.parts[-1].stage_us
    assert set(stages) == {"fetch", "parse", "decode", "encode", "send"} and stages["decode"] > 0


def test_a_draining_worker_refuses_and_finishes(one: Bench, tmp_path: Path) -> None:
    shard = numbers(tmp_path / "a.arrow", 512, 65536)
    ticket = one.ticket([one.grant(shard, one.spec(shard.fields))])
    stream = iter(one.connection.read(ticket))
    rows = next(stream)[0].num_rows
    one.reads.refuse("it is draining")
    with pytest.raises(NoWorker, match="draining"):
        one.read(ticket)
    assert not one.reads.wait_idle(0.01)
    rows += sum(batch.num_rows for batch, _ in stream)
    assert rows == 512
    assert one.reads.wait_idle(5)


def test_aborted_reads_end_with_no_worker(one: Bench, tmp_path: Path) -> None:
    shard = numbers(tmp_path / "a.arrow", 512, 65536)
    stream = iter(one.connection.read(one.ticket([one.grant(shard, one.spec(shard.fields))])))
    next(stream)
    one.reads.abort("it stops")
    with pytest.raises(NoWorker, match="it stops"):
        for _ in stream:
            pass


def test_ports_are_not_shared_case_24(one: Bench) -> None:
    """case 24: a second worker on one port fails with "port in use"."""
    with pytest.raises(ValueError, match="port in use"):
        Server(Service("w-2", one.reads), Address("127.0.0.1", one.server.address.port))
