"""A real dispatcher and a real worker under messages, tickets, descriptors and uploads that no honest peer sends.

Each is answered with a typed error whose ``extra_info`` is JSON with a known code, or taken; what is refused has changed
neither the store's records nor the audit; in the end both processes are the same, the same one leads in the same term,
and the honest job reads on.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest
from cluster import TestCluster
from stored_data import write_tar
from wire_mutations import MAGIC, broken, flipped, structural
from wire_samples import SAMPLES, tag

import manifests
from dispatcher.etcd_store import EtcdStore
from manifests import errors
from manifests.identity import digest
from manifests.wire import codec
from manifests.wire import messages as m
from manifests.wire.connection import parse_address
from manifests.wire.flight import ACTION, Connection

#: forged messages sent per kind of request
PER_KIND = 40
ROWS, SHARD_ROWS = 12, 4


class Scene:
    """One cluster, one honest job of one rank in it, and eyes on everything that must not change."""

    def __init__(self, cluster: TestCluster, folder: Path) -> None:
        self.cluster = cluster
        for shard in range(ROWS // SHARD_ROWS):
            rows = [(f"{shard}-{row}.cls", str(row).encode()) for row in range(SHARD_ROWS)]
            write_tar(folder / f"s{shard}.tar", rows)
        self.manifest = manifests.build(str(folder), name="fuzz", version="1")
        cluster.register(self.manifest)
        self.connection = Connection(parse_address(cluster.address))
        self.raw = fl.connect(cluster.address)
        self.worker = fl.connect(parse_address(str(cluster.workers[0].address)).uri)
        self.store = EtcdStore((cluster.local.etcd.address,))
        spec = codec.encode(m.JobSpec(fields=(self.manifest.fields,), labels=(dict(self.manifest.labels),)))
        self.call(m.PutBlob(digest=digest(spec), data=spec), m.Done)
        self.settings = m.JobSettings(
            sources=(m.Source(digest=self.manifest.digest, name="fuzz", version="1"),), spec=digest(spec), pipeline="",
            batch_size=2, seed=5, lanes=12, shuffle=None,
        )  # fmt: skip
        self.holder = m.Holder(uid="honest", host="box", pid=1)
        opening = m.OpenJob(job="fuzz", rank=0, holder=self.holder, nonce="first", settings=self.settings)
        self.opened = self.call(opening, m.JobOpened)
        cluster.wait_workers(1)
        self.books = m.EpochProgress(epoch=0, step=1, acked_step=1, handed=(1,) * 12, acked=(1,) + (0,) * 11)
        self.report()
        self.grant = self.ask()

    def close(self) -> None:
        self.connection.close()
        self.raw.close()
        self.worker.close()
        self.store.close()

    def call(self, message: m.Message, kind: Any) -> Any:
        return self.connection.call(message, kind, timeout=10)

    def report(self) -> m.Reported:
        """The honest rank lives and says the same again."""
        return self.call(
            m.Report(job="fuzz", generation=self.opened.generation, rank=0, holder="honest", epochs=(self.books,)),
            m.Reported,
        )

    def ask(self) -> m.GrantInfo:
        found = self.call(
            m.AskGrants(
                job="fuzz", generation=self.opened.generation, rank=0, holder="honest", epoch=0,
                shards=(m.ShardAsk(source=0, shard=1),),
            ),
            m.Grants,
        )  # fmt: skip
        assert found.grants, found.waiting
        return found.grants[0]

    def records(self) -> dict[str, bytes]:
        return self.store.load()[0]

    def audit(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.call(m.GetAudit(job="fuzz", epoch=0), m.Document).json)
        found.pop("state")  # whether the honest rank lives now
        return found

    def hello(self) -> m.HelloReply:
        return self.call(m.Hello(), m.HelloReply)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with TestCluster(workers=1, lease="5s") as cluster:
        found = Scene(cluster, tmp_path_factory.mktemp("fuzz"))
        try:
            yield found
        finally:
            found.close()


@pytest.fixture(autouse=True)
def unharmed(scene: Scene) -> Iterator[None]:
    """Around each test: the same processes, the same leader in the same term, and the honest rank goes on."""
    before = scene.hello()
    pids = {child.name: child.pid for child in scene.cluster.local.children}
    scene.report()
    yield
    assert scene.hello() == before
    assert {child.name: child.pid for child in scene.cluster.local.children} == pids
    assert all(child.poll() is None for child in scene.cluster.local.children)
    assert scene.call(m.HaveManifest(digest=scene.manifest.digest), m.ManifestKnown).known
    scene.report()
    assert scene.ask().shard == 1
    assert read_ids(scene, scene.ask().signed) == [4, 5, 6, 7]


def read_ids(scene: Scene, *signed: bytes, **fields: Any) -> list[int]:
    ticket = codec.encode(m.ReadTicket(grants=signed, **fields))
    table = scene.worker.do_get(fl.Ticket(ticket), fl.FlightCallOptions(timeout=10)).read_all()
    found: list[int] = table["__id__"].to_pylist()
    return found


def refused(call: Callable[[], Any]) -> str:
    """The code of the error that ``call`` gets, "" when there is none. Anything untyped fails."""
    try:
        call()
    except (fl.FlightError, pa.ArrowException) as error:
        info = getattr(error, "extra_info", b"")
        assert info, f"no extra_info: {type(error).__name__}: {error}"
        body = json.loads(info)
        assert set(body) == {"code", "message", "detail"} and body["message"] and isinstance(body["detail"], dict)
        assert body["code"] != "internal", body
        assert body["code"] in errors.CODES, body
        return str(body["code"])
    return ""


def act(client: fl.FlightClient, data: bytes, kind: str = ACTION) -> list[Any]:
    return list(client.do_action(fl.Action(kind, data), fl.FlightCallOptions(timeout=10)))


def honest_requests(scene: Scene) -> dict[str, m.Message]:
    """Requests for the running job that would be taken. Those that change records by right are forged so that they
    may not: they come from somebody who does not hold the rank."""
    job = {"job": "fuzz", "generation": scene.opened.generation, "rank": 0, "holder": "stranger"}
    shard = m.ShardAsk(source=0, shard=0)
    failure = m.ReadFailure(worker=scene.cluster.workers[0].id, source=0, shard=0, code="unreachable", message="no")
    stranger = m.Holder(uid="stranger", host="elsewhere", pid=2)
    return {
        "find-dataset": m.FindDataset(name="fuzz", version="1"),
        "have-manifest": m.HaveManifest(digest=scene.manifest.digest),
        "register-dataset": m.RegisterDataset(name="fuzz", version="1", digest="sha256:" + "0" * 64),
        "put-blob": m.PutBlob(digest=scene.settings.spec, data=b"other"),
        "get-blob": m.GetBlob(digest=scene.settings.spec),
        "open-job": m.OpenJob(job="fuzz", rank=0, holder=stranger, nonce="n", settings=scene.settings),
        "ask-grants": m.AskGrants(epoch=0, shards=(shard,), failures=(failure,), done=(shard,), **job),
        "report": m.Report(epochs=(scene.books,), leaving=True, **job),
        "heartbeat": m.Heartbeat(id="nobody", incarnation="x"),
        "leave-worker": m.LeaveWorker(id=scene.cluster.workers[0].id, incarnation="x"),
        "drain-worker": m.DrainWorker(id="nobody"),
        "get-status": m.GetStatus(),
        "get-audit": m.GetAudit(job="fuzz", epoch=0),
        "hello": m.Hello(),
    }


#: parts whose replacement makes another request of it that may be met by right
FREE = {
    "open-job": ("job", "dead"),
    "ask-grants": ("holder",),
    "report": ("holder",),
    "register-dataset": ("name", "version", "digest"),
    "put-blob": ("data", "digest"),
    "leave-worker": ("incarnation", "id"),
    "drain-worker": ("id",),
}


@pytest.mark.parametrize("kind", ["find-dataset", "have-manifest", "register-dataset", "put-blob", "get-blob", "open-job",
    "ask-grants", "report", "heartbeat", "leave-worker", "drain-worker", "get-status", "get-audit", "hello"])  # fmt: skip
def test_forged_requests_change_nothing(scene: Scene, kind: str) -> None:
    """Every request with one part replaced, from one who does not hold the rank: records and audit stay as they are."""
    draw = random.Random(kind)
    message = honest_requests(scene)[kind]
    free = FREE.get(kind, ())
    found = [
        (what, data) for what, data in structural(message) if what.split(" ")[1].split(".")[0] not in free and len(data) < 1 << 20
    ]  # fmt: skip
    found = [found[0], *draw.sample(found[1:], min(PER_KIND, len(found) - 1))]
    records, books = scene.records(), scene.audit()
    codes: set[str] = set()
    for what, data in found:
        codes.add(code := refused(lambda data=data: act(scene.raw, data)))
        if code or kind in ("open-job", "ask-grants", "report"):
            assert scene.records() == records, what
        if kind in ("open-job", "ask-grants", "report"):
            assert code, f"{what} was taken"
    assert scene.audit() == books and scene.records() == records
    if kind in ("ask-grants", "report"):
        assert "fenced" in codes
    if kind == "open-job":
        assert "job-busy" in codes


def test_broken_bytes_as_messages(scene: Scene) -> None:
    """Bits flipped, cut, of other versions, and replies where requests belong; to dispatcher and worker."""
    draw = random.Random(3)
    records, books = scene.records(), scene.audit()
    for client, kinds in ((scene.raw, SAMPLES), (scene.worker, SAMPLES[::3])):
        for sample in kinds:
            for _what, data in broken(codec.encode(sample), draw, 4):
                if (message := decodes(data)) is None or not isinstance(message, m.RegisterWorker | m.OpenJob):
                    refused(lambda data=data, client=client: act(client, data))
            if not isinstance(sample, m.Request):
                assert refused(lambda: act(client, codec.encode(sample))) == "protocol-error", tag(sample)  # noqa: B023
    assert scene.audit() == books and scene.records() == records


def decodes(data: bytes) -> m.Message | None:
    try:
        found: m.Message = codec.decode(data, m.Request)
        return found
    except errors.ProtocolError:
        return None


@pytest.mark.parametrize("body", [b"", b"F", MAGIC, MAGIC + b"\xc1", b"FL\x02\x80", b"\x00" * 4096, bytes(17 << 20)],
    ids=["empty", "one-byte", "head-only", "never-used-byte", "next-version", "zeros", "17-MiB"])  # fmt: skip
def test_bodies_that_are_no_messages(scene: Scene, body: bytes) -> None:
    for client in (scene.raw, scene.worker):
        assert refused(lambda client=client: act(client, body)) == "protocol-error"


def test_other_actions_and_calls_are_refused(scene: Scene) -> None:
    """Unknown actions, and the Flight calls that nobody here serves."""
    for client in (scene.raw, scene.worker):
        for kind in ("", "Feedline", "shutdown", "x" * 5000):
            assert (
                refused(lambda client=client, kind=kind: act(client, codec.encode(m.Hello()), kind)) == "protocol-error"
            )
        options = fl.FlightCallOptions(timeout=5)
        with pytest.raises((fl.FlightError, pa.ArrowException)):
            client.get_schema(fl.FlightDescriptor.for_path("fuzz"), options)
        with pytest.raises((fl.FlightError, pa.ArrowException)):
            writer, reader = client.do_exchange(fl.FlightDescriptor.for_path("fuzz"), options)
            with writer:
                reader.read_chunk()


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ((), "config-error"),
        (("nobody",), "unknown-dataset"),
        (("fuzz", "9"), "unknown-dataset"),
        (("fuzz", "1", "-1", "5"), "config-error"),
        (("fuzz", "1", "0", "0"), "config-error"),
        (("fuzz", "1", "0", "10001"), "config-error"),
        (("fuzz", "1", "x"), "config-error"),
        (("fuzz", "1", "0", "1", "more"), "config-error"),
        (("fuzz", "1", "9" * 5000), "config-error"),
        (("fuzz", "1", "3", "1"), "config-error"),
        (("../../etc",), "unknown-dataset"),
    ],
)
def test_descriptors(scene: Scene, path: tuple[Any, ...], code: str) -> None:
    found = refused(lambda: scene.raw.get_flight_info(fl.FlightDescriptor.for_path(*path)))
    assert found == code if code else found, (path, found)
    assert refused(lambda: scene.raw.get_flight_info(fl.FlightDescriptor.for_command(b"\x00\xff")))
    assert refused(lambda: scene.worker.get_flight_info(fl.FlightDescriptor.for_path(*path)))


BLOB = pa.schema([pa.field("data", pa.large_binary())])


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"data": pa.array([b"no manifest"], pa.large_binary())}),
        pa.table({"data": pa.array([b""], pa.large_binary())}),
        pa.table({"data": pa.array([], pa.large_binary())}),
        pa.table({"data": pa.array([None], pa.large_binary())}),
        pa.table({"data": pa.array([1, 2, 3])}),
        pa.table({"data": pa.array([[b"a"], [b"b"]])}),
        pa.table({"data": pa.array(["text"])}),
        pa.table({}),
    ],
    ids=["noise", "nothing", "no-rows", "null", "numbers", "lists", "text", "no-columns"],
)
@pytest.mark.parametrize("where", ["good", "other", "elsewhere", "up", "none"])
def test_uploads(scene: Scene, table: pa.Table, where: str) -> None:
    """Streams of other schemas and contents, to places that are there and that are not."""
    paths = {
        "good": ("manifest", scene.manifest.digest),
        "other": ("manifest", "sha256:" + "0" * 64),
        "elsewhere": ("blobs", scene.settings.spec),
        "up": ("manifest", "../../etc/passwd"),
        "none": (),
    }

    def upload(client: fl.FlightClient) -> None:
        options = fl.FlightCallOptions(timeout=10)
        writer, reader = client.do_put(fl.FlightDescriptor.for_path(*paths[where]), table.schema, options)
        try:
            writer.write_table(table)
            writer.done_writing()
            while reader.read() is not None:
                pass
        finally:
            writer.close()

    store = Path(scene.cluster.folder)
    files = {
        path.name: path.stat().st_size for path in store.rglob("*") if path.is_file() and "manifests" in path.parts
    }
    assert refused(lambda: upload(scene.raw))
    assert refused(lambda: upload(scene.worker))
    assert files == {p.name: p.stat().st_size for p in store.rglob("*") if p.is_file() and "manifests" in p.parts}


# -- tickets -------------------------------------------------------------------------------------------------------


def get(client: fl.FlightClient, ticket: bytes) -> Any:
    return client.do_get(fl.Ticket(ticket), fl.FlightCallOptions(timeout=10)).read_all()


def test_tickets_with_a_bit_flipped(scene: Scene) -> None:
    """400 bits spread over a ticket: refused, or the same rows."""
    ticket = codec.encode(m.ReadTicket(grants=(scene.grant.signed,)))
    whole = get(scene.worker, ticket)
    codes: dict[str, int] = {}
    for bit in random.Random(9).sample(range(8 * len(ticket)), 400):
        found: list[Any] = []
        code = refused(lambda bit=bit, found=found: found.append(get(scene.worker, flipped(ticket, bit))))
        codes[code] = codes.get(code, 0) + 1
        assert code or found[0].equals(whole)
    assert codes.get("access-denied", 0) > 100 and set(codes) <= {"", "access-denied", "protocol-error"}, codes


def test_grants_that_nobody_signed(scene: Scene) -> None:
    """Every part of a real grant replaced, under the real signature and under another key's."""
    signed: m.SignedGrant = codec.decode(scene.grant.signed, m.SignedGrant)
    grant: m.Grant = codec.decode(signed.payload, m.Grant)
    draw = random.Random(5)
    forged = [
        *draw.sample([data for _, data in structural(grant)], 60),
        codec.encode(msgspec.structs.replace(grant, uri="/etc/passwd")),
        codec.encode(msgspec.structs.replace(grant, expires_ms=2**62)),
        codec.encode(msgspec.structs.replace(grant, workers=("somebody",))),
    ]
    for payload in forged:
        for data in (
            codec.encode(msgspec.structs.replace(signed, payload=payload)),
            codec.encode(msgspec.structs.replace(signed, payload=payload, key="mine")),
            codec.encode(msgspec.structs.replace(signed, payload=payload, signature=b"")),
        ):
            if payload != signed.payload or data != scene.grant.signed:
                assert refused(lambda data=data: read_ids(scene, data)) in ("access-denied", "protocol-error")


