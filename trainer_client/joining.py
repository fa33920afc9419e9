"""Finding the dataset and opening or joining a generation: everything that happens before the first row."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from manifests.errors import ConfigError, FeedlineError, FeedlineWarning, JobBusy, JobMismatch, RankAbsent
from manifests.identity import digest
from manifests.log import new_cause
from manifests.manifest import Manifest
from manifests.pipeline import Pipeline
from manifests.process import ProcessId
from manifests.schema import Field
from manifests.wire import codec
from manifests.wire import messages as m

from .config import LoaderConfig
from .control import Closed, Control

log = logging.getLogger("feedline.client")

#: seconds between asks while ranks are missing, first and largest
_POLL = (0.02, 0.25)


class Dataset(msgspec.Struct, frozen=True):
    """The dataset of a job, found and fetched."""

    manifest: Manifest
    label: str
    fields: tuple[Field, ...]
    spec: str
    pipeline: str


def new_holder() -> m.Holder:
    """A name for this loader object in this process, that others on this host can check for life."""
    me = ProcessId.current()
    return m.Holder(uid=f"{me.encode()}#{os.urandom(6).hex()}", host=me.host, pid=me.pid)


def find_dataset(control: Control, config: LoaderConfig) -> Dataset:
    """Resolve the name or manifest file, fetch the manifest, and leave the job's spec with the dispatcher.

    Raises:
        UnknownDataset: no such name. ConfigError: no rows, an unreadable file, or a pipeline that does not fit.
    """
    if config.dataset_is_file:
        manifest = Manifest.load(Path(config.dataset))
        _upload(control, config, manifest)
        label = f"{manifest.name}@{manifest.version}"
    else:
        name, _, version = config.dataset.partition("@")
        found: m.DatasetFound = control.call(
            m.FindDataset(cause=new_cause(), name=name, version=version), m.DatasetFound, timeout=config.timeout
        )
        manifest = Manifest.from_bytes(control.download(f"manifest/{found.digest}", config.timeout))
        label = f"{found.name}@{found.version}"
    if manifest.rows == 0:
        raise ConfigError(f"dataset {label} has no rows", remedy="build its manifest from shards that hold samples")
    pipeline = config.pipeline if config.pipeline is not None else Pipeline([])
    fields = pipeline.output(manifest.fields)
    spec = codec.encode(
        m.JobSpec(
            fields=(manifest.fields,),
            labels=(manifest.labels,),
            pipeline=b"" if config.pipeline is None else pipeline.encode(),
        )
    )
    control.call(m.PutBlob(cause=new_cause(), digest=digest(spec), data=spec), m.Done, timeout=config.timeout)
    return Dataset(manifest, label, fields, digest(spec), pipeline.digest)


def _upload(control: Control, config: LoaderConfig, manifest: Manifest) -> None:
    known: m.ManifestKnown = control.call(
        m.HaveManifest(cause=new_cause(), digest=manifest.digest, locations=manifest.locations),
        m.ManifestKnown,
        timeout=config.timeout,
    )
    if not known.known:
        control.upload(f"manifest/{manifest.digest}", manifest.to_bytes(), config.timeout)


def settings_of(config: LoaderConfig, dataset: Dataset, world_size: int) -> m.JobSettings:
    """What this loader asks for; seed and lanes None where it leaves them to the state or the record."""
    name, _, version = dataset.label.partition("@")
    return m.JobSettings(
        sources=(m.Source(digest=dataset.manifest.digest, name=name, version=version),),
        spec=dataset.spec,
        pipeline=dataset.pipeline,
        seed=config.seed,
        order=config.order,  # type: ignore[arg-type]  # checked when the loader was made
        shuffle=None if config.shuffle is None else config.shuffle.wire(),
        lanes=config.lanes,
        batch_size=config.batch_size,
        world_size=world_size,
        tail=config.tail,  # type: ignore[arg-type]
        epochs=config.epochs,
        on_error=config.on_error,  # type: ignore[arg-type]
        max_bad=config.max_bad,
        ack=config.ack,  # type: ignore[arg-type]
        tenant=config.options.tenant,
        elastic=config.elastic,
        audit=config.audit,
    )


def open_generation(
    control: Control,
    config: LoaderConfig,
    *,
    rank: int,
    holder: m.Holder,
    settings: m.JobSettings,
    start: m.StartPoint,
    closing: threading.Event,
) -> m.JobOpened:
    """Open a generation or join it, and wait until every rank has.

    A holder that is in the way is waited for as long as its lease, unless it shows signs of life; one whose process is
    seen to be dead on this host is not waited for at all.

    Raises:
        JobBusy, JobMismatch, StateMismatch: refused, with the reason. RankAbsent: ranks missing after join_timeout.
    """
    nonce = f"{time.monotonic_ns():020}-{os.urandom(4).hex()}"
    ask = m.OpenJob(job=config.job, rank=rank, holder=holder, nonce=nonce, settings=settings, start=start)
    deadline = time.monotonic() + config.join_timeout
    pause = _POLL[0]
    opened: m.JobOpened | None = None
    try:
        while True:
            before, opened = opened, _ask_until_free(control, config, ask, closing)
            if opened.warning and before is None:
                warnings.warn(opened.warning, FeedlineWarning, stacklevel=4)
            if not opened.absent:
                return opened
            if time.monotonic() >= deadline:
                names = ", ".join(map(str, opened.absent))
                raise RankAbsent(
                    f"rank {names} of job {config.job} did not join within {config.join_timeout:g} s",
                    cause=f"{settings.world_size} ranks are expected, {len(opened.absent)} are missing",
                    remedy="start all ranks with the same job name and world_size, or raise join_timeout",
                    detail={"absent": list(opened.absent)},
                )
            if closing.wait(pause):
                raise RankAbsent("the loader was closed while ranks were missing")
            pause = min(pause * 1.5, _POLL[1])
    except BaseException:
        if opened is not None:
            _leave(control, ask, opened.generation)
        raise


def _ask_until_free(control: Control, config: LoaderConfig, ask: m.OpenJob, closing: threading.Event) -> m.JobOpened:
    """Send ``ask``, again while a holder is in the way that may be gone."""
    dead: set[str] = set()
    first: float | None = None  # when the holder was last heard of, at the first refusal
    give_up = 0.0
    while True:
        message = msgspec.structs.replace(ask, cause=new_cause(), dead=tuple(sorted(dead)))
        try:
            opened: m.JobOpened = control.call(message, m.JobOpened, timeout=config.timeout)
            return opened
        except (JobBusy, JobMismatch) as error:
            found = _dead_holders(error.detail)
            if found - dead:
                dead |= found
                continue
            if isinstance(error, JobMismatch):
                raise
            now = time.monotonic()
            heard = now - float(error.detail.get("heard_ms", 0)) / 1000
            if first is None:
                first, give_up = heard, max(now, heard + float(error.detail.get("lease_ms", 0)) / 1000) + 0.5
            if now >= give_up or heard > first + 0.5:
                raise  # it lives: it was heard of since the first refusal
        log.info("rank %d is held by a silent process; waiting for its lease to end", ask.rank)
        closing.wait(0.2)


def _leave(control: Control, ask: m.OpenJob, generation: int) -> None:
    """Give a place back that was taken while others were waited for, so that the next start need not wait for a lease."""
    report = m.Report(
        cause=new_cause(),
        job=ask.job,
        generation=generation,
        rank=ask.rank,
        holder=ask.holder.uid,
        state="done",
        leaving=True,
    )
    try:
        control.call(report, m.Reported, timeout=2.0, one_call=2.0)
    except (FeedlineError, Closed) as error:
        log.debug("the place of rank %d was not given back: %s", ask.rank, error)


def _dead_holders(detail: dict[str, Any]) -> set[str]:
    """Holders named in a refusal whose process is certainly gone."""
    holders: Iterable[Any] = detail.get("holders", ())
    out = set()
    for holder in holders:
        uid = str(holder.get("uid", ""))
        process = ProcessId.parse(uid.rpartition("#")[0])
        if process is not None and process.is_dead():
            out.add(uid)
    return out
