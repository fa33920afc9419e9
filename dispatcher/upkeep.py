"""What is done about the store beside the requests: looking how it is, and dropping old history of one that is ours.

A thread of its own, so that neither a store that does not answer nor a long compaction holds up the driver.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from .store import Store, StoreInfo, StoreUnavailable

_log = logging.getLogger("dispatcher.upkeep")

#: seconds between two looks; one that is not answered takes about 2 s more
LOOK = 1.0
#: commits after which history is dropped, however little time has passed
COMMITS = 5000
#: seconds a caller of ``info`` waits for the first look
_FIRST = 2.0


class Upkeep:
    """See the module's text. ``start`` once, ``close`` once.

    Args:
        store: the store.
        commits: number of the last commit while this process leads, else None.
        compact_every: seconds between two compactions, None for a store that others use, too.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        commits: Callable[[], int | None],
        *,
        compact_every: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._commits = commits
        self._every = compact_every
        self._clock = clock
        self._info = StoreInfo(members=0, ok=False, db_bytes=0)
        self._looked = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dispatcher-upkeep", daemon=True)
        #: when history was last dropped, and after which commit
        self._last, self._at = clock(), 0

    def __repr__(self) -> str:
        return f"Upkeep({self._info}, compact_every={self._every}, last after commit {self._at})"

    @property
    def info(self) -> StoreInfo:
        """How the store was at the last look; waits a little for the first one."""
        self._looked.wait(_FIRST)
        return self._info

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float = 3.0) -> None:
        self._closing.set()
        self._looked.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.look()
            except Exception:
                _log.exception("looking after the store failed")
            self._closing.wait(LOOK if self._every is None else min(LOOK, self._every))

    def look(self) -> None:
        """See how the store is, and drop history if it is time."""
        self._info = self._store.info()
        self._looked.set()
        self._compact()

    def _compact(self) -> None:
        """Drop history if this process leads, the store is its own, and there is enough of it."""
        commits, now = self._commits(), self._clock()
        if self._every is None or commits is None or commits == self._at:
            return
        if now - self._last < self._every and commits - self._at < COMMITS:
            return
        try:
            self._store.compact()
        except StoreUnavailable as error:
            _log.warning("could not drop old history: %s", error)
            return
        _log.debug("dropped history up to commit %d", commits)
        self._last, self._at = now, commits
