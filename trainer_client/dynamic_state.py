"""The part of a state that dynamic order adds, and the start point that the states of all ranks make.

A state of a dynamic job has no counts per lane (``taken`` is "") but the entry ``dynamic``:

    floor       plan position below which every rank had handed everything out ..
    floor_step  .. when the slowest had acknowledged this many steps of the epoch
    lane        the rank's lane: ``number``, ``dropped`` (rows at its beginning that are forgotten), ``place`` (rows of it
                handed out), ``pieces`` (granted after the forgotten ones; hexadecimal, see ``manifests.granted``)
    before      plan positions from the floor on that were taken before this generation (hexadecimal, ``manifests.ranges``)
    carried     pieces of earlier epochs that the epoch hands out too, over all ranks (hexadecimal)
    quotas      whether ranks take equally many steps
    ended       the rank's part of the epoch was handed out, and others may still be in theirs
    next_first  ``first_epoch`` of the state of the next epoch's beginning

The rows taken are [0, floor), those before, and those that have left the lanes of all ranks. A floor holds for every
state whose step is at least ``floor_step``; what lies below it is forgotten, so a state does not grow with its position.
Counts are texts of 16 decimal digits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from manifests.errors import ProtocolError, StateMismatch
from manifests.granted import Lane, Piece, decode_pieces, encode_pieces, window_rows
from manifests.plan import lane_sizes
from manifests.ranges import Ranges
from manifests.wire.messages import JobSettings, LaneGrants, Shuffle, StartPoint

from .dynamic import Saved

_COUNT = re.compile(r"0[0-9]{15}")


def encode(saved: Saved, place: int, *, quotas: bool, ended: bool, next_first: int) -> dict[str, Any]:
    """The entry ``dynamic`` of a state."""
    pieces, before, carried = saved.texts
    lane = saved.lane
    return {
        "floor": f"{saved.floor:016d}",
        "floor_step": f"{saved.floor_step:016d}",
        "lane": {
            "number": lane.number,
            "dropped": f"{lane.dropped:016d}",
            "place": f"{place:016d}",
            "pieces": pieces,
        },
        "before": before,
        "carried": carried,
        "quotas": quotas,
        "ended": ended,
        "next_first": next_first,
    }


def encode_beginning(rank: int, *, quotas: bool, first_epoch: int) -> dict[str, Any]:
    """The same where an epoch begins."""
    nothing = Saved(0, 0, LaneGrants(rank=rank, number=rank), Ranges.of([]), b"", ("", "", ""))
    return encode(nothing, 0, quotas=quotas, ended=False, next_first=first_epoch)


@dataclass(frozen=True)
class _Part:
    """The entry ``dynamic`` of one rank's state, decoded."""

    state: Mapping[str, Any]
    floor: int
    floor_step: int
    grants: LaneGrants
    lane: Lane
    before: Ranges
    carried: tuple[Piece, ...]

    def left(self) -> tuple[Ranges, dict[int, Ranges]]:
        """Rows that have left the lane: plan positions of the epoch, and those of earlier epochs."""
        positions, epochs = self.lane.leave(self.lane.dropped, self.grants.place - self.lane.dropped)
        found = {epoch: Ranges.members(positions[epochs == epoch]) for epoch in set(epochs.tolist())}
        return found.pop(self.state["epoch"], Ranges.of([])), found


def check_form(state: Mapping[str, Any]) -> None:
    """Raise ``StateMismatch`` unless the entry ``dynamic`` can be read."""
    _decode(state)


def ended(state: Mapping[str, Any]) -> bool:
    """The rank's part of the epoch was handed out."""
    return bool(state["dynamic"]["ended"])


def has_quotas(state: Mapping[str, Any]) -> bool:
    """Ranks take equally many steps."""
    return bool(state["dynamic"]["quotas"])


