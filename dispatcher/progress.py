"""What ranks report: acknowledgements, signs of life, closing. Epochs that are over are folded."""

from __future__ import annotations

import logging

from manifests.wire import messages as m

from . import books, events, marks, records
from .effects import Outbox
from .elastic import Elastic
from .grants import Grants
from .job import KEPT_EPOCHS, Job
from .jobs import Jobs
from .pools import Pools

#: newest epochs whose ranks' books are kept apart
UNFOLDED = 2


class Progress:
    """Takes reports into the books."""

    def __init__(self, out: Outbox, jobs: Jobs, grants: Grants, pools: Pools, elastic: Elastic) -> None:
        self._out = out
        self._jobs = jobs
        self._grants = grants
        self._pools = pools
        self._elastic = elastic

    def on_report(self, event: events.ProgressReported) -> None:
        report = event.message
        job = self._jobs.member(report.job, report.generation, report.rank, report.holder, event.at)
        for progress in report.epochs:
            if not self._is_over(job, report.rank, progress.epoch):
                if job.current.start.lanes and progress.epoch == job.current.start.epoch:
                    self._pools.at(job, progress.epoch)  # a lane that goes on may need no more rows
                books.check_progress(job.current, report.rank, progress, job.pools.get(progress.epoch))
        marks.take(self._out, job, report.rank, report.marks)
        for progress in report.epochs:
            self._take(job, report.rank, progress)
        live = job.liveness.get(report.rank)
        if live is not None:
            live.state, live.waiting_for = report.state, report.waiting_for
            live.waiting_since = event.at - report.waiting_ms / 1000
        if report.leaving:
            self._leave(job, report.rank)
        floors = []
        if job.is_dynamic:
            self._elastic.carry_over(job)
            floors = [self._pools.advance(job, progress.epoch) for progress in report.epochs]
        self._fold(job)
        self._jobs.touch(job, event.now_ms)
        epoch, rank = job.slowest()
        self._out.reply(
            event.request,
            m.Reported(
                now_ms=event.now_ms,
                slowest_epoch=epoch,
                slowest_rank=rank,
                silent=self._jobs.silent(job, event.at),
                floors=tuple(floor for floor in floors if floor is not None),
            ),
        )

    @staticmethod
    def _is_over(job: Job, rank: int, epoch: int) -> bool:
        """The epoch was folded, or a holder before this one took it to its end."""
        if (job.record.generation, epoch) in job.folded:
            return True
        old = job.ranks.get(epoch, {}).get(rank)
        return old is not None and old.progress.state != "open" and job.members[rank].tenure > 0

    def _take(self, job: Job, rank: int, progress: m.EpochProgress) -> None:
        epoch = progress.epoch
        if self._is_over(job, rank, epoch):
            job.note_epoch(rank, epoch, progress.state)
            return
        old = job.ranks.get(epoch, {}).get(rank)
        if old is not None and books.is_late(old.progress, progress):
            return
        record = books.rank_record(job.current, rank, progress)
        if record == old:
            return
        job.ranks.setdefault(epoch, {})[rank] = record
        self._out.put(record)
        job.note_epoch(rank, epoch, progress.state)
        if progress.state != "open":
            if old is None or old.progress.state == "open":
                self._out.log(
                    logging.INFO,
                    f"job {job.name}: rank {rank} {progress.state} epoch {epoch} at step {progress.acked_step}",
                )
            self._grants.drop(job, rank, epoch)
            if job.is_dynamic:
                self._pools.end(job, rank, epoch, progress.handed[0])

    def _leave(self, job: Job, rank: int) -> None:
        self._jobs.leave(job, rank)
        self._grants.drop(job, rank, None)
        for epoch, pool in job.pools.items():
            if rank in pool.lanes:
                record = job.ranks.get(epoch, {}).get(rank)
                place = record.progress.handed[0] if record is not None else pool.lanes[rank].begun
                self._pools.end(job, rank, epoch, place)

    def _fold(self, job: Job) -> None:
        """Fold epochs that all ranks are through with, but for the newest."""
        generation = job.current
        for epoch in job.unfolded()[:-UNFOLDED]:
            found, through = job.ranks.get(epoch, {}), job.through(epoch)
            waiting = {rank for rank, record in found.items() if record.progress.state == "open"}
            waiting |= set(range(job.world_size)) - set(found)
            if waiting - through:
                continue
            book = job.folding(epoch)
            job.folded[generation.number, epoch] = book
            self._out.put(book)
            for record in job.ranks.pop(epoch, {}).values():
                self._out.delete(record.key)
            self._pools.drop(job, epoch)
        for place in sorted(job.folded)[:-KEPT_EPOCHS]:
            self._out.delete(job.folded.pop(place).key)


def load_rank(job: Job, record: records.RankEpochRecord) -> None:
    """Take a stored record in."""
    job.ranks.setdefault(record.epoch, {})[record.rank] = record
