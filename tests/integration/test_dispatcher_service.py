"""The dispatcher over real Flight on the in-memory store: every message, uploads, stock clients, take-over, faults."""

import json
import threading
import time
from functools import partial

import msgspec
import pyarrow.flight as fl
import pytest
from core_bench import make_manifest

from dispatcher import events
from dispatcher.config import DispatcherConfig
from dispatcher.main import Dispatcher
from dispatcher.memory_store import MemoryBackend, MemoryStore
from manifests.errors import (
    AccessDenied,
    ConfigError,
    DispatcherUnavailable,
    FeedlineError,
    Fenced,
    JobMismatch,
    NoWorker,
    ProtocolError,
    UnknownDataset,
)
from manifests.identity import digest
from manifests.manifest import Manifest, Shard
from manifests.wire import codec
from manifests.wire import messages as m
from manifests.wire.connection import Address
from manifests.wire.flight import Connection

ANY = Address("127.0.0.1", 0)


def start(tmp_path, backend, lease=10.0):
    config = DispatcherConfig(etcd=(Address("memory", 1),), store=tmp_path / "store", listen=ANY, lease=lease)
    leading = threading.Event()
    found = Dispatcher(config, MemoryStore(backend), lambda address: leading.set())
    return found, leading


@pytest.fixture
def backend():
    return MemoryBackend()


@pytest.fixture
def dispatcher(tmp_path, backend):
    found, leading = start(tmp_path, backend)
    assert leading.wait(5)
    yield found
    found.close()


@pytest.fixture
def call(dispatcher):
    connection = Connection(dispatcher.address)

    def send(message, kind):
        return connection.call(message, kind, timeout=10)

    send.connection = connection
    yield send
    connection.close()


@pytest.fixture
def manifest():
    return make_manifest([3, 5, 4])


def upload(call, manifest, name="photos", version="1"):
    call.connection.upload(f"manifest/{manifest.digest}", manifest.to_bytes(), 10)
    return call(m.RegisterDataset(name=name, version=version, digest=manifest.digest), m.DatasetRegistered)


