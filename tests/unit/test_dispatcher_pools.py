"""Dynamic order: what an ask gets, how sizes are guided, quotas, cuts, the floor, and going on from a start point."""

from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from core_bench import LEASE, Bench, DynamicRank, make_manifest, start_of

from dispatcher import events, records
from dispatcher import pool as pool_module
from dispatcher.effects import Delete, Put
from dispatcher.files import KEPT_ORDERS, Files
from dispatcher.state import State
from manifests.errors import ConfigError, ProtocolError, StateMismatch
from manifests.granted import Piece, decode_pieces, encode_pieces
from manifests.plan import Plan
from manifests.ranges import Ranges
from manifests.wire import messages as m

DYNAMIC = {"order": "dynamic", "shuffle": None, "lanes": 24}


@pytest.fixture
def bench():
    bench = Bench([10] * 8)
    bench.worker()
    return bench


def opened(bench, world=1, **settings):
    settings = {**DYNAMIC, **settings}
    for rank in range(world):
        found = bench.open(rank, world_size=world, **settings)
    return found


def ranks_of(bench, found, epoch=None):
    return [DynamicRank(bench, found, rank, epoch) for rank in range(found.settings.world_size)]


def pieces(reply):
    return decode_pieces(reply.lane.pieces)


def pool(bench, epoch=0):
    return bench.state.jobs.by_name["train"].pools[epoch]


# -- what an ask gets


def test_an_ask_gets_pieces_in_plan_order_each_inside_one_shard(bench):
    found = opened(bench, batch_size=4)
    reply = bench.ask(found, shards=(), have=0, want=25, place=0)
    assert pieces(reply) == [Piece(0, 0, 10, 0), Piece(10, 10, 20, 0), Piece(20, 20, 30, 0)]
    assert reply.lane.number == 0 and reply.lane.dropped == 0 and not reply.final


def test_the_same_ask_again_gets_the_same_pieces_and_stores_nothing(bench):
    found = opened(bench, batch_size=4)
    first = bench.ask(found, shards=(), have=0, want=25, place=0)
    before = dict(bench.stored)
    again = bench.ask(found, shards=(), have=0, want=25, place=0)
    assert again.lane == first.lane and bench.stored == before
    more = bench.ask(found, shards=(), have=20, want=31, place=0)
    assert pieces(more) == [Piece(20, 20, 30, 0), Piece(30, 30, 40, 0)] and more.lane.dropped == 20


def test_pieces_are_stored_before_they_are_answered(bench):
    found = opened(bench, world=2)
    first = bench.ask(found, 1, shards=(), have=0, want=9, place=0)
    bench.reload()
    bench.worker()
    assert bench.ask(found, 1, shards=(), have=0, want=9, place=0).lane == first.lane
    other = bench.ask(found, 0, shards=(), have=0, want=9, place=0)
    assert {p.start for p in pieces(other)}.isdisjoint(p.start for p in pieces(first))


