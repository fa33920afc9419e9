"""Elastic jobs: a rank that dies holds nobody back, and what it had not acknowledged goes to the others.

Its rows go back to the pool of their epoch while another rank is in that epoch, else into the pool of the epoch that the
slowest of the others is in, as rows carried over. So do rows that were left in a pool when the last rank was through
with it. Who takes the rank again joins the running generation with a lane of its own.
"""

from __future__ import annotations

import logging

import msgspec

from . import books
from .effects import Outbox
from .job import Job
from .pools import Pools
from .stretches import count


class Elastic:
    """What becomes of the rows of ranks that are gone."""

    def __init__(self, out: Outbox, pools: Pools) -> None:
        self._out = out
        self._pools = pools

    def bury(self, job: Job, rank: int, why: str) -> None:
        """The rank is gone for good: its holder is fenced, others get its rows. Its place in the job stays."""
        member = job.members[rank] = msgspec.structs.replace(job.members[rank], gone=True)
        job.liveness.pop(rank, None)
        self._out.put(member)
        rows = 0
        for epoch, pool in list(job.pools.items()):
            record = job.ranks.get(epoch, {}).get(rank)
            if rank not in pool.lanes or (record is not None and record.progress.state != "open"):
                continue
            held = pool.lanes[rank]
            self._pools.discard(pool, rank)
            back = pool.settle(rank, record.progress.acked[0] if record is not None else held.begun)
            pool.give_back(back)
            rows += count(back)
            if record is not None:
                book = books.acknowledged_only(job.current, record)
                pool.book = book if pool.book is None else books.add(pool.book, book)
                del job.ranks[epoch][rank]
                self._out.delete(record.key)
            self._pools.put(pool)
        holder = member.holder
        self._out.log(
            logging.WARNING,
            f"job {job.name}: rank {rank} (process {holder.pid} on {holder.host}) {why}; "
            f"{rows} rows it had not acknowledged go to the other ranks",
        )
        self.carry_over(job)

    def carry_over(self, job: Job) -> None:
        """Rows that no rank will take in their epoch any more go to the front of a later one."""
        if not job.is_elastic or not job.staying():
            return
        slowest, _ = job.slowest()
        for epoch in sorted(job.pools):
            pool = job.pools[epoch]
            if epoch >= slowest or pool.is_empty:
                continue
            rows = pool.carry_out()
            later = self._pools.at(job, slowest)
            later.carry_in(rows)
            self._pools.put(pool)
            self._pools.put(later)
            self._out.log(
                logging.INFO,
                f"job {job.name}: {count(rows)} rows of epoch {epoch} are carried over into epoch {slowest}",
            )
