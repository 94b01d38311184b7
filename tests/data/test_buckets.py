"""Buckets: few shapes, all of them legal; the pack in them is the same as without."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packfp8.data import Collator, PackedDataset, PackingSampler
from packfp8.errors import ConfigError
from packfp8.lengths import Measure
from packfp8.rule import Topology, align


def shape(batch):
    return batch.tokens, len(batch.cu_seqlens), batch.max_seqlen


@settings(max_examples=40)
@given(st.lists(st.integers(1, 60), max_size=8), st.sampled_from([1, 2]), st.sampled_from([None, 9]))
def test_a_bucketed_pack_is_the_least_pack_with_more_filler(bare, docs, lengths, cp, most):
    items = docs(*(" ".join(["7"] * n) for n in lengths))
    for rank in range(cp):
        rule = align("block", Topology(cp=cp, cp_rank=rank))
        least, batch = (bare(rule, budget=512, max_sequences=most, buckets=b).collate(items) for b in (False, True))
        slots = batch.slots
        rule.check(slots.total, slots=slots.sizes.tolist())
        assert slots.total % 64 == 0
        assert slots.lengths[: slots.sequences].tolist() == lengths
        assert batch.cu_seqlens[: len(slots.offsets)].tolist() == slots.offsets.tolist()
        assert set(batch.cu_seqlens[len(slots.offsets) :].tolist()) <= {slots.total}
        assert slots.longest <= batch.max_seqlen <= 512
        assert batch.num_supervised == least.num_supervised
        real, theirs = ~batch.padding_mask, ~least.padding_mask
        for name in ("input_ids", "labels", "position_ids", "seq_idx"):
            assert torch.equal(getattr(batch, name)[real], getattr(least, name)[theirs])


def test_an_epoch_has_few_shapes_in_buckets_and_many_without():
    items = [{"id": str(n), "text": "a" * (1 + 7 * n % 61)} for n in range(150)]
    rule, measure = align("bf16"), Measure(frames=None)

    def epoch(**options):
        collator = Collator(measure=measure, rule=rule, budget=256, **options)
        sampler = PackingSampler(items, measure=measure, rule=rule, budget=256, lookahead=8)
        return [PackedDataset(collator)[pack] for pack in sampler]

    few, many = epoch(buckets=True), epoch()
    assert [batch.ids for batch in few] == [batch.ids for batch in many]
    assert len({shape(batch) for batch in many}) > 10
    assert len({shape(batch) for batch in few}) <= 4
    assert {batch.tokens % 32 for batch in few} == {0}


@pytest.mark.parametrize(
    ("options", "layout", "got"),
    [
        ({}, "thd", "budget=None, layout 'thd', static=False"),
        ({"budget": 64}, "bshd", "budget=64, layout 'bshd', static=False"),
        ({"budget": 64, "max_sequences": 4, "static": True}, "thd", "budget=64, layout 'thd', static=True"),
    ],
)
def test_buckets_of_nothing_are_refused(bare, five_lines, options, layout, got):
    with pytest.raises(ConfigError) as caught:
        bare(align("block", layout=layout), buckets=True, **options)
    five_lines(
        caught.value,
        what="packs cannot be rounded up to buckets",
        got=got,
        expected="a budget, layout 'thd', and static=False",
        because="buckets are eighths of a budget in slots of their own sizes, and static packs have one size already",
        fix="give the budget that the sampler packs to, or leave out buckets",
    )
