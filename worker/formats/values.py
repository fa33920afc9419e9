"""Text and whole numbers out of stored bytes; what cannot be parsed is named, not raised."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from .port import bytes_column

#: what counts as a whole number: ASCII digits with a sign, white space around it
_WHOLE = re.compile(rb"\s*([+-]?[0-9]+)\s*\Z")

#: longest text that is looked at as a number, bytes
_LONGEST = 1000


def parse_whole(name: str, values: Sequence[memoryview | None], bad: dict[int, str]) -> pa.Array:
    """int64 column; adds to ``bad`` what is no whole number in 64 bits."""
    numbers = np.zeros(len(values), np.int64)
    missing = np.zeros(len(values), np.bool_)
    for at, value in enumerate(values):
        found = _WHOLE.match(bytes(value)) if value is not None and len(value) <= _LONGEST else None
        number = int(found[1]) if found else None
        if number is not None and -(1 << 63) <= number < 1 << 63:
            numbers[at] = number
            continue
        missing[at] = True
        if value is not None:
            bad[at] = f"field {name!r} is not a whole number: {_shown(value)}"
    return pa.array(numbers, pa.int64(), mask=missing if missing.any() else None)


def parse_text(name: str, values: Sequence[memoryview | None], bad: dict[int, str]) -> pa.Array:
    """large_utf8 column; adds to ``bad`` what is not UTF-8."""
    good = list(values)
    for at, value in enumerate(values):
        if value is not None:
            try:
                str(value, "utf-8")
            except UnicodeDecodeError as error:
                good[at] = None
                bad[at] = f"field {name!r} is not UTF-8 text: {error.reason} at byte {error.start}"
    return bytes_column(good, text=True)


def _shown(value: memoryview) -> str:
    text = bytes(value[:40]).decode("utf-8", "backslashreplace")
    return f"{text!r}{'..' if len(value) > 40 else ''}"
