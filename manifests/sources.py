"""From what a user names (file, folder, glob, brace range, list) to the ordered list of stored files."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from urllib.parse import unquote

from .errors import ConfigError, ShardMissing
from .scan.local import storage_error

#: file name ending (lower case) -> format
ENDINGS = {".tar": "tar", ".arrow": "arrow", ".ipc": "arrow", ".feather": "arrow"}
#: endings that tell that a file is data of a kind that cannot be read
_FOREIGN = {
    ".tgz": "compressed tar has no random access: unpack it to .tar",
    ".gz": "compressed files have no random access: unpack them",
    ".bz2": "compressed files have no random access: unpack them",
    ".xz": "compressed files have no random access: unpack them",
    ".zst": "compressed files have no random access: unpack them",
}
_RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)\Z")
#: most names a brace expression may stand for
_MOST = 10_000_000


class Found(NamedTuple):
    """What a source stands for: files in order, or one image folder; and remarks for the user."""

    files: list[str]
    folder: str = ""
    remarks: tuple[str, ...] = ()


def find(src: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], format: str | None) -> Found:
    """Resolve ``src``. Folders and patterns give natural order (``x-2`` before ``x-10``), a list keeps its own.

    Raises:
        ShardMissing: files that are not there, all of them listed in one error.
        ConfigError: nothing matches, or a folder cannot be listed.
    """
    if isinstance(src, (str, os.PathLike)):
        return _find_one(os.fspath(src), format)
    files: list[str] = []
    remarks: list[str] = []
    missing: list[str] = []
    parts = [os.fspath(part) for part in src]
    for part in parts:
        if os.path.isdir(part) and len(parts) > 1 and format == "folder":
            raise ConfigError("several image folders", cause=", ".join(parts[:3]), remedy="build one manifest of each")
        try:
            found = _find_one(part, format)
        except ShardMissing as error:
            missing += error.detail.get("missing", [part])
            continue
        if found.folder:
            if len(parts) == 1:
                return found
            raise ConfigError(f"{part} is an image folder in a list", remedy="build one manifest of each image folder")
        files += found.files
        remarks += found.remarks
    if missing:
        raise _missing(missing)
    if not files:
        raise ConfigError("no shards: the list is empty")
    if twice := [name for name, count in Counter(files).items() if count > 1]:
        remarks.append(f"{len(twice)} files are named twice and count twice, such as {twice[0]}")
    return Found(files, "", tuple(remarks))


def _find_one(src: str, format: str | None) -> Found:
    scheme, separator, rest = src.partition("://")
    if separator and scheme == "file":
        src = unquote(rest)
    elif separator:
        raise ConfigError(
            f"{src} is on a storage that cannot be read",
            cause=f"{scheme}:// comes in a later release",
            remedy="give a local or NFS path",
        )
    if os.path.isdir(src):
        return _in_folder(src, format)
    if _is_there(src):
        return Found([src])
    files: list[str] = []
    missing: list[str] = []
    for name in braces(src):
        if _is_there(name):
            files.append(name)
        elif not glob.has_magic(name):
            missing.append(name)
        elif matched := sorted(_matching(name), key=natural):
            files += matched
        else:
            raise ConfigError(f"nothing matches {name}", remedy="check the pattern, and quote it for the shell")
    if missing:
        raise _missing(missing)
    folders = [f for f in files if os.path.isdir(f)]
    if folders:
        raise ConfigError(f"{src} matches folders, such as {folders[0]}", remedy="name files, or one folder")
    return Found(files)


def _matching(pattern: str) -> Iterator[str]:
    """Paths that match a glob. Unlike ``glob.glob`` a folder that cannot be listed is an error, not "no files"."""
    folder, base = os.path.split(pattern)
    if base == "**":
        raise ConfigError(f"pattern {pattern} matches whole trees", remedy="name the folders: a/*/x.tar")
    above = _matching(folder) if glob.has_magic(folder) else [folder]
    for path in above:
        if not glob.has_magic(base):
            if _is_there(os.path.join(path, base)):
                yield os.path.join(path, base)
            continue
        if not os.path.isdir(path or "."):
            continue
        for name in _listed(path or "."):
            if fnmatch.fnmatchcase(name, base) and (base.startswith(".") or not name.startswith(".")):
                yield os.path.join(path, name)


def _is_there(path: str) -> bool:
    """False only if there is certainly nothing: a folder on the way that may not be entered is an error."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be looked at", cause=error.strerror or "", remedy="check permissions"
        ) from None
    return True


