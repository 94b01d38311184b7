"""A bound on the longest slot: no slot is longer, filler's neither; shapes stay constant, and real tokens where they were."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packfp8.data import Clip, Collator, Example, Turn
from packfp8.data.flat import described, fill, restored
from packfp8.errors import BudgetError, ConfigError
from packfp8.lengths import AudioFrames, Measure, Template
from packfp8.rule import Topology, align

TEMPLATE = Template(roles={"assistant": ("", ""), "user": ("", "")}, prompt="", eos=False)
MEASURE = Measure(frames=AudioFrames.linear(800), template=TEMPLATE)
BOUNDS = {"static": True, "budget": 390, "max_sequences": 5, "frame_budget": 41}  # 384 tokens


def example(name, letters, frames=0):
    """As many tokens as letters and frames together."""
    wave = np.full(800 * frames, 0.5, np.float32)
    clips = [Clip(source=wave, num_samples=wave.size, sample_rate=16_000)] if frames else []
    return Example(
        id=name, turns=(Turn("user", (*clips, "?" * (letters > 1))), Turn("assistant", ("a" * (letters - (letters > 1)),)))
    )


def collator_of(max_seqlen, cp=1, rank=0, **changes):
    options = {**BOUNDS, "max_seqlen": max_seqlen, **changes}
    return Collator(measure=MEASURE, rule=align("block", Topology(cp=cp, cp_rank=rank)), **options)


def shapes(batch):
    """Of every tensor: name, type and shape; and every number that a kernel or a compiled graph is told."""
    tensors = {(f.name, v.dtype, tuple(v.shape)) for f in fields(batch) if torch.is_tensor(v := getattr(batch, f.name))}
    numbers = {(name, getattr(batch, name)) for name in ("max_seqlen", "audio_frames", "frames_sent", "frames_received")}
    return frozenset(tensors | numbers)


PACKS = st.lists(st.tuples(st.integers(1, 57), st.sampled_from([0, 0, 3, 7])), max_size=5)


@settings(max_examples=60)
@given(PACKS, st.sampled_from([64, 71, 100, 128, 300, 384, 5000]), st.sampled_from([1, 2, 4]))
def test_no_slot_is_longer_and_every_tensor_has_one_shape(pack, max_seqlen, cp):
    examples = [example(f"s{n}", *one) for n, one in enumerate(pack)]
    most = min(384, max_seqlen // (2 * cp if cp > 1 else 1) * (2 * cp if cp > 1 else 1))
    for rank in range(cp):
        collator = collator_of(max_seqlen, cp, rank)
        batch = collator.collate(examples)
        assert batch.max_seqlen == collator.max_seqlen == most
        assert type(batch.max_seqlen) is int
        sizes = batch.cu_seqlens.diff()
        assert sizes.max() <= batch.max_seqlen
        assert (sizes % batch.rule.sequence == 0).all()
        assert (sizes >= 0).all()
        assert (batch.cu_seqlens[0], batch.cu_seqlens[-1]) == (0, 384)
        assert len(batch.cu_seqlens) == len(batch.cu_seqlens_real) == 5 + -(-384 // most) + 1
        assert batch.position_ids.max() < batch.max_seqlen
        assert shapes(batch) == shapes(collator.collate([])) == shapes(collator.collate([example("one", 1)]))


@settings(max_examples=40)
@given(PACKS, st.sampled_from([64, 100]), st.sampled_from([1, 2, 4]))
def test_nothing_real_moves_and_each_slot_of_filler_has_a_number_of_its_own(pack, max_seqlen, cp):
    examples = [example(f"s{n}", *one) for n, one in enumerate(pack)]
    cut, whole = ([collator_of(most, cp, rank).collate(examples) for rank in range(cp)] for most in (max_seqlen, None))
    for ours, theirs in zip(cut, whole, strict=True):
        for name in ("input_ids", "labels", "padding_mask", "audio", "audio_source", "audio_destination"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert (ours.slots.sequences, ours.slots.waste) == (theirs.slots.sequences, theirs.slots.waste)
        assert ours.num_supervised == theirs.num_supervised
        real = ~ours.padding_mask
        assert torch.equal(ours.position_ids[real], theirs.position_ids[real])
        assert torch.equal(ours.seq_idx[real], theirs.seq_idx[real])
        count = len(ours.slots.sizes)
        assert set(ours.seq_idx.tolist()) == set(range(count))
        assert ours.cu_seqlens_real[: len(pack) + 1].tolist() == [0, *np.cumsum([sum(one) for one in pack])]
        assert set(ours.cu_seqlens_real[len(pack) :].tolist()) == {sum(map(sum, pack))}
    tokens = cut[0].unpack([batch.input_ids for batch in cut])
    assert {name: len(part) for name, part in tokens.items()} == {f"s{n}": sum(one) for n, one in enumerate(pack)}
    assert len({batch.checksum for batch in cut}) == 1


def test_a_pack_of_filler_alone_is_cut_into_slots_and_has_no_weight():
    batch = collator_of(100, static=True)([example("one", 84)])
    assert batch.cu_seqlens.tolist() == [0, 84, 184, 284, 384, 384, 384, 384, 384, 384]
    empty = collator_of(100).collate([])
    assert empty.cu_seqlens.tolist() == [0, 100, 200, 300, 384, 384, 384, 384, 384, 384]
    assert (empty.num_supervised, empty.slots.waste) == (0, {"slot": 0, "filler": 384})
    assert empty.seq_idx.tolist() == [n // 100 for n in range(384)]
    assert empty.position_ids.tolist() == [n % 100 for n in range(384)]


def test_as_many_sequences_as_there_may_be_beside_as_much_filler_as_there_may_be_have_their_offsets():
    """Five sequences of one token leave 379, four slots of at most 100; or the pack is full, without any."""
    collator = collator_of(100)
    short = collator([example(f"s{n}", 1) for n in range(5)])
    assert short.cu_seqlens.tolist() == [0, 1, 2, 3, 4, 5, 105, 205, 305, 384]
    full = collator([example(f"s{n}", letters) for n, letters in enumerate([100, 100, 100, 42, 42])])
    assert full.slots.waste["filler"] == 0
    assert full.cu_seqlens.tolist() == [0, 100, 200, 300, 342, 384, 384, 384, 384, 384]
    assert shapes(full) == shapes(short)


@pytest.mark.parametrize("cp", [1, 2])
def test_the_micro_batches_of_a_step_and_what_peers_are_sent_have_the_same_shape(cp):
    collator = collator_of(64, cp)
    batches = collator.micro_batches([[example("a", 30)], [], [example("b", 20), example("c", 60)]])
    assert len({shapes(batch) for batch in batches}) == 1
    slabs = collator.slabs([example("a", 30, 5)])
    description, size = described(slabs)
    flat = torch.empty(size, dtype=torch.uint8)
    fill(flat, description, slabs)
    for rank, slab in enumerate(slabs):
        rule = replace(slab.rule, topology=replace(slab.rule.topology, cp_rank=rank))
        got = restored(flat, description, rank, rule)
        assert (shapes(got), got.slots.offsets.tolist()) == (shapes(slab), slab.slots.offsets.tolist())
    assert shapes(slabs[0]) == shapes(batches[0])


@pytest.mark.parametrize("buckets", [True, False])
def test_packs_that_are_not_static_keep_the_bound_too(buckets):
    collator = collator_of(50, static=False, buckets=buckets)
    for letters in ([], [1], [50, 50, 50, 40], [33]):
        batch = collator.collate([example(f"s{n}", one) for n, one in enumerate(letters)])
        assert batch.cu_seqlens.diff().max() <= batch.max_seqlen <= 50
        assert len(batch.cu_seqlens) > len(batch.slots.sizes)
    assert collator_of(50, static=False, budget=None)([example("a", 40)]).max_seqlen == 40


@pytest.mark.parametrize("budget", [390, None])
def test_an_example_of_the_longest_slot_fits_and_one_token_more_is_refused_by_name(budget, five_lines):
    """A slot of cp 2 is a multiple of 4: 59 tokens are 60, as many as 63 allow."""
    options = {"cp": 2, "budget": budget, "static": budget is not None}
    assert collator_of(63, **options)([example("a", 59), example("b", 60)]).ids == ("a", "b")
    with pytest.raises(BudgetError) as caught:
        collator_of(63, **options)([example("a", 59), example("b", 61)])
    five_lines(
        caught.value,
        what="example 'b' is longer than a slot may be",
        got="61 tokens",
        expected="at most 60, the max_seqlen that kernels are told",
        because="kernels and tables of positions reach no further than max_seqlen, and a sequence is never cut",
        fix="raise max_seqlen, or choose over_budget='set_aside' to leave such examples out and have them named",
    )


def test_what_is_longer_is_set_aside_and_the_others_are_taken():
    batch = collator_of(60, over_budget="set_aside")([example("a", 60), example("b", 61), example("c", 59)])
    assert batch.ids == ("a", "c")
    assert [left.id for left in batch.set_aside] == ["b"]
    assert "longer than a slot may be" in batch.set_aside[0].reason


@pytest.mark.parametrize("bad", [0, -8, 3, 64.0, True, "64"])
def test_a_bound_without_room_for_a_slot_is_refused(bad, five_lines):
    with pytest.raises(ConfigError) as caught:
        collator_of(bad, cp=2)
    five_lines(
        caught.value,
        what="packs have no room for a slot",
        got=f"max_seqlen={bad!r}",
        expected="a whole number of at least 4, or None for no bound but the pack",
        because="every slot is a multiple of 4 tokens, filler's too",
        fix="leave out max_seqlen, or give the one that `packfp8 report --static` prints",
    )
    assert collator_of(np.int64(4), cp=2).max_seqlen == 4


def test_a_bound_of_padded_rows_is_refused(five_lines):
    with pytest.raises(ConfigError) as caught:
        Collator(measure=MEASURE, rule=align("block", layout="bshd"), budget=384, max_seqlen=64)
    five_lines(
        caught.value,
        what="padded rows have no bound of their own",
        got="max_seqlen=64, layout 'bshd'",
        expected="no max_seqlen, or layout 'thd'",
        because="all rows of a batch are as long as its longest, and how long that may be follows from their number",
        fix="leave out max_seqlen, or pack with layout='thd'",
    )
