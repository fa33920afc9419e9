"""Writes two small datasets of real pictures, taken from packages, as WebDataset tar shards of uneven size.

digits   1,797 handwritten digits of scikit-learn (8x8 grey, enlarged to 32x32) as PNG with their class:
         1,497 in 20 training shards, 300 held out in one
photos   240 crops of scikit-image's photographs as JPEG with a caption, in 6 shards

python examples/make_digits.py build/demo/data
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import skimage.data
from PIL import Image
from sklearn.datasets import load_digits

HELD_OUT = 300
TRAIN_SHARDS = 20
CROPS = 240
PHOTO_SHARDS = 6
SIDE = 32
SEED = 7
#: photographs that scikit-image has in its package, so that nothing is downloaded
PHOTOS = ("astronaut", "chelsea", "coffee", "rocket")

Member = tuple[str, bytes]


def write_all(folder: Path) -> dict[str, list[Path]]:
    """Write everything below ``folder``. Returns dataset name -> its shards."""
    images, labels = digits()
    order = np.random.default_rng(SEED).permutation(len(images))
    held_out, train = order[:HELD_OUT], order[HELD_OUT:]
    return {
        "digits": write_shards(folder / "digits", digit_samples(images, labels, train), len(train), TRAIN_SHARDS),
        "digits-test": write_shards(folder / "digits-test", digit_samples(images, labels, held_out), HELD_OUT, 1),
        "photos": write_shards(folder / "photos", photo_samples(), CROPS, PHOTO_SHARDS),
    }


def digits() -> tuple[np.ndarray, np.ndarray]:
    """uint8 [n, 8, 8] (0 to 255) and int [n] (0 to 9)."""
    found = load_digits()
    return (found.images * (255 / 16)).astype(np.uint8), found.target


def digit_samples(images: np.ndarray, labels: np.ndarray, which: Sequence[int] | np.ndarray) -> Iterator[list[Member]]:
    """Per picture its PNG and its class."""
    for index in which:
        picture = Image.fromarray(images[index]).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        key = f"{int(index):04d}"
        yield [(f"{key}.png", encoded(picture, "PNG")), (f"{key}.cls", str(int(labels[index])).encode())]


def photo_samples() -> Iterator[list[Member]]:
    """Per crop its JPEG, a caption and where it was cut out."""
    rng = np.random.default_rng(SEED)
    photos = {name: Image.fromarray(getattr(skimage.data, name)()).convert("RGB") for name in PHOTOS}
    for index in range(CROPS):
        name = PHOTOS[index % len(PHOTOS)]
        photo = photos[name]
        width, height = (int(side) for side in rng.integers(96, 257, 2))
        left, top = int(rng.integers(photo.width - width + 1)), int(rng.integers(photo.height - height + 1))
        crop = photo.crop((left, top, left + width, top + height))
        box = json.dumps({"photo": name, "left": left, "top": top, "width": width, "height": height})
        key = f"{index:04d}"
        caption = f"part of {name}".encode()
        yield [(f"{key}.jpg", encoded(crop, "JPEG")), (f"{key}.txt", caption), (f"{key}.json", box.encode())]


def encoded(picture: Image.Image, form: str) -> bytes:
    """The picture's file."""
    out = io.BytesIO()
    picture.save(out, form, quality=90)
    return out.getvalue()


def write_shards(folder: Path, samples: Iterator[list[Member]], rows: int, shards: int) -> list[Path]:
    """Cut ``rows`` samples into ``shards`` tar files of uneven size."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, size in enumerate(uneven(rows, shards)):
        path = folder / f"{folder.name}-{number:03d}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for _ in range(size):
                for name, data in next(samples):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        paths.append(path)
    return paths


def uneven(rows: int, parts: int) -> list[int]:
    """``parts`` sizes, each at least one, from small to several times that, that add up to ``rows``."""
    weights = np.random.default_rng(SEED).uniform(0.3, 2.0, parts)
    cuts = np.round(np.cumsum(weights) / weights.sum() * rows).astype(int)
    return [int(size) for size in np.diff(cuts, prepend=0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    for name, paths in write_all(parser.parse_args().folder).items():
        print(f"{name}: {len(paths)} shards, {sum(path.stat().st_size for path in paths):,} bytes")


if __name__ == "__main__":
    main()
