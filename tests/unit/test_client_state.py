"""Saved states: their form, joining those of several ranks, and what they are held against."""

import json
import pickle

import msgspec
import pytest
import torch

from manifests.errors import ConfigError, StateMismatch
from manifests.wire.messages import JobSettings, Shuffle, Source
from trainer_client.state import VERSION, check_fits, decode_taken, encode_step, encode_taken, identity_of, load

SETTINGS = JobSettings(
    sources=(Source(digest="sha256:aa", name="numbers", version="1"),),
    spec="sha256:bb",
    pipeline="sha256:cc",
    seed=7,
    shuffle=Shuffle(buffer=64),
    lanes=4,
    batch_size=8,
    world_size=2,
)


def make_state(rank=0, counts=(3, 3, 2, 2), **changes):
    state = {
        "version": VERSION,
        "dataset": "numbers@1",
        "identity": identity_of(SETTINGS),
        "generation": 2,
        "epoch": 1,
        "step": encode_step(5),
        "first_epoch": 0,
        "rank": rank,
        "world_size": 2,
        "taken": encode_taken(counts),
        "skip": False,
    }
    return {**state, **changes}


def settings(**changes):
    return msgspec.structs.replace(SETTINGS, **changes)


# -- form ----------------------------------------------------------------------------------------------------------


def test_a_state_becomes_a_start_point():
    loaded = load(make_state())
    assert loaded.identity == identity_of(SETTINGS) and loaded.dataset == "numbers@1"
    start = loaded.start
    assert (start.kind, start.epoch, start.step, start.first_epoch) == ("checkpoint", 1, 5, 0)
    assert (start.taken, start.generation, start.world_size, start.skip) == ((3, 3, 2, 2), 2, 2, False)
    assert loaded.state == make_state()


def test_steps_may_be_numbers_too():
    assert load(make_state(step=5)).state == make_state()
    assert load([make_state(step=5), make_state(1)]).start.step == 5


def test_a_state_survives_every_way_of_keeping_it(tmp_path):
    state = make_state()
    assert pickle.loads(pickle.dumps(state)) == json.loads(json.dumps(state)) == state
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state


def test_a_state_from_before_the_first_batch_starts_afresh():
    loaded = load(make_state(identity=None, taken="", generation=0, step=0, epoch=0))
    assert loaded.identity is None and loaded.start.kind == "fresh"


@pytest.mark.parametrize("value", [None, 5, "state", b"state", [], {}, [{}], {"version": 1}, [make_state(), 3]])
def test_what_is_no_state(value):
    with pytest.raises(ConfigError, match="state"):
        load(value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 2}, "version 2"),
        ({"step": -1}, "count"),
        ({"step": "5"}, "count"),
        ({"step": "-000000000000005"}, "count"),
        ({"step": 5.0}, "count"),
        ({"epoch": None}, "count"),
        ({"rank": True}, "count"),
        ({"world_size": 1.5}, "count"),
        ({"generation": 1 << 63}, "count"),
        ({"taken": 5}, "counts"),
        ({"taken": "0" * 15}, "counts"),
        ({"taken": "-" + "0" * 15}, "counts"),
        ({"taken": "8" + "0" * 15}, "counts"),
        ({"taken": "0" * 63 + " "}, "counts"),
        ({"taken": "0" * 63 + "g"}, "counts"),
        ({"taken": encode_taken((1, 2, 3))}, "4 lanes"),
        ({"rank": 2}, "2 ranks"),
        ({"identity": {}}, "identity"),
        ({"identity": "sha256:aa"}, "identity"),
        ({"identity": {"lanes": "4", "seed": 1}}, "identity"),
        ({"identity": {"lanes": 4}}, "identity"),
    ],
)
def test_damaged_states_are_named_as_such(change, named):
    with pytest.raises(StateMismatch, match=named):
        load(make_state(**change))


def test_counts_have_a_fixed_width():
    counts = (0, 1, 255, 2**40, 2**63 - 1)
    assert decode_taken(encode_taken(counts)) == counts
    assert {len(encode_taken((c,))) for c in counts} == {16}
    assert decode_taken("") == ()


# -- joining -------------------------------------------------------------------------------------------------------


def test_each_rank_tells_of_its_own_lanes():
    """Under skip a rank knows its own lanes only; rank r owns the lanes l with l mod W = r."""
    one = make_state(0, (5, 3, 4, 2), skip=True)
    two = make_state(1, (3, 6, 2, 7), skip=True)
    for many in ([one, two], [two, one], (one, two), [one, two, one]):
        loaded = load(many)
        assert loaded.start.taken == (5, 6, 4, 7) and loaded.start.skip
        assert load(loaded.state).start.taken == (5, 6, 4, 7)  # joined they are complete


