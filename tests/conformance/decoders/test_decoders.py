"""What every decoder must do, run on each backend that is installed."""

from __future__ import annotations

import contextlib
import gzip
import io
import struct
import zlib

import numpy as np
import numpy.typing as npt
import psutil
import pytest
from PIL import Image, ImageFile, PngImagePlugin

from manifests.errors import ConfigError
from worker.decode import BACKENDS, BadPicture, Decoder, decoder
from worker.decode.port import Mode

Pixels = npt.NDArray[np.uint8]


def installed() -> list[str]:
    """Backends that are there; the suite runs on each."""
    found = []
    for name in BACKENDS:
        with contextlib.suppress(ConfigError):
            decoder(name)
            found.append(name)
    return found


@pytest.fixture(params=installed())
def backend(request: pytest.FixtureRequest) -> Decoder:
    return decoder(request.param)


@pytest.mark.parametrize(("name", "word"), [("dali", r"\[dali\] extra"), ("gpu", "unknown decoder 'gpu'")])
def test_a_backend_that_is_not_there_says_so(name: str, word: str) -> None:
    if name in installed():
        pytest.skip(f"{name} is there")
    with pytest.raises(ConfigError, match=word):
        decoder(name)


def decode(backend: Decoder, data: bytes, mode: Mode = "RGB", orient: bool = True, most: int = 10**8) -> Pixels:
    pixels = backend.decode(memoryview(data), mode=mode, orient=orient, max_pixels=most)
    assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == (3 if mode == "RGB" else 1)
    return pixels


def bad(backend: Decoder, data: bytes, most: int = 10**8) -> str:
    with pytest.raises(BadPicture) as found:
        backend.decode(memoryview(data), mode="RGB", orient=True, max_pixels=most)
    assert "\n" not in str(found.value)
    return str(found.value)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def smooth(height: int, width: int) -> Pixels:
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([y * 255 // height, x * 255 // width, (x + y) * 255 // (height + width)], axis=2).astype(np.uint8)


def noisy(height: int = 64, width: int = 64) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8))


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_of(values: npt.NDArray[np.generic], colour: int) -> bytes:
    """A PNG of big-endian 16-bit samples, written by hand: Pillow writes few 16-bit modes."""
    height, width = values.shape[:2]
    rows = values.astype(">u2").reshape(height, -1)
    data = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    head = struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_names_itself(backend: Decoder) -> None:
    assert backend.fingerprint() == decoder(backend.fingerprint().split()[0]).fingerprint()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "JPEG"])
def test_kinds_are_told_by_content_case_29(backend: Decoder, kind: str) -> None:
    """case 29: nobody looks at names; each kind decodes from its bytes."""
    image = Image.fromarray(smooth(16, 24))
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95}}.get(kind, {})
    got = decode(backend, saved(image, kind, **options))
    assert got.shape == (16, 24, 3)
    limit = {"GIF": 60, "JPEG": 12}.get(kind, 0)
    assert np.abs(got.astype(int) - np.asarray(image)).max() <= limit


def test_what_is_no_picture_is_named_case_29(backend: Decoder) -> None:
    """case 29: gzip of a picture, a page of text and other files are bad, and the reason says what they are."""
    jpeg = saved(noisy(), "JPEG")
    assert bad(backend, gzip.compress(jpeg)).startswith("gzip")
    assert bad(backend, b"<!DOCTYPE html><html>404</html>").startswith("text")
    assert "0 bytes" in bad(backend, b"")
    assert "zip" in bad(backend, b"PK\x03\x04" + b"\0" * 40)
    assert "JPEG 2000" in bad(backend, b"\x00\x00\x00\x0cjP  \r\n\x87\n")
    assert "known kind" in bad(backend, bytes(np.random.default_rng(3).integers(128, 255, 100, np.uint8)))
    for magic in (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"II*\0", b"RIFF\x10\0\0\0WEBP", b"P6\n"):
        for tail in (b"", b"\0" * 50, b"\xff" * 50, bytes(range(200))):
            bad(backend, magic + tail)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("tag", [1, 2, 3, 4, 5, 6, 7, 8, 0, 9])
