"""A. FP8 under context, sequence and pipeline parallelism: which token counts the ranks get."""

from dataclasses import replace

import pytest
import torch

from packfp8 import BudgetError, ConfigError, RuleError, StateError, Topology, align
from packfp8.data import Collator, PackedDataset, PackingSampler
from packfp8.layout import place
from packfp8.rule import Need


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "tensorwise", "rowwise"])
def test_a_padded_batch_has_a_multiple_of_16_tokens_under_fp8_and_none_without(recipe, collate, docs):
    """FP8 GEMMs refuse other row counts, in torchao only in backward. Rows of 1 and 7: B * S is 16, and 14 in BF16.

    NVIDIA/TransformerEngine#1422, #1571; pytorch/ao#571.
    """
    (fp8,), (bf16,) = (collate(docs(1, 7), name, "bshd") for name in (recipe, "bf16"))
    assert fp8.input_ids.shape == (2, 8)
    assert bf16.input_ids.shape == (2, 7)
    for batch in (fp8, bf16):  # the real count is kept beside the padded one
        assert batch.slots.lengths.tolist() == [1, 7]
        assert int((~batch.padding_mask).sum()) == 8


def test_divisibility_is_checked_on_each_shard_and_not_on_the_whole(lines_of):
    """16,368 is a multiple of 16, and each of 4 SP ranks would hold 4,092. NVIDIA-NeMo/RL#1551, #1569."""
    rule = align("delayed", Topology(tp=4, sp=True))
    assert 16_368 % 16 == 0
    with pytest.raises(RuleError) as refusal:
        rule.check(16_368)
    lines = lines_of(refusal.value)
    assert "shard" in lines["what"]
    assert "4092 in each of 4" in lines["got"]
    assert lines["expected"] == "a multiple of 8"
    assert rule.pack(16_368) == 16_384
    rule.check(16_384)


def test_each_slab_meets_the_fp8_multiple_where_fp8_is_on_and_is_not_padded_where_it_is_off(collate, docs):
    """One document of 8 tokens, tp 2, cp 2: rounding to tp * cp * 2 leaves a slab of 4; a slab needs 16.

    NovaSky-AI/SkyRL#1828; NVIDIA-NeMo/Speech#8869, #8240, #7904.
    """
    assert [batch.tokens for batch in collate(docs(8), "block", cp=2, tp=2)] == [16, 16]
    assert [batch.tokens for batch in collate(docs(8), "bf16", cp=2, tp=2)] == [4, 4]


def test_the_block_of_a_recipe_is_its_own_and_is_asked_of_each_shard(lines_of):
    """MXFP8 quantises 32 rows at a time: 31,936 tokens over 4 SP ranks are 7,984 each, a multiple of 16 only.

    modelscope/ms-swift#9723, #9722.
    """
    sizes = Topology(tp=4, sp=True)
    align("block", sizes).check(31_936)
    with pytest.raises(RuleError) as refusal:
        align("mxfp8", sizes).check(31_936)
    lines = lines_of(refusal.value)
    assert "7984 in each of 4" in lines["got"]
    assert lines["expected"] == "a multiple of 32"


def test_a_recipe_left_open_is_refused_and_a_batch_of_another_recipe_is_stopped_before_forward(collate, docs, model_of):
    """An open recipe is one on a host without a GPU and another on a worker: a wrong loss. NovaSky-AI/SkyRL#1898."""
    with pytest.raises(RuleError, match="a recipe left open resolves differently"):
        align("auto")
    (batch,) = collate(docs(5), "block")
    with pytest.raises(StateError, match="another rule"):
        model_of(align("mxfp8"))(batch, global_supervised=4)


@pytest.mark.parametrize("budget", [24, 32])
def test_sampler_collator_and_budget_round_alike(budget, measure, docs):
    """Planner and packer had a multiple of their own, 2 and 4: four documents of 5 tokens were planned as 24 and packed as 32.

    NVIDIA-NeMo/RL#2182.
    """
    rule = align("bf16", Topology(cp=2))
    sampler = PackingSampler(docs(5, 5, 5, 5), measure=measure, rule=rule, budget=budget)
    dataset = PackedDataset(Collator(measure=measure, rule=rule, budget=budget))
    totals = [dataset[pack].slots.total for pack in sampler]
    assert max(totals) <= budget
    assert sum(totals) == 32
    assert len(totals) == (1 if budget == 32 else 2)


