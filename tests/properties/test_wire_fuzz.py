"""What no honest peer sends: the codec and the dispatcher's core answer it with a typed error, and nothing has changed.

Every part of every message is replaced by values of its own kind and of others (``wire_mutations``), and every message
is cut, flipped and overwritten at random. Each is decoded, and what decodes is given to a core in the middle of a job.
"""

from __future__ import annotations

import json
import math
import random
from functools import cache
from typing import Any

import msgspec
import pytest
from core_bench import Bench, Rank
from hypothesis import example, given
from hypothesis import strategies as st
from wire_mutations import broken, flipped, pack, structural, tree
from wire_samples import GRANT, KEY, KEY_ID, SAMPLES, tag
from wire_samples import SPEC as SPEC_SAMPLE

from dispatcher import audit, events, limits, status
from manifests.errors import AccessDenied, ConfigError, FeedlineError, ProtocolError
from manifests.wire import codec
from manifests.wire import messages as m
from manifests.wire.flight import to_flight_error

ANY = m.Request | m.Reply | m.Grants | m.Grant | m.ReadTicket | m.ReadPart
KINDS: dict[str, Any] = {tag(sample): type(sample) for sample in SAMPLES}


def decoded(data: bytes, kind: Any = ANY) -> msgspec.Struct | None:
    """The message, or None for a ``ProtocolError`` that says something in one line."""
    try:
        found: msgspec.Struct = codec.decode(data, kind)
        return found
    except ProtocolError as error:
        assert error.code == "protocol-error" and error.message and "\n" not in str(error)
        return None


def check_decodes(data: bytes, kind: Any) -> None:
    """What decodes is a message like any other: it is encoded and decoded again to itself."""
    found = decoded(data, kind)
    if found is not None:
        again = codec.encode(found)
        assert codec.encode(codec.decode(again, kind)) == again


@pytest.mark.parametrize("sample", [*SAMPLES, SPEC_SAMPLE], ids=[*map(tag, SAMPLES), "spec"])
def test_every_part_of_a_message_replaced(sample: msgspec.Struct) -> None:
    kind = type(sample)
    if not isinstance(sample, m.Message):
        data = codec.encode(sample)
        for _, other in broken(data, random.Random(7), 300):
            check_decodes(other, kind)
        return
    count = 0
    for _, data in structural(sample):
        check_decodes(data, kind)
        check_decodes(data, ANY)
        count += 1
    assert count > len(sample.__struct_fields__)


@given(st.sampled_from(SAMPLES), st.randoms(use_true_random=False))
def test_messages_cut_flipped_and_overwritten(sample: m.Message, draw: random.Random) -> None:
    for _, data in broken(codec.encode(sample), draw, 20):
        check_decodes(data, ANY)


@given(st.binary(max_size=400))
@example(b"\xdf\xff\xff\xff\xff")  # a map of 2**32 - 1 entries
@example(b"\xdd\xff\xff\xff\xff")  # a list of as many
@example(b"\xc6\xff\xff\xff\xff")  # 4 GiB of bytes
@example(b"\x81\xa1t" * 3000)
def test_noise_behind_a_good_head(noise: bytes) -> None:
    check_decodes(b"FL\x01" + noise, ANY)


@pytest.mark.parametrize("other", [s for s in SAMPLES if not isinstance(s, m.Request)], ids=tag)
def test_replies_and_tickets_are_no_requests(other: m.Message) -> None:
    assert decoded(codec.encode(other), m.Request) is None


@given(st.sampled_from(sorted(KINDS)), st.sampled_from(SAMPLES))
def test_another_message_s_tag(name: str, sample: m.Message) -> None:
    check_decodes(pack({**tree(sample), "t": name}), ANY)


