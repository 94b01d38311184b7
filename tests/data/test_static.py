"""Static packs: every tensor of one shape whatever the pack holds, the audio of each clip in its room, and what is refused."""

import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packfp8.data import Clip, Collator, Example, Turn
from packfp8.data.audio import Loaded
from packfp8.data.flat import described, fill, restored
from packfp8.data.packed_audio import one_row
from packfp8.errors import BudgetError, ConfigError
from packfp8.lengths import AudioFrames, Measure
from packfp8.rule import Topology, align

FRAMES = AudioFrames.fastconformer()
MEASURE = Measure(frames=FRAMES)
BOUNDS = {"static": True, "budget": 384, "max_sequences": 5, "frame_budget": 41}
STRIDE = 1280


def example(name, samples, text="answer"):
    """A conversation with a clip of each of so many samples; every sample of clip n is n + 1."""
    clips = (Clip(source=np.full(n, i + 1.0, np.float32), num_samples=n, sample_rate=16_000) for i, n in enumerate(samples))
    return Example(id=name, turns=(Turn("user", (*clips, "?")), Turn("assistant", (text,))))


def collator_of(cp=1, rank=0, recipe="block", **changes):
    return Collator(measure=MEASURE, rule=align(recipe, Topology(cp=cp, cp_rank=rank)), **{**BOUNDS, **changes})


@st.composite
def packs(draw):
    """Up to five examples of up to three clips, whose rooms are within the frame budget; also of text alone, and none."""
    left, made = BOUNDS["frame_budget"], []
    for n in range(draw(st.integers(0, 5))):
        samples = []
        for length in draw(st.lists(st.integers(160, 12_000), max_size=3)):
            room = FRAMES.encoder_frames(length) + 1
            if room <= left:
                samples.append(length)
                left -= room
        made.append(example(f"s{n}", samples, "a" * draw(st.integers(1, 12))))
    return made


def shapes(batch):
    """Of every tensor: name, type and shape; and every number that a kernel or a compiled graph is told."""
    tensors = {(f.name, v.dtype, tuple(v.shape)) for f in fields(batch) if torch.is_tensor(v := getattr(batch, f.name))}
    numbers = {(name, getattr(batch, name)) for name in ("max_seqlen", "audio_frames", "frames_sent", "frames_received")}
    return frozenset(tensors | numbers)


