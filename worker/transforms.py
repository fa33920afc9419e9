"""What picture steps compute, one picture at a time: pure functions of a picture and, for random ones, of a key.

Pictures are uint8 [height, width, 3 or 1] in and out. The heavy parts run in Pillow and numpy without the interpreter
lock. A random step draws from the stream keyed by (seed, epoch, sample id, index of the step in the pipeline), so the
draw for a row is the same on every worker, in every batch, at any time.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from manifests.identity import random_unit, stream_key
from manifests.steps import Interpolation

from .decode.port import U8, BadPicture

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

#: a part of a picture: top, left, height, width
Box = tuple[int, int, int, int]


def draws(seed: int, epoch: int, sample_id: int, step: int, count: int) -> F64:
    """``count`` numbers in [0, 1) for one random step of one row."""
    return random_unit(stream_key("augment", seed, epoch, sample_id, step), 0, count)


def to_image(pixels: U8) -> Image.Image:
    """A Pillow picture over the same pixels."""
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def to_pixels(image: Image.Image) -> U8:
    """[height, width, channels] of a Pillow picture in mode RGB or L."""
    pixels: U8 = np.asarray(image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def resize(
    pixels: U8, size: tuple[int, int], interpolation: Interpolation, antialias: bool, box: Box | None = None
) -> U8:
    """``pixels``, or the part ``box`` of them, as ``size`` = (height, width).

    With ``antialias`` the filter grows with the scale when shrinking (Pillow's resize; near the edges of ``box`` it
    also sees the pixels around it). Without, it has its own size: centres half a pixel in, edges clamped, rounded.
    """
    top, left, height, width = box or (0, 0, *pixels.shape[:2])
    if antialias or interpolation == "nearest":
        image = to_image(np.ascontiguousarray(pixels))
        edges = (left, top, left + width, top + height)
        return to_pixels(image.resize((size[1], size[0]), _FILTERS[interpolation], box=edges))
    rows, row_weights = _taps(pixels.shape[0], top, height, size[0], interpolation)
    columns, column_weights = _taps(pixels.shape[1], left, width, size[1], interpolation)
    tall = np.zeros((size[0], *pixels.shape[1:]), np.float32)
    for index, weight in zip(rows, row_weights):
        tall += pixels[index] * weight[:, None, None]
    made = np.zeros((*size, pixels.shape[2]), np.float32)
    for index, weight in zip(columns, column_weights):
        made += tall[:, index] * weight[None, :, None]
    np.rint(made, out=made)
    np.clip(made, 0, 255, out=made)
    return made.astype(np.uint8)


@lru_cache(maxsize=256)
def _taps(limit: int, start: int, length: int, size: int, interpolation: str) -> tuple[npt.NDArray[np.int64], F32]:
    """Source index and weight of each tap for each output position: [taps, size] both."""
    centre = start + (np.arange(size) + 0.5) * (length / size) - 0.5
    first = np.floor(centre)
    part = centre - first
    if interpolation == "bilinear":
        offsets, weights = [0, 1], [1 - part, part]
    else:
        offsets, weights = [-1, 0, 1, 2], [_cubic(part + 1), _cubic(part), _cubic(1 - part), _cubic(2 - part)]
    index = np.clip(first[None, :] + np.array(offsets)[:, None], 0, limit - 1).astype(np.int64)
    return index, np.stack(weights).astype(np.float32)


def _cubic(x: F64) -> F64:
    """Keys' cubic with a = -0.5, as Pillow's bicubic."""
    a = -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def center_crop(pixels: U8, size: tuple[int, int]) -> U8:
    """The middle of ``pixels``: a view.

    Raises:
        BadPicture: the picture is smaller than ``size``.
    """
    height, width = pixels.shape[:2]
    if height < size[0] or width < size[1]:
        raise BadPicture(f"picture of {height} x {width} is smaller than CenterCrop({size}); put Resize before it")
    top, left = round((height - size[0]) / 2), round((width - size[1]) / 2)
    return pixels[top : top + size[0], left : left + size[1]]


def random_box(height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], numbers: F64) -> Box:
    """Part of a ``height`` x ``width`` picture for RandomResizedCrop; ``numbers``: 40 in [0, 1), four per try.

    torchvision's rule: area uniform in ``scale``, aspect log-uniform in ``ratio``; after ten tries that do not fit, the
    largest middle part whose aspect is allowed.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for area, aspect, down, right in numbers.reshape(10, 4).tolist():
        target = height * width * (scale[0] + (scale[1] - scale[0]) * area)
        shape = math.exp(low + (high - low) * aspect)
        w, h = round(math.sqrt(target * shape)), round(math.sqrt(target / shape))
        if 0 < w <= width and 0 < h <= height:
            return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w
    h, w = height, width
    if width / height < ratio[0]:
        h = max(1, min(height, round(width / ratio[0])))
    elif width / height > ratio[1]:
        w = max(1, min(width, round(height * ratio[1])))
    return (height - h) // 2, (width - w) // 2, h, w


@lru_cache(maxsize=64)
def _tables(mean: tuple[float, ...], std: tuple[float, ...], scale: float) -> F32:
    """float32 [channels, 256]: the normalized value of each byte."""
    values = np.arange(256, dtype=np.float64)[None, :] * scale
    table: F32 = ((values - np.array(mean)[:, None]) / np.array(std)[:, None]).astype(np.float32)
    return table


def normalize(
    pixels: npt.NDArray[Any],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    scale: float,
    out: F32 | None = None,
) -> F32:
    """``(value * scale - mean) / std``: [height, width, channels] of any dtype to float32 [channels, height, width].

    uint8 goes through a table computed in float64, so each value is the nearest float32. ``out`` takes the result.
    """
    height, width, channels = pixels.shape
    made: F32 = np.empty((channels, height, width), np.float32) if out is None else out
    if pixels.dtype == np.uint8:
        table = _tables(mean, std, scale)
        for channel in range(channels):
            np.take(table[channel], pixels[:, :, channel], out=made[channel], mode="clip")
        return made
    for channel in range(channels):
        value = pixels[:, :, channel].astype(np.float64)
        made[channel] = (value * scale - mean[channel]) / std[channel]
    return made
