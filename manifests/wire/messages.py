"""Every message, in both directions. A closed set of frozen types with explicit tags.

Fields marked *reserved* are part of the format from the first release so that later features change no bytes.
All times are integer milliseconds; ``now_ms`` and ``expires_ms`` are in dispatcher time. Arrays of row numbers are
little-endian bytes, because a list of a million integers is not a message.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..schema import Field


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="t"):
    """Base of all messages. ``cause`` ties log lines of one request together in all three processes."""

    cause: str = ""


class Part_(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the structures inside messages (no tag)."""


# -- nouns ---------------------------------------------------------------------------------------------------------


class Shuffle(Part_, frozen=True):
    """How rows are mixed. ``buffer``: rows per job the keyed window spans; ``interleave``: shards mixed per lane;
    ``within_shard``: rows of a shard in seeded order instead of stored order."""

    buffer: int = 4096
    interleave: int = 1
    within_shard: bool = False


class Source(Part_, frozen=True):
    """One dataset of a job: manifest digest, relative weight, and the label it was asked for by."""

    digest: str
    name: str = ""
    version: str = ""
    weight: float = 1.0


class JobSettings(Part_, frozen=True):
    """What all ranks of a job agree on. ``seed`` and ``lanes`` None in a request: take the state's or the record's."""

    sources: tuple[Source, ...]
    spec: str  # digest of the JobSpec
    pipeline: str  # digest of the pipeline
    seed: int | None = None
    order: Literal["deterministic", "dynamic"] = "deterministic"
    shuffle: Shuffle | None = Shuffle()
    lanes: int | None = None
    batch_size: int = 1
    world_size: int = 1
    tail: Literal["pad", "drop", "ragged"] = "pad"
    epochs: int | None = 1
    steps_per_epoch: int | None = None
    on_error: Literal["raise", "skip"] = "raise"
    max_bad: int | float = 0.001
    ack: Literal["next", "manual"] = "next"
    tenant: str = "default"
    elastic: bool = False
    audit: bool = False


class LaneGrants(Part_, frozen=True):
    """One rank's lane in dynamic order (``manifests.granted``). ``number``: of its random stream; ``dropped``: rows at
    its beginning that all ranks have handed out and that are forgotten; ``place``: rows of it handed out; ``pieces``:
    what it was granted after that, in order."""

    rank: int
    number: int = 0
    dropped: int = 0
    place: int = 0
    pieces: bytes = b""


class StartPoint(Part_, frozen=True):
    """Where a generation starts. ``taken``: rows taken per lane, one entry per lane; ``sub``: reserved, the second half
    of the (row, sub) cursor per lane; ``first_epoch``: epoch in which the current pass (one ``for``) began.

    Dynamic order has no ``taken`` but ``ranges``: plan positions that were handed out (``manifests.ranges``), ``lanes``:
    lanes to go on with where the world size stayed the same (their rows that have left are in ``ranges``), and
    ``carried``: pieces of earlier epochs still to be handed out in this one.

    ``missing``: ranks whose part is to come from the marks of generation ``generation`` of job ``job``.
    """

    kind: Literal["fresh", "checkpoint", "latest"] = "fresh"
    epoch: int = 0
    step: int = 0
    taken: tuple[int, ...] = ()
    sub: tuple[int, ...] = ()
    first_epoch: int = 0
    generation: int = 0  # parent generation, 0: none
    job: str = ""  # job whose generation that was
    world_size: int = 0
    skip: bool = False  # on_error was "skip" when the state was taken
    ranges: bytes = b""
    lanes: tuple[LaneGrants, ...] = ()
    carried: bytes = b""
    missing: tuple[int, ...] = ()

    @property
    def inside(self) -> bool:
        """Whether rows of its epoch lie before it."""
        return any(self.taken) or bool(self.ranges)


class Holder(Part_, frozen=True):
    """The process and loader object that holds a rank."""

    uid: str
    host: str = ""
    pid: int = 0


class IdSum(Part_, frozen=True):
    """Order-independent sum of sample ids: how many, and the sum of their mixed values modulo 2**64."""

    count: int = 0
    value: int = 0


class ShardSum(Part_, frozen=True):
    """Books of one shard (or the part of it one rank reads), sent only where they do not balance."""

    source: int
    shard: int
    planned: int
    handed_out: int
    lost: tuple[int, ...] = ()  # sample ids, at most 100
    repeated: tuple[int, ...] = ()


class SkippedRow(Part_, frozen=True):
    """One bad sample that was skipped."""

    sample_id: int
    key: str
    shard: str
    reason: str


