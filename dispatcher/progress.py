"""What ranks report: acknowledgements, signs of life, closing. Epochs that are over are folded."""

from __future__ import annotations

import logging

from manifests.wire import messages as m

from . import books, events, records
from .effects import Outbox
from .grants import Grants
from .job import KEPT_EPOCHS, Job
from .jobs import Jobs

#: newest epochs whose ranks' books are kept apart
UNFOLDED = 2


class Progress:
    """Takes reports into the books."""

    def __init__(self, out: Outbox, jobs: Jobs, grants: Grants) -> None:
        self._out = out
        self._jobs = jobs
        self._grants = grants

    def on_report(self, event: events.ProgressReported) -> None:
        report = event.message
        job = self._jobs.member(report.job, report.generation, report.rank, report.holder, event.at)
        for progress in report.epochs:
            books.check_progress(job.current, report.rank, progress)
        for progress in report.epochs:
            self._take(job, report.rank, progress)
        live = job.liveness.get(report.rank)
        if live is not None:
            live.state, live.waiting_for = report.state, report.waiting_for
            live.waiting_since = event.at - report.waiting_ms / 1000
        if report.leaving:
            self._jobs.leave(job, report.rank)
            self._grants.drop(job, report.rank, None)
        self._jobs.touch(job, event.now_ms)
        epoch, rank = job.slowest()
        self._out.reply(event.request, m.Reported(now_ms=event.now_ms, slowest_epoch=epoch, slowest_rank=rank))

    def _take(self, job: Job, rank: int, progress: m.EpochProgress) -> None:
        epoch = progress.epoch
        if (job.record.generation, epoch) in job.folded:
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
            self._fold(job)

    def _fold(self, job: Job) -> None:
        """Fold epochs that all ranks are through with, but for the newest."""
        generation = job.current
        for epoch in sorted(job.ranks)[:-UNFOLDED]:
            found = job.ranks[epoch]
            if len(found) < job.world_size or any(record.progress.state == "open" for record in found.values()):
                continue
            book = books.fold(generation, epoch, found)
            job.folded[generation.number, epoch] = book
            self._out.put(book)
            for record in job.ranks.pop(epoch).values():
                self._out.delete(record.key)
        for place in sorted(job.folded)[:-KEPT_EPOCHS]:
            self._out.delete(job.folded.pop(place).key)


def load_rank(job: Job, record: records.RankEpochRecord) -> None:
    """Take a stored record in."""
    job.ranks.setdefault(record.epoch, {})[record.rank] = record
