"""Every error feedline raises, and the code each one has on the wire.

    FeedlineError
    ├── you misused it ............ ConfigError(ValueError) · UnknownDataset(LookupError) · JobMismatch · JobBusy
    │                               StateMismatch · StateIncomplete · AccessDenied
    ├── the data is not as promised ShardMissing · ShardChanged · BadSample · TooManyBadSamples · ShardQuarantined
    ├── the peer broke ............ DispatcherUnavailable(ConnectionError) · NoWorker · ProtocolError
    ├── another took over ......... Fenced · RankAbsent
    └── a deadline passed ......... WaitTimeout(TimeoutError)

``code`` is the class name in kebab case and equals the code in ``FlightError.extra_info``. It lives in ``manifests``
because all three processes speak it; ``trainer_client.errors`` is where users import it from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = [
    "CODES",
    "AccessDenied",
    "BadSample",
    "ConfigError",
    "DispatcherUnavailable",
    "FeedlineError",
    "FeedlineWarning",
    "Fenced",
    "JobBusy",
    "JobMismatch",
    "NoWorker",
    "ProtocolError",
    "RankAbsent",
    "ShardChanged",
    "ShardMissing",
    "ShardQuarantined",
    "StateIncomplete",
    "StateMismatch",
    "TooManyBadSamples",
    "UnknownDataset",
    "WaitTimeout",
    "from_code",
]


class FeedlineWarning(UserWarning):
    """Something that works but is probably not what was meant."""


class FeedlineError(Exception):
    """Base of all errors. One line: the thing, the cause, the remedy.

    Attributes:
        code: kebab-case class name, stable, for programs.
        cause: why it happened (may be empty).
        remedy: what to change (may be empty).
        detail: plain values for programs; what the wire carries as ``detail``.
    """

    code: str = "feedline-error"

    def __init__(
        self, message: str, *, cause: str = "", remedy: str = "", detail: Mapping[str, Any] | None = None
    ) -> None:
        self.message = message
        self.cause = cause
        self.remedy = remedy
        self.detail: dict[str, Any] = dict(detail or {})
        super().__init__(message)

    def __str__(self) -> str:
        text = self.message
        if self.cause:
            text += f": {self.cause}"
        if self.remedy:
            text += f" ({self.remedy})"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.cause, self.remedy, self.detail)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.code = re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()


def _rebuild(kind: type[FeedlineError], message: str, cause: str, remedy: str, detail: dict[str, Any]) -> FeedlineError:
    return kind(message, cause=cause, remedy=remedy, detail=detail)


class ConfigError(FeedlineError, ValueError):
    """An argument or setting that cannot work."""


class DispatcherUnavailable(FeedlineError, ConnectionError):
    """No dispatcher answered; names the addresses and how long was tried."""


class WaitTimeout(FeedlineError, TimeoutError):
    """A wait passed its deadline; names what was waited for."""


class UnknownDataset(FeedlineError, LookupError):
    """The dispatcher knows no dataset of that name; lists those it knows."""


class JobMismatch(FeedlineError):
    """A rank asked to join an open job with other settings or another start point; lists the differences."""


class JobBusy(FeedlineError):
    """Another live process holds this rank of the job; names host and pid."""


class RankAbsent(FeedlineError):
    """A rank did not join, or went away, within the deadline; names it."""


class Fenced(FeedlineError):
    """A newer generation of the job was opened; this loader may not go on."""


class StateMismatch(FeedlineError):
    """A saved state belongs to other data or settings; lists the differences."""


class StateIncomplete(FeedlineError):
    """A saved state lacks the positions of other ranks; names them."""


class ShardMissing(FeedlineError):
    """A shard of the manifest is not where its uri says."""


class ShardChanged(FeedlineError):
    """A shard's bytes are not those the manifest was built from."""


class BadSample(FeedlineError):
    """One sample cannot be read or decoded; names shard, key and reason."""


class TooManyBadSamples(FeedlineError):
    """More samples were skipped than ``max_bad`` allows."""


class ShardQuarantined(FeedlineError):
    """A shard failed on several workers and was set aside."""


class NoWorker(FeedlineError):
    """No worker that could serve a read was there within the deadline."""


class AccessDenied(FeedlineError):
    """A ticket or token is forged, altered, expired, or for somebody else."""


class ProtocolError(FeedlineError):
    """A message that cannot be understood: malformed, too large, or of an unknown version."""


#: code on the wire -> class; total over the tree above.
CODES: dict[str, type[FeedlineError]] = {
    kind.code: kind
    for kind in (
        ConfigError, DispatcherUnavailable, WaitTimeout, UnknownDataset, JobMismatch, JobBusy, RankAbsent, Fenced,
        StateMismatch, StateIncomplete, ShardMissing, ShardChanged, BadSample, TooManyBadSamples, ShardQuarantined,
        NoWorker, AccessDenied, ProtocolError,
    )
}  # fmt: skip


def from_code(code: str, message: str, detail: Mapping[str, Any] | None = None) -> FeedlineError:
    """The error a peer sent, as the type users catch. An unknown code is a ``ProtocolError`` that keeps the text.

    ``cause`` and ``remedy`` travel inside ``detail`` under those two names.
    """
    rest = dict(detail or {})
    cause, remedy = str(rest.pop("cause", "")), str(rest.pop("remedy", ""))
    kind = CODES.get(code)
    if kind is None:
        return ProtocolError(f"unknown error code {code!r} from the peer", cause=message, detail=rest)
    return kind(message, cause=cause, remedy=remedy, detail=rest)
