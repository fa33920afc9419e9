"""Opening and joining: which open starts a generation, joins one, waits, or is refused.

One row per situation of the asking rank, first match wins; "gone" means closed, lease over, or known to be dead:

    situation                                                       answer
    no record, or every member of the generation is gone            new generation
    rank joined, same holder, same nonce                            same answer again
    rank joined, same holder, later nonce                           new generation (a rewind)
    rank joined, same holder, earlier nonce                         Fenced: that open was long on its way
    rank joined by another holder that lives                        JobBusy
    rank joined by another that is gone, nothing granted, equal     takes its place
    rank joined by another that is gone                             new generation (a restart)
    rank not joined, but all are (another world size), some live    JobBusy
    rank not joined, settings and start equal                       joins
    rank not joined, anything differs                               JobMismatch with the differences

In an elastic job in which others live a rank whose holder is gone joins again instead of opening a new generation, in a
lane of its own (``elastic.py``), and is refused with ``JobMismatch`` if its settings or start differ; the old holder is
fenced. A new generation fences every member of the old one: what they send gets ``Fenced``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import msgspec

from manifests.errors import ConfigError, FeedlineError, Fenced, JobBusy, JobMismatch
from manifests.wire import messages as m

from . import events, marks, records, starts
from .effects import Outbox
from .job import KEPT_EPOCHS, KEPT_GENERATIONS, Job, Liveness

#: ended jobs are kept this long, ms
KEPT_MS = 7 * 24 * 3600 * 1000
#: the record's time of last use is renewed when it is older than this, ms
USED_STEP_MS = 3600 * 1000
#: silent ranks told of in one answer
MAX_SILENT = 16


class Jobs:
    """All jobs by name, and the rules for opening them."""

    def __init__(self, out: Outbox, lease: float) -> None:
        self._out = out
        self.lease = lease
        self.by_name: dict[str, Job] = {}
        #: called with a job whose assignments are about to be dropped
        self.on_release: Callable[[Job], None] = lambda job: None
        #: called with a rank of an elastic job that is gone, and why
        self.on_gone: Callable[[Job, int, str], None] = lambda job, rank, why: None

    # -- opening

    def on_open(self, event: events.JobOpenRequested) -> None:
        ask = event.message
        starts.check_open(event)
        job = self.by_name.get(ask.job)
        if job is None:
            self._new_generation(self._completed(event, None), None)
            return
        alive = {r for r in job.members if self._lives(job, r, event)}
        member = job.members.get(ask.rank)
        same_holder = member is not None and member.holder.uid == ask.holder.uid
        if member is not None and same_holder and not member.left and member.nonce == ask.nonce:
            self._check_not_gone(job, member)
            live = job.liveness.get(ask.rank)
            job.liveness[ask.rank] = Liveness(event.at, waiting_since=live.waiting_since if live else event.at)
            self._answer(event, job)
            return
        if member is not None and same_holder and ask.nonce < member.nonce:
            raise Fenced(
                f"this open of rank {ask.rank} of job {job.name} is not the last one of its loader",
                cause="it was long on its way",
                detail={"generation": job.record.generation},
            )
        event = self._completed(event, job)
        ask = event.message
        if not alive or (same_holder and member is not None and not member.gone):
            self._new_generation(event, job)
        elif member is not None and ask.rank in alive:
            raise self._busy(event, job, member)
        elif member is not None and job.is_elastic:
            self._take_again(event, job, member, alive)
        elif member is not None:
            if job.current.granted or job.ranks or self._differences(job, ask):
                self._new_generation(event, job)
            else:
                self._join(event, job)
                self._answer(event, job)
        elif not job.absent:
            # only another world size has a rank that a full generation lacks
            raise self._busy(event, job, job.members[min(alive)])
        elif differences := self._differences(job, ask):
            raise self._mismatch(job, ask, differences, alive)
        else:
            self._join(event, job)
            self._answer(event, job)

    def _completed(self, event: events.JobOpenRequested, job: Job | None) -> events.JobOpenRequested:
        """The open with what its start point lacks taken from marks, and its lanes as generations keep them."""
        ask = event.message
        start = ask.start
        if start.kind != "checkpoint":
            return event
        settings = starts.resolve_settings(event, job, start)
        start = marks.complete(self.by_name.get(start.job or ask.job), start, settings, event.rows)
        start = starts.normal(start, settings, event.rows)
        return dataclasses.replace(event, message=msgspec.structs.replace(ask, start=start))

    def _take_again(
        self, event: events.JobOpenRequested, job: Job, member: records.MemberRecord, alive: set[int]
    ) -> None:
        """A rank of an elastic job, whose holder is gone, gets another one while others go on."""
        ask = event.message
        differences = starts.setting_differences(job.current.settings, ask.settings)
        start = ask.start
        same_line = start.kind == "checkpoint" and (start.job or job.name, start.generation) == (
            job.name,
            job.record.generation,
        )
        if not (start.kind == "latest" or same_line):
            differences += starts.start_differences(job.current, start)
        if differences:
            raise self._mismatch(job, ask, differences, alive)
        if not member.gone:
            self.on_gone(job, ask.rank, "is gone and was started again")
        self._join(event, job, tenure=member.tenure + 1)
        job.catch_up(ask.rank)
        self._answer(event, job)

    def _lives(self, job: Job, rank: int, event: events.JobOpenRequested) -> bool:
        return job.is_live(rank, event.at, self.lease) and job.members[rank].holder.uid not in event.message.dead

    def _differences(self, job: Job, ask: m.OpenJob) -> list[tuple[str, str]]:
        return [
            *starts.setting_differences(job.current.settings, ask.settings),
            *starts.start_differences(job.current, ask.start),
        ]

    def _mismatch(self, job: Job, ask: m.OpenJob, differences: list[tuple[str, str]], alive: set[int]) -> FeedlineError:
        return JobMismatch(
            f"rank {ask.rank} does not fit generation {job.record.generation} of job {job.name}",
            cause="; ".join(text for _, text in differences),
            remedy="give all ranks the same settings and start point, or use another job name",
            detail={
                "differences": [name for name, _ in differences],
                "generation": job.record.generation,
                "holders": [_holder(job.members[rank]) for rank in sorted(alive)],
            },
        )

    def _busy(self, event: events.JobOpenRequested, job: Job, member: records.MemberRecord) -> FeedlineError:
        holder = member.holder
        heard = job.liveness[member.rank].heard
        return JobBusy(
            f"rank {member.rank} of job {job.name} is held by process {holder.pid} on {holder.host or 'unknown host'}",
            cause=f"it was heard {event.at - heard:.1f} s ago and its lease is {self.lease:g} s",
            remedy="stop that process, or use another job name",
            detail={
                **_holder(member),
                "holders": [_holder(found) for found in job.members.values() if not found.left],
                "heard_ms": round((event.at - heard) * 1000),
                "lease_ms": round(self.lease * 1000),
                "generation": job.record.generation,
            },
        )

    def _new_generation(self, event: events.JobOpenRequested, job: Job | None) -> None:
        ask = event.message
        start, latest, warning = ask.start, ask.start.kind == "latest", ""
        if latest:
            start = m.StartPoint(kind="fresh") if job is None else starts.latest(job, ask.settings.world_size)
        settings = starts.resolve_settings(event, job, start)
        if latest and start.kind != "fresh" and job is not None:
            starts.check_identity(job, ask.settings)
        starts.check_start(start, settings, event.rows)
        start = starts.normal(start, settings, event.rows)
        # a loader that goes to another epoch by itself knows what it leaves
        member = job.members.get(ask.rank) if job is not None else None
        itself = member is not None and member.holder.uid == ask.holder.uid
        if job is not None and start.kind == "fresh" and not latest and not itself and job.has_progress():
            epoch, step = job.position()
            warning = (
                f"job {job.name} had generation {job.record.generation} at epoch {epoch} step {step}; starting afresh"
            )
        number = job.record.generation + 1 if job is not None else 1
        generation = records.GenerationRecord(
            job=ask.job,
            number=number,
            settings=settings,
            start=start,
            latest=latest,
            decodes=event.decodes,
            fingerprint=job.current.fingerprint if job is not None and (start.kind != "fresh" or itself) else "",
            opened_ms=event.now_ms,
            rows=event.rows,
        )
        if latest:
            warning = starts.drop_warning(generation)
        created = job.record.created_ms if job is not None else event.now_ms
        record = records.JobRecord(name=ask.job, generation=number, created_ms=created, used_ms=event.now_ms)
        if job is None:
            job = self.by_name[ask.job] = Job(record)
        else:
            self._end_generation(job)
            job.record = record
        job.generations[number] = generation
        job.recount()
        self._out.put(generation)
        self._out.put(record)
        self._prune(job)
        self._join(event, job)
        what = "latest" if latest else start.kind
        self._out.log(
            logging.INFO,
            f"job {job.name}: generation {number} opened by rank {ask.rank} of {settings.world_size}, {what} at epoch "
            f"{start.epoch} step {start.step}",
        )
        if warning:
            self._out.log(logging.WARNING, warning)
        self._answer(event, job, warning)

    def _end_generation(self, job: Job) -> None:
        """Fold all books of the current generation and forget who held it."""
        self.on_release(job)
        generation = job.current
        for epoch in job.unfolded():
            job.folded[generation.number, epoch] = book = job.folding(epoch)
            self._out.put(book)
        for ranks in job.ranks.values():
            for rank_record in ranks.values():
                self._out.delete(rank_record.key)
        for pool in job.pools.values():
            for key in (key for rank in pool.lanes for key in pool.lane_keys(rank)):
                self._out.delete(key)
            self._out.delete(pool.record().key)
        for rank, member in job.members.items():
            self._out.delete(member.key)
            self._out.delete(records.AssignmentRecord(job=job.name, generation=generation.number, rank=rank).key)
        job.members, job.assignments, job.liveness, job.ranks, job.pools = {}, {}, {}, {}, {}

    def _prune(self, job: Job) -> None:
        """Keep the last generations and folded epochs only."""
        for number in sorted(job.generations)[:-KEPT_GENERATIONS]:
            self._out.delete(job.generations.pop(number).key)
            for name in [name for name in job.quarantine if name[0] == number]:
                self._out.delete(job.quarantine.pop(name).key)
            for place in [place for place in job.folded if place[0] == number]:
                self._out.delete(job.folded.pop(place).key)
        for place in sorted(job.folded)[:-KEPT_EPOCHS]:
            self._out.delete(job.folded.pop(place).key)

    def _join(self, event: events.JobOpenRequested, job: Job, tenure: int = 0) -> None:
        ask = event.message
        member = records.MemberRecord(
            job=job.name,
            generation=job.record.generation,
            rank=ask.rank,
            holder=ask.holder,
            nonce=ask.nonce,
            tenure=tenure,
        )
        job.members[ask.rank] = member
        job.liveness[ask.rank] = Liveness(event.at, waiting_since=event.at)
        self._out.put(member)
        self._out.log(
            logging.INFO,
            f"job {job.name}: rank {ask.rank} joined generation {job.record.generation}"
            f" (process {ask.holder.pid} on {ask.holder.host})",
        )

    def _answer(self, event: events.JobOpenRequested, job: Job, warning: str = "") -> None:
        generation = job.current
        self._out.reply(
            event.request,
            m.JobOpened(
                job=job.name,
                generation=generation.number,
                settings=generation.settings,
                start=generation.start,
                lease_ms=round(self.lease * 1000),
                absent=job.absent,
                warning=warning,
            ),
        )

    # -- who may speak

    def member(self, name: str, generation: int, rank: int, holder: str, at: float) -> Job:
        """The job, if this holder has this rank of its current generation; renews its lease. Raises ``Fenced``."""
        job = self.by_name.get(name)
        if job is None:
            raise Fenced(
                f"job {name} is not known to this dispatcher",
                cause="its store is empty or the job was removed",
                remedy="open the job again, from a checkpoint",
                detail={"generation": 0},
            )
        now = job.record.generation
        if generation != now:
            raise Fenced(
                f"generation {generation} of job {name} is over",
                cause=f"generation {now} was opened",
                remedy="this loader is final; make a new one",
                detail={"generation": now},
            )
        member = job.members.get(rank)
        if member is None or member.holder.uid != holder:
            who = f"process {member.holder.pid} on {member.holder.host} holds it" if member else "it has not joined"
            raise Fenced(f"rank {rank} of job {name} is not held by this loader", cause=who, detail={"generation": now})
        self._check_not_gone(job, member)
        if not member.left:
            live = job.liveness.setdefault(rank, Liveness(at, waiting_since=at))
            live.heard = max(live.heard, at)
        return job

    def _check_not_gone(self, job: Job, member: records.MemberRecord) -> None:
        if member.gone:
            raise Fenced(
                f"rank {member.rank} of job {job.name} was silent for longer than its lease",
                cause=f"the lease is {self.lease:g} s; its rows were given to the other ranks",
                remedy="this loader is final; make a new one, it joins the running job",
                detail={"generation": job.record.generation},
            )

    def silent(self, job: Job, at: float) -> tuple[m.SilentRank, ...]:
        """Ranks whose lease is over though they did not close, longest first, at most 16. Not those of elastic jobs that
        are gone: their rows are with others, so nobody waits for them."""
        found = []
        for rank, member in job.members.items():
            live = job.liveness.get(rank)
            if live is not None and not member.left and not member.gone and at - live.heard > self.lease:
                silent_ms = round((at - live.heard) * 1000)
                holder = member.holder
                found.append(m.SilentRank(rank=rank, silent_ms=silent_ms, host=holder.host, pid=holder.pid))
        return tuple(sorted(found, key=lambda item: (-item.silent_ms, item.rank))[:MAX_SILENT])

    def leave(self, job: Job, rank: int) -> None:
        """The holder gives its rank back."""
        member = job.members[rank]
        if not member.left:
            job.members[rank] = member = msgspec.structs.replace(member, left=True)
            self._out.put(member)
            self._out.log(logging.INFO, f"job {job.name}: rank {rank} closed")

    def touch(self, job: Job, now_ms: int) -> None:
        """Note that the job is in use, at most once an hour."""
        if now_ms - job.record.used_ms > USED_STEP_MS:
            job.record = msgspec.structs.replace(job.record, used_ms=now_ms)
            self._out.put(job.record)

    def find(self, name: str) -> Job:
        """The job called ``name``; ConfigError that lists the known ones."""
        if name not in self.by_name:
            known = ", ".join(sorted(self.by_name)[:20]) or "none"
            raise ConfigError(f"unknown job {name!r}", cause=f"known jobs: {known}")
        return self.by_name[name]

    # -- time and loading

    def on_time(self, at: float, now_ms: int) -> None:
        for job in self.by_name.values():
            if job.is_elastic:
                self._bury_silent(job, at)
        for name, job in list(self.by_name.items()):
            if now_ms - job.record.used_ms > KEPT_MS and not job.any_live(at, self.lease):
                self._end_generation(job)
                marked = [record for found in job.marks.values() for record in found.values()]
                kept: list[records.EpochRecord | records.QuarantineRecord | records.MarkRecord] = [*marked]
                kept += [*job.folded.values(), *job.quarantine.values()]
                for record in kept:
                    self._out.delete(record.key)
                for generation in job.generations.values():
                    self._out.delete(generation.key)
                self._out.delete(job.record.key)
                del self.by_name[name]
                self._out.log(logging.INFO, f"job {name} ended more than 7 days ago and was removed")

    def _bury_silent(self, job: Job, at: float) -> None:
        """Ranks of an elastic job whose lease is over are gone, while another one lives."""
        alive = {rank for rank in job.members if job.is_live(rank, at, self.lease)}
        for rank, member in list(job.members.items()):
            if alive and rank not in alive and not member.left and not member.gone:
                self.on_gone(job, rank, f"was silent for longer than its lease of {self.lease:g} s")


def _holder(member: records.MemberRecord) -> dict[str, object]:
    holder = member.holder
    return {"rank": member.rank, "uid": holder.uid, "host": holder.host, "pid": holder.pid}
