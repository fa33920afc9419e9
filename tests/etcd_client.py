"""An etcd client for tests that do to etcd what others might do: delete keys, fill it, compact it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from manifests.wire.connection import Address

with warnings.catch_warnings():
    # the package's generated messages use calls that protobuf has deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    import etcd3
    from etcd3 import etcdrpc
    from etcd3.etcdrpc import auth_pb2

__all__ = ["auth_pb2", "connect", "etcdrpc"]


@contextlib.contextmanager
def connect(address: Address, **settings: Any) -> Iterator[Any]:
    """A client of the ``etcd3`` package."""
    client = etcd3.client(host=address.host, port=address.port, timeout=5, **settings)
    try:
        yield client
    finally:
        client.close()
