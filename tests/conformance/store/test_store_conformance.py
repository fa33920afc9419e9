"""What every store must do, run on the twin in memory and on a real etcd."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatcher.etcd_store import EtcdStore
from dispatcher.memory_store import MemoryBackend, MemoryStore
from dispatcher.store import (
    MAX_BYTES,
    MAX_OPERATIONS,
    OPERATION_BYTES,
    CommitUnknown,
    LeaderLost,
    Store,
    StoreInfo,
    StoreUnavailable,
    Term,
    commit_bytes,
)
from feedline.etcd import Etcd

#: no call may take longer: the adapter's deadline of 2 s and some slack for a busy machine
DEADLINE = 3.0
_prefixes = itertools.count()


def alive(_record: str) -> bool:
    return False


def dead(_record: str) -> bool:
    return True


class Memory:
    """The twin; time is a number."""

    def __init__(self) -> None:
        self.now = 0.0
        self.backend = MemoryBackend(lambda: self.now)

    def make(self) -> Store:
        return MemoryStore(self.backend)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def go_away(self) -> None:
        self.backend.available = False

    def come_back(self) -> None:
        self.backend.available = True

    def close(self) -> None:
        pass


class RealEtcd:
    """Keys of their own on a running etcd; time is real."""

    def __init__(self, etcd: Etcd) -> None:
        self.etcd = etcd
        self.prefix = f"/test-{next(_prefixes)}/"
        self.made: list[EtcdStore] = []

    def make(self) -> Store:
        self.made.append(EtcdStore([self.etcd.address], prefix=self.prefix))
        return self.made[-1]

    def pass_time(self, seconds: float) -> None:
        # leases end on the server's clock, which looks every half second
        time.sleep(seconds + (0.8 if seconds >= 1 else 0.0))

    def go_away(self) -> None:
        self.etcd.child.pause()

    def come_back(self) -> None:
        self.etcd.child.resume()

    def close(self) -> None:
        for store in self.made:
            store.close()


@pytest.fixture(scope="module", autouse=True)
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    folder: Path = tmp_path_factory.mktemp("etcd")
    server = Etcd(folder / "data", log=folder / "etcd.log", fsync=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["memory", "etcd"])
def harness(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = Memory() if request.param == "memory" else RealEtcd(request.getfixturevalue("etcd"))
    yield made
    made.come_back()
    made.close()


def lead(store: Store, me: str = "me", ttl: float = 30.0, is_dead: Callable[[str], bool] = alive) -> Term:
    term = store.campaign(me, ttl, is_dead)
    assert term is not None
    return term


# -- leadership ----------------------------------------------------------------------------------------------------


def test_one_leads_and_others_see_who(harness: Any) -> None:
    one, two = harness.make(), harness.make()
    assert one.leader() is None
    lead(one, "one")
    assert two.campaign("two", 30, alive) is None
    assert one.campaign("one", 30, alive) is None
    assert one.leader() == two.leader() == "one"


def test_only_one_of_many_wins_a_race(harness: Any) -> None:
    stores = [harness.make() for _ in range(8)]
    won: list[Term | None] = []
    start = threading.Barrier(len(stores))

    def run(index: int) -> None:
        start.wait()
        won.append(stores[index].campaign(f"store {index}", 30, alive))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sum(term is not None for term in won) == 1 and len(won) == 8


def test_a_dead_leader_is_replaced_at_once_and_cannot_write(harness: Any) -> None:
    one, two = harness.make(), harness.make()
    old = lead(one, "one")
    assert one.commit(old, 0, {"a": b"1"}, []) == 1
    asked: list[str] = []
    new = two.campaign("two", 30, lambda record: bool(asked.append(record)) or True)
    assert asked == ["one"] and new is not None and new.number > old.number
    with pytest.raises(LeaderLost, match=r"term 1 .*two leads"):
        one.commit(old, 1, {"a": b"2"}, [])
    with pytest.raises(LeaderLost):
        one.keep_alive(old)
    assert two.load() == ({"a": b"1"}, 1)
    one.resign(old)
    assert two.leader() == "two"
    assert two.commit(new, 1, {"a": b"3"}, []) == 2


def test_a_lease_that_is_not_renewed_ends_the_term(harness: Any) -> None:
    one, two = harness.make(), harness.make()
    old = lead(one, "one", ttl=1)
    assert old.ttl >= 1
    harness.pass_time(old.ttl + 0.1)
    assert two.leader() is None
    with pytest.raises(LeaderLost):
        one.keep_alive(old)
    with pytest.raises(LeaderLost):
        one.commit(old, 0, {"a": b"1"}, [])
    new = lead(two, "two")
    assert new.number > old.number and two.load() == ({}, 0)


def test_keep_alive_holds_the_lease(harness: Any) -> None:
    store = harness.make()
    term = lead(store, ttl=2)
    for _ in range(5):
        harness.pass_time(0.7)
        assert store.keep_alive(term) == pytest.approx(term.ttl)
    assert store.leader() == "me"
    assert store.commit(term, 0, {}, []) == 1


def test_resigning_lets_the_next_one_lead_at_once(harness: Any) -> None:
    one, two = harness.make(), harness.make()
    old = lead(one)
    one.resign(old)
    one.resign(old)
    assert two.leader() is None
    assert lead(two, "two").number > old.number
    one.resign(old)
    assert two.leader() == "two"


# -- commits -------------------------------------------------------------------------------------------------------


def test_commits_put_delete_and_count(harness: Any) -> None:
    store = harness.make()
    term = lead(store)
    assert store.load() == ({}, 0)
    assert store.commit(term, 0, {"a/1": b"\0\xff", "a/2": b"", "b/ü~": b"x"}, ["never/there"]) == 1
    assert store.commit(term, 1, {"a/1": b"new"}, ["a/2"]) == 2
    assert store.commit(term, 2, {}, []) == 3
    assert harness.make().load() == ({"a/1": b"new", "b/ü~": b"x"}, 3)
    assert store.load("a/") == ({"a/1": b"new"}, 3)
    assert store.load("b") == ({"b/ü~": b"x"}, 3)
    assert store.load("c") == ({}, 3)


@pytest.mark.parametrize("wrong", [0, 1, 3, 4])
def test_a_wrong_sequence_number_is_refused_whole(harness: Any, wrong: int) -> None:
    store = harness.make()
    term = lead(store)
    for sequence in range(2):
        store.commit(term, sequence, {"a": b"old"}, [])
    with pytest.raises(LeaderLost, match="the last one is 2"):
        store.commit(term, wrong, {"a": b"new", "b": b"new"}, [])
    assert store.load() == ({"a": b"old"}, 2)
    assert store.commit(term, 2, {"a": b"new"}, []) == 3


def test_limits(harness: Any) -> None:
    store = harness.make()
    term = lead(store)
    full = {f"k{i}": b"x" for i in range(MAX_OPERATIONS - 1)}
    assert store.commit(term, 0, full, ["gone"]) == 1
    with pytest.raises(ValueError, match=f"limit is {MAX_OPERATIONS}"):
        store.commit(term, 1, full, ["gone", "too"])
    assert store.commit(term, 1, {"big": bytes(MAX_BYTES - OPERATION_BYTES - 3)}, []) == 2
    with pytest.raises(ValueError, match=f"limit is {MAX_BYTES}"):
        store.commit(term, 2, {"big": bytes(MAX_BYTES)}, [])
    with pytest.raises(ValueError, match="puts and deletes"):
        store.commit(term, 2, {"k": b""}, ["k"])
    assert store.load()[1] == 2


def test_the_fullest_commit_there_is_is_taken(harness: Any) -> None:
    """As many operations and bytes at once as ``check_limits`` lets through."""
    store = harness.make()
    term = lead(store)
    each = MAX_BYTES // MAX_OPERATIONS - OPERATION_BYTES
    keys = [f"{i:03}".ljust(each // 2, "k") for i in range(MAX_OPERATIONS)]
    puts = {key: bytes(each - len(key)) for key in keys}
    puts[keys[0]] += bytes(MAX_BYTES - commit_bytes(puts, ()))
    assert commit_bytes(puts, ()) == MAX_BYTES
    assert store.commit(term, 0, puts, []) == 1
    assert store.commit(term, 1, {}, keys) == 2 and store.load() == ({}, 2)


def test_the_first_cluster_id_stays(harness: Any) -> None:
    one, two = harness.make(), harness.make()
    one.check()
    assert one.cluster() == ""
    assert one.cluster("first") == "first" and two.cluster("second") == "first" and two.cluster() == "first"
    assert one.load() == ({}, 0)


def test_load_sees_everything_however_much_it_is(harness: Any) -> None:
    """Case 50: far more than a gRPC message holds by default, and more than one page."""
    store = harness.make()
    term = lead(store)
    expected: dict[str, bytes] = {}
    sequence = 0
    for block in range(9):
        puts = {f"big/{block}": bytes([block]) * (900 << 10)}
        puts |= {f"small/{block:02}/{i:03}": b"%d" % i for i in range(MAX_OPERATIONS - 1)}
        sequence = store.commit(term, sequence, puts, [])
        expected |= puts
    found, at = harness.make().load()
    assert found == expected and at == 9 and list(found) == sorted(expected)
    assert sum(map(len, found.values())) > 4 << 20
    assert len(store.load("small/03/")[0]) == MAX_OPERATIONS - 1


def test_compacting_keeps_the_records(harness: Any) -> None:
    store = harness.make()
    term = lead(store)
    for sequence in range(5):
        store.commit(term, sequence, {"a": b"%d" % sequence}, [])
    store.compact()
    store.compact()
    assert store.load() == ({"a": b"4"}, 5)
    assert store.commit(term, 5, {"a": b"5"}, []) == 6


# -- faults --------------------------------------------------------------------------------------------------------


def test_a_silent_store_fails_every_call_in_time_and_works_again(harness: Any) -> None:
    store = harness.make()
    term = lead(store)
    store.commit(term, 0, {"a": b"1"}, [])
    assert store.info() == StoreInfo(members=1, ok=True, db_bytes=store.info().db_bytes)
    assert store.info().db_bytes > 0
    calls: list[Callable[[], object]] = [
        lambda: store.keep_alive(term), store.leader, store.load, store.compact, lambda: store.campaign("x", 1, dead),
        store.check, store.cluster,
    ]  # fmt: skip
    harness.go_away()
    for call in calls:
        start = time.monotonic()
        with pytest.raises(StoreUnavailable):
            call()
        assert time.monotonic() - start < DEADLINE
    start = time.monotonic()
    with pytest.raises((StoreUnavailable, CommitUnknown)):
        store.commit(term, 1, {"a": b"2"}, [])
    assert store.info() == StoreInfo(members=0, ok=False, db_bytes=0)
    store.resign(term)
    assert time.monotonic() - start < 3 * DEADLINE
    harness.come_back()
    # what was sent to the silent store may have been applied: the loaded sequence number tells
    again = lead(store, "again", is_dead=dead)
    records, sequence = store.load()
    assert (records["a"], sequence) in ((b"1", 1), (b"2", 2))
    assert store.commit(again, sequence, {"a": b"3"}, []) == sequence + 1


def test_a_closed_store_fails_at_once(harness: Any) -> None:
    store = harness.make()
    term = lead(store)
    store.close()
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.load()
    with pytest.raises((StoreUnavailable, CommitUnknown)):
        store.commit(term, 0, {}, [])
    assert not store.info().ok
    store.resign(term)


@pytest.mark.parametrize("fault", ["unknown-applied", "unknown-lost", "refused"])
def test_the_twins_faults_leave_the_truth_in_load(fault: Any) -> None:
    backend = MemoryBackend()
    store = MemoryStore(backend)
    term = lead(store)
    backend.commit_fault = fault
    with pytest.raises(StoreUnavailable if fault == "refused" else CommitUnknown):
        store.commit(term, 0, {"a": b"1"}, [])
    assert store.load() == (({"a": b"1"}, 1) if fault == "unknown-applied" else ({}, 0))
    assert store.commit(term, backend.sequence, {"b": b"1"}, []) == backend.sequence
    backend.lose_leader()
    with pytest.raises(LeaderLost):
        store.keep_alive(term)
    backend.wipe()
    assert lead(store).number == 1


# -- the twin against etcd -----------------------------------------------------------------------------------------

_step = st.one_of(
    st.tuples(st.just("campaign"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("resign"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("keep"), st.integers(0, 1), st.booleans()),
    st.tuples(
        st.just("commit"),
        st.integers(0, 1),
        st.tuples(
            st.integers(-1, 1),
            st.dictionaries(st.sampled_from("abc"), st.binary(max_size=3), max_size=2),
            st.sets(st.sampled_from("de"), max_size=2),
        ),
    ),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(_step, max_size=15))
def test_the_twin_does_what_etcd_does(etcd: Etcd, steps: list[Any]) -> None:
    def play(harness: Any) -> list[Any]:
        stores = [harness.make(), harness.make()]
        terms: list[Term] = [Term(0, 1.0, 99, 99), Term(0, 1.0, 98, 98)]
        seen: list[Any] = []
        for kind, who, detail in steps:
            store = stores[who]
            try:
                if kind == "campaign":
                    won = store.campaign(f"store {who}", 60, dead if detail else alive)
                    terms[who] = won or terms[who]
                    seen.append(won and won.number)
                elif kind == "resign":
                    store.resign(terms[who])
                elif kind == "keep":
                    seen.append(store.keep_alive(terms[who]) > 0)
                else:
                    offset, puts, deletes = detail
                    seen.append(store.commit(terms[who], max(0, store.load()[1] + offset), puts, deletes))
            except LeaderLost:
                seen.append("lost")
            seen.append((store.leader(), store.load()))
        for term, store in zip(terms, stores, strict=True):
            store.resign(term)
        return seen

    real = RealEtcd(etcd)
    try:
        assert play(real) == play(Memory())
    finally:
        real.close()
