"""Static packs whose filler is cut into slots: the same loss, gradients and proof of isolation as with one slot of filler."""

import pytest
import torch

from packfp8.data import Collator
from packfp8.rule import align

STATIC = {"static": True, "budget": 512, "max_sequences": 9, "frame_budget": 60}


def gradients(model, outputs):
    model.zero_grad()
    sum(out.loss_sum for out in outputs).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("max_seqlen", [64, 100])
def test_loss_logits_and_gradients_are_those_without_the_bound(run_ranks, mixed, max_seqlen, cp):
    whole, plain, expected = run_ranks(mixed, "block", cp=cp, **STATIC)
    model, batches, outputs = run_ranks(mixed, "block", cp=cp, **STATIC, max_seqlen=max_seqlen)
    filler = len(batches[0].slots.sizes) - batches[0].slots.sequences
    assert (filler, len(plain[0].slots.sizes) - plain[0].slots.sequences) == (
        -(-batches[0].slots.waste["filler"] // batches[0].max_seqlen),
        1,
    )
    assert filler > 2
    for out, other, batch in zip(outputs, expected, batches, strict=True):
        torch.testing.assert_close(out.loss_sum, other.loss_sum, rtol=0, atol=1e-12)
        real = ~batch.padding_mask
        torch.testing.assert_close(out.logits[real], other.logits[real], rtol=0, atol=1e-12)
    ours, theirs = gradients(model, outputs), gradients(whole, expected)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-11)
        assert theirs[name].abs().max() > 1e-6, "a gradient that is zero shows nothing"


def test_a_pack_of_filler_alone_has_no_loss_and_zero_gradients(build, measure):
    rule = align("block")
    model = build(rule)
    batch = Collator(measure=measure, rule=rule, **STATIC, max_seqlen=64).collate([])
    out = model(batch, global_supervised=7)
    out.loss.backward()
    assert out.loss == 0
    assert len(batch.slots.sizes) == 8
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_isolation_is_proved_with_several_slots_of_filler(build, measure, mixed):
    rule = align("block")
    batch = Collator(measure=measure, rule=rule, **STATIC, max_seqlen=64)(mixed)
    assert len(batch.slots.sizes) > batch.slots.sequences + 2
    build(rule).prove_isolation(batch)


@pytest.mark.parametrize("sequences", [0, 1])
def test_a_model_of_padded_rows_alone_takes_a_pack_of_one_sequence_and_its_filler_as_one_row(build, measure, mixed, sequences):
    """It is told nothing of slots: causal attention keeps the sequence from the filler after it, however that is cut."""
    rule = align("block")
    batch = Collator(measure=measure, rule=rule, **STATIC, max_seqlen=64).collate(mixed[:sequences])
    model, rows = build(rule), build(rule)
    rows.llm.layouts, forward = ("bshd",), rows.llm.forward

    def causal(x, *, position_ids, seq_idx):
        return forward(x, position_ids=torch.arange(512)[None], seq_idx=torch.zeros_like(seq_idx))

    rows.llm.forward = causal
    count = max(1, batch.num_supervised)
    expected, loss = (one(batch, global_supervised=count).loss.item() for one in (model, rows))
    assert loss == pytest.approx(expected, rel=0, abs=1e-12)
    assert (loss > 0) == bool(sequences)
