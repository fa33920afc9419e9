"""A place of a chunk that shows as filled can be read, at every moment."""

from __future__ import annotations

import threading

import numpy as np

from manifests.errors import ShardMissing
from trainer_client.chunks import MISSING, QUARANTINED, Chunk, in_order
from trainer_client.tensors import Part


def test_a_filled_place_points_at_its_own_row() -> None:
    """A reader that looks while a part is put in never sees a row of another place."""
    count = 4096
    ids = np.arange(count, dtype=np.int64)
    for _ in range(30):
        chunk = Chunk(0, np.zeros(count, np.int64), ids, ids, 0)
        wrong: list[int] = []
        done = threading.Event()

        def look(chunk: Chunk = chunk, wrong: list[int] = wrong, done: threading.Event = done) -> None:
            while not done.is_set():
                filled = np.flatnonzero(chunk.part.copy() != MISSING)
                if len(filled):
                    for piece in chunk.pieces(filled, filled):
                        wrong += piece.places[piece.part.ids[piece.rows] != piece.places].tolist()

        reader = threading.Thread(target=look)
        reader.start()
        for first in range(0, count, 512):
            offsets = np.arange(first, first + 512, dtype=np.int64)
            chunk.fill(offsets, Part({}, ids[offsets], 0), [])
        done.set()
        reader.join()
        assert not wrong


def test_what_comes_twice_is_kept_once() -> None:
    """A read that was issued twice fills each place once, in whatever order its parts come."""
    ids = np.arange(8, dtype=np.int64) + 100
    chunk = Chunk(0, np.zeros(8, np.int64), ids, ids, 0)
    assert chunk.fill(np.arange(2, 6), Part({}, ids[2:6], 0), []) == 4
    assert chunk.fill(np.arange(0, 8), Part({}, ids, 0), []) == 4
    found = [
        (piece.places.tolist(), piece.part.ids[piece.rows].tolist())
        for piece in chunk.pieces(np.arange(8), np.arange(8))
    ]
    assert sorted(p for places, _ in found for p in places) == list(range(8))
    assert all([p + 100 for p in places] == rows for places, rows in found)


def test_rows_of_a_shard_in_quarantine_keep_their_mark() -> None:
    """What is there stays, what is not is marked with the error; a part that comes late changes nothing of it."""
    ids = np.arange(6, dtype=np.int64)
    chunk = Chunk(0, np.array([4, 4, 2, 2, 2, 4], np.int64), ids, ids, 0)
    assert in_order(chunk.shards) == [4, 2]
    chunk.fill(ids[:3], Part({}, ids[:3], 0), [])
    error = ShardMissing("gone")
    assert chunk.quarantine(2, error) == 2
    assert chunk.quarantine(2, error) == 0
    assert (chunk.part.tolist(), chunk.missing) == ([0, 0, 0, QUARANTINED, QUARANTINED, MISSING], 1)
    assert chunk.errors == {3: error, 4: error}
    assert chunk.fill(ids, Part({}, ids, 0), []) == 1
    assert (chunk.part.tolist(), chunk.missing) == ([0, 0, 0, QUARANTINED, QUARANTINED, 1], 0)
