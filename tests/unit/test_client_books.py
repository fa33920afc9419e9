"""The books of an epoch: sums of what the plan says and of what was in the batches, and detail where they differ."""

import numpy as np
import pytest
from order_cases import Case

from manifests.identity import id_sum
from manifests.ranges import Ranges
from manifests.wire.messages import CarriedSum, IdSum, SkippedRow
from trainer_client.books import Books
from trainer_client.session import Position

CASE = Case((5, 3, 8), seed=2)


def make_books(world=1, batch=4, taken=None, first=0) -> Books:
    return Books(3, CASE.leg(0, world, batch, "pad", taken, first))


def hand_out(books: Books, planned, found=None, *, pads=0, skipped=(), steps=1, read=None) -> None:
    planned = np.array(planned, np.int64)
    found = planned if found is None else np.array(found, np.int64)
    shards = np.searchsorted([5, 8, 16], planned, side="right").astype(np.int64)
    books.hand_out(planned, found, pads, list(skipped), Position(steps, len(planned) if read is None else read), shards)


def sum_of(*ids: int) -> IdSum:
    return IdSum(count=len(ids), value=id_sum(np.array(ids, np.int64)))


def row(sample_id: int) -> SkippedRow:
    return SkippedRow(sample_id=sample_id, key=str(sample_id), shard="s.tar", reason="broken")


def test_nothing_was_handed_out():
    progress = make_books().progress()
    assert (progress.epoch, progress.step, progress.acked_step, progress.state) == (3, 0, 0, "open")
    assert progress.handed == progress.acked == (0,) * 12
    assert progress.source == progress.handed_out == progress.acknowledged == IdSum()


def test_batches_add_up_and_acknowledgements_follow():
    books = make_books()
    hand_out(books, [0, 1, 2, 9], read=4)
    hand_out(books, [15, 4], pads=2, steps=2, read=8)
    progress = books.progress()
    assert (progress.step, progress.acked_step) == (2, 0)
    assert progress.source == progress.handed_out == sum_of(0, 1, 2, 9, 15, 4) and progress.acknowledged == IdSum()
    assert progress.handed == (1,) * 8 + (0,) * 4 and progress.acked == (0,) * 12
    assert progress.padded == 2 and progress.unbalanced == ()
    books.acknowledge()
    hand_out(books, [8], steps=3, read=9)
    progress = books.progress()
    assert (progress.step, progress.acked_step) == (3, 2)
    assert progress.acknowledged == sum_of(0, 1, 2, 4, 9, 15) and progress.handed_out.count == 7
    assert progress.acked == (1,) * 8 + (0,) * 4 and progress.handed == (1,) * 9 + (0,) * 3


def test_sums_do_not_depend_on_the_order_within_and_over_batches():
    one, two = make_books(), make_books()
    hand_out(one, [1, 2, 3, 4])
    hand_out(two, [4, 3])
    hand_out(two, [2, 1])
    assert one.progress().handed_out == two.progress().handed_out


def test_steps_count_from_the_epoch_s_beginning():
    taken = [1] * 12
    books = make_books(taken=taken, first=5)
    hand_out(books, [0, 1], read=2)
    progress = books.progress()
    assert progress.step == 6 and progress.acked_step == 5
    assert progress.handed == (2, 2) + (1,) * 10 and progress.acked == (1,) * 12


@pytest.mark.parametrize(
    ("planned", "found", "detail"),
    [
        ([0, 1, 2, 6], [0, 1, 6], [(0, 3, 2, (2,), ())]),
        ([0, 1, 2, 6], [0, 1, 1, 2, 6], [(0, 3, 4, (), (1,))]),
        ([0, 1, 2, 6], [0, 1, 1, 6], [(0, 3, 3, (2,), (1,))]),
        ([0, 6, 9], [0], [(1, 1, 0, (6,), ()), (2, 1, 0, (9,), ())]),
        ([0, 6], [0, 99], [(-1, 0, 1, (), (99,)), (1, 1, 0, (6,), ())]),
    ],
)
def test_where_a_batch_is_not_what_was_planned_the_shard_s_books_tell(planned, found, detail):
    books = make_books()
    hand_out(books, planned, found)
    progress = books.progress()
    assert progress.source == sum_of(*planned) and progress.handed_out == sum_of(*found)
    assert [(one.shard, one.planned, one.handed_out, one.lost, one.repeated) for one in progress.unbalanced] == detail


