"""One message of every type with every field set, so that a change of the format shows in its bytes.

``python tests/wire_samples.py`` prints the golden bytes as tests/unit/test_wire_golden.py holds them.
"""

from __future__ import annotations

import msgspec

from manifests.schema import Field
from manifests.wire import codec
from manifests.wire import messages as m

SETTINGS = m.JobSettings(
    sources=(m.Source(digest="sha256:d", name="photos", version="3", weight=0.5),),
    spec="sha256:s",
    pipeline="sha256:p",
    seed=2**63 - 1,
    order="dynamic",
    shuffle=m.Shuffle(buffer=64, interleave=2, within_shard=True),
    lanes=24,
    batch_size=32,
    world_size=8,
    tail="drop",
    epochs=None,
    steps_per_epoch=100,
    on_error="skip",
    max_bad=5,
    ack="manual",
    tenant="team",
    elastic=True,
    audit=True,
)
LANE = m.LaneGrants(rank=1, number=3, dropped=4, place=6, pieces=b"\x02")
START = m.StartPoint(
    kind="checkpoint",
    epoch=2,
    step=7,
    taken=(3, 2),
    sub=(1, 0),
    first_epoch=1,
    generation=4,
    world_size=2,
    skip=True,
    job="j",
    ranges=b"\x00\x05",
    lanes=(LANE,),
    carried=b"\x01",
    missing=(1,),
)
FLOOR = m.Floor(epoch=2, position=40, step=3)
HOLDER = m.Holder(uid="u", host="h", pid=12)
SUM = m.IdSum(count=3, value=2**64 - 1)
PROGRESS = m.EpochProgress(
    epoch=2,
    step=7,
    acked_step=6,
    handed=(4, 3),
    acked=(3, 3),
    handed_sub=(1, 0),
    acked_sub=(0, 1),
    source=SUM,
    handed_out=SUM,
    acknowledged=m.IdSum(count=2, value=9),
    by_source=(SUM,),
    skipped=(m.SkippedRow(sample_id=5, key="k", shard="s.tar", reason="r"),),
    acked_skipped=1,
    padded=2,
    unbalanced=(m.ShardSum(source=0, shard=1, planned=3, handed_out=3, lost=(4,), repeated=(5,)),),
    state="abandoned",
    quarantined=b"\x01\x02",
    acked_quarantined=b"\x01\x01",
    carried=(m.CarriedSum(epoch=1, handed_out=SUM, acknowledged=SUM),),
    lane=LANE,
    before=b"\x00\x04",
    floor_step=2,
)
GRANT = m.Grant(
    cause="c",
    job="j",
    tenant="team",
    generation=4,
    rank=1,
    epoch=2,
    seed=7,
    source=1,
    manifest="sha256:d",
    spec="sha256:s",
    shard=9,
    uri="/data/9.tar",
    format="tar",
    rows=100,
    bytes=12345,
    content_id="blake3:aa",
    first_id=900,
    first_row=10,
    last_row=90,
    workers=("w1", "w2"),
    expires_ms=1_700_000_000_000,
)
KEY_ID, KEY = "k1", bytes(range(32))

