"""Job specs: fetched from the dispatcher by digest, compiled once per dataset of the job, the last ones kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from manifests.errors import ProtocolError
from manifests.identity import digest
from manifests.pipeline import Pipeline
from manifests.schema import Field
from manifests.wire import codec
from manifests.wire.messages import JobSpec

from .decode import Decoder
from .flights import SingleFlight
from .pipeline import Executor

#: specs kept
KEPT = 64
#: seconds a thread waits for another one that fetches the same spec
TIMEOUT = 30.0


class Spec:
    """What turns stored rows of one dataset of a job into output rows.

    Attributes:
        fields, labels: as stored. executor: the compiled pipeline.
        row_bytes: output bytes per row, known or learned; None before the first rows.
    """

    def __init__(self, fields: tuple[Field, ...], labels: dict[str, dict[str, int]], executor: Executor) -> None:
        self.fields = fields
        self.labels = labels
        self.executor = executor
        self.row_bytes: float | None = executor.row_bytes

    def learn(self, rows: int, size: int) -> None:
        """``rows`` rows came to ``size`` bytes; a moving mean, safe to call from any thread."""
        if self.executor.row_bytes is None and rows:
            now = self.row_bytes
            self.row_bytes = size / rows if now is None else now + 0.2 * (size / rows - now)


class Specs:
    """``fetch(digest)`` asks the dispatcher for a blob."""

    def __init__(self, fetch: Callable[[str], bytes], decoder: Decoder) -> None:
        self._fetch = fetch
        self._decoder = decoder
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[Spec, ...]] = OrderedDict()
        self._flights: SingleFlight[str, tuple[Spec, ...]] = SingleFlight("job spec", TIMEOUT)

    def __repr__(self) -> str:
        return f"Specs({len(self._kept)} kept)"

    def get(self, name: str, source: int) -> Spec:
        """The spec of dataset ``source`` of the job spec with digest ``name``.

        Raises:
            ProtocolError: not what the digest says, or no such dataset in it. ConfigError: a pipeline that cannot run
            here. DispatcherUnavailable: nobody to ask.
        """
        with self._lock:
            found = self._kept.get(name)
            if found is not None:
                self._kept.move_to_end(name)
        if found is None:
            found = self._flights.do(name, lambda: self._make(name))
        if not 0 <= source < len(found):
            raise ProtocolError(f"job spec {name} has no dataset {source}", cause=f"it has {len(found)}")
        return found[source]

    def _make(self, name: str) -> tuple[Spec, ...]:
        data = self._fetch(name)
        if digest(data) != name:
            raise ProtocolError(f"job spec {name} is not what came", cause=f"its digest is {digest(data)}")
        spec: JobSpec = codec.decode(data, JobSpec)
        if len(spec.labels) != len(spec.fields):
            raise ProtocolError(f"job spec {name} has {len(spec.fields)} lists of fields", cause="and other labels")
        pipeline = Pipeline.decode(spec.pipeline)
        made = tuple(
            Spec(fields, labels, Executor(pipeline, fields, self._decoder))
            for fields, labels in zip(spec.fields, spec.labels)
        )
        with self._lock:
            self._kept[name] = made
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return made
