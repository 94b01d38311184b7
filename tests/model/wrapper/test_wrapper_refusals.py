"""PackedModel: what it refuses."""

import pytest
import torch
from torch import nn

from packfp8.errors import ConfigError, LengthError, PackError, StateError
from packfp8.model import Fp8
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder
from packfp8.model.tensor_split import TensorSplit
from packfp8.rule import Topology, align

BF16 = align("bf16")


def test_a_batch_made_by_another_rule_is_refused(build, collate, lines):
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


def test_the_slab_of_another_rank_is_refused(build, collate, lines):
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


def test_attention_within_a_slab_is_refused_under_cp(build, collate, lines):
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
def test_a_decoder_of_other_tp_peers_than_the_rules_is_refused(build, collate, monkeypatch, topology, told, lines):
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


def test_audio_without_an_encoder_is_refused_and_text_is_not(build, collate, mixed, lines):
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


def test_a_count_below_the_batch_is_refused(build, collate, lines):
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


def test_half_an_audio_side_is_refused(build, lines):
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


def test_a_first_batch_for_another_recipe_than_the_models_is_refused(build, collate, lines):
    model = build(None)
    model.fp8 = Fp8.torchao("tensorwise", emulate=True)
    with pytest.raises(StateError) as caught:
        model(collate(align("block")), global_supervised=99)
    assert lines(caught)[1:3] == ["  got:      recipe block", "  expected: recipe tensorwise"]


@pytest.mark.parametrize(
    ("given", "what", "expected"),
    [
        ({"rule": "block"}, "what was given as the rule is none", "an Alignment, as align(...) gives it"),
        ({"fp8": "block"}, "what was given as fp8 is none", "Fp8.te(...), Fp8.torchao(...), or None"),
        ({"consumer": "te"}, "the language model does not read what this consumer is told", "'plain'"),
        ({"consumer": "nope"}, "the language model does not read what this consumer is told", "'plain'"),
    ],
)
def test_a_rule_fp8_or_consumer_that_is_none_is_refused(build, given, what, expected, lines):
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


def test_a_language_model_that_cannot_be_driven_is_refused(build, lines):
    with pytest.raises(ConfigError) as caught:
        build(BF16, llm=nn.Linear(4, 4))
    assert lines(caught) == [
        "the language model does not have what the wrapper drives it by",
        "  got:      Linear without embed, layouts, head",
        "  expected: embed(ids), layouts, and head with a weight [vocab, hidden]",
        "  because:  audio is placed among embeddings, and the loss makes its logits in chunks",
        "  fix:      wrap it in a small module with these attributes; see help(packfp8.model.wrapper)",
    ]


def test_a_head_with_a_bias_is_refused(build, lines):
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
