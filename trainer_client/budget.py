"""Bytes that rows on their way may take, and figures about them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from .speeds import Pace, Speeds


class Budget:
    """Bytes of rows on their way, shared by the epochs of a loader. Changed under the feed's lock only."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.lock = threading.Condition()
        #: bytes per row, learned from what came; None: not known yet
        self.row_bytes: float | None = None
        #: rows read, and those of them that a worker's cache served
        self.rows = self.hot_rows = 0
        #: reads of which a second worker was asked for the rest
        self.hedges = 0
        self.speeds = Speeds()
        self.pace = Pace()


@dataclass(frozen=True)
class FeedStats:
    """Figures for ``stats()``."""

    buffered: int
    in_flight: int
    workers: int
    #: reads that a second worker helped with, of all feeds of the loader
    hedges: int
