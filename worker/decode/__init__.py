"""Picture decoders by name. A backend is imported when it is asked for, so that a worker starts without the others."""

from __future__ import annotations

from manifests.errors import ConfigError

from .cpu import CpuDecoder
from .port import BadPicture, Decoder

__all__ = ["BACKENDS", "BadPicture", "Decoder", "decoder"]

#: names that ``decoder`` knows; "dali" is the slot of the GPU backend
BACKENDS = ("cpu", "dali")


def decoder(name: str = "cpu") -> Decoder:
    """The decoder ``name``.

    Raises:
        ConfigError: unknown, or not installed.
    """
    if name == "cpu":
        return CpuDecoder()
    if name == "dali":
        raise ConfigError(
            "the DALI decoder is not there",
            cause="it comes later, with the [dali] extra",
            remedy='use DecodeImage(device="cpu")',
        )
    raise ConfigError(f"unknown decoder {name!r}", remedy=f"use one of {', '.join(BACKENDS)}")
