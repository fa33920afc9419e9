"""Shards on disk, grants signed here, and a worker's reads behind a real Flight server."""

from __future__ import annotations

import contextlib
import io
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3
from PIL import Image

from manifests.identity import digest
from manifests.pipeline import Pipeline
from manifests.scan import SCANNERS
from manifests.scan.local import LocalBytes, uri_of
from manifests.schema import Field
from manifests.wire import codec
from manifests.wire import messages as m
from manifests.wire.connection import Address
from manifests.wire.flight import Connection, Server
from worker.cache import BlockCache
from worker.decode import decoder
from worker.memory import Budget
from worker.pool import FairPool
from worker.reads import Reads
from worker.service import Service
from worker.shards import Shards
from worker.specs import Specs

KEY = b"k" * 32


def jpeg(seed: int, height: int = 40, width: int = 56) -> bytes:
    """A JPEG that differs per seed."""
    values = np.random.default_rng(seed).integers(0, 255, (height // 4, width // 4, 3), np.uint8)
    image = Image.fromarray(values).resize((width, height), Image.Resampling.BILINEAR)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=90)
    return out.getvalue()


def write_tar(path: Path, samples: Sequence[dict[str, bytes]], first: int = 0) -> None:
    """A WebDataset shard: one dict of field -> bytes per sample."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for at, sample in enumerate(samples, first):
            for name, data in sample.items():
                info = tarfile.TarInfo(f"s{at:06d}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def write_arrow(path: Path, table: pa.Table, chunk: int = 1000) -> None:
    """An Arrow IPC file."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=chunk)


@dataclass
class Stored:
    """A shard as its manifest would have it."""

    path: Path
    format: str
    rows: int
    fields: tuple[Field, ...]
    content_id: str
    size: int

    @classmethod
    def of(cls, path: Path, format: str = "tar") -> Stored:
        with LocalBytes(str(path)) as source:
            scan = SCANNERS[format](source)
        data = path.read_bytes()
        return cls(path, format, scan.index.rows, scan.fields, "blake3:" + blake3(data).hexdigest(), len(data))


@dataclass
class KeyRing:
    """What the worker would know from its dispatcher (``Authority``)."""

    keys: dict[str, bytes] = field(default_factory=lambda: {"1": KEY})
    ahead_ms: int = 0
    asked: int = 0

    def signing_keys(self) -> dict[str, bytes]:
        return self.keys

    def now_ms(self) -> int:
        return int(time.time() * 1000) + self.ahead_ms

    def refresh(self) -> None:
        self.asked += 1


class Bench:
    """A worker's reads with a Flight server in front, without dispatcher."""

    def __init__(self, memory: int = 64 << 20, threads: int = 2, worker: str = "w-1") -> None:
        self.worker = worker
        self.ring = KeyRing()
        self.budget = Budget(memory)
        self.cache = BlockCache(self.budget)
        self.shards = Shards(self.budget, self.cache)
        self.blobs: dict[str, bytes] = {}
        self.io = FairPool(4, "io")
        self.decode = FairPool(threads, "decode")
        specs = Specs(lambda name: self.blobs[name], decoder())
        self.reads = Reads(worker, self.ring, specs, self.shards, self.budget, self.io, self.decode)
        self.server = Server(Service(worker, self.reads), Address("127.0.0.1", 0))
        self.connection = Connection(self.server.address)

    def close(self) -> None:
        self.connection.close()
        assert self.server.stop(), "a call has not ended"
        assert self.io.close() and self.decode.close()
        self.shards.close()

    def spec(
        self,
        fields: tuple[Field, ...],
        pipeline: Pipeline | None = None,
        labels: dict[str, dict[str, int]] | None = None,
    ) -> str:
        """Keep a job spec; its digest."""
        spec = m.JobSpec(fields=(fields,), labels=(labels or {},), pipeline=pipeline.encode() if pipeline else b"")
        data = codec.encode(spec)
        self.blobs[digest(data)] = data
        return digest(data)

    def grant(self, stored: Stored, spec: str, **changes: Any) -> m.Grant:
        values: dict[str, Any] = {
            "job": "j", "tenant": "default", "generation": 1, "rank": 0, "epoch": 0, "seed": 7, "source": 0,
            "manifest": "m", "spec": spec, "shard": 0, "uri": uri_of(stored.path), "format": stored.format,
            "rows": stored.rows, "bytes": stored.size, "content_id": stored.content_id, "first_id": 0, "first_row": 0,
            "last_row": stored.rows, "workers": (self.worker,), "expires_ms": int(time.time() * 1000) + 60_000,
        }  # fmt: skip
        return m.Grant(**{**values, **changes})

    def ticket(self, grants: Sequence[m.Grant], which: Sequence[int] = (), rows: Sequence[int] = ()) -> bytes:
        return codec.encode(
            m.ReadTicket(
                grants=tuple(codec.sign(grant, "1", KEY) for grant in grants),
                which=np.asarray(which, "<u4").tobytes(),
                rows=np.asarray(rows, "<i8").tobytes(),
            )
        )

    def read(self, ticket: bytes) -> Result:
        return Result(list(self.connection.read(ticket)))


class Result:
    """All parts of a read."""

    def __init__(self, parts: list[tuple[pa.RecordBatch, m.ReadPart | None]]) -> None:
        self.batches = [batch for batch, _ in parts]
        self.parts = [part for _, part in parts if part is not None]
        self.table = pa.Table.from_batches(self.batches)
        self.ids: list[int] = self.table.column("__id__").to_pylist()
        self.bad = [bad for part in self.parts for bad in part.bad]
        self.done = self.parts[-1].done if self.parts else 0

    def tensor(self, name: str) -> np.ndarray:
        arrays = [b.column(name).to_numpy_ndarray() for b in self.batches if b.num_rows]
        return np.concatenate(arrays)


@contextlib.contextmanager
def bench(**arguments: Any) -> Iterator[Bench]:
    made = Bench(**arguments)
    try:
        yield made
    finally:
        made.close()
