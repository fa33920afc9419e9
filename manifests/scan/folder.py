"""Image folder: ``ROOT/class/.../file`` as virtual shards.

A virtual shard is a range of the folder's files. Its bytes are a listing (relative names and sizes) followed by the
bytes of the files, so that it can be cached, hashed and read in ranges like any stored shard:

    FLDIR1\\0\\0 | length of the listing, u64 little-endian | listing, MessagePack [[name, size], ..] | file bytes ..

Its uri names the root and the first and last file of the range, ``folder:///ROOT?first=a/1.png&last=b/7.png``. Where
ranges end depends on the names and sizes nearby only, so a file more or less changes the one shard it is in.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple
from urllib.parse import parse_qs, urlsplit

import msgspec
import numpy as np
import pyarrow as pa
from blake3 import blake3

from ..errors import ConfigError, ShardChanged, ShardMissing
from ..identity import stream_key
from ..schema import Field
from .local import quoted, storage_error, unquoted
from .naming import KEY_FIELD, text_of
from .port import I64, Bytes, Note, Scan

MAGIC = b"FLDIR1\0\0"
#: file name endings that are taken for pictures (compared in lower case)
PICTURES = frozenset(
    (".bmp", ".dib", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif",
     ".tiff", ".webp", ".avif")
)  # fmt: skip
#: a shard is never cut below this many files, on average about 4 times this, never above 8 times
FEWEST = 250
#: about this many bytes per shard, and never above twice as many
TARGET = 64 << 20


_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class PictureFile(NamedTuple):
    """One file: its parts below the root, size in bytes, mtime in ns."""

    parts: tuple[str, ...]
    size: int
    mtime_ns: int

    @property
    def name(self) -> str:
        return "/".join(self.parts)


class Folder(NamedTuple):
    """What a walk over an image folder found: pictures in order, class names, and files that are no pictures."""

    files: list[PictureFile]
    classes: list[str]
    others: list[str]


def walk_folder(root: str, first: tuple[str, ...] = (), last: tuple[str, ...] | None = None) -> Folder:
    """Pictures under ``root`` from ``first`` to ``last`` (both included), ordered by their parts in code point order.

    Hidden files and folders are passed over. Links to folders are followed unless they lead back to a folder above.

    Raises:
        ShardMissing: the folder, or one in it, cannot be read.
    """
    found = Folder([], [], [])
    _walk(root, (), first, last, found, (os.path.realpath(root),))
    found.files.sort()
    return found


def _walk(
    root: str,
    parts: tuple[str, ...],
    first: tuple[str, ...],
    last: tuple[str, ...] | None,
    found: Folder,
    above: tuple[str, ...],
) -> None:
    depth = len(parts)
    path = os.path.join(root, *parts)
    try:
        with os.scandir(path) as entries:
            listed = sorted(entries, key=lambda e: e.name)
        for entry in listed:
            name = (*parts, entry.name)
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                if depth == 0:
                    found.classes.append(entry.name)
                # a folder holds names of the range only if its own parts lie between those of first and last
                if first[: depth + 1] > name or (last is not None and last[: depth + 1] < name):
                    continue
                real = os.path.realpath(entry.path)
                if real not in above:
                    _walk(root, name, first, last, found, (*above, real))
            elif name < first or (last is not None and name > last):
                continue
            elif os.path.splitext(entry.name)[1].lower() in PICTURES and entry.is_file():
                stat = entry.stat()
                found.files.append(PictureFile(name, stat.st_size, stat.st_mtime_ns))
            else:
                found.others.append("/".join(name))
    except OSError as error:
        raise storage_error(path, error) from None


def cut(files: Sequence[PictureFile]) -> Iterator[Sequence[PictureFile]]:
    """Ranges of about 1,000 files or 64 MiB.

    A range ends before a file whose name hashes below a threshold (larger for large files), so ranges further on stay
    the same when a file is added or removed.
    """
    start, size = 0, 0
    for at, file in enumerate(files):
        count = at - start
        if count:
            draw = stream_key("folder-cut", *_words(file.name)) / 2.0**64
            wanted = max(1 / (3 * FEWEST), file.size / (0.75 * TARGET))
            enough = count >= FEWEST or size >= TARGET // 4
            if count >= 8 * FEWEST or size + file.size > 2 * TARGET or (enough and draw < wanted):
                yield files[start:at]
                start, size = at, 0
        size += file.size
    if start < len(files):
        yield files[start:]


def _words(name: str) -> Iterable[int]:
    data = os.fsencode(name)
    data += bytes(-len(data) % 8)
    return struct.unpack(f"<{len(data) // 8}Q", data)


def folder_uri(root: str, first: str, last: str) -> str:
    """Uri of the virtual shard from ``first`` to ``last`` (relative names)."""
    return f"folder://{quoted(os.path.abspath(root))}?first={quoted(first)}&last={quoted(last)}"


def open_folder_shard(uri: str) -> FolderBytes:
    """The virtual shard ``uri`` as it is on disk now.

    Raises:
        ConfigError: not a folder uri. ShardMissing: nothing of it is left, or it cannot be read.
    """
    parts = urlsplit(uri)
    query = parse_qs(parts.query, keep_blank_values=True, errors="surrogateescape")
    if parts.scheme != "folder" or parts.netloc or set(query) != {"first", "last"}:
        raise ConfigError(f"uri {uri!r} is not an image folder shard")
    root = unquoted(parts.path)
    first, last = (tuple(query[end][0].split("/")) for end in ("first", "last"))
    files = walk_folder(root, first, last).files
    if not files:
        raise ShardMissing(f"{uri} is missing", cause="the folder has no picture of this range any more")
    return FolderBytes(root, files, uri)


class FolderBytes:
    """A virtual shard as ``Bytes``. Files are opened on demand, one at a time per thread; nothing is kept open."""

    def __init__(self, root: str, files: Sequence[PictureFile], name: str = "") -> None:
        self.name = name or root
        self._root = root
        self._files = files
        listing = msgspec.msgpack.encode([(os.fsencode(f.name), f.size) for f in files])
        self._head = MAGIC + struct.pack("<Q", len(listing)) + listing
        self._ends = len(self._head) + np.cumsum([f.size for f in files], dtype=np.int64)
        self.size = int(self._ends[-1]) if len(files) else len(self._head)

    def __repr__(self) -> str:
        return f"FolderBytes({self.name}, {len(self._files)} files, {self.size} bytes)"

    @property
    def etag(self) -> str:
        """``etag:`` over names, sizes and mtimes of the files."""
        stamps = msgspec.msgpack.encode([(os.fsencode(f.name), f.size, f.mtime_ns) for f in self._files])
        return f"etag:{self.size}-{blake3(stamps).hexdigest(length=16)}"

    def read(self, offset: int, length: int) -> memoryview:
        end = min(offset + length, self.size)
        parts: list[bytes] = []
        if offset < len(self._head):
            parts.append(self._head[offset:end])
            offset = min(len(self._head), end)
        at = int(np.searchsorted(self._ends, offset, side="right"))
        while offset < end:
            file = self._files[at]
            begin = int(self._ends[at]) - file.size
            want = min(end, begin + file.size) - offset
            if want:
                parts.append(self._pread(file, offset - begin, want))
            offset += want
            at += 1
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))

    def _pread(self, file: PictureFile, offset: int, length: int) -> bytes:
        path = os.path.join(self._root, *file.parts)
        try:
            with open(path, "rb", buffering=0) as opened:
                data = os.pread(opened.fileno(), length, offset)
                size = os.fstat(opened.fileno()).st_size
        except OSError as error:
            raise storage_error(path, error) from None
        if size != file.size or len(data) != length:
            raise ShardChanged(
                f"{path} changed",
                cause=f"it has {size} bytes, {file.size} when its folder was listed",
                remedy="build the manifest again",
            )
        return data

    def check_unchanged(self) -> None:
        """Nothing to do: each read compares the file's size."""

    def close(self) -> None:
        """Nothing is kept open."""


