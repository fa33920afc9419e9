"""Arrow IPC files: rows of record batches, columns by name.

The index holds where every buffer of every record batch lies, so that rows can be read without their batch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import FeedlineError
from ..schema import DTYPES, Field
from .flatbuffer import FlatbufferError, Table
from .port import I64, RESERVED, Bytes, Note, Scan, read_exactly

MAGIC = b"ARROW1"
#: a compressed buffer larger than this is worth a warning: it is read whole for any row
LARGE_COMPRESSED = 64 << 20
#: largest compression ratio that is believed; zstd reaches about 30,000 on zeros
_MOST_RATIO = 1 << 16
_MOST_METADATA = 256 << 20
_HEADER_SCHEMA, _HEADER_DICTIONARY, _HEADER_BATCH = 1, 2, 3
_CODECS = {0: "lz4", 1: "zstd"}


class UnsupportedColumn(ValueError):
    """A column whose type is no field."""


class _NotArrow(ValueError):
    """Bytes that are no Arrow IPC file."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its field, its Arrow type in the file, and where its nodes and buffers begin in a batch's lists."""

    field: Field
    type: pa.DataType
    node: int
    buffer: int
    #: values of a dictionary column, else None
    dictionary: pa.Array | None = None


@dataclass(frozen=True, slots=True)
class ArrowIndex:
    """Record batches: rows, and the position of every buffer in the file."""

    columns: dict[str, Column]
    #: row number each batch begins with: int64 [batches + 1]
    firsts: I64
    #: null count per node: int64 [batches, nodes]
    nulls: I64
    #: offset in the file and length of each buffer: int64 [batches, buffers, 2]
    buffers: I64
    #: name of the batch's codec, "" for none
    codecs: tuple[str, ...]

    @property
    def rows(self) -> int:
        return int(self.firsts[-1])

    @property
    def nbytes(self) -> int:
        words = sum(int(c.dictionary.nbytes) for c in self.columns.values() if c.dictionary is not None)
        return words + int(self.firsts.nbytes + self.nulls.nbytes + self.buffers.nbytes)


def scan_arrow(source: Bytes) -> Scan:
    """Index one Arrow IPC file (not a stream) from its footer and the headers of its batches."""
    try:
        return _scan(source)
    except FeedlineError:
        raise
    except UnsupportedColumn as error:
        note = Note("unsupported", str(error))
    except _NotArrow as error:
        note = Note("not-this-format", str(error), 0)
    except (pa.ArrowException, OSError, ValueError, LookupError, OverflowError, MemoryError) as error:
        note = Note("not-this-format", f"its metadata are damaged: {error}")
    none = np.empty(0, np.int64)
    return Scan(ArrowIndex({}, np.zeros(1, np.int64), none, none, ()), (), (note,))


def _scan(source: Bytes) -> Scan:
    footer = _footer(source)
    schema = _schema(footer, source)
    fields = _fields_of(schema)
    dictionaries = list(_dictionary_ids(footer))
    values = _dictionaries(source, footer, schema, dictionaries)
    columns: dict[str, Column] = {}
    node = buffer = 0
    for at, (column, field) in enumerate(zip(schema, fields)):
        dictionary = values.get(dictionaries[at]) if pa.types.is_dictionary(column.type) else None
        if pa.types.is_dictionary(column.type) and dictionary is None:
            dictionary = pa.array([], pa.large_utf8())
        columns[column.name] = Column(field, column.type, node, buffer, dictionary)
        nodes, buffers = layout(column.type)
        node, buffer = node + nodes, buffer + buffers
    index, large = _batches(source, footer, columns, node, buffer)
    notes = []
    if large:
        text = f"{large} compressed buffers are above {LARGE_COMPRESSED >> 20} MiB; each is decompressed whole to read a row"
        notes.append(Note("slow", text))
    found = [_with_nulls(c, index) for c in columns.values()] if index.rows else []
    return Scan(index, tuple(sorted(found, key=lambda f: (f.name == "__key__", f.name))), tuple(notes))


def _with_nulls(column: Column, index: ArrowIndex) -> Field:
    f = column.field
    nullable = bool(index.nulls[:, column.node].any()) or (
        column.dictionary is not None and column.dictionary.null_count > 0
    )
    return Field(name=f.name, kind=f.kind, dtype=f.dtype, shape=f.shape, ndim=f.ndim, nullable=nullable)


# -- metadata --------------------------------------------------------------------------------------------------------


