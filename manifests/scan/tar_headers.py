"""Walks the headers of a tar archive: USTAR, GNU (long names, base-256 numbers) and PAX (local and global records).

Written against POSIX.1-2017 "pax Interchange Format" and the GNU tar manual, "Basic Tar Format". ``tarfile`` is not
used because it hides where the archive was cut and why it stopped. Names and data offsets are those ``tarfile`` gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .port import Bytes, Note, Window

BLOCK = 512
_ZEROS = bytes(BLOCK)
#: longest extra header (long name, PAX records) that is believed, bytes
_MOST_EXTRA = 1 << 20
#: how far behind the end mark non-zero bytes are looked for
_TRAILER = 64 << 10
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Member(NamedTuple):
    """One entry: ``regular`` files have data at ``[offset, offset + size)``; ``cut``: the archive ends inside it."""

    name: str
    regular: bool
    folder: bool
    header: int
    offset: int
    size: int
    cut: bool = False


class _Damaged(Exception):
    """A header that cannot be believed."""


def walk(source: Bytes) -> Iterator[Member | Note]:
    """Members in archive order, then at most one note that says why the walk ended before a proper end mark.

    Every step goes forward by at least one block, so the walk ends on any input.
    """
    window = Window(source)
    general: dict[str, str] = {}
    extra: dict[str, str] = {}
    at = 0
    while True:
        block = bytes(window.read(at, BLOCK))
        if len(block) < BLOCK:
            note = _ended(block, at, bool(extra))
            if note:
                yield note
            return
        if block == _ZEROS:
            yield from _after_end(source, at)
            return
        if not checksum_ok(block):
            yield _not_a_header(block, at)
            return
        try:
            size = _number(block[124:136], "size")
            kind = block[156:157]
            if kind in b"LKxXg":
                if size > _MOST_EXTRA:
                    raise _Damaged(f"extra header of {size} bytes")
                data = bytes(window.read(at + BLOCK, size))
                if len(data) < size:
                    yield Note(
                        "cut", f"it ends at byte {source.size}, inside a header that begins at byte {at}", source.size
                    )
                    return
                if kind == b"L":
                    extra.setdefault("path", _text(data))
                elif kind == b"g":
                    general.update(_records(data))
                elif kind in b"xX":
                    for key, value in _records(data).items():
                        extra.setdefault(key, value)
                at += BLOCK + _padded(size)
                continue
            member = _member(block, kind, size, at, {**general, **extra})
        except _Damaged as error:
            yield Note("damaged", f"header at byte {at}: {error}", at)
            return
        if member is None:
            yield Note("unsupported", f"sparse member at byte {at}", at)
            return
        extra = {}
        end = member.offset + member.size
        if end > source.size:
            yield member._replace(cut=True)
            yield Note("cut", f"it ends at byte {source.size}, inside member {member.name!r} at byte {at}", source.size)
            return
        yield member
        at = member.offset + _padded(member.size)


def checksum_ok(block: bytes) -> bool:
    """True if ``block`` (512 bytes) is a tar header: its checksum fits, counted unsigned or, as old tars did, signed."""
    try:
        stated = int(block[148:156].split(b"\0", 1)[0].strip() or b"0", 8)
    except ValueError:
        return False
    total = 256 + sum(block) - sum(block[148:156])
    if stated == total:
        return True
    high = sum(1 for byte in block[:148] + block[156:] if byte > 127)
    return high > 0 and stated == total - 256 * high


def _member(block: bytes, kind: bytes, size: int, at: int, extra: dict[str, str]) -> Member | None:
    """The entry of a header; None for a sparse file, whose data are not stored in one piece."""
    if kind == b"S" or any(key.startswith("GNU.sparse.") for key in extra):
        return None
    name = _text(block[:100])
    if block[257:263] == b"ustar\0" and (prefix := _text(block[345:500])):
        name = f"{prefix}/{name}"
    name = extra.get("path", name)
    if "size" in extra:
        try:
            size = int(extra["size"])
        except ValueError:
            raise _Damaged(f"size {extra['size'][:40]!r} in a PAX record") from None
    if size < 0:
        raise _Damaged(f"size {size}")
    regular = kind in (b"0", b"7") or (kind == b"\0" and not name.endswith("/"))
    if kind in (b"\0", b"1", b"2", b"3", b"4", b"5", b"6") and not regular:
        size = 0
    folder = kind == b"5" or (kind == b"\0" and not regular)
    return Member(name.rstrip("/"), regular, folder, at, at + BLOCK, size)


def _number(field: bytes, what: str) -> int:
    """Octal digits, or base-256 when the first byte says so."""
    if field[0] in (0x80, 0xFF):
        value = int.from_bytes(field[1:], "big")
        return value - (1 << 8 * (len(field) - 1)) if field[0] == 0xFF else value
    digits = field.split(b"\0", 1)[0].strip()
    try:
        return int(digits or b"0", 8)
    except ValueError:
        raise _Damaged(f"{what} {digits!r}") from None


def _records(data: bytes) -> dict[str, str]:
    """PAX records ``LENGTH key=value\\n``."""
    found: dict[str, str] = {}
    at = 0
    while at < len(data) and data[at] != 0:
        space = data.find(b" ", at, at + 21)
        digits = data[at:space] if space > 0 else b""
        if not digits.isdigit():
            raise _Damaged("PAX record without a length")
        end = at + int(digits)
        key, equals, value = data[space + 1 : max(end - 1, 0)].partition(b"=")
        if end > len(data) or not equals or data[end - 1 : end] != b"\n":
            raise _Damaged("malformed PAX record")
        found[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        at = end
    return found


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _ended(rest: bytes, at: int, pending: bool) -> Note | None:
    """The archive stops without an end mark, ``rest`` being less than a block."""
    if at == 0:
        return None if not rest.strip(b"\0") else _not_a_header(rest, 0)
    if pending or rest.strip(b"\0"):
        return Note("cut", f"it ends at byte {at + len(rest)}, inside a header", at + len(rest))
    return Note("unclosed", f"no end mark at byte {at}: complete, or cut between two members", at)


def _not_a_header(block: bytes, at: int) -> Note:
    if at:
        return Note("damaged", f"header checksum at byte {at} is wrong: what follows cannot be read", at)
    for magic, name in _COMPRESSED.items():
        if block.startswith(magic):
            return Note("not-this-format", f"it is compressed with {name}, which allows no random access: unpack it", 0)
    return Note("not-this-format", "it does not begin with a tar header", 0)


def _after_end(source: Bytes, at: int) -> Iterator[Note]:
    """Archives joined with ``cat`` have members behind the first end mark, which no tar reads by default."""
    if bytes(source.read(at, _TRAILER)).strip(b"\0"):
        yield Note("trailing", f"there are data behind the end mark at byte {at}, which are not read", at)