@dataclass(frozen=True, slots=True)
class FolderIndex:
    """Where each file's bytes begin in the virtual shard, and how long they are."""

    #: relative names, large_utf8 [rows], valid UTF-8
    keys: pa.Array
    offsets: I64
    sizes: I64

    @property
    def rows(self) -> int:
        return len(self.offsets)

    @property
    def nbytes(self) -> int:
        return int(self.keys.nbytes + self.offsets.nbytes + self.sizes.nbytes)


def scan_folder(source: Bytes) -> Scan:
    """Index one virtual shard from its listing. ``label`` is a field if a file of it lies in a class folder."""
    head = bytes(source.read(0, 16))
    length = struct.unpack("<Q", head[8:])[0] if len(head) == 16 else 0
    if head[:8] != MAGIC or length > source.size - 16:
        return _empty(Note("not-this-format", "it is not the listing of an image folder", 0))
    try:
        listing = msgspec.msgpack.decode(source.read(16, length), type=list[tuple[bytes, _Size]])
    except msgspec.MsgspecError as error:
        return _empty(Note("not-this-format", f"its listing cannot be read: {error}", 16))
    sizes = np.array([size for _, size in listing], np.int64)
    ends = 16 + length + np.cumsum(sizes)
    if len(sizes) and int(ends[-1]) != source.size:
        return _empty(Note("not-this-format", "its listing does not fit its size", 16))
    keys = [text_of(os.fsdecode(name)) for name, _ in listing]
    index = FolderIndex(pa.array(keys, pa.large_utf8()), ends - sizes, sizes)
    if not keys:
        return Scan(index, ())
    inside = sum("/" in key for key in keys)
    label = [Field(name="label", kind="scalar", dtype="int64", nullable=inside < len(keys))] if inside else []
    return Scan(index, (Field(name="image", kind="bytes"), *label, KEY_FIELD))


def _empty(note: Note) -> Scan:
    none = np.empty(0, np.int64)
    return Scan(FolderIndex(pa.array([], pa.large_utf8()), none, none), (), (note,))
