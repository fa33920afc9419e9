"""Running reads: a few threads that each pull one ``DoGet`` at a time and hand its parts on."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from manifests.wire import codec
from manifests.wire import messages as m
from manifests.wire.connection import ConnectionOptions, parse_address
from manifests.wire.flight import Connection, ReadCancelled, Stream

log = logging.getLogger("feedline.client")
I64 = npt.NDArray[np.int64]


class ReadPool:
    """Threads and connections shared by all epochs of a loader. ``submit`` never blocks; ``close`` ends everything."""

    def __init__(self, threads: int, options: ConnectionOptions, *, stall: float, timeout: float) -> None:
        self._options = options
        self._stall = stall
        #: seconds one read may take as a whole; its rows that came until then stay
        self.timeout = timeout
        self._heard: dict[str, float] = {}
        self._jobs: deque[Callable[[], bool]] = deque()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._connections: dict[str, Connection] = {}
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._started = 0
        self._idle = 0
        self._size = threads
        with self._lock:
            for _ in range(threads):
                self._start_thread()

    @property
    def size(self) -> int:
        """Reads that can be in flight at once."""
        return self._size

    def add_thread(self) -> None:
        """One thread more: stands in for one that is stuck opening a stream on a process that does not run (there is
        no way to call that back but its timeout)."""
        with self._lock:
            self._start_thread()

    def _start_thread(self, once: bool = False) -> None:
        if self._closed:
            return
        name = f"feedline-read-{self._started}"
        thread = threading.Thread(target=self._run, args=(once,), name=name, daemon=True)
        self._started += 1
        self._threads.append(thread)
        thread.start()

    def probe(self, worker: m.WorkerRef) -> None:
        """Make sure that the worker runs, if it was not heard of for a second.

        Raises:
            PeerSilent, PeerUnreachable: it does not.
        """
        if time.monotonic() - self._heard.get(worker.id, -10.0) > 1.0:
            self.connection(worker.address).call(m.Hello(), m.HelloReply, self._stall)
            self.heard(worker)

    def heard(self, worker: m.WorkerRef) -> None:
        """The worker gave a sign of life."""
        self._heard[worker.id] = time.monotonic()

    def heard_at(self, worker: str) -> float:
        """When the worker of this id last gave a sign of life; monotonic seconds, 0.0: never."""
        return self._heard.get(worker, 0.0)

    def submit(self, job: Callable[[], bool], *, at_once: bool = False) -> None:
        """Run ``job`` on one of the threads, which ends if it returns True: another stands in for it.

        ``at_once``: before those that wait, and on a further thread if all are busy.
        """
        with self._lock:
            if at_once:
                self._jobs.appendleft(job)
                if not self._idle:
                    self._start_thread(once=True)
            else:
                self._jobs.append(job)
            self._work.notify()

    def connection(self, address: str) -> Connection:
        """The connection to a worker, kept for later reads."""
        with self._lock:
            if self._closed:
                raise ReadCancelled("the loader is closed")
            if address not in self._connections:
                self._connections[address] = Connection(parse_address(address), self._options)
            return self._connections[address]

    def close(self) -> None:
        """Close the connections and tell the threads to end. Reads must be cancelled by their owners."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections.values())
            self._work.notify_all()
        for connection in connections:
            connection.close()

    def join(self, timeout: float) -> None:
        """Wait for the threads to end."""
        deadline = time.monotonic() + timeout
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, once: bool) -> None:
        replaced = False
        while not replaced and (job := self._next()) is not None:
            try:
                replaced = job() or once
            except Exception:
                log.exception("a read failed in an unexpected way")
            del job  # it holds an epoch that may be over before the next one comes
        with self._lock:
            if not self._closed:
                self._threads.remove(threading.current_thread())

    def _next(self) -> Callable[[], bool] | None:
        with self._work:
            self._idle += 1
            while not self._jobs and not self._closed:
                self._work.wait()
            self._idle -= 1
            return self._jobs.popleft() if self._jobs else None


class Read:
    """One attempt to read rows from one worker.

    Args:
        offsets: where the rows belong in the chunk, ascending, int64 [rows].
        which, rows: index into ``grants`` and row in that shard, per row, int64 [rows].
        on_part: called with (read, record batch, first row of the read it may hold, rows done now, bad rows).
        on_end: called once, with None or what went wrong.
    """

    def __init__(
        self,
        worker: m.WorkerRef,
        grants: tuple[bytes, ...],
        offsets: I64,
        which: I64,
        rows: I64,
        on_part: Callable[[Read, pa.RecordBatch, int, m.ReadPart], None],
        on_end: Callable[[Read, Exception | None], None],
    ) -> None:
        self.worker = worker
        self.offsets = offsets
        self.done = 0
        #: bytes that came
        self.size = 0
        #: monotonic time of its beginning, 0.0 before it runs
        self.started = 0.0
        #: monotonic time of the last message, 0.0 before the read runs
        self.last_sign = 0.0
        #: monotonic time of the last rows, or of when it was issued
        self.moved = time.monotonic()
        #: a second worker was asked for the rest, or this is that second read
        self.hedged = False
        self.abandoned = False
        self._opening = False
        self._replaced = False
        self._ticket = codec.encode(
            m.ReadTicket(grants=grants, which=which.astype("<u4").tobytes(), rows=rows.astype("<i8").tobytes())
        )
        self._on_part = on_part
        self._on_end = on_end
        self._stream: Stream | None = None

    def __repr__(self) -> str:
        return f"Read({len(self.offsets)} rows of {self.worker.id}, {self.done} done)"

    def run(self, pool: ReadPool) -> bool:
        """Pull the stream to its end; on a thread of the pool. True: another thread stands in for this one."""
        if self.abandoned:
            self._on_end(self, None)
            return False
        self.started = self.last_sign = time.monotonic()
        self.moved = max(self.moved, self.started)
        try:
            pool.probe(self.worker)
            self._opening = True
            self._stream = pool.connection(self.worker.address).read(self._ticket, pool.timeout)
            self._opening = False
            if self.abandoned:
                self._stream.cancel()
            for batch, part in self._stream:
                self.last_sign = time.monotonic()
                pool.heard(self.worker)
                if self.abandoned:
                    break
                if part is not None and (part.done > self.done or batch.num_rows):
                    self._on_part(self, batch, self.done, part)
                    self.done = part.done  # only now: rows of a part that was refused are read again
                    self.moved = self.last_sign
                    self.size += batch.nbytes
            if not self.abandoned and self.done < len(self.offsets):
                raise ConnectionError(f"the stream of worker {self.worker.id} ended after {self.done} rows")
        except Exception as error:
            failed: Exception | None = error
        else:
            failed = None
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self._on_end(self, failed)
        return self._replaced

    def abandon(self, pool: ReadPool) -> None:
        """Give the read up: what still comes is not used."""
        self.abandoned = True
        stream = self._stream
        if stream is not None:
            stream.cancel()
        elif self._opening and not self._replaced:
            self._replaced = True
            pool.add_thread()