def test_orientation_case_28(backend: Decoder, kind: str, tag: int) -> None:
    """case 28: all tags give the same upright picture; off, the stored pixels."""
    upright = np.zeros((8, 16, 3), np.uint8)
    upright[:4, :4] = 255
    back = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    image = Image.fromarray(upright)
    stored = image.transpose(back[tag]) if tag in back else image
    exif = Image.Exif()
    exif[0x0112] = tag
    data = saved(stored, kind, exif=exif.tobytes(), **({"quality": 95, "subsampling": 0} if kind == "JPEG" else {}))
    got = decode(backend, data)
    assert got.shape == (8, 16, 3)
    assert np.abs(got.astype(int) - upright).max() < 40
    off = decode(backend, data, orient=False)
    assert off.shape == np.asarray(stored).shape
    assert np.abs(off.astype(int) - np.asarray(stored)).max() < 40


@pytest.mark.parametrize("tag", range(1, 9))
def test_orientation_of_tiff(backend: Decoder, tag: int) -> None:
    stored = smooth(6, 10)
    data = saved(Image.fromarray(stored), "TIFF", tiffinfo={0x0112: tag})
    assert np.array_equal(decode(backend, data, orient=False), stored)
    assert decode(backend, data).shape == ((10, 6, 3) if tag > 4 else (6, 10, 3))


def test_damaged_exif_is_no_reason_to_lose_a_picture(backend: Decoder) -> None:
    data = saved(noisy(), "PNG", exif=b"Exif\0\0garbage")
    assert decode(backend, data).shape == (64, 64, 3)


def test_cmyk_case_27(backend: Decoder) -> None:
    """case 27: within 3 of Pillow's own conversion."""
    values = np.zeros((16, 16, 4), np.uint8)
    values[:8, :8, 0] = values[:8, 8:, 1] = values[8:, :8, 2] = values[8:, 8:, 3] = 200
    data = saved(Image.fromarray(values, "CMYK"), "JPEG", quality=95)
    wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    assert np.abs(decode(backend, data) - wanted).mean() <= 3


