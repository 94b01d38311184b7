"""The plan of a pack against a walk token by token, and its checksum."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfp8.layout import make_plan
from packfp8.rule import Topology, align


@st.composite
def packs(draw):
    """Sequences of text runs and clips: their lengths, the clips (sequence, start, frames), and the rule of one rank."""
    cp, tp, sp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 2)), draw(st.booleans())
    layout, recipe = draw(st.sampled_from(["thd", "bshd"])), draw(st.sampled_from(["bf16", "block", "mxfp8"]))
    lengths, clips = [], []
    for sequence in range(draw(st.integers(0, 5))):
        at = 0
        for is_clip, count in draw(st.lists(st.tuples(st.booleans(), st.integers(1, 30)), min_size=1, max_size=4)):
            if is_clip:
                clips.append((sequence, at, count))
            at += count
        lengths.append(at)
    return lengths, clips, align(recipe, Topology(cp=cp, tp=tp, sp=sp), layout=layout)


def plans_of_all_ranks(lengths, clips, rule, **options):
    ranks = [replace(rule, topology=replace(rule.topology, cp_rank=r)) for r in range(rule.topology.cp)]
    return [make_plan(lengths, clips, rank, **options) for rank in ranks]


def walk(plan, clips):
    """Every token of the pack in order, slot after slot: (place in the pack, slot, position, is pad, (clip, frame) or None)."""
    frames = {(sequence, start + n): (number, n) for number, (sequence, start, count) in enumerate(clips) for n in range(count)}
    slots, place = [], 0
    for slot, (length, size) in enumerate(zip(plan.slots.lengths, plan.slots.sizes)):
        tokens = []
        for position in range(size):
            tokens.append((place, slot, position, position >= length, frames.get((slot, position))))
            place += 1
        slots.append(tokens)
    return slots


@given(packs())
def test_every_token_array_equals_a_walk_token_by_token(split_literally, pack):
    lengths, clips, rule = pack
    plans = plans_of_all_ranks(lengths, clips, rule)
    ranks = split_literally(walk(plans[0], clips), rule.topology.cp)
    for plan, tokens in zip(plans, ranks, strict=True):
        assert plan.index.tolist() == [place for place, *_ in tokens]
        assert plan.seq_idx.tolist() == [slot for _, slot, *_ in tokens]
        assert plan.position_ids.tolist() == [position for _, _, position, *_ in tokens]
        assert plan.padding_mask.tolist() == [bool(pad) for *_, pad, _ in tokens]


@given(packs())
def test_every_audio_frame_goes_to_its_token_as_a_walk_finds_it(split_literally, pack):
    lengths, clips, rule = pack
    plans = plans_of_all_ranks(lengths, clips, rule)
    ranks = split_literally(walk(plans[0], clips), rule.topology.cp)
    for plan, tokens in zip(plans, ranks, strict=True):
        wanted = {at: frame for at, (*_, frame) in enumerate(tokens) if frame}
        held = sorted({clip for clip, _ in wanted.values()})
        assert plan.clips.tolist() == held
        assert plan.frames_max == max((clips[clip][2] for clip in held), default=0)
        rows = [(clip, frame) for clip in held for frame in range(plan.frames_max)]
        assert len(plan.audio_source) == len(plan.audio_destination) == len(wanted)
        assert {int(at): rows[row] for at, row in zip(plan.audio_destination, plan.audio_source)} == wanted


@given(packs())
def test_all_ranks_together_hold_every_frame_once(pack):
    lengths, clips, rule = pack
    plans = plans_of_all_ranks(lengths, clips, rule)
    assert sum(len(plan.audio_source) for plan in plans) == sum(count for *_, count in clips)
    assert set().union(*(plan.clips.tolist() for plan in plans)) == set(range(len(clips)))


@given(packs())
def test_types_and_shapes(pack):
    lengths, clips, rule = pack
    plan = make_plan(lengths, clips, rule)
    slab = (plan.slots.total // rule.topology.cp,)
    for name, kind in {"index": "int64", "position_ids": "int64", "seq_idx": "int32", "padding_mask": "bool"}.items():
        assert (getattr(plan, name).dtype, getattr(plan, name).shape) == (kind, slab)
    assert {plan.clips.dtype, plan.audio_source.dtype, plan.audio_destination.dtype} == {np.dtype("int64")}
    assert type(plan.frames_max) is int
    for name in ("index", "position_ids", "seq_idx", "padding_mask", "clips", "audio_source", "audio_destination"):
        assert not getattr(plan, name).flags.writeable


def test_positions_restart_in_each_slot_run_on_through_its_padding_and_are_global_under_cp():
    first, second = plans_of_all_ranks([3, 6], [], align("bf16", Topology(cp=2)), total=16)
    assert first.position_ids.tolist() == [0, 3, 0, 1, 6, 7, 0, 3]
    assert second.position_ids.tolist() == [1, 2, 2, 3, 4, 5, 1, 2]
    assert first.padding_mask.tolist() == [False, True, False, False, True, True, True, True]
    assert first.seq_idx.tolist() == [0, 0, 1, 1, 1, 1, 2, 2]


def test_a_clip_that_a_rank_does_not_hold_is_not_its_own():
    # slot of 16 in chunks of 4: rank 0 holds 0-3 and 12-15, rank 1 the middle
    first, second = plans_of_all_ranks([16], [(0, 0, 3), (0, 5, 6)], align("bf16", Topology(cp=2)))
    assert (first.clips.tolist(), first.frames_max) == ([0], 3)
    assert (second.clips.tolist(), second.frames_max) == ([1], 6)
    assert first.audio_source.tolist() == [0, 1, 2]
    assert second.audio_source.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_clip_over_the_border_of_two_ranks_is_held_by_both():
    first, second = plans_of_all_ranks([16], [(0, 2, 4)], align("bf16", Topology(cp=2)))
    assert first.clips.tolist() == second.clips.tolist() == [0]
    assert (first.audio_source.tolist(), first.audio_destination.tolist()) == ([0, 1], [2, 3])
    assert (second.audio_source.tolist(), second.audio_destination.tolist()) == ([2, 3], [0, 1])


# ---- checksum

PACK = {"lengths": [9, 12], "clips": [(0, 1, 4), (1, 2, 4)], "ids": ["a", "b"]}


def checksum(rule=None, **changes):
    return make_plan(rule=rule or align("block", Topology(cp=2, tp=2)), **{**PACK, **changes}).checksum


def test_the_checksum_is_equal_on_all_ranks_of_one_pack():
    ranks = [Topology(3, 2, 2, False, dp, cp, tp) for dp in range(3) for cp in range(2) for tp in range(2)]
    assert {checksum(align("block", rank)) for rank in ranks} == {checksum()}


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": [9, 13]},
        {"lengths": [12, 9]},
        {"lengths": [9, 11]},  # the same slots
        {"lengths": [9, 12, 1], "ids": ["a", "b", "c"]},
        {"clips": [(0, 1, 4)]},
        {"clips": [(0, 1, 4), (1, 3, 4)]},
        {"clips": [(0, 1, 4), (1, 2, 5)]},
        {"clips": [(0, 1, 4), (0, 5, 4)]},
        {"clips": []},
        {"ids": ["b", "a"]},
        {"ids": ["a", "c"]},
        {"ids": ["ab", ""]},
        {"ids": ["a\nb"]},
        {"ids": ["a\nb", ""]},
        {"ids": []},
        {"total": 64},
        {"rule": align("current", Topology(cp=2, tp=2))},
        {"rule": align("block", Topology(cp=2))},
        {"rule": align("block", Topology(cp=2, tp=2), layout="bshd")},
    ],
    ids=str,
)
def test_the_checksum_differs_where_anything_differs(change):
    assert checksum(**change) != checksum()


def test_ids_with_line_breaks_or_lone_surrogates_have_checksums_of_their_own():
    pairs = [["a\nb", "c"], ["a", "b\nc"], ["a', 'b", "c"], ["\udc80", "c"], ["\\udc80", "c"]]
    assert len({checksum(ids=ids) for ids in pairs}) == len(pairs)
