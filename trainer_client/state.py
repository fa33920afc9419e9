"""The saved position: what ``state_dict()`` returns, and how states are checked and joined when loaded.

A state is a dict of plain values, so that it pickles, goes through ``torch.save`` and JSON, and stays readable:

    version       1
    dataset       label, for people
    identity      manifest digests, order, seed, shuffle, lanes, pipeline: what must be the same on a resume
    generation, epoch, first_epoch, rank, world_size
    step          batches since the epoch began: text of 16 decimal digits (``int(state["step"])``)
    taken         rows taken per lane, all lanes: 16 hex digits each
    rows, job     rows of the dataset; job that saved it (may be missing)
    skip          whether on_error was "skip"
    dynamic       in dynamic order only, see ``dynamic_state``; ``taken`` is "" there
    ranks         states of several ranks that were loaded together and can only be kept together (dynamic order)

Step and counts have a fixed width, so that the size of a state does not depend on the position in an epoch.
``first_epoch`` is the epoch in which the current pass (one ``for``) began, so that a pass over several epochs goes on
where it was and ends where it would have ended. The end of epoch e is written as the start of e + 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from manifests.cursor import divisors
from manifests.errors import ConfigError, StateMismatch
from manifests.plan import lane_sizes
from manifests.wire.messages import JobSettings, StartPoint

from . import dynamic_state

VERSION = 1
#: counts below 2**63, 16 digits each
_COUNTS = re.compile(r"([0-7][0-9a-f]{15})*")
_STEP = re.compile(r"[0-9]{16}")
_KEYS = (
    "version", "dataset", "identity", "generation", "epoch", "step", "first_epoch", "rank", "world_size", "taken", "skip",
)  # fmt: skip


def identity_of(settings: JobSettings) -> dict[str, Any]:
    """What a state is tied to. Seed and lanes must be resolved."""
    return {
        "manifests": [s.digest for s in settings.sources],
        "weights": [s.weight for s in settings.sources],
        "order": settings.order,
        "seed": settings.seed,
        "shuffle": _shuffle(settings),
        "lanes": settings.lanes,
        "pipeline": settings.pipeline,
    }


def _shuffle(settings: JobSettings) -> dict[str, Any] | None:
    shuffle = settings.shuffle
    if shuffle is None:
        return None
    return {"buffer": shuffle.buffer, "interleave": shuffle.interleave, "within_shard": shuffle.within_shard}


def encode_step(step: int) -> str:
    """A step count as 16 digits."""
    return f"{step:016d}"


def _step_of(state: Mapping[str, Any]) -> int:
    """Steps as text or as a number; ``StateMismatch`` for anything else."""
    step = state["step"]
    if isinstance(step, str) and _STEP.fullmatch(step):
        return int(step)
    if not _is_count(step):
        raise StateMismatch("state is damaged", cause="a count in it is not a number")
    return int(step)


def encode_taken(taken: Iterable[int]) -> str:
    """Counts as 16 hex digits each."""
    return "".join(f"{int(count):016x}" for count in taken)


def decode_taken(text: str) -> tuple[int, ...]:
    """The inverse; ``StateMismatch`` for anything else."""
    if not isinstance(text, str) or not _COUNTS.fullmatch(text):
        raise StateMismatch("state is damaged", cause="'taken' is not a list of counts")
    return tuple(int(text[at : at + 16], 16) for at in range(0, len(text), 16))


class LoadedState(msgspec.Struct, frozen=True):
    """A state, or several of one job joined into one, ready to start from."""

    #: None: saved before anything was read; starts afresh
    identity: dict[str, Any] | None
    start: StartPoint
    dataset: str = ""
    #: what was loaded, as one state
    state: dict[str, Any] = {}


def load(states: Any) -> LoadedState:
    """Check the form of a state or list of states, and join them.

    What other ranks had taken is not known from a lone state in dynamic order, nor from one saved under
    ``on_error="skip"``: these ranks are ``start.missing``, for the dispatcher to complete from their marks.

    Raises:
        ConfigError: not a state. StateMismatch: states of different jobs or places, or damaged.
    """
    several = isinstance(states, Sequence) and not isinstance(states, (str, bytes)) and states
    given: list[Any] = []
    for state in states if several else [states]:
        ranks = state.get("ranks") if isinstance(state, Mapping) else None
        given += ranks if isinstance(ranks, list) and ranks else [state]
    for state in given:
        _check_form(state)
    many = [{**state, "step": _step_of(state)} for state in given]
    first = many[0]
    if any(state["identity"] is None or not _is_dynamic(state) for state in many):
        return _load_counts(many)
    for state in many:
        dynamic_state.check_form(state)
    many = _level_dynamic(many)
    _check_same(many, equal_steps=any(dynamic_state.has_quotas(state) for state in many))
    many = list({state["rank"]: state for state in many}.values())
    start = dynamic_state.join(many)
    if len(many) == 1:
        kept = {**many[0], "step": encode_step(many[0]["step"])}
    else:
        ranks = [{**state, "step": encode_step(state["step"])} for state in many]
        kept = {**ranks[0], "step": encode_step(start.step), "ranks": ranks}
    return LoadedState(dict(first["identity"]), start, str(first["dataset"]), kept)


def _load_counts(given: list[dict[str, Any]]) -> LoadedState:
    """States of the deterministic order, and of loaders that had not begun."""
    many = _level(given)
    first = many[0]
    _check_same(many)
    if first["identity"] is None:
        return LoadedState(None, StartPoint(), str(first["dataset"]), {**first, "step": encode_step(first["step"])})
    lanes = first["identity"]["lanes"]
    world = first["world_size"]
    counts = {s["rank"]: decode_taken(s["taken"]) for s in many}
    if any(len(c) != lanes for c in counts.values()) or not all(0 <= rank < world for rank in counts):
        raise StateMismatch("state is damaged", cause=f"it does not hold {lanes} lanes of {world} ranks")
    missing = sorted(set(range(world)) - set(counts)) if first["skip"] and first["step"] > 0 else []
    taken = np.array(counts[first["rank"]], np.int64)
    for rank, own in counts.items():
        taken[rank::world] = np.array(own, np.int64)[rank::world]
    start = StartPoint(
        kind="checkpoint",
        epoch=first["epoch"],
        step=first["step"],
        taken=tuple(int(t) for t in taken),
        first_epoch=first["first_epoch"],
        generation=first["generation"],
        world_size=world,
        skip=first["skip"],
        job=first.get("job", ""),
        missing=tuple(missing),
    )
    # Joined it is complete: it tells of every rank what that rank's own state did. What is missing stays so.
    joined = {
        **first,
        "step": encode_step(first["step"]),
        "taken": encode_taken(taken.tolist()),
        "skip": bool(missing),
    }
    if missing and len(counts) > 1:
        joined["ranks"] = [{**state, "step": encode_step(state["step"])} for state in many]
    return LoadedState(dict(first["identity"]), start, str(first["dataset"]), joined)


def _is_dynamic(state: Mapping[str, Any]) -> bool:
    return bool(state["identity"].get("order") == "dynamic")


def _check_form(state: Any) -> None:
    if not isinstance(state, Mapping) or any(key not in state for key in _KEYS):
        raise ConfigError("this is not a loader state", remedy="pass what state_dict() returned, or a list of it")
    if state["version"] != VERSION:
        raise StateMismatch(f"state of version {state['version']}", cause=f"this release reads version {VERSION}")
    numbers = ("generation", "epoch", "first_epoch", "rank", "world_size")
    named = _is_count(state.get("rows", 0)) and isinstance(state.get("job", ""), str)
    if not named or any(not _is_count(state[key]) for key in numbers):
        raise StateMismatch("state is damaged", cause="a count in it is not a number")
    if state["first_epoch"] > state["epoch"]:
        raise StateMismatch("state is damaged", cause="its pass began after its epoch")
    identity = state["identity"]
    if identity is None:
        return
    if state["rank"] >= state["world_size"]:
        raise StateMismatch("state is damaged", cause=f"rank {state['rank']} of {state['world_size']} ranks")
    if not isinstance(identity, Mapping) or not _is_count(identity.get("lanes")) or not _is_count(identity.get("seed")):
        raise StateMismatch("state is damaged", cause="its identity lacks seed or lanes")


def _level(many: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """States of ranks whose share ended earlier (`ragged`) stay where they ended while the others go on: brought to the
    place of the furthest one. States that are behind for another reason stay as they are, and are refused."""
    last = max(many, key=lambda s: (s["epoch"], s["step"]))
    if last["identity"] is None:
        return many
    out = []
    for state in many:
        behind = (state["epoch"], state["step"]) != (last["epoch"], last["step"])
        same_epoch = state["epoch"] == last["epoch"]
        next_epoch = state["epoch"] + 1 == last["epoch"] and last["step"] == 0
        if behind and (same_epoch or next_epoch) and _share_is_done(state):
            moved = {key: last[key] for key in ("epoch", "step", "first_epoch")}
            out.append({**state, **moved, "taken": state["taken"] if same_epoch else last["taken"]})
        else:
            out.append(state)
    return out


def _share_is_done(state: Mapping[str, Any]) -> bool:
    if state["identity"] is None:
        return False
    lanes, rank, world = state["identity"]["lanes"], state["rank"], state["world_size"]
    taken = decode_taken(state["taken"])
    sizes: list[int] = lane_sizes(state.get("rows", 0), lanes).tolist()
    return len(taken) == lanes and list(taken[rank::world]) == sizes[rank::world]


def _level_dynamic(many: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """States of ranks that are through with an epoch are at the beginning of the next if any rank is there, and if all
    are through."""
    last = max(state["epoch"] for state in many)
    everyone = {state["rank"] for state in many} == set(range(many[0]["world_size"]))
    begun = any(state["epoch"] != last for state in many)
    through = everyone and all(state["epoch"] == last and dynamic_state.ended(state) for state in many)
    if not begun and not through:
        return many
    return [
        dynamic_state.moved_on(state)
        if dynamic_state.ended(state) and (through or state["epoch"] + 1 == last)
        else state
        for state in many
    ]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _check_same(many: Sequence[Mapping[str, Any]], *, equal_steps: bool = True) -> None:
    """Raise ``StateMismatch`` for states that do not belong together; ``equal_steps``: all must be at one step."""
    first = many[0]
    for other in many[1:]:
        for key in ("identity", "world_size", "generation", "skip", "first_epoch"):
            if other[key] != first[key]:
                raise StateMismatch(
                    f"states of ranks {first['rank']} and {other['rank']} do not belong together",
                    cause=f"{key}: {first[key]} and {other[key]}",
                    remedy="load the states that all ranks saved at one step",
                )
    places = {(state["epoch"], state["step"] if equal_steps else 0) for state in many}
    again = len({state["rank"] for state in many}) != len({(s["rank"], s["epoch"], s["step"]) for s in many})
    if len(places) > 1 or again:
        several = len({state["epoch"] for state in many}) > 1
        listed = ", ".join(
            f"rank {state['rank']} at {'epoch ' + str(state['epoch']) + ' ' if several else ''}step {state['step']}"
            for state in sorted(many, key=lambda s: (s["rank"], s["epoch"], s["step"]))
        )
        raise StateMismatch(
            f"states of ranks {_ranks(many)} do not belong together",
            cause=listed,
            remedy="load the states that all ranks saved at one step",
        )


def _ranks(many: Sequence[Mapping[str, Any]]) -> str:
    return " and ".join(map(str, sorted({state["rank"] for state in many})))


def check_fits(loaded: LoadedState, settings: JobSettings, allow: Iterable[str] = ()) -> None:
    """Hold a loaded state against the loader's settings (seed and lanes None there: taken from the state).

    Raises:
        StateMismatch: each difference, or the world sizes that the state's lanes allow.
    """
    if loaded.identity is None:
        return
    skipped = set(allow)
    saved, now = loaded.identity, identity_of(settings)
    wrong = []
    for key, value in now.items():
        if key in skipped or (key in ("seed", "lanes") and value is None):
            continue
        if saved.get(key) != value:
            wrong.append(f"{key}: state has {_short(saved.get(key))}, this loader {_short(value)}")
    if wrong:
        raise StateMismatch(
            "state belongs to another run",
            cause="; ".join(wrong),
            remedy="use the settings the state was saved with"
            + ("" if len(wrong) > 1 or "pipeline" not in wrong[0] else ", or load_state_dict(.., allow={'pipeline'})"),
            detail={"differences": wrong},
        )
    lanes = saved["lanes"]
    if lanes % settings.world_size:
        raise StateMismatch(
            f"world_size {settings.world_size} does not divide the state's {lanes} lanes",
            remedy=f"world sizes that do: {', '.join(map(str, divisors(lanes)))}",
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 90 else text[:87] + "..."
