"""The Manifest: immutable description of one dataset version, a Parquet file.

One row per shard (row order = ordinal) in the columns ``uri``, ``format``, ``rows``, ``bytes`` and ``content_id``; name,
version, fields, label maps and the digest are in the file's metadata. Columns stay in Arrow and numpy form, so that a
million shards cost about 200 bytes each; ``Shard`` objects are made when looked at.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from .errors import ConfigError
from .identity import check_name
from .schema import DTYPES, Field
from .shards import Shard, Shards

I64 = npt.NDArray[np.int64]
Labels = dict[str, dict[str, int]]

#: version of the file format; files of a newer one are refused
FORMAT_VERSION = 1
_SCHEMA = pa.schema(
    [
        pa.field("uri", pa.large_utf8(), nullable=False),
        pa.field("format", pa.dictionary(pa.int32(), pa.utf8()), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("content_id", pa.large_utf8(), nullable=False),
    ]
)
_META = b"feedline.manifest"
_CONTENT_ID = r"^(blake3:[0-9a-f]{64}|sha256:[0-9a-f]{64}|etag:.+)$"
#: what reading damaged Parquet may raise
_DAMAGE = (pa.ArrowException, OSError, ValueError, LookupError, MemoryError, OverflowError)
#: most rows a manifest may have, so that sample ids and their arithmetic stay far inside int64
MOST_ROWS = 1 << 48


class _Head(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the file metadata hold."""

    format_version: int
    name: str
    version: str
    digest: str
    fields: tuple[Field, ...]
    labels: Labels = {}


