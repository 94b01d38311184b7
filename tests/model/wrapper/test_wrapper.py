"""PackedModel: how it hands a batch over, a rank without audio, FP8, and that it never asks the device anything."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from packfp8.data import Collator
from packfp8.errors import ConfigError
from packfp8.lengths import AudioFrames
from packfp8.model import PackedModel
from packfp8.model.handover import handed
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder
from packfp8.model.plain_encoder import PlainEncoder, PlainProjector
from packfp8.rule import Topology, align

BF16 = align("bf16")
STATIC = {"static": True, "budget": 256, "max_sequences": 6, "frame_budget": 40}


# -- how a batch is handed over ----------------------------------------------------------------------------------------


def test_a_pack_for_a_model_without_offsets_is_refused(build, collate, lines):
    model = build(BF16)
    model.llm.layouts = ("bshd",)
    with pytest.raises(ConfigError) as caught:
        model(collate(), global_supervised=99)
    assert lines(caught) == [
        "the language model would attend across the sequences of speech, one token, text, two clips",
        "  got:      layout 'thd' of 6 sequences, for a model of layouts ('bshd',)",
        "  expected: a model that takes offsets ('thd')",
        "  because:  nothing would fail: an attention without offsets takes a pack for one sequence, and the loss still falls",
        "  fix:      build the model for THD, or make the batches with align(..., layout='bshd') and no SP",
    ]


def test_a_pack_of_one_sequence_is_a_row_for_such_a_model(build, collate, mixed):
    rule = align("block")
    model, batch = build(rule), collate(rule, mixed[:1])
    assert batch.slots.waste["filler"]
    expected = model(batch, global_supervised=99, return_logits=True)
    model.llm.layouts = ("bshd",)
    row = model(batch, global_supervised=99, return_logits=True)
    assert row.loss.item() == pytest.approx(expected.loss.item(), abs=1e-12)
    assert row.logits.shape == expected.logits.shape == (*batch.input_ids.shape, 272)


SP = align("block", Topology(tp=2, sp=True), layout="bshd")


@pytest.mark.parametrize(
    ("rule", "consumer", "layouts", "layout"),
    [
        (align("block", layout="bshd"), "te", ("bshd", "thd"), "bshd"),
        (align("block", layout="bshd"), "te", ("thd",), "thd"),
        (align("block", layout="bshd"), "te", ("sbhd",), "sbhd"),
        (SP, "te", ("bshd", "thd"), "thd"),
        (SP, "te", ("bshd", "sbhd"), "sbhd"),
        (SP, "plain", ("bshd",), "bshd"),
        (align("block"), "te", ("bshd", "thd"), "thd"),
    ],
)
def test_the_layout_that_is_handed_over(collate, rule, consumer, layouts, layout):
    batch = collate(rule)
    own = handed(batch, consumer, layouts)
    assert own.layout == layout
    assert own.input_ids.numel() == batch.input_ids.numel()


def test_te_never_gets_padded_rows_under_sp(collate, lines):
    with pytest.raises(ConfigError) as caught:
        handed(collate(SP), "te", ("bshd",))
    assert lines(caught)[1:3] == [
        "  got:      layout 'bshd' of 6 sequences, with SP, for a model of layouts ('bshd',)",
        "  expected: a model that takes offsets ('thd')",
    ]


def test_logits_of_a_batch_handed_over_sequence_first_come_back_in_its_own_shape(build, collate):
    """A stand-in that sees the sequence first; each token's logits depend on that token alone."""
    rule = align("bf16", layout="bshd")
    batch, model = collate(rule), build(rule)

    class Alone(nn.Module):
        layouts, head = ("sbhd",), model.llm.head

        def embed(self, ids):
            return model.llm.embed(ids)

        def forward(self, embeddings, **metadata):
            assert embeddings.shape[:2] == batch.input_ids.shape[::-1]
            return embeddings

    first = build(rule, llm=Alone(), consumer="te")
    out = first(batch, global_supervised=99, return_logits=True)
    text = batch.labels != -100
    torch.testing.assert_close(out.logits[text], first.llm.head(first.llm.embed(batch.input_ids))[text])


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_nan_at_pads_reaches_neither_loss_nor_gradient(build, collate, layout):
    rule = align("block", layout=layout)
    model, batch = build(rule), collate(rule)

    def gradients():
        model.zero_grad()
        out = model(batch, global_supervised=32)
        out.loss.backward()
        return out.loss.item(), [p.grad.clone() for p in model.parameters()]

    loss, clean = gradients()
    model.llm.register_forward_hook(lambda *io: torch.where(batch.padding_mask[..., None], float("nan"), io[-1]))
    assert gradients()[0] == pytest.approx(loss, abs=1e-12)
    for one, other in zip(gradients()[1], clean, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


# -- a rank without audio, FP8, the device, and the head ---------------------------------------------------------------


@pytest.mark.parametrize("examples", ["text", "none"])
def test_the_encoder_runs_with_zero_weight_where_there_is_no_audio(build, collate, mixed, examples):
    batch = collate(examples=mixed[2:3] if examples == "text" else [])
    model = build(BF16)
    heard = []
    model.encoder.register_forward_hook(lambda module, inputs, out: heard.append(inputs[0]))
    out = model(batch, global_supervised=max(1, batch.num_supervised))
    out.loss.backward()
    assert [tuple(audio.shape) for audio in heard] == [(1, model.silent_samples)]
    audio_side = [p for part in (model.encoder, model.projector) for p in part.parameters()]
    assert all(p.grad is not None and not p.grad.any() for p in audio_side)
    assert out.loss.isfinite()
    assert out.loss_sum.item() == 0 or examples == "text"


def test_without_frames_a_rank_without_audio_hears_a_second_of_silence(build, collate, mixed):
    model, heard = build(BF16, frames=None), []
    model.encoder.register_forward_pre_hook(lambda module, given: heard.append(tuple(given[0].shape)))
    text = collate(examples=[example for example in mixed if not example.clips])
    model(text, global_supervised=text.num_supervised).loss.backward()
    assert heard == [(1, 16_000)]


def test_the_silence_is_long_enough_for_a_gradient_of_zero_in_bf16(build, collate, mixed):
    """Of one frame alone, torch leaves parts of a BF16 convolution's weight gradient as the memory was."""
    parts, batch = (
        {"encoder": PlainEncoder(width=256), "projector": PlainProjector(width=256, hidden=16)},
        collate(examples=mixed[2:3]),
    )
    model = build(BF16, **parts).bfloat16()
    for _ in range(6):
        junk = [torch.full((size,), float("nan"), dtype=torch.bfloat16) for size in (80 * 256 * 3, 256 * 256 * 3) * 3]
        del junk
        model.zero_grad(set_to_none=True)
        model(batch, global_supervised=batch.num_supervised).loss.backward()
        assert all(not parameter.grad.any() for parameter in model.encoder.parameters())


@pytest.mark.parametrize(
    ("frames", "samples"),
    [
        (None, 16_000),
        (AudioFrames.fastconformer(), 16_000),
        (AudioFrames.whisper(), 16_000),
        (AudioFrames(sample_rate=16_000, window_samples=400, hop_samples=160, limit_samples=8_000), 8_000),
        (AudioFrames(sample_rate=16_000, window_samples=20_000, hop_samples=160), 20_000),
    ],
    ids=["not told", "FastConformer", "Whisper", "a limit below a second", "a window above a second"],
)
def test_the_silence_lasts_a_second_within_what_the_encoder_takes(build, frames, samples):
    assert build(BF16, frames=frames).silent_samples == samples


class Fp8Double:
    """Notes when it is asked."""

    def __init__(self):
        self.said = []

    def prepare(self, llm, rule):
        self.said.append(("prepare", type(llm).__name__, rule.recipe))
        return llm

    @contextmanager
    def forward_context(self):
        self.said.append("enter")
        yield
        self.said.append("leave")


def test_the_fp8_context_holds_the_forward_of_the_language_model_alone(build, collate):
    fp8 = Fp8Double()
    model = build(BF16, fp8=fp8)
    for name in ("encoder", "projector", "llm"):
        getattr(model, name).register_forward_hook(lambda module, inputs, out: fp8.said.append(type(module).__name__))
    model.llm.head.register_full_backward_hook(lambda *_: fp8.said.append("backward"))
    out = model(collate(), global_supervised=99, return_logits=True)
    assert fp8.said == [
        ("prepare", "PlainDecoder", "bf16"), "PlainEncoder", "PlainProjector", "enter", "PlainDecoder", "leave",
    ]  # fmt: skip
    out.logits.sum().backward()
    assert fp8.said[-1] == "backward"


@pytest.mark.parametrize("layout", ["thd", "bshd", "static"])
@pytest.mark.parametrize("examples", [slice(None), slice(2, 3), slice(0, 0)])
def test_nothing_is_asked_of_the_device(measure, mixed, layout, examples):
    """On `meta` there are no values: whatever depends on one (.item(), nonzero, a boolean index) fails there."""

    static = layout == "static"
    rule = align("bf16", layout="thd" if static else layout)
    with torch.device("meta"):
        model = PackedModel(
            encoder=PlainEncoder(width=8, mel_bins=10),
            projector=PlainProjector(width=8, hidden=16),
            llm=PlainDecoder(DecoderSizes(vocab=272, hidden=16)),
            rule=rule,
            consumer="plain",
            frames=measure.frames,
        )
    batch = Collator(measure=measure, rule=rule, **STATIC if static else {}).collate(mixed[examples]).to("meta")
    count = torch.zeros((), dtype=torch.int64, device="meta")
    model(batch, global_supervised=count, return_logits=True).loss.backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())
    with pytest.raises(RuntimeError):
        batch.labels[0].item()  # the test could fail


