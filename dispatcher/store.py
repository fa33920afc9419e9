"""The store port: where the dispatcher's durable state lives, and who may write it.

There is one flat space of records (short text keys, byte values), one leader, and one *sequence number* that goes up by
one with every commit. Two rules make it safe:

* A commit is one transaction that compares the leader key and the sequence number, so a deposed leader writes nothing,
  and a commit is applied once or not at all, however often it is sent.
* A leader that got ``CommitUnknown``, ``LeaderLost`` or ``StoreUnavailable`` from a commit must drop what it has in
  memory, campaign again and ``load``: what it sent may or may not be there.

Methods may be called from several threads; each ends within the adapter's deadline (2 s by default, ``load`` longer).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

#: most puts and deletes together in one commit: etcd takes 128, one of them is the sequence number
MAX_OPERATIONS = 127
#: most bytes that ``commit_bytes`` may find in one commit: etcd takes 1.5 MiB, 4 KiB of which are for what we compare
MAX_BYTES = (1536 << 10) - (4 << 10)
#: bytes that one operation takes besides key and value: the prefix of its key, and the encoding's own
OPERATION_BYTES = 96


class LeaderLost(Exception):
    """This term is over: somebody else leads, or the lease ran out."""


class CommitUnknown(Exception):
    """The commit was sent, but whether it was applied could not be learnt within the deadline."""


class StoreUnavailable(Exception):
    """The store did not answer; names the addresses and how long was tried. ``remedy``: what to change, may be empty."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class StoreRefused(StoreUnavailable):
    """The store is there and will not have us (credentials, certificates): asking again as we are does not help."""


class StoreFull(StoreUnavailable):
    """The store takes no writes until somebody makes room."""


@dataclass(frozen=True)
class Term:
    """The right to write, from one won campaign until its lease ends.

    Attributes:
        number: grows with each leader of this store.
        ttl: seconds the lease runs, counted from the start of the campaign or of the last ``keep_alive`` call.
        lease: the adapter's name of the lease.
        revision: the adapter's name of this term's leader record.
    """

    number: int
    ttl: float = 0.0
    lease: int = 0
    revision: int = 0


@dataclass(frozen=True)
class StoreInfo:
    """How the store is.

    Attributes:
        members: servers of the store's cluster; 0 when none answered.
        ok: it answers reads and takes writes, as far as it says.
        db_bytes: bytes in use, without free pages; 0 when unknown.
    """

    members: int
    ok: bool
    db_bytes: int


class Store(Protocol):
    """What the dispatcher's driver needs of a store. See the module's text for the two rules."""

    def check(self) -> None:
        """See whether this can work: every address that answers is one of the same store, and lets us in.

        Raises:
            StoreRefused: it cannot. StoreUnavailable: no answer, so nobody knows.
        """

    def cluster(self, proposal: str = "") -> str:
        """The text that names this cluster. Where there is none, ``proposal`` becomes it; "" for still none.

        Raises:
            StoreUnavailable: no answer.
        """

    def campaign(self, me: str, ttl: float, is_dead: Callable[[str], bool]) -> Term | None:
        """Try once to become the leader, with the record ``me`` and a lease of ``ttl`` seconds (rounded up to whole).

        A leader record for which ``is_dead`` is true is taken over at once. None: somebody else leads.

        Raises:
            StoreUnavailable: no answer; a lease that was granted meanwhile runs out by itself.
        """

    def leader(self) -> str | None:
        """The record of the one who leads now, None for nobody. Raises StoreUnavailable."""

    def keep_alive(self, term: Term) -> float:
        """Renew the lease. Returns seconds it surely still runs, counted from the start of this call.

        Raises:
            LeaderLost: the lease ended or another one took over. StoreUnavailable: no answer; the lease may still run.
        """

    def load(self, prefix: str = "") -> tuple[dict[str, bytes], int]:
        """All records whose key starts with ``prefix``, as of one moment, and the sequence number then (0: no commit yet).

        Raises:
            StoreUnavailable: no answer.
        """

    def commit(self, term: Term, sequence: int, puts: Mapping[str, bytes], deletes: Collection[str]) -> int:
        """Apply all puts and deletes, or nothing; returns the new sequence number, ``sequence + 1``.

        Raises:
            LeaderLost: this term is over, or ``sequence`` is not the last commit's: nothing of this call was written
                (of an earlier ``CommitUnknown`` one may have been).
            CommitUnknown: it may have been applied. StoreUnavailable: it was refused and not applied (StoreFull, ..).
            ValueError: more than MAX_OPERATIONS or MAX_BYTES, or a key that is both put and deleted.
        """

    def resign(self, term: Term) -> None:
        """Give the lease up, so that another one can lead at once. Never raises: a lost lease is as good."""

    def info(self) -> StoreInfo:
        """How the store is. Never raises for a store that does not answer."""

    def compact(self) -> None:
        """Drop old history. Only for a store that this cluster owns. Raises StoreUnavailable."""

    def close(self) -> None:
        """Close connections; leases are left to run out (``resign`` first). Safe to call twice."""


def commit_bytes(puts: Mapping[str, bytes], deletes: Iterable[str]) -> int:
    """Bytes of a commit, with what its operations take besides keys and values."""
    size = sum(len(k.encode()) + len(v) + OPERATION_BYTES for k, v in puts.items())
    return size + sum(len(k.encode()) + OPERATION_BYTES for k in deletes)


def check_limits(puts: Mapping[str, bytes], deletes: Collection[str]) -> None:
    """Raise ``ValueError`` for a commit that no adapter takes."""
    if len(puts) + len(deletes) > MAX_OPERATIONS:
        raise ValueError(f"commit of {len(puts) + len(deletes)} operations; the limit is {MAX_OPERATIONS}")
    size = commit_bytes(puts, deletes)
    if size > MAX_BYTES:
        raise ValueError(f"commit of {size} bytes; the limit is {MAX_BYTES}")
    if both := sorted(set(puts) & set(deletes)):
        raise ValueError(f"commit puts and deletes the key {both[0]!r}")
