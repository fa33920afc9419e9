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


class StartPoint(Part_, frozen=True):
    """Where a generation starts. ``taken``: rows taken per lane, one entry per lane; ``sub``: reserved, the second half
    of the (row, sub) cursor per lane; ``first_epoch``: epoch in which the current pass (one ``for``) began."""

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


class EpochProgress(Part_, frozen=True):
    """Cumulative books of one rank in one epoch of one generation. A later message replaces an earlier one.

    ``handed``/``acked``: rows taken per own lane (ascending lane), skipped rows included, up to the last batch handed
    to the loop / acknowledged. ``source``: sum over the ids the plan has there; ``handed_out``: sum over the ids in the
    batches; both without skipped rows and pads.
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

    ``nonce``: drawn once per open, the same in repeats of it, so that a retried call opens nothing twice.
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


class AskGrants(Message, frozen=True, tag="ask-grants"):
    """Ask for the right to read shards (those the rank needs next, in order). Asking again renews.

    ``avoid``: workers that refused or stalled for this client just now. ``done``: shards not needed any more.
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
    floor: int = 0  # reserved (dynamic order): plan position below which everything was handed out


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


class Grants(Message, frozen=True, tag="grants"):
    """``waiting``: why there are fewer grants than asked for ("" if all are there); ``waiting_code``: the error that a
    deadline passed in this wait should be."""

    grants: tuple[GrantInfo, ...] = ()
    now_ms: int = 0
    waiting: str = ""
    waiting_code: Literal["", "wait-timeout", "no-worker", "rank-absent"] = ""


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
    #: reserved: state marks (epoch, step) with rows taken per own lane
    marks: tuple[EpochProgress, ...] = ()


class Reported(Message, frozen=True, tag="reported"):
    """``slowest_epoch``: the lowest epoch any rank is still in; a rank more than 2 ahead of it waits."""

    now_ms: int = 0
    slowest_epoch: int = 0
    slowest_rank: int = 0


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