def test_labels_are_not_handed_to_the_language_model(build, collate, monkeypatch):
    from packfp8.data.consumers import CONSUMERS

    spelling = CONSUMERS["plain"]
    monkeypatch.setitem(CONSUMERS, "plain", lambda batch: {**spelling(batch), "labels": batch.labels})
    assert build(BF16)(collate(), global_supervised=32).loss > 0


def test_what_else_the_language_model_is_told_is_passed_on(build, collate):
    model, told = build(BF16), {}
    forward = model.llm.forward
    model.llm.forward = lambda x, *, is_first_microbatch, **rest: (told.update(first=is_first_microbatch), forward(x, **rest))[
        1
    ]
    model(collate(), global_supervised=32, is_first_microbatch=True)
    assert told == {"first": True}


def test_the_head_works_on_supervised_rows_alone(build, collate, monkeypatch):
    from packfp8.model import wrapper

    seen, loss_sum = [], wrapper.loss_sum
    monkeypatch.setattr(
        wrapper, "loss_sum", lambda rows, *rest, **options: seen.append(len(rows)) or loss_sum(rows, *rest, **options)
    )
    build(BF16)(collate(), global_supervised=32)
    assert seen == [32]


def test_the_head_works_on_a_constant_number_of_rows_where_one_is_given(build, collate, mixed, monkeypatch):
    from packfp8.model import wrapper

    seen, loss_sum = [], wrapper.loss_sum
    monkeypatch.setattr(
        wrapper, "loss_sum", lambda rows, *rest, **options: seen.append(len(rows)) or loss_sum(rows, *rest, **options)
    )
    model, expected = build(BF16, loss_rows=40), build(BF16)
    for chosen in (mixed, mixed[:3]):
        batch = collate(examples=chosen)
        torch.testing.assert_close(model(batch, global_supervised=32).loss, expected(batch, global_supervised=32).loss)
    assert seen[::2] == [40, 40]


def test_more_supervised_tokens_than_the_head_has_rows_for_are_refused(build, collate, lines):
    with pytest.raises(ConfigError) as caught:
        build(BF16, loss_rows=31)(collate(), global_supervised=32)
    assert lines(caught) == [
        "the batch of speech, one token, text, two clips has more supervised tokens than the head has rows for",
        "  got:      32 supervised tokens",
        "  expected: at most loss_rows, 31",
        "  because:  the others would silently not be learned",
        "  fix:      raise loss_rows of PackedModel to the most that a pack may have, or leave it out",
    ]
    build(BF16, loss_rows=32)(collate(), global_supervised=32)
