"""The store on etcd, through the ``etcd3`` package. The only file that imports etcd3 or grpc.

Keys below the prefix (``/feedline/v1/``):

    leader        the leader's record; attached to its lease. Its mod revision names the term in comparisons
    term          number of terms so far, as text
    sequence      id of the last commit. The key's *version* is the sequence number: it counts the commits
    cluster       id of the cluster, see ``identity.py``
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
from pathlib import Path
from typing import Any, TypeVar

import grpc

from manifests.errors import ConfigError
from manifests.wire.connection import Address

from .etcd_access import EtcdAccess
from .store import (
    CommitUnknown,
    LeaderLost,
    StoreFull,
    StoreInfo,
    StoreRefused,
    StoreUnavailable,
    Term,
    check_limits,
)

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
#: longest prefix, bytes: what ``store.OPERATION_BYTES`` has room for
_MAX_PREFIX = 48
#: numbers of ``errors`` and ``dbSizeInUse`` in StatusResponse, which are younger than the package's messages
_ERRORS, _DB_SIZE_IN_USE = 8, 9
#: the alarm of an etcd whose quota is used up
_NOSPACE = 1
_FULL_REMEDY = (
    "make room: etcdctl compact REVISION, etcdctl defrag, etcdctl alarm disarm; or raise etcd's --quota-backend-bytes"
)

_OPTIONS = (
    # one member at a time: of several one that hangs would slow down every third call
    ("grpc.lb_policy_name", "pick_first"),
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
#: what etcd says about tokens, users and passwords under codes that it uses for other things, too
_AUTH_WORDS = (
    "user name is empty",
    "authentication failed",
    "revision of auth store is old",
    "authentication is not enabled",
)
_FAILURES = (grpc.RpcError, etcd3.exceptions.Etcd3Exception)


class _Silent(Exception):
    """No usable answer within the deadline."""


class EtcdStore:
    """A ``Store`` on an etcd cluster.

    Args:
        endpoints: addresses of its members. With TLS all their certificates must be for the host of the first.
        access: certificates and user.
        prefix: where the keys live; clusters that share an etcd use one each.
        timeout: seconds a call may take; ``load`` may take this long per page.
    """

    def __init__(
        self,
        endpoints: Sequence[Address],
        *,
        access: EtcdAccess | None = None,
        prefix: str = PREFIX,
        timeout: float = 2.0,
    ) -> None:
        if not endpoints:
            raise ConfigError("no etcd address", remedy="give --etcd HOST:PORT")
        if not prefix.endswith("/"):
            raise ConfigError(f"etcd prefix {prefix!r} does not end in '/'")
        if len(prefix.encode()) > _MAX_PREFIX:
            raise ConfigError(f"etcd prefix {prefix!r} is longer than {_MAX_PREFIX} bytes")
        self._endpoints = tuple(endpoints)
        self._access = access or EtcdAccess()
        self._prefix = prefix
        self._timeout = timeout
        # one target per member to begin with, so that the one in use can be changed
        self._targets = [_target(self._endpoints[i:] + self._endpoints[:i]) for i in range(len(self._endpoints))]
        self._turn = 0
        self._made: Any = None
        self._retired: Any = None
        self._lock = threading.Lock()
        self._closed = False
        self._version = ""

    def __repr__(self) -> str:
        return f"EtcdStore({self._names}, prefix={self._prefix!r}, version={self._version or '?'})"

    @property
    def _client(self) -> Any:
        """The package's client. Made at the first call, for with a user that is a call itself."""
        with self._lock:
            if self._closed:
                raise _Silent(f"the connection to etcd at {self._names} is closed")
            if self._made is None:
                self._made = self._make(self._targets[self._turn])
            return self._made

    def _make(self, target: str) -> Any:
        access = self._access
        # one channel expects one name of all members
        name = (("grpc.ssl_target_name_override", self._endpoints[0].host),) if access.ca is not None else ()
        # the package joins host and port again, so any gRPC target can be given in two parts
        host, _, port = target.rpartition(":")
        return etcd3.Etcd3Client(
            host=host,
            port=port,
            ca_cert=_path(access.ca),
            cert_cert=_path(access.cert),
            cert_key=_path(access.key),
            user=access.user or None,
            password=access.password or None,
            timeout=self._timeout * 0.45,
            grpc_options=(*_OPTIONS, *name),
        )

    def _replace(self, client: Any, *, turn: int = 0) -> None:
        """Make a new client at the next call: this one's token is of no use any more, or with ``turn`` its member hangs.

        It is closed one replacement later, as another thread may be in a call of it.
        """
        with self._lock:
            if client is None or self._made is not client:
                return
            retired, self._retired, self._made = self._retired, client, None
            self._turn = (self._turn + turn) % len(self._targets)
        if retired is not None:
            retired.close()

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
        key, tx = self._key("leader"), etcd3.Transactions()
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
        tx, mark = etcd3.Transactions(), self._key("sequence")
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

    # -- whose it is -----------------------------------------------------------------------------------------------

    def cluster(self, proposal: str = "") -> str:
        key, tx = self._key("cluster"), etcd3.Transactions()
        try:
            if proposal:
                self._again(lambda: self._client.transaction([tx.create(key) == 0], [tx.put(key, proposal)], []))
            held = self._get("cluster")
        except _Silent as silent:
            raise StoreUnavailable(str(silent)) from None
        return "" if held is None else str(held.value.decode(errors="replace"))

    def check(self) -> None:
        try:
            self._again(self._status)
        except _Silent as silent:
            self._diagnose(self._endpoints)
            raise StoreUnavailable(str(silent)) from None
        self._log_version()
        if len(self._endpoints) == 1:
            return
        found, silent_ones = self._look_at_each()
        self._diagnose(silent_ones)
        if len(set(found.values())) > 1:
            # another dispatcher may have put the id between two looks
            found = self._look_at_each()[0]
        if len(set(found.values())) > 1:
            groups: dict[tuple[int, str], list[str]] = {}
            for address, whose in found.items():
                groups.setdefault(whose, []).append(str(address))
            raise StoreRefused(
                "--etcd names members of different etcd clusters: " + " and ".join(map(",".join, groups.values())),
                "give the addresses of one etcd cluster",
            )

    def _look_at_each(self) -> tuple[dict[Address, tuple[int, str]], list[Address]]:
        """Which cluster each member belongs to: etcd's number of it, and what we wrote there; and who did not answer.

        etcd's number is not enough: etcds of one node that were set up alike have the same.
        """
        found: dict[Address, tuple[int, str]] = {}
        silent: list[Address] = []
        request = etcdrpc.RangeRequest(key=self._key("cluster").encode())
        for address in self._endpoints:
            client = None
            try:
                client = self._make(str(address))
                status, marks = self._status(client), self._send_range(client, request).kvs
                found[address] = (status.header.cluster_id, marks[0].value.decode(errors="replace") if marks else "")
            except _FAILURES as error:
                log.info("etcd at %s does not answer: %s", address, _reason(error))
                silent.append(address)
            finally:
                if client is not None:
                    client.close()
        return found, silent

    def _diagnose(self, addresses: Sequence[Address]) -> None:
        """Raise ``StoreRefused`` if a TLS handshake tells why one of them does not answer."""
        for address in addresses:
            if trouble := self._access.diagnose(address, self._endpoints[0].host):
                raise StoreRefused(
                    f"etcd at {address}: {trouble}", "check --etcd-ca, --etcd-cert and --etcd-key against etcd's own"
                )

    # -- looking ---------------------------------------------------------------------------------------------------

    def info(self) -> StoreInfo:
        try:
            members = self._again(lambda: list(self._client.members))
            status = self._again(self._status)
            # asks a majority, while what is above is what one member knows
            self._get("leader")
        except (_Silent, StoreUnavailable):
            return StoreInfo(members=0, ok=False, db_bytes=0)
        fields = _unknown_fields(status)
        size = fields.get(_DB_SIZE_IN_USE, [status.dbSize])[-1]
        return StoreInfo(members=len(members), ok=_ERRORS not in fields, db_bytes=int(size))

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
            clients, self._made, self._retired = (self._made, self._retired), None, None
        for client in clients:
            if client is not None:
                client.close()

    def _log_version(self) -> None:
        """Say once which etcd this is; some releases are known to lose data."""
        if self._version:
            return
        try:
            status = self._once(self._status)
        except (_Silent, *_FAILURES) as error:
            log.debug("etcd at %s did not tell its version: %s", self._names, _reason(error))
            return
        self._version = status.version
        log.info("etcd %s at %s", self._version, self._names)
        if is_unsafe(self._version):
            log.warning("etcd %s can lose data when it crashes; use 3.5.13 or newer", self._version)

    def _status(self, client: Any = None) -> Any:
        """What one member says about itself."""
        client = client or self._client
        return client.maintenancestub.Status(etcdrpc.StatusRequest(), client.timeout, metadata=client.metadata)

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
        return self._again(lambda: self._send_range(self._client, request))

    @staticmethod
    def _send_range(client: Any, request: Any) -> Any:
        return client.kvstub.Range(request, client.timeout, metadata=client.metadata)

    def _once(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except ValueError:
            # grpc says so when the channel was closed by another thread
            if self._closed:
                raise _Silent(f"the connection to etcd at {self._names} was closed") from None
            raise

    def _again(self, call: Callable[[], T]) -> T:
        """``call`` until it is answered or the deadline is over. An attempt gets just under half of it, so that one silent
        member of several costs one attempt. Only for calls that may be sent twice."""
        start, pause, first, renewed = time.monotonic(), _PAUSE, True, False
        while True:
            client = self._made
            try:
                return self._once(call)
            except _FAILURES as error:
                code, tried = _code(error), time.monotonic() - start
                if code is grpc.StatusCode.OUT_OF_RANGE:
                    raise _Compacted from None
                refused = code not in _AGAIN and _is_about_auth(code, _reason(error))
                if refused and self._access.user and not renewed and client is not None:
                    # tokens end after some minutes, and with the etcd that gave them
                    log.info("etcd at %s does not take the token any more; asking for a new one", self._names)
                    self._replace(client)
                    renewed = True
                    continue
                if code is grpc.StatusCode.DEADLINE_EXCEEDED and len(self._endpoints) > 1:
                    # the connection is there and nobody answers: gRPC itself notices that only after 15 s
                    self._replace(client, turn=1)
                if code not in _AGAIN and first:
                    raise self._refusal(code, _reason(error)) from None
                # refused later on says nothing about the attempts before
                if code not in _AGAIN or tried + pause + self._timeout * 0.45 > self._timeout:
                    raise _Silent(f"etcd at {self._names} gave no answer in {tried:.1f} s: {_reason(error)}") from None
            time.sleep(pause)
            pause, first = min(pause * 2, 0.2), False

    def _refusal(self, code: grpc.StatusCode, reason: str) -> StoreUnavailable:
        if _is_about_auth(code, reason):
            who = f"user {self._access.user}" if self._access.user else "a client without a user"
            return StoreRefused(
                f"etcd at {self._names} refused {who}: {reason}",
                f"check --etcd-user and its password, and that it may read and write {self._prefix}*",
            )
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and self._is_full():
            return StoreFull(f"etcd at {self._names} is full (alarm NOSPACE): {reason}", _FULL_REMEDY)
        return StoreUnavailable(f"etcd at {self._names} refused: {reason}")

    def _is_full(self) -> bool:
        try:
            return any(alarm.alarm_type == _NOSPACE for alarm in self._client.list_alarms())
        except (_Silent, *_FAILURES) as error:
            log.debug("etcd at %s did not list its alarms: %s", self._names, _reason(error))
            return False


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


def _is_about_auth(code: grpc.StatusCode, reason: str) -> bool:
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return True
    return any(words in reason for words in _AUTH_WORDS)


def _reason(error: Exception) -> str:
    # the package's own exceptions have no text; what grpc said is behind them
    said = error if isinstance(error, grpc.RpcError) else error.__context__
    details = said.details() if isinstance(said, grpc.RpcError) else ""
    return f"{_code(error).name.lower()}{': ' + details if details else ''}"


def _unknown_fields(message: Any) -> dict[int, list[Any]]:
    """Fields of an answer that the package's messages do not know, by number."""
    found: dict[int, list[Any]] = {}
    for field in UnknownFieldSet(message):
        found.setdefault(field.field_number, []).append(field.data)
    return found


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path)
