"""Looking after the store: how it is, and history that is dropped where the store is our own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from dispatcher.etcd_store import EtcdStore
from dispatcher.memory_store import MemoryBackend, MemoryStore
from dispatcher.upkeep import COMMITS, LOOK, Upkeep
from feedline.etcd import Etcd


def upkeep(backend: MemoryBackend, commits: Callable[[], int | None], every: float | None = 60.0) -> Upkeep:
    return Upkeep(MemoryStore(backend), commits, compact_every=every, clock=backend.clock)


def test_history_is_dropped_after_some_time_or_many_commits() -> None:
    now, commits = 0.0, 0
    backend = MemoryBackend(lambda: now)
    found = upkeep(backend, lambda: commits)

    def looked(at: float, done: int) -> int:
        nonlocal now, commits
        now, commits = at, done
        found.look()
        return backend.compactions

    assert looked(59.0, 10) == 0
    assert looked(60.0, 10) == 1
    assert looked(200.0, 10) == 1, "nothing was committed since"
    assert looked(200.0, 11) == 2
    assert looked(201.0, 10 + COMMITS) == 2
    assert looked(201.0, 11 + COMMITS) == 3, "many commits in a short time"
    backend.available = False
    assert looked(400.0, 12 + COMMITS) == 3 and not found.info.ok
    backend.available = True
    assert looked(400.0, 12 + COMMITS) == 4 and found.info.ok, "tried again at once"


def test_history_of_others_stays() -> None:
    backend = MemoryBackend(lambda: 1e6)
    upkeep(backend, lambda: 10**6, every=None).look()
    upkeep(backend, lambda: None).look()
    assert backend.compactions == 0


class Slow(MemoryStore):
    """A store whose answers take as long as the test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def compact(self) -> None:
        self.go.wait(10)
        super().compact()


def test_a_long_compaction_holds_up_nobody() -> None:
    store = Slow()
    found = Upkeep(store, lambda: 1, compact_every=0.01)
    found.start()
    began = time.monotonic()
    assert found.info.ok and time.monotonic() - began < LOOK
    store.go.set()
    found.close()


def test_an_etcd_of_our_own_does_not_grow(tmp_path: Path) -> None:
    """3,000 commits of 10 changes each to the same 1,000 records: what is in use stays the same between round 20 and round
    100, while twenty times as much is written."""
    server = Etcd(tmp_path / "data", log=tmp_path / "etcd.log", fsync=False)
    server.start()
    store = EtcdStore([server.address])
    term = store.campaign("me", 60, lambda _: False)
    assert term is not None
    sequence = 0
    # looks by hand: what is in use right after a look depends on how much was written meanwhile
    found = Upkeep(store, lambda: sequence, compact_every=1e-6)

    def settled() -> int:
        """Bytes in use once history is gone: the least of some looks, as etcd counts pages as free only after the commits
        that follow."""
        nonlocal sequence
        sizes = []
        for _ in range(15):
            sequence = store.commit(term, sequence, {"r/0": bytes(768)}, [])
            found.look()
            time.sleep(0.06)
            sizes.append(store.info().db_bytes)
        return min(sizes)

    try:
        at: dict[int, int] = {}
        written = 0
        for number in range(1, 101):
            for _ in range(30):
                puts = {f"r/{(sequence * 10 + i) % 1000}": sequence.to_bytes(8, "big") * 96 for i in range(10)}
                sequence = store.commit(term, sequence, puts, [])
                written += sum(map(len, puts.values()))
            store.keep_alive(term)
            found.look()
            if number in (20, 100):
                at[number] = settled()
        assert at[100] < 1.1 * at[20], at
        assert written > 20 * at[100], (written, at)
        assert len(store.load()[0]) == 1000
    finally:
        store.close()
        server.stop()