def test_sixteen_bits_are_scaled_case_30(backend: Decoder) -> None:
    """case 30: a ramp of 0 to 65535 gives a monotone ramp within 1 of value / 257."""
    ramp = np.linspace(0, 65535, 1024).astype(np.uint16).reshape(4, 256)
    wanted = ramp / 257
    for data in (
        png_of(ramp, 0),
        saved(Image.fromarray(ramp), "TIFF"),
        b"P5 256 4 65535\n" + ramp.astype(">u2").tobytes(),
    ):
        for mode in ("RGB", "L"):
            got = decode(backend, data, mode=mode)  # type: ignore[arg-type]
            assert np.abs(got[:, :, 0] - wanted).max() <= 1
            flat = got[:, :, 0].reshape(-1).astype(int)
            assert (np.diff(flat) >= 0).all() and len(np.unique(flat)) > 200
    rgb = np.stack([ramp, ramp, 65535 - ramp], axis=2)
    assert np.abs(decode(backend, png_of(rgb, 2)) - rgb / 257).max() <= 1
    rgba = np.concatenate([rgb, ramp[:, :, None]], axis=2)
    assert np.abs(decode(backend, png_of(rgba, 6)) - rgb / 257).max() <= 1
    bad(backend, saved(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"))


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_few_bits_case_30(backend: Decoder, bits: int) -> None:
    """case 30: grey of 1, 2 and 4 bits spans black to white."""
    levels = 1 << bits
    values = np.arange(16, dtype=np.uint8).reshape(1, 16) % levels
    packed = np.packbits(np.unpackbits(values[:, :, None], axis=2)[:, :, 8 - bits :].reshape(1, -1))
    head = struct.pack(">IIBBBBB", 16, 1, bits, 0, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" + packed.tobytes()))
    got = decode(backend, data + chunk(b"IEND", b""))
    assert np.array_equal(got[0, :, 1], values[0].astype(int) * 255 // (levels - 1))


def test_palettes_and_transparency_case_31(backend: Decoder) -> None:
    """case 31: real colours, exactly the channels asked for; transparency is dropped."""
    colours = smooth(16, 16)
    rgb = Image.fromarray(colours)
    alpha = Image.fromarray(np.tile(np.arange(0, 256, 16, dtype=np.uint8), (16, 1)))
    palette = rgb.quantize(64)
    as_rgb = np.asarray(palette.convert("RGB"))
    grey = np.asarray(rgb.convert("L"))
    with_alpha = rgb.copy()
    with_alpha.putalpha(alpha)
    cases = [
        (saved(palette, "PNG"), as_rgb),
        (saved(palette, "PNG", transparency=3), as_rgb),
        (saved(palette, "PNG", transparency=bytes(range(64))), as_rgb),
        (saved(palette, "GIF"), as_rgb),
        (saved(with_alpha, "PNG"), colours),
        (saved(rgb, "PNG", transparency=(1, 2, 3)), colours),
        (saved(Image.merge("LA", (rgb.convert("L"), alpha)), "PNG"), np.repeat(grey[:, :, None], 3, 2)),
        (saved(rgb.convert("L"), "PNG"), np.repeat(grey[:, :, None], 3, 2)),
        (saved(rgb.convert("L"), "PNG", transparency=7), np.repeat(grey[:, :, None], 3, 2)),
        (saved(rgb.convert("1"), "PNG"), np.asarray(rgb.convert("1").convert("RGB"))),
    ]
    for data, wanted in cases:
        assert np.array_equal(decode(backend, data), wanted)
        assert decode(backend, data, mode="L").shape == (16, 16, 1)


def test_cut_pictures_are_bad_case_33(backend: Decoder) -> None:
    """case 33: a picture that ends early is never delivered half grey."""
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"):
        data = saved(noisy(), kind)
        bad(backend, data[:20])
        bad(backend, data[: len(data) // 2])
    jpeg = saved(noisy(), "JPEG")
    try:
        whole = decode(backend, jpeg[:-2])
    except BadPicture:
        return
    assert np.array_equal(whole, decode(backend, jpeg))


def test_limits_are_checked_from_the_header_case_34(backend: Decoder) -> None:
    """case 34: no memory is taken for a picture over the limit, small files with large texts decode."""
    png = saved(noisy(8, 8), "PNG")
    head = struct.pack(">IIBBBBB", 30000, 30000, 8, 2, 0, 0, 0)
    huge = png[:8] + chunk(b"IHDR", head) + png[33:]
    jpeg = bytearray(saved(noisy(8, 8), "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 30000, 30000)
    before = psutil.Process().memory_info().rss
    for data in (huge, bytes(jpeg)):
        assert "max_pixels=100000000" in bad(backend, data)
    assert psutil.Process().memory_info().rss - before < 50 << 20
    real = saved(Image.new("RGB", (3000, 3000)), "PNG")
    assert "max_pixels=1000000" in bad(backend, real, most=10**6)
    assert decode(backend, real, most=10**7).shape == (3000, 3000, 3)
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", "x" * (2 << 20), zip=True)
    assert decode(backend, saved(noisy(8, 8), "PNG", pnginfo=text)).shape == (8, 8, 3)


def test_one_bad_picture_harms_no_other_case_32(backend: Decoder) -> None:
    """case 32: the same decoder goes on, with the same results."""
    good = [saved(noisy(16 + i, 16), "JPEG") for i in range(8)]
    wanted = [decode(backend, data) for data in good]
    for data, pixels in zip(good, wanted):
        bad(backend, data[:100])
        bad(backend, b"")
        assert np.array_equal(decode(backend, data), pixels)


def test_mutated_pictures_only_ever_raise_bad_picture(backend: Decoder) -> None:
    rng = np.random.default_rng(5)
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"):
        data = np.frombuffer(saved(noisy(24, 24), kind), np.uint8)
        for _ in range(60):
            changed = data.copy()
            at = rng.integers(0, len(data), 3)
            changed[at] = rng.integers(0, 256, 3)
            try:
                decode(backend, changed.tobytes(), most=10**6)
            except BadPicture:
                pass
