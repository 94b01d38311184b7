"""PackedModel: what it refuses, how it hands a batch over, and that it never asks the device anything."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from packfp8.data import Collator
from packfp8.errors import ConfigError, LengthError, PackError, StateError
from packfp8.lengths import AudioFrames
from packfp8.model import Fp8, PackedModel
from packfp8.model.handover import handed
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder
from packfp8.model.plain_encoder import PlainEncoder, PlainProjector
from packfp8.model.tensor_split import TensorSplit
from packfp8.rule import Topology, align

BF16 = align("bf16")


@pytest.fixture
def collate(measure, mixed):
    def collate(rule=BF16, examples=mixed, **options):
        return Collator(measure=measure, rule=rule, **options).collate(examples)

    return collate


def lines(caught):
    return str(caught.value).splitlines()


# -- what it refuses ---------------------------------------------------------------------------------------------------


def test_a_batch_made_by_another_rule_is_refused(build, collate):
    other = align("block")
    with pytest.raises(StateError) as caught:
        build(BF16)(collate(other), global_supervised=99)
    assert lines(caught) == [
        "the batch of speech, one token, text, two clips was made by another rule than the model's",
        f"  got:      {other.fingerprint}",
        f"  expected: {BF16.fingerprint}",
        "  because:  its slots and total were rounded for another recipe, layout or split",
        "  fix:      give collator and PackedModel the same align(...)",
    ]


def test_the_slab_of_another_rank_is_refused(build, collate):
    rules = [align("bf16", Topology(cp=2, cp_rank=rank)) for rank in range(2)]
    assert rules[0].fingerprint == rules[1].fingerprint
    with pytest.raises(StateError) as caught:
        build(rules[0])(collate(rules[1]), global_supervised=99)
    assert lines(caught) == [
        "the batch is the slab of another rank",
        "  got:      cp_rank 1",
        "  expected: cp_rank 0",
        "  because:  two ranks would train on one slab, and another would train nobody",
        "  fix:      build both rules from this rank's mesh: Topology.from_mesh(mesh)",
    ]


def test_attention_within_a_slab_is_refused_under_cp(build, collate):
    rule = align("block", Topology(cp=2))
    model = build(rule)
    with pytest.raises(ConfigError) as caught:
        model(collate(rule), global_supervised=99)
    assert lines(caught) == [
        "the language model attends within the slab of this rank alone",
        "  got:      PlainDecoder without a CP group, cp 2",
        "  expected: attention over the slabs of all CP ranks",
        "  because:  nothing would fail: each rank would take its two chunks of a slot for the whole sequence",
        "  fix:      TeDecoder.split_context(group), or PlainDecoder.gather = GatherOverRanks(group)",
    ]
    model.llm.gather = lambda tensor, dim: torch.cat((tensor, tensor), dim)
    model(collate(rule), global_supervised=99)


@pytest.mark.parametrize(("topology", "told"), [(Topology(tp=2), "2"), (Topology(), "1")], ids=["SP", "tp"])
def test_a_decoder_of_other_tp_peers_than_the_rules_is_refused(build, collate, monkeypatch, topology, told):
    """Peers that were told to the rule as data-parallel ranks would each see another pack."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    rule = align("block", topology)
    model = build(rule)
    model.llm.split = TensorSplit(group=object(), sp=True)
    with pytest.raises(ConfigError) as caught:
        model(collate(rule), global_supervised=99)
    assert lines(caught) == [
        "the language model is divided over other TP peers than the batches are made for",
        "  got:      tp 2 with SP",
        f"  expected: tp {told}, as the rule has it",
        "  because:  TP peers must hold the same pack, of tokens that divide among them; data-parallel ranks hold others",
        "  fix:      build rule and decoder from one mesh: Topology.from_mesh(mesh, sp=...), TeDecoder(tp_group=..., sp=...)",
    ]


