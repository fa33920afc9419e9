"""``RemoteDataset`` is the loader as a torch dataset: it has all that the loader has."""

from __future__ import annotations

import inspect
import pickle

import pytest

from trainer_client import RemoteDataLoader, RemoteDataset
from trainer_client.errors import ConfigError


def make(**changes: object) -> RemoteDataset:
    return RemoteDataset("127.0.0.1:1", **{"dataset": "photos", "job": "job", "batch_size": 4, **changes})


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_it_has_every_public_name_of_the_loader_with_the_same_parameters() -> None:
    names = public(RemoteDataLoader)
    assert {"steps_left", "stats", "ack", "close", "state_dict"} <= names <= public(RemoteDataset)
    for name in names:
        one, other = (inspect.getattr_static(kind, name) for kind in (RemoteDataLoader, RemoteDataset))
        assert isinstance(one, property) == isinstance(other, property), name
        if not isinstance(one, property):
            assert list(inspect.signature(one).parameters) == list(inspect.signature(other).parameters), name
    assert {"__enter__", "__exit__", "__len__", "__iter__"} <= set(vars(RemoteDataset))


def test_it_does_what_the_loader_does() -> None:
    with make() as dataset:
        assert isinstance(dataset, RemoteDataset)
        with pytest.raises(ConfigError, match="ack\\(\\) needs ack='manual'"):
            dataset.ack()
        dataset.set_epoch(2)
        assert pickle.loads(pickle.dumps(dataset)).state_dict() == dataset.state_dict()
    for act in (lambda: iter(dataset), lambda: dataset.stats(), lambda: dataset.load_state_dict(dataset.state_dict())):
        with pytest.raises(ConfigError, match="this loader is closed"):
            act()
    with make(ack="manual") as dataset:
        dataset.ack()  # nothing was handed out
    with make(epochs=None) as dataset, pytest.raises(TypeError, match="steps_left"):
        _ = dataset.steps_left
