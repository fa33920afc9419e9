"""Workers: registration, incarnations, leases, draining; datasets: names, versions, refusals."""

import pytest
from core_bench import LEASE, Bench, make_manifest

from dispatcher import events
from manifests.errors import ConfigError, UnknownDataset
from manifests.wire import messages as m


@pytest.fixture
def bench():
    return Bench()


def state_of(bench, name="w1"):
    return bench.state.workers.get(name).state


def test_welcome_carries_keys_and_the_lease(bench):
    welcome = bench.worker()
    assert welcome.known and welcome.keys == {"k1": b"s" * 32} and welcome.lease_ms == 10_000
    assert welcome.now_ms == bench.now_ms and not welcome.drain


def test_case_23_an_unknown_worker_is_told_to_register_again(bench):
    assert bench.beat() == m.WorkerWelcome(known=False, now_ms=bench.now_ms, lease_ms=10_000)
    bench.worker()
    assert bench.beat().known
    bench.reload()
    assert not bench.beat().known
    assert bench.worker().known and bench.beat().known


def test_a_restarted_worker_replaces_the_old_one(bench):
    bench.worker()
    bench.worker(incarnation="w1-2")
    assert not bench.beat().known  # the old incarnation
    assert bench.beat(incarnation="w1-2").known
    assert any("taken as its restart" in text for text in bench.logs)


def test_a_silent_worker_is_lost_and_comes_back(bench):
    bench.worker()
    bench.wait(LEASE)
    assert state_of(bench) == "up"
    bench.wait(0.5)
    assert state_of(bench) == "lost"
    assert any("is lost: not heard for 10.5 s" in text for text in bench.logs)
    bench.beat()
    assert state_of(bench) == "up"
    bench.wait(700)
    bench.wait(1)
    assert bench.state.workers.get("w1") is None


def test_a_worker_that_drains_says_so(bench):
    bench.worker()
    bench.beat(draining=True)
    assert state_of(bench) == "draining"
    bench.apply(events.WorkerLeft, message=m.LeaveWorker(id="w1", incarnation="old"))
    assert state_of(bench) == "draining"
    bench.apply(events.WorkerLeft, message=m.LeaveWorker(id="w1", incarnation="w1-1"))
    assert bench.state.workers.get("w1") is None


def test_nothing_about_workers_is_stored(bench):
    before = dict(bench.stored)
    bench.worker()
    bench.beat()
    assert bench.stored == before


def test_a_worker_without_an_address_is_refused(bench):
    with pytest.raises(ConfigError, match="id and an address"):
        bench.worker(address="")


# -- datasets


def register(bench, name="photos", version="1", rows=(1, 2)):
    manifest = make_manifest(list(rows))
    bench.shelf.add(manifest)
    message = m.RegisterDataset(name=name, version=version, digest=manifest.digest)
    return bench.apply(events.DatasetRegistrationRequested, message=message, rows=manifest.rows, shards=len(rows))


def find(bench, name, version=""):
    return bench.apply(events.DatasetFindRequested, message=m.FindDataset(name=name, version=version))


def test_register_find_and_register_again(bench):
    made = register(bench)
    assert made.new
    found = find(bench, "photos")
    assert (found.version, found.digest, found.rows, found.shards) == ("1", made.digest, 3, 2)
    before = dict(bench.stored)
    assert not register(bench).new and bench.stored == before


def test_other_content_under_a_known_version_is_refused(bench):
    register(bench)
    with pytest.raises(ConfigError, match="photos@1 is registered with other content") as caught:
        register(bench, rows=(1, 3))
    assert set(caught.value.detail) == {"registered", "asked"}


def test_a_bare_name_is_the_version_registered_last(bench):
    register(bench, version="9")
    register(bench, version="10")
    register(bench, version="2")
    register(bench, version="9")  # the same again changes nothing
    assert find(bench, "photos").version == "2"
    bench.reload()
    assert find(bench, "photos").version == "2"
    register(bench, version="3", rows=(5,))
    assert find(bench, "photos").version == "3"


def test_unknown_names_and_versions_list_those_that_exist(bench):
    with pytest.raises(UnknownDataset, match="no dataset is registered"):
        find(bench, "photos")
    register(bench, "birds")
    register(bench, "cats", version="7")
    with pytest.raises(UnknownDataset, match="registered are: birds, cats") as caught:
        find(bench, "photos")
    assert caught.value.detail["datasets"] == ["birds", "cats"]
    with pytest.raises(UnknownDataset, match=r"unknown version '8' of dataset 'cats': registered versions are: 7"):
        find(bench, "cats", "8")


@pytest.mark.parametrize("name, version", [("a b", "1"), ("", "1"), ("a", "x/y"), ("a", "")])
def test_names_are_checked(bench, name, version):
    with pytest.raises(ConfigError, match="is not a name"):
        register(bench, name, version)
