"""Builds manifests: finds the shards, counts their rows, finds their fields and hashes their bytes in one pass."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

from .errors import ConfigError
from .identity import check_name
from .manifest import Manifest, Shard
from .scan import RESERVED, SCANNERS, Note
from .scan.folder import FolderBytes, cut, folder_uri, walk_folder
from .scan.local import HashingBytes, LocalBytes, Source, uri_of
from .scan.naming import Split, text_of
from .scan.tar_headers import BLOCK, checksum_ok
from .schema import Field
from .sources import ENDINGS, Found, ending_format, find, foreign

#: bytes done, bytes in all
Progress = Callable[[int, int], None]
Path = str | os.PathLike[str]

#: formats a user may ask for
FORMATS = ("tar", "folder", "arrow")
#: more fields than this are a naming mistake
MOST_FIELDS = 1000
#: shards scanned and hashed at once; each holds one chunk of a few MiB
_AT_ONCE = 4


class _Job(NamedTuple):
    """One shard to scan."""

    uri: str
    what: str  # name for messages
    format: str
    size: int
    open: Callable[[], Source]


class _Result(NamedTuple):
    """What stays of a scan; its index is not kept."""

    job: _Job
    rows: int
    fields: tuple[Field, ...]
    notes: tuple[Note, ...]
    size: int
    content_id: str


def build(
    src: Path | Iterable[Path],
    *,
    name: str,
    version: str,
    format: str | None = None,
    fast_id: bool = False,
    split: Split = "first",
    labels: Mapping[str, Mapping[str, int]] | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """The manifest of what is stored at ``src``.

    Args:
        src: a file, a folder, a glob, a brace range such as ``shard-{0000..0009}.tar``, or a list of them. A folder
            means its ``.tar``, or its ``.arrow``, ``.ipc`` and ``.feather`` files, or else an image folder.
        name, version: what to register it as.
        format: "tar", "folder" or "arrow"; None: found out.
        fast_id: take size and mtime for a shard's content id instead of hashing its bytes.
        split: tar member names are cut into key and field at the "first" or "last" dot of the base name.
        labels: label maps of another split of the same data; for image folders the class numbers to use.
        progress: called with bytes done and bytes in all, on the calling thread.

    Returns:
        The manifest; ``warnings`` names empty, cut and damaged shards and what was left out.

    Raises:
        ShardMissing: shards that are not there (all of them named), or cannot be read.
        ShardChanged: a shard was written to while it was read.
        ConfigError: no rows, mixed or unknown formats, fields that do not fit together.
    """
    check_name(name, "dataset name")
    check_name(version, "version")
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format {format!r} is not known", remedy=f"use one of {', '.join(FORMATS)}")
    if split not in ("first", "last"):
        raise ConfigError(f"split {split!r} is not known", remedy='use "first" or "last"')
    found = find(src, format)
    warnings = list(found.remarks)
    maps: dict[str, dict[str, int]] = {field: dict(numbers) for field, numbers in (labels or {}).items()}
    if found.folder:
        jobs, maps = _folder_jobs(found.folder, maps, warnings)
    else:
        jobs = _file_jobs(found, format, split)
    results = list(_scanned(jobs, fast_id, progress))
    for result in results:
        _judge(result, warnings)
    rows = sum(r.rows for r in results)
    if not rows:
        shown = _source_name(src)
        raise ConfigError(f"no samples in {shown}", cause="; ".join(warnings[:5]) or f"{len(results)} shards are empty")
    shards = [Shard(at, r.job.uri, r.job.format, r.rows, r.size, r.content_id) for at, r in enumerate(results)]
    return Manifest.from_shards(name, version, _unified(results), shards, maps, warnings)


# -- what to scan ------------------------------------------------------------------------------------------------------


def _file_jobs(found: Found, format: str | None, split: Split) -> list[_Job]:
    kinds: dict[str, str] = {}
    jobs = []
    for path in found.files:
        kind = format or _detect(path)
        kinds.setdefault(kind, path)
        if len(kinds) > 1:
            one, other = list(kinds.items())[:2]
            cause = f"{one[1]} is {one[0]}, {other[1]} is {other[0]}"
            raise ConfigError("shards of different formats", cause=cause, remedy="build one manifest of each")
        stored = "tar-last" if kind == "tar" and split == "last" else kind
        jobs.append(_Job(uri_of(path), path, stored, os.stat(path).st_size, lambda path=path: LocalBytes(path)))  # type: ignore[misc]
    return jobs


def _detect(path: str) -> str:
    """Format by content, by name where the content is empty."""
    with LocalBytes(path) as file:
        head = bytes(file.read(0, BLOCK))
    if head.startswith(b"ARROW1"):
        return "arrow"
    if len(head) == BLOCK and any(head) and checksum_ok(head):
        return "tar"
    if kind := ending_format(path):
        return kind  # empty, or damaged: the scanner says which
    known = f"files end in {', '.join(ENDINGS)}"
    raise ConfigError(
        f"{path} is of no known format", cause=foreign(path) or known, remedy="name the format if you know it"
    )


def _folder_jobs(
    root: str, maps: dict[str, dict[str, int]], warnings: list[str]
) -> tuple[list[_Job], dict[str, dict[str, int]]]:
    files, classes, others = walk_folder(root)
    if others:
        warnings.append(f"{len(others)} files in {root} are no pictures, such as {text_of(others[0])}")
    if not files:
        raise ConfigError(f"no samples in {root}", cause="it has neither shards nor pictures")
    given = maps.get("label")
    names = [text_of(c) for c in classes]
    if given is None:
        if names:
            maps["label"] = {c: number for number, c in enumerate(sorted(names))}
    elif unknown := sorted({text_of(f.parts[0]) for f in files if len(f.parts) > 1} - set(given)):
        raise ConfigError(f"class folders {', '.join(unknown[:10])} are not in the label map given")
    loose = sum(len(f.parts) == 1 for f in files)
    if 0 < loose < len(files):
        warnings.append(f"{loose} pictures lie in {root} itself and have no label")
    jobs = []
    for part in cut(files):
        uri = folder_uri(root, part[0].name, part[-1].name)
        size = sum(f.size for f in part)
        jobs.append(_Job(uri, uri, "folder", size, lambda part=part, uri=uri: FolderBytes(root, part, uri)))  # type: ignore[misc]
    return jobs, maps


# -- scanning ----------------------------------------------------------------------------------------------------------


class _Stopped(Exception):
    """Ends a scan whose result nobody waits for any more."""


def _scanned(jobs: list[_Job], fast_id: bool, progress: Progress | None) -> Iterator[_Result]:
    """Results in order of the jobs; a few shards are scanned at once, on threads that end with the iteration."""
    total, done, stopped = sum(job.size for job in jobs), 0, False
    hashed: list[int] = []  # bytes done since progress was last called; append and pop are atomic

    def advanced(size: int) -> None:
        if stopped:
            raise _Stopped
        hashed.append(size)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="manifest-scan") as pool:
        source = iter(jobs)
        waiting = deque(
            pool.submit(_scan_one, job, fast_id, advanced) for job in itertools.islice(source, 2 * _AT_ONCE)
        )
        try:
            while waiting:
                while not wait([waiting[0]], timeout=0.1 if progress else None).done:
                    while hashed:
                        done += hashed.pop()
                    if progress:
                        progress(min(done, total), total)
                result = waiting.popleft().result()
                for job in itertools.islice(source, 1):
                    waiting.append(pool.submit(_scan_one, job, fast_id, advanced))
                yield result
            if progress:
                progress(total, total)
        finally:
            stopped = True
            for future in waiting:
                future.cancel()


def _scan_one(job: _Job, fast_id: bool, progress: Callable[[int], None]) -> _Result:
    source = job.open()
    try:
        scanner = SCANNERS[job.format]
        if fast_id:
            found, content_id = scanner(source), source.etag
            progress(source.size)
        else:
            hashing = HashingBytes(source, progress)
            found = scanner(hashing)
            content_id = hashing.content_id()
        source.check_unchanged()
        return _Result(job, found.index.rows, found.fields, found.notes, source.size, content_id)
    finally:
        source.close()


# -- judging -----------------------------------------------------------------------------------------------------------


def _judge(result: _Result, warnings: list[str]) -> None:
    """Turn a scan's notes into warnings, or raise for those a manifest cannot be built with."""
    what = result.job.what
    for note in result.notes:
        if note.kind == "not-this-format":
            raise ConfigError(f"{what} is not {result.job.format.removesuffix('-last')}", cause=note.text)
        if note.kind == "unsupported":
            raise ConfigError(f"{what} cannot be used", cause=note.text)
        lost = f" ({note.lost} sample dropped)" if note.lost else ""
        warnings.append(f"{what}: {note.text}{lost}")
    if not result.rows:
        warnings.append(f"{what} has no samples")
    for field in result.fields:
        if field.name in RESERVED:
            raise ConfigError(f"{what} has a field {field.name!r}", cause="batches use that name themselves")


