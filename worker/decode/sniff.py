"""What kind of file the leading bytes say it is; names and extensions are never looked at."""

from __future__ import annotations

import struct

from .port import BadPicture

_PNG = b"\x89PNG\r\n\x1a\n"

#: leading bytes -> what it is; pictures the CPU decoder takes
_PICTURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (_PNG, "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"II+\x00", "TIFF"),
    (b"MM\x00+", "TIFF"),
)

#: what else people find under picture names; the reason says so
_OTHERS = (
    (b"\x1f\x8b", "gzip: it is compressed once more, unpack it first"),
    (b"PK\x03\x04", "zip archive, not a picture"),
    (b"\x00\x00\x00\x0cjP  ", "JPEG 2000, which is not decoded here"),
    (b"\xff\x4f\xff\x51", "JPEG 2000, which is not decoded here"),
    (b"%PDF", "PDF, not a picture"),
)


def sniff(data: memoryview) -> str:
    """ "JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF" or "PPM".

    Raises:
        BadPicture: anything else; the reason names what it is where that can be told.
    """
    head = bytes(data[:64])
    if not head:
        raise BadPicture("empty: 0 bytes")
    for magic, kind in _PICTURES:
        if head.startswith(magic):
            return kind
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if len(head) > 2 and head[:1] == b"P" and head[1:2] in b"123456" and head[2:3] in b" \t\r\n#":
        return "PPM"
    for magic, what in _OTHERS:
        if head.startswith(magic):
            raise BadPicture(what)
    if _is_text(head):
        raise BadPicture(f"text, not a picture: it starts with {head[:24].decode('utf-8', 'replace')!r}")
    raise BadPicture(f"not a picture of a known kind: it starts with {head[:8]!r}")


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:
            return False
        text = head[: error.start].decode()
    return bool(text) and all(c.isprintable() or c in "\t\r\n" for c in text)


def without_text(data: memoryview) -> memoryview | bytes:
    """A PNG without its compressed text and colour-profile chunks, which decoders limit in size and pixels do not need.

    EXIF kept as text by some tools ("Raw profile type exif") stays. Data without such chunks comes back as it is.
    """
    kept: list[memoryview] = [data[: len(_PNG)]]
    position, dropped = len(_PNG), False
    while position + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, position)
        kind = bytes(data[position + 4 : position + 8])
        end = position + 12 + length
        if kind == b"IDAT" and not dropped:
            return data
        exif = bytes(data[position + 8 : position + 28]).startswith(b"Raw profile type exi")
        if kind in (b"zTXt", b"iTXt", b"iCCP") and end <= len(data) and not exif:
            dropped = True
            position = end
            continue
        if kind == b"IDAT":
            break
        kept.append(data[position:end])
        position = end
    return b"".join([*kept, data[position:]]) if dropped else data