@given(st.integers(0, 100_000), st.integers(0, 5000), st.booleans())
@example(70_000, 0, True)
@example(0, 256, False)  # one holder for each rank of a job
def test_errors_that_quote_a_message_fit_what_grpc_carries(letters: int, items: int, denied: bool) -> None:
    """gRPC refuses more than 16 KiB of error, and then nobody learns the code."""
    kind = AccessDenied if denied else ConfigError
    holders = [{"rank": n, "uid": "u" * 32, "host": "node", "pid": n} for n in range(items)]
    error = kind("x" * letters, cause="y" * letters, remedy="z" * letters, detail={"holders": holders, "rank": 3})
    made = to_flight_error(error)
    body = json.loads(made.extra_info)
    assert body["code"] == kind.code and body["detail"]["rank"] == 3
    # the detail travels as it is and once more in base64 with the text
    assert len(made.extra_info) + len(str(made)) < 12_000
    assert body["detail"]["holders"] == holders or len(body["detail"]["holders"]) in (0, 4, 16, 64)


# -- signed grants -------------------------------------------------------------------------------------------------

SIGNED = codec.sign(GRANT, KEY_ID, KEY)


def opened(data: bytes, keys: dict[str, bytes]) -> m.Grant | None:
    try:
        return codec.open_signed(data, keys)
    except (AccessDenied, ProtocolError):
        return None


def test_no_flipped_bit_of_a_signed_grant_gives_another_grant() -> None:
    """Every single bit: it is refused, or it was in a place that means nothing and the grant is the same."""
    for bit in range(8 * len(SIGNED)):
        assert opened(flipped(SIGNED, bit), {KEY_ID: KEY}) in (None, GRANT)


@given(st.binary(min_size=0, max_size=64), st.sampled_from(["k1", "k2", ""]))
def test_no_other_key_or_signature_opens_a_grant(secret: bytes, name: str) -> None:
    if (secret, name) != (KEY, KEY_ID):
        assert opened(codec.sign(GRANT, name, secret), {KEY_ID: KEY}) is None
    payload = codec.encode(msgspec.structs.replace(GRANT, uri="/etc/passwd"))
    assert opened(codec.encode(m.SignedGrant(key=KEY_ID, signature=secret, payload=payload)), {KEY_ID: KEY}) is None


# -- the core ------------------------------------------------------------------------------------------------------