class CarriedSum(Part_, frozen=True):
    """Books of rows of an earlier epoch that a rank hands out in this one; not part of any other sum."""

    epoch: int
    handed_out: IdSum = IdSum()
    acknowledged: IdSum = IdSum()


class EpochProgress(Part_, frozen=True):
    """Cumulative books of one rank in one epoch of one generation. A later message replaces an earlier one.

    ``handed``/``acked``: rows taken per own lane (ascending lane), skipped and quarantined rows included, up to the last
    batch handed to the loop / acknowledged; in dynamic order one lane, counted from its beginning. ``source``: sum over
    the ids the plan has there; ``handed_out``: sum over the ids in the batches; both without skipped, quarantined and
    carried rows and pads. ``quarantined``: sample ids passed over because their shard is in quarantine
    (``manifests.ranges``). As a mark: only epoch, step, handed, and in dynamic order ``lane``, ``before`` (plan positions
    taken that are not in the lane, everything below the floor among them) and ``floor_step``.
    """

    epoch: int
    step: int = 0
    acked_step: int = 0
    handed: tuple[int, ...] = ()
    acked: tuple[int, ...] = ()
    handed_sub: tuple[int, ...] = ()  # reserved
    acked_sub: tuple[int, ...] = ()  # reserved
    source: IdSum = IdSum()
    handed_out: IdSum = IdSum()
    acknowledged: IdSum = IdSum()
    by_source: tuple[IdSum, ...] = ()  # reserved: per dataset of a mix
    skipped: tuple[SkippedRow, ...] = ()
    #: skipped rows among the acknowledged ones; they come first in ``skipped``
    acked_skipped: int = 0
    padded: int = 0
    unbalanced: tuple[ShardSum, ...] = ()
    #: "open", "finished" (all its steps handed out and acknowledged) or "abandoned" (the loop was left early)
    state: Literal["open", "finished", "abandoned"] = "open"
    quarantined: bytes = b""
    acked_quarantined: bytes = b""
    carried: tuple[CarriedSum, ...] = ()
    lane: LaneGrants | None = None
    before: bytes = b""
    floor_step: int = 0


# -- datasets (client or command line -> dispatcher) ---------------------------------------------------------------


class FindDataset(Message, frozen=True, tag="find-dataset"):
    """Which manifest is ``name[@version]``? ``version`` "": the one registered last."""

    name: str
    version: str = ""


class DatasetFound(Message, frozen=True, tag="dataset-found"):
    name: str
    version: str
    digest: str
    rows: int = 0
    shards: int = 0


class HaveManifest(Message, frozen=True, tag="have-manifest"):
    """Is this manifest, with shards at these places, in the store? ``locations``: digest of the list of uris."""

    digest: str
    locations: str = ""


class ManifestKnown(Message, frozen=True, tag="manifest-known"):
    known: bool


class RegisterDataset(Message, frozen=True, tag="register-dataset"):
    """Give a manifest that was uploaded a name. The same again is no change; other content under it is refused."""

    name: str
    version: str
    digest: str


class DatasetRegistered(Message, frozen=True, tag="dataset-registered"):
    name: str
    version: str
    digest: str
    new: bool = True


class PutBlob(Message, frozen=True, tag="put-blob"):
    """Store a small content-addressed blob (a JobSpec, at most 1 MiB)."""

    digest: str
    data: bytes


class GetBlob(Message, frozen=True, tag="get-blob"):
    digest: str


class Blob(Message, frozen=True, tag="blob"):
    digest: str
    data: bytes = b""


# -- jobs (client -> dispatcher) -----------------------------------------------------------------------------------


class OpenJob(Message, frozen=True, tag="open-job"):
    """Open a generation of ``job``, or join the one that is open.

    ``nonce``: made once per open, the same in repeats of it, so that a retried call opens nothing twice. Those of one
    holder sort as text in the order of its opens, so that a call that was long on its way opens nothing any more.
    ``dead``: uids of holders the caller has seen to be dead processes of its own host.
    """

    job: str
    rank: int
    holder: Holder
    nonce: str
    settings: JobSettings
    start: StartPoint = StartPoint()
    dead: tuple[str, ...] = ()


class JobOpened(Message, frozen=True, tag="job-opened"):
    """``absent`` not empty: not all ranks have joined; ask again with the same nonce."""

    job: str
    generation: int
    settings: JobSettings
    start: StartPoint
    lease_ms: int
    absent: tuple[int, ...] = ()
    warning: str = ""


class ShardAsk(Part_, frozen=True):
    source: int
    shard: int


