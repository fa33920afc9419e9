"""The shared nouns: names and digests, manifests, plans, cursors, pipelines, and the messages in ``manifests.wire``.

``build``, ``Manifest`` and what goes with them are imported here; the names of pipelines are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .build import build
from .compare import diff, verify
from .manifest import Manifest, Shard
from .schema import Field

if TYPE_CHECKING:
    from .pipeline import (
        Cast,
        CenterCrop,
        DecodeImage,
        HorizontalFlip,
        Normalize,
        Pipeline,
        PythonMap,
        RandomResizedCrop,
        Resize,
        Select,
    )

_PIPELINE = frozenset((
    "Cast", "CenterCrop", "DecodeImage", "HorizontalFlip", "Normalize", "Pipeline", "PythonMap", "RandomResizedCrop",
    "Resize", "Select",
))  # fmt: skip

__all__ = [
    "Cast", "CenterCrop", "DecodeImage", "Field", "HorizontalFlip", "Manifest", "Normalize", "Pipeline", "PythonMap",
    "RandomResizedCrop", "Resize", "Select", "Shard", "build", "diff", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _PIPELINE:
        return getattr(importlib.import_module(".pipeline", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
