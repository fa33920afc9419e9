"""What the dispatcher keeps in its store: frozen structures with tags, encoded by the wire codec.

    datasets/<name>/<version>                              DatasetRecord
    keys/<id>                                              KeyRecord
    jobs/<job>                                             JobRecord
    jobs/<job>/generations/<g>                             GenerationRecord
    jobs/<job>/generations/<g>/members/<r>                 MemberRecord      current generation only
    jobs/<job>/generations/<g>/assignments/<r>             AssignmentRecord  current generation only
    jobs/<job>/generations/<g>/epochs/<e>/ranks/<r>        RankEpochRecord   current generation, open epochs
    jobs/<job>/generations/<g>/epochs/<e>                  EpochRecord       all ranks of an epoch folded into one

Nothing here grows with the shards or the steps of a job. Names cannot hold a ``/``, so keys are unambiguous.
"""

from __future__ import annotations

import msgspec

from manifests.wire import codec
from manifests.wire import messages as m


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="t"):
    """Base of all stored records."""


class DatasetRecord(Record, frozen=True, kw_only=True, tag="dataset"):
    """One registered dataset version. ``order``: grows with each registration; the highest of a name is its last."""

    name: str
    version: str
    digest: str
    order: int
    rows: int = 0
    shards: int = 0

    @property
    def key(self) -> str:
        return f"datasets/{self.name}/{self.version}"


class KeyRecord(Record, frozen=True, kw_only=True, tag="key"):
    """A key that grants are signed with."""

    id: str
    secret: bytes
    created_ms: int = 0

    @property
    def key(self) -> str:
        return f"keys/{self.id}"


class JobRecord(Record, frozen=True, kw_only=True, tag="job"):
    """A job's current generation, and when it was last used (wall clock, ms)."""

    name: str
    generation: int
    created_ms: int = 0
    used_ms: int = 0

    @property
    def key(self) -> str:
        return f"jobs/{self.name}"


class GenerationRecord(Record, frozen=True, kw_only=True, tag="generation"):
    """One generation: settings with seed and lanes filled in, and its resolved start point.

    ``latest``: it was opened with "latest". ``decodes``: the pipeline has steps, so the job is kept to one decode
    ``fingerprint`` ("" until the first grant).
    """

    job: str
    number: int
    settings: m.JobSettings
    start: m.StartPoint
    latest: bool = False
    decodes: bool = False
    fingerprint: str = ""
    opened_ms: int = 0
    rows: int = 0
    granted: bool = False

    @property
    def key(self) -> str:
        return f"jobs/{self.job}/generations/{self.number}"


class MemberRecord(Record, frozen=True, kw_only=True, tag="member"):
    """A rank that joined. ``left``: its holder closed. ``nonce``: of the open that made it join."""

    job: str
    generation: int
    rank: int
    holder: m.Holder
    nonce: str
    left: bool = False

    @property
    def key(self) -> str:
        return f"jobs/{self.job}/generations/{self.generation}/members/{self.rank}"


class Assigned(msgspec.Struct, frozen=True, array_like=True):
    """An open shard of a rank: ``worker`` is an index into the record's list."""

    epoch: int
    source: int
    shard: int
    worker: int


class AssignmentRecord(Record, frozen=True, kw_only=True, tag="assignment"):
    """Which worker serves each open shard of a rank, least recently renewed first."""

    job: str
    generation: int
    rank: int
    workers: tuple[str, ...] = ()
    open: tuple[Assigned, ...] = ()

    @property
    def key(self) -> str:
        return f"jobs/{self.job}/generations/{self.generation}/assignments/{self.rank}"


class RankEpochRecord(Record, frozen=True, kw_only=True, tag="rank-epoch"):
    """Books of one rank in one epoch. ``progress.skipped`` holds the first few rows only; ``skipped_ids`` all their
    sample ids (int64, little-endian), acknowledged ones first."""

    job: str
    generation: int
    epoch: int
    rank: int
    progress: m.EpochProgress
    skipped_ids: bytes = b""

    @property
    def key(self) -> str:
        return f"jobs/{self.job}/generations/{self.generation}/epochs/{self.epoch}/ranks/{self.rank}"


class EpochRecord(Record, frozen=True, kw_only=True, tag="epoch"):
    """Books of all ranks in one epoch of one generation, added up.

    ``handed``/``acked``: rows taken per lane of all lanes; () when every lane was taken to its end. ``unfinished``
    and ``abandoned``: ranks in that state; all others finished. ``skipped_ids``: acknowledged ones first.
    """

    job: str
    generation: int
    epoch: int
    step: int = 0
    acked_step: int = 0
    handed: tuple[int, ...] = ()
    acked: tuple[int, ...] = ()
    unfinished: tuple[int, ...] = ()
    abandoned: tuple[int, ...] = ()
    source: m.IdSum = m.IdSum()
    handed_out: m.IdSum = m.IdSum()
    acknowledged: m.IdSum = m.IdSum()
    skipped: tuple[m.SkippedRow, ...] = ()
    skipped_ids: bytes = b""
    acked_skipped: int = 0
    padded: int = 0
    unbalanced: tuple[m.ShardSum, ...] = ()

    @property
    def key(self) -> str:
        return f"jobs/{self.job}/generations/{self.generation}/epochs/{self.epoch}"


Stored = (
    DatasetRecord | KeyRecord | JobRecord | GenerationRecord | MemberRecord | AssignmentRecord | RankEpochRecord
    | EpochRecord
)  # fmt: skip


def encode(record: Record) -> bytes:
    """A record as stored."""
    return codec.encode(record)


def decode(data: bytes) -> Stored:
    """A stored record; ``ProtocolError`` for anything else."""
    found: Stored = codec.decode(data, Stored)
    return found
