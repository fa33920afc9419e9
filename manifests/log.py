"""Log lines of all processes: to stderr, each with the cause id of the request it belongs to."""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import os
import sys
import time
from collections.abc import Iterator

_cause: contextvars.ContextVar[str] = contextvars.ContextVar("feedline_cause", default="-")


def new_cause() -> str:
    """A fresh id that ties together what one request made happen."""
    return os.urandom(5).hex()


def current_cause() -> str:
    """The cause this thread works for, "-" for none."""
    return _cause.get()


@contextlib.contextmanager
def cause(value: str) -> Iterator[str]:
    """Work for ``value`` ("" draws a new id) inside the block."""
    value = value or new_cause()
    token = _cause.set(value)
    try:
        yield value
    finally:
        _cause.reset(token)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = (
            f"{when}.{int(record.msecs):03d} {record.levelname[0]} {record.name} [{_cause.get()}] {record.getMessage()}"
        )
        return text + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "cause": _cause.get(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def setup(log_format: str = "text", debug: bool = False) -> None:
    """Send the program's log lines to stderr. For entry points only; the trainer client never calls it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_format == "json" else _Text())
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, handlers=[handler], force=True)
