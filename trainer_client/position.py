"""From a run to the state that is saved, and from there to the start point of the next one."""

from __future__ import annotations

from typing import Any

from manifests.wire import messages as m

from . import dynamic_state
from .config import LoaderConfig
from .dynamic import DynamicLeg
from .marks import Mark
from .run import Epoch, Run
from .state import VERSION, encode_step, encode_taken, identity_of


def state_at(run: Run, epoch: Epoch, *, epochs: int | None) -> tuple[dict[str, Any], Mark | None]:
    """The state after the last batch handed out of ``epoch``, with its mark if one could ever be asked for.

    Args:
        epochs: of the pass it belongs to.
    """
    leg, saved = epoch.leg, None
    if isinstance(leg, DynamicLeg):
        position, saved = leg.saved(lambda: epoch.session.position)
    else:
        position = epoch.session.position
    number, first = epoch.number, epoch.first_epoch
    step = leg.first_step + position.steps
    next_first = number + 1 if epochs is not None and number + 1 >= first + epochs else first
    skip = run.config.on_error == "skip"
    mark = None
    state: dict[str, Any] = {}
    if leg.ends_everywhere(position):  # one state for the end of an epoch and the start of the next
        number, step, first = number + 1, 0, next_first
        taken = "" if leg.dynamic else encode_taken([0] * leg.plan.lanes)
        if leg.dynamic:
            quotas = run.config.has_quotas
            state = {"dynamic": dynamic_state.encode_beginning(run.rank, quotas=quotas, first_epoch=first)}
    else:
        taken = encode_taken(leg.taken(position.read, position.steps).tolist())
        if saved is not None:
            state = {
                "dynamic": dynamic_state.encode(
                    saved,
                    int(leg.own_taken(position.read)[0]),
                    quotas=run.config.has_quotas,
                    ended=leg.ends_at(position),
                    next_first=next_first,
                )
            }
        if leg.world_size > 1 and (skip or leg.dynamic):
            mark = Mark(epoch.number, leg, position, saved)
    state = {
        "version": VERSION,
        "dataset": run.dataset.label,
        "identity": identity_of(run.settings),
        "generation": run.generation,
        "epoch": number,
        "step": encode_step(step),
        "first_epoch": first,
        "rank": run.rank,
        "world_size": run.settings.world_size,
        "taken": taken,
        "rows": run.dataset.manifest.rows,
        "job": run.config.job,
        "skip": skip,
        **state,
    }
    return state, mark


def blank_state(config: LoaderConfig) -> dict[str, Any]:
    """The state of a loader that has not begun; it starts afresh."""
    return {
        "version": VERSION,
        "dataset": config.dataset,
        "identity": None,
        "generation": 0,
        "epoch": 0,
        "step": encode_step(0),
        "first_epoch": 0,
        "rank": config.rank or 0,
        "world_size": config.world_size or 1,
        "taken": "",
        "rows": 0,
        "job": config.job,
        "skip": config.on_error == "skip",
    }


def epoch_start(epoch: int) -> m.StartPoint:
    """The beginning of an epoch that was asked for. Fresh: it vouches for nothing that was read before."""
    return m.StartPoint(kind="fresh", epoch=epoch, first_epoch=epoch)
