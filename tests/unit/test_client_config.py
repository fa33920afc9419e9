"""The loader's arguments: what cannot work is named with its value, what comes later says so, nothing is opened."""

import pickle
import socket
import threading

import pytest

from manifests.errors import ConfigError
from manifests.pipeline import Pipeline
from manifests.wire.connection import Address, ConnectionOptions, parse_address, parse_addresses
from manifests.wire.messages import Shuffle as WireShuffle
from trainer_client import ClientOptions, Mix, RemoteDataLoader, RemoteDataset, Shuffle
from trainer_client.ranks import gather_states, resolve_rank


def make(address="127.0.0.1:1", **changes):
    return RemoteDataLoader(address, **{"dataset": "photos", "job": "job", "batch_size": 4, **changes})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dataset": ""}, "dataset ''"),
        ({"dataset": None}, "dataset None"),
        ({"dataset": 5}, "dataset 5"),
        ({"dataset": "a b"}, "dataset 'a b'"),
        ({"dataset": "photos@"}, "dataset version ''"),
        ({"dataset": "photos@a@b"}, "dataset version 'a@b'"),
        ({"dataset": "@1"}, "dataset ''"),
        ({"job": ""}, "job ''"),
        ({"job": "a/b"}, "job 'a/b'"),
        ({"job": None}, "job None"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"batch_size": -3}, "batch_size -3"),
        ({"batch_size": 1.5}, "batch_size 1.5"),
        ({"batch_size": True}, "batch_size True"),
        ({"batch_size": None}, "batch_size None"),
        ({"batch_size": "4"}, "batch_size '4'"),
        ({"pipeline": []}, r"pipeline \[\]"),
        ({"rank": 0}, "rank and world_size go together: rank=0, world_size=None"),
        ({"world_size": 2}, "rank=None, world_size=2"),
        ({"rank": 2, "world_size": 2}, "rank 2 is outside world_size 2"),
        ({"rank": -1, "world_size": 2}, "rank -1"),
        ({"rank": 0, "world_size": 0}, "world_size 0"),
        ({"rank": "0", "world_size": 2}, "rank '0'"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**63}, "seed 9223372036854775808"),
        ({"seed": 1.0}, "seed 1.0"),
        ({"seed": True}, "seed True"),
        ({"order": "random"}, "order 'random' is unknown.*'deterministic', 'dynamic'"),
        ({"shuffle": True}, "shuffle True"),
        ({"shuffle": 4096}, "shuffle 4096"),
        ({"lanes": 0}, "lanes 0"),
        ({"lanes": 12, "rank": 0, "world_size": 5}, "world_size 5 does not divide lanes 12.*1, 2, 3, 4, 6, 12"),
        ({"tail": "cut"}, "tail 'cut' is unknown.*'pad', 'drop', 'ragged'"),
        ({"epochs": 0}, "epochs 0"),
        ({"epochs": 1.5}, "epochs 1.5"),
        ({"steps_per_epoch": 10}, "steps_per_epoch"),
        ({"resume": "first"}, "resume 'first' is unknown.*'latest'"),
        ({"resume": True}, "resume True"),
        ({"on_error": "ignore"}, "on_error 'ignore' is unknown.*'raise', 'skip'"),
        ({"max_bad": -1}, "max_bad -1"),
        ({"max_bad": 1.5}, "max_bad 1.5 is a share above 1.*an int is a count"),
        ({"max_bad": float("nan")}, "max_bad nan"),
        ({"max_bad": float("inf")}, "max_bad inf"),
        ({"max_bad": True}, "max_bad True"),
        ({"max_bad": "5"}, "max_bad '5'"),
        ({"ack": "never"}, "ack 'never' is unknown.*'next', 'manual'"),
        ({"collate": "stack"}, "collate 'stack' cannot be called"),
        ({"prefetch": "lots"}, "prefetch 'lots'"),
        ({"prefetch": -1}, "prefetch -1"),
        ({"prefetch": 0}, "prefetch 0"),
        ({"timeout": 0}, "timeout 0"),
        ({"timeout": -1.0}, r"timeout -1\.0"),
        ({"timeout": "soon"}, "timeout 'soon'"),
        ({"timeout": float("nan")}, "timeout nan"),
        ({"timeout": float("inf")}, "timeout inf"),
        ({"join_timeout": 0}, "join_timeout 0"),
        ({"options": None}, "options None"),
        ({"options": {"tenant": "x"}}, "options {'tenant': 'x'}"),
        ({"address": ""}, "dispatcher address ''"),
        ({"address": " , "}, "dispatcher address ' , '"),
        ({"address": "host"}, "dispatcher address 'host' is not HOST:PORT"),
        ({"address": "host:70000"}, "host:70000"),
        ({"address": ["a:1", "b"]}, "dispatcher address 'b'"),
        ({"address": []}, r"dispatcher address \[\]"),
        ({"address": 7070}, "dispatcher address 7070"),
        ({"address": ["a:1", 5]}, r"dispatcher address \['a:1', 5\]"),
    ],
)
def test_what_cannot_work_is_named_with_its_value(change, named):
    with pytest.raises(ConfigError, match=named) as caught:
        make(**change)
    assert "\n" not in str(caught.value) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"address": "local://?workers=2"}, "address 'local://'"),
        ({"dataset": Mix({"a": 0.7, "b": 0.3})}, "Mix"),
        ({"device": "cuda"}, "device='cuda'"),
        ({"device": "cuda:1"}, "device='cuda:1'"),
    ],
)
def test_what_comes_later_says_so_and_what_to_do_meanwhile(change, named):
    with pytest.raises(ConfigError, match=f"{named}.* comes in a later release") as caught:
        make(**change)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"elastic": True}, "elastic=True needs order='dynamic'.*pass order='dynamic'"),
        ({"elastic": True, "order": "dynamic", "tail": "drop"}, "elastic=True and tail='drop'.*tail='ragged' or 'pad'"),
        ({"elastic": 1, "order": "dynamic"}, "elastic 1 is not True or False"),
        ({"audit": "yes"}, "audit 'yes' is not True or False"),
    ],
)
def test_what_does_not_go_together_with_elastic(change, named):
    with pytest.raises(ConfigError, match=named):
        make(**change)


