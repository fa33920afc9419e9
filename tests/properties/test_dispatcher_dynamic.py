"""Dynamic order under any history, against sets: asks whose answers are lost, acknowledgements, skips, saved states loaded
with other world sizes, "latest", ranks of elastic jobs that die and come back, take-overs at any moment.

The model knows, per epoch, which positions were handed out and acknowledged since the start point. ``Bench.apply`` checks
after every event that the store holds what memory holds and that every row of each pool is in one place; the model checks
that no row is handed out twice, and at the end that none is missing and that the audit says so.
"""

import random

from core_bench import LEASE, Bench, DynamicRank, start_of
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.errors import Fenced
from manifests.granted import decode_pieces
from manifests.ranges import Ranges
from manifests.wire import messages as m

EPOCHS = 2


class History:
    """One job and its ranks, driven at random."""

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        self.bench = Bench([draw.randint(0, 14) for _ in range(draw.randint(1, 7))] + [draw.randint(1, 20)])
        self.bench.worker()
        self.total = self.bench.manifest.rows
        shuffles = [
            None,
            m.Shuffle(buffer=draw.randint(0, 40), interleave=draw.randint(1, 3), within_shard=draw.random() < 0.5),
        ]
        self.settings = {
            "order": "dynamic",
            "tail": draw.choice(["pad", "drop", "ragged"]),
            "elastic": draw.random() < 0.4,
            "batch_size": draw.randint(1, 4),
            "shuffle": draw.choice(shuffles),
            "lanes": 24,
            "epochs": EPOCHS,
            "on_error": "skip",
        }
        if self.settings["elastic"] and self.settings["tail"] == "drop":
            self.settings["tail"] = "pad"
        self.uids = 0
        self.world = draw.choice([1, 2, 3, 4])
        self.ranks = {}
        #: epoch -> rows of it that lie before the start point or that ranks which are no more acknowledged
        self.sure = {}
        self.finished = set()
        self.open(m.StartPoint())

    def uid(self):
        self.uids += 1
        return f"h{self.uids}"

    def open(self, start, **changes):
        self.settings |= changes
        uids = [self.uid() for _ in range(self.world)]
        dead = tuple(rank.uid for rank in self.ranks.values())
        for rank in range(self.world):
            self.bench.open(
                rank, uids[rank], world_size=self.world, start=start, dead=dead, nonce=uids[rank], **self.settings
            )
        self.opened = self.bench.open(0, uids[0], world_size=self.world, start=start, nonce=uids[0], **self.settings)
        begin = self.opened.start
        assert not self.opened.absent
        self.ranks = {r: DynamicRank(self.bench, self.opened, r, uid=uids[r]) for r in range(self.world)}
        self.finished = set()
        self.sure = {begin.epoch: [(begin.epoch, p) for p in Ranges.decode(begin.ranges).values().tolist()]}
        for earlier in range(begin.epoch):
            carried = {p for e, p in self.carried(begin) if e == earlier}
            self.sure[earlier] = [(earlier, p) for p in range(self.total) if p not in carried]

    @staticmethod
    def carried(start):
        return [(piece.epoch, p) for piece in decode_pieces(start.carried) for p in range(piece.start, piece.stop)]

    # -- steps

    def some(self):
        return self.draw.choice(list(self.ranks.values()))

    def work(self):
        rank = self.some()
        if rank.done:
            return self.finish(rank)
        if self.draw.random() < 0.1:
            rank.skip()
        if not rank.hand():
            rank.ask(self.draw.randint(1, rank.window + 9), lose=self.draw.random() < 0.2)
        if self.draw.random() < 0.4:
            rank.ack()
        if self.draw.random() < 0.4:
            rank.send()
        return None

    def finish(self, rank):
        if rank.epoch == EPOCHS - 1 or rank.epoch > min(r.epoch for r in self.ranks.values()):
            return
        rank.ack()
        rank.send("finished")
        self.sure.setdefault(rank.epoch, []).extend(rank.rows)
        self.ranks[rank.rank] = DynamicRank(self.bench, self.opened, rank.rank, rank.epoch + 1, rank.uid)

    def to_the_end(self, rank):
        for _ in range(20 * self.total + 200):
            if rank.done:
                rank.ack()
                rank.send("finished")
                self.sure.setdefault(rank.epoch, []).extend(rank.rows)
                self.ranks[rank.rank] = DynamicRank(self.bench, self.opened, rank.rank, rank.epoch + 1, rank.uid)
                return
            if not rank.hand():
                rank.ask(rank.window + 4)
        raise AssertionError((rank.epoch, rank.lane, rank.place, self.bench.state.jobs.by_name["train"].pools))

    def take_over(self):
        self.bench.reload()
        self.bench.worker()

    def resume(self):
        """All ranks are killed and go on from states saved at one moment."""
        ranks = list(self.ranks.values())
        if len({rank.epoch for rank in ranks}) > 1 or len(ranks) < self.world:
            return
        if self.settings["elastic"] and any(rank.carried is None for rank in ranks):
            return  # a state from before a rank's first answer does not know of rows carried over
        start = start_of(ranks)
        if self.draw.random() < 0.5 and len({rank.step for rank in ranks}) == 1:
            for rank in ranks[1:]:
                rank.send(marks=(rank.mark(),))
            start = start_of(ranks[:1])
        else:
            self.world = self.draw.choice([1, 2, 3, 4, 8])
        self.open(start)

    def latest(self):
        """All ranks are killed and go on where they had acknowledged."""
        for rank in self.ranks.values():
            rank.send()
        self.world = self.draw.choice([self.world, self.world, 2, 3])
        self.open(m.StartPoint(kind="latest"))

    def die(self):
        """A rank of an elastic job is silent for longer than its lease; another one may take its place."""
        if not self.settings["elastic"] or len(self.ranks) < 2:
            return
        slowest = min(self.ranks.values(), key=lambda rank: rank.epoch)
        rank = self.draw.choice([slowest, self.some()])
        rank.send()
        if rank.epoch == 0 and self.draw.random() < 0.4:
            for other in [other for other in self.ranks.values() if other is not rank and other.epoch == 0]:
                self.to_the_end(other)  # nobody is left in the epoch: rows are carried over
        others = [other for other in self.ranks.values() if other is not rank]
        self.bench.wait(LEASE / 2)
        for other in others:
            other.send()
        if self.draw.random() < 0.5:
            self.bench.wait(LEASE / 2 + 1)
            for other in others:
                other.send()
        else:
            self.bench.open(
                rank.rank,
                self.uid(),
                world_size=self.world,
                start=m.StartPoint(kind="latest"),
                dead=(rank.uid,),
                **self.settings,
            )
        try:
            rank.send()
        except Fenced:
            pass
        else:
            raise AssertionError("a rank whose rows went to others was not fenced")
        self.sure.setdefault(rank.epoch, []).extend(row for row in rank.rows[: rank.acked_rows])
        del self.ranks[rank.rank]
        self.rejoin(rank.rank)

    def rejoin(self, rank):
        member = self.bench.state.jobs.by_name["train"].members[rank]
        if member.gone and self.draw.random() < 0.5:
            return
        uid = member.holder.uid
        if member.gone:
            uid = self.uid()
            self.bench.open(rank, uid, world_size=self.world, start=m.StartPoint(kind="latest"), **self.settings)
        epoch = self.bench.state.jobs.by_name["train"].rank_epoch(rank)
        self.ranks[rank] = DynamicRank(self.bench, self.opened, rank, epoch, uid)

    # -- checks

    def rows(self):
        found = [row for rows in self.sure.values() for row in rows]
        return found + [row for rank in self.ranks.values() for row in rank.rows]

    def check(self):
        rows = self.rows()
        assert len(rows) == len(set(rows)), sorted(row for row in set(rows) if rows.count(row) > 1)
        job = self.bench.state.jobs.by_name["train"]
        for epoch in range(self.opened.start.epoch, job.newest_epoch() + 1):
            document = self.bench.audit(epoch=epoch)
            assert document["lost"] == document["repeated"] == 0 and not document["shards"], document

    def run_out(self):
        """Every rank takes what there is."""
        for epoch in range(EPOCHS):
            for _ in range(20 * self.total + 200):
                busy = [rank for rank in self.ranks.values() if rank.epoch == epoch]
                if not busy:
                    break
                rank = self.draw.choice(busy)
                if rank.done:
                    rank.ack()
                    rank.send("finished")
                    self.sure.setdefault(epoch, []).extend(rank.rows)
                    self.ranks[rank.rank] = DynamicRank(self.bench, self.opened, rank.rank, epoch + 1, rank.uid)
                elif not rank.hand():
                    rank.ask(rank.window + 4)
            else:
                raise AssertionError((epoch, busy, self.bench.state.jobs.by_name["train"].pools))
            self.check()
        rows = set(self.rows())
        for epoch in range(EPOCHS):
            here = [row for row in rows if row[0] == epoch]
            document = self.bench.audit(epoch=epoch)
            missing = self.total - len(here)
            if self.settings["elastic"] and missing:
                assert document["open"] == missing and document["state"] != "complete", (document, missing)
                assert epoch == EPOCHS - 1  # nothing comes after it that could hand the rows out
                continue
            assert document["state"] == "complete", document
            if self.settings["tail"] == "drop":
                # of an epoch before the start point the model does not know what was dropped
                dropped = missing if epoch >= self.opened.start.epoch else document["dropped"]
                assert document["dropped"] == dropped < 8 * self.settings["batch_size"], document
            else:
                assert missing == 0, document
            assert document["acknowledged"] + document["skipped"] + document["dropped"] == self.total, document


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_every_row_is_granted_to_one_lane_and_none_is_lost(seed):
    history = History(seed)
    for _ in range(history.draw.randint(0, 60)):
        what = history.draw.random()
        if what < 0.85:
            history.work()
        elif what < 0.88:
            history.take_over()
        elif what < 0.91:
            history.resume()
        elif what < 0.93:
            history.latest()
        else:
            history.die()
        if history.draw.random() < 0.1:
            history.check()
    history.run_out()
