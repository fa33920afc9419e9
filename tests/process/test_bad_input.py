"""Input that is wrong gets the error type the contract names, and nothing hangs."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import TestCluster
from PIL import Image
from stored_data import write_tar

import manifests
from trainer_client import RemoteDataLoader
from trainer_client.errors import (
    BadSample,
    ConfigError,
    JobBusy,
    ShardChanged,
    ShardMissing,
    TooManyBadSamples,
    UnknownDataset,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    with TestCluster(workers=2) as found:
        yield found


def small(folder: Path, rows: int = 24, shards: int = 3) -> list[Path]:
    """Tars of ``rows`` samples with a class and 100 random bytes each."""
    generator = random.Random(str(folder))  # no two tests share content: caches know shards by it
    paths = []
    for shard in range(shards):
        members = []
        for row in range(shard * rows // shards, (shard + 1) * rows // shards):
            members += [(f"{row:04d}.cls", b"%d" % row), (f"{row:04d}.bin", generator.randbytes(100))]
        paths.append(write_tar(folder / f"s-{shard}.tar", members))
    return paths


def picture(number: int) -> bytes:
    """A JPEG of 32 x 48 whose content depends on ``number``."""
    pixels = np.random.default_rng(number).integers(0, 255, (32, 48, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=90)
    return out.getvalue()


def test_an_unknown_dataset_names_those_that_exist(cluster: TestCluster, tmp_path: Path) -> None:
    small(tmp_path)
    cluster.register(manifests.build(str(tmp_path), name="known", version="7"))
    for wanted in ("unknown", "known@8"):
        with (
            RemoteDataLoader(cluster.address, dataset=wanted, job="j", batch_size=4, timeout=10) as loader,
            pytest.raises(UnknownDataset, match=r"known(@7)?"),
        ):
            iter(loader)


def test_a_manifest_file_is_uploaded_and_a_broken_one_refused(cluster: TestCluster, tmp_path: Path) -> None:
    small(tmp_path)
    path = tmp_path / "file.parquet"
    manifests.build(str(tmp_path / "*.tar"), name="from-file", version="1").save(path)
    with RemoteDataLoader(cluster.address, dataset=str(path), job="file", batch_size=4, timeout=10) as loader:
        assert sorted(i for b in loader for i in b["__id__"].tolist()) == list(range(24))
    path.write_bytes(path.read_bytes()[:-20])
    with (
        RemoteDataLoader(cluster.address, dataset=str(path), job="file", batch_size=4, timeout=10) as loader,
        pytest.raises(ConfigError, match=r"file\.parquet"),
    ):
        iter(loader)


def test_a_shard_changed_on_disk(cluster: TestCluster, tmp_path: Path) -> None:
    """Same size, other bytes: ShardChanged that names the shard. Under on_error='skip' it is passed over as a shard in
    quarantine, never as bad samples: no other bytes come, and the audit lists it."""
    paths = small(tmp_path)
    manifest = manifests.build(str(tmp_path), name="changed", version="1")
    cluster.register(manifest)
    data = bytearray(paths[1].read_bytes())
    data[600] ^= 0xFF
    paths[1].write_bytes(data)
    settings: dict[str, Any] = {"dataset": "changed", "batch_size": 4, "timeout": 20}
    started = time.monotonic()
    with (
        RemoteDataLoader(cluster.address, job="changed-raise", **settings) as loader,
        pytest.raises(ShardChanged, match=r"s-1\.tar"),
    ):
        list(loader)
    assert time.monotonic() - started < 10.0
    with RemoteDataLoader(cluster.address, job="changed-skip", on_error="skip", **settings) as loader:
        ids = {i for batch in loader for i in batch["__id__"].tolist()}
    first = int(manifest.shard_rows[0])
    gone = set(range(first, first + int(manifest.shard_rows[1])))
    assert ids == set(range(manifest.rows)) - gone
    books = cluster.audit("changed-skip")
    assert (books["state"], books["quarantined"], books["skipped"], books["lost"]) == ("complete", len(gone), 0, 0)
    assert [(s["shard"], s["code"]) for s in books["shards"]] == [(1, "shard-changed")]


def test_a_shard_that_is_gone(cluster: TestCluster, tmp_path: Path) -> None:
    paths = small(tmp_path)
    cluster.register(manifests.build(str(tmp_path), name="gone", version="1"))
    paths[2].unlink()
    with (
        RemoteDataLoader(cluster.address, dataset="gone", job="gone", batch_size=4, timeout=20) as loader,
        pytest.raises(ShardMissing, match=r"s-2\.tar"),
    ):
        list(loader)


def broken_pictures(folder: Path) -> manifests.Manifest:
    """64 JPEGs in 4 shards; number 13 is empty, 14 ten random bytes, 40 text."""
    wrong = {13: b"", 14: random.Random(2).randbytes(10), 40: b"this is not a picture\n" * 5}
    for shard in range(4):
        members = []
        for number in range(shard * 16, shard * 16 + 16):
            members += [(f"{number:03d}.jpg", wrong.get(number, picture(number))), (f"{number:03d}.cls", b"1")]
        write_tar(folder / f"p-{shard}.tar", members)
    return manifests.build(str(folder), name="broken", version="1")


@pytest.mark.parametrize("order", ["deterministic", "dynamic"])
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_a_dataset_without_a_good_row_is_an_error_soon(
    cluster: TestCluster, tmp_path: Path, tail: str, order: str
) -> None:
    """Skipped rows are made up for by pads, but there is nothing to repeat."""
    write_tar(tmp_path / "p.tar", [(f"{number:03d}.jpg", b"no picture") for number in range(400)])
    cluster.register(manifests.build(str(tmp_path), name=f"none-{tail}-{order}", version="1"))
    pipeline = manifests.Pipeline([manifests.DecodeImage(), manifests.Resize((32, 48))])
    started = time.monotonic()
    with (
        RemoteDataLoader(
            cluster.address,
            dataset=f"none-{tail}-{order}",
            job=f"none-{tail}-{order}",
            batch_size=32,
            order=order,
            tail=tail,
            pipeline=pipeline,
            on_error="skip",
            max_bad=1.0,
            timeout=20,
        ) as loader,
        pytest.raises(TooManyBadSamples, match="no row of epoch 0 is good"),
    ):
        list(loader)
    assert time.monotonic() - started < 15.0


def test_bad_pictures_are_skipped_alone_and_named(cluster: TestCluster, tmp_path: Path) -> None:
    """Case 32: three bad pictures of 64, two epochs: the others come unchanged, each bad one is one named skip."""
    cluster.register(broken_pictures(tmp_path))
    pipeline = manifests.Pipeline([manifests.DecodeImage(), manifests.Resize((32, 48))])
    with RemoteDataLoader(
        cluster.address,
        dataset="broken",
        job="skip",
        batch_size=8,
        epochs=2,
        pipeline=pipeline,
        on_error="skip",
        max_bad=3,
        timeout=20,
    ) as loader:
        batches = list(loader)
    assert len(batches) == 16
    good = sorted(set(range(64)) - {13, 14, 40})
    for epoch in (batches[:8], batches[8:]):
        ids = [i for b in epoch for i in b["__id__"][~b["__pad__"]].tolist()]
        assert sorted(ids) == good
        for batch in epoch:
            assert len(batch["__id__"]) == 8
            for place, number in enumerate(batch["__id__"].tolist()):
                expected = np.asarray(Image.open(io.BytesIO(picture(number))).convert("RGB"))
                assert np.array_equal(batch["image"][place].numpy(), expected)
    for epoch_number in (0, 1):
        books = cluster.audit("skip", epoch_number)
        assert (books["state"], books["skipped"], books["lost"], books["repeated"]) == ("complete", 3, 0, 0), books
        assert books["acknowledged"] == 61


def test_a_bad_picture_is_raised_with_shard_key_and_reason(cluster: TestCluster, tmp_path: Path) -> None:
    cluster.register(broken_pictures(tmp_path))
    pipeline = manifests.Pipeline([manifests.DecodeImage(), manifests.Resize((32, 48))])
    with RemoteDataLoader(
        cluster.address, dataset="broken", job="raise", batch_size=8, pipeline=pipeline, shuffle=None, timeout=20
    ) as loader:
        iterator = iter(loader)
        assert next(iterator)["__id__"].tolist() == list(range(8))
        with pytest.raises(BadSample, match=r"013.*p-0\.tar") as caught:
            next(iterator)
        assert caught.value.detail["key"] == "013"
        assert caught.value.cause


def test_too_many_bad_samples(cluster: TestCluster, tmp_path: Path) -> None:
    cluster.register(broken_pictures(tmp_path))
    pipeline = manifests.Pipeline([manifests.DecodeImage(), manifests.Resize((32, 48))])
    with (
        RemoteDataLoader(
            cluster.address,
            dataset="broken",
            job="many",
            batch_size=8,
            pipeline=pipeline,
            on_error="skip",
            max_bad=2,
            timeout=20,
        ) as loader,
        pytest.raises(TooManyBadSamples, match="max_bad allows 2"),
    ):
        list(loader)


def test_a_pipeline_that_does_not_fit_is_refused_at_the_start(cluster: TestCluster, tmp_path: Path) -> None:
    small(tmp_path)
    cluster.register(manifests.build(str(tmp_path), name="plain", version="1"))
    pipeline = manifests.Pipeline([manifests.DecodeImage()])
    with (
        RemoteDataLoader(
            cluster.address, dataset="plain", job="plain", batch_size=8, pipeline=pipeline, timeout=10
        ) as loader,
        pytest.raises(ConfigError, match="bin"),
    ):
        iter(loader)


SCRIPT = """
import sys, time
from trainer_client import RemoteDataLoader
loader = RemoteDataLoader(sys.argv[1], dataset="signals", job="signals", batch_size=1, seed=1, timeout=20)
for step, batch in enumerate(loader):
    if step == 3:
        print("reached", flush=True)
    if step > 3:
        time.sleep(float(sys.argv[2]))
