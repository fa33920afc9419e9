"""Compares a manifest with the storage (``verify``) and with another manifest (``diff``)."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from .errors import ConfigError, FeedlineError
from .manifest import Manifest, Shard
from .scan.folder import open_folder_shard
from .scan.local import HashingBytes, LocalBytes, Source, path_of


class Problem(msgspec.Struct, frozen=True):
    """One shard that is not as the manifest says."""

    ordinal: int
    uri: str
    what: Literal["missing", "size", "content"]
    detail: str


class Part(msgspec.Struct, frozen=True):
    """Some shards of a diff, summed."""

    shards: int = 0
    rows: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Diff:
    """What ``b`` has that ``a`` had not, and so on. ``changed`` (other content at the same place) counts what ``b``
    has there; it is part of neither ``added`` nor ``removed``."""

    added: Part
    removed: Part
    changed: Part
    shared: Part
    #: fields and label maps that differ, in words
    schema: tuple[str, ...]


def open_shard(uri: str) -> Source:
    """The shard at a local uri, as ``Bytes``.

    Raises:
        ShardMissing: it is not there. ConfigError: a uri of another scheme.
    """
    scheme = urlsplit(uri).scheme
    return open_folder_shard(uri) if scheme == "folder" else LocalBytes(path_of(uri))


def verify(
    manifest: Manifest, content: bool = False, progress: Callable[[int, int], None] | None = None
) -> list[Problem]:
    """Shards that are missing or have another size; with ``content`` also those with other bytes.

    ``progress`` is called with shards done and shards in all.
    """
    problems = []
    for shard in manifest.shards:
        problem = _check(shard, content)
        if problem:
            problems.append(problem)
        if progress:
            progress(shard.ordinal + 1, len(manifest.shards))
    return problems


def _check(shard: Shard, content: bool) -> Problem | None:
    try:
        source = open_shard(shard.uri)
    except ConfigError:
        raise
    except FeedlineError as error:
        return Problem(shard.ordinal, shard.uri, "missing", error.cause or error.message)
    try:
        if source.size != shard.bytes:
            return Problem(
                shard.ordinal, shard.uri, "size", f"it has {source.size} bytes, the manifest says {shard.bytes}"
            )
        if content and (found := content_id_of(source, shard.content_id)) != shard.content_id:
            return Problem(shard.ordinal, shard.uri, "content", f"it has {found}, the manifest says {shard.content_id}")
    except FeedlineError as error:
        return Problem(shard.ordinal, shard.uri, "content", str(error))
    finally:
        source.close()
    return None


def content_id_of(source: Source, like: str) -> str:
    """Content id of ``source``, of the kind that ``like`` is."""
    kind = like.partition(":")[0]
    if kind == "etag":
        return source.etag
    return HashingBytes(source, kind=kind).content_id()


def diff(a: Manifest, b: Manifest) -> Diff:
    """How ``b`` differs from ``a``. Shards are the same if their content ids and formats are, wherever they lie."""
    left, right = list(a.shards), list(b.shards)
    common = Counter(map(_identity, left)) & Counter(map(_identity, right))
    shared, gone = _split(left, Counter(common))
    _, new = _split(right, Counter(common))
    place_a, place_b = _places(a), _places(b)
    vacated = Counter(place_a(s) for s in gone)
    changed: list[Shard] = []
    added: list[Shard] = []
    for shard in new:
        place = place_b(shard)
        if vacated[place] > 0:
            vacated[place] -= 1
            changed.append(shard)
        else:
            added.append(shard)
    removed = []
    for shard in reversed(gone):
        place = place_a(shard)
        if vacated[place] > 0:
            vacated[place] -= 1
            removed.append(shard)
    return Diff(_sum(added), _sum(removed), _sum(changed), _sum(shared), tuple(_schema_changes(a, b)))


def _identity(shard: Shard) -> tuple[str, str]:
    return shard.format, shard.content_id


def _split(shards: list[Shard], common: Counter[tuple[str, str]]) -> tuple[list[Shard], list[Shard]]:
    inside, outside = [], []
    for shard in shards:
        if common[_identity(shard)] > 0:
            common[_identity(shard)] -= 1
            inside.append(shard)
        else:
            outside.append(shard)
    return inside, outside


def _places(manifest: Manifest) -> Callable[[Shard], str]:
    """Place of a shard inside its dataset: its uri without the folder that all shards of the manifest share; of a
    virtual shard the file it begins with."""
    folders = [posixpath.dirname(urlsplit(uri).path) for uri in manifest.table["uri"].to_pylist()]
    shared = posixpath.commonpath([min(folders), max(folders)]) if folders else ""

    def place(shard: Shard) -> str:
        parts = urlsplit(shard.uri)
        return parts.query.partition("&last=")[0] or posixpath.relpath(parts.path, shared or "/")

    return place


def _sum(shards: list[Shard]) -> Part:
    return Part(len(shards), sum(s.rows for s in shards), sum(s.bytes for s in shards))


def _schema_changes(a: Manifest, b: Manifest) -> Iterator[str]:
    left, right = {f.name: f for f in a.fields}, {f.name: f for f in b.fields}
    for name in sorted(left.keys() | right.keys()):
        if name not in right:
            yield f"field {name!r} removed"
        elif name not in left:
            yield f"field {name!r} added"
        elif left[name] != right[name]:
            yield f"field {name!r} changed"
    if a.labels != b.labels:
        yield "label maps differ"


__all__ = ["Diff", "Part", "Problem", "content_id_of", "diff", "open_shard", "verify"]
