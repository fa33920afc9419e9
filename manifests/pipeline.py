"""Pipelines: a declarative recipe from stored fields to output tensors, its digest, and what comes out of it.

Nothing runs here. A worker compiles ``Pipeline.chains`` into code; the client calls ``output`` to know its batches
before a row is read. The digest of a pipeline is the *preprocessing version*: it covers every argument of every step and
the version of each step, so equal digests mean equal results on one decode fingerprint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from .errors import ConfigError
from .identity import digest
from .schema import Field
from .steps import (
    INTERPOLATIONS,
    STEPS,
    Cast,
    CenterCrop,
    DecodeImage,
    HorizontalFlip,
    Interpolation,
    Normalize,
    PythonMap,
    RandomResizedCrop,
    Resize,
    Select,
    Step,
)

__all__ = [
    "INTERPOLATIONS", "Cast", "CenterCrop", "Chain", "DecodeImage", "HorizontalFlip", "Interpolation", "Normalize",
    "Pipeline", "PythonMap", "RandomResizedCrop", "Resize", "Select", "Step",
]  # fmt: skip

#: version of the canonical encoding
_MAGIC = b"FLP\x01"
_encoder = msgspec.msgpack.Encoder(order="deterministic")

#: last dotted part of the names that ``DecodeImage(field=None)`` takes for a picture
PICTURE_NAMES = frozenset((
    "jpg", "jpeg", "jpe", "jfif", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "pnm",
    "image", "img", "picture", "photo",
))  # fmt: skip


@dataclass(frozen=True)
class Chain:
    """How one output field comes from one stored field.

    Attributes:
        output: the field as batches carry it.
        source: the stored field it comes from.
        steps: (index in the pipeline, step) of what is done to it, in order; a ``Select`` only where it fills nulls.
        layout: "hwc" or "chw" for a picture (decoded, or a stored tensor used as one), else "".
        channels: of a decoded picture or stored 3-d tensor; 0 for others.
    """

    output: Field
    source: Field
    steps: tuple[tuple[int, Step], ...] = ()
    layout: str = ""
    channels: int = 0

    @property
    def decodes(self) -> bool:
        """True when a picture is decoded on the way."""
        return any(isinstance(step, DecodeImage) for _, step in self.steps)


class Pipeline:
    """An immutable list of steps.

    Raises:
        ConfigError: not steps, or one that is not there yet (``PythonMap``, decoding on a GPU).
    """

    def __init__(self, steps: Sequence[Step] = ()) -> None:
        if isinstance(steps, Step) or not isinstance(steps, Sequence):
            raise ConfigError(f"Pipeline({steps!r}) cannot work", remedy="use a list of steps")
        self._steps = tuple(steps)
        for step in self._steps:
            if not isinstance(step, Step) or not type(step).TAG:
                raise ConfigError(f"{step!r} is not a pipeline step", remedy=f"steps are {_names()}")
            _check_there(step)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps, in order."""
        return self._steps

    def __repr__(self) -> str:
        return f"Pipeline([{', '.join(map(repr, self._steps))}])"

    def __eq__(self, other: object) -> bool:
        return self.encode() == other.encode() if isinstance(other, Pipeline) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.encode())

    def __reduce__(self) -> tuple[Any, ...]:
        return Pipeline, (self._steps,)

    @property
    def random(self) -> bool:
        """True when a step draws random numbers."""
        return any(step.random for step in self._steps)

    @cached_property
    def digest(self) -> str:
        """``sha256:..`` of the canonical encoding: the preprocessing version."""
        return digest(self.encode())

    @cached_property
    def prefix_digest(self) -> str:
        """Digest of the steps before the first random one: what a cache of decoded rows may be keyed by."""
        first = next((i for i, step in enumerate(self._steps) if step.random), len(self._steps))
        return Pipeline(self._steps[:first]).digest

    def encode(self) -> bytes:
        """Canonical bytes: equal pipelines give equal bytes on every machine."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        steps = [
            [type(step).TAG, {f.name: getattr(step, f.name) for f in dataclasses.fields(step)}] for step in self._steps
        ]
        return _MAGIC + _encoder.encode(steps)

    @staticmethod
    def decode(data: bytes) -> Pipeline:
        """The inverse of ``encode``; b"" is the pipeline without steps.

        Raises:
            ConfigError: not an encoded pipeline, or one with a step or argument this release does not know.
        """
        if not data:
            return Pipeline()
        if data[: len(_MAGIC)] != _MAGIC:
            raise ConfigError("not a pipeline of this release", cause=f"it starts with {data[:4]!r}")
        try:
            rows = msgspec.msgpack.decode(data[len(_MAGIC) :], type=list[tuple[str, dict[str, Any]]])
        except msgspec.MsgspecError as error:
            raise ConfigError("malformed pipeline", cause=str(error)) from None
        return Pipeline([_step(tag, arguments) for tag, arguments in rows])

    def output(self, fields: Sequence[Field]) -> tuple[Field, ...]:
        """Fields of the batches when these are stored.

        Raises:
            ConfigError: a step that does not fit the fields it would get; names the step and lists the fields.
        """
        return tuple(chain.output for chain in self.chains(fields))

    def chains(self, fields: Sequence[Field]) -> tuple[Chain, ...]:
        """One chain per output field, in order; raises as ``output`` does."""
        table = {f.name: _stored(f) for f in fields}
        for index, step in enumerate(self._steps):
            table = _apply(table, index, step)
        return tuple(_finished(chain) for chain in table.values())


def _names() -> str:
    return ", ".join(kind.__name__ for kind in STEPS.values())


def _check_there(step: Step) -> None:
    if isinstance(step, PythonMap):
        raise ConfigError(
            f"PythonMap({step.function!r}) is not there yet, it comes later",
            remedy="do this in the training loop, or write the result into the dataset",
        )
    if isinstance(step, DecodeImage) and (step.device != "cpu" or step.dali is not None):
        what = f"device={step.device!r}" if step.device != "cpu" else "dali="
        raise ConfigError(f"DecodeImage({what}) is not there yet, it comes later", remedy='use device="cpu"')


def _step(tag: str, arguments: dict[str, Any]) -> Step:
    kind = STEPS.get(tag)
    if kind is None:
        raise ConfigError(f"unknown pipeline step {tag!r}", remedy=f"this release has {', '.join(STEPS)}")
    known = {f.name for f in dataclasses.fields(kind)}
    if unknown := sorted(set(arguments) - known):
        raise ConfigError(f"pipeline step {tag!r} has unknown arguments {unknown}", remedy="use one feedline release")
    try:
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()})
    except TypeError as error:
        raise ConfigError(f"pipeline step {tag!r} lacks arguments", cause=str(error)) from None


# -- inference: what each step makes of the fields -----------------------------------------------------------------


def _stored(field: Field) -> Chain:
    picture = field.kind == "tensor" and len(field.shape) == 3
    return Chain(field, field, layout="hwc" if picture else "", channels=field.shape[2] if picture else 0)


def _finished(chain: Chain) -> Chain:
    """Rows where a number, tensor or ragged value is null are bad, so what batches carry of them is never null."""
    if chain.output.nullable and chain.output.kind in ("scalar", "tensor", "ragged"):
        return dataclasses.replace(chain, output=msgspec.structs.replace(chain.output, nullable=False))
    return chain


def _list(table: dict[str, Chain]) -> str:
    return "the fields are " + ", ".join(table) if table else "there are no fields"


def _get(table: dict[str, Chain], step: Step, name: str) -> Chain:
    if name not in table:
        raise ConfigError(f"{type(step).__name__}: there is no field {name!r}", remedy=_list(table))
    return table[name]


def _apply(table: dict[str, Chain], index: int, step: Step) -> dict[str, Chain]:
    if isinstance(step, Select):
        return {name: _filled(_get(table, step, name), index, step) for name in step.fields}
    if isinstance(step, DecodeImage):
        return _decoded(table, index, step)
    name = str(getattr(step, "field", ""))
    chain = _get(table, step, name)
    changed = _cast(chain, step) if isinstance(step, Cast) else _picture(chain, step)
    changed = dataclasses.replace(changed, steps=(*chain.steps, (index, step)))
    return {key: changed if key == name else value for key, value in table.items()}


def _decoded(table: dict[str, Chain], index: int, step: DecodeImage) -> dict[str, Chain]:
    name = step.field if step.field is not None else _picture_field(table)
    chain = _get(table, step, name)
    if chain.output.kind != "bytes":
        raise ConfigError(
            f"DecodeImage: field {name!r} holds {_kind(chain)}, not encoded pictures", remedy=_list(table)
        )
    if step.out != name and step.out in table:
        raise ConfigError(f"DecodeImage: there is already a field {step.out!r}", remedy="choose another name with out=")
    output = Field(name=step.out, kind="ragged", dtype="uint8", ndim=3)
    made = Chain(output, chain.source, (*chain.steps, (index, step)), "hwc", 3 if step.mode == "RGB" else 1)
    return {step.out if key == name else key: made if key == name else value for key, value in table.items()}


def _picture_field(table: dict[str, Chain]) -> str:
    found = [
        name for name, chain in table.items()
        if chain.output.kind == "bytes" and name.rpartition(".")[2].lower() in PICTURE_NAMES
    ]  # fmt: skip
    if len(found) > 1:
        raise ConfigError(
            f"DecodeImage: {' and '.join(repr(name) for name in found)} may both be the picture",
            remedy=f"say which: DecodeImage({found[0]!r})",
        )
    if not found:
        raise ConfigError("DecodeImage: no field is named like a picture", remedy=f"say which; {_list(table)}")
    return found[0]


def _kind(chain: Chain) -> str:
    field = chain.output
    return f"{field.kind} {field.dtype} {list(field.shape) if field.shape else ''}".strip()


def _filled(chain: Chain, index: int, step: Select) -> Chain:
    name, field = chain.output.name, chain.output
    if not step.fill or name not in step.fill:
        return chain
    value = step.fill[name]
    number = isinstance(value, (bool, int, float))
    good = (
        isinstance(value, str) if field.kind == "string"
        else isinstance(value, bytes) if field.kind == "bytes"
        else number if field.kind in ("scalar", "tensor")
        else isinstance(value, list) and field.ndim == 1 and all(isinstance(v, (bool, int, float)) for v in value)
    )  # fmt: skip
    if good and field.dtype and not _fits(value, field.dtype):
        good = False
    if not good or chain.decodes:
        raise ConfigError(f"Select: fill={value!r} does not fit field {name!r}", cause=f"it holds {_kind(chain)}")
    return dataclasses.replace(
        chain, output=msgspec.structs.replace(field, nullable=False), steps=(*chain.steps, (index, step))
    )


def _fits(value: Any, dtype: str) -> bool:
    """Whether ``dtype`` can hold the number, or each number of the list, without changing its kind."""
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return True
    try:
        return bool(np.array_equal(np.array(value).astype(kind), np.array(value)))
    except (OverflowError, ValueError):
        return False


def _cast(chain: Chain, step: Cast) -> Chain:
    field = chain.output
    if field.kind not in ("scalar", "tensor", "ragged"):
        raise ConfigError(f"Cast: field {field.name!r} holds {field.kind}, not numbers", remedy="cast numbers only")
    return dataclasses.replace(chain, output=msgspec.structs.replace(field, dtype=step.dtype))


def _picture(chain: Chain, step: Step) -> Chain:
    field, what = chain.output, type(step).__name__
    if not chain.layout:
        raise ConfigError(
            f"{what}: field {field.name!r} holds {_kind(chain)}, not pictures", remedy="put DecodeImage before it"
        )
    if chain.layout == "chw":
        raise ConfigError(f"{what}: field {field.name!r} is already normalized", remedy=f"put {what} before Normalize")
    if isinstance(step, Normalize):
        return _normalized(chain, step)
    if isinstance(step, (Resize, RandomResizedCrop)) and (field.dtype != "uint8" or chain.channels not in (1, 3)):
        raise ConfigError(
            f"{what}: field {field.name!r} holds {_kind(chain)}", remedy="resize uint8 pictures of 1 or 3 channels"
        )
    size: Any = getattr(step, "size", None)
    if isinstance(step, CenterCrop) and field.kind == "tensor" and (
        field.shape[0] < size[0] or field.shape[1] < size[1]
    ):  # fmt: skip
        raise ConfigError(f"CenterCrop: {size} is larger than field {field.name!r}", cause=f"it is {field.shape[:2]}")
    if isinstance(step, Resize) and isinstance(size, int) and field.kind == "tensor":
        size = shorter_side(field.shape[0], field.shape[1], size)
    if not isinstance(size, tuple):
        return chain
    shape = (*size, chain.channels)
    return dataclasses.replace(chain, output=Field(name=field.name, kind="tensor", dtype=field.dtype, shape=shape))


def _normalized(chain: Chain, step: Normalize) -> Chain:
    field = chain.output
    mean, _ = step.channel_values(chain.channels)
    if len(mean) != chain.channels:
        raise ConfigError(
            f"Normalize: {len(mean)} means for field {field.name!r}", cause=f"it has {chain.channels} channels"
        )
    shape = (field.shape[2], *field.shape[:2]) if field.kind == "tensor" else ()
    output = msgspec.structs.replace(field, dtype="float32", shape=shape)
    return dataclasses.replace(chain, output=output, layout="chw")


def shorter_side(height: int, width: int, size: int) -> tuple[int, int]:
    """(height, width) after ``Resize(size)``: the shorter side is ``size``, the other rounded, at least 1."""
    if height <= width:
        return size, max(1, (2 * width * size + height) // (2 * height))
    return max(1, (2 * height * size + width) // (2 * width)), size