class Manifest:
    """One dataset version. Equal digests mean equal data in equal order, wherever the shards lie.

    Attributes:
        name, version: what it is registered as; no part of the digest.
        fields: stored fields of a row.
        labels: field -> class name -> number.
        rows: samples in all shards.
        digest: ``sha256:<hex>`` over fields, label maps and per shard (ordinal, format, rows, bytes, content id).
        locations: ``sha256:<hex>`` over the list of uris.
        shards: lazy sequence of ``Shard``.
        shard_rows: int64 [shards].
        first_ids: int64 [shards + 1]; the sample id of row r of shard s is ``first_ids[s] + r``.
        warnings: what the builder noticed; not stored.
    """

    def __init__(
        self,
        name: str,
        version: str,
        fields: Iterable[Field],
        labels: Mapping[str, Mapping[str, int]],
        table: pa.Table,
        warnings: Iterable[str] = (),
    ) -> None:
        """``table`` has the five columns of the file format.

        Raises:
            ConfigError: a value no manifest may have; names it.
        """
        self.name = check_name(name, "dataset name")
        self.version = check_name(version, "version")
        self.fields: tuple[Field, ...] = tuple(fields)
        self.labels: Labels = {field: dict(numbers) for field, numbers in labels.items()}
        self.warnings: tuple[str, ...] = tuple(warnings)
        self._table = _checked_table(table)
        _check_fields(self.fields)
        self.shard_rows: I64 = _frozen(_numbers(self._table, "rows"))
        first = np.zeros(len(self.shard_rows) + 1, np.int64)
        np.cumsum(self.shard_rows, out=first[1:])
        # a sum that runs over passes values above the limit before, as no step is larger than it
        if max(int(self.shard_rows.max(initial=0)), int(first.max())) > MOST_ROWS:
            raise ConfigError(f"a manifest of more than {MOST_ROWS} rows", remedy="split the dataset")
        self.first_ids: I64 = _frozen(first)
        self.digest = _digest_of(self.fields, self.labels, self._table)
        self.locations = _sha256([b"feedline-locations-1\0", *_text_parts(self._table["uri"])])

    @classmethod
    def from_shards(
        cls,
        name: str,
        version: str,
        fields: Iterable[Field],
        shards: Iterable[Shard],
        labels: Mapping[str, Mapping[str, int]] | None = None,
        warnings: Iterable[str] = (),
    ) -> Manifest:
        """A manifest of these shards, in this order (their ``ordinal`` is not looked at)."""
        rows = list(shards)
        columns = {
            "uri": [s.uri for s in rows],
            "format": [s.format for s in rows],
            "rows": [s.rows for s in rows],
            "bytes": [s.bytes for s in rows],
            "content_id": [s.content_id for s in rows],
        }
        try:
            table = pa.table(
                [
                    pa.array(columns["format"], pa.utf8()).dictionary_encode()
                    if field.name == "format"
                    else pa.array(columns[field.name], field.type)
                    for field in _SCHEMA
                ],
                schema=_SCHEMA,
            )
        except (pa.ArrowException, OverflowError, UnicodeEncodeError, TypeError) as error:
            raise ConfigError("a shard has a value that a manifest cannot hold", cause=str(error)) from None
        return cls(name, version, fields, labels or {}, table, warnings)

    def __repr__(self) -> str:
        return (
            f"Manifest({self.name}@{self.version}, {self.rows} rows in {len(self.shards)} shards, {self.digest[:19]})"
        )

    @property
    def rows(self) -> int:
        return int(self.first_ids[-1])

    @property
    def stored_bytes(self) -> int:
        """Bytes of all shards."""
        return int(_numbers(self._table, "bytes").sum())

    @cached_property
    def shards(self) -> Shards:
        return Shards(self._table)

    @property
    def table(self) -> pa.Table:
        """The five columns, for work on many shards at once."""
        return self._table

    def shard_of(self, ids: npt.ArrayLike) -> I64:
        """Shard ordinal per sample id: int64, the shape of ``ids``.

        Raises:
            IndexError: an id this manifest does not have.
        """
        wanted = np.asarray(ids, np.int64)
        if wanted.size and not (int(wanted.min()) >= 0 and int(wanted.max()) < self.rows):
            raise IndexError(f"sample ids run from 0 to {self.rows - 1}")
        return np.asarray(np.searchsorted(self.first_ids, wanted, side="right") - 1, np.int64)

    # -- files ---------------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The manifest file; equal manifests written by one pyarrow release give equal bytes."""
        head = _Head(FORMAT_VERSION, self.name, self.version, self.digest, self.fields, self.labels)
        schema = _SCHEMA.with_metadata({_META: msgspec.json.encode(head, order="deterministic")})
        sink = pa.BufferOutputStream()
        pq.write_table(
            self._table.cast(schema),
            sink,
            compression="zstd",
            use_dictionary=["format"],
            row_group_size=1 << 16,
            write_statistics=False,
            write_page_checksum=True,
        )
        return bytes(sink.getvalue())

    @classmethod
    def from_bytes(cls, data: bytes | memoryview | pa.Buffer, where: str = "manifest") -> Manifest:
        """The inverse of ``to_bytes``; ``where`` is what errors call it.

        Raises:
            ConfigError: no manifest, damaged, or of a newer format version.
        """
        return cls._read(pa.BufferReader(data), where)

    @classmethod
    def _read(cls, source: pa.NativeFile, where: str) -> Manifest:
        try:
            file = pq.ParquetFile(source, page_checksum_verification=True)
            meta = (file.schema_arrow.metadata or {}).get(_META)
        except _DAMAGE as error:
            raise ConfigError(f"{where} is not a manifest", cause=_line(error), remedy=_BUILD) from None
        if meta is None:
            raise ConfigError(
                f"{where} is not a manifest", cause="a Parquet file without a manifest head", remedy=_BUILD
            )
        head = _head(meta, where)
        try:
            manifest = cls(head.name, head.version, head.fields, head.labels, _read_table(file))
        except _DAMAGE as error:
            raise ConfigError(f"{where} is damaged", cause=_line(error), remedy=_BUILD) from None
        # what decoding took beside the table stays with the allocator otherwise: a third of all for a million shards
        pa.default_memory_pool().release_unused()
        if manifest.digest != head.digest:
            cause = f"its digest is {manifest.digest}, its head says {head.digest}"
            raise ConfigError(f"{where} is damaged", cause=cause, remedy=_BUILD)
        return manifest

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Manifest:
        """Read a manifest file.

        Raises:
            ConfigError: it is not there, no manifest, damaged, or of a newer format version.
        """
        try:
            with pa.OSFile(os.fspath(path)) as file:
                return cls._read(file, f"manifest {os.fspath(path)}")
        except OSError as error:
            raise ConfigError(f"manifest {os.fspath(path)} cannot be read", cause=_line(error), remedy=_BUILD) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the manifest file; it appears whole or not at all.

        Raises:
            ConfigError: the place cannot be written to.
        """
        target = os.path.abspath(path)
        try:
            with tempfile.NamedTemporaryFile(dir=os.path.dirname(target), prefix=".manifest-", delete=False) as file:
                try:
                    file.write(self.to_bytes())
                    file.flush()
                    os.fsync(file.fileno())
                    os.chmod(file.name, 0o644)
                    os.replace(file.name, target)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            raise ConfigError(f"manifest {target} cannot be written", cause=_line(error)) from None


_BUILD = "make one with `feedline manifest build`"


def _read_table(file: pq.ParquetFile) -> pa.Table:
    """All rows, a row group at a time: reading them at once would take twice the memory for a moment."""
    groups = [file.read_row_group(at) for at in range(file.num_row_groups)]
    return pa.concat_tables(groups) if groups else file.read()


def _head(meta: bytes, where: str) -> _Head:
    """The decoded head. The format version is looked at before the rest, which a newer one may have changed."""
    try:
        version = json.loads(meta)["format_version"]
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise ConfigError(
                f"{where} has the manifest format version {version}",
                cause=f"this feedline reads up to version {FORMAT_VERSION}",
                remedy="update feedline",
            )
        return msgspec.json.decode(meta, type=_Head)
    except ConfigError:
        raise
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where} is damaged", cause=_line(error), remedy=_BUILD) from None


def _checked_table(table: pa.Table) -> pa.Table:
    try:
        table = table.select(_SCHEMA.names)
        table = table.replace_schema_metadata(None).cast(_SCHEMA)
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise ConfigError("the shard table does not have a manifest's columns", cause=_line(error)) from None
    for name in _SCHEMA.names:
        if table[name].null_count:
            raise ConfigError(f"a shard without {name}")
    for name in ("rows", "bytes"):
        at = _SCHEMA.get_field_index(name)
        table = table.set_column(at, _SCHEMA.field(name), pa.chunked_array([table[name].combine_chunks()], pa.int64()))
        values = _numbers(table, name)
        if len(values) and int(values.min()) < 0:
            at = int(np.argmin(values))
            raise ConfigError(f"shard {at} has {int(values[at])} {name}", remedy="counts are 0 or more")
    matched = pa.compute.match_substring_regex(table["content_id"], _CONTENT_ID)
    if not pa.compute.all(matched, min_count=0).as_py():
        at = matched.to_pylist().index(False)
        cause = "it is not blake3:, sha256: or etag:"
        raise ConfigError(f"shard {at} has the content id {table['content_id'][at].as_py()[:80]!r}", cause=cause)
    return table


def _check_fields(fields: tuple[Field, ...]) -> None:
    names = [f.name for f in fields]
    for f in fields:
        if names.count(f.name) > 1:
            raise ConfigError(f"two fields are called {f.name!r}")
        if f.kind in ("scalar", "tensor", "ragged") and f.dtype not in DTYPES:
            raise ConfigError(f"field {f.name!r} has the dtype {f.dtype!r}", remedy=f"use one of {', '.join(DTYPES)}")


def _numbers(table: pa.Table, name: str) -> I64:
    """A number column of a checked table, which has it in one chunk, without a copy."""
    return np.asarray(table[name].chunk(0).to_numpy(), np.int64)


def _frozen(values: I64) -> I64:
    view = values.view()
    view.flags.writeable = False
    return view


def _text_parts(column: pa.ChunkedArray) -> Iterator[Any]:
    """A text column as bytes to hash: count, end offsets (int64 little-endian), text. Independent of chunks."""
    yield len(column).to_bytes(8, "little")
    done = 0
    for ends, _ in _text_chunks(column):
        yield (ends[1:] - (int(ends[0]) - done)).astype("<i8", copy=False)
        done += int(ends[-1] - ends[0])
    for ends, data in _text_chunks(column):
        yield data[int(ends[0]) : int(ends[-1])]


def _text_chunks(column: pa.ChunkedArray) -> Iterator[tuple[I64, memoryview]]:
    """Offsets (one more than values) and data of each chunk that is not empty."""
    for chunk in column.chunks:
        if len(chunk):
            array = chunk.cast(pa.large_utf8())
            _, offsets, data = array.buffers()
            ends = np.frombuffer(offsets, "<i8", len(array) + 1, array.offset * 8)
            yield ends, memoryview(data if data is not None else b"")


def _digest_of(fields: tuple[Field, ...], labels: Labels, table: pa.Table) -> str:
    head = json.dumps(
        [[[f.name, f.kind, f.dtype, list(f.shape), f.ndim, f.nullable] for f in fields], labels],
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=True,
    ).encode()
    return _sha256(
        [
            b"feedline-manifest-1\0",
            len(head).to_bytes(8, "little"),
            head,
            *_text_parts(table["format"]),
            _numbers(table, "rows").astype("<i8", copy=False),
            _numbers(table, "bytes").astype("<i8", copy=False),
            *_text_parts(table["content_id"]),
        ]
    )


def _sha256(parts: Iterable[Any]) -> str:
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part)
    return "sha256:" + hashed.hexdigest()


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return re.sub(r"\s+", " ", text)[:300] if text else type(error).__name__


__all__ = ["FORMAT_VERSION", "Manifest", "Shard", "Shards"]
