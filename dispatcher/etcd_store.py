"""The store on etcd, through the ``etcd3`` package. The only file that imports etcd3 or grpc.

Keys below the prefix (``/feedline/v1/``):

    leader        the leader's record; attached to its lease. Its mod revision names the term in comparisons
    term          number of terms so far, as text
    sequence      id of the last commit. The key's *version* is the sequence number: it counts the commits
    records/...   the records

A commit that got no answer is sent again while its deadline lasts. That is safe, for it compares the sequence number,
and tells what became of the first one: if that one was applied, the sequence key holds this commit's id.

etcd3's watch API is never used (it spins while the server is away), and ranges are read with the package's own messages
because its ``get_range`` ignores ``limit``. It works on current protobuf only in a process that set
``PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python`` before the first protobuf import: entry points do.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import grpc

from manifests.errors import ConfigError
from manifests.wire.connection import Address

from .store import CommitUnknown, LeaderLost, StoreInfo, StoreUnavailable, Term, check_limits

with warnings.catch_warnings():
    # the package's generated messages use calls that protobuf has deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    import etcd3
    import etcd3.exceptions
    from etcd3 import etcdrpc
    from google.protobuf.unknown_fields import UnknownFieldSet  # type: ignore[import-untyped]

T = TypeVar("T")
log = logging.getLogger(__name__)

PREFIX = "/feedline/v1/"
#: records per page of ``load``; a page of records of 100 kB each still fits the message limit
_PAGE = 500
#: snapshots ``load`` begins before it gives up on an etcd that compacts each of them away
_SNAPSHOTS = 3
_MAX_MESSAGE = 128 << 20
#: wait before the second attempt of a call, seconds; doubled for each further one, up to 0.2
_PAUSE = 0.05
#: number of ``dbSizeInUse`` in StatusResponse, which is younger than the package's messages
_DB_SIZE_IN_USE = 9

_OPTIONS = (
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 400),
    # below the server's minimum of 5 s etcd would break the connection
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.max_send_message_length", _MAX_MESSAGE),
    ("grpc.enable_http_proxy", 0),
    # a channel of its own per store, so that closing one store cannot break another
    ("grpc.use_local_subchannel_pool", 1),
)

#: the request may not have reached the server, or its answer not us: sending it again may help
_AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
)
_FAILURES = (grpc.RpcError, etcd3.exceptions.Etcd3Exception)


class _Silent(Exception):
    """No usable answer within the deadline."""


class EtcdStore:
    """A ``Store`` on an etcd cluster.

    Args:
        endpoints: addresses of its members.
        prefix: where the keys live; clusters that share an etcd use one each.
        timeout: seconds a call may take; ``load`` may take this long per page.
    """

    def __init__(self, endpoints: Sequence[Address], *, prefix: str = PREFIX, timeout: float = 2.0) -> None:
        if not endpoints:
            raise ConfigError("no etcd address", remedy="give --etcd HOST:PORT")
        if not prefix.endswith("/"):
            raise ConfigError(f"etcd prefix {prefix!r} does not end in '/'")
        self._endpoints = tuple(endpoints)
        self._prefix = prefix
        self._timeout = timeout
        self._target = _target(self._endpoints)
        host, _, port = self._target.rpartition(":")
        # the package joins host and port again, so any gRPC target can be given in two parts
        self._client = etcd3.Etcd3Client(host=host, port=port, timeout=timeout * 0.45, grpc_options=_OPTIONS)
        self._lock = threading.Lock()
        self._closed = False
        self._version = ""

    def __repr__(self) -> str:
        return f"EtcdStore({self._names}, prefix={self._prefix!r}, version={self._version or '?'})"

    # -- leadership ------------------------------------------------------------------------------------------------

    def campaign(self, me: str, ttl: float, is_dead: Callable[[str], bool]) -> Term | None:
        self._log_version()
        try:
            held = self._get("leader")
            if held is not None and not is_dead(held.value.decode(errors="replace")):
                return None
            counter = self._get("term")
            number = 1 + (int(counter.value) if counter is not None else 0)
            lease = self._again(lambda: self._client.lease(max(1, math.ceil(ttl))))
            won = self._take(held, counter, number, me, lease.id)
        except _Silent as silent:
            raise StoreUnavailable(str(silent)) from None
        if won is None:
            self._revoke(lease.id)
            return None
        return Term(number, ttl=float(lease.ttl), lease=lease.id, revision=won)

    def _take(self, held: Any, counter: Any, number: int, me: str, lease: int) -> int | None:
        """Put the leader key if nobody else did since it was read. Returns its mod revision if it is ours."""
        key, tx = self._key("leader"), self._client.transactions
        compare = [
            tx.mod(key) == (held.mod_revision if held is not None else 0),
            tx.mod(self._key("term")) == (counter.mod_revision if counter is not None else 0),
        ]
        success = [tx.put(key, me, lease), tx.put(self._key("term"), str(number))]
        # sent again after silence the comparison fails if the first one was applied: the lease tells
        self._again(lambda: self._client.transaction(compare, success, []))
        now = self._get("leader")
        return int(now.mod_revision) if now is not None and now.lease == lease else None

    def leader(self) -> str | None:
        try:
            held = self._get("leader")
        except _Silent as silent:
            raise StoreUnavailable(str(silent)) from None
        return None if held is None else held.value.decode(errors="replace")

    def keep_alive(self, term: Term) -> float:
        try:
            answers = self._again(lambda: list(self._client.refresh_lease(term.lease)))
            if not answers or answers[0].TTL <= 0:
                raise LeaderLost(f"term {term.number} is over: its lease ended")
            held = self._get("leader")
        except _Silent as silent:
            raise StoreUnavailable(str(silent)) from None
        if held is None or held.mod_revision != term.revision:
            other = "nobody" if held is None else held.value.decode(errors="replace")
            raise LeaderLost(f"term {term.number} is over: {other} leads")
        # the server renewed it after this call began, so it runs at least this long from then
        return float(answers[0].TTL)

    def resign(self, term: Term) -> None:
        self._revoke(term.lease)

    def _revoke(self, lease: int) -> None:
        try:
            self._once(lambda: self._client.revoke_lease(lease))
        except (_Silent, *_FAILURES) as error:
            # it runs out by itself; an unknown lease is one that did
            log.debug("lease %x was not revoked: %s", lease, _reason(error))

    # -- records ---------------------------------------------------------------------------------------------------

    def load(self, prefix: str = "") -> tuple[dict[str, bytes], int]:
        try:
            for _ in range(_SNAPSHOTS):
                try:
                    return self._load(prefix)
                except _Compacted:
                    log.info("the snapshot was compacted while it was read; reading again")
            raise StoreUnavailable(f"etcd at {self._names} compacts faster than its records can be read")
        except _Silent as silent:
            raise StoreUnavailable(str(silent)) from None

    def _load(self, prefix: str) -> tuple[dict[str, bytes], int]:
        """All pages at the revision of the sequence key's read, so that they belong together."""
        head = self._range(self._key("sequence"))
        revision, sequence = head.header.revision, head.kvs[0].version if head.kvs else 0
        base = self._key("records/")
        start, end = (base + prefix).encode(), _after(base + prefix)
        found: dict[str, bytes] = {}
        while True:
            page = self._range(start, end, limit=_PAGE, revision=revision)
            for kv in page.kvs:
                found[kv.key.decode()[len(base) :]] = kv.value
            if not page.more:
                return found, int(sequence)
            start = page.kvs[-1].key + b"\0"

    def commit(self, term: Term, sequence: int, puts: Mapping[str, bytes], deletes: Collection[str]) -> int:
        check_limits(puts, deletes)
        tx, mark = self._client.transactions, self._key("sequence")
        commit_id = f"{term.number}:{os.urandom(8).hex()}".encode()
        compare = [tx.mod(self._key("leader")) == term.revision, tx.version(mark) == sequence]
        base = self._key("records/")
        success = [tx.put(mark, commit_id)]
        success += [tx.put(base + key, value) for key, value in puts.items()]
        success += [tx.delete(base + key) for key in deletes]
        failure = [tx.get(mark), tx.get(self._key("leader"))]
        try:
            done, answers = self._again(lambda: self._client.transaction(compare, success, failure))
        except _Silent as silent:
            raise CommitUnknown(f"commit {sequence + 1} of term {term.number}: {silent}") from None
        if done:
            return sequence + 1
        marks, leaders = answers
        if marks and marks[0][0] == commit_id and marks[0][1].version == sequence + 1:
            return sequence + 1
        if not leaders or leaders[0][1].mod_revision != term.revision:
            who = leaders[0][0].decode(errors="replace") if leaders else "nobody"
            raise LeaderLost(f"term {term.number} is over: {who} leads")
        raise LeaderLost(f"commit after {sequence} refused: the last one is {marks[0][1].version if marks else 0}")

    # -- looking ---------------------------------------------------------------------------------------------------

    def info(self) -> StoreInfo:
        try:
            members = self._again(lambda: list(self._client.members))
            status = self._again(
                lambda: self._client.maintenancestub.Status(etcdrpc.StatusRequest(), self._client.timeout)
            )
            alarms = self._again(lambda: list(self._client.list_alarms()))
            self._get("leader")
        except (_Silent, StoreUnavailable):
            return StoreInfo(members=0, ok=False, db_bytes=0)
        return StoreInfo(members=len(members), ok=not alarms, db_bytes=_bytes_in_use(status))

    def compact(self) -> None:
        try:
            head = self._range(self._key("sequence"))
            with contextlib.suppress(_Compacted):
                self._again(lambda: self._client.compact(head.header.revision))
        except _Silent as silent:
            raise StoreUnavailable(str(silent)) from None

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._client.close()

    def _log_version(self) -> None:
        """Say once which etcd this is; some releases are known to lose data."""
        if self._version:
            return
        try:
            status = self._once(
                lambda: self._client.maintenancestub.Status(etcdrpc.StatusRequest(), self._client.timeout)
            )
        except (_Silent, *_FAILURES) as error:
            log.debug("etcd at %s did not tell its version: %s", self._names, _reason(error))
            return
        self._version = status.version
        log.info("etcd %s at %s", self._version, self._names)
        if is_unsafe(self._version):
            log.warning("etcd %s can lose data when it crashes; use 3.5.13 or newer", self._version)

    # -- calls -----------------------------------------------------------------------------------------------------

    @property
    def _names(self) -> str:
        return ",".join(str(address) for address in self._endpoints)

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _get(self, name: str) -> Any:
        """The key's KeyValue, None if it is not there."""
        found = self._range(self._key(name)).kvs
        return found[0] if found else None

    def _range(self, key: str | bytes, end: bytes = b"", *, limit: int = 0, revision: int = 0) -> Any:
        request = etcdrpc.RangeRequest(
            key=key.encode() if isinstance(key, str) else key, range_end=end, limit=limit, revision=revision
        )
        return self._again(lambda: self._client.kvstub.Range(request, self._client.timeout))

    def _once(self, call: Callable[[], T]) -> T:
        if self._closed:
            raise _Silent(f"the connection to etcd at {self._names} is closed")
        try:
            return call()
        except ValueError as error:
            # grpc says so when the channel was closed by another thread
            if self._closed:
                raise _Silent(f"the connection to etcd at {self._names} was closed") from None
            raise error

    def _again(self, call: Callable[[], T]) -> T:
        """``call`` until it is answered or the deadline is over. An attempt gets just under half of it, so that one silent member
        of several costs one attempt. Only for calls that may be sent twice."""
        start, pause, first = time.monotonic(), _PAUSE, True
        while True:
            try:
                return self._once(call)
            except _FAILURES as error:
                code, tried = _code(error), time.monotonic() - start
                if code is grpc.StatusCode.OUT_OF_RANGE:
                    raise _Compacted from None
                if code not in _AGAIN and first:
                    raise StoreUnavailable(f"etcd at {self._names} refused: {_reason(error)}") from None
                # refused later on says nothing about the attempts before
                if code not in _AGAIN or tried + pause + self._client.timeout > self._timeout:
                    raise _Silent(f"etcd at {self._names} gave no answer in {tried:.1f} s: {_reason(error)}") from None
            time.sleep(pause)
            pause, first = min(pause * 2, 0.2), False


