"""From member names to sample keys and fields: WebDataset's rule, in one place for builder and worker."""

from __future__ import annotations

import re
from typing import Literal

from ..schema import Field

Split = Literal["first", "last"]

#: top-level members such as ``__meta__`` or ``__index__/x`` are WebDataset's own and no samples
_META = re.compile(r"__[^/]*__(?:$|/)")


def split_name(name: str, rule: Split = "first") -> tuple[str, str] | None:
    """(key, field) of a member, or None if it is no part of a sample.

    The base name is cut at its first dot (or last, by ``rule``); the folder part stays in the key, the field is
    lower-cased. ``end.`` has the field "". No part of a sample are names without a dot, hidden ones (base name begins
    with a dot) and WebDataset's ``__meta__`` members.

    >>> split_name("train/22.05.PNG"), split_name("train/22.05.PNG", "last"), split_name(".hidden.jpg")
    (('train/22', '05.png'), ('train/22.05', 'png'), None)
    """
    folder, slash, base = name.rpartition("/")
    if base.startswith(".") or _META.match(name):
        return None
    stem, dot, field = base.partition(".") if rule == "first" else base.rpartition(".")
    if not dot:
        return None
    return folder + slash + stem, field.lower()


def tar_field(name: str, nullable: bool = False) -> Field:
    """What a member with this field name holds: ``cls`` and ``id`` int64, ``txt`` text, everything else bytes."""
    if name in ("cls", "id"):
        return Field(name=name, kind="scalar", dtype="int64", nullable=nullable)
    return Field(name=name, kind="string" if name == "txt" else "bytes", nullable=nullable)


KEY_FIELD = Field(name="__key__", kind="string")


def text_of(name: str) -> str:
    """``name`` as valid UTF-8 text: bytes that were no UTF-8 (kept as surrogates until here) read ``\\xe9``."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return name
