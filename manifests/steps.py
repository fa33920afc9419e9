"""The pipeline's steps: frozen descriptions, checked when made, that run nothing.

Import them from ``manifests.pipeline`` (or ``feedline``). Pictures are uint8 arrays [height, width, channels] until
``Normalize`` makes them float32 [channels, height, width]. All sizes are (height, width).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

from .errors import ConfigError
from .schema import DTYPES

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")

#: longest side a step may produce, pixels
MAX_SIDE = 1 << 16


@dataclass(frozen=True)
class Step:
    """Base of all steps."""

    #: name and version of the step in the canonical encoding; a change in what a step computes is a new version
    TAG: ClassVar[str] = ""

    @property
    def random(self) -> bool:
        """True when the result depends on (seed, epoch, sample id)."""
        return False

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _refused(self, name: str, value: Any, remedy: str) -> ConfigError:
        return ConfigError(f"{type(self).__name__}: {name}={value!r} cannot work", remedy=remedy)

    def _check_field(self, name: str = "field") -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or not value:
            raise self._refused(name, value, "use the name of a field")

    def _check_bool(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise self._refused(name, value, "use True or False")

    def _side(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIDE:
            raise self._refused(name, value, f"use whole pixels from 1 to {MAX_SIDE}")
        return value

    def _pair(self, name: str) -> tuple[int, int]:
        """Attribute ``name`` as (height, width); one number means a square."""
        value = getattr(self, name)
        if isinstance(value, Sequence) and not isinstance(value, str):
            if len(value) != 2:
                raise self._refused(name, value, "use a number or (height, width)")
            return self._side(name, value[0]), self._side(name, value[1])
        return self._side(name, value), value

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._refused(name, value, "use finite numbers")
        return float(value)

    def _range(self, name: str, most: float) -> tuple[float, float]:
        value = getattr(self, name)
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
            raise self._refused(name, value, "use (lowest, highest)")
        low, high = self._number(name, value[0]), self._number(name, value[1])
        if not 0 < low <= high <= most:
            raise self._refused(name, value, "use (lowest, highest) above zero" + (" up to 1" if most == 1 else ""))
        return low, high


@dataclass(frozen=True)
class DecodeImage(Step):
    """Decode the picture in a bytes field to uint8 [height, width, channels]; the encoded field goes.

    Attributes:
        field: the encoded field; None: the one field that is named like a picture (jpg, png, image, ..).
        out: name of the decoded picture.
        mode: "RGB" (3 channels) or "L" (1 channel).
        device: where to decode; only "cpu" so far.
        fallback: reserved: the device to use where ``device`` is not there.
        orient: turn the picture upright by its EXIF orientation.
        max_pixels: a picture of more pixels is a bad sample; checked before it is decoded.
        dali: reserved: arguments for DALI's decoder.
    """

    TAG: ClassVar[str] = "decode-image/1"
    field: str | None = None
    _: KW_ONLY
    out: str = "image"
    mode: Literal["RGB", "L"] = "RGB"
    device: Literal["cpu", "mixed", "gpu"] = "cpu"
    fallback: str | None = None
    orient: bool = True
    max_pixels: int = 100_000_000
    dali: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.field is not None:
            self._check_field()
        self._check_field("out")
        self._check_bool("orient")
        if self.mode not in ("RGB", "L"):
            raise self._refused("mode", self.mode, 'use "RGB" or "L"')
        if self.device not in ("cpu", "mixed", "gpu"):
            raise self._refused("device", self.device, 'use "cpu", "mixed" or "gpu"')
        if self.fallback not in (None, "cpu"):
            raise self._refused("fallback", self.fallback, 'use None or "cpu"')
        if isinstance(self.max_pixels, bool) or not isinstance(self.max_pixels, int) or self.max_pixels < 1:
            raise self._refused("max_pixels", self.max_pixels, "use a whole number above zero")
        if self.dali is not None:
            if not isinstance(self.dali, Mapping):
                raise self._refused("dali", self.dali, "use a dict of arguments")
            self._set("dali", dict(self.dali))


@dataclass(frozen=True)
class Resize(Step):
    """Resize a picture. ``size`` int: the shorter side gets it and the other is rounded; (height, width): exact.

    ``antialias`` widens the filter by the scale when shrinking; without it a pixel comes from the 1 (nearest), 2x2
    (bilinear) or 4x4 (bicubic) pixels around its centre. ``lanczos`` needs it.
    """

    TAG: ClassVar[str] = "resize/1"
    size: int | tuple[int, int]
    _: KW_ONLY
    field: str = "image"
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        self._check_field()
        self._check_bool("antialias")
        if self.interpolation not in INTERPOLATIONS:
            raise self._refused("interpolation", self.interpolation, f"use one of {', '.join(INTERPOLATIONS)}")
        if self.interpolation == "lanczos" and not self.antialias:
            raise self._refused("antialias", False, "lanczos is only there with antialias=True")
        pair = self._pair("size")
        if not isinstance(self.size, int):
            self._set("size", pair)


@dataclass(frozen=True)
class CenterCrop(Step):
    """Cut out the middle; an int is a square. A picture smaller than the crop is a bad sample, never padded."""

    TAG: ClassVar[str] = "center-crop/1"
    size: int | tuple[int, int]
    _: KW_ONLY
    field: str = "image"

    def __post_init__(self) -> None:
        self._check_field()
        self._set("size", self._pair("size"))


@dataclass(frozen=True)
class RandomResizedCrop(Step):
    """Cut out a random part (share of the area in ``scale``, width / height in ``ratio``) and resize it, bilinear with
    antialias. The draw is torchvision's: ten tries, then the largest middle part of an allowed shape."""

    TAG: ClassVar[str] = "random-resized-crop/1"
    size: int | tuple[int, int]
    _: KW_ONLY
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    field: str = "image"

    def __post_init__(self) -> None:
        self._check_field()
        self._set("size", self._pair("size"))
        self._set("scale", self._range("scale", 1.0))
        self._set("ratio", self._range("ratio", math.inf))

    @property
    def random(self) -> bool:
        return True


