"""Messages that decode but make no sense are refused whole, with the value and the limit."""

import math

import msgspec
import pytest
from core_bench import Bench, Rank

from dispatcher import events, limits, records
from dispatcher.store import MAX_BYTES
from manifests.errors import ConfigError, FeedlineError, ProtocolError
from manifests.wire import messages as m

HUGE = "x" * (10 << 20)
FAIL = m.ReadFailure(worker="w1", source=0, shard=0, code="shard-missing")
replace = msgspec.structs.replace


@pytest.fixture
def bench():
    found = Bench()
    found.worker("w1")
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": -1},
        {"epoch": 1 << 63},
        {"have": -1},
        {"want": 1 << 64},
        {"place": -5},
        {"shards": range(600)},
        {"done": (m.ShardAsk(source=0, shard=0),) * 5000},
        {"avoid": (HUGE,)},
        {"avoid": ("w1",) * 5000},
        {"failures": (replace(FAIL, worker=HUGE),)},
        {"failures": (replace(FAIL, code=HUGE),)},
        {"failures": (replace(FAIL, message=HUGE),)},
        {"failures": (FAIL,) * 5000},
        {"speeds": (m.WorkerSpeed(worker="w1", bytes=-1, ms=1),)},
        {"speeds": (m.WorkerSpeed(worker="w1", bytes=1, ms=-1),)},
        {"speeds": (m.WorkerSpeed(worker=HUGE, bytes=1, ms=1),)},
        {"speeds": (m.WorkerSpeed(worker="w1", bytes=1, ms=1),) * 5000},
        {"shards": [5]},
        {"shards": [-1]},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_an_ask_that_makes_no_sense_changes_nothing(bench, changes):
    """Among it a failure that would count: it does not."""
    opened = bench.open()
    bench.ask(opened)
    before = dict(bench.stored)
    fields = {"failures": (FAIL,), **changes}
    with pytest.raises(FeedlineError) as caught:
        bench.ask(opened, **fields)
    assert len(str(caught.value)) < 500
    assert bench.stored == before and not bench.state.workers.get("w1").failures
    assert bench.ask(opened).grants


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"id": ""}, ConfigError),
        ({"address": ""}, ConfigError),
        ({"address": HUGE}, ProtocolError),
        ({"fingerprint": HUGE}, ProtocolError),
        ({"incarnation": HUGE}, ProtocolError),
        ({"pid": -1}, ProtocolError),
        ({"memory_bytes": 1 << 63}, ProtocolError),
        ({"capabilities": (HUGE,)}, ProtocolError),
        ({"capabilities": ("x",) * 5000}, ProtocolError),
    ],
)
def test_a_worker_that_makes_no_sense_is_not_registered(bench, changes, error):
    honest = m.RegisterWorker(id="w2", incarnation="i", address="h:1")
    with pytest.raises(error):
        bench.apply(events.WorkerRegistered, message=replace(honest, **changes))
    assert set(bench.state.workers.by_id) == {"w1"}


@pytest.mark.parametrize(
    "changes",
    [{"id": HUGE}, {"active_reads": -1}, {"bytes_served": 1 << 63}, {"stage_us": {HUGE: 1}}, {"stage_us": {"a": -1}}],
)
def test_a_heartbeat_that_makes_no_sense_is_no_sign_of_life(bench, changes):
    bench.at += 1
    honest = m.Heartbeat(id="w1", incarnation="w1-1")
    with pytest.raises(ProtocolError):
        bench.apply(events.WorkerHeartbeatReceived, message=replace(honest, **changes))
    assert bench.state.workers.get("w1").heard < bench.at


