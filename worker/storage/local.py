"""Files of this machine and of mounted network storage (``file://``), and image folders (``folder://``)."""

from __future__ import annotations

import os
from stat import S_ISDIR

import numpy as np

from manifests.errors import ShardChanged, ShardMissing
from manifests.scan.folder import open_folder_shard
from manifests.scan.local import path_of, storage_error

from .port import U8

#: bytes asked for in one call; a hung mount is noticed between calls
_PIECE = 8 << 20


class LocalStorage:
    """``file://``"""

    recheck = 0.0

    def open(self, uri: str) -> LocalFile:
        """See ``Storage.open``."""
        return LocalFile(uri)


class LocalFile:
    """One file. It is opened for each fetch, so that many shards cost no file descriptors."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._path = path_of(uri)
        stat = self._stat()
        self.size: int = stat.st_size
        self.etag = f"etag:{stat.st_size}-{stat.st_mtime_ns}"
        self.stamp = _stamp(stat)

    def __repr__(self) -> str:
        return f"LocalFile({self.uri}, {self.size} bytes)"

    def current_stamp(self) -> str:
        """See ``StoredObject``."""
        return _stamp(self._stat())

    def fetch(self, offset: int, out: U8) -> None:
        """See ``StoredObject``."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _stamp(os.fstat(descriptor)) != self.stamp:
                    raise ShardChanged(
                        f"{self.uri} changed", cause="it was written to or replaced while it was in use", remedy=_REMEDY
                    )
                self._fill(descriptor, offset, out)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._error(error) from None

    def _fill(self, descriptor: int, offset: int, out: U8) -> None:
        have = 0
        while have < len(out):
            got = os.preadv(descriptor, [out.data[have : have + _PIECE]], offset + have)
            if got == 0:
                raise ShardChanged(
                    f"{self.uri} is shorter than it was", cause=f"it ends at byte {offset + have}", remedy=_REMEDY
                )
            have += got

    def _stat(self) -> os.stat_result:
        try:
            stat = os.stat(self._path)
        except OSError as error:
            raise self._error(error) from None
        if S_ISDIR(stat.st_mode):
            raise ShardMissing(f"{self.uri} is a folder", cause="a shard is a file", remedy="build the manifest again")
        return stat

    def _error(self, error: OSError) -> Exception:
        return storage_error(self.uri, error)


_REMEDY = "build the manifest again"


def _stamp(stat: os.stat_result) -> str:
    return f"{stat.st_dev}-{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}"


class FolderStorage:
    """``folder://``: ranges of an image folder as virtual shards. To look again is to list the folder again."""

    recheck = 2.0

    def open(self, uri: str) -> FolderShard:
        """See ``Storage.open``."""
        return FolderShard(uri)


class FolderShard:
    """One virtual shard."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._bytes = open_folder_shard(uri)
        self.size: int = self._bytes.size
        self.etag = self._bytes.etag
        self.stamp = self.etag

    def __repr__(self) -> str:
        return f"FolderShard({self.uri}, {self.size} bytes)"

    def current_stamp(self) -> str:
        """See ``StoredObject``."""
        return open_folder_shard(self.uri).etag

    def fetch(self, offset: int, out: U8) -> None:
        """See ``StoredObject``."""
        have = 0
        while have < len(out):
            data = self._bytes.read(offset + have, min(_PIECE, len(out) - have))
            if not data:
                raise ShardChanged(f"{self.uri} is shorter than it was", remedy=_REMEDY)
            out[have : have + len(data)] = np.frombuffer(data, np.uint8)
            have += len(data)
