"""The rows of one epoch on their way to the loop: planned ahead in order, read from any worker, kept until taken.

The planner thread cuts the read stream into chunks as the prefetch budget allows; ``Fetch`` gets their rows. Beyond the
chunks it looks ahead as far as the loop gets in ``AHEAD`` seconds, so that the grants held carry the loop through an
outage of the dispatcher. The order never changes, because every row has its place in its chunk from the start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from manifests.errors import DispatcherUnavailable, FeedlineError, NoWorker, ProtocolError, RankAbsent, WaitTimeout
from manifests.schema import Field

from .avoid import Avoided
from .budget import Budget, FeedStats
from .chunks import MISSING, Chunk, in_order
from .control import Closed, Control
from .dynamic import AnyLeg
from .fetch import READ_BYTES, Fetch
from .grants import ASK, HOLD, GrantKeeper
from .lookahead import LookAhead
from .reads import ReadPool
from .seat import Seat

log = logging.getLogger("feedline.client")

_FIRST_BYTES = 1 << 20
#: seconds of the loop's work for which grants are held, and the rows looked at for it at the most
AHEAD = 30.0
_MOST_ROWS = 2_000_000
#: seconds between rounds of the planner while rows are awaited, and otherwise
_ROUND, _IDLE = 0.05, 0.25


class Feed:
    """Rows of one leg.

    Args:
        leg: what to hand out. fields: output columns. control: the dispatcher. pool: read threads.
        budget: shared byte budget; its lock is this feed's lock.
        seat: for whom grants are asked.
        stall: seconds of silence after which a read moves. timeout: seconds without any row after which waiting ends.
        fatal: called with an error that ends the loader (``Fenced`` and the like).
        after: the feed of the epoch before, which plans all its rows before this one plans any; until then grants are
            all that is asked for.
    """

    def __init__(
        self,
        leg: AnyLeg,
        *,
        epoch: int,
        fields: Sequence[Field],
        control: Control,
        pool: ReadPool,
        budget: Budget,
        seat: Seat,
        stall: float,
        timeout: float,
        fatal: Callable[[FeedlineError], None],
        after: Feed | None = None,
    ) -> None:
        self.leg = leg
        self.epoch = epoch
        self._control = control
        self._budget = budget
        self._lock = budget.lock
        self._timeout = timeout
        self._fatal = fatal
        self._seat = seat
        self._chunks: deque[Chunk] = deque()
        self._planned = 0
        self._released = 0
        self._starving = False
        self._closing = False
        self._news = 0
        self._grow = _FIRST_BYTES
        self._count = 64  # rows of a chunk, about
        self._waits_since = 0.0
        self._after = after
        self._ahead = LookAhead(leg)
        self._last_wanted: list[int] = []
        avoided = Avoided()
        self._keeper = GrantKeeper(
            control,
            leg,
            seat=seat,
            epoch=epoch,
            avoided=avoided,
            speeds=budget.speeds,
            reach=self._reach,
            changed=self._notify,
            failed=fatal,
        )
        self._fetch = Fetch(
            fields=fields,
            pool=pool,
            budget=budget,
            keeper=self._keeper,
            avoided=avoided,
            shard_rows=self._shard_rows,
            stall=stall,
            news=self._notify,
        )
        self._thread = threading.Thread(target=self._run, name=f"feedline-plan-{epoch}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Feed(epoch {self.epoch}, {len(self._chunks)} chunks, {self._fetch!r}, planned {self._planned})"

    # -- the loop's side

    @property
    def planned_all(self) -> bool:
        """Every row of the leg is planned, as far as is known of bad ones."""
        return self.leg.final and self._planned >= self._needed()

    @property
    def looked_all(self) -> bool:
        """Every row of the leg is planned or known to come next: its grants are held or were asked for."""
        return self.leg.final and self._ahead.end >= self._needed()

    def status(self, first: int, count: int) -> npt.NDArray[np.int32]:
        """Marks of the rows ``first ..`` of the read stream that are planned, at most ``count``, cut at the first one
        that is not there yet: a part number, BAD, FAILED or QUARANTINED. int32 [<= count]."""
        with self._lock:
            marks = [
                c.part[max(0, first - c.first) :] for c in self._chunks if c.end > first and c.first < first + count
            ]
            marks = [part.copy() for part in marks]
        known = np.concatenate(marks)[:count] if marks else np.empty(0, np.int32)
        missing = np.flatnonzero(known == MISSING)
        return known[: missing[0]] if len(missing) else known

    def wait(self, first: int, known: int, fatal: Callable[[], FeedlineError | None]) -> None:
        """Wait until more than ``known`` rows from ``first`` on are there, or in dynamic order no more can come.

        Raises:
            FeedlineError: the loader cannot go on, or nothing came for ``timeout`` seconds (named).
            Closed: the feed was closed meanwhile.
        """
        if self.leg.dynamic:
            self._keeper.look(at_once=True)
        with self._lock:
            while True:
                if self._closing:
                    raise Closed
                error = fatal()
                if error is not None:
                    raise error
                over = self.leg.dynamic and self.leg.final and first + known >= self._needed()
                if over or len(self.status(first, known + 1)) > known:
                    self._starving = False
                    return
                idle = time.monotonic() - max(self._fetch.progress, self._waits_since)
                if idle >= self._timeout:
                    raise self._timed_out(idle)
                if not self._starving:
                    self._starving = True
                    self._notify()
                self._lock.wait(min(1.0, self._timeout - idle))

    def begin_wait(self) -> None:
        """The loop starts to wait: a pause of the loop itself does not count against the deadline."""
        self._waits_since = time.monotonic()

    def chunk_at(self, place: int) -> Chunk:
        """The chunk that holds this place of the read stream."""
        with self._lock:
            for chunk in self._chunks:
                if chunk.first <= place < chunk.end:
                    return chunk
            if self._closing:
                raise Closed
        raise LookupError(f"place {place} is not planned")

    def release(self, place: int) -> None:
        """Rows before ``place`` are not needed any more."""
        self._budget.pace.took(place - self._released, time.monotonic())
        with self._lock:
            self._released = place
            if not self._chunks or self._chunks[0].end > place:
                return
            while self._chunks and self._chunks[0].end <= place:
                chunk = self._chunks.popleft()
                chunk.released = True
                self._budget.used -= chunk.reserved
            self._notify()

    def reason(self) -> str:
        """Why rows are missing right now, for people."""
        return self._why()[1]

    def stats(self) -> FeedStats:
        """Bytes and reads on their way, and workers that served lately."""
        with self._lock:
            return FeedStats(
                buffered=sum(c.reserved for c in self._chunks),
                in_flight=self._fetch.in_flight,
                workers=self._fetch.workers(),
                hedges=self._budget.hedges,
            )

    def close(self) -> None:
        """Cancel what is under way and give the budget back."""
        with self._lock:
            self._closing = True
            self._budget.used -= sum(c.reserved for c in self._chunks)
            self._chunks.clear()
            self._notify()
        self._keeper.close()
        self._fetch.close()

    def join(self, timeout: float) -> None:
        """Wait for the threads to end."""
        self._thread.join(timeout)
        self._keeper.join(timeout)

    def _timed_out(self, idle: float) -> FeedlineError:
        kind, reason = self._why()
        return kind(
            f"rank {self._seat.rank} of job {self._seat.job} waited {idle:.1f} s for rows of epoch {self.epoch}",
            cause=reason,
            remedy="`feedline status` shows workers and ranks",
        )

    def _why(self) -> tuple[type[FeedlineError], str]:
        """Why the next row is not there: the error that a deadline passed now is, and the text."""
        keeper = self._keeper
        with self._lock:
            first = self._first_missing()
        if first is not None:
            reason = self._fetch.reason(*first)
            if reason:
                return WaitTimeout, reason
        if trouble := self._control.trouble:
            return DispatcherUnavailable, f"dispatcher: {trouble}"
        if keeper.waiting_code == "rank-absent":
            return RankAbsent, keeper.waiting
        about = "" if first is None else f"shard {first[0].shards[first[1]]}: "
        if waiting := keeper.waiting:
            kind = NoWorker if keeper.waiting_code == "no-worker" else WaitTimeout
            return kind, waiting if waiting.startswith("shard ") else about + waiting
        if first is None:
            more = self.leg.dynamic and not self.leg.final
            return WaitTimeout, "more rows of the epoch, which were asked for" if more else "rows on their way"
        failure = self._fetch.last_failure(int(first[0].shards[first[1]]))
        return WaitTimeout, failure or about + "a grant was asked for"

    def _first_missing(self) -> tuple[Chunk, int] | None:
        for chunk in self._chunks:
            if chunk.missing:
                return chunk, int(np.argmax(chunk.part == MISSING))
        return None

    # -- planning (own thread)

    def _needed(self) -> int:
        if self.leg.tail == "ragged":
            return self.leg.candidates
        return self.leg.quota + self._fetch.unusable

    def _limit(self) -> int:
        """Place in the read stream up to which rows can be planned now."""
        return min(self._needed(), self.leg.certain)

    def _shard_rows(self, shard: int) -> int:
        ends = self.leg.plan.ids(np.array([shard, shard + 1], np.int64), np.zeros(2, np.int64))
        return int(ends[1] - ends[0])

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception as error:
            log.exception("planning reads failed")
            self._fatal(
                error if isinstance(error, FeedlineError) else ProtocolError("planning failed", cause=str(error))
            )

    def _step(self) -> bool:
        """One round: what was planned first, then new rows, then a look further ahead. False: closed."""
        with self._lock:
            if self._closing:
                return False
            news = self._news
            chunks = tuple(self._chunks)
            awaited = self._first_missing() if self._starving else None
        issued = self._fetch.step(chunks)
        if awaited is not None:
            self._fetch.hedge(*awaited)
        chunk = self._next_chunk()
        looked = chunk is None and not issued and self._look()
        if chunk is not None or looked or self._fetch.wants_grants:
            self._want()
        if self.leg.dynamic and not self.leg.final:
            self._keeper.look()
        if chunk is None and not issued and not looked:
            with self._lock:
                pause = _IDLE if self._fetch.idle and not self._starving else _ROUND
                turn = self._is_turn()
                self._lock.wait_for(lambda: self._news != news or self._closing or self._is_turn() != turn, pause)
        return True

    def _is_turn(self) -> bool:
        """The epoch before needs no more room."""
        if self._after is not None and (self._after.planned_all or self._after._closing):
            self._after = None
        return self._after is None

    def _next_chunk(self) -> Chunk | None:
        limit = self._limit()
        if not self._is_turn():
            return None
        with self._lock:
            wanted = limit - self._planned
            if wanted <= 0:
                return None
            size = self._fetch.row_size()
            free = self._budget.limit - self._budget.used
            target = min(self._grow, max(self._budget.limit // 4, 1))
            forced = self._starving and self._fetch.idle and not any(c.missing for c in self._chunks)
            if free < target and self._budget.used > 0 and not forced:
                return None
            self._count = int(max(1, target // max(size, 1)))
            count = min(wanted, self._count)
            if not self._fetch.row_size_known:
                count = min(count, 64)
            self._grow = min(self._grow * 2, READ_BYTES * max(1, min(4, self._fetch.workers())))
        shards, rows = self._ahead.take(count, limit)
        if not len(rows):
            return None
        chunk = Chunk(self._planned, shards, rows, self.leg.plan.ids(shards, rows), int(len(rows) * size))
        with self._lock:
            if self._closing:
                return None
            self._chunks.append(chunk)
            self._planned = chunk.end
            self._budget.used += chunk.reserved
            self._fetch.add(chunk)
        return chunk

    # -- looking ahead

    def _horizon(self) -> int:
        """Rows of the read stream that should be known."""
        rate = self._budget.pace.rate
        near = self._planned + 4 * self._count
        return near if rate is None else max(near, self._released + int(rate * AHEAD))

    def _reach(self) -> tuple[int, int]:
        return self._horizon(), self._released

    def _look(self) -> bool:
        """Make some more rows known; one step, so that nothing waits long. False: far enough."""
        ahead = self._ahead
        if ahead.rows >= _MOST_ROWS or ahead.shard_count >= HOLD:
            return False
        if ahead.end >= self._horizon() and (self._budget.pace.rate is not None or ahead.shard_count >= ASK):
            return False
        return ahead.grow(self._limit())

    def _want(self) -> None:
        """Tell the keeper which shards are needed: of rows that no read is under way for, then of those that are (their
        read may fail), then of the rows that come."""
        wanted = dict.fromkeys(self._fetch.unissued_shards(HOLD))
        with self._lock:
            missing = [c.shards[c.part == MISSING] for c in self._chunks if c.missing]
        for shards_of_chunk in missing:
            if len(wanted) >= HOLD:
                break
            wanted.update(dict.fromkeys(in_order(shards_of_chunk)))
        wanted.update(dict.fromkeys(self._ahead.shards(HOLD)))
        shards = list(wanted)[:HOLD]
        if shards != self._last_wanted:
            self._last_wanted = shards
            self._keeper.want(shards)

    def _notify(self) -> None:
        with self._lock:
            self._news += 1
            self._lock.notify_all()