def _listed(folder: str, files_only: bool = False) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [e.name for e in entries if not (files_only and e.is_dir())]
    except OSError as error:
        cause = storage_error(folder, error).cause
        raise ConfigError(f"folder {folder} cannot be listed", cause=cause, remedy="check its permissions") from None


def _in_folder(src: str, format: str | None) -> Found:
    """The shards in a folder (not below it), or the folder itself as an image folder."""
    names = sorted((n for n in _listed(src, files_only=True) if not n.startswith(".")), key=natural)
    if format == "folder":
        return Found([], src)
    base = (format or "").removesuffix("-last")
    chosen = [n for n in names if (kind := ending_format(n)) and (not base or kind == base)]
    if chosen:
        rest = [n for n in names if n not in set(chosen)]
        remarks = (f"{len(rest)} files in {src} are no shards, such as {rest[0]}",) if rest else ()
        return Found([os.path.join(src, n) for n in chosen], "", remarks)
    if base:
        endings = ", ".join(e for e, f in ENDINGS.items() if f == base)
        raise ConfigError(f"no {base} shards in {src}", cause=f"no file there ends in {endings}")
    packed = [n for n in names if foreign(n)]
    if packed:
        raise ConfigError(f"{os.path.join(src, packed[0])} cannot be read", cause=foreign(packed[0]))
    return Found([], src)


def ending_format(name: str) -> str:
    """Format told by a file name's ending, "" if it tells none."""
    return ENDINGS.get(os.path.splitext(name)[1].lower(), "")


def foreign(name: str) -> str:
    """Why a file of this name cannot be read, "" if the name tells nothing."""
    return _FOREIGN.get(os.path.splitext(name)[1].lower(), "")


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that compares runs of digits as numbers; names that differ only in leading zeros keep an order."""
    parts = re.split(r"([0-9]+)", name)
    return (*((1, int(p), "") if i % 2 else (0, 0, p) for i, p in enumerate(parts)), (0, 0, name))


def braces(text: str) -> Iterator[str]:
    """Shell brace expansion: ``{a,b}``, ``{1..9}``, ``{0000..0009}`` (zero-padded); several multiply.

    >>> list(braces("s-{08..10}.tar"))
    ['s-08.tar', 's-09.tar', 's-10.tar']
    """
    for name in _expanded(text):
        yield name.replace("\0", "{").replace("\1", "}")


def _expanded(text: str) -> Iterator[str]:
    """``text`` with its first innermost braces expanded, then the rest; braces that mean nothing become \\0 and \\1."""
    found = re.search(r"\{([^{}]*)\}", text)
    if not found:
        yield text
        return
    choices: Iterable[str]
    if numbers := _RANGE.match(found[1]):
        low, high = int(numbers[1]), int(numbers[2])
        if abs(high - low) >= _MOST:
            raise ConfigError(f"{text} stands for {abs(high - low) + 1} names", cause=f"the limit is {_MOST}")
        padded = any(n.lstrip("-").startswith("0") and len(n.lstrip("-")) > 1 for n in numbers.groups())
        width = max(len(numbers[1]), len(numbers[2])) if padded else 0
        step = 1 if high >= low else -1
        choices = (f"{n:0{width}d}" for n in range(low, high + step, step))
    elif "," in found[1]:
        choices = found[1].split(",")
    else:
        choices = (f"\0{found[1]}\1",)
    for choice in choices:
        yield from _expanded(text[: found.start()] + choice + text[found.end() :])


def _missing(names: list[str]) -> ShardMissing:
    return ShardMissing(
        "1 shard is missing" if len(names) == 1 else f"{len(names)} shards are missing",
        cause=", ".join(names[:1000]) + (f" and {len(names) - 1000} more" if len(names) > 1000 else ""),
        remedy="restore them or name only those that are there",
        detail={"missing": names},
    )
