"""Messages that no honest peer sends: one part of a message replaced by something else, over all parts of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec

from manifests.wire.codec import VERSION

MAGIC = b"FL" + bytes([VERSION])

_NUMBERS: tuple[Any, ...] = (
    -1, 0, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.5, float("nan"), float("inf"), -1e308, True, None, "7", [], b"",
)  # fmt: skip
_TEXTS: tuple[Any, ...] = (
    "", " ", "x", "a/b", "../../etc/passwd", "\0", "\n", "\u202e", "💥" * 40, "x" * 70_000, "deterministic", "fresh", "latest",
    "sha256:" + "0" * 64, "blake3:" + "f" * 64, 7, None, b"\xff\xfe", [], {},
)  # fmt: skip
_BYTES: tuple[Any, ...] = (
    b"", b"\x00", b"\xff" * 8, b"\xff" * 10, b"\x80" * 64, bytes(range(256)), b"\x01\x00" * 3000, "text", 3, None, [1],
)  # fmt: skip
_SWITCHES: tuple[Any, ...] = (True, False, None, 0, 2, "true", [])
_ROW_NUMBERS: tuple[Any, ...] = ([0] * 12, [-1] * 12, [2**63] * 12, [2**64 - 1], [0] * 40_000, ["a"], [None], [[]])

#: what replaces "left out"
_GONE = object()


def tree(message: msgspec.Struct) -> dict[str, Any]:
    """The message as the plain values that MessagePack carries, with its defaults."""
    found: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    plain = _full(message)
    plain.update({key: value for key, value in found.items() if key == "t"})
    return plain


def _full(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _full(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple | list):
        return [_full(item) for item in value]
    if isinstance(value, dict):
        return {key: _full(item) for key, item in value.items()}
    return value


def pack(plain: Any) -> bytes:
    """Plain values as a message on the wire."""
    return MAGIC + msgspec.msgpack.encode(plain)


def structural(message: msgspec.Struct) -> Iterator[tuple[str, bytes]]:
    """Every part of the message replaced by each value of its kind's list: (what was done, bytes)."""
    whole = tree(message)
    tag = str(whole["t"])
    yield f"{tag}: as it is", pack(whole)
    for path, value in _paths(whole):
        for number, other in enumerate(_others(value)):
            yield f"{tag}: {'.'.join(map(str, path))} = #{number} {_short(other)}", pack(_replaced(whole, path, other))
        yield f"{tag}: without {'.'.join(map(str, path))}", pack(_replaced(whole, path, _GONE))
    yield f"{tag}: with a field nobody knows", pack({**whole, "unheard_of": [1, {"a": b"x"}]})


def broken(data: bytes, draw: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """``count`` times: bits flipped, cut short, doubled, with other bytes inside, or of another version."""
    for _ in range(count):
        what = draw.randrange(6)
        at = draw.randrange(len(data))
        if what == 0:
            yield f"bit of byte {at} flipped", flipped(data, 8 * at + draw.randrange(8))
        elif what == 1:
            yield f"cut at {at}", data[:at]
        elif what == 2:
            yield f"bytes put in at {at}", data[:at] + draw.randbytes(draw.randrange(1, 9)) + data[at:]
        elif what == 3:
            yield "something after its end", data + draw.randbytes(draw.randrange(1, 9))
        elif what == 4:
            yield "another version", data[:2] + bytes([draw.randrange(256)]) + data[3:]
        else:
            yield "noise behind the head", MAGIC + draw.randbytes(draw.randrange(200))


def flipped(data: bytes, bit: int) -> bytes:
    """``data`` with one bit changed."""
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if path:
        yield path, value
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items)[:20]:
        yield from _paths(item, (*path, key))


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return list(_SWITCHES)
    if isinstance(value, int | float):
        return list(_NUMBERS)
    if isinstance(value, str):
        return list(_TEXTS)
    if isinstance(value, bytes):
        return list(_BYTES)
    if isinstance(value, list):
        return [[], [*value, *value], value * 2000, {}, None, "text", *_ROW_NUMBERS]
    if isinstance(value, dict):
        return [{}, [], None, 5, {"": None}]
    return [0, "x", [], {}, b""]


def _replaced(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and other is _GONE:
        del copy[path[0]]
    else:
        copy[path[0]] = _replaced(value[path[0]], path[1:], other)
    return copy


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
