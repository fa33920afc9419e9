"""How long the loop waited and what it got: the figures behind ``stats()``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .budget import FeedStats


class Served(Protocol):
    """What a run tells about its reads."""

    @property
    def hot_share(self) -> float:
        """Share of the rows read that needed nothing from storage."""

    def feed_stats(self) -> Sequence[FeedStats]:
        """Of the feeds under way."""


@dataclass
class Waits:
    """Since the loader began its first pass: seconds, batches, rows, bytes. Changed by the loop's thread only."""

    started: float = 0.0
    #: when the loop last got a batch or the end of a pass
    last: float = 0.0
    waited: float = 0.0
    waiting_since: float | None = None
    steps: int = 0
    rows: int = 0
    bytes: int = 0

    def begin(self) -> None:
        """A pass begins; the first one starts the clock."""
        now = time.monotonic()
        self.started = self.started or now
        self.last = max(self.last, now)

    def got(self, rows: int = 0, size: int = 0) -> None:
        """The loop got a batch of so many rows and bytes, or (0) the end of a pass."""
        self.steps += rows > 0
        self.rows += rows
        self.bytes += size
        self.last = time.monotonic()

    def summary(self, run: Served | None) -> dict[str, float]:
        """The dict that ``stats()`` returns. The clock stands still while no pass runs."""
        since = self.waiting_since
        now = time.monotonic() if since is not None else self.last
        ran = max(now - self.started, 1e-9) if self.started else 0.0
        waited = self.waited + (now - since if since is not None else 0.0)
        feeds = run.feed_stats() if run is not None else ()
        return {
            "wait_share": min(1.0, waited / ran) if ran else 0.0,
            "step_s": ran / self.steps if self.steps else 0.0,
            "rows_per_s": self.rows / ran if ran else 0.0,
            "bytes_per_s": self.bytes / ran if ran else 0.0,
            "queue_bytes": sum(f.buffered for f in feeds),
            "hot_share": run.hot_share if run is not None else 0.0,
            "workers": max((f.workers for f in feeds), default=0),
        }