loader.close()
print("done", step + 1, flush=True)
"""


def start_trainer(cluster: TestCluster, pause: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, cluster.address, str(pause)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent.parent,
    )


@pytest.mark.parametrize("signal_name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_trainer_ends_cleanly_on_every_signal(cluster: TestCluster, tmp_path: Path, signal_name: str) -> None:
    """Case 21: SIGINT, SIGTERM and SIGKILL of the trainer mid-batch: it is gone at once, one KeyboardInterrupt trace at
    the most, and the next start gets the rank without waiting for a lease."""
    import signal

    small(tmp_path)
    cluster.register(manifests.build(str(tmp_path), name="signals", version=signal_name))
    trainer = start_trainer(cluster, 30.0)
    assert trainer.stdout is not None
    assert trainer.stdout.readline().strip() == "reached"
    trainer.send_signal(getattr(signal, signal_name))
    started = time.monotonic()
    _, errors = trainer.communicate(timeout=10)
    assert time.monotonic() - started < 6.0
    assert trainer.returncode != 0
    assert errors.count("KeyboardInterrupt") <= 1, errors
    assert errors.count("Traceback") <= 1, errors
    started = time.monotonic()
    again = start_trainer(cluster, 0.0)
    out, errors = again.communicate(timeout=30)
    assert "done 24" in out, errors
    assert time.monotonic() - started < 12.0


def test_a_rank_held_by_a_live_process_is_busy(cluster: TestCluster, tmp_path: Path) -> None:
    """JobBusy names host and pid, soon, while the holder lives."""
    small(tmp_path)
    cluster.register(manifests.build(str(tmp_path), name="signals", version="busy"))
    trainer = start_trainer(cluster, 60.0)
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline().strip() == "reached"
        with RemoteDataLoader(
            cluster.address, dataset="signals", job="signals", batch_size=1, seed=1, timeout=20
        ) as second:
            started = time.monotonic()
            with pytest.raises(JobBusy, match=rf"{trainer.pid}"):
                iter(second)
            assert time.monotonic() - started < 8.0
    finally:
        trainer.kill()
        trainer.communicate()


def test_no_address_at_all() -> None:
    """No default is tried."""
    assert "FEEDLINE_DISPATCHER" not in os.environ
    loader = RemoteDataLoader(dataset="x", job="j", batch_size=1)
    with pytest.raises(ConfigError, match="FEEDLINE_DISPATCHER"):
        len(loader)


FORKS = """
import os, sys
import torch.utils.data
from trainer_client import RemoteDataLoader, RemoteDataset
from trainer_client.errors import ConfigError

