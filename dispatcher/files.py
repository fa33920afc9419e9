"""The store folder: manifests and job specs as files named by digest.

    FOLDER/manifests/<sha256 hex>.parquet    FOLDER/blobs/<sha256 hex>

Files are written beside their place, synced and renamed, so that a reader sees all of a file or none; a digest is
checked before anything is kept. Several dispatchers may share the folder. Parsed manifests are kept, the last few, and
read again when another dispatcher has replaced the file, because the data was moved.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
import threading
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from manifests.errors import ConfigError, FeedlineError, ProtocolError, UnknownDataset
from manifests.identity import digest as digest_of
from manifests.manifest import Manifest
from manifests.wire.messages import Shuffle

from .library import ShardInfo, ShardOrder

log = logging.getLogger("dispatcher.files")

#: parsed manifests kept in memory
KEPT = 8
#: shards whose description is kept in memory; the oldest go first
KEPT_SHARDS = 8192
#: shard orders kept in memory: of the epochs that jobs in dynamic order are in
KEPT_ORDERS = 16
#: seconds between two looks at whether a manifest's file was replaced
LOOK = 1.0
#: largest blob, bytes
MAX_BLOB = 1 << 20

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})\Z")


class Files:
    """Manifests and blobs of one folder. Methods may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        """Raises ``ConfigError`` when the folder cannot be made or written."""
        self.folder = folder
        self._manifests = folder / "manifests"
        self._blobs = folder / "blobs"
        self._lock = threading.Lock()
        # one order is made at a time: ranks that begin an epoch together need the same one
        self._ordering = threading.Lock()
        self._parsed: OrderedDict[str, Manifest] = OrderedDict()
        #: digest -> which file was parsed, and when that was last looked at
        self._files: dict[str, tuple[tuple[int, int, int], float]] = {}
        self._shards: OrderedDict[tuple[str, int], ShardInfo] = OrderedDict()
        self._orders: OrderedDict[tuple[str, int, int, bool], ShardOrder] = OrderedDict()
        try:
            for place in (self._manifests, self._blobs):
                place.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=place):
                    pass
        except OSError as error:
            raise ConfigError(
                f"cannot write to the store folder {folder}", cause=error.strerror or str(error)
            ) from None

    def __repr__(self) -> str:
        return f"Files({self.folder}, {len(self._parsed)} manifests parsed)"

    # -- manifests

    def manifest(self, digest: str) -> Manifest:
        """The parsed manifest. Raises ``UnknownDataset`` when it is not in the folder."""
        with self._lock:
            found = self._parsed.get(digest)
            if found is not None:
                self._parsed.move_to_end(digest)
        if found is not None and not self._replaced(digest):
            return found
        file = self._file(digest)  # before it is read: a file that is replaced meanwhile is read again
        found = _parse(self.manifest_bytes(digest), digest)
        self._keep(digest, found, file)
        return found

    def _file(self, digest: str) -> tuple[int, int, int]:
        """Which file is there now; zeros when it cannot be told."""
        try:
            found = (self._manifests / (_hex(digest) + ".parquet")).stat()
        except OSError:
            return (0, 0, 0)
        return (found.st_ino, found.st_mtime_ns, found.st_size)

    def _replaced(self, digest: str) -> bool:
        """Whether the file is another one than was parsed. A file that is not there for a moment is not."""
        file, looked = self._files.get(digest, ((0, 0, 0), 0.0))
        now = time.monotonic()
        if now - looked < LOOK:
            return False
        self._files[digest] = (file, now)
        return self._file(digest) not in (file, (0, 0, 0))

    def _keep(self, digest: str, manifest: Manifest, file: tuple[int, int, int]) -> None:
        with self._lock:
            self._parsed[digest] = manifest
            self._files[digest] = (file, time.monotonic())
            self._parsed.move_to_end(digest)
            while len(self._parsed) > KEPT:
                self._files.pop(self._parsed.popitem(last=False)[0], None)
            for place in [place for place in self._shards if place[0] == digest]:
                del self._shards[place]

    def manifest_bytes(self, digest: str) -> bytes:
        """The manifest file. Raises ``UnknownDataset`` when it is not in the folder."""
        return self._read(self._manifests / (_hex(digest) + ".parquet"), f"manifest {digest}")

    def has_manifest(self, digest: str, locations: str = "") -> bool:
        """Whether the manifest is there, with shards at these ``locations`` ("": anywhere)."""
        if not (self._manifests / (_hex(digest) + ".parquet")).exists():
            return False
        return not locations or self.manifest(digest).locations == locations

    def store_manifest(self, digest: str, data: bytes) -> Manifest:
        """Keep a manifest file. The same digest with other locations replaces it: the data was moved.

        Raises:
            ProtocolError: no manifest, or one of another digest.
        """
        manifest = _parse(data, digest)
        place = self._manifests / (_hex(digest) + ".parquet")
        before = self._told(digest)
        if before is not None and before.locations != manifest.locations:
            log.warning(
                "the shards of manifest %s are read from new places from now on, by all datasets and jobs of this content: "
                "%s instead of %s",
                digest, _first(manifest), _first(before),
            )  # fmt: skip
        self._write(place, data)
        self._keep(digest, manifest, self._file(digest))
        return manifest

    def _told(self, digest: str) -> Manifest | None:
        """The manifest that is there, None if there is none or it is damaged."""
        try:
            return self.manifest(digest)
        except FeedlineError:
            return None

    # -- what the core looks up

    def shard(self, digest: str, ordinal: int) -> ShardInfo | None:
        place = (digest, ordinal)
        found = self._shards.get(place)
        if found is not None:
            return found
        manifest = self.manifest(digest)
        shards = manifest.shards
        if not 0 <= ordinal < len(shards):
            return None
        info = ShardInfo(ordinal, *shards.values(ordinal), first_id=manifest.first_ids.item(ordinal))
        with self._lock:
            self._shards[place] = info
            while len(self._shards) > KEPT_SHARDS:
                self._shards.popitem(last=False)
        return info

    def shard_rows(self, digest: str) -> npt.NDArray[np.int64]:
        return self.manifest(digest).shard_rows

    def plan(self, digest: str, seed: int, epoch: int, shuffle: Shuffle | None) -> ShardOrder:
        """See ``Library``. The first time takes 0.2 s for 1,000,000 shards, so call it once beside the driver's thread."""
        name = (digest, seed, epoch, shuffle is not None)
        found = self._order(name)
        if found is not None:
            return found
        with self._ordering:
            found = self._order(name)
            if found is None:
                found = ShardOrder(self.shard_rows(digest), seed, epoch, shuffle)
                with self._lock:
                    self._orders[name] = found
                    while len(self._orders) > KEPT_ORDERS:
                        self._orders.popitem(last=False)
        return found

    def _order(self, name: tuple[str, int, int, bool]) -> ShardOrder | None:
        with self._lock:
            found = self._orders.get(name)
            if found is not None:
                self._orders.move_to_end(name)
            return found

    # -- blobs

    def put_blob(self, digest: str, data: bytes) -> None:
        """Keep a blob. Raises ``ProtocolError`` when the digest is not that of the data, or it is too large."""
        if len(data) > MAX_BLOB:
            raise ProtocolError(f"blob {digest} of {len(data)} bytes", cause=f"the limit is {MAX_BLOB}")
        if digest_of(data) != digest:
            raise ProtocolError(f"blob {digest} was altered on the way", cause=f"its digest is {digest_of(data)}")
        place = self._blobs / _hex(digest)
        if not place.exists():
            self._write(place, data)

    def get_blob(self, digest: str) -> bytes:
        """The blob. Raises ``UnknownDataset`` when it is not in the folder."""
        return self._read(self._blobs / _hex(digest), f"blob {digest}")

    def has_blob(self, digest: str) -> bool:
        return (self._blobs / _hex(digest)).exists()

    # -- files

    def _read(self, place: Path, what: str) -> bytes:
        try:
            return place.read_bytes()
        except FileNotFoundError:
            raise UnknownDataset(
                f"the dispatcher's store has no {what}",
                remedy="register the manifest again, or point --store at the folder of the other dispatcher",
            ) from None
        except OSError as error:
            raise ConfigError(f"cannot read {what} in {place}", cause=error.strerror or str(error)) from None

    def _write(self, place: Path, data: bytes) -> None:
        try:
            handle, name = tempfile.mkstemp(dir=place.parent, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(name, place)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
                raise
            folder = os.open(place.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise ConfigError(f"cannot write {place}", cause=error.strerror or str(error)) from None


def _first(manifest: Manifest) -> str:
    return str(manifest.shards[0].uri) if len(manifest.shards) else "nowhere"


def _hex(digest: str) -> str:
    found = _DIGEST.match(digest)
    if not found:
        raise ProtocolError(f"{digest[:100]!r} is not a digest", cause="expected sha256: and 64 hex digits")
    return found[1]


def _parse(data: bytes, digest: str) -> Manifest:
    try:
        manifest = Manifest.from_bytes(data)
    except FeedlineError as error:
        raise ProtocolError(f"manifest {digest} cannot be read", cause=str(error)) from None
    if manifest.digest != digest:
        raise ProtocolError(f"manifest {digest} was altered on the way", cause=f"its digest is {manifest.digest}")
    return manifest
