"""``audit=True``: the dispatcher's books of every epoch, looked at once all ranks are through with it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from manifests.errors import FeedlineError, ProtocolError
from manifests.log import new_cause
from manifests.wire import messages as m

from .control import Closed, Control

log = logging.getLogger("feedline.client")

#: seconds between looks whether an epoch is over for all ranks
_POLL = 0.25
#: shards named in the error
_NAMED = 5


class Auditor:
    """Audits epochs on a thread of its own, in order.

    Args:
        through: epoch -> whether all ranks are known to be through with it. refresh: asks for that, at most about 1 s.
        fatal: called with the error when rows were lost or handed out twice.
    """

    def __init__(
        self,
        control: Control,
        job: str,
        *,
        through: Callable[[int], bool],
        refresh: Callable[[], object],
        fatal: Callable[[FeedlineError], None],
    ) -> None:
        self._control = control
        self._job = job
        self._through = through
        self._refresh = refresh
        self._fatal = fatal
        self._wake = threading.Condition()
        self._open: list[int] = []
        self._newest = -1
        self._hurry = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"Auditor({self._job}, {len(self._open)} epochs open)"

    def add(self, epoch: int) -> None:
        """This rank is through with ``epoch``; the same again is no news."""
        with self._wake:
            if epoch <= self._newest:
                return
            self._newest = epoch
            self._open.append(epoch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="feedline-audit", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def wait(self, timeout: float) -> None:
        """Until every epoch added was audited; those that other ranks are still in after ``timeout`` seconds stay open."""
        deadline = time.monotonic() + timeout
        with self._wake:
            self._hurry = True
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._open or self._closing, max(0.0, deadline - time.monotonic()))
            self._hurry = False
            if self._open and not self._closing:
                log.info("epoch %d of job %s is not over for all ranks; not audited yet", self._open[0], self._job)

    def close(self) -> None:
        """Stop; epochs that are open are not audited."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    def join(self, timeout: float) -> None:
        """Wait for the thread to end."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._open)
                if self._closing:
                    return
                epoch, hurry = self._open[0], self._hurry
            try:
                if hurry and not self._through(epoch):
                    self._refresh()
                done = self._through(epoch) and self._audit(epoch)
            except Closed:
                return
            except FeedlineError as error:
                log.warning("epoch %d of job %s could not be audited: %s", epoch, self._job, error)
                done = True
            with self._wake:
                if done:
                    self._open.remove(epoch)
                    self._wake.notify_all()
                elif not self._closing:
                    self._wake.wait(_POLL)

    def _audit(self, epoch: int) -> bool:
        """Look at one epoch; False: not complete yet."""
        reply: m.Document = self._control.call(
            m.GetAudit(cause=new_cause(), job=self._job, epoch=epoch), m.Document, timeout=5.0
        )
        found: dict[str, Any] = msgspec.json.decode(reply.json)
        if found["state"] != "complete":
            return False
        error = judge(found)
        if error is not None:
            self._fatal(error)
        else:
            log.info(
                "epoch %d of job %s: %d of %d rows acknowledged, none lost, none twice; %d skipped, %d in quarantine, "
                "%d dropped, %d abandoned",
                epoch, self._job, found["acknowledged"], found["rows"], found["skipped"], found["quarantined"],
                found["dropped"], found["abandoned"],
            )  # fmt: skip
        return True


def judge(found: dict[str, Any]) -> ProtocolError | None:
    """The error that an audit document of a complete epoch means, if rows were lost or repeated."""
    lost, repeated = found["lost"], found["repeated"]
    if not lost and not repeated:
        return None
    shards = found["shards"]
    named = "; ".join(_tell(shard) for shard in shards[:_NAMED])
    more = f"; and {len(shards) - _NAMED} more" if len(shards) > _NAMED else ""
    return ProtocolError(
        f"epoch {found['epoch']} of job {found['job']} was not handed out as planned: {lost} rows lost, {repeated} twice",
        cause=named + more or "no shard is named",
        remedy=f"`feedline audit {found['job']} --epoch {found['epoch']}` tells all that is known",
        detail={"lost": lost, "repeated": repeated, "epoch": found["epoch"], "shards": shards},
    )


def _tell(shard: dict[str, Any]) -> str:
    if shard.get("shard") is None:
        return str(shard.get("note", ""))
    lost, repeated = len(shard.get("lost", ())), len(shard.get("repeated", ()))
    return f"shard {shard['shard']}: {lost} lost, {repeated} twice"