def test_interleave_makes_groups_of_pieces_of_different_shards(bench):
    found = opened(bench, batch_size=4, shuffle=m.Shuffle(buffer=0, interleave=3))
    groups = {}
    for piece in pieces(bench.ask(found, shards=(), have=0, want=80, place=0)):
        groups.setdefault(piece.index, []).append(piece.start // 10)
    shards = [group for group in groups.values() if len(group) > 1]
    assert len(shards[0]) == 3 and all(len(set(group)) == len(group) for group in shards)


def test_a_large_shard_is_cut_into_pieces_of_64_mib():
    bench = Bench([3_000_000])
    bench.worker()
    found = opened(bench)
    got = pieces(bench.ask(found, shards=(), have=0, want=3_000_000, place=0))
    assert [len(piece) for piece in got[:2]] == [(64 << 20) // 100] * 2 and max(map(len, got)) == len(got[0])


def test_the_end_of_an_epoch_is_shared_by_small_pieces():
    bench = Bench([1000])
    bench.worker()
    found = opened(bench, world=2, tail="ragged", batch_size=5)
    sizes, places = [], [0, 0]
    for turn in range(400):
        rank = turn % 2
        reply = bench.ask(found, rank, shards=(), have=places[rank], want=places[rank] + 1, place=places[rank])
        got = [piece for piece in pieces(reply) if len(piece)]
        if not got:
            break
        sizes += map(len, got)
        places[rank] += sum(map(len, got))
    assert sizes[0] == 250 and sizes == sorted(sizes, reverse=True)[:-1] + sizes[-1:] and max(sizes[-4:]) <= 5
    assert sum(places) == 1000 and abs(places[0] - places[1]) <= 250


@pytest.mark.parametrize("bad", [{"have": -1, "want": 3, "place": 0}, {"have": 0, "want": 3, "place": -1}])
def test_counts_below_zero_are_refused(bench, bad):
    with pytest.raises(ProtocolError):
        bench.ask(opened(bench), shards=(), **bad)


# -- quotas, cuts and ends


@pytest.mark.parametrize("tail, steps", [("pad", 9), ("drop", 8)])
def test_every_rank_gets_its_quota_and_no_more(tail, steps):
    bench = Bench([7, 0, 11, 9])  # 27 rows
    bench.worker()
    found = opened(bench, world=3, batch_size=1, tail=tail)
    assert bench.ask(found, 0, shards=(), have=0, want=27, place=0).final
    ranks = ranks_of(bench, found)
    for rank in reversed(ranks):
        rank.finish()
    assert [rank.lane.length for rank in ranks] == [9, 9, 9]
    assert bench.audit()["state"] == "complete" and bench.audit()["acknowledged"] == 27


def test_without_quotas_a_rank_holds_its_part_only_and_ends_when_asking_again_gives_nothing(bench):
    found = opened(bench, world=2, tail="ragged")
    ranks = ranks_of(bench, found)
    ranks[0].ask(1000)
    assert ranks[0].lane.length <= 80 / 4 and not ranks[0].over
    ranks[1].finish()
    ranks[0].finish()
    assert ranks[0].lane.length + ranks[1].lane.length == 80
    assert bench.audit()["state"] == "complete"


def test_a_rank_that_leaves_early_gives_back_what_it_had_not_handed_out(bench):
    found = opened(bench, world=2, tail="ragged")
    ranks = ranks_of(bench, found)
    ranks[0].ask(10)
    ranks[0].hand()
    ranks[0].ack()
    ranks[0].send("abandoned")
    assert pool(bench).free_rows == 78
    assert bench.ask(found, 0, shards=(), have=10, want=20, place=2).final
    ranks[1].finish()
    assert ranks[1].place == 78
    assert bench.audit()["acknowledged"] == 80 and bench.audit()["state"] == "complete"


def test_with_quotas_what_a_rank_that_left_early_had_is_abandoned(bench):
    found = opened(bench, world=2)
    ranks = ranks_of(bench, found)
    ranks[0].ask(10)
    ranks[0].hand()
    ranks[0].send("abandoned")
    ranks[1].finish()
    document = bench.audit()
    assert (document["acknowledged"], document["abandoned"], document["lost"]) == (40, 40, 0)


def test_a_rank_that_closes_gives_its_rows_back_too(bench):
    found = opened(bench, world=2, tail="ragged")
    ranks = ranks_of(bench, found)
    ranks[0].ask(10)
    ranks[0].hand()
    ranks[0].ack()
    ranks[0].send(leaving=True)
    ranks[1].finish()
    assert ranks[1].place == 78


# -- the floor


def test_the_floor_follows_the_slowest_rank_and_lanes_forget_what_lies_below(bench):
    found = opened(bench, world=2, batch_size=5)
    ranks = ranks_of(bench, found)
    for rank in ranks:
        rank.ask(10)
    for _ in range(2):
        ranks[0].hand()
    ranks[0].ack()
    assert ranks[0].send().floors == ()
    for _ in range(2):
        ranks[1].hand()
    ranks[1].ack()
    floor = ranks[1].send().floors[0]
    assert (floor.position, floor.step) == (20, 2)
    assert pool(bench).lanes[0].pieces == [] and pool(bench).lanes[0].dropped == 10
    assert bench.ask(found, 0, shards=(), have=10, want=11, place=10).floor == floor
    bench.reload()
    assert pool(bench).floor == 20


def test_records_do_not_grow_with_the_position():
    bench = Bench([5] * 400)
    bench.worker()
    found = opened(bench, world=2, batch_size=5, shuffle=m.Shuffle(buffer=40))
    ranks, sizes = ranks_of(bench, found), []
    for _ in range(150):
        for rank in ranks:
            while not rank.hand():
                rank.ask(rank.window + 10)
            rank.ack()
            rank.send()
        sizes.append(sum(len(v) for k, v in bench.stored.items() if "/epochs/" in k))
    assert max(sizes[100:]) < 1.2 * max(sizes[20:60])


def test_a_lane_that_keeps_all_it_may_waits_for_the_floor_and_says_so(bench, monkeypatch):
    monkeypatch.setattr(pool_module, "MAX_KEPT", 3)
    found = opened(bench, world=2, batch_size=5)
    ranks = ranks_of(bench, found)
    ranks[1].ask(10)
    reply = bench.ask(found, 0, shards=(), have=0, want=10, place=0)
    assert not reply.waiting
    full = bench.ask(found, 0, shards=(), have=0, want=80, place=0)
    assert len(pieces(full)) == 3 and full.waiting_code == "wait-timeout"
    assert full.waiting == (
        "rank 0, which has not acknowledged epoch 0 after step 0: rank 0 has 3 pieces after that and cannot be given more"
    )
    ranks[0].take(reply)
    for _ in range(2):
        ranks[0].hand()
    ranks[0].ack()
    ranks[0].send()
    assert bench.ask(found, 0, shards=(), have=30, want=80, place=10).waiting.startswith(
        "rank 1, which has not acknowledged"
    )
    for _ in range(2):
        ranks[1].hand()
    ranks[1].ack()
    ranks[1].send()
    more = bench.ask(found, 0, shards=(), have=30, want=80, place=10)
    assert [len(piece) for piece in pieces(more)] == [10, 0] and not more.waiting


# -- lanes in parts


class Weighed(Bench):
    """A bench that knows how many bytes the last event stored."""

    put = 0

    def apply(self, kind, **fields):
        before = dict(self.stored)
        try:
            return super().apply(kind, **fields)
        finally:
            self.put = sum(len(data) for key, data in self.stored.items() if before.get(key) is not data)


def test_what_an_ask_stores_does_not_grow_while_nobody_acknowledges():
    bench = Weighed([1] * 20_000)
    bench.worker()
    found = opened(bench, world=2, batch_size=5)
    have, sizes = [0, 0], []
    for turn in range(50):
        rank = turn % 2
        reply = bench.ask(
            found, rank, shards=(), have=have[rank], want=have[rank] + 400, place=max(0, have[rank] - 400)
        )
        assert sum(map(len, pieces(reply))) == 400
        have[rank] += 400
        sizes.append(bench.put)
    assert have == [10_000, 10_000] and pool(bench).is_empty
    assert max(sizes) < 1.2 * min(sizes) < 20_000
    assert max(len(data) for key, data in bench.stored.items() if "/lanes/" in key) < 3000
    lanes = [held.pieces for held in pool(bench).lanes.values()]
    assert len(lanes[0]) >= 10_000
    bench.reload()
    bench.worker()
    assert [held.pieces for held in pool(bench).lanes.values()] == lanes
    assert bench.ask(found, 0, shards=(), have=9_990, want=10_000, place=9_990).final
    before = len(bench.stored)
    for rank in range(2):
        bench.report(found, rank, m.EpochProgress(epoch=0, step=1900, acked_step=1900, handed=(9500,), acked=(9500,)))
    assert pool(bench).floor > 18_000 and len(bench.stored) < before - 280
    bench.reload()
    assert all(500 <= len(held.pieces) < 1000 for held in pool(bench).lanes.values())


def test_parts_that_no_lane_needs_are_deleted_by_the_next_dispatcher():
    bench = Bench([1] * 600)
    bench.worker()
    found = opened(bench, world=2, batch_size=5, tail="ragged", elastic=True)
    ranks = ranks_of(bench, found)
    ranks[0].ask(100)
    ranks[1].ask(10)
    left_over = {key: data for key, data in bench.stored.items() if "/lanes/0/" in key}
    assert sorted(key[-2:] for key in left_over) == ["/0", "/1"]
    bench.wait(6)
    ranks[1].send()
    bench.wait(5)
    assert not any("/lanes/0" in key for key in bench.stored)
    bench.stored |= left_over
    bench.reload()
    assert not any("/lanes/0" in key for key in bench.stored)
    bench.worker()
    ranks[1].send()
    ranks[1].finish()
    assert bench.audit()["acknowledged"] == 600


def test_the_many_parts_of_a_dead_rank_go_bit_by_bit(monkeypatch):
    monkeypatch.setattr("dispatcher.pools.MOST_DELETED", 2)
    bench = Bench([1] * 1500)
    bench.worker()
    found = opened(bench, world=2, batch_size=5, tail="ragged", elastic=True)
    ranks = ranks_of(bench, found)
    ranks[0].ask(375)
    parts = [key for key in bench.stored if "/lanes/0/" in key]
    assert len(parts) > 4
    bench.wait(6)
    ranks[1].send()
    bench.at += 5
    state, deleted = bench.state, []
    deleted += [
        e.key for e in state.apply(events.TimePassed(at=bench.at, now_ms=bench.now_ms)) if isinstance(e, Delete)
    ]
    assert len(set(deleted) & set(parts)) == 2
    for _ in range(2):
        state.check()
        message = m.Report(
            job="train", generation=1, rank=1, holder="u1", epochs=(m.EpochProgress(epoch=0, handed=(0,), acked=(0,)),)
        )
        effects = state.apply(events.ProgressReported(at=bench.at, now_ms=bench.now_ms, message=message))
        deleted += [effect.key for effect in effects if isinstance(effect, Delete)]
    assert set(parts) <= set(deleted)


def test_lanes_stored_whole_by_older_releases_are_taken_in_and_stored_in_parts():
    bench = Bench([1] * 300)
    bench.worker()
    found = opened(bench, world=2, batch_size=5)
    for rank in range(2):
        bench.ask(found, rank, shards=(), have=0, want=100, place=0)
    lanes = [held.pieces for held in pool(bench).lanes.values()]
    for rank in range(2):
        record = pool(bench).whole_lane(rank)
        bench.stored = {k: v for k, v in bench.stored.items() if not k.startswith(record.key + "/")}
        bench.stored[record.key] = records.encode(record)
    fresh = State(bench.shelf, LEASE)
    puts = {e.key: e.value for e in fresh.load(bench.stored, bench.at) if isinstance(e, Put)}
    bench.stored |= puts
    assert sum("/lanes/" in key for key in puts) == 2 * (1 + 2)
    bench.reload()
    assert [held.pieces for held in pool(bench).lanes.values()] == lanes
    bench.worker()
    bench.ask(found, 0, shards=(), have=100, want=120, place=90)


# -- going on


@pytest.mark.parametrize("shuffle", [None, m.Shuffle(buffer=24, interleave=2)])
def test_a_state_loaded_at_once_goes_on_with_the_same_rows(bench, shuffle):
    found = opened(bench, world=2, shuffle=shuffle)
    ranks = ranks_of(bench, found)
    for _ in range(5):
        for rank in ranks:
            while not rank.hand():
                rank.ask(20)
    start = start_of(ranks)
    want = [rank.lane.leave(rank.place, 6)[0].tolist() for rank in ranks]
    for rank in ranks:
        rank.send(leaving=True)
    bench.wait(11)
    again = [bench.open(r, f"v{r}", world_size=2, start=start, **{**DYNAMIC, "shuffle": shuffle}) for r in range(2)][1]
    assert again.generation == 2 and again.absent == ()
    after = [DynamicRank(bench, again, r, uid=f"v{r}") for r in range(2)]
    assert [rank.lane.leave(rank.place, 6)[0].tolist() for rank in after] == want
    for rank in after:
        rank.finish()
    assert sorted(p for rank in (*ranks, *after) for _, p in rank.rows) == list(range(80))
    assert bench.audit()["acknowledged"] == 80 and bench.audit()["state"] == "complete"


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_case_5_a_state_of_four_ranks_goes_on_with_another_world_size(bench, world):
    found = opened(bench, world=4)
    ranks = ranks_of(bench, found)
    for rank in ranks:
        rank.ask(9)
        rank.hand()
    start = start_of(ranks)
    for rank in ranks:
        rank.send(leaving=True)
    bench.wait(11)
    for r in range(world):
        again = bench.open(r, f"v{r}", world_size=world, start=start, **DYNAMIC)
    assert again.start.lanes == ()
    after = [DynamicRank(bench, again, r, uid=f"v{r}") for r in range(world)]
    for rank in after:
        rank.finish()
    assert max(rank.step for rank in after) == min(rank.step for rank in after)
    assert sorted(p for rank in (*ranks, *after) for _, p in rank.rows) == list(range(80))


def test_latest_goes_on_where_rows_were_acknowledged(bench):
    found = opened(bench, world=2)
    ranks = ranks_of(bench, found)
    for rank in ranks:
        rank.ask(12)
        rank.hand()
        rank.ack()
        rank.hand()
        rank.send()
    bench.wait(11)
    again = [bench.open(r, f"v{r}", world_size=2, start=m.StartPoint(kind="latest"), **DYNAMIC) for r in range(2)][1]
    assert len(Ranges.decode(again.start.ranges)) == 4 and [lane.place for lane in again.start.lanes] == [2, 2]
    after = [DynamicRank(bench, again, r, uid=f"v{r}") for r in range(2)]
    assert after[0].lane.leave(2, 2)[0].tolist() == [p for _, p in ranks[0].rows[2:]]
    for rank in after:
        rank.finish()
    document = bench.audit()
    assert (document["acknowledged"], document["rewound"], document["lost"], document["repeated"]) == (80, 4, 0, 0)


def test_lanes_longer_than_what_their_rank_may_still_have_go_back_to_the_pool(bench):
    found = opened(bench, world=2)
    ranks = ranks_of(bench, found)
    ranks[0].ask(80)
    ranks[1].ask(80)
    for _ in range(10):
        ranks[1].hand()
    start = start_of(ranks)
    bench.wait(11)
    again = [bench.open(r, f"v{r}", world_size=2, start=start, **DYNAMIC) for r in range(2)][1]
    assert again.start.lanes == ()
    after = [DynamicRank(bench, again, r, uid=f"v{r}") for r in range(2)]
    for rank in after:
        rank.finish()
    assert [rank.place for rank in after] == [30, 30]


def damaged(start):
    lane = start.lanes[0]
    return {
        "rows past the end": {"ranges": Ranges.of([(0, 81)]).encode()},
        "a lane in what was taken": {"ranges": Ranges.of([(0, 40)]).encode()},
        "places past the lane": {"lanes": (msgspec.structs.replace(lane, place=30), *start.lanes[1:])},
        "two lanes with the same rows": {"lanes": (lane, msgspec.structs.replace(lane, rank=1))},
        "pieces that do not continue": {
            "lanes": (msgspec.structs.replace(lane, pieces=encode_pieces([Piece(4, 0, 9, 0)])), *start.lanes[1:])
        },
        "rows carried from no earlier epoch": {"carried": encode_pieces([Piece(0, 1, 2, 0)])},
        "counts of the other order": {"taken": (0,) * 24},
    }


@pytest.mark.parametrize("name", sorted(damaged(m.StartPoint(lanes=(m.LaneGrants(rank=0),)))))
def test_a_state_that_does_not_fit_is_refused(bench, name):
    found = opened(bench, world=2)
    ranks = ranks_of(bench, found)
    for rank in ranks:
        rank.ask(9)
        rank.hand()
    start = start_of(ranks)
    bench.wait(11)
    bad = msgspec.structs.replace(start, **damaged(start)[name])
    with pytest.raises(StateMismatch):
        bench.open(0, "v0", world_size=2, start=bad, **DYNAMIC)
    assert bench.open(0, "v0", world_size=2, start=start, **DYNAMIC).generation == 2


def test_a_state_of_dynamic_order_does_not_fit_a_deterministic_job(bench):
    start = m.StartPoint(kind="checkpoint", ranges=Ranges.of([(0, 4)]).encode())
    with pytest.raises(StateMismatch, match="dynamic order"):
        bench.open(0, start=start, lanes=24)


@pytest.mark.parametrize("bad", [{"elastic": True}, {"elastic": True, "tail": "drop", **DYNAMIC}])
def test_elastic_jobs_need_dynamic_order_and_no_dropping(bench, bad):
    with pytest.raises(ConfigError, match="elastic") as caught:
        bench.open(**bad)
    assert "elastic=False" in (caught.value.remedy or "")


def test_books_past_the_lane_are_refused(bench):
    found = opened(bench)
    rank = ranks_of(bench, found)[0]
    rank.ask(5)
    for handed, acked in (((81,), (0,)), ((3,), (4,)), ((3, 1), (0, 0)), ((-1,), (-1,))):
        with pytest.raises(ProtocolError):
            bench.report(found, 0, m.EpochProgress(epoch=0, handed=handed, acked=acked))


# -- which shard is at a position


@pytest.mark.parametrize("shuffle", [None, m.Shuffle(), m.Shuffle(within_shard=True)])
def test_shards_are_found_in_the_order_of_the_plan_and_orders_are_kept(tmp_path, shuffle):
    files, manifest = Files(tmp_path), make_manifest([3, 0, 5, 1, 7])
    files.store_manifest(manifest.digest, manifest.to_bytes())
    order = files.plan(manifest.digest, 7, 2, shuffle)
    whole = Plan(manifest.shard_rows, seed=7, epoch=2, shuffle=shuffle, lanes=24)
    shards = whole.plan_rows(np.arange(16))[0].tolist()
    for position, shard in [*enumerate(shards), *enumerate(shards)]:
        assert order.at(position) == (shard, shards.index(shard))
    assert files.plan(manifest.digest, 7, 2, shuffle) is order
    for epoch in range(KEPT_ORDERS + 3):
        files.plan(manifest.digest, 8, epoch, shuffle)
    assert files.plan(manifest.digest, 7, 2, shuffle) is not order


def test_ranks_that_begin_together_share_one_order(tmp_path):
    files, manifest = Files(tmp_path), make_manifest([1] * 20_000)
    files.store_manifest(manifest.digest, manifest.to_bytes())
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: files.plan(manifest.digest, 7, 2, m.Shuffle()), range(8)))
    assert len({id(order) for order in found}) == 1