def test_multiples_are_joined_by_lcm():
    """The larger of 12 and 16 is no multiple of 12. NVIDIA-NeMo/RL#971."""
    why = {"because": "a test", "source": "a test"}
    needs = (Need(unit="slot", multiple=12, **why), Need(unit="pack", multiple=16, **why))
    assert replace(align("bf16"), needs=needs).total == 48


def test_a_document_that_cp_cannot_halve_keeps_all_its_tokens(collate, docs):
    """A document of 7 tokens on cp 2 was treated as 6. NVIDIA/TransformerEngine#1929, #1368."""
    batches = collate(docs(7), "bf16", cp=2)
    for batch in batches:
        assert batch.cu_seqlens.tolist() == [0, 8]
        assert batch.cu_seqlens_real.tolist() == [0, 7]
    assert batches[0].unpack([batch.input_ids for batch in batches])["0"].tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_without_padding_attention_is_told_of_none(collate, docs):
    """A flag that always says "padded" loses backends (head_dim 256) and fast kernels. Documents of 8 and 16 on cp 2.

    NVIDIA/Megatron-LM#7417; NVIDIA-NeMo/Megatron-Bridge#2039.
    """
    for batch in collate(docs(8, 16), "bf16", cp=2):
        given = batch.kwargs("te_real")
        assert given["pad_between_seqs"] is False
        assert "cu_seqlens_q_padded" not in given
        assert given["cu_seqlens_q"].tolist() == [0, 8, 24]
    for batch in collate(docs(7, 16), "bf16", cp=2):  # one pad
        given = batch.kwargs("te_real")
        assert given["pad_between_seqs"] is True
        assert given["cu_seqlens_q"].tolist() == [0, 7, 23]
        assert given["cu_seqlens_q_padded"].tolist() == [0, 8, 24]


