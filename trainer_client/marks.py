"""What the dispatcher is told of a state that was saved."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from manifests.wire import messages as m

from .dynamic import AnyLeg, Saved
from .session import Position


@dataclass(frozen=True)
class Mark:
    """A state that was saved inside an epoch, as the dispatcher keeps it to complete the states of other ranks."""

    epoch: int
    leg: AnyLeg
    position: Position
    saved: Saved | None

    @property
    def key(self) -> tuple[int, int]:
        """(epoch, step)."""
        return self.epoch, self.leg.first_step + self.position.steps

    def message(self) -> m.EpochProgress:
        """What is sent."""
        epoch, step = self.key
        handed = tuple(self.leg.own_taken(self.position.read).tolist())
        if self.saved is None:
            return m.EpochProgress(epoch=epoch, step=step, handed=handed)
        return m.EpochProgress(
            epoch=epoch,
            step=step,
            handed=handed,
            lane=msgspec.structs.replace(self.saved.lane, place=handed[0]),
            before=self.saved.below().encode(),
            floor_step=self.saved.floor_step,
        )