def eventually(check, seconds=5.0):
    """The first true answer of ``check``; what it raises when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if found := check():
                return found
        except FeedlineError:
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.02)


def opening(manifest, **fields):
    settings = m.JobSettings(
        sources=(m.Source(digest=manifest.digest, name="photos", version="1"),), spec="", pipeline="", batch_size=2
    )
    defaults = {"job": "train", "rank": 0, "holder": m.Holder(uid="u0", host="box", pid=1), "nonce": "n"}
    return m.OpenJob(**{**defaults, "settings": settings, **fields})


def worker(call, name="w1"):
    message = m.RegisterWorker(id=name, incarnation="1", address="127.0.0.1:9001", fingerprint="f")
    return call(message, m.WorkerWelcome)


def asking(opened, **fields):
    defaults = {"job": "train", "generation": opened.generation, "rank": 0, "holder": "u0", "epoch": 0}
    return m.AskGrants(**{**defaults, "shards": (m.ShardAsk(source=0, shard=1),), **fields})


# -- datasets and blobs


def test_upload_register_find_download(call, manifest):
    known = m.HaveManifest(digest=manifest.digest, locations=manifest.locations)
    assert not call(known, m.ManifestKnown).known
    assert upload(call, manifest).new and not upload(call, manifest).new
    assert call(known, m.ManifestKnown).known
    found = call(m.FindDataset(name="photos"), m.DatasetFound)
    assert (found.digest, found.rows, found.shards) == (manifest.digest, 12, 3)
    data = call.connection.download(f"manifest/{manifest.digest}", 10)
    assert Manifest.from_bytes(data).locations == manifest.locations


def test_case_6_moved_data_is_found_under_the_same_digest(call, manifest, dispatcher):
    """The same digest with other uris replaces the file, so that grants name the new place."""
    upload(call, manifest)
    moved = Manifest.from_shards(
        "photos",
        "1",
        manifest.fields,
        [Shard(s.ordinal, "/new" + s.uri, s.format, s.rows, s.bytes, s.content_id) for s in manifest.shards],
    )
    assert moved.digest == manifest.digest
    known = m.HaveManifest(digest=moved.digest, locations=moved.locations)
    assert not call(known, m.ManifestKnown).known
    upload(call, moved)
    assert call(known, m.ManifestKnown).known
    worker(call)
    opened = call(opening(moved), m.JobOpened)
    grant = call(asking(opened), m.Grants).grants[0]
    assert codec.open_signed(grant.signed, worker(call).keys).uri == "/new/data/photos-1.tar"


def test_a_name_needs_an_uploaded_manifest(call, manifest):
    with pytest.raises(UnknownDataset, match="has no manifest"):
        call(m.RegisterDataset(name="photos", version="1", digest=manifest.digest), m.DatasetRegistered)


def test_an_altered_upload_is_refused_and_leaves_nothing(call, manifest, tmp_path):
    other = make_manifest([1], "other")
    for data in (other.to_bytes(), b"nonsense", b""):
        with pytest.raises(ProtocolError):
            call.connection.upload(f"manifest/{manifest.digest}", data, 10)
    for path in ("manifest/../../x", "blob/x", f"manifest/{manifest.digest}/x"):
        with pytest.raises(ProtocolError):
            call.connection.upload(path, manifest.to_bytes(), 10)
    assert [p.name for p in (tmp_path / "store").rglob("*") if p.is_file()] == ["cluster"]


def test_blobs(call):
    data = codec.encode(m.JobSpec(fields=((),), labels=({},)))
    call(m.PutBlob(digest=digest(data), data=data), m.Done)
    assert call(m.GetBlob(digest=digest(data)), m.Blob).data == data
    with pytest.raises(ProtocolError, match="altered"):
        call(m.PutBlob(digest=digest(b"x"), data=b"y"), m.Done)
    with pytest.raises(UnknownDataset, match="has no blob"):
        call(m.GetBlob(digest=digest(b"z")), m.Blob)
    with pytest.raises(ProtocolError, match="not a digest"):
        call(m.GetBlob(digest="../../etc/passwd"), m.Blob)


# -- a job's life


def test_a_job_from_open_to_audit(call, manifest):
    upload(call, manifest)
    keys = worker(call).keys
    opened = call(opening(manifest), m.JobOpened)
    assert opened.settings.seed is not None and 0 <= opened.settings.seed < 2**63
    granted = call(asking(opened), m.Grants)
    assert codec.open_signed(granted.grants[0].signed, keys).uri == "/data/photos-1.tar"
    call(m.Report(job="train", generation=1, rank=0, holder="u0", state="waiting", waiting_for="w1"), m.Reported)
    status = json.loads(call(m.GetStatus(), m.Document).json)
    assert status["schema"] == 1 and status["dispatcher"]["leader"] == status["dispatcher"]["address"]
    assert status["etcd"]["ok"] and status["datasets"][0]["name"] == "photos"
    assert status["workers"][0]["state"] == "up"
    job = status["jobs"][0]
    assert (job["name"], job["dataset"], job["generation"], job["state"]) == ("train", "photos@1", 1, "running")
    assert (job["epoch"], job["steps_per_epoch"]) == (0, 6)
    rank = job["ranks"][0]
    assert (rank["rank"], rank["state"], rank["waiting_for"], rank["step"]) == (0, "waiting", "w1", 0)
    audit = json.loads(call(m.GetAudit(job="train"), m.Document).json)
    assert audit["state"] == "running" and audit["open"] == audit["rows"] == 12
    with pytest.raises(ConfigError, match="unknown job 'no': known jobs: train"):
        call(m.GetAudit(job="no"), m.Document)
    call(m.Report(job="train", generation=1, rank=0, holder="u0", leaving=True), m.Reported)
    assert json.loads(call(m.GetStatus(), m.Document).json)["jobs"][0]["ranks"][0]["state"] == "done"


def test_errors_keep_type_and_detail_on_the_wire(call, manifest):
    upload(call, manifest)
    two = msgspec.structs.replace(opening(manifest).settings, world_size=2)
    call(opening(manifest, settings=two), m.JobOpened)
    with pytest.raises(JobMismatch, match="batch_size: job has 2, this rank asks 3") as caught:
        call(opening(manifest, rank=1, settings=msgspec.structs.replace(two, batch_size=3)), m.JobOpened)
    assert caught.value.detail["differences"] == ["batch_size"] and caught.value.remedy


def test_hello_and_unknown_messages(call, dispatcher):
    hello = call(m.Hello(), m.HelloReply)
    assert (hello.role, hello.leader, hello.term) == ("dispatcher", str(dispatcher.address), 1)
    with pytest.raises(AccessDenied, match="serves no rows"):
        list(call.connection.read(b"FL\x01"))
    client = fl.connect(dispatcher.address.uri)
    with client, pytest.raises(fl.FlightServerError, match="unknown action"):
        list(client.do_action(fl.Action("other", b"")))


# -- stock Flight clients


def test_stock_clients_list_datasets_and_get_endpoints(call, manifest, dispatcher):
    upload(call, manifest)
    keys = worker(call).keys
    with fl.connect(dispatcher.address.uri) as client:
        flights = list(client.list_flights())
        assert [info.descriptor.path for info in flights] == [[b"photos", b"1"]]
        assert flights[0].total_records == 12
        info = client.get_flight_info(fl.FlightDescriptor.for_path("photos", "1", "1", "2"))
        assert len(info.endpoints) == 2 and info.total_records == 9
        assert info.schema.names == ["x", "__id__"]
        ticket = codec.decode(info.endpoints[0].ticket.ticket, m.ReadTicket)
        grant = codec.open_signed(ticket.grants[0], keys)
        assert grant.shard == 1 and info.endpoints[0].locations[0].uri == b"grpc://127.0.0.1:9001"
        spec = codec.decode(call(m.GetBlob(digest=grant.spec), m.Blob).data, m.JobSpec)
        assert spec.fields == (manifest.fields,) and spec.pipeline == b""
        for path in (("photos",), ("photos", "1")):
            assert len(client.get_flight_info(fl.FlightDescriptor.for_path(*path)).endpoints) == 3
        for path in (("photos", "1", "x"), ("photos", "1", "-1"), ("photos", "1", "0", "20000"), ("photos", "1", "3")):
            with pytest.raises(fl.FlightServerError):
                client.get_flight_info(fl.FlightDescriptor.for_path(*path))


def test_stock_clients_are_told_that_no_worker_is_up(call, manifest, dispatcher):
    upload(call, manifest)
    with fl.connect(dispatcher.address.uri) as client, pytest.raises(fl.FlightServerError) as caught:
        client.get_flight_info(fl.FlightDescriptor.for_path("photos"))
    assert json.loads(caught.value.extra_info)["code"] == NoWorker.code


# -- faults


@pytest.mark.parametrize("fault", ["refused", "unknown-applied", "unknown-lost"])
def test_after_a_failed_commit_the_same_open_opens_one_generation(call, manifest, backend, fault):
    upload(call, manifest)
    backend.commit_fault = fault
    with pytest.raises(DispatcherUnavailable) as caught:
        call(opening(manifest), m.JobOpened)
    assert caught.value.detail["retry"]
    opened = eventually(lambda: call(opening(manifest), m.JobOpened))
    assert opened.generation == 1 and backend.terms == 2


def test_while_the_store_is_away_requests_fail_with_the_reason_and_go_on_after(call, manifest, backend):
    upload(call, manifest)
    backend.available = False
    with pytest.raises(DispatcherUnavailable):
        call(opening(manifest), m.JobOpened)
    time.sleep(0.1)
    with pytest.raises(DispatcherUnavailable, match="memory store is not available"):
        call(m.FindDataset(name="photos"), m.DatasetFound)
    backend.available = True
    assert eventually(lambda: call(opening(manifest), m.JobOpened)).generation == 1


def test_heartbeats_are_answered_from_memory_while_leadership_is_certain(call, backend):
    worker(call)
    backend.available = False
    beat = m.Heartbeat(id="w1", incarnation="1")
    assert call(beat, m.WorkerWelcome).known
    backend.available = True


def test_a_leader_whose_lease_could_be_over_answers_nothing(tmp_path, backend):
    """The store stops answering; from the lease's end on by its own clock, the leader refuses."""
    found, leading = start(tmp_path, backend, lease=1.0)
    assert leading.wait(5)
    connection = Connection(found.address)
    try:
        connection.call(m.RegisterWorker(id="w1", incarnation="1", address="a:1"), m.WorkerWelcome, timeout=5)
        backend.available = False
        beat = m.Heartbeat(id="w1", incarnation="1")

        def refused():
            try:
                connection.call(beat, m.WorkerWelcome, timeout=5)
            except DispatcherUnavailable as error:
                return error
            return None

        begin = time.monotonic()
        error = eventually(refused)
        assert time.monotonic() - begin < 3
        assert "memory store is not available" in str(error) or "lease" in str(error)
    finally:
        connection.close()
        found.close()


