"""Placement: deterministic, bounded by bytes and speed, and moving only what it must."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.placement import (
    ALTERNATES,
    BALANCE,
    FLOOR,
    HOME_BALANCE,
    LEAST,
    Fleet,
    rank_workers,
    size_of,
    weights,
)

names = st.sets(st.text("abcdefgh0123456789-", min_size=1, max_size=8), min_size=1, max_size=8)
contents = st.text("0123456789abcdef", min_size=4, max_size=8).map("blake3:".__add__)
sizes = st.one_of(st.just(LEAST), st.integers(LEAST, 1 << 34))


def even(workers):
    return dict.fromkeys(workers, 1.0)


def place(content, shares, loads, size=LEAST, **options):
    fleet = Fleet(shares, loads, size)
    return fleet.place(fleet.orders([content])[0], size, **options)


def spread(shares, shard_sizes):
    """Open bytes per worker, and where each shard went, when shards are opened one after another."""
    loads, homes = {}, {}
    for number, size in enumerate(shard_sizes):
        chosen = place(f"blake3:{number}", shares, loads, size)[0]
        loads[chosen] = loads.get(chosen, 0) + size
        homes[number] = chosen
    return loads, homes


@given(names, contents)
def test_the_order_is_a_function_of_names_and_content(workers, content):
    order = rank_workers(content, workers)
    assert sorted(order) == sorted(workers) and order == rank_workers(content, sorted(workers, reverse=True))


@given(names, st.lists(contents, min_size=1, max_size=20))
def test_many_orders_at_once_are_the_same(workers, found):
    fleet = Fleet(even(workers), {})
    assert fleet.orders(found) == [rank_workers(content, workers) for content in found]


@given(names, contents)
def test_a_worker_that_goes_moves_no_other_content(workers, content):
    order = rank_workers(content, workers)
    for gone in workers if len(workers) > 1 else ():
        assert rank_workers(content, workers - {gone}) == [name for name in order if name != gone]


@given(names, contents, st.data())
def test_one_first_and_different_alternates(workers, content, data):
    loads = {name: LEAST * data.draw(st.integers(0, 20)) for name in workers}
    without = data.draw(st.sets(st.sampled_from(sorted(workers))))
    chosen = place(content, even(workers), loads, without=without)
    able = workers - without or workers
    assert len(chosen) == len(set(chosen)) == min(len(able), 1 + ALTERNATES)
    assert set(chosen) <= able


@given(names, contents, st.data())
def test_a_rank_keeps_the_worker_it_was_given(workers, content, data):
    loads = {name: LEAST * data.draw(st.integers(0, 20)) for name in workers}
    own = data.draw(st.sampled_from(sorted(workers)))
    assert place(content, even(workers), loads, own=own)[0] == own
    assert place(content, even(workers), loads, own="gone")[0] in workers


@given(names, contents, st.data())
def test_the_one_that_has_it_is_taken_first_while_it_has_room(workers, content, data):
    loads = {name: LEAST * data.draw(st.integers(0, 20)) for name in workers}
    home = data.draw(st.sampled_from(sorted(workers)))
    shares = even(workers)
    chosen = place(content, shares, loads, homes=["gone", home])[0]
    room = HOME_BALANCE * (sum(loads.values()) + LEAST) / len(workers)
    if loads[home] < room:
        assert chosen == home
    else:
        assert loads[chosen] < BALANCE * (sum(loads.values()) + LEAST) / len(workers)


@given(names, st.lists(sizes, min_size=1, max_size=100), st.data())
def test_no_worker_carries_more_than_its_share_of_the_bytes(workers, shard_sizes, data):
    """Shards of very unequal size: a worker is above its share only by one shard, and only where no other had room."""
    shares = {name: data.draw(st.sampled_from([1.0, 0.5, FLOOR])) for name in sorted(workers)}
    loads = {}
    for number, size in enumerate(shard_sizes):
        fleet = Fleet(shares, loads, size)
        chosen = fleet.place(fleet.orders([str(number)])[0], size)[0]
        have = loads.get(chosen, 0)
        assert (
            fleet.limit(chosen, size)
            < size + BALANCE * (sum(loads.values()) + size) * shares[chosen] / sum(shares.values()) + 1
        )
        if have + size > fleet.limit(chosen, size):
            for other in workers:
                assert loads.get(other, 0) + size > fleet.limit(other, size)
                relative = (loads.get(other, 0) + size) / shares[other]
                assert (have + size) / shares[chosen] <= relative
        loads[chosen] = have + size
    assert sum(loads.values()) == sum(shard_sizes)


def test_very_unequal_shards_spread_by_bytes():
    shard_sizes = [size_of((64 << 20) if number % 16 == 0 else 1) for number in range(640)]
    loads, _ = spread(even("abcd"), shard_sizes)
    assert max(loads.values()) <= BALANCE * sum(shard_sizes) / 4 + LEAST and min(loads.values()) > sum(shard_sizes) / 8


def test_a_worker_five_times_slower_gets_about_a_fifth():
    shares = weights({"a": 100.0, "b": 100.0, "c": 100.0, "slow": 20.0})
    loads, _ = spread(shares, [LEAST] * 320)
    others = (loads["a"] + loads["b"] + loads["c"]) / 3
    assert 0.15 < loads["slow"] / others < 0.28


@given(st.floats(0, 1e-3), st.integers(1, 5))
def test_the_slowest_worker_is_not_starved(speed, others):
    shares = weights({"slow": speed, **{str(number): 100.0 for number in range(others)}})
    loads, _ = spread(shares, [LEAST] * 40 * (others + 1))
    assert loads["slow"] >= LEAST * 40 * FLOOR * 0.8


@given(st.dictionaries(st.text(max_size=3), st.one_of(st.none(), st.floats(0, 1e9)), min_size=1, max_size=9))
def test_weights_are_bounded_shares_of_the_best(speeds):
    found = weights(speeds)
    assert set(found) == set(speeds) and max(found.values()) <= 1
    assert min(found.values()) >= FLOOR
    known = {name: speed for name, speed in speeds.items() if speed is not None}
    if known and max(known.values()) > 0:
        assert found[max(known, key=lambda name: known[name])] == 1
        for name, speed in known.items():
            assert found[name] == pytest.approx(max(FLOOR, speed / max(known.values())))
    else:
        assert set(found.values()) == {1.0}


def test_a_worker_of_unknown_speed_counts_as_the_median():
    assert weights({"a": 10.0, "b": 40.0, "c": 20.0, "new": None}) == {"a": 0.25, "b": 1.0, "c": 0.5, "new": 0.5}


def test_a_new_worker_takes_about_its_share_and_the_rest_stays():
    _, before = spread(even("abc"), [LEAST] * 600)
    _, after = spread(even("abcd"), [LEAST] * 600)
    moved = [number for number in before if before[number] != after[number]]
    assert 90 < len([number for number in moved if after[number] == "d"]) < 210
    assert len(moved) < 300


def test_equal_content_goes_to_the_same_worker_whoever_asks_while_there_is_room():
    """Two jobs, one after the other, over a fleet that is not full: the same places."""
    _, first = spread(even("abcdef"), [LEAST] * 6)
    alone = {number: place(f"blake3:{number}", even("abcdef"), {})[0] for number in range(6)}
    assert sum(first[number] == alone[number] for number in alone) >= 4
    loads = dict.fromkeys("abcdef", 100 * LEAST)
    for number in range(50):
        assert place(f"blake3:{number}", even("abcdef"), loads)[0] == rank_workers(f"blake3:{number}", set("abcdef"))[0]


def test_nobody_can_serve():
    assert Fleet({}, {}).orders(["blake3:0"]) == [[]]
    assert Fleet({}, {}).place([], LEAST) == ()
