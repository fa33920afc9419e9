"""Placement: deterministic, bounded, and moving only what it must."""

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.placement import ALTERNATES, BALANCE, capacity, place, rank_workers

names = st.sets(st.text("abcdefgh0123456789-", min_size=1, max_size=8), min_size=1, max_size=8)
contents = st.text("0123456789abcdef", min_size=4, max_size=8).map("blake3:".__add__)


def spread(workers, count):
    loads, homes = {}, {}
    for number in range(count):
        chosen = place(f"blake3:{number}", workers, loads)[0]
        loads[chosen] = loads.get(chosen, 0) + 1
        homes[number] = chosen
    return loads, homes


@given(names, contents)
def test_the_order_is_a_function_of_names_and_content(workers, content):
    order = rank_workers(content, workers)
    assert sorted(order) == sorted(workers) and order == rank_workers(content, sorted(workers))


@given(names, contents)
def test_a_worker_that_goes_moves_no_other_content(workers, content):
    order = rank_workers(content, workers)
    for gone in workers:
        assert rank_workers(content, workers - {gone}) == [name for name in order if name != gone]


@given(names, contents, st.data())
def test_one_first_and_different_alternates(workers, content, data):
    loads = {name: data.draw(st.integers(0, 20)) for name in workers}
    chosen = place(content, workers, loads)
    assert len(chosen) == len(set(chosen)) == min(len(workers), 1 + ALTERNATES)
    assert set(chosen) <= workers


@given(names, contents, st.data())
def test_the_one_that_has_it_keeps_it_if_it_may_serve(workers, content, data):
    loads = {name: data.draw(st.integers(0, 20)) for name in workers}
    holder = data.draw(st.sampled_from(sorted(workers)))
    assert place(content, workers, loads, ["gone", holder])[0] == holder


@given(names, st.integers(1, 200))
def test_no_worker_carries_more_than_its_share(workers, count):
    loads, _ = spread(workers, count)
    assert sum(loads.values()) == count
    assert max(loads.values()) <= capacity(count, len(workers)) <= BALANCE * count / len(workers) + 1


def test_a_new_worker_takes_about_its_share_and_the_rest_stays():
    _, before = spread({"a", "b", "c"}, 600)
    _, after = spread({"a", "b", "c", "d"}, 600)
    moved = [number for number in before if before[number] != after[number]]
    assert 90 < len([number for number in moved if after[number] == "d"]) < 210
    assert len(moved) < 300


def test_nobody_can_serve():
    assert place("blake3:0", set(), {}) == ()
