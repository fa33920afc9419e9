"""What happened: the only way anything enters the core. Past tense, frozen, complete.

Time, random numbers and ids come in with the event, so that the core is a function of its events. ``request`` ties an
answer to the caller that waits for it (0: nobody does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manifests.wire import messages as m


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Base of all events.

    Attributes:
        at: seconds on the driver's monotonic clock; what leases are measured with.
        now_ms: dispatcher time, ms since 1970; what tickets expire in.
        request: number of the waiting request, 0 for none.
        cause: ties log lines together.
    """

    at: float
    now_ms: int
    request: int = 0
    cause: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyDrawn(Event):
    """A signing key was drawn; kept only when there is none yet."""

    id: str
    secret: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetFindRequested(Event):
    message: m.FindDataset


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetRegistrationRequested(Event):
    """``rows`` and ``shards`` are those of the manifest, which is in the store folder."""

    message: m.RegisterDataset
    rows: int
    shards: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRegistered(Event):
    message: m.RegisterWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerHeartbeatReceived(Event):
    message: m.Heartbeat


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLeft(Event):
    message: m.LeaveWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainRequested(Event):
    message: m.DrainWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOpenRequested(Event):
    """``drawn_seed``: used when neither the request nor the record has one. ``decodes``: the job spec has pipeline
    steps. ``unknown``: sources whose manifest is not in the store folder. ``rows``: of all sources together."""

    message: m.OpenJob
    drawn_seed: int
    decodes: bool = False
    unknown: tuple[str, ...] = ()
    rows: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GrantsRequested(Event):
    message: m.AskGrants


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressReported(Event):
    message: m.Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked(Event):
    """Somebody wants to look: the reply is what ``look`` makes of the state, on the driver thread, so it is quick and
    changes nothing."""

    look: Callable[..., object]


@dataclass(frozen=True, kw_only=True, slots=True)
class StockGrantsRequested(Event):
    """A stock Flight client wants endpoints: grants without a job for shards [first, first + count) of a manifest."""

    manifest: str
    spec: str
    first: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TimePassed(Event):
    """Nothing else happened; leases may be over."""
