"""PackedModel: packs of one shape, whose clips stand in one row."""

import pytest
import torch
from torch import nn

from packfp8.errors import ConfigError, LengthError
from packfp8.rule import align

STATIC = {"static": True, "budget": 256, "max_sequences": 6, "frame_budget": 40}


def test_a_static_pack_has_constant_shapes(build, collate, mixed):
    """Whatever is in it, so that a whole step can be captured."""
    rule = align("block")
    batches = [collate(rule, mixed[:n], **STATIC) for n in (0, 2, 3, 6)]
    model, heard = build(rule), []
    model.encoder.register_forward_hook(lambda module, given, out: heard.append([t.shape for t in (*given, *out)]))
    shapes = {model(b, global_supervised=99, return_logits=True).logits.shape for b in batches}
    assert shapes == {(256, 272)}
    assert len({(b.max_seqlen, b.cu_seqlens.shape, b.audio_source.shape, b.audio_frames) for b in batches}) == 1
    assert heard[0] == [(1, 40 * 1280), (20,), (21,), (1, 40, 8), (20,)]
    assert all(shapes == heard[0] for shapes in heard)


@pytest.mark.parametrize("count", [0, 2, 3, 6])
def test_a_static_pack_teaches_what_the_same_pack_teaches_with_a_row_for_each_clip(build, collate, mixed, count):
    rule = align("block")
    model = build(rule)

    def taught(batch):
        model.zero_grad()
        out = model(batch, global_supervised=max(1, batch.num_supervised))
        out.loss.backward()
        return out.loss, {name: p.grad for name, p in model.named_parameters()}

    loss, gradients = taught(collate(rule, mixed[:count], **STATIC))
    expected, wanted = taught(collate(rule, mixed[:count]))
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-11)
    assert any(g.any() for name, g in gradients.items() if name.startswith("encoder")) == (count > 0)


def test_the_sequences_of_a_static_pack_do_not_hear_each_other(build, collate):
    rule = align("block")
    build(rule).prove_isolation(collate(rule, **STATIC))


def test_clips_in_one_row_are_refused_by_an_encoder_that_takes_a_row_for_one(build, collate, lines):
    class Unaware(nn.Module):
        def forward(self, audio, audio_lens):
            raise AssertionError("it must not run")

    rule = align("block")
    with pytest.raises(ConfigError) as caught:
        build(rule, encoder=Unaware())(collate(rule, **STATIC), global_supervised=99)
    assert lines(caught) == [
        "the clips of speech, one token, text, two clips stand in one row, and the encoder takes one clip a row",
        "  got:      Unaware without packed=True",
        "  expected: encoder(audio [1, samples], audio_lens, audio_offsets), and packed = True on the module",
        "  because:  an encoder that is not told where clips begin lets each of them hear the others",
        "  fix:      mask at the offsets before every convolution, as PlainEncoder does; or Collator(static=False)",
    ]


def test_clips_in_one_row_are_refused_by_a_model_without_an_encoder(build, collate):
    rule = align("block")
    with pytest.raises(ConfigError, match="has audio, and the model has no encoder\n  got:      a row of clips"):
        build(rule, encoder=None, projector=None, frames=None)(collate(rule, **STATIC), global_supervised=99)


def test_an_encoder_whose_clip_is_short_in_a_packed_row_is_refused(build, collate, lines):
    rule = align("block")
    model, batch = build(rule), collate(rule, **STATIC)
    encoder = model.encoder.forward

    def short(audio, lens, offsets):
        out, frames = encoder(audio, lens, offsets)
        return out, frames - (torch.arange(len(frames)) == 2).int()

    model.encoder.forward = short
    with pytest.raises(LengthError) as caught:
        model(batch, global_supervised=99)
    assert lines(caught)[:3] == [
        "the encoder gave clip 2 of the batch fewer frames than the plan has placed",
        "  got:      15 frames for 20000 samples",
        "  expected: at least 16",
    ]