class ReadFailure(Part_, frozen=True):
    """A read that failed on a worker: what the dispatcher needs to place the shard elsewhere."""

    worker: str
    source: int
    shard: int
    code: str
    message: str = ""


class WorkerSpeed(Part_, frozen=True):
    """What a client saw of a worker since its last ask: bytes that came, and the time its reads took together."""

    worker: str
    bytes: int
    ms: int


class AskGrants(Message, frozen=True, tag="ask-grants"):
    """Ask for the right to read shards (those the rank needs next, in order). Asking again renews.

    ``avoid``: workers that refused or stalled for this client just now. ``done``: shards not needed any more.

    Dynamic order: ``have``: rows of its lane the rank knows of; ``want``: rows it wants the lane to have; ``place``: rows
    of it handed out. The same ask again gets the same pieces again.
    """

    job: str
    generation: int
    rank: int
    holder: str
    epoch: int
    shards: tuple[ShardAsk, ...] = ()
    avoid: tuple[str, ...] = ()
    failures: tuple[ReadFailure, ...] = ()
    done: tuple[ShardAsk, ...] = ()
    floor: int = 0  # reserved
    have: int = 0
    want: int = 0
    place: int = 0
    speeds: tuple[WorkerSpeed, ...] = ()


class WorkerRef(Part_, frozen=True):
    id: str
    address: str


class GrantInfo(Part_, frozen=True):
    """A grant as the client uses it: the signed bytes go into tickets unread."""

    source: int
    shard: int
    workers: tuple[WorkerRef, ...]  # the one assigned first, then alternates
    expires_ms: int
    signed: bytes


class Floor(Part_, frozen=True):
    """Dynamic order: every rank has handed out all plan positions below ``position`` when the slowest had acknowledged
    ``step`` steps."""

    epoch: int
    position: int = 0
    step: int = 0


class QuarantinedShard(Part_, frozen=True):
    """A shard that no worker could read. ``code``: of the error that came most; ``workers``: that failed on it."""

    source: int
    shard: int
    uri: str = ""
    code: str = ""
    reason: str = ""
    workers: tuple[str, ...] = ()


class Grants(Message, frozen=True, tag="grants"):
    """``waiting``: why there are fewer grants than asked for ("" if all are there); ``waiting_code``: the error that a
    deadline passed in this wait should be. ``quarantined``: those of the shards asked for that are in quarantine.

    Dynamic order: ``lane``: pieces after the rows the rank has (``dropped`` is their first lane index), ending in a cut
    when the pool has nothing more now; ``final``: nor will it ever have for this rank; ``carried``: pieces of earlier
    epochs that this epoch has to hand out besides its own, over all ranks.
    """

    grants: tuple[GrantInfo, ...] = ()
    now_ms: int = 0
    waiting: str = ""
    waiting_code: Literal["", "wait-timeout", "no-worker", "rank-absent"] = ""
    quarantined: tuple[QuarantinedShard, ...] = ()
    lane: LaneGrants | None = None
    final: bool = False
    floor: Floor | None = None
    carried: bytes = b""


class Report(Message, frozen=True, tag="report"):
    """Acknowledgements and a sign of life of one rank, at least every third of the lease."""

    job: str
    generation: int
    rank: int
    holder: str
    epochs: tuple[EpochProgress, ...] = ()
    state: Literal["reading", "waiting", "done"] = "reading"
    waiting_for: str = ""
    waiting_ms: int = 0
    #: the rank gives its lease back (close)
    leaving: bool = False
    #: states saved since the last report
    marks: tuple[EpochProgress, ...] = ()


class SilentRank(Part_, frozen=True):
    """A rank whose lease is over though it did not close. ``silent_ms``: since it was last heard."""

    rank: int
    silent_ms: int
    host: str = ""
    pid: int = 0


class Reported(Message, frozen=True, tag="reported"):
    """``slowest_epoch``: the lowest epoch any rank is still in; a rank more than 2 ahead of it waits. ``silent``: ranks
    that seem to be gone (at most 16). ``floors``: dynamic order, of the epochs reported."""

    now_ms: int = 0
    slowest_epoch: int = 0
    slowest_rank: int = 0
    silent: tuple[SilentRank, ...] = ()
    floors: tuple[Floor, ...] = ()


# -- grants and reads (client -> worker) ---------------------------------------------------------------------------