def test_dynamic_order_elastic_jobs_and_audits_are_accepted():
    for tail in ("pad", "drop", "ragged"):
        assert make(order="dynamic", tail=tail)._config.has_quotas == (tail != "ragged")
        assert make(tail=tail)._config.has_quotas
    elastic = make(order="dynamic", elastic=True, audit=True)._config
    assert elastic.elastic and elastic.audit and not elastic.has_quotas


@pytest.mark.parametrize("name", ["tls", "token", "shared_memory", "isolate"])
def test_options_that_come_later_say_so(name):
    with pytest.raises(ConfigError, match=f"ClientOptions.{name} comes in a later release"):
        ClientOptions(**{name: "x" if name in ("tls", "token") else True})
    with pytest.raises(ConfigError, match="not there yet"):
        ConnectionOptions(token="x")


@pytest.mark.parametrize(
    ("make_one", "named"),
    [
        (lambda: Shuffle(buffer=-1), "Shuffle.buffer -1"),
        (lambda: Shuffle(buffer=1.5), r"Shuffle.buffer 1\.5"),
        (lambda: Shuffle(buffer=True), "Shuffle.buffer True"),
        (lambda: Shuffle(interleave=0), "Shuffle.interleave 0"),
        (lambda: Shuffle(within_shard="yes"), "Shuffle.within_shard 'yes'"),
        (lambda: ClientOptions(tenant="a b"), "tenant 'a b'"),
        (lambda: ClientOptions(reads=0), "ClientOptions.reads 0"),
        (lambda: ClientOptions(stall=0), "ClientOptions.stall 0"),
        (lambda: ClientOptions(stall="slow"), "ClientOptions.stall 'slow'"),
        (lambda: ClientOptions(connection="fast"), "ClientOptions.connection 'fast'"),
    ],
)
def test_parts_check_themselves(make_one, named):
    with pytest.raises(ConfigError, match=named):
        make_one()


def test_what_works():
    assert Shuffle(buffer=8, interleave=2, within_shard=True).wire() == WireShuffle(8, 2, True)
    make(device="cpu", max_bad=0, seed=0, epochs=None, shuffle=None, lanes=24, rank=3, world_size=4, resume="latest")
    make(max_bad=1.0, prefetch=1 << 20, timeout=5, address=["a:1", "grpc://[::1]:2"], pipeline=Pipeline([]))
    make(max_bad=100, address=None, dataset="photos@2026-08-20", options=ClientOptions(stall="500ms"))
    make(dataset="/data/photos.parquet")
    make(dataset="photos.parquet", timeout="90s")