def test_filler_is_a_segment_of_its_own_and_changes_no_real_token(collate, docs, model_of):
    """Pads appended to the last document looked real, and gradients grew. Documents of 10 and 11 tokens, T from 21 to 32.

    NVIDIA/TransformerEngine#2892, #2911; NVIDIA/Megatron-LM#5541.
    """
    (padded,), (tight,) = (collate(docs(10, 11), recipe) for recipe in ("block", "bf16"))
    assert padded.cu_seqlens.tolist() == [0, 10, 21, 32]
    assert tight.cu_seqlens.tolist() == [0, 10, 21]
    pads = padded.padding_mask
    assert pads.tolist() == [False] * 21 + [True] * 11
    assert set(padded.labels[pads].tolist()) == {-100}
    outputs, gradients = [], []
    for batch, ids in ((tight, tight.input_ids), (padded, padded.input_ids), (padded, padded.input_ids.masked_fill(pads, 271))):
        model = model_of(batch.rule)
        out = model(replace(batch, input_ids=ids), global_supervised=batch.num_supervised, return_logits=True)
        out.loss.backward()
        assert torch.isfinite(out.logits).all()
        outputs.append(torch.cat(list(batch.unpack(out.logits).values())))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for values in (outputs, gradients):
        torch.testing.assert_close(values[1], values[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(values[2], values[0], rtol=1e-12, atol=1e-12)


def test_labels_are_shifted_before_the_split_over_ranks(collate, docs):
    """A roll over unpadded offsets leaked labels between odd documents, and went out of range. Documents of 3 and 5, cp 2.

    NVIDIA/Megatron-LM#4495.
    """
    batches = collate(docs("1 2 3", "4 5 6 7 8"), "bf16", cp=2)
    labels = batches[0].unpack([batch.labels for batch in batches])
    assert labels["0"].tolist() == [2, 3, -100]
    assert labels["1"].tolist() == [5, 6, 7, 8, -100]


def test_the_cp_split_cuts_tokens_and_never_offsets(collate, docs):
    """Offsets were cut along the sequence like data. cp 32, four documents, five offsets. NVIDIA-NeMo/Megatron-Bridge#1964."""
    batches = collate(docs(100, 64, 1, 65), "bf16", cp=32)
    total = batches[0].slots.total
    for batch in batches:
        assert batch.cu_seqlens.tolist() == [0, 128, 192, 256, 384]
        assert {
            getattr(batch, name).numel() for name in ("input_ids", "labels", "position_ids", "seq_idx", "padding_mask")
        } == {total // 32}


def test_a_document_shorter_than_the_ranks_reaches_all_of_them_as_pads(collate, docs):
    """Chunks counted on the padded length were cut from a buffer of the real one. A document of 2 tokens, tp 2, cp 8.

    verl-project/verl#5981, #4656.
    """
    batches = collate(docs("8 9"), "bf16", cp=8, tp=2, sp=True)
    assert [batch.tokens for batch in batches] == [2] * 8
    assert batches[0].unpack([batch.input_ids for batch in batches])["0"].tolist() == [8, 9]
    assert sum(batch.num_supervised for batch in batches) == 1
    assert sum(int(batch.padding_mask.sum()) for batch in batches) == 14


def test_micro_batches_of_one_step_have_one_size_where_it_is_asked_for(collate, docs):
    """Pipeline stages exchange tensors of one shape: 4,487 tokens met 4,488. Padded batches are refused: rows vary in number.

    NVIDIA-NeMo/Megatron-Bridge#4143; NVIDIA-NeMo/RL#1579.
    """
    sizes = {"cp": 2, "dp": 2, "budget": 4512, "max_sequences": 4}
    shapes = {
        (batch.tokens, len(batch.cu_seqlens), batch.max_seqlen)
        for items in (docs(4487), docs(4488), docs(1, 2, 3), [])
        for batch in collate(items, "current", static=True, frame_budget=2, **sizes)
    }
    assert shapes == {(2256, 6, 4512)}
    with pytest.raises(ConfigError, match="packs cannot be static"):
        collate(docs(4487), "current", "bshd", static=True, **sizes)
    assert len({collate(items, "current", **sizes)[0].tokens for items in (docs(4447), docs(4488))}) == 2


# More of the same kind: sizes that are no powers of two, and lengths on both sides of a bound.


@pytest.mark.parametrize(("length", "slot", "total"), [(143, 144, 144), (144, 144, 144), (145, 150, 288), (1, 6, 144)])
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_three_ranks_of_each_kind_share_a_pack_evenly(recipe, length, slot, total, collate, docs):
    """cp 3 and tp 3 with SP: slots of 6, packs of 144, at one token below, at and above a whole pack."""
    batches = collate(docs(length), recipe, cp=3, tp=3, sp=True)
    for batch in batches:
        assert batch.cu_seqlens.tolist() == [0, slot, *([total] if total > slot else [])]
        assert batch.tokens == total // 3
        assert batch.tokens % 16 == 0  # the slab, in backward
        assert batch.tokens // 3 % 8 == 0  # the shard, in forward
    assert len(batches[0].unpack([batch.input_ids for batch in batches])["0"]) == length


@pytest.mark.parametrize("sizes", [{"cp": 3}, {"tp": 3, "sp": True}, {"cp": 5, "tp": 7, "sp": True}, {"cp": 6, "tp": 2}])
@pytest.mark.parametrize("recipe", ["bf16", "block", "mxfp8", "rowwise_with_gw_hp"])
def test_a_budget_of_one_pack_holds_exactly_one_pack(recipe, sizes, measure, docs, collate):
    """The least budget: a document of just that length fits, one token more is refused, and so is a budget one below."""
    rule = align(recipe, Topology(**sizes))
    (batch, *_) = collate(docs(rule.total), recipe, **sizes, budget=rule.total)
    assert batch.slots.total == rule.total
    with pytest.raises(BudgetError, match="does not fit the pack"):
        collate(docs(rule.total + 1), recipe, **sizes, budget=rule.total)
    if rule.total > 1:
        with pytest.raises(BudgetError, match="below the least pack"):
            Collator(measure=measure, rule=rule, budget=rule.total - 1)
    assert place([], rule).total == rule.total
