"""Stored records: golden bytes, so that no release changes what an older one wrote; and how commits are grouped."""

import pytest

from dispatcher import records
from dispatcher.effects import Delete, Put
from dispatcher.groups import transactions
from dispatcher.store import MAX_BYTES, MAX_OPERATIONS, check_limits
from manifests.errors import ProtocolError
from manifests.wire import messages as m

SETTINGS = m.JobSettings(
    sources=(m.Source(digest="sha256:d", name="p", version="1"),), spec="sha256:s", pipeline="", seed=7, lanes=12
)
GOLDEN = [
    (records.DatasetRecord(name="p", version="1", digest="sha256:d", order=3, rows=5, shards=2), "datasets/p/1"),
    (records.KeyRecord(id="k", secret=b"\x01\x02", created_ms=9), "keys/k"),
    (records.JobRecord(name="j", generation=2, created_ms=1, used_ms=4), "jobs/j"),
    (
        records.GenerationRecord(
            job="j", number=2, settings=SETTINGS, start=m.StartPoint(kind="checkpoint", epoch=1, step=3, taken=(1, 2)),
            latest=True, decodes=True, fingerprint="f", opened_ms=6, rows=5, granted=True,
        ),
        "jobs/j/generations/2",
    ),
    (
        records.MemberRecord(job="j", generation=2, rank=1, holder=m.Holder(uid="u", host="h", pid=3), nonce="n", left=True),
        "jobs/j/generations/2/members/1",
    ),
    (
        records.AssignmentRecord(
            job="j", generation=2, rank=1, workers=("w1", "w2"), places=(0, 0, 5, 1, 0, 6), which=b"\1\0\0\0",
        ),
        "jobs/j/generations/2/assignments/1",
    ),
    (
        records.RankEpochRecord(
            job="j", generation=2, epoch=1, rank=0, skipped_ids=b"\x07" + b"\x00" * 7,
            progress=m.EpochProgress(epoch=1, step=2, handed=(2, 1), acked=(1, 1), handed_out=m.IdSum(count=3, value=2**64 - 1)),
        ),
        "jobs/j/generations/2/epochs/1/ranks/0",
    ),
    (
        records.EpochRecord(
            job="j", generation=2, epoch=1, step=4, acked_step=3, handed=(2, 2), acked=(2, 1), unfinished=(0,), abandoned=(1,),
            source=m.IdSum(count=4, value=1), padded=2, unbalanced=(m.ShardSum(source=0, shard=1, planned=2, handed_out=1, lost=(4,)),),
        ),
        "jobs/j/generations/2/epochs/1",
    ),
    (
        records.PoolRecord(
            job="j", generation=2, epoch=1, free=b"\x03\x02", carried=b"c" * 32, carried_in=b"d" * 32, settled=b"\x00\x03",
            away=b"\x09\x01", floor=3, floor_step=4,
            book=records.EpochRecord(
                job="j", generation=2, epoch=1, rewound=3, handed_ranges=b"\x00\x01", acked_ranges=b"\x00\x01", whole=True, away=b"\x05\x01",
                quarantined=b"\x01\x02", acked_quarantined=b"\x01\x01", carried=(m.CarriedSum(epoch=0, handed_out=m.IdSum(count=1, value=5)),),
            ),
        ),
        "jobs/j/generations/2/epochs/1/pool",
    ),
    (
        records.LaneRecord(
            job="j", generation=2, epoch=1, limit=9, ended=4, lane=m.LaneGrants(rank=1, number=3, dropped=2, place=1, pieces=b"p" * 32)
        ),
        "jobs/j/generations/2/epochs/1/lanes/1",
    ),
    (
        records.LaneRecord(job="j", generation=2, epoch=1, forgotten=66, lane=m.LaneGrants(rank=1, number=3, dropped=70)),
        "jobs/j/generations/2/epochs/1/lanes/1",
    ),
    (
        records.LanePartRecord(job="j", generation=2, epoch=1, rank=1, number=3, part=1, pieces=b"p" * 32),
        "jobs/j/generations/2/epochs/1/lanes/1/3/1",
    ),
    (
        records.QuarantineRecord(
            job="j", generation=2, at_ms=7,
            shard=m.QuarantinedShard(source=0, shard=5, uri="/d/5.tar", code="shard-missing", reason="not there", workers=("w1", "w2")),
        ),
        "jobs/j/generations/2/quarantine/0-5",
    ),
    (
        records.MarkRecord(
            job="j", generation=2, rank=1, mark=m.EpochProgress(epoch=1, step=6, handed=(9,), lane=m.LaneGrants(rank=1, number=1), before=b"\x00\x02", floor_step=5)
        ),
        "jobs/j/marks/2/1/6/1",
    ),
    (
        records.MemberRecord(job="j", generation=2, rank=1, holder=m.Holder(uid="u"), nonce="n", gone=True, tenure=2),
        "jobs/j/generations/2/members/1",
    ),
]  # fmt: skip
BYTES = [
    "464c0187a174a764617461736574a46e616d65a170a776657273696f6ea131a6646967657374a87368613235363a64a56f7264657203a4726f777305a673686172647302",
    "464c0184a174a36b6579a26964a16ba6736563726574c4020102aa637265617465645f6d7309",
    "464c0185a174a36a6f62a46e616d65a16aaa67656e65726174696f6e02aa637265617465645f6d7301a7757365645f6d7304",
    "464c018ba174aa67656e65726174696f6ea36a6f62a16aa66e756d62657202a873657474696e6773de0005a7736f75726365739183a6646967657374a87368613235363a64a46e616d65a170a776657273696f6ea131a473706563a87368613235363a73a8706970656c696e65a0a47365656407a56c616e65730ca5737461727484a46b696e64aa636865636b706f696e74a565706f636801a47374657003a574616b656e920102a66c6174657374c3a76465636f646573c3ab66696e6765727072696e74a166a96f70656e65645f6d7306a4726f777305a76772616e746564c3",
    "464c0187a174a66d656d626572a36a6f62a16aaa67656e65726174696f6e02a472616e6b01a6686f6c64657283a3756964a175a4686f7374a168a370696403a56e6f6e6365a16ea46c656674c3",
    "464c0187a174aa61737369676e6d656e74a36a6f62a16aaa67656e65726174696f6e02a472616e6b01a7776f726b65727392a27731a27732a6706c6163657396000005010006a57768696368c40401000000",
    "464c0187a174aa72616e6b2d65706f6368a36a6f62a16aaa67656e65726174696f6e02a565706f636801a472616e6b00a870726f6772657373de0005a565706f636801a47374657002a668616e646564920201a561636b6564920101aa68616e6465645f6f757482a5636f756e7403a576616c7565cfffffffffffffffffab736b69707065645f696473c4080700000000000000",
    "464c01de000da174a565706f6368a36a6f62a16aaa67656e65726174696f6e02a565706f636801a47374657004aa61636b65645f7374657003a668616e646564920202a561636b6564920201aa756e66696e69736865649100a96162616e646f6e65649101a6736f7572636582a5636f756e7404a576616c756501a670616464656402aa756e62616c616e6365649185a6736f7572636500a5736861726401a7706c616e6e656402aa68616e6465645f6f757401a46c6f73749104",
    "464c018ca174a4706f6f6ca36a6f62a16aaa67656e65726174696f6e02a565706f636801a466726565c4020302a763617272696564c4206363636363636363636363636363636363636363636363636363636363636363aa636172726965645f696ec4206464646464646464646464646464646464646464646464646464646464646464a7736574746c6564c4020003a461776179c4020901a5666c6f6f7203aa666c6f6f725f7374657004a4626f6f6bde000ca174a565706f6368a36a6f62a16aaa67656e65726174696f6e02a565706f636801ab71756172616e74696e6564c4020102b161636b65645f71756172616e74696e6564c4020101a7636172726965649182a565706f636800aa68616e6465645f6f757482a5636f756e7401a576616c756505ad68616e6465645f72616e676573c4020001ac61636b65645f72616e676573c4020001a577686f6c65c3a461776179c4020501a77265776f756e6403",
    "464c0187a174a46c616e65a36a6f62a16aaa67656e65726174696f6e02a565706f636801a46c616e6585a472616e6b01a66e756d62657203a764726f7070656402a5706c61636501a6706965636573c4207070707070707070707070707070707070707070707070707070707070707070a56c696d697409a5656e64656404",
    "464c0186a174a46c616e65a36a6f62a16aaa67656e65726174696f6e02a565706f636801a46c616e6583a472616e6b01a66e756d62657203a764726f7070656446a9666f72676f7474656e42",
    "464c0188a174a96c616e652d70617274a36a6f62a16aaa67656e65726174696f6e02a565706f636801a472616e6b01a66e756d62657203a47061727401a6706965636573c4207070707070707070707070707070707070707070707070707070707070707070",
    "464c0185a174aa71756172616e74696e65a36a6f62a16aaa67656e65726174696f6e02a5736861726486a6736f7572636500a5736861726405a3757269a82f642f352e746172a4636f6465ad73686172642d6d697373696e67a6726561736f6ea96e6f74207468657265a7776f726b65727392a27731a27732a561745f6d7307",
    "464c0185a174a46d61726ba36a6f62a16aaa67656e65726174696f6e02a472616e6b01a46d61726bde0006a565706f636801a47374657006a668616e6465649109a46c616e6582a472616e6b01a66e756d62657201a66265666f7265c4020002aa666c6f6f725f7374657005",
    "464c0188a174a66d656d626572a36a6f62a16aaa67656e65726174696f6e02a472616e6b01a6686f6c64657281a3756964a175a56e6f6e6365a16ea4676f6e65c3a674656e75726502",
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(GOLDEN)))
def test_golden_bytes(number):
    record, key = GOLDEN[number]
    assert record.key == key
    assert records.encode(record).hex() == BYTES[number]
    assert records.decode(bytes.fromhex(BYTES[number])) == record


