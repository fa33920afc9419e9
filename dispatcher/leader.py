"""What a leading dispatcher writes about itself."""

from __future__ import annotations

import os

import msgspec

from manifests.process import ProcessId


class LeaderRecord(msgspec.Struct, frozen=True):
    """What a leader writes under the leader key. ``run``: drawn at start, tells two runs of one process id apart."""

    address: str
    run: str
    process: str = ""

    @classmethod
    def of_this_process(cls, address: str) -> LeaderRecord:
        """A record of a new run of this process that serves at ``address``."""
        return cls(address=address, run=os.urandom(8).hex(), process=ProcessId.current().encode())

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str) -> LeaderRecord | None:
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError:
            return None

    def is_dead(self) -> bool:
        """True only if that process is certainly gone."""
        found = ProcessId.parse(self.process)
        return found is not None and found.is_dead()