def test_audio_without_an_encoder_is_refused_and_text_is_not(build, collate, mixed):
    model = build(BF16, encoder=None, projector=None, frames=None)
    assert model(collate(examples=mixed[2:3]), global_supervised=9).loss > 0
    with pytest.raises(ConfigError) as caught:
        model(collate(), global_supervised=99)
    assert lines(caught) == [
        "the batch of speech, one token, text, two clips has audio, and the model has no encoder",
        "  got:      5 clips",
        "  expected: a batch of text",
        "  because:  the places of the audio would keep the embedding of a stand-in token",
        "  fix:      give PackedModel an encoder and a projector",
    ]


def test_a_count_below_the_batch_is_refused(build, collate):
    with pytest.raises(ConfigError) as caught:
        build(BF16)(collate(), global_supervised=31)
    assert lines(caught) == [
        "global_supervised is less than this batch has by itself",
        "  got:      31",
        "  expected: at least 32",
        "  because:  it counts the supervised tokens of all micro-batches and ranks of the step",
        "  fix:      pass count_supervised(batches, group)",
    ]
    build(BF16)(collate(), global_supervised=32)


def test_half_an_audio_side_is_refused(build):
    with pytest.raises(ConfigError) as caught:
        build(BF16, projector=None)
    assert lines(caught) == [
        "the audio side of the model is incomplete",
        "  got:      encoder given, projector missing",
        "  expected: encoder and projector, or none of them",
        "  because:  audio is encoded, and projected to the language model's features",
        "  fix:      pass both; nn.Identity() where the encoder's features are the language model's",
    ]
    with pytest.raises(ConfigError, match="encoder missing, projector given"):
        build(BF16, encoder=None)


def test_the_first_batch_brings_the_rule_where_none_was_given(build, collate):
    model = build(None)
    batch = collate(align("block"))
    told = model(batch, global_supervised=batch.num_supervised)
    assert model.rule is batch.rule
    known = build(align("block"))
    known.load_state_dict(model.state_dict())
    assert torch.equal(told.loss, known(batch, global_supervised=batch.num_supervised).loss)
    with pytest.raises(StateError, match="was made by another rule"):
        model(collate(align("bf16")), global_supervised=99)


def test_a_first_batch_for_another_recipe_than_the_models_is_refused(build, collate):
    model = build(None)
    model.fp8 = Fp8.torchao("tensorwise", emulate=True)
    with pytest.raises(StateError) as caught:
        model(collate(align("block")), global_supervised=99)
    assert lines(caught)[1:3] == ["  got:      recipe block", "  expected: recipe tensorwise"]


def test_without_frames_a_rank_without_audio_hears_a_second_of_silence(build, collate, mixed):
    model, heard = build(BF16, frames=None), []
    model.encoder.register_forward_pre_hook(lambda module, given: heard.append(tuple(given[0].shape)))
    text = collate(examples=[example for example in mixed if not example.clips])
    model(text, global_supervised=text.num_supervised).loss.backward()
    assert heard == [(1, 16_000)]


@pytest.mark.parametrize(
    ("given", "what", "expected"),
    [
        ({"rule": "block"}, "what was given as the rule is none", "an Alignment, as align(...) gives it"),
        ({"fp8": "block"}, "what was given as fp8 is none", "Fp8.te(...), Fp8.torchao(...), or None"),
        ({"consumer": "te"}, "the language model does not read what this consumer is told", "'plain'"),
        ({"consumer": "nope"}, "the language model does not read what this consumer is told", "'plain'"),
    ],
)
def test_a_rule_fp8_or_consumer_that_is_none_is_refused(build, given, what, expected):
    with pytest.raises(PackError) as caught:
        build(given.get("rule", BF16), **{key: value for key, value in given.items() if key != "rule"})
    found = lines(caught)
    assert (found[0], found[2]) == (what, f"  expected: {expected}")
    assert [line.split(":")[0].strip() for line in found[1:]] == ["got", "expected", "because", "fix"]