def main():
    loader = RemoteDataLoader(sys.argv[1], dataset="forks", job="parent", batch_size=4, timeout=10)
    iterator = iter(loader)
    next(iterator)
    child = os.fork()
    if child == 0:
        try:
            next(iterator)
        except ConfigError as error:
            print("child:", error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    for context in ("fork", "spawn"):
        data = RemoteDataset(sys.argv[1], dataset="forks", job=context, batch_size=4, timeout=10)
        batches = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context=context)
        try:
            print(context, sum(len(batch["__id__"]) for batch in batches), flush=True)
        except ConfigError as error:
            print(context, "refused:", str(error).splitlines()[-1], flush=True)
    print("parent", sum(len(batch["__id__"]) for batch in iterator), flush=True)
    loader.close()

if __name__ == "__main__":
    main()
"""


def test_a_fork_after_connecting_is_refused_and_spawn_works(cluster: TestCluster, tmp_path: Path) -> None:
    """Case 22: connections do not survive a fork: what is forked after them gets an error at once, spawned processes work, the
    parent goes on."""
    (tmp_path / "data").mkdir()
    small(tmp_path / "data")
    cluster.register(manifests.build(str(tmp_path / "data"), name="forks", version="1"))
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    started = time.monotonic()
    done = subprocess.run([sys.executable, script, cluster.address], capture_output=True, text=True, timeout=60)
    assert time.monotonic() - started < 30.0
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0].startswith("child: this loader was connected before the process was forked")
    assert "fork refused:" in lines[1] and "spawn or forkserver" in lines[1]
    assert lines[2:] == ["spawn 24", "parent 20"]