class Grant(Message, frozen=True, tag="grant"):
    """Right to read rows of one shard, as signed by the dispatcher. A worker needs nothing else to serve it."""

    job: str
    tenant: str
    generation: int
    rank: int
    epoch: int
    seed: int
    source: int
    manifest: str  # digest
    spec: str  # digest of the JobSpec: fields, label maps, pipeline
    shard: int  # ordinal
    uri: str
    format: str
    rows: int
    bytes: int
    content_id: str
    first_id: int  # sample id of row 0
    first_row: int = 0  # rows [first_row, last_row) may be read
    last_row: int = 0
    workers: tuple[str, ...] = ()  # ids
    expires_ms: int = 0


class SignedGrant(Part_, frozen=True):
    key: str
    signature: bytes
    payload: bytes


class ReadTicket(Message, frozen=True, tag="read"):
    """What goes into a ``DoGet``: ordered rows of granted shards.

    ``which``: uint32 index into ``grants`` per row; ``rows``: int64 row in that shard. Both empty: all rows of all
    grants in order.
    """

    grants: tuple[bytes, ...]
    which: bytes = b""
    rows: bytes = b""


class BadRow(Part_, frozen=True):
    """``position``: index of the row in the read."""

    position: int
    sample_id: int
    key: str
    shard: str
    reason: str


class ReadPart(Message, frozen=True, tag="part"):
    """Metadata beside each record batch: rows of the read dealt with so far, and which of them were bad.

    ``hot``: rows up to here, not told of before, that needed nothing from storage.

    A batch of no rows with the same ``done`` as before is a sign of life.
    """

    done: int
    bad: tuple[BadRow, ...] = ()
    stage_us: dict[str, int] = {}
    hot: int = 0


# -- workers (worker -> dispatcher) --------------------------------------------------------------------------------


class RegisterWorker(Message, frozen=True, tag="register-worker"):
    """``incarnation``: drawn at start, so that a restarted worker of the same id is not taken for the old one."""

    id: str
    incarnation: str
    address: str
    host: str = ""
    pid: int = 0
    memory_bytes: int = 0
    capabilities: tuple[str, ...] = ()
    fingerprint: str = ""
    draining: bool = False


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Signs of life and load; never persisted. ``cached``: reserved, compact report of content ids held."""

    id: str
    incarnation: str
    draining: bool = False
    active_reads: int = 0
    cache_bytes: int = 0
    queue_bytes: int = 0
    rows_served: int = 0
    bytes_served: int = 0
    stage_us: dict[str, int] = {}
    capabilities: tuple[str, ...] = ()
    cached: bytes = b""


class WorkerWelcome(Message, frozen=True, tag="worker-welcome"):
    """``known`` False: register again. ``keys``: signing keys by id."""

    known: bool
    now_ms: int = 0
    lease_ms: int = 0
    keys: dict[str, bytes] = {}
    drain: bool = False


class LeaveWorker(Message, frozen=True, tag="leave-worker"):
    id: str
    incarnation: str


class DrainWorker(Message, frozen=True, tag="drain-worker"):
    id: str


class Done(Message, frozen=True, tag="done"):
    pass


# -- looking (command line -> dispatcher) --------------------------------------------------------------------------


class GetStatus(Message, frozen=True, tag="get-status"):
    pass


class GetAudit(Message, frozen=True, tag="get-audit"):
    """``epoch`` None: the newest epoch the job has entered."""

    job: str
    epoch: int | None = None


class Document(Message, frozen=True, tag="document"):
    """A JSON document whose shape the command-line contract fixes (status, audit)."""

    json: bytes


class Hello(Message, frozen=True, tag="hello"):
    pass


class HelloReply(Message, frozen=True, tag="hello-reply"):
    role: Literal["dispatcher", "worker"]
    id: str = ""
    version: str = ""
    leader: str = ""
    term: int = 0


Request = (
    FindDataset | HaveManifest | RegisterDataset | PutBlob | GetBlob | OpenJob | AskGrants | Report | RegisterWorker
    | Heartbeat | LeaveWorker | DrainWorker | GetStatus | GetAudit | Hello
)  # fmt: skip
Reply = (
    DatasetFound | ManifestKnown | DatasetRegistered | Blob | JobOpened | Grants | Reported | WorkerWelcome | Done
    | Document | HelloReply
)  # fmt: skip


class JobSpec(Part_, frozen=True):
    """Content-addressed by its digest: what a worker needs beside a grant to turn stored rows into output rows."""

    #: per source of the job: stored fields and label maps (field -> class name -> number)
    fields: tuple[tuple[Field, ...], ...]
    labels: tuple[dict[str, dict[str, int]], ...]
    #: encoded pipeline, b"": the stored fields
    pipeline: bytes = b""
