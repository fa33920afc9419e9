"""Where shards lie: uri scheme -> storage."""

from __future__ import annotations

from urllib.parse import urlsplit

from manifests.errors import ConfigError

from .local import FolderStorage, LocalStorage
from .port import Storage, StoredObject

__all__ = ["STORAGES", "Storage", "StoredObject", "storage_of"]

STORAGES: dict[str, Storage] = {"file": LocalStorage(), "folder": FolderStorage()}


def storage_of(uri: str) -> Storage:
    """The storage for ``uri``, else ``ConfigError`` that lists the schemes there are."""
    found = STORAGES.get(urlsplit(uri).scheme)
    if found is None:
        raise ConfigError(
            f"shard {uri!r} cannot be read here",
            cause=f"this worker reads {', '.join(f'{scheme}://' for scheme in STORAGES)}",
        )
    return found
