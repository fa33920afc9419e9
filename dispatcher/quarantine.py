"""Shards that no worker can read are set aside for the generation of the job in which they failed.

A failure counts when a worker *answered* that the shard is not there or not as promised. One that did not answer, was
killed, drains or lacks memory says nothing about a shard. Two workers must say so, or, while only one is up that could,
that one twice. Counts are memory only and go with the generation; a shard in quarantine is a record.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from manifests.wire import messages as m

from . import records
from .effects import Outbox
from .job import Job
from .library import ShardInfo

#: what a worker answers about a shard itself. Storage that cannot be read is "shard-missing", a format that is not what
#: the manifest says "shard-changed"; every other code is about the worker, the ticket or one sample
ABOUT_SHARD = frozenset({"shard-missing", "shard-changed"})
#: seconds between two failures of the only worker that count as two
APART = 1.0
#: shards of one job whose failures are remembered; the oldest go first
KEPT = 4096
#: characters of a reason that are kept
REASON = 300


@dataclass(slots=True)
class _Failures:
    """Failures on one shard. ``at``: monotonic seconds of the first failure of each worker."""

    at: dict[str, float] = field(default_factory=dict)
    codes: Counter[str] = field(default_factory=Counter)


class Quarantine:
    """Counts failures on shards, and sets shards aside."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        #: job -> (source, shard) -> failures in its current generation, oldest first
        self._failures: dict[str, dict[tuple[int, int], _Failures]] = {}

    def failed_on(self, job: Job, source: int, shard: int) -> Collection[str]:
        """Workers that answered that they cannot read this shard, in this generation."""
        found = self._failures.get(job.name, {}).get((source, shard))
        return found.at if found is not None else ()

    def find(self, job: Job, source: int, shard: int) -> m.QuarantinedShard | None:
        """The shard, if it is in quarantine."""
        record = job.quarantine.get((job.record.generation, source, shard))
        return record.shard if record is not None else None

    def all(self, job: Job) -> list[m.QuarantinedShard]:
        """Shards in quarantine in the current generation, in order."""
        number = job.record.generation
        return [record.shard for place, record in sorted(job.quarantine.items()) if place[0] == number]

    def forget(self, job: Job) -> None:
        """The job's generation ends: failures counted so far say nothing about the next one."""
        self._failures.pop(job.name, None)

    def on_failure(
        self, job: Job, failure: m.ReadFailure, info: ShardInfo, peers: Collection[str], at: float, now_ms: int
    ) -> None:
        """A worker answered a client that it cannot read a shard.

        Args:
            failure: its code is one of ``ABOUT_SHARD``.
            peers: workers that are up and could read the shard.
        """
        source, shard = failure.source, failure.shard
        if self.find(job, source, shard) is not None:
            return
        shards = self._failures.setdefault(job.name, {})
        found = shards.setdefault((source, shard), _Failures())
        again = found.at.get(failure.worker)
        found.at.setdefault(failure.worker, at)
        found.codes[failure.code] += 1
        alone = not set(peers) - {failure.worker}
        if len(found.at) > 1 or (again is not None and alone and at - again >= APART):
            self._set_aside(job, failure, info, found, now_ms)
        while len(shards) > KEPT:
            del shards[next(iter(shards))]

    def _set_aside(self, job: Job, failure: m.ReadFailure, info: ShardInfo, found: _Failures, now_ms: int) -> None:
        shard = m.QuarantinedShard(
            source=failure.source,
            shard=failure.shard,
            uri=info.uri,
            code=max(found.codes, key=lambda code: (found.codes[code], code)),
            reason=failure.message[:REASON],
            workers=tuple(sorted(found.at)),
        )
        record = records.QuarantineRecord(job=job.name, generation=job.record.generation, shard=shard, at_ms=now_ms)
        job.quarantine[record.generation, shard.source, shard.shard] = record
        del self._failures[job.name][shard.source, shard.shard]
        self._out.put(record)
        self._out.log(
            logging.WARNING,
            f"job {job.name}: shard {shard.shard} ({shard.uri}) is in quarantine, {shard.code} on "
            f"{', '.join(shard.workers)}: {shard.reason}",
        )