def _unified(results: list[_Result]) -> tuple[Field, ...]:
    """One schema for all shards: a field that some rows lack is nullable."""
    seen: dict[str, tuple[Field, str]] = {}
    count: dict[str, int] = {}
    shards = 0
    for result in results:
        if not result.rows:
            continue
        shards += 1
        for field in result.fields:
            count[field.name] = count.get(field.name, 0) + 1
            if field.name not in seen:
                seen[field.name] = (field, result.job.what)
                continue
            have, where = seen[field.name]
            if _type(have) != _type(field):
                cause = f"{_shown(have)} in {where}, {_shown(field)} in {result.job.what}"
                raise ConfigError(f"field {field.name!r} has two types", cause=cause, remedy="rewrite one of them")
            if field.nullable and not have.nullable:
                seen[field.name] = (field, where)
        if len(seen) > MOST_FIELDS:
            some = ", ".join(repr(n) for n in list(seen)[-3:])
            raise ConfigError(
                f"more than {MOST_FIELDS} different fields, such as {some}",
                cause="a field is what follows the first dot of a member's base name",
                remedy='use split="last" (--split last) if keys have dots in them',
            )
    fields = [
        Field(
            name=f.name,
            kind=f.kind,
            dtype=f.dtype,
            shape=f.shape,
            ndim=f.ndim,
            nullable=f.nullable or count[n] < shards,
        )
        for n, (f, _) in seen.items()
    ]
    return tuple(sorted(fields, key=lambda f: (f.name == "__key__", f.name)))


def _type(field: Field) -> tuple[object, ...]:
    return field.kind, field.dtype, field.shape, field.ndim


def _shown(field: Field) -> str:
    shape = f"[{', '.join(map(str, field.shape))}]" if field.shape else ""
    return f"{field.kind} {field.dtype}{shape}".strip()


def _source_name(src: Path | Iterable[Path]) -> str:
    return os.fspath(src) if isinstance(src, (str, os.PathLike)) else "the list of shards"