class _Compacted(Exception):
    """The revision asked for is gone."""


def is_unsafe(version: str) -> bool:
    """True for the etcd releases 3.5.0 to 3.5.4, which can lose acknowledged writes."""
    parts = version.split("-")[0].split(".")
    return parts[:2] == ["3", "5"] and len(parts) == 3 and parts[2].isdigit() and int(parts[2]) < 5


def _target(endpoints: Sequence[Address]) -> str:
    """A gRPC target for all members. Several need literal addresses of one family; names are looked up here."""
    if len(endpoints) == 1:
        return str(endpoints[0])
    by_family: dict[str, list[str]] = {"ipv4": [], "ipv6": []}
    for address in endpoints:
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            log.warning("etcd address %s is left out: %s", address, error)
            continue
        family, _, _, _, where = found[0]
        host = f"[{where[0]!s}]" if family == socket.AF_INET6 else str(where[0])
        by_family["ipv6" if family == socket.AF_INET6 else "ipv4"].append(f"{host}:{address.port}")
    if by_family["ipv4"] and by_family["ipv6"]:
        raise ConfigError("etcd addresses mix IPv4 and IPv6", remedy="give all of one kind")
    scheme = "ipv4" if by_family["ipv4"] else "ipv6"
    if not by_family[scheme]:
        names = ",".join(str(address) for address in endpoints)
        raise ConfigError(f"no etcd address of {names} can be looked up")
    return f"{scheme}:{','.join(by_family[scheme])}"


