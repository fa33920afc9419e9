"""Case 50: sizes of messages on every hop. What is large passes with default settings; above a stated limit a typed error
names it, and the connection stays usable."""

import json
import threading

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from dispatcher.config import DispatcherConfig
from dispatcher.main import Dispatcher
from dispatcher.memory_store import MemoryBackend, MemoryStore
from manifests import Field, Manifest
from manifests.errors import ProtocolError
from manifests.wire import codec
from manifests.wire import messages as m
from manifests.wire.connection import Address
from manifests.wire.flight import Connection, Server

ANY = Address("127.0.0.1", 0)
FOUR = 4 << 20
SHARDS = 50_000


def long_paths() -> Manifest:
    """50,000 shards with paths of 120 characters."""
    paths = [f"file:///data/{'x' * 94}/{number:08d}.tar" for number in range(SHARDS)]
    assert {len(path) for path in paths} == {120}
    table = pa.table(
        {
            "uri": pa.array(paths, pa.large_utf8()),
            "format": pa.array(["tar"] * SHARDS).dictionary_encode(),
            "rows": np.full(SHARDS, 10, np.int64),
            "bytes": np.full(SHARDS, 1 << 20, np.int64),
            "content_id": pa.array([f"sha256:{number * 7919:064x}" for number in range(SHARDS)], pa.large_utf8()),
        }
    )
    return Manifest("long", "1", (Field("cls", "scalar", "int64"),), {}, table)


@pytest.fixture(scope="module")
def dispatcher(tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    leading = threading.Event()
    config = DispatcherConfig(etcd=(Address("memory", 1),), store=store, listen=ANY)
    found = Dispatcher(config, MemoryStore(MemoryBackend()), lambda address: leading.set())
    assert leading.wait(5)
    yield found
    found.close()


@pytest.fixture
def connection(dispatcher):
    found = Connection(dispatcher.address)
    yield found
    found.close()


def test_case_50_a_job_over_50_000_long_paths(connection, dispatcher):
    """Manifest, grants, a report above 4 MB and a stock client's answer above 4 MB, all with default settings."""
    manifest = long_paths()
    data = manifest.to_bytes()
    connection.upload(f"manifest/{manifest.digest}", data, 60)
    connection.call(m.RegisterDataset(name="long", version="1", digest=manifest.digest), m.DatasetRegistered, 10)
    assert connection.download(f"manifest/{manifest.digest}", 60) == data
    worker = m.RegisterWorker(id="w1", incarnation="1", address="127.0.0.1:9", fingerprint="f")
    connection.call(worker, m.WorkerWelcome, 10)
    settings = m.JobSettings(
        sources=(m.Source(digest=manifest.digest),), spec="", pipeline="", batch_size=100, on_error="skip", lanes=1,
        shuffle=None,
    )  # fmt: skip
    holder = m.Holder(uid="u0", host="box", pid=1)
    connection.call(m.OpenJob(job="j", rank=0, holder=holder, nonce="n", settings=settings), m.JobOpened, 10)
    shards = tuple(m.ShardAsk(source=0, shard=number) for number in range(0, SHARDS, 100))
    ask = m.AskGrants(job="j", generation=1, rank=0, holder="u0", epoch=0, shards=shards)
    grants = connection.call(ask, m.Grants, 10)
    assert len(grants.grants) == 500
    rows = tuple(
        m.SkippedRow(
            sample_id=n, key=f"{n:08d}", shard=f"file:///data/{'x' * 94}/{n // 10:08d}.tar", reason="truncated"
        )
        for n in range(30_000)
    )
    books = m.EpochProgress(
        epoch=0, step=300, acked_step=300, handed=(30_000,), acked=(30_000,), skipped=rows, acked_skipped=30_000
    )
    report = m.Report(job="j", generation=1, rank=0, holder="u0", epochs=(books,))
    assert len(codec.encode(report)) > FOUR
    connection.call(report, m.Reported, 10)
    audit = json.loads(connection.call(m.GetAudit(job="j"), m.Document, 10).json)
    assert (audit["rows"], audit["skipped"], audit["open"]) == (500_000, 30_000, 470_000)
    with fl.connect(dispatcher.address.uri) as stock:
        info = stock.get_flight_info(fl.FlightDescriptor.for_path("long"))
        assert len(info.endpoints) == 10_000 and len(info.serialize()) > FOUR


def test_case_50_above_the_limit_a_message_is_refused_before_it_is_sent(connection):
    report = m.Report(job="j", generation=1, rank=0, holder="u0", waiting_for="x" * (100 << 20))
    with pytest.raises(ProtocolError, match=r"message Report of \d+ bytes: the limit is 16777216"):
        connection.call(report, m.Reported, 10)
    with pytest.raises(ProtocolError, match=r"ticket of \d+ bytes: the limit is 16777216"):
        connection.read(bytes(17 << 20))
    assert connection.call(m.Hello(), m.HelloReply, 10).role == "dispatcher"


def test_case_50_a_peer_that_sends_more_is_told_the_limit(dispatcher):
    with fl.connect(dispatcher.address.uri) as stock:
        body = codec.encode(m.Report(job="j", generation=1, rank=0, holder="u0", waiting_for="x" * (20 << 20)))
        with pytest.raises(fl.FlightServerError, match="the limit is 16777216"):
            list(stock.do_action(fl.Action("feedline", body)))
        assert list(stock.do_action(fl.Action("feedline", codec.encode(m.Hello()))))


def test_case_50_texts_and_names_have_limits_of_their_own(connection):
    for message in (
        m.FindDataset(name="x" * (10 << 20)),
        m.GetAudit(job="x" * (10 << 20)),
        m.Report(job="j", generation=1, rank=0, holder="u0", waiting_for="x" * (10 << 20)),
        m.DrainWorker(id="x" * (10 << 20)),
    ):
        with pytest.raises(ProtocolError, match="with a text of 10485760 characters: the limit is 4096"):
            connection.call(message, m.Document, 10)
    data = bytes(2 << 20)
    with pytest.raises(ProtocolError, match="the limit is 1048576"):
        connection.call(m.PutBlob(digest="sha256:" + "0" * 64, data=data), m.Done, 10)


class Odd:
    """A handler that answers at length."""

    def __init__(self) -> None:
        self.tickets = []

    def handle(self, message):
        return m.Document(json=bytes(int(message.digest)))

    def read(self, ticket, cancelled):
        self.tickets.append(len(ticket))
        batch = pa.record_batch({"x": [1]})
        return batch.schema, iter([(batch, None)])

    def store(self, path, data):
        pass


@pytest.fixture
def odd():
    handler = Odd()
    with Server(handler, ANY, max_upload=1 << 20) as server:
        found = Connection(server.address)
        yield found, handler
        found.close()
        server.stop()


def test_case_50_answers_tickets_and_uploads(odd):
    connection, handler = odd
    assert len(connection.call(m.GetBlob(digest=str(6 << 20)), m.Document, 10).json) == 6 << 20
    with pytest.raises(ProtocolError, match=r"answer Document to GetBlob of \d+ bytes: the limit is 16777216"):
        connection.call(m.GetBlob(digest=str(20 << 20)), m.Document, 10)
    assert [batch.num_rows for batch, _ in connection.read(bytes(6 << 20))] == [1] and handler.tickets == [6 << 20]
    with pytest.raises(ProtocolError, match="upload of more than 1048576 bytes"):
        connection.upload("a/b", bytes(5 << 20), 10)
    connection.upload("a/b", bytes(1 << 20), 10)
