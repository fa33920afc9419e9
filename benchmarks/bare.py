"""A Flight server that does nothing but send: the bare transport that feedline is held against. Run as a program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

#: bytes of one message
MESSAGE = 2_000_000


class _Server(fl.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    def do_get(self, context: object, ticket: fl.Ticket) -> fl.FlightDataStream:
        row_bytes, rows = map(int, ticket.ticket.decode().split("/"))
        count = max(1, MESSAGE // row_bytes)
        values = pa.array(np.random.default_rng(0).integers(0, 200, count * row_bytes, np.uint8))
        batch = pa.record_batch([pa.FixedSizeListArray.from_arrays(values, row_bytes)], names=["x"])

        def send() -> Iterator[pa.RecordBatch]:
            for first in range(0, rows, count):
                yield batch.slice(0, min(count, rows - first))

        return fl.GeneratorStream(batch.schema, send())


class BareServer:
    """The process and its address."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        if process.stdout is None:
            raise RuntimeError("the bare server has no output")
        self._process = process
        self.address = process.stdout.readline().strip()

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.communicate(timeout=10)


def start_bare_server() -> BareServer:
    """Start this file as a program."""
    return BareServer(subprocess.Popen([sys.executable, Path(__file__)], stdout=subprocess.PIPE, text=True))


if __name__ == "__main__":
    server = _Server("grpc://127.0.0.1:0")
    print(f"grpc://127.0.0.1:{server.port}", flush=True)
    server.serve()
