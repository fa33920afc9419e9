import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests.errors import ProtocolError
from manifests.ranges import Ranges

sets = st.sets(st.integers(0, 60), max_size=40)


def of(values: set[int]) -> Ranges:
    return Ranges.members(np.array(sorted(values), np.int64))


@given(sets, sets, st.integers(0, 70))
def test_it_is_a_set(a, b, stop):
    one, two = of(a), of(b)
    assert set(one.values().tolist()) == a and len(one) == len(a) and bool(one) == bool(a)
    assert set((one | two).values().tolist()) == a | b
    assert set((one & two).values().tolist()) == a & b
    assert set((one - two).values().tolist()) == a - b
    assert set(one.gaps(stop).values().tolist()) == set(range(stop)) - a
    assert one.floor == next(k for k in range(100) if k not in a)
    probe = np.arange(70)
    assert one.has(probe).tolist() == [k in a for k in range(70)]
    assert (one == two) == (a == b) and (a != b or hash(one) == hash(two))
    again = Ranges.decode(one.encode())
    assert again == one
    starts = one.bounds
    assert all(starts[k, 1] < starts[k + 1, 0] for k in range(len(starts) - 1))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=20))
def test_pairs_may_overlap_touch_and_be_empty(pairs):
    found = Ranges.of((a, a + n) for a, n in pairs)
    assert set(found.values().tolist()) == {k for a, n in pairs for k in range(a, a + n)}


@given(st.binary(max_size=40))
def test_any_bytes_are_a_set_or_refused(data):
    try:
        found = Ranges.decode(data)
    except ProtocolError:
        return
    assert found.encode() == data or len(found.encode()) < len(data)
    assert Ranges.decode(found.encode()) == found


def test_its_size_is_that_of_its_gaps():
    assert Ranges.of([]).encode() == b""
    assert len(Ranges.of([(0, 10**9)]).encode()) == 6
    for data in (b"\x80", b"\x01", b"\x01\x00", b"\xff" * 11):
        with pytest.raises(ProtocolError):
            Ranges.decode(data)
