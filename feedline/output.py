"""What commands print: JSON documents, small tables, one-line errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from manifests.errors import FeedlineError

#: version of the JSON documents
SCHEMA = 1
#: lines of one kind that a command prints for people
SHOWN = 20


def print_json(document: Mapping[str, Any]) -> None:
    """One document on one line, flushed, with the schema's version in it."""
    print(json.dumps({"schema": SCHEMA, **document}), flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Left-aligned columns with two blanks between them; "-" for nothing."""
    cells = [[str(h) for h in head], *[["-" if v is None or v == "" else str(v) for v in row] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    lines = ["  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(line.rstrip() for line in lines)


def counted(number: int, noun: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def listed(values: Sequence[object], most: int = 10) -> str:
    """The first few values and how many more there are."""
    return ", ".join(map(str, values[:most])) + (f" and {len(values) - most} more" if len(values) > most else "")


def rest(number: int) -> list[str]:
    """The line that ends a list of ``SHOWN``: how many more there are; none when all are shown."""
    return [f"  and {number} more"] if number > 0 else []


def print_error(error: FeedlineError, as_json: bool, stream: TextIO | None = None) -> None:
    """One line on stderr: text, or ``{"error": {"code", "message", "remedy"}}``."""
    out = sys.stderr if stream is None else stream
    if as_json:
        message = error.message + (f": {error.cause}" if error.cause else "")
        body = {"code": error.code, "message": message, "remedy": error.remedy}
        print(json.dumps({"error": body}), file=out, flush=True)
    else:
        print(f"feedline: {' '.join(str(error).split())}", file=out, flush=True)
