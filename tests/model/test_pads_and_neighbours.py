"""prove_isolation passes a model that keeps sequences apart, and catches each way of mixing them, naming what was ignored."""

import pytest
import torch
from torch import nn

from packfp8.data import Collator, Example, Turn
from packfp8.errors import ConfigError
from packfp8.lengths import Measure
from packfp8.model import PackedModel
from packfp8.rule import Topology, align

SENTENCES = ("good morning to you", "no", "what a long and winding road", "yes")


class ByOffsets(nn.Module):
    """One attention layer by offsets, in the spelling of Transformer Engine; each fault is one line of difference."""

    layouts = ("thd", "bshd", "sbhd")

    def __init__(self, fault=None):
        super().__init__()
        torch.manual_seed(0)
        self.fault, self.embed = fault, nn.Embedding(272, 8)
        self.head, self.drop = nn.Linear(8, 272, bias=False), nn.Dropout(0.5)

    def forward(self, x, *, cu_seqlens_q, cu_seqlens_kv, **_):
        bounds = torch.tensor([0, len(x)]) if self.fault == "offsets" else cu_seqlens_q
        out = [self.attend(x[a:b]) for a, b in zip(bounds.tolist(), bounds[1:].tolist(), strict=False) if b > a]
        out = self.drop(torch.cat(out))
        if self.fault == "convolution":
            out = out + torch.cat((out[:1], out[:-1]))
        if self.fault == "norm over tokens":
            out = out - out.mean(0)
        return out * 0 if self.fault == "deaf" else out

    def attend(self, x):
        return nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=self.fault != "not causal")[0]


class NoOffsets(nn.Module):
    """Rows of equal size: a causal mean along each, or one that also looks at the row before."""

    layouts = ("bshd",)

    def __init__(self, mixes):
        super().__init__()
        self.mixes, self.embed, self.head = mixes, nn.Embedding(272, 8), nn.Linear(8, 272, bias=False)

    def forward(self, x, **_):
        out = x.cumsum(1)
        return out + out.roll(1, 0) if self.mixes else out


@pytest.fixture(scope="module")
def texts():
    return [Example(id=f"s{n}", turns=(Turn("assistant", (text,)),)) for n, text in enumerate(SENTENCES)]


def model_and_batch(llm, examples, layout="thd", consumer="te"):
    rule = align("block", Topology(), layout=layout)
    batch = Collator(measure=Measure(frames=None), rule=rule)(examples)
    return PackedModel(encoder=None, projector=None, llm=llm, rule=rule, consumer=consumer), batch


def lines(caught):
    return str(caught.value).splitlines()


def test_a_model_that_reads_the_offsets_is_passed_and_left_in_training(texts):
    model, batch = model_and_batch(ByOffsets(), texts)
    model.llm.drop.train()
    model.llm.embed.eval()
    model.prove_isolation(batch)
    assert model.llm.drop.training
    assert not model.llm.embed.training


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_the_plain_decoder_keeps_audio_and_text_apart(layout, build, measure, mixed):
    rule = align("block", Topology(), layout=layout)
    build(rule).prove_isolation(Collator(measure=measure, rule=rule)(mixed))


def test_ignored_offsets_are_named(texts):
    model, batch = model_and_batch(ByOffsets("offsets"), texts)
    with pytest.raises(ConfigError) as caught:
        model.prove_isolation(batch)
    what, got, expected, because, fix = lines(caught)
    assert "s0, s1, s2, s3" in what
    assert "the first sequence changed, and s1, s2, s3 moved by up to" in got
    assert "as it was" in expected
    assert "ignores cu_seqlens_q, cu_seqlens_kv" in because
    assert "consumer" in fix


def test_ids_that_a_decoder_drops_are_named_and_the_positions_that_it_reads_are_not(texts, build):
    rule = align("block", Topology())
    model = build(rule, encoder=None, projector=None, frames=None)
    batch = Collator(measure=Measure(frames=None), rule=rule)(texts)
    model.prove_isolation(batch)
    decode = model.llm.forward
    model.llm.forward = lambda x, *, position_ids, seq_idx: decode(x, position_ids=position_ids, seq_idx=seq_idx * 0)
    with pytest.raises(ConfigError) as caught:
        model.prove_isolation(batch)
    assert lines(caught)[3].endswith("ignores seq_idx: changing what they say changes nothing")


@pytest.mark.parametrize("fault", ["convolution", "norm over tokens"])
def test_a_layer_that_crosses_boundaries_beside_an_attention_that_does_not(fault, texts):
    model, batch = model_and_batch(ByOffsets(fault), texts)
    with pytest.raises(ConfigError) as caught:
        model.prove_isolation(batch)
    assert "some layer crosses boundaries" in lines(caught)[3]


def test_a_convolution_without_padding_between_is_caught_though_it_reaches_one_token(texts):
    """It reaches the first token of the next slot only, past no pad: the rule's slot here is one token."""
    model, batch = model_and_batch(ByOffsets("convolution"), texts)
    assert batch.slots.waste["slot"] == 0
    with pytest.raises(ConfigError, match="first sequence changed, and s1 moved"):
        model.prove_isolation(batch)


def test_padding_that_reaches_real_tokens_is_caught(texts):
    model, batch = model_and_batch(ByOffsets("not causal"), texts, "bshd")
    model.llm.layouts = ("thd",)  # rows as slots, padded on the right
    with pytest.raises(ConfigError, match="the padding changed"):
        model.prove_isolation(batch)


@pytest.mark.parametrize("mixes", [False, True])
def test_rows_of_a_padded_batch_that_feel_each_other_are_caught(mixes, texts):
    model, batch = model_and_batch(NoOffsets(mixes), texts, "bshd")
    if not mixes:
        return model.prove_isolation(batch)
    with pytest.raises(ConfigError) as caught:
        model.prove_isolation(batch)
    assert "in layout 'bshd' tells of boundaries" in lines(caught)[3]


def test_what_moves_within_the_tolerance_is_let_pass(texts):
    model, batch = model_and_batch(ByOffsets("norm over tokens"), texts)
    model.prove_isolation(batch, tolerance=0.5)
    with pytest.raises(ConfigError, match="did not move"):  # a tolerance that also hides the change itself proves nothing
        model.prove_isolation(batch, tolerance=1e3)


@pytest.mark.parametrize(("fault", "examples", "got"), [(None, 1, "1 sequences"), ("deaf", 4, "did not move")])
def test_nothing_is_proved_by_one_sequence_or_a_model_that_does_not_listen(fault, examples, got, texts):
    model, batch = model_and_batch(ByOffsets(fault), texts[:examples])
    with pytest.raises(ConfigError) as caught:
        model.prove_isolation(batch)
    what, told, expected, because, fix = lines(caught)
    assert "nothing was proved" in what
    assert got in told
    assert "at least two" in expected or "reads its input" in expected
    assert "must reach" in because
    assert "pass a" in fix


def test_a_value_that_is_not_a_number_has_moved(texts):
    model, batch = model_and_batch(ByOffsets(), texts)
    forward = model.llm.forward
    model.llm.forward = lambda x, **kwargs: forward(x, **kwargs) * torch.where(batch.seq_idx == 2, float("nan"), 1.0)[:, None]
    with pytest.raises(ConfigError, match="s2 moved"):
        model.prove_isolation(batch)
