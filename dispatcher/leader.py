"""Leading: what a leader writes about itself, and the lease that it leads by.

The lease is judged by this process's own monotonic clock, counted from before the call that renewed it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from manifests.process import ProcessId

from .store import Store, StoreUnavailable, Term


class LeaderRecord(msgspec.Struct, frozen=True):
    """What a leader writes under the leader key. ``run``: drawn at start, tells two runs of one process id apart."""

    address: str
    run: str
    process: str = ""

    @classmethod
    def of_this_process(cls, address: str) -> LeaderRecord:
        """A record of a new run of this process that serves at ``address``."""
        return cls(address=address, run=os.urandom(8).hex(), process=ProcessId.current().encode())

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str) -> LeaderRecord | None:
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError:
            return None

    def is_dead(self) -> bool:
        """True only if that process is certainly gone."""
        found = ProcessId.parse(self.process)
        return found is not None and found.is_dead()


class Leadership:
    """Whether this process leads. Changed by the driver's thread only; properties may be read from any.

    Args:
        store: where the leader's record is.
        lease: seconds to ask for.
        clock: monotonic seconds.
    """

    def __init__(self, store: Store, lease: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._lease = lease
        self._clock = clock
        self.record = LeaderRecord.of_this_process("")
        self._term: Term | None = None
        self._end = 0.0
        #: when to renew it
        self._due = 0.0
        self._trouble = ""
        #: address of another one that leads, as last seen; "" when not known
        self.other = ""

    def __repr__(self) -> str:
        return f"Leadership({self.record.address}, {self._term or 'does not lead'}, other={self.other!r})"

    @property
    def over(self) -> bool:
        """The lease could have ended, or there is none."""
        return self._term is None or self._clock() >= self._end

    @property
    def term(self) -> Term | None:
        """The term, as long as its lease surely runs."""
        term = self._term
        return None if self.over else term

    @property
    def leader(self) -> str:
        """Address of the present leader, "" when not known."""
        return self.other if self.over else self.record.address

    def campaign(self) -> bool:
        """Try once to lead. False: ``other`` leads. Raises ``StoreUnavailable``."""
        started = self._clock()
        term = self._store.campaign(self.record.encode(), self._lease, self._is_gone)
        if term is None:
            found = LeaderRecord.parse(self._store.leader() or "")
            self.other = found.address if found is not None else ""
            return False
        self._term, self._end, self._due = term, started + term.ttl, started + term.ttl / 4
        self.other = self._trouble = ""
        return True

    def _is_gone(self, text: str) -> bool:
        found = LeaderRecord.parse(text)
        return found is not None and (found.run == self.record.run or found.is_dead())

    def renew(self) -> str:
        """Renew the lease if a quarter of it has passed. Returns why that failed the last time it was tried, "" if it did
        not. Raises ``LeaderLost``."""
        started = self._clock()
        if self._term is None or started < self._due:
            return self._trouble
        try:
            self._end = started + self._store.keep_alive(self._term)
        except StoreUnavailable as error:
            # a store that hangs takes its time over each try: leave some for requests
            self._due = self._clock() + self._term.ttl / 8
            self._trouble = str(error)
        else:
            self._due = started + self._term.ttl / 4
            self._trouble = ""
        return self._trouble

    def resign(self) -> None:
        """Give the lease up, if there is one."""
        term, self._term = self._term, None
        self.other = ""
        if term is not None:
            self._store.resign(term)
