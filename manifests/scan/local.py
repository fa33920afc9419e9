"""Files on this machine (and on mounted network storage) as ``Bytes``; ``file://`` uris."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from types import TracebackType
from typing import Protocol
from urllib.parse import quote_from_bytes, unquote_to_bytes, urlsplit

from blake3 import blake3

from ..errors import ConfigError, FeedlineError, ShardChanged, ShardMissing
from .port import Bytes

#: bytes read and hashed at a time
CHUNK = 4 << 20


def quoted(path: str) -> str:
    """``path`` percent-encoded for a uri, whatever bytes its name has."""
    return quote_from_bytes(os.fsencode(path), safe="/")


def unquoted(text: str) -> str:
    """The inverse of ``quoted``."""
    return os.fsdecode(unquote_to_bytes(text))


def uri_of(path: str | os.PathLike[str]) -> str:
    """Absolute ``file://`` uri of a path; links are kept as they are."""
    return "file://" + quoted(os.path.abspath(path))


def path_of(uri: str) -> str:
    """Path of a ``file://`` uri.

    Raises:
        ConfigError: another scheme.
    """
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise ConfigError(f"uri {uri!r} is not a local file", remedy="local files have uris like file:///data/x.tar")
    return unquoted(parts.path)


def storage_error(path: str, error: OSError) -> FeedlineError:
    """What to raise for a file that cannot be opened or read."""
    cause = error.strerror or str(error)
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return ShardMissing(f"{path} is missing", cause=cause)
    return ShardMissing(f"{path} cannot be read", cause=cause, remedy="check its permissions and the storage")


class Source(Bytes, Protocol):
    """``Bytes`` that the builder opened itself."""

    name: str

    @property
    def etag(self) -> str:
        """A content id that is had without reading: tells most changes."""

    def check_unchanged(self) -> None:
        """Raise ``ShardChanged`` if it was written to since it was opened."""

    def close(self) -> None:
        """Give files back."""


class LocalBytes:
    """One open file. Reads are ``pread``: safe from several threads. Closes with ``close`` or at the end of ``with``.

    Raises:
        ShardMissing: it is not there or cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.name = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise storage_error(path, error) from None
        stat = os.fstat(self._fd)
        self.size: int = stat.st_size
        self._stamp = (stat.st_size, stat.st_mtime_ns)

    def __repr__(self) -> str:
        return f"LocalBytes({self.name}, {self.size} bytes)"

    @property
    def etag(self) -> str:
        """``etag:<size>-<mtime in ns>``: tells most changes without reading the file."""
        return f"etag:{self._stamp[0]}-{self._stamp[1]}"

    def read(self, offset: int, length: int) -> memoryview:
        try:
            data = os.pread(self._fd, length, offset)
            if len(data) < length and offset + len(data) < self.size:
                parts = [data]
                have = len(data)
                while have < length and (data := os.pread(self._fd, length - have, offset + have)):
                    parts.append(data)
                    have += len(data)
                data = b"".join(parts)
        except OSError as error:
            raise storage_error(self.name, error) from None
        return memoryview(data)

    def check_unchanged(self) -> None:
        """Raise ``ShardChanged`` if the file was written to since it was opened."""
        stat = os.fstat(self._fd)
        if (stat.st_size, stat.st_mtime_ns) != self._stamp:
            raise ShardChanged(f"{self.name} changed while it was read", remedy="wait until it is written, then repeat")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> LocalBytes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class HashingBytes:
    """``Bytes`` that hashes all of ``source`` once while something else reads it forward.

    Holds one chunk. Reads behind the chunk go to the source again, reads ahead move it on; ``content_id`` hashes what is
    left. For one thread only.
    """

    def __init__(self, source: Source, progress: Callable[[int], None] | None = None, kind: str = "blake3") -> None:
        self.name = source.name
        self.size = source.size
        self._source = source
        self._progress = progress
        self._kind = kind
        self._hash = hashlib.sha256() if kind == "sha256" else blake3()
        self._start = 0
        self._chunk = memoryview(b"")

    def read(self, offset: int, length: int) -> memoryview:
        if offset < self._start:
            return self._source.read(offset, length)
        while offset >= self._start + len(self._chunk) and self._next():
            pass
        begin = offset - self._start
        if begin + length <= len(self._chunk):
            return self._chunk[begin : begin + length]
        head = bytes(self._chunk[begin:])
        if len(head) + length > CHUNK or not self._next():
            return self._source.read(offset, length)
        return memoryview(head + self._chunk[: length - len(head)])

    def _next(self) -> bool:
        """Move to the next chunk and hash it; False at the end."""
        at = self._start + len(self._chunk)
        if at >= self.size:
            return False
        chunk = self._source.read(at, min(CHUNK, self.size - at))
        if not chunk:
            raise ShardChanged(f"{self.name} became shorter while it was read")
        self._start, self._chunk = at, chunk
        self._hash.update(chunk)
        if self._progress:
            self._progress(len(chunk))
        return True

    def content_id(self) -> str:
        """``blake3:<hex>`` (or ``sha256:<hex>``, by ``kind``) of all bytes."""
        while self._next():
            pass
        return f"{self._kind}:" + self._hash.hexdigest()
