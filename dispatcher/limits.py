"""What no message may hold, whatever the state: numbers that make no sense, texts and lists that are too long. Pure.

A message that decodes may still say anything. What is refused here is refused whole, before any of it is taken in, with
a ``ProtocolError`` that names the value and the limit. The limits are far above what honest peers send, and low enough
that what is kept of any message fits a record of the store.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sized

import msgspec

from manifests.errors import ConfigError, ProtocolError
from manifests.wire import codec
from manifests.wire import messages as m

from .books import KEPT_SKIPPED

#: largest count of rows, bytes, steps, epochs or ms
MOST = 1 << 62
#: characters of a name, an address, an id
NAME = 512
#: characters of a text for people
TEXT = 4096
#: shards in one ask
MOST_SHARDS = 512
#: entries of the other lists of an ask
MOST_ENTRIES = 4096
#: workers known at once that a client may speak of
MOST_WORKERS = 4096
#: ranks of a job
MOST_RANKS = 1 << 16
#: lanes of a job; a state has one count for each
MOST_LANES = 1 << 16
#: datasets of a job
MOST_SOURCES = 64
#: rows of a window, shards interleaved, rows of a batch
MOST_ROWS = 1 << 40
#: bytes of what one message gives to be kept in one record: settings and start point, or books of an epoch
MOST_KEPT = 1 << 20
#: epochs and marks in one report
MOST_EPOCHS = 256


def check(message: m.Request) -> None:
    """Raise for a message that makes no sense to any dispatcher. Asks and what workers say are checked in the core."""
    values = (getattr(message, name) for name in message.__struct_fields__)
    _texts(f"message {type(message).__name__}", (value for value in values if isinstance(value, str)), TEXT)
    if isinstance(message, m.OpenJob):
        check_open(message)
    elif isinstance(message, m.Report):
        check_report(message)


def check_ask(ask: m.AskGrants) -> None:
    """Raise ``ProtocolError`` for an ask that makes no sense."""
    _count(ask.shards, "shards asked for at once", MOST_SHARDS)
    _count(ask.done, "shards given back at once", MOST_ENTRIES)
    _count(ask.failures, "failures told at once", MOST_ENTRIES)
    _count(ask.avoid, "workers to avoid", MOST_WORKERS)
    _count(ask.speeds, "speeds told at once", MOST_WORKERS)
    _numbers("ask for grants", (ask.epoch, ask.have, ask.want, ask.place))
    for failure in ask.failures:
        _texts("a failure", (failure.worker, failure.code), NAME)
        _texts("a failure", (failure.message,), TEXT)
    _texts("a worker to avoid", ask.avoid, NAME)
    for speed in ask.speeds:
        _texts("a speed", (speed.worker,), NAME)
        _numbers("a speed", (speed.bytes, speed.ms))


def check_worker(message: m.RegisterWorker) -> None:
    """Raise ``ProtocolError`` for a registration that makes no sense, ``ConfigError`` for one without id or address."""
    if not message.id or not message.address:
        raise ConfigError(
            "a worker must have an id and an address", cause=f"got {message.id[:NAME]!r}, {message.address[:NAME]!r}"
        )
    texts = (message.id, message.incarnation, message.address, message.host, message.fingerprint)
    _texts("a worker", texts, NAME)
    _numbers("a worker", (message.pid, message.memory_bytes))
    _capabilities(message.capabilities)


def check_beat(beat: m.Heartbeat) -> None:
    """The same for a heartbeat."""
    _texts("a heartbeat", (beat.id, beat.incarnation), NAME)
    figures = (beat.active_reads, beat.cache_bytes, beat.queue_bytes, beat.rows_served, beat.bytes_served)
    _numbers("a heartbeat", figures)
    _count(beat.stage_us, "stages", MOST_ENTRIES)
    _texts("a stage", beat.stage_us, NAME)
    _numbers("a stage", beat.stage_us.values())
    _capabilities(beat.capabilities)


def check_open(ask: m.OpenJob) -> None:
    """The same for an open: the settings, and the numbers of the start point."""
    settings = ask.settings
    texts = (ask.nonce, ask.holder.uid, ask.holder.host, settings.spec, settings.pipeline, settings.tenant)
    _texts("an open", texts, NAME)
    _numbers("an open", (ask.rank, ask.holder.pid))
    _count(ask.dead, "dead holders", MOST_RANKS)
    _texts("a dead holder", ask.dead, NAME)
    _count(settings.sources, "datasets", MOST_SOURCES)
    for source in settings.sources:
        _texts("a dataset", (source.digest, source.name, source.version), NAME)
        if not (math.isfinite(source.weight) and source.weight > 0):
            raise ProtocolError(f"a dataset of weight {source.weight}", cause="weights are above zero")
    _numbers("world_size", (settings.world_size,), MOST_RANKS)
    _numbers("lanes", (settings.lanes or 0,), MOST_LANES)
    _numbers("batch_size", (settings.batch_size,), MOST_ROWS)
    _numbers("epochs", (settings.epochs or 0, settings.steps_per_epoch or 0))
    if settings.steps_per_epoch == 0:
        raise ProtocolError("steps_per_epoch 0", cause="it is above zero, or not given")
    if settings.seed is not None:
        _numbers("seed", (settings.seed,), (1 << 63) - 1)
    if settings.shuffle is not None:
        _numbers("shuffle", (settings.shuffle.buffer, settings.shuffle.interleave), MOST_ROWS)
        if settings.shuffle.interleave < 1:
            raise ProtocolError("shuffle with interleave 0", cause="it is above zero")
    if not (math.isfinite(settings.max_bad) and 0 <= settings.max_bad <= MOST):
        raise ProtocolError(f"max_bad {settings.max_bad}", cause="it is a count of rows, or a share of them")
    _start(ask.start)
    size = len(codec.encode(settings)) + len(codec.encode(ask.start))
    if size > MOST_KEPT:
        raise ProtocolError(f"settings and start point of {size} bytes", cause=f"the limit is {MOST_KEPT}")


def _start(start: m.StartPoint) -> None:
    what = "a start point"
    _texts(what, (start.job,), NAME)
    _count(start.taken, "lanes in a start point", MOST_LANES)
    _count(start.sub, "lanes in a start point", MOST_LANES)
    _count(start.lanes, "lanes in a start point", MOST_RANKS)
    _count(start.missing, "ranks in a start point", MOST_RANKS)
    numbers = (start.epoch, start.step, start.first_epoch, start.generation, start.world_size)
    for found in (numbers, start.taken, start.sub, start.missing):
        _numbers(what, found)
    for lane in start.lanes:
        _lane(what, lane)


def check_report(report: m.Report) -> None:
    """The same for a report."""
    _texts("a report", (report.waiting_for,), TEXT)
    _numbers("a report", (report.waiting_ms,))
    _count(report.epochs, "epochs in one report", MOST_EPOCHS)
    _count(report.marks, "marks in one report", MOST_EPOCHS)
    for progress in (*report.epochs, *report.marks):
        _progress(progress)


def _progress(progress: m.EpochProgress) -> None:
    what = "books of an epoch"
    numbers = (
        progress.epoch, progress.step, progress.acked_step, progress.acked_skipped, progress.padded, progress.floor_step,
    )  # fmt: skip
    for found in (numbers, progress.handed, progress.acked, progress.handed_sub, progress.acked_sub):
        _numbers(what, found)
    _count(progress.handed, "lanes", MOST_LANES)
    _count(progress.acked, "lanes", MOST_LANES)
    sums = [progress.source, progress.handed_out, progress.acknowledged, *progress.by_source]
    for carried in progress.carried:
        _numbers(what, (carried.epoch,))
        sums += [carried.handed_out, carried.acknowledged]
    _numbers(what, [found.count for found in sums])
    _numbers(what, [found.value for found in sums], (1 << 64) - 1)
    _numbers(what, [row.sample_id for row in progress.skipped])
    for shard in progress.unbalanced:
        _numbers(what, (shard.source, shard.shard, shard.planned, shard.handed_out, *shard.lost, *shard.repeated))
    if progress.lane is not None:
        _lane(what, progress.lane)
    kept = msgspec.structs.replace(progress, skipped=progress.skipped[:KEPT_SKIPPED])
    size = len(codec.encode(kept)) + 8 * len(progress.skipped)
    if size > MOST_KEPT:
        raise ProtocolError(f"{what} of {size} bytes", cause=f"the limit is {MOST_KEPT}")


def _lane(what: str, lane: m.LaneGrants) -> None:
    _numbers(what, (lane.rank, lane.number, lane.dropped, lane.place))


def _capabilities(found: tuple[str, ...]) -> None:
    _count(found, "capabilities", MOST_ENTRIES)
    _texts("a capability", found, NAME)


def _count(found: Sized, what: str, most: int) -> None:
    if len(found) > most:
        raise ProtocolError(f"{len(found)} {what}", cause=f"the limit is {most}")


def _numbers(what: str, found: Iterable[int], most: int = MOST) -> None:
    for number in found:
        if not 0 <= number <= most:
            raise ProtocolError(f"{what} with the number {number}", cause=f"numbers are 0 to {most}")


def _texts(what: str, found: Iterable[str], most: int) -> None:
    for text in found:
        if len(text) > most:
            raise ProtocolError(f"{what} with a text of {len(text)} characters", cause=f"the limit is {most}")
