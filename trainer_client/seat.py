"""Who asks: one rank of one generation of a job, held by one loader."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank of a generation and who holds it. ``holder``: uid of the loader object."""

    job: str
    generation: int
    rank: int
    holder: str
