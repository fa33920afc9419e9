"""What to do about it: the only way anything leaves the core. Imperative, frozen.

The driver persists all puts and deletes of a group of events in one transaction, and only then sends the replies.
"""

from __future__ import annotations

from dataclasses import dataclass

from manifests.errors import FeedlineError

from . import records


@dataclass(frozen=True, slots=True)
class Put:
    """Store this record under its key."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove this key."""

    key: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the request: with a message (or a snapshot, for looking), or with an error."""

    request: int
    answer: object


@dataclass(frozen=True, slots=True)
class Log:
    """Write a log line: ``level`` is a number of the logging module."""

    level: int
    text: str
    cause: str = ""


Effect = Put | Delete | Reply | Log


class Outbox:
    """Effects of the event in hand, in order."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []
        self.cause = ""

    def put(self, record: records.Stored) -> None:
        self._effects.append(Put(record.key, records.encode(record)))

    def delete(self, key: str) -> None:
        self._effects.append(Delete(key))

    def reply(self, request: int, answer: object) -> None:
        if request:
            self._effects.append(Reply(request, answer))

    def fail(self, request: int, error: FeedlineError) -> None:
        if request:
            self._effects.append(Reply(request, error))

    def log(self, level: int, text: str) -> None:
        self._effects.append(Log(level, text, self.cause))

    def take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects
