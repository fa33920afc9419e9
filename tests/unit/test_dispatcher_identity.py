"""Whose an etcd and a store folder are."""

import logging

from dispatcher import identity
from dispatcher.memory_store import MemoryStore


def test_an_empty_folder_beside_an_etcd_with_datasets_is_told(tmp_path, caplog):
    """It may be the wrong folder; it may also be a lost one, so it is taken."""
    store = MemoryStore()
    first, empty = tmp_path / "first", tmp_path / "empty"
    first.mkdir()
    empty.mkdir()
    found = identity.agree(store, first, "e:1")
    term = store.campaign("me", 10.0, lambda text: False)
    store.commit(term, 0, {"datasets/photos/1": b"x"}, ())
    with caplog.at_level(logging.WARNING, "dispatcher"):
        assert identity.agree(store, first, "e:1") == found
        assert caplog.text == ""
        assert identity.agree(store, empty, "e:1") == found
    assert f"store folder {empty} is empty, but etcd at e:1 has 1 datasets" in caplog.text