def test_a_second_dispatcher_refuses_names_the_leader_and_takes_over(tmp_path, backend, call, dispatcher, manifest):
    upload(call, manifest)
    opened = call(opening(manifest), m.JobOpened)
    standby, leading = start(tmp_path, backend)
    connection = Connection(standby.address)
    try:

        def named():
            try:
                connection.call(m.GetStatus(), m.Document, timeout=5)
            except DispatcherUnavailable as error:
                return error if error.detail["leader"] else None
            raise AssertionError("a standby answered")

        assert eventually(named).detail["leader"] == str(dispatcher.address)
        assert not leading.is_set()
        dispatcher.close()
        assert leading.wait(5)
        again = connection.call(opening(manifest), m.JobOpened, timeout=5)
        assert again.generation == opened.generation and again.settings == opened.settings
        welcome = connection.call(m.Heartbeat(id="w1", incarnation="1"), m.WorkerWelcome, timeout=5)
        assert not welcome.known
        report = m.Report(job="train", generation=1, rank=0, holder="u0")
        assert connection.call(report, m.Reported, timeout=5).slowest_epoch == 0
        stale = m.Report(job="train", generation=0, rank=0, holder="u0")
        with pytest.raises(Fenced):
            connection.call(stale, m.Reported, timeout=5)
    finally:
        connection.close()
        standby.close()


