"""WebDataset tar: members with one key are one row, each member is a field."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..schema import Field
from .naming import KEY_FIELD, Split, split_name, tar_field, text_of
from .port import I32, I64, Bytes, Note, Scan
from .tar_headers import walk


@dataclass(frozen=True, slots=True)
class TarIndex:
    """Members row by row: those of row r are ``[starts[r], starts[r + 1])``, sorted by field."""

    #: large_utf8 [rows], valid UTF-8
    keys: pa.Array
    #: field names, sorted; ``member_field`` points into them
    names: tuple[str, ...]
    starts: I64
    member_field: I32
    #: where each member's data begin in the archive, and how long they are
    offsets: I64
    sizes: I64

    @property
    def rows(self) -> int:
        return len(self.starts) - 1

    @property
    def nbytes(self) -> int:
        arrays = (self.starts, self.member_field, self.offsets, self.sizes)
        return int(self.keys.nbytes) + sum(int(a.nbytes) for a in arrays)


class _Members:
    """Members as they come, before they are put in row order."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.fields: dict[str, int] = {}
        self.row, self.field = array("q"), array("i")
        self.offset, self.size = array("q"), array("q")

    def add(self, key: str, field: str, offset: int, size: int) -> None:
        self.row.append(self.rows.setdefault(key, len(self.rows)))
        self.field.append(self.fields.setdefault(field, len(self.fields)))
        self.offset.append(offset)
        self.size.append(size)


def scan_tar(source: Bytes, split: Split = "first") -> Scan:
    """Index one archive.

    Rows are in the order in which their keys first appear; parts of one key need not be neighbours. The last of two
    members with one name counts, as when tar extracts. A sample whose data were cut off is dropped as a whole.
    """
    found = _Members()
    notes: list[Note] = []
    ignored: list[str] = []
    dropped: str | None = None
    for entry in walk(source):
        if isinstance(entry, Note):
            notes.append(entry)
            continue
        part = split_name(entry.name, split) if entry.regular else None
        if part is None:
            if not entry.folder:
                ignored.append(entry.name)
        elif part[1] == KEY_FIELD.name:
            notes.append(Note("unsupported", f"member {entry.name!r} would be the field __key__", entry.header))
        elif entry.cut:
            dropped = part[0]
        else:
            found.add(*part, entry.offset, entry.size)
    if dropped is not None:
        notes[-1] = Note("cut", f"{notes[-1].text}: sample {text_of(dropped)!r} is dropped", notes[-1].offset, 1)
    elif notes and notes[-1].kind in ("cut", "unclosed", "damaged") and found.rows:
        last = text_of(next(reversed(found.rows)))
        notes[-1] = Note(notes[-1].kind, f"{notes[-1].text}; the last sample {last!r} may lack parts", notes[-1].offset)
    if ignored:
        notes.append(Note("ignored", f"{len(ignored)} members are no part of a sample{_some(ignored)}"))
    index, twice = _in_row_order(found, None if dropped is None else found.rows.get(dropped))
    if twice:
        notes.append(Note("duplicate", f"{len(twice)} members have a name twice, the last one counts{_some(twice)}"))
    return Scan(index, _fields(index), tuple(notes))


def tar_scanner(split: Split) -> Callable[[Bytes], Scan]:
    """The scanner for one naming rule."""
    return partial(scan_tar, split=split)


def _in_row_order(found: _Members, drop: int | None) -> tuple[TarIndex, list[str]]:
    """The index, and the names of members that come twice."""
    keys = list(found.rows)
    names = sorted(found.fields)
    rank = np.empty(len(names), np.int32)
    rank[[found.fields[name] for name in names]] = np.arange(len(names), dtype=np.int32)
    row = np.array(found.row, np.int64)
    field: npt.NDArray[np.int32] = rank[np.array(found.field, np.int64)] if len(names) else np.empty(0, np.int32)
    order = np.lexsort((np.arange(len(row)), field, row))
    if drop is not None:
        order = order[row[order] != drop]
    same = (row[order][1:] == row[order][:-1]) & (field[order][1:] == field[order][:-1])
    twice = [f"{text_of(keys[row[m]])}.{names[field[m]]}" for m in order[:-1][same].tolist()]
    if len(order):
        order = order[np.append(~same, True)]
    row, field = row[order], field[order]
    counts = np.bincount(row, minlength=len(keys)).astype(np.int64)
    if drop is not None:
        keys.pop(drop)
        counts = np.delete(counts, drop)
    starts = np.zeros(len(keys) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    index = TarIndex(
        keys=pa.array([text_of(key) for key in keys], pa.large_utf8()),
        names=tuple(names),
        starts=starts,
        member_field=field,
        offsets=np.array(found.offset, np.int64)[order],
        sizes=np.array(found.size, np.int64)[order],
    )
    return index, twice


def _fields(index: TarIndex) -> tuple[Field, ...]:
    if not index.rows:
        return ()
    having = np.bincount(index.member_field, minlength=len(index.names)).tolist()
    present = [tar_field(name, nullable=n < index.rows) for name, n in zip(index.names, having) if n]
    return (*present, KEY_FIELD)


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(text_of(name)) for name in names[:3])
    return f": {shown}{', ..' if len(names) > 3 else ''}"
