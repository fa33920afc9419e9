"""A loader that lives for many epochs keeps nothing of those that are over."""

from __future__ import annotations

import gc
import re
import threading
from pathlib import Path

from cluster import TestCluster
from stored_data import write_tar

import manifests
from dispatcher.etcd_store import EtcdStore
from manifests.wire import messages as m
from trainer_client import RemoteDataLoader
from trainer_client.books import Books
from trainer_client.chunks import Chunk
from trainer_client.feed import Feed


def test_ended_epochs_leave_nothing_behind(tmp_path: Path) -> None:
    """Case 14: 60 epochs of an endless loader; reports, books, feeds and chunks of the old ones are gone, and etcd's
    database is small."""
    write_tar(tmp_path / "a.tar", [(f"{row}.cls", b"1") for row in range(8)])
    gc.collect()
    before = [type(found) for found in gc.get_objects()]  # what other tests of this process keep
    with TestCluster(workers=1) as cluster:
        cluster.register(manifests.build(str(tmp_path), name="long", version="1"))
        with RemoteDataLoader(
            cluster.address, dataset="long", job="long", batch_size=4, epochs=None, timeout=20
        ) as loader:
            for step, _ in enumerate(loader):
                if step == 120:
                    break
            loader._run.reporter.flush(5.0)  # type: ignore[union-attr]
            gc.collect()
            alive = [type(found) for found in gc.get_objects()]
            for kind, most in ((m.EpochProgress, 12), (Books, 4), (Feed, 3), (Chunk, 8)):
                left = alive.count(kind) - before.count(kind)
                assert left <= most, f"{left} {kind.__name__} are left"
        assert cluster.audit("long", 50)["state"] == "complete"
        assert cluster.status()["etcd"]["db_bytes"] < 4 << 20


def test_a_hundred_epochs_take_no_more_room_in_the_store(tmp_path: Path) -> None:
    """Two ranks, 100 epochs, an etcd that the dispatcher owns. But for one small record per epoch (the last 1,000 are
    kept) there are as many records after epoch 100 as after epoch 20, and the database has hardly grown."""
    write_tar(tmp_path / "a.tar", [(f"{row}.cls", b"1") for row in range(16)])
    with TestCluster(workers=1) as cluster:
        cluster.register(manifests.build(str(tmp_path), name="hundred", version="1"))
        store = EtcdStore((cluster.local.etcd.address,))
        gate = threading.Barrier(3, timeout=120)
        failed: list[BaseException] = []

        def train(rank: int) -> None:
            try:
                with RemoteDataLoader(
                    cluster.address, dataset="hundred", job="hundred", batch_size=4, epochs=None, timeout=60, rank=rank,
                    world_size=2,
                ) as loader:  # fmt: skip
                    for step, _ in enumerate(loader, 1):
                        if step in (2 * 20, 2 * 60, 2 * 100):
                            loader._run.reporter.flush(10.0)  # type: ignore[union-attr]
                            gate.wait()
                            gate.wait()
                        if step == 2 * 100:
                            break
            except BaseException as error:
                failed.append(error)
                gate.abort()

        ranks = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
        for thread in ranks:
            thread.start()
        seen = []
        try:
            for _ in range(3):
                gate.wait()
                kept = store.load()[0]
                folded = {key: value for key, value in kept.items() if re.search(r"/epochs/\d+$", key)}
                sizes = [len(key) + len(value) for key, value in folded.items()]
                seen.append((len(kept) - len(folded), sizes, cluster.status()["etcd"]["db_bytes"]))
                gate.wait()
        except threading.BrokenBarrierError:
            raise failed[0] from None
        finally:
            for thread in ranks:
                thread.join(30)
            store.close()
        assert not failed, failed
        others, sizes, database = zip(*seen)
        assert max(others) <= min(others) + 2, f"records besides those of epochs: {others}"
        assert [len(found) for found in sizes] == sorted(len(found) for found in sizes) and len(sizes[2]) <= 100
        assert max(sizes[2]) < 400, f"a record of an epoch takes {max(sizes[2])} bytes"
        assert database[2] <= database[0] + (512 << 10), (
            f"bytes of the database after 20, 60 and 100 epochs: {database}"
        )
        assert cluster.audit("hundred", 98)["state"] == "complete"