def moved_on(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a rank whose part of the epoch is over, at the beginning of the next."""
    old = state["dynamic"]
    first = old["next_first"]
    return {
        **state,
        "epoch": state["epoch"] + 1,
        "step": 0,
        "first_epoch": first,
        "dynamic": encode_beginning(state["rank"], quotas=old["quotas"], first_epoch=first),
    }


def _decode(state: Mapping[str, Any]) -> _Part:
    part = state.get("dynamic")
    try:
        if not isinstance(part, Mapping) or not isinstance(part["lane"], Mapping):
            raise TypeError("the entry 'dynamic' is no mapping")
        if any(not isinstance(part[name], bool) for name in ("quotas", "ended")):
            raise TypeError("'quotas' and 'ended' are not true or false")
        number, next_first = part["lane"]["number"], part["next_first"]
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in (number, next_first)):
            raise TypeError("'number' and 'next_first' are not counts")
        lane = part["lane"]
        grants = LaneGrants(
            rank=state["rank"],
            number=number,
            dropped=_count(lane["dropped"]),
            place=_count(lane["place"]),
            pieces=bytes.fromhex(lane["pieces"]),
        )
        rows, identity = state["rows"], state["identity"]
        shuffle = None if identity["shuffle"] is None else Shuffle(**identity["shuffle"])
        kept = Lane.restore(
            grants,
            seed=identity["seed"],
            epoch=state["epoch"],
            window=window_rows(shuffle, rows, state["world_size"]),
        )
        found = _Part(
            state,
            _count(part["floor"]),
            _count(part["floor_step"]),
            grants,
            kept,
            Ranges.decode(bytes.fromhex(part["before"])),
            tuple(decode_pieces(bytes.fromhex(part["carried"]))),
        )
        inside = [found.floor, *found.before.bounds.max(initial=0, axis=0).tolist()]
        inside += [p.stop for p in (*kept.pieces, *found.carried)]
        if max(inside) > rows or not grants.dropped <= grants.place <= kept.certain:
            raise ValueError(f"it tells of rows that the dataset of {rows} rows or the lane does not have")
    except (KeyError, TypeError, ValueError, ProtocolError) as error:
        raise StateMismatch("state is damaged", cause=f"its dynamic part cannot be read: {error}") from None
    return found


def _count(text: Any) -> int:
    if not isinstance(text, str) or not _COUNT.fullmatch(text):
        raise TypeError(f"{text!r} is not a count of 16 digits")
    return int(text)


def join(states: Sequence[Mapping[str, Any]]) -> StartPoint:
    """The start point that states of different ranks make together; ranks without one are its ``missing``.

    Raises:
        StateMismatch: the floor that one state counts on was reached after the step of another.
    """
    parts = {state["rank"]: _decode(state) for state in states}
    first = states[0]
    steps = {rank: part.state["step"] for rank, part in parts.items()}
    slowest, furthest = min(steps, key=lambda r: (steps[r], r)), max(parts.values(), key=lambda p: p.floor_step)
    if furthest.floor_step > steps[slowest]:
        raise StateMismatch(
            f"states of ranks {', '.join(map(str, sorted(parts)))} lie too far apart",
            cause=f"rank {slowest} is at step {steps[slowest]}, rank {furthest.state['rank']} at step "
            f"{steps[furthest.state['rank']]} counts on what all ranks had taken at step {furthest.floor_step}",
            remedy="load states that all ranks saved at about the same time",
        )
    taken = Ranges.of([(0, max(part.floor for part in parts.values()))])
    gone: dict[int, Ranges] = {}
    for part in parts.values():
        own, earlier = part.left()
        taken = taken | part.before | own
        for epoch, found in earlier.items():
            gone[epoch] = gone.get(epoch, Ranges.of([])) | found
    missing = tuple(sorted(set(range(first["world_size"])) - set(parts)))
    lanes = tuple(parts[rank].grants for rank in sorted(parts))
    if missing and not taken and all(step == 0 for step in steps.values()):
        missing, lanes = (), ()  # the beginning of an epoch
    if not _apart(list(parts.values()), taken):
        lanes = ()
    return StartPoint(
        kind="checkpoint",
        epoch=first["epoch"],
        step=max(steps.values()),
        first_epoch=first["first_epoch"],
        generation=first["generation"],
        world_size=first["world_size"],
        skip=first["skip"],
        job=first.get("job", ""),
        ranges=taken.encode(),
        lanes=lanes,
        carried=_still_carried([p for part in parts.values() for p in part.carried], gone),
        missing=missing,
    )


def _apart(parts: Sequence[_Part], taken: Ranges) -> bool:
    """No row is in two lanes, nor taken and still to leave one: otherwise a rank had left, others got what it had, and the
    states were saved at different times."""
    held = Ranges.of([])
    for part in parts:
        epoch = part.state["epoch"]
        own = Ranges.of((p.start, p.stop) for p in part.lane.pieces if p.epoch == epoch)
        unread = Ranges.of((a, b) for e, a, b in part.lane.remaining(part.grants.place) if e == epoch)
        if own & held or unread & taken:
            return False
        held = held | own
    return True


def start_for(start: StartPoint, settings: JobSettings, rows: int, *, quotas: bool) -> StartPoint:
    """The start point for a job with these settings; ``quotas``: the job it comes from had them.

    Lanes go on as they were where there are as many ranks, none of which holds more than it may hand out from here on.
    Otherwise the rows in them that have not left are granted anew, as rows that nobody had are.
    """
    keep = start.world_size == settings.world_size
    if keep and settings.tail != "ragged" and not settings.elastic:
        if start.missing:  # what the others hold is not known here; without skipped rows it is what they may hold
            keep = quotas and not start.skip
        else:
            most = lane_sizes(rows - len(Ranges.decode(start.ranges)), settings.world_size).tolist()
            keep = all(_length(lane) - lane.place <= most[lane.rank] for lane in start.lanes)
    return start if keep else msgspec.structs.replace(start, lanes=())


def _length(lane: LaneGrants) -> int:
    return lane.dropped + sum(map(len, decode_pieces(lane.pieces)))


def _still_carried(pieces: Sequence[Piece], gone: Mapping[int, Ranges]) -> bytes:
    """Pieces of earlier epochs without the rows that have left."""
    out = []
    for epoch in sorted({piece.epoch for piece in pieces}):
        of_it = Ranges.of((p.start, p.stop) for p in pieces if p.epoch == epoch)
        out += [Piece(0, start, stop, epoch) for start, stop in of_it - gone.get(epoch, Ranges.of([]))]
    return encode_pieces(out)