def test_every_stored_kind_has_golden_bytes():
    assert {type(record) for record, _ in GOLDEN} == set(records.Stored.__args__)


@pytest.mark.parametrize("data", [b"", b"FL\x02\x80", b"FL\x01\x81\xa1t\xa3new", b"\x00" * 9])
def test_what_is_no_record_is_refused(data):
    with pytest.raises(ProtocolError):
        records.decode(data)


# -- group commit


def merged(groups):
    out = {}
    for puts, deletes in groups:
        check_limits(puts, deletes)
        out.update(puts)
        for key in deletes:
            out.pop(key, None)
    return out


def test_events_share_a_transaction():
    groups = list(transactions([[Put("a", b"1")], [], [Put("b", b"2"), Delete("c")], [Put("a", b"3")]]))
    assert groups == [({"a": b"3", "b": b"2"}, {"c"})]


def test_nothing_to_store_is_no_transaction():
    assert list(transactions([[], []])) == []


def test_the_last_word_on_a_key_counts():
    groups = list(
        transactions(
            [
                [Put("a", b"1"), Delete("a")],
                [Delete("b")],
                [Put("b", b"2")],
                [Put("c", b""), Delete("c"), Put("c", b"3")],
            ]
        )
    )
    assert groups == [({"b": b"2", "c": b"3"}, {"a"})]


def test_an_event_is_never_spread_unless_it_must():
    events = [[Put(f"k{i}-{j}", b"x") for j in range(50)] for i in range(5)]
    groups = list(transactions(events))
    assert [len(puts) for puts, _ in groups] == [100, 100, 50]
    assert len(merged(groups)) == 250


def test_a_large_event_is_cut_with_its_puts_first():
    effects = [Delete(f"old{i}") for i in range(300)] + [Put(f"new{i}", b"v") for i in range(130)]
    groups = list(transactions([[Put("before", b"")], effects, [Put("after", b"")]]))
    assert [(len(p), len(d)) for p, d in groups] == [(1, 0), (127, 0), (3, 0), (0, 127), (0, 127), (0, 46), (1, 0)]
    assert MAX_OPERATIONS == 127 and len(merged(groups)) == 132


def test_bytes_are_bounded_too():
    groups = list(transactions([[Put(f"k{i}", b"v" * (MAX_BYTES // 3))] for i in range(5)]))
    assert [len(puts) for puts, _ in groups] == [2, 2, 1] and len(merged(groups)) == 5