@pytest.mark.parametrize(
    ("which", "rows", "code"),
    [
        ([0], [4], "access-denied"),
        ([0], [-1], "access-denied"),
        ([0], [2**62], "access-denied"),
        ([1], [0], "protocol-error"),
        ([2**32 - 1], [0], "protocol-error"),
        ([0, 0], [0], "protocol-error"),
        ([], [0], "protocol-error"),
    ],
)
def test_rows_outside_of_the_grant(scene: Scene, which: list[int], rows: list[int], code: str) -> None:
    fields = {"which": np.array(which, "<u4").tobytes(), "rows": np.array(rows, "<i8").tobytes()}
    assert refused(lambda: read_ids(scene, scene.grant.signed, **fields)) == code
    assert read_ids(scene, scene.grant.signed, which=b"\0" * 8, rows=np.array([3, 0], "<i8").tobytes()) == [7, 4]


def test_noise_as_tickets(scene: Scene) -> None:
    draw = random.Random(11)
    ticket = codec.encode(m.ReadTicket(grants=(scene.grant.signed,)))
    for noise in [b"", b"\0", MAGIC, b"manifest/", b"manifest/../../etc", *(d for _, d in broken(ticket, draw, 60))]:
        refused(lambda noise=noise: get(scene.worker, noise))
        assert refused(lambda noise=noise: get(scene.raw, noise))
    many = codec.encode(m.ReadTicket(grants=(scene.grant.signed,) * 2000))
    assert len(get(scene.worker, many)) == 2000 * SHARD_ROWS
    assert refused(lambda: get(scene.worker, codec.encode(m.ReadTicket(grants=())))) == "protocol-error"


def test_a_client_that_goes_away_in_the_middle(scene: Scene) -> None:
    """An upload and a read that are dropped, twenty times: no thread of the server stays behind with them."""
    for _ in range(20):
        client = fl.connect(scene.cluster.address)
        writer, _reader = client.do_put(fl.FlightDescriptor.for_path("manifest", "sha256:" + "1" * 64), BLOB)
        writer.write_table(pa.table({"data": pa.array([bytes(1 << 16)], pa.large_binary())}))
        client.close()
        del writer, _reader, client
    started = time.monotonic()
    assert scene.hello().role == "dispatcher"
    assert time.monotonic() - started < 5