def test_the_constructor_opens_nothing(monkeypatch):
    def refuse(*arguments, **settings):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    before = set(threading.enumerate())
    loader = make(address="nowhere.invalid:1", dataset="/no/such/file.parquet")
    assert int(loader.state_dict()["step"]) == 0
    assert repr(loader) == "RemoteDataLoader(/no/such/file.parquet, job job, not connected)"
    loader.set_epoch(3)
    loader.close()
    assert set(threading.enumerate()) == before


def test_a_loader_pickles_with_its_arguments():
    loader = make(rank=1, world_size=2, seed=7, tail="drop", shuffle=Shuffle(buffer=9))
    again = pickle.loads(pickle.dumps(loader))
    assert repr(again) == repr(loader) and again.state_dict() == loader.state_dict()
    assert again._config == loader._config


def test_addresses_come_from_the_environment_only_when_it_connects(monkeypatch):
    loader = make(address=None)
    with pytest.raises(ConfigError, match=r"no dispatcher address.*FEEDLINE_DISPATCHER"):
        len(loader)
    monkeypatch.setenv("FEEDLINE_DISPATCHER", "nonsense")
    with pytest.raises(ConfigError, match="FEEDLINE_DISPATCHER 'nonsense'"):
        len(loader)


def test_set_epoch_and_load_state_dict_check_their_arguments():
    loader = make()
    for epoch in (-1, 1.5, True, None, "2"):
        with pytest.raises(ConfigError, match=f"epoch {epoch!r}"):
            loader.set_epoch(epoch)
    with pytest.raises(ConfigError, match=r"allow=\['seed'\] is unknown.*'pipeline'"):
        loader.load_state_dict(loader.state_dict(), allow={"seed"})
    with pytest.raises(ConfigError, match="ack='manual'"):
        loader.ack()


# -- addresses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("127.0.0.1:7070", Address("127.0.0.1", 7070)),
        ("  grpc://host:1 ", Address("host", 1)),
        ("grpc+tcp://host:1/", Address("host", 1)),
        ("[::1]:7070", Address("::1", 7070)),
        ("host:0", Address("host", 0)),
    ],
)
def test_addresses(text, found):
    assert parse_address(text) == found
    assert parse_address(found.uri) == found


@pytest.mark.parametrize("text", ["", ":1", "host:", "host:x", "host:-1", "host:65536", "a/b:1", "host:١"])
def test_what_is_no_address(text):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_address(text)


def test_lists_of_addresses():
    both = (Address("a", 1), Address("b", 2))
    assert parse_addresses("a:1, grpc://b:2,") == parse_addresses(["a:1", "b:2"]) == both


# -- ranks ---------------------------------------------------------------------------------------------------------


def test_the_rank_is_the_argument_s_then_the_environment_s_then_0_of_1(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert resolve_rank(None, None) == (0, 1)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match="RANK='2' and WORLD_SIZE=''"):
        resolve_rank(None, None)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert resolve_rank(None, None) == (2, 4)
    assert resolve_rank(0, 1) == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK=2 is outside WORLD_SIZE=2"):
        resolve_rank(None, None)


def test_gathering_states_needs_a_process_group():
    assert gather_states(make()) == [make().state_dict()]
    with pytest.raises(ConfigError, match=r"torch\.distributed"):
        gather_states(make(rank=0, world_size=2))


# -- as a dataset --------------------------------------------------------------------------------------------------


def test_the_dataset_form_refuses_several_loader_workers(monkeypatch):
    dataset = RemoteDataset("127.0.0.1:1", dataset="photos", job="job", batch_size=4)

    class Info:
        num_workers = 2

    monkeypatch.setattr("trainer_client.dataset.get_worker_info", Info)
    with pytest.raises(ConfigError, match=r"num_workers=2.*same rank.*num_workers=0 or 1"):
        iter(dataset)
    assert dataset.state_dict() == dataset.loader.state_dict()
    dataset.load_state_dict(dataset.state_dict())
    dataset.set_epoch(2)
    dataset.close()
