"""What a rank waits for when that is another rank: texts that follow "waits for". Pure."""

from __future__ import annotations

from collections.abc import Sequence

#: ranks named in one text
NAMED = 8


def not_joined(ranks: Sequence[int]) -> str:
    """These ranks, at least one, have not joined the generation."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}, which has not joined"
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:NAMED]))}{more}, which have not joined"


def behind(rank: int, epoch: int, silent_s: float | None = None) -> str:
    """This rank is in an epoch too far back. ``silent_s``: seconds since it was heard, if it is not live."""
    silent = f" and was not heard for {silent_s:.0f} s" if silent_s is not None else ""
    return f"rank {rank}, which is still in epoch {epoch}{silent}"
