"""What follows from a read that failed: which worker or shard is left alone, and what the dispatcher is told. Thread-safe."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Collection

from manifests.errors import AccessDenied, ConfigError, DispatcherUnavailable, FeedlineError, NoWorker, WaitTimeout
from manifests.wire import messages as m
from manifests.wire.flight import PeerSilent

from .avoid import Avoided
from .grants import GrantKeeper

log = logging.getLogger("feedline.client")

#: seconds a worker is left alone after it refused or broke a connection / went silent
_AVOID_REFUSED, _AVOID_SILENT = 3.0, 15.0
#: seconds after which a shard that failed on a worker is read there again
_AGAIN = 1.1
#: refusals of a shard's grants, or failures of it that the dispatcher was told of, after which it cannot be had
_TRIES = 4
#: seconds after which a worker's failures are worth another line
_QUIET = 10.0


class Trouble:
    """Failures of the reads of one feed."""

    def __init__(self, keeper: GrantKeeper, avoided: Avoided) -> None:
        self._keeper = keeper
        self._avoided = avoided
        self._lock = threading.Lock()
        self._quiet: dict[str, float] = {}
        self._denied: Counter[int] = Counter()
        self._errors: dict[int, str] = {}
        self._last: dict[str, str] = {}
        self._alone: set[int] = set()

    def __repr__(self) -> str:
        return f"Trouble(shards {sorted(self._errors)}, suspects {sorted(self._alone)})"

    def error_of(self, shard: int) -> str:
        """What happened to reads of this shard last, "": nothing."""
        with self._lock:
            return self._errors.get(shard, "")

    def last_of(self, worker: str) -> str:
        """Why this worker was left alone last, "": it never was."""
        return self._last.get(worker, "")

    def is_suspect(self, shard: int) -> bool:
        """A read of this and other shards failed, and which of them it was is not known: it is to be read alone."""
        return shard in self._alone

    def silent(self, worker: str, seconds: float) -> None:
        """The worker gave no sign of life for so long."""
        log.warning("worker %s is silent for %.1f s; its reads move", worker, seconds)
        self._leave_alone(worker, _AVOID_SILENT, "silent", f"no sign for {seconds:.1f} s")

    def failed(self, worker: str, shards: Collection[int], error: Exception) -> Collection[int]:
        """A read of ``shards`` from ``worker`` failed. Returns those of them that cannot be had."""
        self._log(worker, shards, error)
        if not isinstance(error, FeedlineError):
            seconds = _AVOID_SILENT if isinstance(error, PeerSilent) else _AVOID_REFUSED
            self._leave_alone(worker, seconds, "unreachable", str(error))
            return ()
        if isinstance(error, (DispatcherUnavailable, NoWorker, WaitTimeout)):  # of the worker, not of what it reads
            self._leave_alone(worker, _AVOID_REFUSED, error.code, str(error))
            return ()
        if isinstance(error, ConfigError):
            return shards
        if isinstance(error, AccessDenied):
            for shard in shards:
                self._keeper.drop(shard)
            with self._lock:
                self._denied.update(shards)
                return [shard for shard in shards if self._denied[shard] >= _TRIES]
        named = error.detail.get("shard")
        if isinstance(named, int) and named in shards:
            return self._shard_failed(worker, named, error)
        if len(shards) == 1:
            return self._shard_failed(worker, next(iter(shards)), error)
        with self._lock:
            self._alone.update(shards)
        return ()

    def _shard_failed(self, worker: str, shard: int, error: FeedlineError) -> Collection[int]:
        """A worker could not read a shard: the dispatcher is told, and it is read from another worker, or later."""
        with self._lock:
            self._errors[shard] = f"failed on worker {worker}: {error}"
        self._avoided.shard(worker, shard, _AGAIN)
        told = self._keeper.times_told(shard)
        # without its remedy: what to do is for the loader to say
        text = f"{error.message}: {error.cause}" if error.cause else error.message
        self._keeper.failed_on(m.ReadFailure(worker=worker, source=0, shard=shard, code=error.code, message=text[:300]))
        return (shard,) if told >= _TRIES else ()

    def _leave_alone(self, worker: str, seconds: float, code: str, message: str) -> None:
        self._last[worker] = message
        self._avoided.worker(worker, seconds)
        self._keeper.failed_on(m.ReadFailure(worker=worker, source=0, shard=-1, code=code, message=message[:300]))

    def _log(self, worker: str, shards: Collection[int], error: Exception) -> None:
        """One line per worker and outage, not per read."""
        now = time.monotonic()
        with self._lock:
            first = self._quiet.get(worker, 0.0) < now
            self._quiet[worker] = now + _QUIET
        level = logging.WARNING if first else logging.DEBUG
        log.log(level, "a read of %d shards from worker %s failed: %s", len(shards), worker, error)
