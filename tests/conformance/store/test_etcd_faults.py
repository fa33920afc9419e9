"""What only a real etcd can do to the store: die, freeze, come back, lose its data, lose an answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from relay import Relay

from dispatcher.etcd_store import EtcdStore, is_unsafe
from dispatcher.store import CommitUnknown, LeaderLost, StoreUnavailable, Term
from feedline.etcd import Etcd
from manifests.errors import ConfigError
from manifests.wire.connection import Address

DEADLINE = 3.0


def alive(_record: str) -> bool:
    return False


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    server = Etcd(tmp_path / "data", log=tmp_path / "etcd.log", fsync=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def store(etcd: Etcd) -> Iterator[EtcdStore]:
    made = EtcdStore([etcd.address])
    yield made
    made.close()


def lead(store: EtcdStore, ttl: float = 30) -> Term:
    term = store.campaign("me", ttl, alive)
    assert term is not None
    return term


def test_killed_etcd_fails_calls_in_time_and_goes_on_with_its_data(etcd: Etcd, store: EtcdStore) -> None:
    term = lead(store)
    assert store.commit(term, 0, {"a": b"1"}, []) == 1
    before = etcd.address
    etcd.kill()
    for call in (store.load, store.leader, lambda: store.keep_alive(term)):
        start = time.monotonic()
        with pytest.raises(StoreUnavailable, match=str(before)):
            call()
        assert time.monotonic() - start < DEADLINE
    start = time.monotonic()
    with pytest.raises(CommitUnknown, match=r"commit 2 of term 1: etcd at .* gave no answer in"):
        store.commit(term, 1, {"a": b"2"}, [])
    assert time.monotonic() - start < DEADLINE
    assert etcd.restart() == before
    # etcd starts leases again at their full length: the term is still good
    assert store.load() == ({"a": b"1"}, 1)
    assert store.keep_alive(term) == term.ttl
    assert store.commit(term, 1, {"a": b"3"}, []) == 2


def test_frozen_etcd_fails_calls_in_time(etcd: Etcd, store: EtcdStore) -> None:
    term = lead(store)
    etcd.child.pause()
    try:
        start = time.monotonic()
        with pytest.raises(CommitUnknown):
            store.commit(term, 0, {"a": b"1"}, [])
        assert time.monotonic() - start < DEADLINE
        start = time.monotonic()
        with pytest.raises(StoreUnavailable):
            store.load()
        assert time.monotonic() - start < DEADLINE
    finally:
        etcd.child.resume()
    records, sequence = store.load()
    assert (records, sequence) in (({}, 0), ({"a": b"1"}, 1))


def test_short_freeze_is_ridden_out_and_the_commit_applied_once(etcd: Etcd, store: EtcdStore) -> None:
    term = lead(store)
    etcd.child.pause()
    waker = threading.Timer(1.2, lambda: etcd.child.resume())
    waker.start()
    try:
        assert store.commit(term, 0, {"a": b"1"}, []) == 1
    finally:
        waker.join()
        etcd.child.resume()
    assert store.load() == ({"a": b"1"}, 1)


def test_an_applied_commit_whose_answer_was_lost_is_recognised(etcd: Etcd) -> None:
    expected: dict[str, bytes] = {}
    for sequence in range(4):
        with Relay((etcd.address.host, etcd.address.port)) as relay:
            store = EtcdStore([Address(*relay.address)])
            term = lead(store)
            relay.hold_answers()
            mender = threading.Timer(0.2, lambda relay=relay: (relay.cut(), relay.mend()))
            mender.start()
            expected["a"] = b"%d" % sequence
            assert store.commit(term, sequence, expected, []) == sequence + 1
            mender.join()
            assert store.load() == (expected, sequence + 1)
            store.resign(term)
            store.close()


def test_a_commit_without_answer_is_unknown_though_applied(etcd: Etcd, store: EtcdStore) -> None:
    with Relay((etcd.address.host, etcd.address.port)) as relay:
        deaf = EtcdStore([Address(*relay.address)])
        term = lead(deaf)
        relay.hold_answers()
        with pytest.raises(CommitUnknown):
            deaf.commit(term, 0, {"a": b"1"}, [])
        deaf.close()
    assert store.load() == ({"a": b"1"}, 1)
    with pytest.raises(LeaderLost, match="the last one is 1"):
        store.commit(term, 0, {"a": b"2"}, [])


def test_wiped_etcd_ends_the_term(etcd: Etcd, store: EtcdStore) -> None:
    """Case 23, the store's part: an empty etcd is noticed, and a new term begins."""
    term = lead(store)
    store.commit(term, 0, {"a": b"1"}, [])
    etcd.wipe()
    etcd.start()
    with pytest.raises(LeaderLost):
        store.keep_alive(term)
    with pytest.raises(LeaderLost):
        store.commit(term, 1, {"a": b"2"}, [])
    assert store.leader() is None and store.load() == ({}, 0)
    assert store.commit(lead(store), 0, {"b": b"1"}, []) == 1


def test_one_dead_endpoint_of_several_does_no_harm(etcd: Etcd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        gone = Address("127.0.0.1", free.getsockname()[1])
    store = EtcdStore([gone, etcd.address])
    term = lead(store)
    for sequence in range(10):
        assert store.commit(term, sequence, {"a": b"1"}, []) == sequence + 1
    store.close()


def test_a_full_etcd_refuses_and_says_so(tmp_path: Path) -> None:
    server = Etcd(tmp_path / "data", log=tmp_path / "etcd.log", fsync=False, quota=1 << 20)
    server.start()
    store = EtcdStore([server.address])
    term = lead(store)
    try:
        with pytest.raises(StoreUnavailable, match="resource_exhausted"):
            for sequence in range(100):
                store.commit(term, sequence, {f"k{sequence}": bytes(200_000)}, [])
        assert store.info().ok is False and store.info().members == 1
    finally:
        store.close()
        server.stop()


def test_prefixes_keep_clusters_apart(etcd: Etcd, store: EtcdStore) -> None:
    other = EtcdStore([etcd.address], prefix="/feedline/v1/other/")
    store.commit(lead(store), 0, {"a": b"1"}, [])
    other.commit(lead(other), 0, {"b": b"2"}, [])
    assert store.load() == ({"a": b"1"}, 1) and other.load() == ({"b": b"2"}, 1)
    other.close()


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="no etcd address"):
        EtcdStore([])
    with pytest.raises(ConfigError, match="does not end in '/'"):
        EtcdStore([Address("127.0.0.1", 1)], prefix="/x")
    with pytest.raises(ConfigError, match="mix IPv4 and IPv6"):
        EtcdStore([Address("127.0.0.1", 1), Address("::1", 1)])


def test_etcd_releases_that_lose_data() -> None:
    unsafe = {version: is_unsafe(version) for version in ("3.4.23", "3.5.0", "3.5.4", "3.5.5", "3.5.13", "3.6.1", "x")}
    assert [version for version, bad in unsafe.items() if bad] == ["3.5.0", "3.5.4"]
