"""Which data-parallel rank is this process, and collecting what all ranks know."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from manifests.errors import ConfigError

if TYPE_CHECKING:
    from .loader import RemoteDataLoader


def resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size): as given, else of torch.distributed, else RANK and WORLD_SIZE, else 0 of 1."""
    if rank is not None and world_size is not None:
        return rank, world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    texts = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if texts == ("", ""):
        return 0, 1
    try:
        found = int(texts[0]), int(texts[1])
    except ValueError:
        raise ConfigError(f"RANK={texts[0]!r} and WORLD_SIZE={texts[1]!r} are not both numbers") from None
    if not 0 <= found[0] < found[1]:
        raise ConfigError(f"RANK={found[0]} is outside WORLD_SIZE={found[1]}")
    return found


def gather_states(loader: RemoteDataLoader) -> list[dict[str, Any]]:
    """States of all ranks, in rank order, on every rank. A torch.distributed collective: all ranks call it.

    Without torch.distributed, the loader's own state in a list.

    Raises:
        ConfigError: several ranks, but torch.distributed is not initialised.
    """
    state = loader.state_dict()
    if not (dist.is_available() and dist.is_initialized()):
        if state["world_size"] > 1:
            raise ConfigError(
                "gather_states needs torch.distributed",
                remedy="init_process_group first, or collect the states yourself",
            )
        return [state]
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return sorted(states, key=lambda s: int(s["rank"]))
