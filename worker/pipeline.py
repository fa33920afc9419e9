"""A pipeline compiled for given stored fields: stored rows in, a record batch and the list of bad rows out.

Fields that are only kept, cast or filled stay columns from end to end. Pictures are made row by row, all steps of a row
in one go, straight into the output array where their size is fixed. Stored fields that no output needs are not read.
A row is bad when a picture of it cannot be made or when a number, tensor or ragged value is null and not filled; bad
rows are left out of the batch and named, the others are not touched by them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from manifests.pipeline import Chain, Pipeline, shorter_side
from manifests.schema import Field, arrow_schema
from manifests.steps import Cast, CenterCrop, DecodeImage, HorizontalFlip, Normalize, RandomResizedCrop, Resize, Select
from manifests.steps import Step as AnyStep

from . import columns, transforms
from .decode.port import BadPicture, Decoder
from .formats.port import StoredRows

I64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

#: rows of one work whose fields are looked up again to be listed in the reason; a shard that lacks a field in every
#: row would otherwise be read twice
LISTED = 16


@dataclass(frozen=True, slots=True)
class Draw:
    """What a random step may depend on."""

    seed: int
    epoch: int
    sample_id: int


#: one step of a picture: the value so far and the row's identity in, the next value out
Op = Callable[[Any, Draw], Any]


@dataclass(frozen=True, slots=True)
class Made:
    """Rows made.

    Attributes:
        batch: the good rows, in order.
        kept: int64 position of each row of the batch among the rows asked for.
        bad: position -> reason.
    """

    batch: pa.RecordBatch
    kept: I64
    bad: dict[int, str]


class Executor:
    """``pipeline`` for rows with these stored ``fields``; immutable, used by many threads at once.

    Attributes:
        fields: of the batches it makes.
        schema: of the batches it makes.
        needs: stored fields it reads.
        row_bytes: output bytes of one row, None when rows differ.
    """

    def __init__(self, pipeline: Pipeline, fields: Sequence[Field], decoder: Decoder) -> None:
        self._chains = pipeline.chains(fields)
        self._makers = [_Maker(chain, decoder) if _is_picture(chain) else None for chain in self._chains]
        self.fields: tuple[Field, ...] = tuple(chain.output for chain in self._chains)
        self.schema = arrow_schema(self.fields)
        wanted = {chain.source.name for chain in self._chains}
        self.needs = tuple(field for field in fields if field.name in wanted)
        sizes = [field.row_bytes() for field in self.fields]
        self.row_bytes = None if None in sizes else sum(size or 0 for size in sizes) + 8

    def __repr__(self) -> str:
        return f"Executor({', '.join(f.name for f in self.fields)})"

    def start(
        self, stored: StoredRows, ids: I64, seed: int, epoch: int, present: Callable[[int], list[str]] | None = None
    ) -> Work:
        """Do what is done by column and find out which rows need row work.

        Args:
            stored: the columns of ``needs``.
            ids: int64 sample id per row.
            present: names of the fields that a row (by position) has, for the reason of a bad row.
        """
        return Work(self, stored, ids, seed, epoch, present)


class Work:
    """Rows in the making: call ``row`` for each of ``rows``, on any threads, then ``finish``."""

    def __init__(
        self,
        executor: Executor,
        stored: StoredRows,
        ids: I64,
        seed: int,
        epoch: int,
        present: Callable[[int], list[str]] | None,
    ) -> None:
        self._executor = executor
        self._ids = ids
        self._seed, self._epoch = seed, epoch
        self._stored = stored
        self._present = present
        self._listed = 0
        self.bad: dict[int, str] = dict(stored.bad)
        self._columns: list[pa.Array | None] = []
        self._pictures: list[tuple[_Maker, _Target]] = []
        for chain, maker in zip(executor._chains, executor._makers):
            column = columns.conform(stored.columns[chain.source.name], chain.source)
            column, field = self._by_column(chain.steps if maker is None else maker.head, chain.source, column)
            if maker is not None:
                self._find_nulls(column, field)
                self._pictures.append((maker, _Target(chain, field, column, len(ids))))
            elif field.kind in ("scalar", "tensor", "ragged"):
                self._find_nulls(column, field)
            self._columns.append(column if maker is None else None)
        #: positions that need ``row``
        self.rows: list[int] = []
        if self._pictures:
            self.rows = [i for i in range(len(ids)) if i not in self.bad]

    def _by_column(
        self, steps: Sequence[tuple[int, AnyStep]], field: Field, column: pa.Array
    ) -> tuple[pa.Array, Field]:
        for _, step in steps:
            if isinstance(step, Select):
                column = columns.fill(column, field, (step.fill or {})[field.name])
            elif isinstance(step, Cast):
                column = columns.cast(column, field, step.dtype)
                field = Field(field.name, field.kind, step.dtype, field.shape, field.ndim, field.nullable)
        return column, field

    def _find_nulls(self, column: pa.Array, field: Field) -> None:
        for mask, what in (
            (columns.nulls(column), "is null"),
            (columns.inner_nulls(column, field), "has an element that is null"),
        ):
            for position in np.flatnonzero(mask).tolist() if mask is not None else ():
                if position not in self.bad:
                    self.bad[position] = f"field {field.name!r} {what}; the row has {self._fields_of(position)}"

    def _fields_of(self, position: int) -> str:
        if self._present is not None and self._listed < LISTED:
            self._listed += 1
            names = self._present(position)
        else:
            names = [name for name, column in self._stored.columns.items() if column[position].is_valid]
        return ", ".join(names) if names else "no field"

    def row(self, position: int) -> None:
        """Make the pictures of one row; a picture that cannot be made makes the row bad."""
        draw = Draw(self._seed, self._epoch, int(self._ids[position]))
        for maker, target in self._pictures:
            try:
                maker.make(target, position, draw)
            except BadPicture as error:
                self.bad[position] = f"field {maker.source.name!r}: {error}"
                return

    def finish(self) -> Made:
        """The batch. ``row`` has been called for all of ``rows``."""
        rows = len(self._ids)
        kept: I64 = np.array([i for i in range(rows) if i not in self.bad], np.int64) if self.bad else np.arange(rows)
        whole = len(kept) == rows
        pictures = iter(self._pictures)
        arrays = []
        for column in self._columns:
            if column is None:
                arrays.append(next(pictures)[1].column(kept if not whole else None))
            else:
                arrays.append(column if whole else columns.keep(column, kept))
        ids = self._ids if whole else self._ids[kept]
        arrays.append(pa.array(ids))
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._executor.schema)
        return Made(batch, kept, self.bad)


class _Target:
    """Where the pictures of one work go: one array for fixed shapes, else a list."""

    def __init__(self, chain: Chain, source: Field, column: pa.Array, rows: int) -> None:
        self.field = chain.output
        self.column_in = column
        self.tensors = columns.tensor_values(column, source) if source.kind == "tensor" else None
        fixed = self.field.kind == "tensor"
        self.out: Array | None = np.empty((rows, *self.field.shape), np.dtype(self.field.dtype)) if fixed else None
        self.parts: list[Array | None] = [] if fixed else [None] * rows

    def value(self, position: int) -> Any:
        """The stored value: encoded bytes (memoryview), or the stored tensor."""
        if self.tensors is not None:
            return self.tensors[position]
        return memoryview(self.column_in[position].as_buffer())

    def column(self, kept: I64 | None) -> pa.Array:
        if self.out is not None:
            return columns.tensor_array(self.out if kept is None else self.out[kept], self.field)
        parts = [part for part in self.parts if part is not None]
        return columns.ragged_array(parts, self.field)


class _Maker:
    """The picture steps of one chain, fused."""

    def __init__(self, chain: Chain, decoder: Decoder) -> None:
        self.source = chain.source
        steps = list(chain.steps)
        first = next(i for i, (_, step) in enumerate(steps) if not isinstance(step, (Select, Cast)))
        #: steps done by column before the first picture step
        self.head = steps[:first]
        steps = steps[first:]
        self._last: Normalize | None = None
        if steps and isinstance(steps[-1][1], Normalize) and chain.output.kind == "tensor":
            self._last = steps.pop()[1]  # type: ignore[assignment]
        self._channels = chain.channels
        self._ops = [_op(index, step, chain.channels, decoder) for index, step in steps]

    def make(self, target: _Target, position: int, draw: Draw) -> None:
        value = target.value(position)
        for op in self._ops:
            value = op(value, draw)
        if target.out is None:
            target.parts[position] = value
        elif self._last is not None:
            mean, std = self._last.channel_values(self._channels)
            transforms.normalize(value, mean, std, self._last.scale, target.out[position])
        else:
            target.out[position] = value


def _is_picture(chain: Chain) -> bool:
    return any(not isinstance(step, (Select, Cast)) for _, step in chain.steps)


def _op(index: int, step: AnyStep, channels: int, decoder: Decoder) -> Op:
    """One step as a function of (value, draw)."""
    if isinstance(step, DecodeImage):
        mode, orient, most = step.mode, step.orient, step.max_pixels
        return lambda value, draw: decoder.decode(value, mode=mode, orient=orient, max_pixels=most)
    if isinstance(step, Resize):
        return _resize(step)
    if isinstance(step, CenterCrop):
        size = _pair(step.size)
        return lambda value, draw: transforms.center_crop(value, size)
    if isinstance(step, RandomResizedCrop):
        return _random_resized_crop(index, step)
    if isinstance(step, HorizontalFlip):
        return _flip(index, step.p)
    if isinstance(step, Normalize):
        mean, std = step.channel_values(channels)
        scale = step.scale
        return lambda value, draw: transforms.normalize(value, mean, std, scale)
    if isinstance(step, Cast):
        dtype = step.dtype
        return lambda value, draw: columns.convert(value, dtype)
    if isinstance(step, Select):
        return lambda value, draw: value
    raise TypeError(f"no code for pipeline step {type(step).__name__}")


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _resize(step: Resize) -> Op:
    wanted, interpolation, antialias = step.size, step.interpolation, step.antialias

    def op(value: Any, draw: Draw) -> Any:
        height, width = value.shape[:2]
        size = shorter_side(height, width, wanted) if isinstance(wanted, int) else wanted
        if max(size) > MAX_LONG_SIDE:
            raise BadPicture(f"picture of {height} x {width} would be resized to {size[0]} x {size[1]}")
        if size == (height, width):
            return value
        return transforms.resize(value, size, interpolation, antialias)

    return op


#: a picture of extreme shape is not blown up beyond this side by ``Resize(int)``, pixels
MAX_LONG_SIDE = 1 << 16


def _random_resized_crop(index: int, step: RandomResizedCrop) -> Op:
    size, scale, ratio = _pair(step.size), step.scale, step.ratio

    def op(value: Any, draw: Draw) -> Any:
        numbers = transforms.draws(draw.seed, draw.epoch, draw.sample_id, index, 40)
        box = transforms.random_box(value.shape[0], value.shape[1], scale, ratio, numbers)
        return transforms.resize(value, size, "bilinear", True, box)

    return op


def _flip(index: int, p: float) -> Op:
    def op(value: Any, draw: Draw) -> Any:
        if p >= 1 or (p > 0 and transforms.draws(draw.seed, draw.epoch, draw.sample_id, index, 1)[0] < p):
            return value[:, ::-1]
        return value

    return op
