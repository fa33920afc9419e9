"""The port encoded pictures are decoded through.

A decoder is made once per worker and called on the worker's decode threads, several at once. It never lets one picture
harm another: whatever is wrong with a picture comes out as ``BadPicture`` for that picture alone.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
Mode = Literal["RGB", "L"]


class BadPicture(Exception):
    """One picture that cannot be decoded or used; the text is the reason shown to the user."""


class Decoder(Protocol):
    """One backend."""

    def decode(self, data: memoryview, *, mode: Mode, orient: bool, max_pixels: int) -> U8:
        """The picture in ``data`` as uint8 [height, width, 3 or 1], C order, read-only or not.

        The kind of picture is told by its leading bytes. ``max_pixels`` is checked from the header, before pixels are
        decoded or memory for them is taken. A picture that ends early is bad, never half grey.

        Raises:
            BadPicture: for anything that is wrong with it.
        """

    def fingerprint(self) -> str:
        """Backend and library versions: workers with equal fingerprints decode to equal bits."""
