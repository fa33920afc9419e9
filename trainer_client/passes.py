"""One ``for`` over a loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manifests.errors import ConfigError, RankAbsent

from .control import Closed
from .run import Epoch, Run

if TYPE_CHECKING:
    from .loader import RemoteDataLoader


#: seconds the end of a pass waits for other ranks to be through too, so that the epoch can be audited
_AUDIT = 3.0


class Pass:
    """One ``for``: its position is the run's; a newer pass makes it unusable."""

    def __init__(self, loader: RemoteDataLoader, run: Run, epoch: Epoch, stop: int | None) -> None:
        self._loader = loader
        self._run = run
        self.epoch = epoch
        #: epoch before which the pass ends, None: never
        self.stop = stop
        self.superseded = False
        self._ended = False

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        # No lock: other threads may save the state or close the loader while this one waits for rows.
        if self._ended:
            raise StopIteration
        config = self._loader._config
        if self.superseded:
            raise self._over()
        self._loader._check_open()
        if config.ack == "next":
            self.epoch.books.acknowledge()
        try:
            while True:
                got = self._run.next_batch(self.epoch)
                if got is not None:
                    self._run.look_ahead(self.epoch.first_epoch, self.stop)
                    return got[0]
                self._end_epoch()
        except Closed:
            raise self._over() from None
        except RankAbsent:
            self._run.reporter.flush(2.0)  # what was acknowledged until then is on record
            raise

    def _over(self) -> ConfigError:
        return ConfigError("this iteration is over", cause="the loader was closed, rewound or iterated anew")

    def _end_epoch(self) -> None:
        run, epoch = self._run, self.epoch
        epoch.books.finish()
        if self._loader._config.ack == "next":
            epoch.books.acknowledge()
        if self._loader._config.audit:
            run.auditor.add(epoch.number)
        if self.stop is not None and epoch.number + 1 >= self.stop:
            self._ended = True
            run.waits.got()
            run.reporter.flush(5.0)
            if self._loader._config.ack == "next":  # else the epoch is not over before the next ack()
                run.auditor.wait(_AUDIT)
            run.check()  # acknowledgements that were refused are no normal end
            raise StopIteration
        with self._loader._lock:
            if self.superseded:
                raise Closed
            self.epoch = self._loader._begin(run, epoch.number + 1, epoch.first_epoch)