def _after(prefix: str) -> bytes:
    """The first key behind all keys that start with ``prefix`` (never empty here)."""
    raw = bytearray(prefix.encode())
    while raw[-1] == 0xFF:
        raw.pop()
    raw[-1] += 1
    return bytes(raw)


def _code(error: Exception) -> grpc.StatusCode:
    """The status of a failed call; the package turns some of them into exceptions of its own, without text."""
    if isinstance(error, etcd3.exceptions.ConnectionFailedError):
        return grpc.StatusCode.UNAVAILABLE
    if isinstance(error, etcd3.exceptions.ConnectionTimeoutError):
        return grpc.StatusCode.DEADLINE_EXCEEDED
    if isinstance(error, etcd3.exceptions.InternalServerError):
        return grpc.StatusCode.INTERNAL
    if isinstance(error, etcd3.exceptions.PreconditionFailedError):
        return grpc.StatusCode.FAILED_PRECONDITION
    return error.code() if isinstance(error, grpc.RpcError) else grpc.StatusCode.UNKNOWN


def _reason(error: Exception) -> str:
    details = error.details() if isinstance(error, grpc.RpcError) else ""
    return f"{_code(error).name.lower()}{': ' + details if details else ''}"


def _bytes_in_use(status: Any) -> int:
    for field in UnknownFieldSet(status):
        if field.field_number == _DB_SIZE_IN_USE:
            return int(field.data)
    return int(status.dbSize)
