"""feedline: the public names of ``trainer_client`` and ``manifests`` in one place, each loaded on first use.

    from feedline import RemoteDataLoader, Pipeline, DecodeImage

Importing this package loads none of torch, etcd or gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manifests import (
        Cast,
        CenterCrop,
        DecodeImage,
        Field,
        HorizontalFlip,
        Manifest,
        Normalize,
        Pipeline,
        PythonMap,
        RandomResizedCrop,
        Resize,
        Select,
        Shard,
        build,
    )
    from trainer_client import ClientOptions, Mix, RemoteDataLoader, RemoteDataset, Shuffle, gather_states
    from trainer_client.errors import (
        AccessDenied,
        BadSample,
        ConfigError,
        DispatcherUnavailable,
        FeedlineError,
        FeedlineWarning,
        Fenced,
        JobBusy,
        JobMismatch,
        NoWorker,
        ProtocolError,
        RankAbsent,
        ShardChanged,
        ShardMissing,
        ShardQuarantined,
        StateIncomplete,
        StateMismatch,
        TooManyBadSamples,
        UnknownDataset,
        WaitTimeout,
    )

#: module -> the public names that live there
_WHERE = {
    "trainer_client": ("ClientOptions", "Mix", "RemoteDataLoader", "RemoteDataset", "Shuffle", "gather_states"),
    "manifests": (
        "Cast", "CenterCrop", "DecodeImage", "Field", "HorizontalFlip", "Manifest", "Normalize", "Pipeline",
        "PythonMap", "RandomResizedCrop", "Resize", "Select", "Shard", "build",
    ),
    "manifests.errors": (
        "AccessDenied", "BadSample", "ConfigError", "DispatcherUnavailable", "FeedlineError", "FeedlineWarning",
        "Fenced", "JobBusy", "JobMismatch", "NoWorker", "ProtocolError", "RankAbsent", "ShardChanged", "ShardMissing",
        "ShardQuarantined", "StateIncomplete", "StateMismatch", "TooManyBadSamples", "UnknownDataset", "WaitTimeout",
    ),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "AccessDenied", "BadSample", "Cast", "CenterCrop", "ClientOptions", "ConfigError", "DecodeImage",
    "DispatcherUnavailable", "FeedlineError", "FeedlineWarning", "Fenced", "Field", "HorizontalFlip", "JobBusy",
    "JobMismatch", "Manifest", "Mix", "NoWorker", "Normalize", "Pipeline", "ProtocolError", "PythonMap",
    "RandomResizedCrop", "RankAbsent", "RemoteDataLoader", "RemoteDataset", "Resize", "Select", "Shard",
    "ShardChanged", "ShardMissing", "ShardQuarantined", "Shuffle", "StateIncomplete", "StateMismatch",
    "TooManyBadSamples", "UnknownDataset", "WaitTimeout", "build", "gather_states",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