def test_another_order_within_a_batch_is_no_difference_of_the_sums():
    books = make_books()
    hand_out(books, [0, 1, 2], [2, 1, 0])
    progress = books.progress()
    assert progress.source == progress.handed_out and progress.unbalanced == ()


def test_at_most_100_ids_are_named():
    books = Books(0, Case((500,)).leg(0, 1, 500))
    planned = np.arange(300, dtype=np.int64)
    books.hand_out(planned, planned[:0], 0, [], Position(1, 300), np.zeros(300, np.int64))
    [one] = books.progress().unbalanced
    assert len(one.lost) == 100


def test_skipped_rows_count_as_taken_and_not_as_handed_out():
    books = make_books()
    hand_out(books, [0, 1], skipped=[row(7)], read=3)
    books.acknowledge()
    hand_out(books, [2], skipped=[row(8), row(9)], steps=2, read=6)
    books.skip([row(10)], Position(2, 7))
    progress = books.progress()
    assert [one.sample_id for one in progress.skipped] == [7, 8, 9, 10] and progress.acked_skipped == 1
    assert progress.handed_out == sum_of(0, 1, 2)
    assert sum(progress.handed) == 7 and sum(progress.acked) == 3
    books.acknowledge()
    assert books.progress().acked_skipped == 4


def test_an_epoch_is_finished_once_its_end_is_acknowledged():
    books = make_books()
    hand_out(books, [0])
    books.finish()
    assert books.progress().state == "open"
    books.acknowledge()
    assert books.progress().state == "finished"


def test_an_epoch_that_was_left_is_abandoned():
    books = make_books()
    hand_out(books, [0])
    books.abandon()
    assert books.progress().state == "abandoned"


def test_rows_in_quarantine_are_listed_by_id_and_count_as_neither():
    books = make_books()
    planned = np.array([0, 1], np.int64)
    books.hand_out(planned, planned, 0, [row(3)], Position(1, 7), planned // 5, [4, 5, 6])
    books.acknowledge()
    books.skip([], Position(1, 9), [15, 2])
    progress = books.progress()
    assert Ranges.decode(progress.quarantined).values().tolist() == [2, 4, 5, 6, 15]
    assert Ranges.decode(progress.acked_quarantined).values().tolist() == [4, 5, 6]
    assert progress.handed_out == sum_of(0, 1) and len(progress.skipped) == 1
    assert (sum(progress.handed), sum(progress.acked)) == (9, 7)


def test_carried_rows_have_sums_of_their_own():
    books = make_books()
    planned = np.array([7, 0, 9, 7], np.int64)
    books.hand_out(planned, planned, 0, [], Position(1, 4), planned // 5, (), np.array([1, 3, 2, 3], np.int64))
    books.acknowledge()
    planned = np.array([8, 1], np.int64)
    books.hand_out(planned, planned, 0, [], Position(2, 6), planned // 5, (), np.array([2, 3], np.int64))
    progress = books.progress()
    assert progress.source == progress.handed_out == sum_of(0, 7, 1) and progress.acknowledged == sum_of(0, 7)
    assert progress.carried == (
        CarriedSum(epoch=1, handed_out=sum_of(7), acknowledged=sum_of(7)),
        CarriedSum(epoch=2, handed_out=sum_of(9, 8), acknowledged=sum_of(9)),
    )
    books.acknowledge()
    assert [one.acknowledged.count for one in books.progress().carried] == [1, 2]


def test_when_ids_are_added_up_makes_no_difference():
    """Reports and acknowledgements may come after any batch; the sums are those of what was handed out until then."""
    draw = np.random.default_rng(1)
    books, every, acked = make_books(), [], []
    for step in range(1, 6000):
        ids = draw.integers(0, 16, 2)
        every += ids.tolist()
        hand_out(books, ids, steps=step, read=0)
        if draw.random() < 0.3:
            books.acknowledge()
            acked = list(every)
        if draw.random() < 0.01 or step > 5990:
            progress = books.progress()
            assert progress.source == progress.handed_out == sum_of(*every)
            assert progress.acknowledged == sum_of(*acked)


def test_a_loop_may_change_its_batch():
    """Also where the batch was not what was planned."""
    for found in (np.array([0, 1, 6], np.int64), np.array([0, 1, 1], np.int64)):
        books = make_books()
        want = sum_of(*found.tolist())
        hand_out(books, np.array([0, 1, 6], np.int64), found)
        found[:] = 9
        assert books.progress().handed_out == want
