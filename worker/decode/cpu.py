"""The CPU decoder: Pillow (libjpeg-turbo, libpng, libwebp), which releases the interpreter lock while it works.

Rules, the same for every kind of picture:
- 16-bit grey is scaled (value / 257), never clamped. Pixels without a defined range (32-bit, float) are bad samples.
- Palettes become their real colours, transparency is dropped, CMYK goes through Pillow's conversion.
- Text and colour profiles are ignored. Of an animation the first frame is taken.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
    features,
)

from .port import U8, BadPicture, Mode
from .sniff import sniff, without_text

_ORIENTATION = 0x0112
_TURN = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
#: what undoes each of them; Pillow turns TIFF by itself while it loads it
_BACK = {5: _TURN[5], 6: _TURN[8], 7: _TURN[7], 8: _TURN[6], 2: _TURN[2], 3: _TURN[3], 4: _TURN[4]}

#: pictures of more pixels than this are decoded one at a time, so that a few of them do not fill the memory
LARGE = 16_000_000

_OPENERS: dict[str, Callable[[Any], ImageFile.ImageFile]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
    "PPM": PpmImagePlugin.PpmImageFile,
}


class CpuDecoder:
    """``Decoder`` on Pillow.

    Making one sets ``PIL.Image.MAX_IMAGE_PIXELS`` to None for the process: that limit is one number for everybody, and
    ``max_pixels`` is checked here for every picture.
    """

    def __init__(self) -> None:
        Image.MAX_IMAGE_PIXELS = None
        self._large = threading.Lock()

    def __repr__(self) -> str:
        return f"CpuDecoder({self.fingerprint()})"

    def fingerprint(self) -> str:
        """Backend and library versions."""
        parts = [f"cpu pillow={PIL.__version__}", f"numpy={np.__version__}"]
        for name in ("jpg", "libjpeg_turbo", "zlib", "webp", "libtiff"):
            version = features.version(name)
            parts.append(f"{name}={version or '-'}")
        return " ".join(parts)

    def decode(self, data: memoryview, *, mode: Mode, orient: bool, max_pixels: int) -> U8:
        """See ``Decoder.decode``."""
        kind = sniff(data)
        try:
            image = _OPENERS[kind](io.BytesIO(without_text(data) if kind == "PNG" else data))
            width, height = image.size
            if width * height > max_pixels:
                raise BadPicture(f"{kind} of {height} x {width} pixels: more than max_pixels={max_pixels}")
            if width * height > LARGE:
                with self._large:
                    return _pixels(image, kind, mode, orient)
            return _pixels(image, kind, mode, orient)
        except (BadPicture, MemoryError):  # no memory is this worker's fault, not the picture's
            raise
        # Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error, zlib.error, KeyError and others on
        # damaged data: whatever it is, it is this picture's fault and no other's.
        except Exception as error:
            raise BadPicture(f"{kind}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return text or type(error).__name__


def _pixels(image: Image.Image, kind: str, mode: Mode, orient: bool) -> U8:
    if kind == "TIFF":
        turn = None if orient else _BACK.get(_orientation(image))
        image.load()
    else:
        image.load()  # first: reading EXIF may load the pixels, and would hide that they are damaged
        turn = _TURN.get(_orientation(image)) if orient else None
    if image.mode.startswith("I") or image.mode == "F":
        array = _wide(image, kind, turn)
        return np.repeat(array[:, :, None], 3, axis=2) if mode == "RGB" else array[:, :, None]
    # Transparency is dropped; where a table of it stayed, convert() would try to keep it.
    image.info.pop("transparency", None)
    if image.mode in ("RGBa", "La"):
        image = image.convert("RGBA" if image.mode == "RGBa" else "LA")
    if image.mode != mode:
        image = image.convert(mode)
    if turn is not None:
        image = image.transpose(turn)
    pixels: U8 = np.asarray(image)
    return pixels[:, :, None] if mode == "L" else pixels


def _wide(image: Image.Image, kind: str, turn: Image.Transpose | None) -> U8:
    """Grey of more than 8 bits, as 8 bits."""
    if not (image.mode.startswith("I;16") or (image.mode == "I" and kind in ("PNG", "PPM"))):
        raise BadPicture(f"{kind} with pixels of mode {image.mode!r}, whose range is not known")
    values = np.asarray(image if turn is None else image.transpose(turn)).astype(np.uint32)
    return ((np.minimum(values, 65535) + 128) // 257).astype(np.uint8)


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    # EXIF that cannot be read says nothing about the picture, which may well be good: as if it had none.
    except Exception:
        return 1
    return value if isinstance(value, int) else 1