def test_an_internal_error_fails_one_request_and_the_state_is_loaded_again(call, manifest, dispatcher, backend):
    upload(call, manifest)
    call(opening(manifest), m.JobOpened)

    def look(state, event):
        state.jobs.by_name.clear()  # half a change, and then
        raise ZeroDivisionError("a bug")

    with pytest.raises(ProtocolError, match="failed on Asked: ZeroDivisionError"):
        dispatcher.driver.submit(partial(events.Asked, look=look))
    assert eventually(lambda: call(opening(manifest), m.JobOpened)).generation == 1
    assert backend.terms == 2


def test_many_callers_at_once(call, manifest, backend):
    """Requests from many threads share commits, and each gets its own answer."""
    upload(call, manifest)
    before = backend.commits
    answers = {}

    def one(number):
        answers[number] = call(opening(manifest, job=f"job-{number}", nonce=str(number)), m.JobOpened)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert {number: found.job for number, found in answers.items()} == {n: f"job-{n}" for n in range(24)}
    assert backend.commits - before <= 24


def test_a_port_in_use_is_named(tmp_path, dispatcher):
    config = DispatcherConfig(etcd=(Address("memory", 1),), store=tmp_path / "b", listen=dispatcher.server.address)
    store = MemoryStore()
    with pytest.raises(ConfigError, match="port in use"):
        Dispatcher(config, store)
    store.close()


def test_a_store_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    config = DispatcherConfig(etcd=(Address("memory", 1),), store=tmp_path / "file" / "store", listen=ANY)
    with pytest.raises(ConfigError, match="cannot write to the store folder"):
        Dispatcher(config, MemoryStore())


def test_closing_is_quick_and_gives_the_leadership_back(tmp_path, backend):
    found, leading = start(tmp_path, backend)
    assert leading.wait(5)
    begin = time.monotonic()
    found.close()
    found.close()
    assert time.monotonic() - begin < 2 and backend.leader is None


# -- messages that make no sense


