"""The store in memory: the twin of etcd for tests, held to the same conformance suite.

Several ``MemoryStore`` objects may share one ``MemoryBackend``, as several dispatchers share one etcd. Faults are set on
the backend and happen at the next call of that kind; time comes from the backend's clock.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Literal

from .store import CommitUnknown, LeaderLost, StoreInfo, StoreUnavailable, Term, check_limits

#: what the next commit does: refuse, or answer nothing after / without applying it
CommitFault = Literal["refused", "unknown-applied", "unknown-lost"]


class MemoryBackend:
    """What all stores of one cluster see.

    Attributes:
        clock: seconds, monotonic; tests pass their own.
        available: False: every call raises ``StoreUnavailable``.
        commit_fault: happens at the next commit, once.
        commits: how many commits were applied.
        compactions: how often history was dropped.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.available = True
        self.commit_fault: CommitFault | None = None
        self.commits = 0
        self.compactions = 0
        self.lock = threading.Lock()
        self.records: dict[str, bytes] = {}
        self.sequence = 0
        self.terms = 0
        self.cluster = ""
        self.leader: tuple[Term, str] | None = None
        self.ends = 0.0

    def __repr__(self) -> str:
        return f"MemoryBackend(sequence={self.sequence}, records={len(self.records)}, terms={self.terms})"

    def lose_leader(self) -> None:
        """End the leader's lease now."""
        with self.lock:
            self.leader = None

    def wipe(self) -> None:
        """Forget everything, as an etcd whose data folder was deleted."""
        with self.lock:
            self.records.clear()
            self.sequence = self.terms = 0
            self.cluster = ""
            self.leader = None


class MemoryStore:
    """A ``Store`` on a ``MemoryBackend`` (a new one by default)."""

    def __init__(self, backend: MemoryBackend | None = None) -> None:
        self.backend = backend or MemoryBackend()
        self._closed = False

    def __repr__(self) -> str:
        return f"MemoryStore({self.backend!r})"

    def check(self) -> None:
        with self.backend.lock:
            self._check_up()

    def cluster(self, proposal: str = "") -> str:
        with self.backend.lock:
            self._check_up()
            self.backend.cluster = self.backend.cluster or proposal
            return self.backend.cluster

    def campaign(self, me: str, ttl: float, is_dead: Callable[[str], bool]) -> Term | None:
        backend = self.backend
        with backend.lock:
            held = self._leader()
        # asked outside the lock: it may look at /proc
        if held is not None and not is_dead(held[1]):
            return None
        with backend.lock:
            if self._leader() != held:
                return None
            backend.terms += 1
            seconds = float(max(1, math.ceil(ttl)))
            term = Term(backend.terms, seconds, lease=backend.terms, revision=backend.terms)
            backend.leader, backend.ends = (term, me), backend.clock() + seconds
            return term

    def leader(self) -> str | None:
        with self.backend.lock:
            held = self._leader()
        return None if held is None else held[1]

    def keep_alive(self, term: Term) -> float:
        backend = self.backend
        with backend.lock:
            self._check_leads(term)
            backend.ends = backend.clock() + term.ttl
        return term.ttl

    def load(self, prefix: str = "") -> tuple[dict[str, bytes], int]:
        with self.backend.lock:
            self._check_up()
            found = {k: v for k, v in self.backend.records.items() if k.startswith(prefix)}
            return dict(sorted(found.items())), self.backend.sequence

    def commit(self, term: Term, sequence: int, puts: Mapping[str, bytes], deletes: Collection[str]) -> int:
        check_limits(puts, deletes)
        backend = self.backend
        with backend.lock:
            self._check_up()
            fault, backend.commit_fault = backend.commit_fault, None
            if fault == "refused":
                raise StoreUnavailable("memory refused the commit")
            if fault == "unknown-lost":
                raise CommitUnknown(f"memory did not answer commit {sequence + 1}")
            self._check_leads(term)
            if backend.sequence != sequence:
                raise LeaderLost(f"commit after {sequence} refused: the last one is {backend.sequence}")
            backend.records.update(puts)
            for key in deletes:
                backend.records.pop(key, None)
            backend.sequence += 1
            backend.commits += 1
            if fault == "unknown-applied":
                raise CommitUnknown(f"memory did not answer commit {sequence + 1}")
            return backend.sequence

    def resign(self, term: Term) -> None:
        with self.backend.lock:
            held = self.backend.leader
            if held is not None and held[0] == term:
                self.backend.leader = None

    def info(self) -> StoreInfo:
        with self.backend.lock:
            if not self.backend.available or self._closed:
                return StoreInfo(members=0, ok=False, db_bytes=0)
            size = sum(len(k) + len(v) for k, v in self.backend.records.items())
            return StoreInfo(members=1, ok=True, db_bytes=size)

    def compact(self) -> None:
        with self.backend.lock:
            self._check_up()
            self.backend.compactions += 1

    def close(self) -> None:
        self._closed = True

    def _check_up(self) -> None:
        if self._closed:
            raise StoreUnavailable("memory store is closed")
        if not self.backend.available:
            raise StoreUnavailable("memory store is not available")

    def _leader(self) -> tuple[Term, str] | None:
        """Who leads now. Called with the lock held."""
        self._check_up()
        if self.backend.leader is not None and self.backend.clock() >= self.backend.ends:
            self.backend.leader = None
        return self.backend.leader

    def _check_leads(self, term: Term) -> None:
        held = self._leader()
        if held is None or held[0] != term:
            raise LeaderLost(
                f"term {term.number} is over: " + ("its lease ended" if held is None else f"{held[1]} leads")
            )
