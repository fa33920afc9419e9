"""Names, digests and keyed random numbers: fixed values, because orders and states of all releases hang on them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests.errors import ConfigError
from manifests.identity import check_name, digest, id_sum, mix64, random_u64, random_unit, stream_key


@pytest.mark.parametrize("name", ["a", "photos-2026.08_v1", "A" * 128, "0", ".", "_"])
def test_names(name):
    assert check_name(name, "job") == name


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a@b", "ä", "A" * 129, "a\n", None, 5, "a:b"])
def test_what_is_no_name_is_shown(name):
    with pytest.raises(ConfigError) as caught:
        check_name(name, "job")
    assert f"job {name!r} is not a name" in str(caught.value) and "1 to 128" in str(caught.value)


def test_digest():
    assert digest(b"abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_splitmix64_gives_its_published_values():
    """The generator seeded with 1234567: key = seed, value k is what the k-th call returns."""
    want = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert random_u64(1234567, 0, 5).tolist() == want


def test_streams_are_told_apart():
    keys = {
        stream_key(domain, *parts)
        for domain in ("window", "shard-order")
        for parts in ((), (0,), (1,), (0, 0), (0, 1), (1, 0), (2**63 - 1, 5, 7))
    }
    assert len(keys) == 14


def test_values_that_orders_hang_on():
    assert stream_key("shard-order", 1, 0) == stream_key("shard-order", 1 + 2**64, 0)
    assert hex(stream_key("window", 1, 2, 3)) == WINDOW_KEY
    assert random_u64(stream_key("row-order", 9, 1, 4), 5, 3).tolist() == ROW_VALUES
    assert id_sum(np.arange(1000)) == SUM_1000


WINDOW_KEY = "0xddd4336849541772"
ROW_VALUES = [9921177462879138512, 3317558633787038769, 10141263312940571451]
SUM_1000 = 13757326270499384616


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 50), st.integers(0, 50))
def test_any_value_can_be_had_without_those_before_it(key, first, skip, count):
    assert random_u64(key, first, skip + count)[skip:].tolist() == random_u64(key, first + skip, count).tolist()


@given(st.integers(0, 2**64 - 1))
def test_units_are_below_one_and_spread(key):
    values = random_unit(key, 0, 2000)
    assert values.dtype == np.float64 and values.min() >= 0 and values.max() < 1
    assert abs(values.mean() - 0.5) < 0.05 and abs((values < 0.1).mean() - 0.1) < 0.05


def test_the_largest_value_is_below_one():
    assert (np.array([2**64 - 1], np.uint64) >> np.uint64(11)).astype(np.float64)[0] * 2.0**-53 < 1.0


@given(st.lists(st.integers(0, 2**62), max_size=40), st.randoms())
def test_a_sum_of_ids_does_not_depend_on_their_order(ids, order):
    shuffled = list(ids)
    order.shuffle(shuffled)
    assert id_sum(np.array(ids, np.int64)) == id_sum(np.array(shuffled, np.int64))


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=40), st.data())
def test_a_sum_tells_a_lost_a_repeated_and_an_exchanged_id(ids, data):
    at = data.draw(st.integers(0, len(ids) - 1))
    whole = id_sum(np.array(ids, np.int64))
    assert id_sum(np.array(ids[:at] + ids[at + 1 :], np.int64)) != whole
    assert id_sum(np.array([*ids, ids[at]], np.int64)) != whole
    assert id_sum(np.array([*ids[:at], ids[at] + 1, *ids[at + 1 :]], np.int64)) != whole


def test_mixing_leaves_its_input_alone():
    values = np.arange(5, dtype=np.uint64)
    mixed = mix64(values)
    assert values.tolist() == [0, 1, 2, 3, 4] and len(set(mixed.tolist())) == 5
