"""Sizes and times as people write them: ``8GiB``, ``256MiB``, ``10s``, ``500ms``."""

from __future__ import annotations

import re

from .errors import ConfigError

_SIZES = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZES |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_TIMES = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "": 1.0}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*\Z")


def parse_size(value: str | int, what: str = "size") -> int:
    """Bytes. An integer is bytes already.

    Raises:
        ConfigError: not a positive size.
    """
    if isinstance(value, bool):
        raise ConfigError(f"{what} {value!r} is not a size", remedy="write it like 256MiB")
    if isinstance(value, int):
        number, unit = float(value), ""
    else:
        found = _NUMBER.match(str(value))
        if not found or found[2] not in _SIZES:
            raise ConfigError(f"{what} {value!r} is not a size", remedy="write it like 256MiB or 8GiB")
        number, unit = float(found[1]), found[2]
    size = int(number * _SIZES[unit])
    if size <= 0:
        raise ConfigError(f"{what} {value!r} is not above zero", remedy="write it like 256MiB")
    return size


def parse_time(value: str | float, what: str = "time") -> float:
    """Seconds. A number is seconds already.

    Raises:
        ConfigError: not a positive time.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    else:
        found = _NUMBER.match(str(value))
        if not found or found[2] not in _TIMES:
            raise ConfigError(f"{what} {value!r} is not a time", remedy="write it like 10s or 500ms")
        seconds = float(found[1]) * _TIMES[found[2]]
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{what} {value!r} is not above zero", remedy="write it like 10s")
    return seconds


def format_size(size: float) -> str:
    """``1.5 GiB``"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
