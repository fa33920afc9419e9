"""The worker process: puts its parts together, serves, drains, and takes them apart again."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
import warnings
from types import FrameType
from typing import Any

from manifests import log
from manifests.units import format_size
from manifests.wire.connection import Address
from manifests.wire.flight import Server

from .cache import BlockCache
from .config import WorkerConfig
from .decode import decoder
from .formats import FORMATS
from .membership import Membership, registration
from .memory import Budget
from .pool import FairPool
from .reads import Reads
from .service import Service
from .shards import Shards
from .specs import Specs

_log = logging.getLogger("worker")

_PR_SET_PDEATHSIG = 1
#: hosts that mean "all interfaces"
_ANY = ("0.0.0.0", "::", "")
#: threads that read and parse: they mostly wait for storage
IO_THREADS = 16
#: seconds that the Flight server gets to end calls whose clients do not take what was sent
STOP_TIMEOUT = 3.0
#: seconds without a read after which a worker that was told to drain by its dispatcher ends
QUIET = 5.0


class Worker:
    """A running worker; ``close`` ends it. It serves from construction on and is known once ``membership`` is registered.

    Raises:
        ConfigError: the port is in use.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.budget = Budget(config.memory)
        self.cache = BlockCache(self.budget)
        self.shards = Shards(self.budget, self.cache)
        made = decoder("cpu")
        self.specs = Specs(self._blob, made)
        self._io = FairPool(IO_THREADS, "io")
        self._decode = FairPool(config.threads, "decode")
        # reads need the membership's keys, the membership needs the server's port, and the server needs the reads
        authority = _Authority()
        self.reads = Reads(config.id, authority, self.specs, self.shards, self.budget, self._io, self._decode)
        try:
            self.server = Server(Service(config.id, self.reads), config.listen)
        except BaseException:
            self._io.close()
            self._decode.close()
            raise
        self.address = advertised(config, self.server.address)
        capabilities = (*(f"format:{name}" for name in FORMATS), "decode:cpu")
        self.membership = Membership(
            config.id,
            config.dispatchers,
            registration(config.id, self.address, config.memory, capabilities, made.fingerprint()),
            self._load,
            config.lease,
        )
        authority.membership = self.membership
        self.membership.start()

    def __repr__(self) -> str:
        return f"Worker({self.config.id} at {self.address}, {self.reads!r}, {self.budget!r})"

    def _blob(self, digest: str) -> bytes:
        return self.membership.blob(digest)

    def _load(self) -> dict[str, Any]:
        reads = self.reads.stats()
        return {
            "active_reads": reads.active,
            "cache_bytes": self.budget.used_by("cache"),
            "queue_bytes": self.budget.used_by("queue"),
            "rows_served": reads.rows,
            "bytes_served": reads.bytes,
            "stage_us": reads.stage_us,
        }

    def drain(self, timeout: float) -> bool:
        """Take no new reads, tell the dispatcher, wait for the reads under way; True when all ended in time."""
        self.reads.refuse("it is draining")
        self.membership.drain()
        if self.reads.wait_idle(timeout):
            return True
        self.reads.abort("it stops")
        self.reads.wait_idle(1.0)
        return False

    def close(self) -> bool:
        """End everything; True when nothing is left running. Safe to call twice."""
        self.reads.refuse("it stops")
        self.reads.abort("it stops")
        self.membership.leave()
        clean = self.server.stop(STOP_TIMEOUT)
        clean &= self._io.close()
        clean &= self._decode.close()
        self.shards.close()
        return clean


class _Authority:
    """The membership, once there is one."""

    membership: Membership

    def signing_keys(self) -> dict[str, bytes]:
        return self.membership.signing_keys()

    def now_ms(self) -> int:
        return self.membership.now_ms()

    def refresh(self) -> None:
        self.membership.refresh()


def advertised(config: WorkerConfig, bound: Address) -> Address:
    """What others connect to."""
    if config.advertise is not None:
        return Address(config.advertise.host, config.advertise.port or bound.port)
    return Address(socket.gethostname(), bound.port) if bound.host in _ANY else bound


def run(config: WorkerConfig) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Prints one line when registered. Returns the exit status.

    Raises:
        FeedlineError: it could not start.
    """
    log.setup(config.log_format, config.debug)
    # what Pillow has to say about a picture belongs to its sample, and nobody reads it here
    warnings.filterwarnings("ignore", module=r"PIL\.")
    stop = threading.Event()
    signals: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    parent = _die_with_parent() if config.die_with_parent else 0
    worker = Worker(config)
    _log.info("serves at %s with %s of memory and %d decode threads",
              worker.address, format_size(config.memory), config.threads)  # fmt: skip
    if config.allow or config.path:
        _log.warning("--allow and --path are for PythonMap, which comes in a later release: they have no effect yet")
    clean = False
    try:
        announced, quiet_since = False, 0.0
        while not stop.wait(0.05 if not announced else 0.25):
            if not announced and worker.membership.registered.is_set():
                announced = True
                print(f"worker {worker.address.uri} id={config.id}", flush=True)
            if parent and os.getppid() != parent:
                _log.warning("the parent process is gone: ends")
                break
            if worker.membership.told_to_drain.is_set():
                quiet_since = _quiet(worker, quiet_since)
                if time.monotonic() - quiet_since > QUIET:
                    _log.info("drained")
                    break
        else:
            if not parent or os.getppid() == parent:  # whose end is no reason to finish anything
                _log.info("stops on signal %d, finishes %d reads", signals[0], worker.reads.stats().active)
                _drain(worker, config.drain, signals)
    finally:
        clean = worker.close()
    if not clean:
        # a thread hangs in storage or in a client that takes nothing: waiting for it would not end it
        _log.warning("ends without waiting for calls that hang")
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
    return 0


def _quiet(worker: Worker, since: float) -> float:
    """Since when a draining worker has had nothing to read; grants given out before are still served."""
    worker.membership.draining = True
    return since if since and not worker.reads.stats().active else time.monotonic()


def _drain(worker: Worker, timeout: float, signals: list[int]) -> None:
    """Drain; a second signal ends it at once."""
    thread = threading.Thread(target=worker.drain, args=(timeout,), name="drain", daemon=True)
    thread.start()
    while thread.is_alive() and len(signals) < 2:
        thread.join(0.1)
    if thread.is_alive():
        worker.reads.abort("it stops")
        thread.join(2.0)


def _die_with_parent() -> int:
    """Have the kernel send SIGTERM when the parent ends (Linux); the parent's pid, to look for on other systems."""
    parent = os.getppid()
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    return parent
