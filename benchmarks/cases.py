"""One function per benchmark: each runs once and returns its figures, its comparison beside it in the same run."""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import torch
from bare import BareServer, start_bare_server
from PIL import Image

import manifests
from feedline.local import LocalCluster
from manifests.wire import messages as m
from trainer_client import RemoteDataLoader, Shuffle


class Bench:
    """A cluster of one worker, the datasets, and a bare Flight server in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._jobs = 0

    def __enter__(self) -> Bench:
        self.cluster = LocalCluster(self.folder / "cluster", memory="3GiB", lease="10s", fsync=False)
        self.cluster.start(1)
        for name, shape, dtype, rows in (
            ("images", (224, 224, 3), "uint8", 1280),
            ("tokens", (1024,), "int32", 100_000),
        ):
            self._register(_arrays(self.folder / name, name, shape, dtype, rows))
        self._register(_pictures(self.folder / "jpeg", 512))
        self._register(_many_shards(self.folder / "many"))
        self.bare: BareServer = start_bare_server()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bare.stop()
        self.cluster.end()

    def _register(self, manifest: manifests.Manifest) -> None:
        with self.cluster.client(30.0) as client:
            client.register(manifest)

    def loader(self, dataset: str, batch_size: int, **settings: object) -> RemoteDataLoader:
        """A loader of a job of its own."""
        self._jobs += 1
        settings = {"seed": self._jobs} | settings
        return RemoteDataLoader(
            self.cluster.address,
            dataset=dataset,
            job=f"bench-{self._jobs}",
            batch_size=batch_size,
            **settings,  # type: ignore[arg-type]
        )


# -- data ----------------------------------------------------------------------------------------------------------


def _arrays(folder: Path, name: str, shape: tuple[int, ...], dtype: str, rows: int) -> manifests.Manifest:
    folder.mkdir()
    random = np.random.default_rng(0)
    for shard in range(8):
        values = random.integers(0, 200, (rows // 8, *shape)).astype(dtype)
        column = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
        schema = pa.schema([("x", column.type)])
        with pa.OSFile(str(folder / f"{shard}.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for at in range(0, len(column), 64):
                writer.write_batch(pa.record_batch([column[at : at + 64]], schema=schema))
    return manifests.build(str(folder), name=name, version="1")


def photo(number: int) -> bytes:
    """A JPEG of 500 x 375 at quality 90 with picture-like content (about 40 kB)."""
    random = np.random.default_rng(number)
    small = random.integers(0, 255, (48, 64, 3), np.uint8)
    smooth = np.asarray(Image.fromarray(small).resize((500, 375), Image.Resampling.BICUBIC), np.int16)
    noisy = np.clip(smooth + random.integers(-6, 7, smooth.shape, np.int16), 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(noisy).save(out, "JPEG", quality=90)
    return out.getvalue()


def _pictures(folder: Path, count: int) -> manifests.Manifest:
    import tarfile

    folder.mkdir()
    photos = [photo(n) for n in range(64)]
    for shard in range(8):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(count // 8):
                data = photos[(shard * 8 + number) % 64]
                info = tarfile.TarInfo(f"{shard}-{number:05d}.jpg")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return manifests.build(str(folder), name="jpeg", version="1")


def _many_shards(folder: Path) -> manifests.Manifest:
    import tarfile

    folder.mkdir()
    for shard in range(100):
        with tarfile.open(folder / f"{shard:03d}.tar", "w") as tar:
            for number in range(200):
                info = tarfile.TarInfo(f"{shard:03d}-{number:03d}.cls")
                info.size = 1
                tar.addfile(info, io.BytesIO(b"7"))
    return manifests.build(str(folder), name="many", version="1")


# -- benchmarks ----------------------------------------------------------------------------------------------------


def _drain(batches: Iterator[dict[str, torch.Tensor]], field: str) -> tuple[float, float, float, int]:
    """(seconds from the second batch on, bytes in them, CPU seconds of this process in them, rows)."""
    next(batches)
    start, cpu, size, rows = time.perf_counter(), time.process_time(), 0, 0
    for batch in batches:
        size += batch[field].nbytes
        rows += len(batch[field])
    return time.perf_counter() - start, size, time.process_time() - cpu, rows


def _bare(bench: Bench, row_bytes: int, rows: int, batch_size: int) -> tuple[float, float, float]:
    """A bare Flight stream of as many bytes in 2 MB messages, each row copied once into a preallocated tensor."""
    client = fl.connect(bench.bare.address)
    target = torch.empty((batch_size, row_bytes), dtype=torch.uint8).numpy()
    start, cpu, size, place = time.perf_counter(), time.process_time(), 0, 0
    for chunk in client.do_get(fl.Ticket(f"{row_bytes}/{rows}".encode())):
        values = chunk.data.column(0)
        flat = values.flatten().to_numpy().reshape(len(values), row_bytes)
        done = 0
        while done < len(flat):
            count = min(batch_size - place, len(flat) - done)
            target[place : place + count] = flat[done : done + count]
            place, done = (place + count) % batch_size, done + count
        size += flat.nbytes
    client.close()
    return time.perf_counter() - start, size, time.process_time() - cpu


def transport(bench: Bench) -> dict[str, float]:
    """Decoded pictures (224 x 224 x 3 uint8), shuffled, against a bare Flight stream."""
    with bench.loader("images", 64, epochs=2) as loader:
        seconds, size, cpu, _ = _drain(iter(loader), "x")
    bare_seconds, bare_size, bare_cpu = _bare(bench, 224 * 224 * 3, 2560, 64)
    rate, bare = size / seconds / 1e9, bare_size / bare_seconds / 1e9
    return {
        "feedline GB/s": rate,
        "bare Flight + copy GB/s": bare,
        "ratio": rate / bare,
        "client CPU s/GB": cpu / size * 1e9,
        "bare client CPU s/GB": bare_cpu / bare_size * 1e9,
    }


def tokens(bench: Bench) -> dict[str, float]:
    """Token rows (int32 [1024]), shuffled and in stored order, batches of 256."""
    found = {}
    for name, shuffle in (("shuffled", Shuffle()), ("stored order", None)):
        with bench.loader("tokens", 256, shuffle=shuffle) as loader:
            seconds, _, _, rows = _drain(iter(loader), "x")
        found[f"{name} rows/s"] = rows / seconds
    return found


def decode(bench: Bench) -> dict[str, float]:
    """JPEG 500 x 375 decoded and resized (bilinear, antialias) to 224 x 224 through the service, against the same code in
    this process on as many threads."""
    import os
    from concurrent.futures import ThreadPoolExecutor

    pipeline = manifests.Pipeline([manifests.DecodeImage(), manifests.Resize((224, 224))])
    with bench.loader("jpeg", 64, pipeline=pipeline, epochs=2) as loader:
        seconds, _, _, rows = _drain(iter(loader), "image")
    photos = [photo(n) for n in range(64)] * 8

    def one(data: bytes) -> np.ndarray:
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        return np.asarray(picture.resize((224, 224), Image.Resampling.BILINEAR))

    start = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, photos))
    here = len(photos) / (time.perf_counter() - start)
    return {"feedline img/s": rows / seconds, "in-process img/s": here, "ratio": rows / seconds / here}


def position(bench: Bench) -> dict[str, float]:
    """Saving the position: time and size at 10 % and 90 % of an epoch, first batch after a resume there."""
    found: dict[str, float] = {}
    states = {}
    with bench.loader("many", 32) as loader:
        steps = len(loader)
        for step, _ in enumerate(loader):
            for share in (10, 90):
                if step == steps * share // 100:
                    start = time.perf_counter()
                    states[share] = loader.state_dict()
                    found[f"state_dict at {share} % ms"] = (time.perf_counter() - start) * 1e3
                    found[f"state at {share} % bytes"] = len(pickle.dumps(states[share]))
    for share, state in states.items():
        with bench.loader("many", 32, seed=None) as loader:
            loader.load_state_dict(state)
            start = time.perf_counter()
            next(iter(loader))
            found[f"first batch after a resume at {share} % ms"] = (time.perf_counter() - start) * 1e3
    found["resume at 90 % / 10 %"] = (
        found["first batch after a resume at 90 % ms"] / found["first batch after a resume at 10 % ms"]
    )
    return found


def control(bench: Bench) -> dict[str, float]:
    """Control calls: a status, and an ask for 8 grants, each with its commit in etcd where it has one."""
    with bench.loader("many", 32) as loader, bench.cluster.client(10.0) as client:
        next(iter(loader))
        run = loader._run
        if run is None:
            raise RuntimeError("the loader has no generation")
        asks, looks = [], []
        for turn in range(50):
            start = time.perf_counter()
            client.call(
                m.AskGrants(
                    job=run.config.job,
                    generation=run.generation,
                    rank=0,
                    holder=run._holder.uid,
                    epoch=0,
                    shards=tuple(m.ShardAsk(source=0, shard=(turn * 8 + n) % 100) for n in range(8)),
                ),
                m.Grants,
            )
            asks.append(time.perf_counter() - start)
            start = time.perf_counter()
            client.document(m.GetStatus())
            looks.append(time.perf_counter() - start)
    return {
        "ask for 8 grants p50 ms": float(np.median(asks)) * 1e3,
        "ask for 8 grants p99 ms": float(np.quantile(asks, 0.99)) * 1e3,
        "status p50 ms": float(np.median(looks)) * 1e3,
    }


__all__ = ["Bench", "control", "decode", "position", "tokens", "transport"]