@pytest.mark.parametrize("rows", [0, -5, 1.5, True, "64"])
@pytest.mark.parametrize("name", ["loss_chunk_tokens", "loss_rows"])
def test_rows_of_the_head_that_are_none_are_refused(build, name, rows):
    """Chunks of -5 rows would give a loss of zero."""
    with pytest.raises(ConfigError) as caught:
        build(align("block"), **{name: rows})
    assert str(caught.value).splitlines() == [
        f"{name} is no number of rows",
        f"  got:      {rows!r}",
        "  expected: a whole number of at least 1",
        "  because:  the head works on so many rows: on none it would make a loss of zero, and nothing would be learned",
        f"  fix:      leave out {name}, or give a count of tokens",
    ]


def test_what_is_not_a_batch_is_refused(build):
    with pytest.raises(ConfigError, match="what the model was given is not a batch"):
        build(BF16)({"input_ids": torch.zeros(4)}, global_supervised=1)


@pytest.mark.parametrize("count", [None, float("nan"), 99.0, "99", torch.tensor([99, 99])])
def test_a_count_that_is_none_is_refused(build, collate, count):
    with pytest.raises(ConfigError, match="global_supervised is less than"):
        build(BF16)(collate(), global_supervised=count)


def test_a_language_model_that_cannot_be_driven_is_refused(build):
    with pytest.raises(ConfigError) as caught:
        build(BF16, llm=nn.Linear(4, 4))
    assert lines(caught) == [
        "the language model does not have what the wrapper drives it by",
        "  got:      Linear without embed, layouts, head",
        "  expected: embed(ids), layouts, and head with a weight [vocab, hidden]",
        "  because:  audio is placed among embeddings, and the loss makes its logits in chunks",
        "  fix:      wrap it in a small module with these attributes; see help(packfp8.model.wrapper)",
    ]


def test_a_head_with_a_bias_is_refused(build):
    llm = PlainDecoder(DecoderSizes(vocab=272, hidden=16))
    llm.head = nn.Linear(16, 272)
    with pytest.raises(ConfigError) as caught:
        build(BF16, llm=llm)
    assert lines(caught) == [
        "the head of the language model has a bias",
        "  got:      bias of shape (272,)",
        "  expected: a head without bias",
        "  because:  the chunked loss makes logits of hidden states and a weight alone",
        "  fix:      build the head with bias=False",
    ]


def test_an_encoder_that_gives_fewer_frames_is_refused(build, collate):
    model = build(BF16)
    encoder = model.encoder.forward
    model.encoder.forward = lambda audio, lens: encoder(audio, lens)[0][:, :-1]
    with pytest.raises(LengthError, match="15 frames for 5 clips"):
        model(collate(), global_supervised=99)


def test_an_encoder_that_gives_more_frames_is_cut_by_shape(build, collate):
    model, batch = build(BF16), collate()
    expected = model(batch, global_supervised=32).loss
    encoder = model.encoder.forward

    def padded(audio, lens):
        out, lens = encoder(audio, lens)
        return torch.cat((out, torch.full_like(out, 7.0)), 1), lens

    model.encoder.forward = padded
    assert model(batch, global_supervised=32).loss.item() == pytest.approx(expected.item(), abs=1e-12)


# -- how a batch is handed over ----------------------------------------------------------------------------------------


def test_a_pack_for_a_model_without_offsets_is_refused(build, collate):
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


def test_te_never_gets_padded_rows_under_sp(collate):
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


# -- a rank without audio, FP8, and the device -------------------------------------------------------------------------


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


def test_the_head_works_on_supervised_rows_alone(build, collate, monkeypatch):
    from packfp8.model import wrapper

    seen, loss_sum = [], wrapper.loss_sum
    monkeypatch.setattr(
        wrapper, "loss_sum", lambda rows, *rest, **options: seen.append(len(rows)) or loss_sum(rows, *rest, **options)
    )
    build(BF16)(collate(), global_supervised=32)
    assert seen == [32]


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


def test_clips_in_one_row_are_refused_by_an_encoder_that_takes_a_row_for_one(build, collate):
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


def test_an_encoder_whose_clip_is_short_in_a_packed_row_is_refused(build, collate):
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


def test_more_supervised_tokens_than_the_head_has_rows_for_are_refused(build, collate):
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