def _footer(source: Bytes) -> Table:
    if source.size < 18 or bytes(source.read(0, 6)) != MAGIC:
        start = bytes(source.read(0, 4))
        if start == b"\xff\xff\xff\xff":
            raise _NotArrow("it is an Arrow stream; write the file format (pyarrow.ipc.new_file)")
        if start == b"FEA1":
            raise _NotArrow("it is a Feather version 1 file; write version 2")
        raise _NotArrow("it does not begin with ARROW1")
    tail = bytes(read_exactly(source, source.size - 10, 10))
    if tail[4:] != MAGIC:
        raise _NotArrow("it does not end with ARROW1: it was cut, or its writer was not closed")
    length = struct.unpack("<i", tail[:4])[0]
    if not 0 < length <= min(_MOST_METADATA, source.size - 18):
        raise _NotArrow(f"its footer cannot have {length} bytes")
    return Table.root(read_exactly(source, source.size - 10 - length, length))


def _schema(footer: Table, source: Bytes) -> pa.Schema:
    """The schema message at the start of the file, read by pyarrow."""
    table = footer.table(1)
    if table is None:
        raise _NotArrow("its footer has no schema")
    if table.number(0, "<h"):
        raise UnsupportedColumn("it is big-endian; write it on a little-endian machine")
    head = bytes(read_exactly(source, 8, 8))
    marker, length = struct.unpack("<Ii", head)
    prefix = 8
    if marker != 0xFFFFFFFF:
        prefix, length = 4, struct.unpack("<i", head[:4])[0]
    if not 0 < length <= min(_MOST_METADATA, source.size):
        raise _NotArrow(f"its schema cannot have {length} bytes")
    return pa.ipc.read_schema(pa.py_buffer(read_exactly(source, 8, prefix + length)))


def _dictionary_ids(footer: Table) -> Iterator[int]:
    """Dictionary id per top-level column, -1 for columns without."""
    schema = footer.table(1)
    for column in schema.tables(1) if schema is not None else ():
        encoding = column.table(4)
        yield -1 if encoding is None else encoding.number(0, "<q")


def _message(source: Bytes, offset: int, length: int) -> Table:
    data = read_exactly(source, offset, length)
    prefix = 8 if bytes(data[:4]) == b"\xff\xff\xff\xff" else 4
    return Table.root(data[prefix:])