@pytest.mark.parametrize("kept", [0, 1])
def test_a_lone_state_saved_under_skip_names_the_ranks_it_lacks(kept):
    """Ranks skip rows of their own: the dispatcher is asked for the marks of the others."""
    loaded = load(make_state(kept, skip=True))
    assert loaded.start.missing == (1 - kept,) and loaded.start.skip
    assert load(loaded.state) == loaded


def test_several_states_of_more_ranks_keep_lacking_the_others():
    wide = {"world_size": 4, "skip": True}
    loaded = load([make_state(0, (5, 0, 0, 1), **wide), make_state(3, (9, 0, 0, 7), **wide)])
    assert loaded.start.missing == (1, 2) and (loaded.start.taken[0], loaded.start.taken[3]) == (5, 7)
    assert load(loaded.state) == loaded


def test_a_lone_state_is_enough_at_an_epoch_s_beginning_and_for_one_rank():
    assert load(make_state(skip=True, step=0, taken=encode_taken((0,) * 4))).start.missing == ()
    alone = load(make_state(skip=True, world_size=1)).start
    assert alone.taken == (3, 3, 2, 2) and alone.missing == ()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"step": 6}, "rank 0 at step 5, rank 1 at step 6"),
        ({"epoch": 2}, "rank 0 at epoch 1 step 5, rank 1 at epoch 2 step 5"),
        ({"generation": 3}, "generation: 2 and 3"),
        ({"world_size": 4}, "world_size: 2 and 4"),
        ({"skip": True}, "skip: False and True"),
        ({"identity": {**identity_of(SETTINGS), "seed": 8}}, "identity"),
        ({"identity": None}, "identity"),
    ],
)
def test_states_that_do_not_belong_together(change, named):
    other = make_state(1, **change)
    for many in ([make_state(), other], [other, make_state()]):
        with pytest.raises(StateMismatch, match=r"ranks . and . do not belong together"):
            load(many)
    with pytest.raises(StateMismatch, match=named):
        load([make_state(), other])


# -- held against a loader -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"sources": (Source(digest="sha256:dd"),)},
            r"manifests: state has \['sha256:aa'\], this loader \['sha256:dd'\]",
        ),
        ({"sources": (Source(digest="sha256:aa", weight=2.0),)}, r"weights: state has \[1.0\], this loader \[2.0\]"),
        ({"order": "dynamic"}, "order: state has deterministic, this loader dynamic"),
        ({"seed": 8}, "seed: state has 7, this loader 8"),
        ({"shuffle": None}, "shuffle: state has .*64.*, this loader None"),
        ({"shuffle": Shuffle(buffer=64, within_shard=True)}, "within_shard': True"),
        ({"lanes": 8}, "lanes: state has 4, this loader 8"),
        ({"pipeline": "sha256:ee"}, "pipeline: .*allow={'pipeline'}"),
    ],
)
def test_every_part_of_the_identity_must_match_and_is_named(change, named):
    with pytest.raises(StateMismatch, match=named) as caught:
        check_fits(load(make_state()), settings(**change))
    assert len(caught.value.detail["differences"]) == 1


def test_all_differences_are_listed():
    with pytest.raises(StateMismatch, match=r"seed: .*; shuffle: .*; pipeline: ") as caught:
        check_fits(load(make_state()), settings(seed=1, shuffle=None, pipeline="x"))
    assert "allow" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"world_size": 1},
        {"world_size": 4},
        {"batch_size": 100},
        {"tail": "drop"},
        {"on_error": "skip"},
        {"max_bad": 5},
        {"ack": "manual"},
        {"epochs": None},
        {"tenant": "other"},
        {"seed": None, "lanes": None},
        {"sources": (Source(digest="sha256:aa", name="moved", version="9"),)},
    ],
)
def test_what_may_differ_on_a_resume(change):
    check_fits(load(make_state()), settings(**change))


def test_a_pipeline_may_differ_where_that_is_allowed():
    check_fits(load(make_state()), settings(pipeline="other"), allow={"pipeline"})
    with pytest.raises(StateMismatch, match="seed"):
        check_fits(load(make_state()), settings(pipeline="other", seed=1), allow={"pipeline"})


@pytest.mark.parametrize("world", [3, 8])
def test_a_world_size_that_does_not_divide_the_lanes_names_those_that_do(world):
    with pytest.raises(StateMismatch, match=rf"world_size {world} .* 4 lanes .*1, 2, 4\)"):
        check_fits(load(make_state()), settings(world_size=world, lanes=None))


def test_a_blank_state_fits_everything():
    check_fits(load(make_state(identity=None)), settings(seed=1))