def forged(manifest, opened):
    """(what, message): each decodes, and none can be meant."""
    huge = "x" * (10 << 20)
    replace = msgspec.structs.replace
    ask, ready = asking(opened), opening(manifest)
    report = m.Report(job="train", generation=1, rank=0, holder="u0")
    books = m.EpochProgress(epoch=0, handed=(0,) * 12, acked=(0,) * 12)
    start = m.StartPoint(kind="checkpoint", taken=(0,) * 12)
    settings = ready.settings

    def opens(**changes):
        return replace(ready, nonce="other", settings=replace(settings, **changes))

    def starts(**changes):
        return replace(ready, nonce="other", start=replace(start, **changes))

    def reports(**changes):
        return replace(report, epochs=(replace(books, **changes),))

    return {
        "epoch below zero": replace(ask, epoch=-1),
        "an epoch beyond numbers": replace(ask, epoch=1 << 63),
        "no such shard": replace(ask, shards=(m.ShardAsk(source=0, shard=1 << 62),)),
        "no such source": replace(ask, shards=(m.ShardAsk(source=9, shard=0),)),
        "a source below zero": replace(ask, shards=(m.ShardAsk(source=-1, shard=0),)),
        "a holder's name of 10 MB": replace(ask, holder=huge),
        "another holder": replace(ask, holder="u1"),
        "a rank outside the world": replace(ask, rank=7),
        "a rank below zero": replace(ask, rank=-1),
        "another generation": replace(ask, generation=1 << 62),
        "a failure of 10 MB": replace(ask, failures=(m.ReadFailure(worker=huge, source=0, shard=0, code="x"),)),
        "speeds below zero": replace(ask, speeds=(m.WorkerSpeed(worker="w1", bytes=-1, ms=1),)),
        "NaN bad rows": opens(max_bad=float("nan")),
        "a weight that is no number": opens(sources=(replace(settings.sources[0], weight=float("inf")),)),
        "as many ranks as there are numbers": opens(world_size=1 << 62),
        "as many lanes as there are numbers": opens(lanes=1 << 62),
        "a window below zero": opens(shuffle=m.Shuffle(buffer=-1)),
        "no digest": opens(sources=(m.Source(digest=huge),)),
        "a seed beyond numbers": opens(seed=1 << 63),
        "more rows taken than there are numbers": starts(taken=(1 << 63,) * 12),
        "fewer rows than none": starts(taken=(-1,) * 12),
        "a step below zero": starts(step=-1),
        "many megabytes of ranges": starts(ranges=bytes(8 << 20)),
        "a lane below zero": starts(lanes=(m.LaneGrants(rank=0, place=-1),)),
        "rows beyond numbers": reports(handed=(1 << 63,) * 12),
        "rows below zero": reports(acked=(-1,) * 12),
        "a skipped row beyond numbers": reports(
            skipped=(m.SkippedRow(sample_id=1 << 63, key="", shard="", reason=""),), acked_skipped=1
        ),
        "a reason of 10 MB": reports(skipped=(m.SkippedRow(sample_id=1, key="", shard="", reason=huge),)),
        "a mark below zero": replace(report, marks=(replace(books, step=-1),)),
        "waiting for 10 MB": replace(report, waiting_for=huge),
        "no address": m.RegisterWorker(id="w2", incarnation="1", address=""),
        "a fingerprint of 10 MB": m.RegisterWorker(id="w2", incarnation="1", address="a:1", fingerprint=huge),
        "a figure below zero": m.Heartbeat(id="w1", incarnation="1", cache_bytes=-1),
        "an unknown worker": m.DrainWorker(id="nobody"),
        "a name of 10 MB": m.FindDataset(name=huge),
        "an epoch of nobody": m.GetAudit(job="train", epoch=-1),
    }


def test_messages_that_make_no_sense_change_nothing(call, manifest, backend):
    """Typed errors of bounded length, the same records after as before, and the dispatcher leads on."""
    upload(call, manifest)
    worker(call)
    opened = call(opening(manifest), m.JobOpened)
    assert call(asking(opened), m.Grants).grants
    before = dict(backend.records)
    for what, message in forged(manifest, opened).items():
        with pytest.raises(FeedlineError) as caught:
            call(message, m.Document)
        assert "malformed" not in str(caught.value) and "failed on" not in str(caught.value), what
        assert len(str(caught.value)) < 4000, what
    assert backend.terms == 1
    assert backend.records == before
    assert call(asking(opened), m.Grants).grants
    assert [w["id"] for w in json.loads(call(m.GetStatus(), m.Document).json)["workers"]] == ["w1"]


def test_what_an_ask_looks_up_is_in_memory_before_it_comes_to_the_driver(call, manifest, dispatcher):
    upload(call, manifest)
    worker(call)
    opened = call(opening(manifest), m.JobOpened)
    threads = []
    files = dispatcher.driver._library
    parse, files.manifest = (
        files.manifest,
        lambda digest: threads.append(threading.current_thread().name) or parse(digest),
    )
    try:
        files._parsed.clear()
        files._shards.clear()
        assert call(asking(opened, shards=tuple(m.ShardAsk(source=0, shard=n) for n in range(3))), m.Grants).grants
    finally:
        files.manifest = parse
    assert threads and "dispatcher-driver" not in threads


def test_the_audit_names_skipped_rows(call, manifest):
    upload(call, manifest)
    settings = msgspec.structs.replace(opening(manifest).settings, on_error="skip", lanes=1, shuffle=None)
    opened = call(opening(manifest, settings=settings), m.JobOpened)
    assert json.loads(call(m.GetAudit(job="train"), m.Document).json)["skipped_rows"] == []
    row = m.SkippedRow(sample_id=1, key="k1", shard="/data/photos-0.tar", reason="truncated")
    books = m.EpochProgress(
        epoch=0, step=1, acked_step=1, handed=(2,), acked=(2,), skipped=(row,), acked_skipped=1,
        source=m.IdSum(count=1), handed_out=m.IdSum(count=1),
    )  # fmt: skip
    report = m.Report(job="train", generation=opened.generation, rank=0, holder="u0", epochs=(books,))
    call(report, m.Reported)
    audit = json.loads(call(m.GetAudit(job="train"), m.Document).json)
    assert audit["skipped"] == 1
    assert audit["skipped_rows"] == [
        {"sample_id": 1, "key": "k1", "shard": "/data/photos-0.tar", "reason": "truncated"}
    ]
