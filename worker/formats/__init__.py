"""Stored formats a worker reads: format name -> (scanner, reader)."""

from __future__ import annotations

from typing import NamedTuple

from manifests.errors import ConfigError
from manifests.scan import SCANNERS, Scanner

from .arrow import read_arrow
from .folder import read_folder
from .port import Reader, StoredRows
from .tar import read_tar


class Format(NamedTuple):
    """How one stored format is read. ``scan`` makes the index that ``read_rows`` takes."""

    scan: Scanner
    read_rows: Reader


_READERS: dict[str, Reader] = {"tar": read_tar, "tar-last": read_tar, "folder": read_folder, "arrow": read_arrow}

#: every format, by the name shards carry
FORMATS: dict[str, Format] = {name: Format(SCANNERS[name], reader) for name, reader in _READERS.items()}


def format_of(name: str) -> Format:
    """The format of that name, else ``ConfigError`` that lists those there are."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ConfigError(
            f"format {name!r} is not known here",
            cause=f"this worker reads {', '.join(sorted(FORMATS))}",
            remedy="run the feedline release the manifest was built with",
        ) from None


__all__ = ["FORMATS", "Format", "Reader", "StoredRows", "format_of"]