def _blocks(footer: Table, slot: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Offset, metadata length and body length of each message."""
    for offset, length, body in footer.structs(slot, "<qi4xq"):
        if offset < 0 or not 0 < length <= _MOST_METADATA or body < 0 or offset + length + body > size:
            raise FlatbufferError(f"message of {length} + {body} bytes at {offset}")
        yield offset, length, body


def _dictionaries(source: Bytes, footer: Table, schema: pa.Schema, ids: list[int]) -> dict[int, pa.Array]:
    """Values per dictionary id, deltas appended."""
    kinds = {i: column.type.value_type for i, column in zip(ids, schema) if pa.types.is_dictionary(column.type)}
    values: dict[int, pa.Array] = {}
    for offset, length, body in _blocks(footer, 2, source.size):
        message = _message(source, offset, length)
        header = message.table(2)
        if header is None or message.number(1, "<B") != _HEADER_DICTIONARY:
            raise FlatbufferError(f"no dictionary at {offset}")
        number = header.number(0, "<q")
        if number not in kinds:
            continue
        # a dictionary batch is a record batch of one column: give pyarrow a stream of just that
        batch = header.table(1)
        if batch is None:
            raise FlatbufferError(f"empty dictionary at {offset}")
        data = _string_values(kinds[number], batch, read_exactly(source, offset + length, body))
        delta = bool(header.number(2, "<B")) and number in values
        values[number] = pa.concat_arrays([values[number], data]) if delta else data
    return values


def _string_values(kind: pa.DataType, batch: Table, body: memoryview) -> pa.Array:
    codec = codec_of(batch)
    rows = batch.number(0, "<q")
    parts = []
    for start, length in batch.structs(2, "<qq")[:3]:
        if start < 0 or length < 0 or start + length > len(body):
            raise FlatbufferError("buffer behind its message")
        parts.append(decompressed(body[start : start + length], codec))
    if len(parts) != 3 or not 0 <= rows < 1 << 31:
        raise FlatbufferError("dictionary without its buffers")
    valid = pa.py_buffer(parts[0]) if len(parts[0]) else None
    array = pa.Array.from_buffers(kind, rows, [valid, pa.py_buffer(parts[1]), pa.py_buffer(parts[2])])
    array.validate(full=True)
    return array.cast(pa.large_utf8())


def codec_of(batch: Table) -> str:
    """Codec of a record batch: "", "lz4" or "zstd"."""
    compression = batch.table(3)
    if compression is None:
        return ""
    number = compression.number(0, "<b")
    if number not in _CODECS:
        raise FlatbufferError(f"unknown codec {number}")
    return _CODECS[number]


def decompressed(data: memoryview, codec: str) -> memoryview:
    """A buffer's bytes; compressed ones begin with their length, -1 meaning that this one is not compressed."""
    if not codec or not len(data):
        return data
    if len(data) < 8:
        raise FlatbufferError("compressed buffer without its length")
    length = struct.unpack_from("<q", data)[0]
    if length == -1:
        return data[8:]
    if not 0 <= length <= _MOST_RATIO * len(data) + (1 << 20):
        raise FlatbufferError(f"compressed buffer of {length} bytes")
    return memoryview(pa.Codec(codec).decompress(pa.py_buffer(data[8:]), decompressed_size=length))


def _batches(
    source: Bytes, footer: Table, columns: dict[str, Column], nodes: int, buffers: int
) -> tuple[ArrowIndex, int]:
    """The index, and how many compressed buffers are large."""
    rows: list[int] = []
    codecs: list[str] = []
    nulls: list[npt.NDArray[np.int64]] = []
    places: list[npt.NDArray[np.int64]] = []
    large = 0
    for offset, length, body in _blocks(footer, 3, source.size):
        message = _message(source, offset, length)
        batch = message.table(2)
        if batch is None or message.number(1, "<B") != _HEADER_BATCH:
            raise FlatbufferError(f"no record batch at {offset}")
        count = batch.number(0, "<q")
        node = np.array(batch.structs(1, "<qq"), np.int64).reshape(-1, 2)
        place = np.array(batch.structs(2, "<qq"), np.int64).reshape(-1, 2)
        if len(node) != nodes or len(place) != buffers or not 0 <= count < 1 << 40:
            raise FlatbufferError(f"record batch at {offset} does not fit the schema")
        if len(place) and (int(place.min()) < 0 or int((place[:, 0] + place[:, 1]).max()) > body):
            raise FlatbufferError(f"buffers of the record batch at {offset} lie outside it")
        if any(int(node[c.node, 0]) != count for c in columns.values()):
            raise FlatbufferError(f"columns of the record batch at {offset} differ in length")
        place[:, 0] += offset + length
        codec = codec_of(batch)
        large += int((place[:, 1] > LARGE_COMPRESSED).sum()) if codec else 0
        rows.append(count)
        codecs.append(codec)
        nulls.append(node[:, 1])
        places.append(place)
    firsts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(rows, out=firsts[1:])
    shape = (len(rows), nodes)
    index = ArrowIndex(
        columns,
        firsts,
        np.array(nulls, np.int64).reshape(shape),
        np.array(places, np.int64).reshape(len(rows), buffers, 2),
        tuple(codecs),
    )
    return index, large


# -- types -------------------------------------------------------------------------------------------------------------


def _fields_of(schema: pa.Schema) -> list[Field]:
    names = schema.names
    for name in names:
        if name in RESERVED:
            raise UnsupportedColumn(f"column {name!r} has a name that batches use themselves; rename it")
        if names.count(name) > 1:
            raise UnsupportedColumn(f"two columns have the name {name!r}")
    return [field_of(column.name, column.type) for column in schema]


def field_of(name: str, kind: pa.DataType) -> Field:
    """The field a column of this Arrow type is.

    Raises:
        UnsupportedColumn: it is none; names column and type.
    """
    if (dtype := _dtype(kind)) is not None:
        return Field(name=name, kind="scalar", dtype=dtype)
    if _is_text(kind) or (pa.types.is_dictionary(kind) and _is_text(kind.value_type)):
        return Field(name=name, kind="string")
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return Field(name=name, kind="bytes")
    if isinstance(kind, pa.FixedShapeTensorType):
        dtype = _dtype(kind.value_type)
        straight = kind.permutation is None or list(kind.permutation) == list(range(len(kind.shape)))
        if dtype is not None and straight:
            return Field(name=name, kind="tensor", dtype=dtype, shape=tuple(kind.shape))
    elif pa.types.is_fixed_size_list(kind):
        shape, value = [], kind
        while pa.types.is_fixed_size_list(value):
            shape.append(value.list_size)
            value = value.value_type
        if (dtype := _dtype(value)) is not None:
            return Field(name=name, kind="tensor", dtype=dtype, shape=tuple(shape))
    elif (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and (dtype := _dtype(kind.value_type)) is not None:
        return Field(name=name, kind="ragged", dtype=dtype, ndim=1)
    raise UnsupportedColumn(
        f"column {name!r} has the type {kind}, which is no number, text, bytes, tensor or list of numbers"
    )


def _dtype(kind: pa.DataType) -> str | None:
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        name = np.dtype(kind.to_pandas_dtype()).name
        return name if name in DTYPES else None
    return None


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def layout(kind: pa.DataType) -> tuple[int, int]:
    """Nodes and buffers a column of this type has in a record batch."""
    if isinstance(kind, pa.BaseExtensionType):
        return layout(kind.storage_type)
    if pa.types.is_fixed_size_list(kind):
        nodes, buffers = layout(kind.value_type)
        return nodes + 1, buffers + 1
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        nodes, buffers = layout(kind.value_type)
        return nodes + 1, buffers + 2
    return 1, 3 if _is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else 2
