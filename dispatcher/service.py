"""What the dispatcher offers over Flight: turns messages into events, and looks things up beside the state.

Methods run on Flight's own threads. All that changes the state, or must be true of it, goes through the driver; reading
and writing files, decoding, and the arithmetic of an audit happen here, so that the driver's thread never waits for it.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import metadata
from typing import Any

import msgspec
import pyarrow as pa

from manifests import log
from manifests.errors import AccessDenied, ConfigError, FeedlineError, ProtocolError, UnknownDataset
from manifests.identity import digest as digest_of
from manifests.manifest import Manifest
from manifests.schema import arrow_schema
from manifests.wire import codec, flight
from manifests.wire import messages as m

from . import audit, events, limits, status
from .driver import Driver
from .files import Files
from .grants import MAX_AHEAD, MAX_ENDPOINTS
from .job import Job
from .records import DatasetRecord

_log = logging.getLogger("dispatcher.service")

#: skipped rows that an audit lists
LISTED = 1000
#: release of this program, for Hello
RELEASE = metadata.version("feedline")


class Service:
    """The handler of the dispatcher's Flight server."""

    def __init__(self, driver: Driver, files: Files) -> None:
        self._driver = driver
        self._files = files
        self._table: dict[type[m.Message], Callable[[Any], m.Message]] = {
            m.FindDataset: lambda ask: driver.submit(partial(events.DatasetFindRequested, message=ask)),
            m.HaveManifest: self._have_manifest,
            m.RegisterDataset: self._register,
            m.PutBlob: self._put_blob,
            m.GetBlob: self._get_blob,
            m.OpenJob: self._open,
            m.AskGrants: self._ask,
            m.Report: lambda report: driver.submit(partial(events.ProgressReported, message=report)),
            m.RegisterWorker: lambda ask: driver.submit(partial(events.WorkerRegistered, message=ask)),
            m.Heartbeat: lambda beat: driver.submit(partial(events.WorkerHeartbeatReceived, message=beat)),
            m.LeaveWorker: lambda ask: driver.submit(partial(events.WorkerLeft, message=ask)),
            m.DrainWorker: lambda ask: driver.submit(partial(events.DrainRequested, message=ask)),
            m.GetStatus: self._status,
            m.GetAudit: self._audit,
            m.Hello: self._hello,
        }

    def handle(self, message: m.Request) -> m.Message:
        """Answer one control message."""
        with log.cause(message.cause):
            answer = self._table.get(type(message))
            if answer is None:
                raise ProtocolError(f"the dispatcher does not answer {type(message).__name__}")
            try:
                limits.check(message)
                return answer(message)
            except FeedlineError as error:
                _log.debug("%s refused: %s", type(message).__name__, error)
                raise

    # -- datasets and blobs

    def _have_manifest(self, ask: m.HaveManifest) -> m.Message:
        self._driver.check_leading()
        return m.ManifestKnown(known=self._files.has_manifest(ask.digest, ask.locations))

    def _register(self, ask: m.RegisterDataset) -> m.Message:
        self._driver.check_leading()
        manifest = self._files.manifest(ask.digest)
        made: m.Message = self._driver.submit(
            partial(
                events.DatasetRegistrationRequested, message=ask, rows=manifest.rows, shards=len(manifest.shard_rows)
            )
        )
        return made

    def _put_blob(self, ask: m.PutBlob) -> m.Message:
        self._driver.check_leading()
        self._files.put_blob(ask.digest, ask.data)
        return m.Done()

    def _get_blob(self, ask: m.GetBlob) -> m.Message:
        return m.Blob(digest=ask.digest, data=self._files.get_blob(ask.digest))

    # -- jobs

    def _open(self, ask: m.OpenJob) -> m.Message:
        self._driver.check_leading()
        unknown, rows = [], 0
        for source in ask.settings.sources:
            try:
                rows += self._files.manifest(source.digest).rows
            except UnknownDataset:
                unknown.append(source.digest)
        opened: m.Message = self._driver.submit(
            partial(
                events.JobOpenRequested,
                message=ask,
                drawn_seed=int.from_bytes(os.urandom(8), "little") >> 1,
                decodes=self._decodes(ask.settings),
                unknown=tuple(unknown),
                rows=rows,
            )
        )
        return opened

    def _decodes(self, settings: m.JobSettings) -> bool:
        """Whether the job has a pipeline, so that it matters which decoder versions a worker has."""
        if not settings.spec or not self._files.has_blob(settings.spec):
            return bool(settings.pipeline)
        spec: m.JobSpec = codec.decode(self._files.get_blob(settings.spec), m.JobSpec)
        return bool(spec.pipeline)

    def _ask(self, ask: m.AskGrants) -> m.Message:
        self._warm(ask)
        granted: m.Message = self._driver.submit(partial(events.GrantsRequested, message=ask))
        return granted

    def _warm(self, ask: m.AskGrants) -> None:
        """Have what the ask will look up in memory, so that the driver's thread need not read, parse or sort."""
        state = self._driver.state
        job = state.jobs.by_name.get(ask.job) if state is not None else None
        generation = job.generations.get(ask.generation) if job is not None else None
        member = job.members.get(ask.rank) if job is not None else None
        if job is None or generation is None or member is None or member.holder.uid != ask.holder:
            return  # the driver will say so
        settings = generation.settings
        for source in settings.sources:
            self._files.manifest(source.digest)
        for shard in ask.shards[: limits.MOST_SHARDS]:
            if 0 <= shard.source < len(settings.sources):
                self._files.shard(settings.sources[shard.source].digest, shard.shard)
        if settings.order == "dynamic" and 0 <= ask.epoch - job.rank_epoch(ask.rank) <= MAX_AHEAD:
            for source in settings.sources:
                self._files.plan(source.digest, settings.seed or 0, ask.epoch, settings.shuffle)

    # -- looking

    def _status(self, ask: m.GetStatus) -> m.Message:
        found: dict[str, Any] = self._driver.submit(partial(events.Asked, look=status.collect))
        driver = self._driver
        info = driver.info
        document = {
            "schema": 1,
            "dispatcher": {
                "address": driver.record.address,
                "leader": driver.leader,
                "term": driver.term.number if driver.term is not None else 0,
            },
            "etcd": {"members": info.members, "ok": info.ok, "db_bytes": info.db_bytes},
            **found,
        }
        return m.Document(json=json.dumps(document).encode())

    def _audit(self, ask: m.GetAudit) -> m.Message:
        snap: audit.Snapshot
        snap, skipped = self._driver.submit(
            partial(
                events.Asked,
                look=lambda state, event: (
                    audit.snapshot(state.jobs.find(ask.job), event.at, state.lease),
                    _skipped(state.jobs.find(ask.job)),
                ),
            )
        )
        document = audit.audit(snap, ask.epoch, self._files.shard_rows)
        rows = {row.sample_id: row for epoch, found in skipped if epoch == document["epoch"] for row in found}
        named = [msgspec.structs.asdict(row) for _, row in sorted(rows.items())[:LISTED]]
        document["skipped_rows"] = named if document["skipped"] else []
        return m.Document(json=json.dumps(document).encode())

    def _hello(self, ask: m.Hello) -> m.Message:
        term = self._driver.term
        return m.HelloReply(
            role="dispatcher",
            id=self._driver.record.address,
            version=RELEASE,
            leader=self._driver.leader,
            term=term.number if term is not None else 0,
        )

    # -- manifests as streams, and what stock Flight clients see

    def read(
        self, ticket: bytes, cancelled: Callable[[], bool]
    ) -> tuple[pa.Schema, Iterable[tuple[pa.RecordBatch, m.ReadPart | None]]]:
        """Stream a manifest file: ticket ``manifest/<digest>``."""
        kind, _, digest = ticket.partition(b"/")
        if kind != b"manifest":
            raise AccessDenied(
                "the dispatcher serves no rows", remedy="send the ticket to the worker that its endpoint names"
            )
        batches = flight.blob_batches(self._files.manifest_bytes(digest.decode("ascii", "replace")))
        first = next(batches)
        return first.schema, _until(cancelled, itertools.chain([first], batches))

    def store(self, path: tuple[str, ...], data: bytes) -> None:
        """Keep an uploaded manifest: path ``manifest/<digest>``."""
        self._driver.check_leading()
        if len(path) != 2 or path[0] != "manifest":
            raise ProtocolError(f"nothing can be stored at {'/'.join(path)!r}", remedy="upload to manifest/<digest>")
        manifest = self._files.store_manifest(path[1], data)
        with log.cause(""):
            _log.info("manifest %s stored: %d shards, %d rows", path[1], len(manifest.shard_rows), manifest.rows)

    def flights(self) -> Iterable[Any]:
        """One flight per registered dataset version; its endpoints come with ``flight_info``."""
        found: list[DatasetRecord] = self._driver.submit(
            partial(events.Asked, look=lambda state, event: state.datasets.all())
        )
        for record in found:
            try:
                manifest = self._files.manifest(record.digest)
            except UnknownDataset:
                continue  # registered, but its file is gone from the folder: nothing to offer
            yield flight.flight_info(
                arrow_schema(manifest.fields), (record.name, record.version), [], manifest.rows, -1
            )

    def flight_info(self, path: tuple[str, ...]) -> Any:
        """Endpoints for ``[dataset, version, first shard, count]``; the last three may be left out."""
        name, version, first, count = _parse_path(path)
        record: DatasetRecord = self._driver.submit(
            partial(events.Asked, look=lambda state, event: state.datasets.find(name, version))
        )
        manifest = self._files.manifest(record.digest)
        if first and first >= len(manifest.shard_rows):
            raise ConfigError(f"{name} has no shard {first}", cause=f"it has {len(manifest.shard_rows)}")
        granted = self._driver.submit(
            partial(
                events.StockGrantsRequested,
                manifest=record.digest,
                spec=self._stored_fields(manifest),
                first=first,
                count=count,
            )
        )
        endpoints = [
            (codec.encode(m.ReadTicket(grants=(grant.signed,))), [worker.address for worker in grant.workers])
            for grant, _ in granted
        ]
        rows, size = sum(info.rows for _, info in granted), sum(info.bytes for _, info in granted)
        return flight.flight_info(arrow_schema(manifest.fields), (name, record.version), endpoints, rows, size)

    def _stored_fields(self, manifest: Manifest) -> str:
        """Digest of the job spec that means "as stored"; workers fetch it from the store folder."""
        spec = m.JobSpec(fields=(manifest.fields,), labels=(dict(manifest.labels),), pipeline=b"")
        data = codec.encode(spec)
        self._files.put_blob(digest_of(data), data)
        return digest_of(data)