SAMPLES: tuple[m.Message, ...] = (
    m.FindDataset(cause="c", name="photos", version="3"),
    m.DatasetFound(cause="c", name="photos", version="3", digest="sha256:d", rows=10, shards=2),
    m.HaveManifest(cause="c", digest="sha256:d", locations="sha256:l"),
    m.ManifestKnown(cause="c", known=True),
    m.RegisterDataset(cause="c", name="photos", version="3", digest="sha256:d"),
    m.DatasetRegistered(cause="c", name="photos", version="3", digest="sha256:d", new=False),
    m.PutBlob(cause="c", digest="sha256:b", data=b"\x00\xff"),
    m.GetBlob(cause="c", digest="sha256:b"),
    m.Blob(cause="c", digest="sha256:b", data=b"\x00\xff"),
    m.OpenJob(cause="c", job="j", rank=1, holder=HOLDER, nonce="n", settings=SETTINGS, start=START, dead=("u0",)),
    m.JobOpened(
        cause="c", job="j", generation=4, settings=SETTINGS, start=START, lease_ms=10_000, absent=(0,), warning="w"
    ),
    m.AskGrants(
        cause="c",
        job="j",
        generation=4,
        rank=1,
        holder="u",
        epoch=2,
        shards=(m.ShardAsk(source=0, shard=9),),
        avoid=("w1",),
        failures=(m.ReadFailure(worker="w1", source=0, shard=9, code="silent", message="5 s"),),
        done=(m.ShardAsk(source=0, shard=8),),
        floor=11,
        have=5,
        want=90,
        place=4,
        speeds=(m.WorkerSpeed(worker="w1", bytes=1000, ms=3),),
    ),
    m.Grants(
        cause="c",
        grants=(
            m.GrantInfo(
                source=0, shard=9, workers=(m.WorkerRef(id="w1", address="h:1"),), expires_ms=5, signed=b"\x01"
            ),
        ),
        now_ms=4,
        waiting="no worker",
        waiting_code="no-worker",
        quarantined=(
            m.QuarantinedShard(source=0, shard=8, uri="/data/8.tar", code="shard-missing", reason="r", workers=("w1",)),
        ),
        lane=LANE,
        final=True,
        floor=FLOOR,
        carried=b"\x01",
    ),
    m.Report(
        cause="c",
        job="j",
        generation=4,
        rank=1,
        holder="u",
        epochs=(PROGRESS,),
        state="waiting",
        waiting_for="rows",
        waiting_ms=250,
        leaving=True,
        marks=(m.EpochProgress(epoch=2, step=7, handed=(4, 3)),),
    ),
    m.Reported(
        cause="c",
        now_ms=4,
        slowest_epoch=1,
        slowest_rank=3,
        silent=(m.SilentRank(rank=2, silent_ms=12000, host="h", pid=12),),
        floors=(FLOOR,),
    ),
    GRANT,
    m.ReadTicket(cause="c", grants=(b"\x01", b"\x02"), which=b"\x00\x00\x00\x00", rows=b"\x05" + b"\x00" * 7),
    m.ReadPart(
        cause="c",
        done=3,
        bad=(m.BadRow(position=2, sample_id=5, key="k", shard="s.tar", reason="r"),),
        stage_us={"decode": 12},
        hot=2,
    ),
    m.RegisterWorker(
        cause="c",
        id="w1",
        incarnation="i",
        address="h:1",
        host="h",
        pid=12,
        memory_bytes=1 << 30,
        capabilities=("format:tar",),
        fingerprint="cpu",
        draining=True,
    ),
    m.Heartbeat(
        cause="c",
        id="w1",
        incarnation="i",
        draining=True,
        active_reads=1,
        cache_bytes=2,
        queue_bytes=3,
        rows_served=4,
        bytes_served=5,
        stage_us={"decode": 12},
        capabilities=("format:tar",),
        cached=b"\x01",
    ),
    m.WorkerWelcome(cause="c", known=True, now_ms=4, lease_ms=10_000, keys={"k1": b"\x01"}, drain=True),
    m.LeaveWorker(cause="c", id="w1", incarnation="i"),
    m.DrainWorker(cause="c", id="w1"),
    m.Done(cause="c"),
    m.GetStatus(cause="c"),
    m.GetAudit(cause="c", job="j", epoch=2),
    m.Document(cause="c", json=b"{}"),
    m.Hello(cause="c"),
    m.HelloReply(cause="c", role="worker", id="w1", version="0.1", leader="h:1", term=3),
)

SPEC = m.JobSpec(
    fields=((Field(name="x", kind="tensor", dtype="uint8", shape=(2, 3)), Field(name="y", kind="ragged", dtype="float32", ndim=1, nullable=True)),),
    labels=({"label": {"cat": 0}},),
    pipeline=b"\x01",
)  # fmt: skip


def tag(message: msgspec.Struct) -> str:
    return str(message.__struct_config__.tag)


if __name__ == "__main__":
    for sample in SAMPLES:
        print(f'    "{tag(sample)}": "{codec.encode(sample).hex()}",')
    print(f'SPEC = "{codec.encode(SPEC).hex()}"')
    print(f'SIGNED = "{codec.sign(GRANT, KEY_ID, KEY).hex()}"')
