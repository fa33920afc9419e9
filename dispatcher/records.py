"""What the dispatcher keeps in its store: frozen structures with tags, encoded by the wire codec.

    datasets/<name>/<version>                              DatasetRecord
    keys/<id>                                              KeyRecord
    jobs/<job>                                             JobRecord
    jobs/<job>/generations/<g>                             GenerationRecord
    jobs/<job>/generations/<g>/members/<r>                 MemberRecord      current generation only
    jobs/<job>/generations/<g>/assignments/<r>             AssignmentRecord  current generation only
    jobs/<job>/generations/<g>/epochs/<e>/ranks/<r>        RankEpochRecord   current generation, open epochs
    jobs/<job>/generations/<g>/epochs/<e>/pool             PoolRecord        dynamic order, open epochs
    jobs/<job>/generations/<g>/epochs/<e>/lanes/<r>        LaneRecord        dynamic order, open epochs
    jobs/<job>/generations/<g>/epochs/<e>/lanes/<r>/<n>/<part> LanePartRecord dynamic order, above the floor
    jobs/<job>/generations/<g>/epochs/<e>                  EpochRecord       all ranks of an epoch folded into one
    jobs/<job>/generations/<g>/quarantine/<source>-<shard> QuarantineRecord
    jobs/<job>/marks/<g>/<e>/<step>/<r>                    MarkRecord        of the last 8 (g, e, step)

Nothing here grows with the shards or the steps of a job, but for the lanes' parts: with what ranks were granted and the
slowest of them has not acknowledged. Names cannot hold a ``/``, so keys are unambiguous.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from itertools import chain

import msgspec
import numpy as np

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
    """A rank that joined. ``left``: its holder closed. ``nonce``: of the open that made it join. Elastic jobs: ``gone``:
    its lease was over and its rows went to others, so the holder is fenced; ``tenure``: holders it had before this one in
    this generation."""

    job: str
    generation: int
    rank: int
    holder: m.Holder
    nonce: str
    left: bool = False
    gone: bool = False
    tenure: int = 0

    @property
    def key(self) -> str:
        return f"jobs/{self.job}/generations/{self.generation}/members/{self.rank}"


class AssignmentRecord(Record, frozen=True, kw_only=True, tag="assignment"):
    """Which worker serves each open shard of a rank, least recently renewed first. ``places``: epoch, source and shard of
    each in turn; ``which``: its worker's index in ``workers`` (uint16, little-endian)."""

    job: str
    generation: int
    rank: int
    workers: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    which: bytes = b""

    @classmethod
    def of(
        cls, job: str, generation: int, rank: int, open_shards: Mapping[tuple[int, int, int], str]
    ) -> AssignmentRecord:
        """From (epoch, source, shard) -> worker id, in order."""
        names = sorted(set(open_shards.values()))
        index = {name: number for number, name in enumerate(names)}
        return cls(
            job=job,
            generation=generation,
            rank=rank,
            workers=tuple(names),
            places=tuple(chain.from_iterable(open_shards)),
            which=struct.pack(f"<{len(open_shards)}H", *map(index.__getitem__, open_shards.values())),
        )

    @property
    def open_shards(self) -> dict[tuple[int, int, int], str]:
        """(epoch, source, shard) -> worker id, in order."""
        numbers = iter(self.places)
        which = np.frombuffer(self.which, "<u2").tolist()
        return {place: self.workers[worker] for place, worker in zip(zip(numbers, numbers, numbers), which)}

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
    #: sample ids passed over because of quarantine (``manifests.ranges``)
    quarantined: bytes = b""
    acked_quarantined: bytes = b""
    carried: tuple[m.CarriedSum, ...] = ()
    #: dynamic order: plan positions handed out / acknowledged since the epoch began; left out when ``whole``: all of them
    handed_ranges: bytes = b""
    acked_ranges: bytes = b""
    whole: bool = False
    #: dynamic order: positions carried over into a later epoch
    away: bytes = b""
    #: dynamic order: rows that elastic ranks had handed out and not acknowledged when they died
    rewound: int = 0

    @property
    def key(self) -> str:
        return f"jobs/{self.job}/generations/{self.generation}/epochs/{self.epoch}"