def test_an_open_that_makes_no_sense(bench):
    ask = m.OpenJob(
        job="train", rank=0, holder=m.Holder(uid="u0", host="box", pid=1), nonce="n", settings=bench.settings(lanes=12)
    )
    limits.check_open(ask)
    settings, start = ask.settings, m.StartPoint(kind="checkpoint", taken=(1,) * 12)
    source = settings.sources[0]
    lane = m.LaneGrants(rank=0)
    wrong = [
        replace(ask, nonce=HUGE),
        replace(ask, rank=-1),
        replace(ask, holder=m.Holder(uid=HUGE)),
        replace(ask, holder=m.Holder(uid="u", pid=-1)),
        replace(ask, dead=(HUGE,)),
        *[
            replace(ask, settings=replace(settings, **changes))
            for changes in (
                {"sources": (source,) * 65},
                {"sources": (replace(source, weight=math.nan),)},
                {"sources": (replace(source, weight=0.0),)},
                {"sources": (replace(source, name=HUGE),)},
                {"world_size": 1 << 40},
                {"world_size": -1},
                {"lanes": 1 << 40},
                {"batch_size": 1 << 62},
                {"epochs": -1},
                {"steps_per_epoch": 0},
                {"steps_per_epoch": -1},
                {"seed": -1},
                {"seed": 1 << 63},
                {"shuffle": m.Shuffle(buffer=-1)},
                {"shuffle": m.Shuffle(interleave=1 << 62)},
                {"shuffle": m.Shuffle(interleave=0)},
                {"max_bad": math.nan},
                {"max_bad": math.inf},
                {"max_bad": -1},
                {"pipeline": HUGE},
                {"tenant": HUGE},
            )
        ],
        *[
            replace(ask, start=replace(start, **changes))
            for changes in (
                {"epoch": -1},
                {"step": 1 << 63},
                {"taken": (1 << 63,)},
                {"taken": (-1,)},
                {"taken": (0,) * 70_000},
                {"first_epoch": -1},
                {"generation": 1 << 63},
                {"world_size": -1},
                {"job": HUGE},
                {"missing": (-1,)},
                {"ranges": bytes(2 << 20)},
                {"carried": bytes(2 << 20)},
                {"lanes": (replace(lane, place=-1),)},
                {"lanes": (replace(lane, pieces=bytes(2 << 20)),)},
            )
        ],
    ]
    for message in wrong:
        with pytest.raises(ProtocolError) as caught:
            limits.check_open(message)
        assert len(str(caught.value)) < 300


def test_a_report_that_makes_no_sense(bench):
    opened = bench.open()
    rank = Rank(bench, opened, 0)
    rank.hand()
    good = rank.progress()
    report = m.Report(job="train", generation=1, rank=0, holder="u0", epochs=(good,))
    limits.check_report(report)
    row = m.SkippedRow(sample_id=0, key="k", shard="s", reason="r")
    shard = m.ShardSum(source=0, shard=0, planned=1, handed_out=1)
    wrong = [
        replace(report, waiting_for=HUGE),
        replace(report, waiting_ms=-1),
        replace(report, epochs=(good,) * 300),
        replace(report, marks=(good,) * 300),
        replace(report, marks=(replace(good, step=-1),)),
        *[
            replace(report, epochs=(replace(good, **changes),))
            for changes in (
                {"epoch": 1 << 63},
                {"step": -1},
                {"handed": (1 << 63,) * 12},
                {"acked": (-1,) * 12},
                {"handed": (0,) * 70_000},
                {"source": m.IdSum(count=-1)},
                {"handed_out": m.IdSum(value=-1)},
                {"padded": -1},
                {"skipped": (replace(row, sample_id=1 << 63),)},
                {"skipped": (replace(row, sample_id=-1),)},
                {"skipped": (replace(row, reason=HUGE),)},
                {"skipped": (row,) * 200_000},
                {"unbalanced": (shard,) * 50_000},
                {"unbalanced": (replace(shard, planned=-1),)},
                {"unbalanced": (replace(shard, lost=(1 << 40,) * 200_000),)},
                {"unbalanced": (replace(shard, repeated=(1 << 63,)),)},
                {"quarantined": bytes(2 << 20)},
                {"before": bytes(2 << 20)},
                {"lane": m.LaneGrants(rank=0, place=-1)},
                {"carried": (m.CarriedSum(epoch=-1),)},
            )
        ],
    ]
    for message in wrong:
        with pytest.raises(ProtocolError) as caught:
            limits.check_report(message)
        assert len(str(caught.value)) < 300


def test_the_largest_messages_that_are_taken_fit_a_record(bench):
    """What is kept of a report and of an open at their limits fits one commit of the store."""
    texts = "x" * 2000
    rows = tuple(m.SkippedRow(sample_id=n, key=texts, shard=texts, reason=texts) for n in range(100))
    progress = m.EpochProgress(epoch=0, skipped=rows + rows[:1] * 55_000)
    limits.check_report(m.Report(job="j", generation=1, rank=0, holder="u", epochs=(progress,)))
    record = records.RankEpochRecord(
        job="j", generation=1, epoch=0, rank=0, progress=replace(progress, skipped=rows), skipped_ids=bytes(8 * 55_100)
    )
    assert limits.MOST_KEPT - 8000 < len(records.encode(record)) < MAX_BYTES
    start = m.StartPoint(kind="checkpoint", taken=(1 << 40,) * limits.MOST_LANES, ranges=bytes(450_000))
    ask = m.OpenJob(job="j", rank=0, holder=m.Holder(uid="u"), nonce="n", settings=bench.settings(), start=start)
    limits.check_open(ask)
    kept = records.GenerationRecord(
        job="j", number=1, settings=ask.settings, start=start, fingerprint="f" * limits.NAME
    )
    assert limits.MOST_KEPT - 10_000 < len(records.encode(kept)) < MAX_BYTES