@settings(max_examples=40)
@given(packs(), st.sampled_from([1, 2]))
def test_whatever_is_in_a_pack_every_tensor_has_the_shape_of_the_bounds(examples, cp):
    for rank in range(cp):
        collator = collator_of(cp, rank)
        batch = collator.collate(examples)
        assert batch.ids == tuple(one.id for one in examples)
        assert shapes(batch) == shapes(collator.collate([]))
        assert batch.labels.shape == (384 // cp,)
        assert batch.audio.shape == (1, 41 * STRIDE)
        assert (batch.audio_lens.shape, batch.audio_offsets.shape) == ((20,), (21,))
        assert batch.audio_source.shape == batch.audio_destination.shape == (41,)


@settings(max_examples=40)
@given(packs(), st.sampled_from([1, 2]))
def test_each_clip_is_in_its_room_and_the_rest_is_silence(examples, cp):
    for rank in range(cp):
        batch, plain = (collator_of(cp, rank, **of).collate(examples) for of in ({}, {"static": False}))
        clips = len(plain.audio_lens)
        lens, begins = batch.audio_lens, batch.audio_offsets
        assert lens.tolist() == plain.audio_lens.tolist() + [0] * (20 - clips)
        sizes = [(FRAMES.encoder_frames(n) + 1) * STRIDE for n in plain.audio_lens.tolist()]
        assert begins.tolist() == [sum(sizes[: min(n, clips)]) for n in range(21)]
        row = torch.zeros_like(batch.audio[0])
        for begin, size, wave, length in zip(begins.tolist(), sizes, plain.audio, plain.audio_lens.tolist(), strict=False):
            assert length < size
            row[begin : begin + length] = wave[:length]
        assert torch.equal(batch.audio[0], row)
        here = batch.audio_destination < batch.tokens
        assert batch.audio_destination[here].tolist() == plain.audio_destination.tolist()
        assert set(batch.audio_source[~here].tolist()) <= {41}
        assert set(batch.audio_destination[~here].tolist()) <= {batch.tokens}
        assert (batch.checksum == plain.checksum) == (batch.slots.total == plain.slots.total)


PACKABLE = [FRAMES, AudioFrames.fastconformer(drop_last=False), FRAMES.stacked(2), AudioFrames.linear()]


@pytest.mark.parametrize("frames", PACKABLE, ids=["FastConformer", "FastConformer of NeMo 1", "stacked", "linear"])
def test_the_tail_of_a_clip_fits_its_room_at_every_number_of_samples(frames):
    """All sample counts of one stride, in a row of no frame more than the room; every sample is found again."""
    first = frames.shortest_samples
    for samples in range(first, first + frames.stride_samples):
        budget = frames.encoder_frames(samples) + 1
        loaded = Loaded(samples=np.ones(samples, np.float32), trimmed_samples=0)
        row, lens, offsets = one_row([loaded], frames, budget)
        assert row.count_nonzero() == samples == lens[0]
        assert samples < offsets[1] == row.numel() == budget * frames.stride_samples


@pytest.mark.parametrize("cp", [1, 2])
def test_the_frame_budget_bounds_the_pack_and_one_frame_more_is_refused_by_name(cp, five_lines):
    """Rooms of 5 and 6 frames: eleven are enough, ten are not."""
    pair = [example("one", [4 * STRIDE]), example("two", [2 * STRIDE, STRIDE])]
    assert collator_of(cp, frame_budget=10)(pair).ids == ("one", "two")
    with pytest.raises(BudgetError) as caught:
        collator_of(cp, frame_budget=9)(pair)
    five_lines(
        caught.value,
        what="example 'two' does not fit the pack",
        got="10 encoder frames in the rooms of its clips and those before",
        expected="at most 9 encoder frames",
        because="the budget is a bound, not an aim, and neither audio nor text is ever cut",
        fix="raise frame_budget, give PackingSampler the same, or a batch fewer examples, or choose over_budget='set_aside'",
    )


@pytest.mark.parametrize("static", [True, False])
def test_what_is_over_the_frame_budget_is_set_aside_and_the_next_that_fits_is_taken(static):
    items = [example("a", [4 * STRIDE]), example("b", [9 * STRIDE]), example("c", []), example("d", [STRIDE])]
    batch = collator_of(static=static, frame_budget=9, over_budget="set_aside")(items)
    assert batch.ids == ("a", "c", "d")
    assert [left.id for left in batch.set_aside] == ["b"]
    assert "encoder frames in the rooms" in batch.set_aside[0].reason


def test_as_many_clips_as_a_frame_budget_can_hold_have_a_place():
    """Clips of one frame are the most: 20 rooms of two frames in 41."""
    items = [example(f"s{n}", [160] * 4, "a") for n in range(5)]
    batch = collator_of()(items)
    assert (batch.audio_lens > 0).all()
    assert batch.audio_offsets.tolist() == [2 * STRIDE * n for n in range(21)]


def test_text_alone_is_static_without_a_frame_budget():
    measure = Measure(frames=None)
    collator = Collator(measure=measure, rule=align("block"), static=True, budget=384, max_sequences=5)
    batches = [collator.collate([example("a", [])] * n) for n in range(3)]
    assert len({shapes(batch) for batch in batches}) == 1
    assert batches[0].audio_offsets is None
    assert batches[0].audio.shape == (0, 0)


# ---- the way of a batch


def test_offsets_travel_with_the_batch_and_are_none_where_each_clip_has_a_row():
    items = [example("one", [4000, 900])]
    plain, batch = collator_of(static=False)(items), collator_of()(items)
    assert plain.audio_offsets is None
    assert plain.to("cpu").audio_offsets is None
    assert torch.equal(batch.as_thd().audio_offsets, batch.audio_offsets)
    assert torch.equal(pickle.loads(pickle.dumps(batch)).audio_offsets, batch.audio_offsets)
    assert batch.to("meta").audio_offsets.device.type == "meta"


@pytest.mark.parametrize("static", [True, False])
def test_peers_are_sent_the_offsets_where_there_are_any(static):
    slabs = collator_of(2, static=static).slabs([example("one", [4000, 900]), example("two", [])])
    description, size = described(slabs)
    flat = torch.empty(size, dtype=torch.uint8)
    fill(flat, description, slabs)
    for rank, slab in enumerate(slabs):
        rule = replace(slab.rule, topology=replace(slab.rule.topology, cp_rank=rank))
        got = restored(flat, description, rank, rule)
        assert (got.audio_offsets is None) == (slab.audio_offsets is None) == (not static)
        assert shapes(got) == shapes(slab)
        assert torch.equal(got.audio, slab.audio)
        assert not static or torch.equal(got.audio_offsets, slab.audio_offsets)


# ---- what is refused


def test_static_without_a_frame_budget_is_refused_where_clips_are_counted(five_lines):
    with pytest.raises(ConfigError) as caught:
        collator_of(frame_budget=None)
    five_lines(
        caught.value,
        what="packs cannot be static without a frame budget",
        got="frame_budget=None, and a measure of audio",
        expected="frame_budget of at least 2 encoder frames",
        because="a constant shape needs a constant number of clips and of encoder frames",
        fix="give the frame budget that `packfp8 report --static` prints; or Measure(frames=None), where all is text",
    )


def test_static_with_a_shared_encoder_is_refused(five_lines):
    with pytest.raises(ConfigError) as caught:
        collator_of(2, share_encoder=True)
    five_lines(
        caught.value,
        what="packs cannot be static where CP ranks share the encoder",
        got="static=True, share_encoder=True",
        expected="one of them",
        because="how many frames travel between two ranks follows from the clips of each pack, so it is no constant",
        fix="leave out share_encoder: each rank then encodes the clips of which it holds a frame",
    )
    assert collator_of(2, share_encoder=True, static=False).frame_budget == 41


@pytest.mark.parametrize("budget", [1, 0, -5, 41.0, "41", True])
def test_a_frame_budget_without_room_for_a_clip_is_refused(budget, five_lines):
    with pytest.raises(ConfigError) as caught:
        collator_of(frame_budget=budget)
    five_lines(
        caught.value,
        what="packs have no room for a clip",
        got=f"frame_budget={budget!r}",
        expected="a whole number of at least 2, or None for no bound",
        because="the smallest room is one encoder frame of its clip and one of silence",
        fix="leave out frame_budget, or give the most encoder frames that a pack may hold",
    )


def test_bounds_from_numpy_leave_plain_numbers_in_the_batch():
    """Kernels and compilers are told them; a number of another type is another one to some caches."""
    bounds = {name: np.int64(bound) for name, bound in BOUNDS.items() if name != "static"}
    plain, batch = (collator_of(**of).collate([]) for of in ({"max_seqlen": 64}, {**bounds, "max_seqlen": np.int64(64)}))
    told = {type(number) for number in (batch.max_seqlen, batch.audio_frames, *batch.frames_sent, *batch.frames_received)}
    assert told == {int}
    assert shapes(batch) == shapes(plain)


def test_a_frame_budget_of_text_is_refused(five_lines):
    with pytest.raises(ConfigError) as caught:
        Collator(measure=Measure(frames=None), rule=align("block"), **BOUNDS)
    five_lines(
        caught.value,
        what="a frame budget bounds nothing where no example has audio",
        got="frame_budget=41, Measure(frames=None)",
        expected="no frame budget, or a measure that counts clips",
        because="a setting that silently does nothing hides a mistake",
        fix="leave out frame_budget, or Measure(frames=AudioFrames.fastconformer())",
    )


def test_whisper_cannot_be_static_but_may_have_a_frame_budget():
    measure = Measure(frames=AudioFrames.whisper())
    with pytest.raises(ConfigError, match="clips of this encoder cannot stand in one row"):
        Collator(measure=measure, rule=align("block"), **BOUNDS)
    assert Collator(measure=measure, rule=align("block"), frame_budget=3002).frame_budget == 3002