def _skipped(job: Job) -> list[tuple[int, tuple[m.SkippedRow, ...]]]:
    """(epoch, bad samples that were skipped in it) as far as the books name them, oldest books first."""
    folded = [(epoch, book.skipped) for (_, epoch), book in sorted(job.folded.items())]
    now = [(epoch, book.progress.skipped) for epoch, ranks in job.ranks.items() for book in ranks.values()]
    return folded + now


def _parse_path(path: tuple[str, ...]) -> tuple[str, str, int, int]:
    usage = "the path is [dataset, version, first shard, count]; the last three may be left out"
    if not 1 <= len(path) <= 4:
        raise ConfigError(f"flight path {list(path)} is not understood", cause=usage)
    name, version, *numbers = [*path, ""][: max(2, len(path))]
    try:
        first, count = [int(number) for number in [*numbers, *["0", str(MAX_ENDPOINTS)][len(numbers) :]]]
    except ValueError:
        raise ConfigError(f"flight path {list(path)} is not understood", cause=usage) from None
    if first < 0 or not 0 < count <= MAX_ENDPOINTS:
        raise ConfigError(
            f"shards {first} .. {first + count} cannot be listed", cause=f"1 to {MAX_ENDPOINTS} endpoints at a time"
        )
    return name, version, first, count


def _until(
    cancelled: Callable[[], bool], batches: Iterable[pa.RecordBatch]
) -> Iterator[tuple[pa.RecordBatch, m.ReadPart | None]]:
    for batch in batches:
        if cancelled():
            return
        yield batch, None