class Target:
    """A core in the middle of a job of two ranks, and an honest message of each kind for it."""

    def __init__(self, order: str = "deterministic") -> None:
        self.bench = bench = Bench()
        bench.worker("w1")
        named = m.RegisterDataset(name="photos", version="1", digest=bench.digest)
        bench.apply(events.DatasetRegistrationRequested, message=named, rows=24, shards=5)
        first = bench.open(0, world_size=2, epochs=None)
        opened_job = bench.open(1, world_size=2, epochs=None)
        assert opened_job.generation == first.generation
        bench.ask(opened_job, 0, (0, 1))
        self.book = Rank(bench, opened_job, 0)
        self.book.hand()
        self.book.ack()
        self.book.hand()
        self.book.send()
        self.opened = opened_job
        holder = m.Holder(uid="u0", host="box", pid=100)
        progress = self.book.progress(
            skipped=(m.SkippedRow(sample_id=3, key="k", shard="s", reason="r"),),
            acked_skipped=1,
            unbalanced=(m.ShardSum(source=0, shard=1, planned=3, handed_out=3, lost=(4,), repeated=(5,)),),
        )
        start = m.StartPoint(
            kind="checkpoint",
            epoch=1,
            step=2,
            taken=(1,) * 12,
            generation=1,
            job="train",
            world_size=2,
        )
        settings = bench.settings(world_size=2, epochs=None, seed=77, lanes=12)
        self.requests: tuple[m.Message, ...] = (
            m.FindDataset(name="photos", version="1"),
            named,
            m.OpenJob(job="train", rank=0, holder=holder, nonce="again", settings=settings, start=start, dead=("u9",)),
            m.OpenJob(job="other", rank=1, holder=holder, nonce="n", settings=settings),
            m.AskGrants(
                job="train", generation=1, rank=0, holder="u0", epoch=0,
                shards=(m.ShardAsk(source=0, shard=2),), avoid=("w1",),
                failures=(m.ReadFailure(worker="w1", source=0, shard=2, code="silent", message="5 s"),),
                done=(m.ShardAsk(source=0, shard=0),), have=3, want=9, place=2,
                speeds=(m.WorkerSpeed(worker="w1", bytes=1000, ms=3),),
            ),
            m.Report(
                job="train", generation=1, rank=0, holder="u0", epochs=(progress,), state="waiting", waiting_for="rows",
                waiting_ms=5, marks=(m.EpochProgress(epoch=0, step=2, handed=progress.handed),),
            ),
            m.RegisterWorker(
                id="w2", incarnation="i", address="h:1", host="h", pid=3, memory_bytes=5, capabilities=("format:tar",),
                fingerprint="f",
            ),
            m.Heartbeat(id="w1", incarnation="w1-1", active_reads=1, stage_us={"decode": 12}, capabilities=("format:tar",)),
            m.LeaveWorker(id="w1", incarnation="other"),
            m.DrainWorker(id="w1"),
            m.GetStatus(),
            m.GetAudit(job="train", epoch=0),
        )  # fmt: skip

    def event(self, message: m.Message) -> tuple[type[events.Event], dict[str, Any]]:
        """What the service makes of the message; ``FeedlineError`` for one that makes no sense to anybody."""
        limits.check(message)  # type: ignore[arg-type]
        bench = self.bench
        if isinstance(message, m.OpenJob):
            known = [s.digest in bench.shelf.manifests for s in message.settings.sources]
            unknown = tuple(s.digest for s, there in zip(message.settings.sources, known) if not there)
            rows = sum(
                bench.shelf.manifests[s.digest].rows for s, there in zip(message.settings.sources, known) if there
            )
            return events.JobOpenRequested, {"message": message, "drawn_seed": 5, "unknown": unknown, "rows": rows}
        if isinstance(message, m.RegisterDataset):
            return events.DatasetRegistrationRequested, {"message": message, "rows": 24, "shards": 5}
        if isinstance(message, m.GetStatus):
            return events.Asked, {"look": status.collect}
        if isinstance(message, m.GetAudit):
            return events.Asked, {"look": lambda state, event: self.audit(message.job, message.epoch)}
        kinds: dict[type[m.Message], type[events.Event]] = {
            m.FindDataset: events.DatasetFindRequested,
            m.AskGrants: events.GrantsRequested,
            m.Report: events.ProgressReported,
            m.RegisterWorker: events.WorkerRegistered,
            m.Heartbeat: events.WorkerHeartbeatReceived,
            m.LeaveWorker: events.WorkerLeft,
            m.DrainWorker: events.DrainRequested,
        }
        return kinds[type(message)], {"message": message}

    def audit(self, job: str = "train", epoch: int | None = 0) -> dict[str, Any]:
        state = self.bench.state
        snap = audit.snapshot(state.jobs.find(job), self.bench.at, state.lease)
        return audit.audit(snap, epoch, self.bench.shelf.shard_rows)

    def give(self, message: m.Message) -> Any:
        """The core's answer."""
        kind, fields = self.event(message)
        return self.bench.apply(kind, **fields)

    def send(self, message: m.Message) -> bool:
        """Whether the core took it. What is refused has changed nothing that lasts; nothing else is ever raised."""
        before, books = dict(self.bench.stored), self.audit()
        try:
            answer = self.give(message)
        except FeedlineError as error:
            assert error.code != "internal" and error.message
            assert self.bench.stored == before and self.audit() == books
            return False
        if isinstance(answer, msgspec.Struct):
            assert codec.encode(codec.decode(codec.encode(answer), type(answer))) == codec.encode(answer)
        elif answer is not None:
            assert isinstance(answer, dict)
        return True

    def check_alive(self) -> None:
        """The records can be loaded by another dispatcher, audits answered, and the honest rank goes on or is fenced."""
        for job in self.bench.state.jobs.by_name.values():
            snap = audit.snapshot(job, self.bench.at, self.bench.state.lease)
            for epoch in {e for _, e in job.all_books() if 0 <= e < 1000}:
                try:
                    audit.audit(snap, epoch, self.bench.shelf.shard_rows)
                except FeedlineError:
                    pass
        durable = self.bench.state.durable()
        self.bench.reload()
        assert self.bench.state.durable() == durable
        status.collect(self.bench.state, events.Asked(at=self.bench.at, now_ms=self.bench.now_ms, look=lambda: None))


def requests() -> list[Any]:
    found = Target().requests
    return [pytest.param(number, id=f"{number}-{tag(message)}") for number, message in enumerate(found)]


