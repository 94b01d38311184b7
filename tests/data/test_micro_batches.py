"""Micro-batches of one step: one shape, the least legal one; nothing lost, and the last step complete."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from packfp8.data import Collator, MicroBatches, PackingSampler, check_loader
from packfp8.errors import BudgetError, ConfigError, ExampleError
from packfp8.lengths import Measure
from packfp8.rule import Topology, align


def texts(docs, groups):
    """Examples of so many tokens, in groups, each with a name of its own."""
    items = iter(docs(*(" ".join(["7"] * n) for group in groups for n in group)))
    return [[next(items) for _ in group] for group in groups]


GROUPS = st.lists(st.lists(st.integers(1, 60), max_size=4), min_size=1, max_size=5)


@settings(max_examples=40)
@given(GROUPS, st.sampled_from([1, 2]), st.sampled_from([None, 512]), st.booleans())
def test_micro_batches_have_the_one_total_of_the_largest(bare, docs, groups, cp, budget, buckets):
    for rank in range(cp):
        rule = align("block", Topology(cp=cp, cp_rank=rank))
        collator = bare(rule, budget=budget, buckets=buckets and budget is not None)
        items = texts(docs, groups)
        batches = collator.micro_batches(items, step=3)
        alone = [collator.collate(group) for group in items]
        total = max(batch.slots.total for batch in alone)
        assert {(batch.slots.total, *batch.input_ids.shape) for batch in batches} == {(total, total // cp)}
        assert total % rule.total == 0
        assert [batch.ids for batch in batches] == [batch.ids for batch in alone]
        assert [batch.num_supervised for batch in batches] == [batch.num_supervised for batch in alone]
        for batch, one in zip(batches, alone, strict=True):
            rule.check(total, slots=batch.slots.sizes.tolist())
            assert torch.equal(batch.input_ids[~batch.padding_mask], one.input_ids[~one.padding_mask])
            assert batch.step == 3


@settings(max_examples=40)
@given(GROUPS, st.sampled_from([1, 2]))
def test_padded_micro_batches_have_the_most_rows_and_the_longest(bare, docs, groups, cp):
    for rank in range(cp):
        rule = align("block", Topology(cp=cp, cp_rank=rank), layout="bshd")
        batches = bare(rule).micro_batches(texts(docs, groups))
        rows, longest = max(1, *map(len, groups)), max(1, *(max(group, default=1) for group in groups))
        step = rule.row(rows)
        assert {batch.input_ids.shape for batch in batches} == {(rows, -(-longest // step) * step // cp)}
        for batch, group in zip(batches, groups, strict=True):
            rule.check(batch.slots.total, slots=batch.slots.sizes.tolist(), batch=rows)
            assert batch.slots.lengths.tolist() == [*group, *[0] * (rows - len(group))]


@pytest.mark.parametrize("budget", [512, 511])
def test_padded_micro_batches_that_have_no_common_shape_within_the_budget_are_refused(bare, docs, five_lines, budget):
    """Sixteen rows of 1, and one of 20: each is within the budget; together they are 16 rows of 32."""
    collator = bare(align("block", layout="bshd"), budget=budget)
    items = texts(docs, [[1] * 16, [20]])
    if budget == 512:
        assert [batch.input_ids.shape for batch in collator.micro_batches(items)] == [(16, 20)] * 2
        return
    with pytest.raises(BudgetError) as caught:
        bare(align("block", layout="bshd"), budget=319).micro_batches(items)
    five_lines(
        caught.value,
        what="micro-batches with the row of example '16' have no common shape within the budget",
        got="16 rows of 20, 320 tokens; its row has 20",
        expected="at most 319 tokens",
        because="pipeline stages exchange one [B, S]",
        fix="pack with layout='thd'",
    )


def test_static_micro_batches_are_constant_as_ever(bare, docs):
    collator = bare(align("block"), budget=64, static=True, max_sequences=4)
    batches = collator.micro_batches(texts(docs, [[3], [60], []]))
    assert [(b.tokens, len(b.cu_seqlens), b.max_seqlen) for b in batches] == [(64, 6, 64)] * 3


def test_what_is_set_aside_decides_nothing(bare, docs):
    collator = bare(align("block"), budget=32, over_budget="set_aside")
    batches = collator.micro_batches(texts(docs, [[3], [40]]))
    assert [batch.tokens for batch in batches] == [16, 16]
    assert [len(batch.set_aside) for batch in batches] == [0, 1]


def test_a_step_of_no_micro_batch_is_refused(bare, five_lines):
    with pytest.raises(ExampleError) as caught:
        bare(align("block")).micro_batches([])
    five_lines(
        caught.value,
        what="the step has no micro-batch",
        got="no groups of examples",
        expected="at least one group, which may be empty",
        because="a rank that skips a step hangs the others",
        fix="give as many groups as the pipeline has micro-batches",
    )


# ---- with a sampler


ITEMS = [{"id": str(n), "text": "a" * (1 + 7 * n % 61)} for n in range(60)]
MEASURE = Measure(frames=None)


def parts(rank=0):
    """The sampler of one of two ranks, and its collator."""
    rule = align("block", Topology(dp=2, dp_rank=rank))
    sampler = PackingSampler(ITEMS, measure=MEASURE, rule=rule, budget=160, lookahead=8)
    return sampler, Collator(measure=MEASURE, rule=rule, budget=160)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_of_steps_is_the_samplers_in_groups_and_its_end_is_completed(workers):
    seen, lengths = [], []
    for rank in (0, 1):
        sampler, collator = parts(rank)
        packs = [tuple(item["id"] for item in pack) for pack in sampler]
        sampler, collator = parts(rank)
        dataset = MicroBatches(collator, count=5)
        loader = DataLoader(dataset, sampler=BatchSampler(sampler, 5, drop_last=False), batch_size=None, num_workers=workers)
        check_loader(loader)
        steps = list(loader)
        assert {len(step) for step in steps} == {5}
        assert all(len({batch.tokens for batch in step}) == 1 for step in steps)
        batches = [batch for step in steps for batch in step]
        assert [batch.ids for batch in batches][: len(packs)] == packs
        assert [batch.step for batch in batches][: len(packs)] == list(range(len(packs)))
        rest = batches[len(packs) :]
        assert 0 < len(rest) < 4  # filler after several packs
        assert {(batch.ids, batch.num_supervised, batch.step) for batch in rest} == {((), 0, len(packs) - 1)}
        seen += [name for batch in batches for name in batch.ids]
        lengths.append(len(steps))
    assert sorted(seen) == sorted(str(n) for n in range(60))
    assert lengths[0] == lengths[1]


def test_the_state_after_a_step_is_that_of_its_last_micro_batch():
    sampler, collator = parts()
    loader = DataLoader(MicroBatches(collator, count=2), sampler=BatchSampler(sampler, 2, drop_last=False), batch_size=None)
    steps, states = [], []
    for step in loader:
        steps.append([batch.ids for batch in step])
        states.append(sampler.state_dict(step=step[-1].step))
    again, collator = parts()
    again.load_state_dict(states[1])
    loader = DataLoader(MicroBatches(collator, count=2), sampler=BatchSampler(again, 2, drop_last=False), batch_size=None)
    assert [[batch.ids for batch in step] for step in loader] == steps[2:]


def test_steps_that_a_framework_would_deal_out_again_are_refused():
    """Where it keeps the dataset and puts a sampler of its own in the place of ours."""
    _, collator = parts()
    other = DistributedSampler(range(4), num_replicas=2, rank=0)
    with pytest.raises(ConfigError, match="dealt out a second time"):
        check_loader(DataLoader(MicroBatches(collator, count=2), sampler=other, batch_size=None))


def test_it_is_picklable():
    _, collator = parts()
    assert pickle.loads(pickle.dumps(MicroBatches(collator, count=3))).count == 3


@pytest.mark.parametrize("count", [0, -1, 2.0, True, None])
def test_a_count_that_is_none_is_refused(five_lines, count):
    with pytest.raises(ConfigError) as caught:
        MicroBatches(parts()[1], count=count)
    five_lines(
        caught.value,
        what="the number of micro-batches cannot be",
        got=repr(count),
        expected="a whole number of at least 1",
        because="a pipeline's schedule is made for a fixed number",
        fix="give the count that the schedule has",
    )


@pytest.mark.parametrize(("packs", "got"), [(4, "4 packs"), (0, "0 packs"), (None, "SampledPack")])
def test_something_else_than_the_packs_of_a_step_is_refused(five_lines, packs, got):
    sampler, collator = parts()
    given_packs = list(sampler)
    with pytest.raises(ConfigError) as caught:
        MicroBatches(collator, count=3)[given_packs[0] if packs is None else given_packs[:packs]]
    five_lines(
        caught.value,
        what="a step is given something else than its packs",
        got=got,
        expected="a list of 1 to 3 packs",
        because="one shape together",
        fix="BatchSampler(sampler, 3, drop_last=False)",
    )


def test_packs_of_another_measure_are_refused(rule_of, collator_of):
    packs = list(parts()[0])[:2]
    with pytest.raises(ConfigError, match="another rule or measure"):
        MicroBatches(collator_of(rule_of()), count=2)[packs]
