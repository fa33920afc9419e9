"""The one codec: ``FL``, a version byte, then MessagePack of a tagged structure.

Unknown fields are ignored, so that a newer peer may add some; an unknown version, tag or shape is a ``ProtocolError``
and changes nothing. Stored records use the same form.
"""

from __future__ import annotations

import hmac
from functools import lru_cache
from typing import Any

import msgspec

from ..errors import AccessDenied, ProtocolError
from . import messages as m

#: version of the wire and stored formats
VERSION = 1
#: largest message accepted, bytes
MAX_MESSAGE = 16 << 20
_MAGIC = b"FL" + bytes([VERSION])

_encoder = msgspec.msgpack.Encoder(order="deterministic")


@lru_cache(maxsize=128)
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def encode(message: msgspec.Struct) -> bytes:
    """``message`` as bytes; equal messages give equal bytes."""
    return _MAGIC + _encoder.encode(message)


def decode(data: bytes | memoryview, kind: Any) -> Any:
    """The message in ``data``, which must be (one of) ``kind``; else ``ProtocolError`` that says what is wrong."""
    head = bytes(data[:3])
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"message of {len(data)} bytes", cause=f"the limit is {MAX_MESSAGE}")
    if head[:2] != b"FL" or len(head) < 3:
        raise ProtocolError("not a feedline message", cause=f"it starts with {head!r}")
    if head[2] != VERSION:
        raise ProtocolError(
            f"message of protocol version {head[2]}",
            cause=f"this side speaks version {VERSION}",
            remedy="run the same feedline release on both sides",
        )
    try:
        return _decoder(kind).decode(data[3:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ProtocolError("malformed message", cause=_one_line(str(error))) from None


def _one_line(text: str) -> str:
    """The reason may quote the message; what cannot be printed is written as an escape."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:300])


def sign(grant: m.Grant, key_id: str, key: bytes) -> bytes:
    """A grant as it goes into tickets: payload and HMAC-SHA256 (RFC 2104) over it."""
    payload = encode(grant)
    mac = hmac.digest(key, payload, "sha256")
    return encode(m.SignedGrant(key=key_id, signature=mac, payload=payload))


def open_signed(data: bytes, keys: dict[str, bytes]) -> m.Grant:
    """The grant inside ``data`` if one of ``keys`` signed it, else ``AccessDenied``."""
    signed: m.SignedGrant = decode(data, m.SignedGrant)
    key = keys.get(signed.key)
    if key is None:
        raise AccessDenied("ticket refused", cause=f"it is signed with key {signed.key!r}, which this worker lacks")
    if not hmac.compare_digest(hmac.digest(key, signed.payload, "sha256"), signed.signature):
        raise AccessDenied("ticket refused", cause="its signature does not match its content")
    grant: m.Grant = decode(signed.payload, m.Grant)
    return grant