@pytest.mark.parametrize("number", requests())
def test_the_core_takes_a_forged_message_or_refuses_it_whole(number: int) -> None:
    """Nothing but a ``FeedlineError`` comes out of the core, what is refused left no trace, and what was taken can be
    loaded again."""
    target = Target()
    message = target.requests[number]
    refused = taken = 0
    wrong: list[str] = []
    for what, data in structural(message):
        found = decoded(data, m.Request)
        if found is None:
            continue
        try:
            if target.send(found):  # type: ignore[arg-type]
                taken += 1
                target.check_alive()
                target = Target()
            else:
                refused += 1
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
            target = Target()
    assert not wrong, "\n".join([f"{len(wrong)} of {refused + taken + len(wrong)}:", *wrong[:40]])
    assert taken
    assert refused or number > 5, "the core refuses nothing"


@cache
def forged(number: int) -> list[bytes]:
    """All that the core could be sent instead of the target's message of that number."""
    message = Target().requests[number]
    return [data for _, data in structural(message) if decoded(data, m.Request) is not None]


@given(st.lists(st.tuples(st.integers(0, len(requests()) - 1), st.integers(0, 10**6)), max_size=6))
def test_forged_messages_in_a_row_leave_a_core_that_works(picks: list[tuple[int, int]]) -> None:
    target = Target()
    for number, pick in picks:
        target.send(codec.decode(forged(number)[pick % len(forged(number))], m.Request))
    target.check_alive()


@pytest.mark.parametrize("field", ["generation", "rank", "holder", "job"])
@pytest.mark.parametrize("kind", [m.AskGrants, m.Report])
def test_whoever_does_not_hold_the_rank_is_fenced(kind: type[m.Message], field: str) -> None:
    """Foreign holders, other generations and ranks: ``Fenced``, and the rank's lease is not renewed by it."""
    target = Target()
    honest = next(found for found in target.requests if isinstance(found, kind))
    values: dict[str, list[Any]] = {
        "generation": [0, 2, -1, 2**63],
        "rank": [1, 2, -1, 2**63],
        "holder": ["", "u1", "u0 ", "U0"],
        "job": ["", "other", "train/", "Train"],
    }
    heard = target.bench.state.jobs.by_name["train"].liveness[0].heard
    target.bench.at += 1
    for value in values[field]:
        with pytest.raises(FeedlineError) as caught:
            target.give(msgspec.structs.replace(honest, **{field: value}))
        assert caught.value.code == "fenced"
    assert target.bench.state.jobs.by_name["train"].liveness[0].heard == heard


@pytest.mark.parametrize("what", ["counts", "skipped", "unbalanced", "taken", "world size", "lanes", "nan"])
def test_numbers_that_mean_nothing_are_refused(what: str) -> None:
    """Each of them is refused before the core sees it. What else than a ``FeedlineError`` a core raises ends the term of
    its dispatcher, and a world of a million ranks is a list of a million absent ranks in every reply."""
    target = Target()
    opening = next(found for found in target.requests if isinstance(found, m.OpenJob))
    report = next(found for found in target.requests if isinstance(found, m.Report))
    books, replace = report.epochs[0], msgspec.structs.replace
    far = 2**63
    rows = {
        "counts": replace(books, handed=(far,) * 6, acked=(far,) * 6),
        "skipped": replace(books, skipped=(m.SkippedRow(sample_id=far, key="", shard="", reason=""),)),
        "unbalanced": replace(books, unbalanced=(replace(books.unbalanced[0], lost=(far,)),)),
    }
    starts = {"taken": replace(opening.start, taken=(far,) * 12)}
    changes: dict[str, dict[str, Any]] = {
        "world size": {"world_size": 1 << 20, "lanes": 1 << 20},
        "lanes": {"lanes": 2 << 20},
        "nan": {"max_bad": math.nan},
    }
    message: m.Message
    if what in rows:
        message = replace(report, epochs=(rows[what],))
    elif what in starts:
        message = replace(opening, start=starts[what])
    else:
        message = replace(opening, settings=replace(opening.settings, **changes[what]), start=m.StartPoint())
    with pytest.raises(FeedlineError):
        target.event(message)
