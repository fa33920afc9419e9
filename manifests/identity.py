"""Names, digests and keyed random numbers: the functions that give things their identity.

Random numbers are SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014) in its
counter form: value k of stream ``key`` is ``mix(key + (k + 1) * GOLDEN)``. Any value can be had without those before
it, it is the same on every machine and numpy version, and it is a handful of vectorised integer operations.
"""

from __future__ import annotations

import hashlib
import re
import struct

import numpy as np
import numpy.typing as npt

from .errors import ConfigError

U64 = npt.NDArray[np.uint64]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)


def check_name(value: str, what: str) -> str:
    """``value`` if it is a valid name of a dataset, version, job or tenant, else ``ConfigError``."""
    if not isinstance(value, str) or not _NAME.match(value):
        raise ConfigError(f"{what} {value!r} is not a name", remedy="use 1 to 128 of A-Z a-z 0-9 . _ -")
    return value


def digest(data: bytes) -> str:
    """``sha256:<hex>`` of ``data``: the identity of manifests, pipelines and job specs."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def stream_key(domain: str, *parts: int) -> int:
    """Key (64 bit) of the random stream ``domain`` for these integers, each taken modulo 2**64."""
    packed = struct.pack(f"<{len(parts)}Q", *(p & 0xFFFFFFFFFFFFFFFF for p in parts))
    hashed = hashlib.blake2b(packed, digest_size=8, person=domain.encode()[:16]).digest()
    return int.from_bytes(hashed, "little")


def mix64(values: U64) -> U64:
    """SplitMix64's finaliser, element by element (uint64 in, uint64 out)."""
    with np.errstate(over="ignore"):
        z = values.astype(np.uint64, copy=True)
        z ^= z >> np.uint64(30)
        z *= _M1
        z ^= z >> np.uint64(27)
        z *= _M2
        z ^= z >> np.uint64(31)
    return z


def random_u64(key: int, first: int, count: int) -> U64:
    """Values ``first .. first + count`` of the stream ``key``: uint64 [count]."""
    with np.errstate(over="ignore"):
        k = np.arange(first + 1, first + 1 + count, dtype=np.uint64)
        return mix64(k * _GOLDEN + np.uint64(key))


def random_unit(key: int, first: int, count: int) -> npt.NDArray[np.float64]:
    """The same values as float64 in [0, 1), 53 bits each."""
    return (random_u64(key, first, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def id_sum(ids: npt.NDArray[np.int64]) -> int:
    """Order-independent sum of a multiset of sample ids: sum of ``mix64(id + 1)`` modulo 2**64.

    Two multisets with equal count and sum are the same but for a chance of about 2**-64.
    """
    with np.errstate(over="ignore"):
        return int(mix64(ids.astype(np.uint64) + np.uint64(1)).sum(dtype=np.uint64))
