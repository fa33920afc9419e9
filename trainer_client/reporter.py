"""Acknowledgements and signs of life, sent in the background so that the loop makes no call."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Literal

from manifests.errors import DispatcherUnavailable, FeedlineError
from manifests.log import new_cause
from manifests.wire import messages as m

from .books import Books
from .control import Closed, Control
from .marks import Mark

log = logging.getLogger("feedline.client")

State = Literal["reading", "waiting", "done"]
#: seconds after which something new is reported at the latest
_EVERY = 0.5
#: seconds between reports that marks bring about, and marks that wait for one, at the most
_MARKS_EVERY, _MARKS = 0.1, 4
#: seconds between lines that tell of acknowledgements that were not delivered, during one outage
TOLD_EVERY = 30.0


class Reporter:
    """Sends the books of the epochs under way: within a second of a change, and often enough to keep the lease. Marks
    of saved states go at once; of states saved faster than that the last few.

    Args:
        status: state, what the rank waits for, and since how many seconds; called on the reporter's thread.
        answered: called with every answer, on the thread that sent.
        fatal: called with what the dispatcher answered when this loader may not go on.
    """

    def __init__(
        self,
        control: Control,
        *,
        job: str,
        generation: int,
        rank: int,
        holder: str,
        lease: float,
        status: Callable[[], tuple[State, str, float]],
        answered: Callable[[m.Reported], None],
        fatal: Callable[[FeedlineError], None],
    ) -> None:
        self._control = control
        self._job, self._generation, self._rank, self._holder = job, generation, rank, holder
        self._lease = lease
        self._status = status
        self._answered = answered
        self._fatal = fatal
        self._wake = threading.Condition()
        self._sending = threading.Lock()  # one report at a time, so that they arrive in order
        self._books: list[Books] = []
        self._sent: dict[int, m.EpochProgress] = {}
        self._marks: dict[tuple[int, int], Mark] = {}
        self._closing = False
        self._told = -math.inf
        #: lowest epoch a rank is still in, and that rank, as last answered
        self.slowest: tuple[int, int] = (0, 0)
        self._thread = threading.Thread(target=self._run, name="feedline-report", daemon=True)
        self._thread.start()

    def add(self, books: Books) -> None:
        """Report these books from now on, until they are finished and that was answered."""
        with self._wake:
            self._books.append(books)
            self._wake.notify_all()

    def mark(self, mark: Mark) -> None:
        """Tell of a state that was saved, soon; never waits for a call."""
        with self._wake:
            self._marks[mark.key] = mark
            while len(self._marks) > _MARKS:
                del self._marks[next(iter(self._marks))]
            self._wake.notify_all()

    def acknowledge(self) -> None:
        """Everything handed out in the epochs under way is acknowledged, those of earlier epochs too."""
        with self._wake:
            books = list(self._books)
        for one in books:
            one.acknowledge()

    def flush(self, timeout: float, leaving: bool = False) -> bool:
        """Send what is new now and wait for the answer. False: it was not answered in time."""
        try:
            self._send(timeout, leaving)
        except DispatcherUnavailable as error:
            self._tell(error)
            return False
        except Closed:
            return False
        except FeedlineError as error:
            self._fatal(error)
            return False
        return True

    def _tell(self, error: DispatcherUnavailable) -> None:
        now = time.monotonic()
        with self._wake:
            again = now - self._told >= TOLD_EVERY
            self._told = now if again else self._told
        log.log(logging.WARNING if again else logging.DEBUG, "acknowledgements were not delivered: %s", error)

    def close(self) -> None:
        """Stop reporting; waits for the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(2.0)

    def _run(self) -> None:
        last = 0.0
        while True:
            with self._wake:
                self._wait(last)
                if self._closing:
                    return
                marks = bool(self._marks)
            now = time.monotonic()
            if now - last < self._lease / 3 and not marks and not self._news():
                continue
            try:
                self._send(min(5.0, self._lease))
                last = now
            except DispatcherUnavailable as error:
                log.debug("report not delivered: %s", error)
            except Closed:
                return
            except FeedlineError as error:
                self._fatal(error)
                return

    def _wait(self, last: float) -> None:
        """Until it is time to look, or marks are there and the last report is a moment ago."""
        until = time.monotonic() + _EVERY
        while not self._closing:
            end = min(until, last + _MARKS_EVERY) if self._marks else until
            left = end - time.monotonic()
            if left <= 0:
                return
            self._wake.wait(left)

    def _news(self) -> list[m.EpochProgress]:
        with self._wake:
            books = list(self._books)
        return [p for b in books if self._sent.get(b.epoch) != (p := b.progress())]

    def _send(self, timeout: float, leaving: bool = False) -> None:
        deadline = time.monotonic() + timeout
        if not self._sending.acquire(timeout=timeout):
            raise DispatcherUnavailable("a report is still under way", cause=self._control.trouble)
        try:
            timeout = max(0.1, deadline - time.monotonic())
            news = self._news()
            with self._wake:
                marks = dict(self._marks)
            state, waiting_for, waiting = self._status()
            reply: m.Reported = self._control.call(
                m.Report(
                    cause=new_cause(),
                    job=self._job,
                    generation=self._generation,
                    rank=self._rank,
                    holder=self._holder,
                    epochs=tuple(news),
                    state="done" if leaving else state,
                    waiting_for=waiting_for,
                    waiting_ms=int(waiting * 1000),
                    leaving=leaving,
                    marks=tuple(mark.message() for mark in marks.values()),
                ),
                m.Reported,
                timeout=timeout,
                one_call=min(5.0, timeout),
            )
            self.slowest = (reply.slowest_epoch, reply.slowest_rank)
            with self._wake:
                self._told = -math.inf
                self._sent.update({p.epoch: p for p in news})
                closed = {p.epoch for p in self._sent.values() if p.state != "open"}
                self._books = [b for b in self._books if b.epoch not in closed]
                self._sent = {b.epoch: self._sent[b.epoch] for b in self._books if b.epoch in self._sent}
                self._marks = {key: mark for key, mark in self._marks.items() if marks.get(key) is not mark}
            self._answered(reply)
        finally:
            self._sending.release()
