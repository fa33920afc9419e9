"""What picture steps compute, against independent references."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from manifests.pipeline import CenterCrop, HorizontalFlip, Normalize, RandomResizedCrop
from worker import transforms
from worker.decode.port import BadPicture
from worker.pipeline import Draw, _op

Pixels = npt.NDArray[np.uint8]


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def cubic(x: float) -> float:
    x = abs(x)
    if x < 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0


def sampled(
    pixels: Pixels, size: tuple[int, int], kind: str, box: transforms.Box | None = None
) -> npt.NDArray[np.float64]:
    """Point sampling, one pixel at a time, straight from the definition."""
    top, left, height, width = box or (0, 0, *pixels.shape[:2])
    out = np.zeros((*size, pixels.shape[2]))
    reach = 1 if kind == "bilinear" else 2
    for y in range(size[0]):
        sy = top + (y + 0.5) * height / size[0] - 0.5
        for x in range(size[1]):
            sx = left + (x + 0.5) * width / size[1] - 0.5
            for j in range(math.floor(sy) - reach + 1, math.floor(sy) + reach + 1):
                for i in range(math.floor(sx) - reach + 1, math.floor(sx) + reach + 1):
                    if kind == "bilinear":
                        weight = (1 - abs(sy - j)) * (1 - abs(sx - i))
                    else:
                        weight = cubic(sy - j) * cubic(sx - i)
                    value = pixels[min(max(j, 0), pixels.shape[0] - 1), min(max(i, 0), pixels.shape[1] - 1)]
                    out[y, x] += weight * value
    return np.clip(out, 0, 255)


@pytest.mark.parametrize("kind", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("size", "box"), [((7, 9), None), ((40, 31), None), ((5, 6), (2, 3, 11, 8)), ((1, 1), None)])
def test_without_antialias_pixels_are_point_sampled(
    kind: str, size: tuple[int, int], box: transforms.Box | None
) -> None:
    pixels = noise(20, 17)
    got = transforms.resize(pixels, size, kind, False, box)  # type: ignore[arg-type]
    assert got.dtype == np.uint8 and got.shape == (*size, 3)
    assert np.abs(got - sampled(pixels, size, kind, box)).max() <= 0.51


@pytest.mark.parametrize("kind", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("channels", [1, 3])
def test_with_antialias_it_is_pillow(kind: str, channels: int) -> None:
    pixels = noise(30, 20, channels)
    image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    wanted = np.asarray(image.resize((9, 8), transforms._FILTERS[kind])).reshape(8, 9, channels)
    assert np.array_equal(transforms.resize(pixels, (8, 9), kind, True), wanted)  # type: ignore[arg-type]


def test_resize_takes_views_and_keeps_its_input() -> None:
    pixels = noise(12, 12)
    before = pixels.copy()
    flipped = transforms.resize(pixels[:, ::-1], (6, 6), "bilinear", True)
    assert np.array_equal(flipped, transforms.resize(np.ascontiguousarray(pixels[:, ::-1]), (6, 6), "bilinear", True))
    assert np.array_equal(pixels, before)


def test_center_crop() -> None:
    pixels = noise(7, 10)
    assert np.array_equal(transforms.center_crop(pixels, (3, 4)), pixels[2:5, 3:7])
    assert transforms.center_crop(pixels, (7, 10)).shape == (7, 10, 3)
    with pytest.raises(BadPicture, match=r"7 x 10 is smaller than CenterCrop\(\(8, 4\)\)"):
        transforms.center_crop(pixels, (8, 4))


def reference_box(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], numbers: list[float]
) -> object:
    """torchvision.transforms.RandomResizedCrop.get_params, with its uniform draws replaced by ``numbers``."""
    area = height * width
    for k in range(10):
        a, b, c, d = numbers[4 * k : 4 * k + 4]
        target = area * (scale[0] + (scale[1] - scale[0]) * a)
        log_ratio = (math.log(ratio[0]), math.log(ratio[1]))
        aspect = math.exp(log_ratio[0] + (log_ratio[1] - log_ratio[0]) * b)
        w = round(math.sqrt(target * aspect))
        h = round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return math.floor(c * (height - h + 1)), math.floor(d * (width - w + 1)), h, w
    in_ratio = float(width) / float(height)
    if in_ratio < min(ratio):
        w = width
        h = round(w / min(ratio))
    elif in_ratio > max(ratio):
        h = height
        w = round(h * max(ratio))
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize("shape", [(100, 80), (3, 500), (500, 3), (1, 1), (224, 224)])
def test_random_boxes_are_torchvisions(shape: tuple[int, int]) -> None:
    for seed in range(100):
        numbers = transforms.draws(seed, 0, 5, 1, 40)
        box = transforms.random_box(*shape, (0.08, 1.0), (3 / 4, 4 / 3), numbers)
        if min(shape) > 1:
            assert box == reference_box(*shape, (0.08, 1.0), (3 / 4, 4 / 3), numbers.tolist())
        top, left, height, width = box
        assert 0 <= top <= top + height <= shape[0] and 0 <= left <= left + width <= shape[1]
        assert height > 0 and width > 0


def test_normalize() -> None:
    pixels = noise(5, 6)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    wanted = ((pixels / 255 - np.array(mean)) / np.array(std)).transpose(2, 0, 1)
    got = transforms.normalize(pixels, mean, std, 1 / 255)
    assert got.dtype == np.float32 and got.flags.c_contiguous
    assert np.abs(got - wanted).max() < 2e-7
    assert np.array_equal(got, transforms.normalize(pixels.astype(np.float64), mean, std, 1 / 255))
    out = np.zeros((3, 5, 6), np.float32)
    assert transforms.normalize(pixels[:, ::-1], mean, std, 1 / 255, out) is out
    assert np.array_equal(out, got[:, :, ::-1])


def test_draws_depend_on_seed_epoch_sample_and_step_only_case_15() -> None:
    """case 15: the same (seed, epoch, sample id, step) gives the same draw, any other one another."""
    seen = {}
    for seed in range(3):
        for epoch in range(3):
            for sample in range(40):
                for step in range(2):
                    draw = tuple(transforms.draws(seed, epoch, sample, step, 3))
                    assert draw == tuple(transforms.draws(seed, epoch, sample, step, 5)[:3])
                    assert draw not in seen
                    seen[draw] = True
    assert len(seen) == 720
    assert transforms.draws(7, 1, 2**40, 3, 2).tolist() == GOLDEN_DRAW


GOLDEN_DRAW = [0.25015324259237437, 0.3385845691060816]


def test_random_steps_use_their_draws() -> None:
    pixels = noise(50, 40)
    crop, flip = _op(1, RandomResizedCrop(8), 3, None), _op(2, HorizontalFlip(), 3, None)  # type: ignore[arg-type]
    flips = 0
    crops = set()
    for sample in range(64):
        draw = Draw(1, 2, sample)
        assert np.array_equal(crop(pixels, draw), crop(pixels, draw))
        crops.add(crop(pixels, draw).tobytes())
        flipped = np.array_equal(flip(pixels, draw), pixels[:, ::-1])
        assert flipped == (transforms.draws(1, 2, sample, 2, 1)[0] < 0.5)
        flips += flipped
    assert 20 < flips < 44 and len(crops) == 64


def test_flip_always_and_never() -> None:
    pixels = noise(4, 4)
    for p, wanted in ((0.0, pixels), (1.0, pixels[:, ::-1])):
        op = _op(0, HorizontalFlip(p), 3, None)  # type: ignore[arg-type]
        assert all(np.array_equal(op(pixels, Draw(0, 0, i)), wanted) for i in range(10))


def test_ops_that_make_ragged_results() -> None:
    pixels = noise(6, 8)
    draw = Draw(0, 0, 0)
    normalize = _op(0, Normalize(0, 1, scale=1), 3, None)  # type: ignore[arg-type]
    assert np.array_equal(normalize(pixels, draw), pixels.transpose(2, 0, 1).astype(np.float32))
    assert _op(0, CenterCrop(4), 3, None)(pixels, draw).shape == (4, 4, 3)  # type: ignore[arg-type]