class PoolRecord(Record, frozen=True, kw_only=True, tag="pool"):
    """Dynamic order: what of an epoch no rank was granted. ``free``: plan positions (``manifests.ranges``); ``carried``:
    pieces of earlier epochs to hand out first (``manifests.granted``); ``carried_in``: all of them that are not settled;
    ``settled``: positions handed out for good, before the generation or by lanes that are no more, and ``book``: the books
    of those lanes; ``away``: positions carried over into a later epoch; ``floor`` holds for ``floor_step`` steps."""

    job: str
    generation: int
    epoch: int
    free: bytes = b""
    carried: bytes = b""
    carried_in: bytes = b""
    settled: bytes = b""
    away: bytes = b""
    floor: int = 0
    floor_step: int = 0
    book: EpochRecord | None = None

    @property
    def key(self) -> str:
        return f"jobs/{self.job}/generations/{self.generation}/epochs/{self.epoch}/pool"


class LaneRecord(Record, frozen=True, kw_only=True, tag="lane"):
    """Dynamic order: the lane of one rank in one epoch; ``lane.place``: where it began in this generation. Its pieces are
    in parts; ``lane.pieces`` are those of releases that kept no parts. ``limit``: rows it may have since its beginning,
    None: no quota; ``ended``: the place at which its rank left, so that others have the rows after it; ``forgotten``:
    pieces at its beginning that lie below the floor."""

    job: str
    generation: int
    epoch: int
    lane: m.LaneGrants
    limit: int | None = None
    ended: int | None = None
    forgotten: int = 0

    @property
    def key(self) -> str:
        return f"jobs/{self.job}/generations/{self.generation}/epochs/{self.epoch}/lanes/{self.lane.rank}"


class LanePartRecord(Record, frozen=True, kw_only=True, tag="lane-part"):
    """Dynamic order: pieces ``part * 64`` and up to 63 after it of a rank's lane, counted from the lane's beginning
    (``manifests.granted``). ``number``: of the lane, as in ``LaneRecord.lane``: a part of another lane is left over."""

    job: str
    generation: int
    epoch: int
    rank: int
    number: int
    part: int
    pieces: bytes = b""

    @property
    def key(self) -> str:
        lane = f"jobs/{self.job}/generations/{self.generation}/epochs/{self.epoch}/lanes/{self.rank}"
        return f"{lane}/{self.number}/{self.part}"


class QuarantineRecord(Record, frozen=True, kw_only=True, tag="quarantine"):
    """A shard that no worker could read, for this generation of the job."""

    job: str
    generation: int
    shard: m.QuarantinedShard
    at_ms: int = 0

    @property
    def key(self) -> str:
        return f"jobs/{self.job}/generations/{self.generation}/quarantine/{self.shard.source}-{self.shard.shard}"


class MarkRecord(Record, frozen=True, kw_only=True, tag="mark"):
    """A position that a rank saved: ``mark.epoch`` and ``mark.step`` name it."""

    job: str
    generation: int
    rank: int
    mark: m.EpochProgress

    @property
    def key(self) -> str:
        return f"jobs/{self.job}/marks/{self.generation}/{self.mark.epoch}/{self.mark.step}/{self.rank}"


Stored = (
    DatasetRecord | KeyRecord | JobRecord | GenerationRecord | MemberRecord | AssignmentRecord | RankEpochRecord
    | EpochRecord | PoolRecord | LaneRecord | LanePartRecord | QuarantineRecord | MarkRecord
)  # fmt: skip


def encode(record: Record) -> bytes:
    """A record as stored."""
    return codec.encode(record)


def decode(data: bytes) -> Stored:
    """A stored record; ``ProtocolError`` for anything else."""
    found: Stored = codec.decode(data, Stored)
    return found