@dataclass(frozen=True)
class HorizontalFlip(Step):
    """Mirror left and right with probability ``p`` (0 and 1 are not random)."""

    TAG: ClassVar[str] = "horizontal-flip/1"
    p: float = 0.5
    _: KW_ONLY
    field: str = "image"

    def __post_init__(self) -> None:
        self._check_field()
        self._set("p", self._number("p", self.p))
        if not 0 <= self.p <= 1:
            raise self._refused("p", self.p, "use a probability from 0 to 1")

    @property
    def random(self) -> bool:
        return 0 < self.p < 1


@dataclass(frozen=True)
class Normalize(Step):
    """``(value * scale - mean) / std`` per channel: float32 [channels, height, width].

    ``mean`` and ``std``: one number for all channels, or one per channel.
    """

    TAG: ClassVar[str] = "normalize/1"
    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]
    _: KW_ONLY
    scale: float = 1 / 255
    field: str = "image"

    def __post_init__(self) -> None:
        self._check_field()
        self._set("scale", self._number("scale", self.scale))
        for name in ("mean", "std"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, (int, float, Sequence)):
                raise self._refused(name, value, "use a number or one per channel")
            numbers = tuple(self._number(name, v) for v in (value if isinstance(value, Sequence) else (value,)))
            if not numbers or (name == "std" and 0.0 in numbers):
                raise self._refused(name, value, "use a number or one per channel" + ", not zero" * (name == "std"))
            self._set(name, numbers)
        mean, std = self.channel_values()
        if len(mean) != len(std):
            raise self._refused("std", self.std, f"mean has {len(mean)} numbers, use as many")

    def channel_values(self, channels: int = 1) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """mean and std, spread over the channels where one of them is a single number."""
        mean, std = self.mean, self.std
        if not isinstance(mean, tuple) or not isinstance(std, tuple):
            raise TypeError("mean and std are made tuples when the step is made")
        most = max(len(mean), len(std), channels)
        return (mean * most if len(mean) == 1 else mean), (std * most if len(std) == 1 else std)


@dataclass(frozen=True)
class Cast(Step):
    """Numbers of another dtype: floats are cut towards zero when they become integers, nothing is scaled."""

    TAG: ClassVar[str] = "cast/1"
    dtype: str
    _: KW_ONLY
    field: str = "image"

    def __post_init__(self) -> None:
        self._check_field()
        if self.dtype not in DTYPES:
            raise self._refused("dtype", self.dtype, f"use one of {', '.join(DTYPES)}")


@dataclass(frozen=True)
class Select(Step):
    """Keep these fields, in this order. ``fill`` maps a field to the value that replaces its nulls: a number (for a
    tensor: every element), text, bytes, or a list of numbers for a ragged field."""

    TAG: ClassVar[str] = "select/1"
    fields: tuple[str, ...]
    _: KW_ONLY
    fill: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)

    def __post_init__(self) -> None:
        if isinstance(self.fields, str) or not isinstance(self.fields, Sequence) or not self.fields:
            raise self._refused("fields", self.fields, "use a list of field names")
        for name in self.fields:
            if not isinstance(name, str) or not name:
                raise self._refused("fields", self.fields, "use a list of field names")
        if len(set(self.fields)) != len(self.fields):
            raise self._refused("fields", self.fields, "name each field once")
        self._set("fields", tuple(self.fields))
        if self.fill is None:
            return
        if not isinstance(self.fill, Mapping):
            raise self._refused("fill", self.fill, "use a dict: field -> value")
        for name, value in self.fill.items():
            if name not in self.fields:
                raise self._refused("fill", self.fill, f"{name!r} is not among the selected fields")
            if not isinstance(value, (bool, int, float, str, bytes, list, tuple)):
                raise self._refused("fill", self.fill, "use numbers, text, bytes or lists of numbers")
        self._set("fill", {k: list(v) if isinstance(v, tuple) else v for k, v in self.fill.items()} or None)


@dataclass(frozen=True)
class PythonMap(Step):
    """Reserved: a function of yours, applied to each row on the workers.

    ``function``: "package.module:function"; ``version``: changes whenever its result does.
    """

    TAG: ClassVar[str] = "python-map/1"
    function: str
    version: str
    _: KW_ONLY
    kind: Literal["map", "filter", "flat_map"] = "map"
    timeout: float = 30.0

    def __post_init__(self) -> None:
        if not isinstance(self.function, str) or not re.fullmatch(r"[\w.]+:[\w.]+", self.function):
            raise self._refused("function", self.function, 'use "package.module:function"')
        if not isinstance(self.version, str) or not self.version:
            raise self._refused("version", self.version, "use a text that changes with the function")
        if self.kind not in ("map", "filter", "flat_map"):
            raise self._refused("kind", self.kind, 'use "map", "filter" or "flat_map"')
        self._set("timeout", self._number("timeout", self.timeout))
        if self.timeout <= 0:
            raise self._refused("timeout", self.timeout, "use seconds above zero")


#: every step there is, by its tag
STEPS: dict[str, type[Step]] = {
    kind.TAG: kind
    for kind in (
        DecodeImage, Resize, CenterCrop, RandomResizedCrop, HorizontalFlip, Normalize, Cast, Select, PythonMap,
    )
}  # fmt: skip
