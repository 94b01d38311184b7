"""Audio frames come to stand where a per-utterance loop puts them, in a constant number of operations."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from packfp8.data import Collator, Example, Turn
from packfp8.errors import LengthError
from packfp8.model.splice import check_encoder_lens, splice
from packfp8.rule import Topology, align

HIDDEN = 6


@pytest.fixture
def collate(measure, mixed):
    def collate(examples=mixed, **topology):
        layout = topology.pop("layout", "thd")
        return Collator(measure=measure, rule=align("block", Topology(**topology), layout=layout))(examples)

    return collate


def draw(batch, extra=0):
    g = torch.Generator().manual_seed(0)
    embeddings = torch.randn(*batch.input_ids.shape, HIDDEN, generator=g, dtype=torch.float64)
    frames = torch.randn(batch.audio.shape[0], batch.audio_frames + extra, HIDDEN, generator=g, dtype=torch.float64)
    return embeddings.requires_grad_(), frames.requires_grad_()


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("extra", [0, 3])
def test_equals_a_loop_over_utterances(collate, measure, mixed, layout, extra):
    batch = collate(layout=layout)
    embeddings, frames = draw(batch, extra)
    expected, row = embeddings.detach().clone().reshape(-1, HIDDEN), 0
    for slot, example in enumerate(mixed):
        for span in measure.encode(example).clips:
            start = int(batch.slots.offsets[slot]) + span.start
            expected[start : start + span.encoder_frames] = frames[row, : span.encoder_frames]
            row += 1
    assert row == 5
    torch.testing.assert_close(splice(embeddings, frames, batch), expected.reshape(embeddings.shape), rtol=0, atol=0)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_cp_ranks_hold_the_same_tokens_together(collate, mixed, layout, cp):
    whole = collate(cp=1, layout=layout)
    slabs = [collate(cp=cp, cp_rank=rank, layout=layout) for rank in range(cp)]
    clips = [clip for example in mixed for clip in example.clips]

    def spliced(batch):
        # a frame's value is its clip and its number, whichever rank holds it
        own = [next(n for n, clip in enumerate(clips) if clip.num_samples == samples) for samples in batch.audio_lens.tolist()]
        frames = 1000.0 * torch.tensor(own)[:, None, None] + torch.arange(batch.audio_frames)[:, None] + torch.ones(1)
        return splice(torch.zeros(*batch.input_ids.shape, 1), frames, batch)

    one, many = whole.unpack(spliced(whole)), slabs[0].unpack([spliced(slab) for slab in slabs])
    assert one.keys() == many.keys()
    for name in one:
        torch.testing.assert_close(one[name], many[name], rtol=0, atol=0)
    assert sum(part.count_nonzero() for part in one.values()) == whole.audio_source.numel()


def test_gradients_reach_frames_and_text_and_nothing_else(collate):
    batch = collate()
    embeddings, frames = draw(batch, extra=2)
    splice(embeddings, frames, batch).sum().backward()
    assert frames.grad.sum() == batch.audio_source.numel() * HIDDEN
    assert frames.grad.flatten(0, 1).sum(-1).count_nonzero() == batch.audio_source.numel()
    assert embeddings.grad.sum() == embeddings.numel() - batch.audio_source.numel() * HIDDEN
    assert embeddings.grad.reshape(-1, HIDDEN)[batch.audio_destination].abs().max() == 0


def test_frames_take_the_type_of_the_embeddings(collate):
    batch = collate()
    embeddings, frames = draw(batch)
    assert splice(embeddings.bfloat16(), frames.float(), batch).dtype == torch.bfloat16


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_the_number_of_operations_does_not_grow_with_the_clips(collate, mixed, make_clip):
    many = [Example(id=str(n), turns=(Turn("user", (make_clip(3_000 + n),)),)) for n in range(40)]
    counts = []
    for examples in (mixed, many):
        batch = collate(examples)
        inputs = draw(batch)
        with Count() as count:
            splice(*inputs, batch)
        counts.append(count.names)
    assert counts[0] == counts[1]
    assert counts[0].count("aten::index_copy") == counts[0].count("aten::index_select") == 1
    assert "aten::_local_scalar_dense" not in counts[0]


def test_fewer_frames_than_placed_are_refused(collate):
    batch = collate()
    embeddings, frames = draw(batch)
    with pytest.raises(LengthError) as caught:
        splice(embeddings, frames[:, :-1], batch)
    assert str(caught.value).splitlines() == [
        "the encoder gave fewer frames than the plan has placed",
        "  got:      15 frames for 5 clips of 20000 samples",
        "  expected: at least 16 frames for 5 clips (of speech, one token, text, two clips)",
        "  because:  each clip's room in the pack was cut by the length formula before any audio was read",
        "  fix:      compare formula and encoder: packfp8.probe(encoder, measure.frames).check()",
    ]


def test_fewer_clips_than_given_are_refused(collate):
    batch = collate()
    embeddings, frames = draw(batch)
    with pytest.raises(LengthError, match="16 frames for 4 clips"):
        splice(embeddings, frames[:-1], batch)


def test_a_clip_that_is_short_by_the_encoders_own_account_is_named(collate):
    batch = collate()
    lens = torch.tensor([8, 1, 16, 4, 2])
    check_encoder_lens(lens, batch)
    check_encoder_lens(lens + 1, batch)
    with pytest.raises(LengthError) as caught:
        check_encoder_lens(lens - torch.tensor([0, 0, 0, 1, 1]), batch)
    assert str(caught.value).splitlines() == [
        "the encoder gave clip 3 of the batch fewer frames than the plan has placed",
        "  got:      3 frames for 5000 samples",
        "  expected: at least 4",
        "  because:  the frames after a clip's end are padding, and would be heard as audio",
        "  fix:      compare formula and encoder: packfp8.probe(encoder, measure.frames).check()",
    ]


def test_a_batch_without_audio_places_nothing_and_keeps_the_graph(collate, mixed):
    batch = collate([mixed[2]])
    embeddings = torch.randn(*batch.input_ids.shape, HIDDEN, requires_grad=True)
    frames = torch.full((1, 1, HIDDEN), float("nan"), requires_grad=True)
    out = splice(embeddings, frames, batch)
    assert torch.equal(out, embeddings)
    out.sum().backward()
    assert frames.grad.abs().max() == 0
    check_encoder_lens(torch.tensor([0]), replace(batch, audio=batch.audio[:0]))


@pytest.fixture
def static(measure, mixed):
    """static(examples) -> their pack in one shape: a row of 40 encoder frames, of which 35 are rooms of the five clips."""

    def static(examples=mixed):
        options = {"static": True, "budget": 256, "max_sequences": 6, "frame_budget": 40}
        return Collator(measure=measure, rule=align("block"), **options).collate(examples)

    return static


def test_a_static_pack_gets_what_stands_in_its_rooms_and_nothing_else(static, collate, measure, mixed):
    """The rest of the row, silence between clips and after them, may be NaN: it reaches no token and no gradient."""
    batch, rows = static(), collate()
    embeddings, frames = draw(rows)
    packed = torch.full((1, 40, HIDDEN), float("nan"), dtype=torch.float64)
    for row, (begin, count) in enumerate(zip((batch.audio_offsets // 1280).tolist(), (7, 1, 16, 4, 2))):
        packed[0, begin : begin + count] = frames[row, :count].detach()
    packed.requires_grad_()
    text = torch.zeros(256, HIDDEN, dtype=torch.float64)
    real = embeddings.detach()[: rows.slots.offsets[6]]
    text = torch.cat((real, text[len(real) :])).requires_grad_()
    out = splice(text, packed, batch)
    assert torch.equal(out[: len(real)], splice(embeddings, frames, rows)[: len(real)])
    assert not out[len(real) :].any()
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out * weight).sum().backward()
    places = batch.audio_destination[batch.audio_destination < 256]
    assert torch.equal(packed.grad[0, batch.audio_source[batch.audio_source < 40]], weight[places])
    assert packed.grad.flatten(0, 1).any(-1).sum() == len(places) == 30
    assert torch.equal(text.grad, weight.index_fill(0, places, 0))


def test_a_static_pack_of_text_alone_leaves_every_token_in_place(static, mixed):
    batch = static([mixed[2]])
    text = torch.randn(256, HIDDEN, requires_grad=True)
    frames = torch.full((1, 40, HIDDEN), float("nan"), requires_grad=True)
    out = splice(text, frames, batch)
    out.sum().backward()
    assert torch.equal(out, text)
    assert frames.grad.abs().max() == 0
    assert text.grad.min() == 1


def test_a_static_pack_needs_the_row_that_was_budgeted(static):
    batch = static()
    with pytest.raises(LengthError, match="39 frames for 1 clips of 51200 samples\n  expected: at least 40 frames"):
        splice(torch.zeros(256, HIDDEN), torch.zeros(1, 39, HIDDEN), batch)


def test_a_clip_of_a_static_pack_that_is_short_is_named(static):
    batch = static()
    lens = torch.zeros(20, dtype=torch.int64)
    lens[:5] = torch.tensor([7, 1, 16, 4, 2])
    check_encoder_lens(lens, batch)
    lens[3] = 3
    with pytest.raises(LengthError, match=r"clip 3 of the batch fewer frames.*\n.*3 frames for 5000 samples"):
        check_encoder_lens(lens, batch)
    lens[:] = 0
    check_encoder_lens(lens, static([]))
