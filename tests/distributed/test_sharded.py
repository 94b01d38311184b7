"""Sharded sources: a rank packs what is its own, nothing is lost, and every rank has the same number of steps."""

import json

import numpy as np
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from packfp8.data import Collator, PackedDataset
from packfp8.data.lockstep import in_lockstep
from packfp8.data.peers import check_start
from packfp8.data.progress import Progress
from packfp8.data.sharded import ShardedPackingSampler
from packfp8.errors import BudgetError, ConfigError, StateError
from packfp8.lengths import AudioFrames, Histogram, Measure
from packfp8.packing import imbalance
from packfp8.rule import Topology, align

MEASURE = Measure(frames=None)
LETTERS = np.random.default_rng(0).lognormal(3.0, 0.7, 400).clip(1, 200).astype(int).tolist()
TEXTS = [{"id": f"t{n}", "text": "a" * letters} for n, letters in enumerate(LETTERS)]


def sampler_of(shard=TEXTS, *, dp=1, rank=0, layout="thd", cp=1, recipe="block", **options):
    rule = align(recipe, Topology(dp=dp, dp_rank=rank, cp=cp), layout=layout)
    return ShardedPackingSampler(shard, measure=MEASURE, rule=rule, **{"budget": 256, **options})


def names(packs):
    return [[item["id"] for item in pack] for pack in packs]


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("max_sequences", [None, 3])
def test_every_epoch_has_each_example_once_in_packs_within_the_budget(layout, cp, max_sequences):
    sampler = sampler_of(layout=layout, cp=cp, max_sequences=max_sequences)
    collator = Collator(measure=MEASURE, rule=sampler.terms.rule, budget=256, max_sequences=max_sequences)
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        packs = list(sampler)
        batches = [PackedDataset(collator)[pack] for pack in packs]  # which refuses what is over the budget
        assert len(packs) == len(sampler) == sampler.packs
        assert [batch.step for batch in batches] == list(range(len(packs)))
        assert sorted(name for batch in batches for name in batch.ids) == sorted(text["id"] for text in TEXTS)
        epochs.append(names(packs))
    assert epochs[0] != epochs[1] != epochs[2]
    assert {frozenset(pack) for pack in epochs[0]} != {frozenset(pack) for pack in epochs[1]}  # and other companions
    sampler.set_epoch(0)
    assert names(sampler) == epochs[0]


SPOKEN = [  # clips of 1 to 30 frames, some examples without
    {
        "id": f"s{n}",
        "text": "a" * (1 + n * 7 % 20),
        "audio": np.zeros(800 * (1 + n * 11 % 30), np.float32),
        "sample_rate": 16_000,
    }
    if n % 5
    else {"id": f"s{n}", "text": "a" * (20 + n % 7)}
    for n in range(300)
]


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_with_a_frame_budget_every_epoch_is_within_both_and_has_as_many_packs(layout):
    rule, measure = align("block", Topology(), layout=layout), Measure(frames=AudioFrames.linear(800))
    bounds = {"measure": measure, "rule": rule, "budget": 256, "frame_budget": 70}
    sampler = ShardedPackingSampler(SPOKEN, **bounds)
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for pack in sampler.planned():
            held = [sampler._items[index][2] for index in pack]
            assert sum(frames + 1 for one in held for frames in one.encoder_frames) <= 70
            lengths = [one.tokens for one in held]
            assert (len(lengths) * max(lengths) if layout == "bshd" else sum(lengths)) <= 256
        epochs.append(names(sampler))
        assert len(epochs[-1]) == sampler.packs
        assert sorted(name for pack in epochs[-1] for name in pack) == sorted(one["id"] for one in SPOKEN)
    assert epochs[0] != epochs[1] != epochs[2]
    free = ShardedPackingSampler(SPOKEN, **bounds | {"frame_budget": None})
    assert free.packs < sampler.packs  # it does bind


def test_examples_that_change_places_have_as_many_frames():
    measure = Measure(frames=AudioFrames.linear(800))
    sampler = ShardedPackingSampler(SPOKEN, measure=measure, rule=align("block", Topology()), budget=256, frame_budget=70)
    sizes = []
    for epoch in range(2):
        packs = sampler._plan.members(0, epoch)
        sizes.append([[(sampler._items[n][2].tokens, sampler._items[n][2].encoder_frames) for n in pack] for pack in packs])
    assert sizes[0] == sizes[1]
    assert sampler._plan.members(0, 0) != sampler._plan.members(0, 1)


def test_an_example_with_more_audio_than_a_pack_may_hold_is_refused_or_set_aside(lines_of):
    measure = Measure(frames=AudioFrames.linear(800))
    bounds = {"measure": measure, "rule": align("block", Topology()), "budget": 256, "frame_budget": 30}
    with pytest.raises(BudgetError) as refusal:
        ShardedPackingSampler(SPOKEN, **bounds)
    lines = lines_of(str(refusal.value))
    assert lines["what"].endswith("has more audio than a pack may hold")
    assert lines["got"] == "31 encoder frames"
    assert lines["expected"] == "at most 30 encoder frames"
    assert "never cut" in lines["because"]
    assert "raise frame_budget" in lines["fix"]
    sampler = ShardedPackingSampler(SPOKEN, **bounds, over_budget="set_aside")
    longest = [one["id"] for one in SPOKEN if len(one.get("audio", ())) == 30 * 800]
    assert [one.id for one in sampler.set_aside] == longest != []


def test_the_number_of_packs_follows_from_the_histogram_alone():
    order = np.random.default_rng(1).permutation(len(TEXTS)).tolist()
    assert sampler_of([TEXTS[n] for n in order]).packs == sampler_of().packs
    tokens = sampler_of().histogram.lengths @ sampler_of().histogram.counts
    assert sampler_of().packs <= 1.02 * tokens / 256 + 1


def test_ranks_of_unequal_shards_have_equal_steps_and_lose_nothing(on_ranks):
    bounds = [0, 90, 240, 400]

    def job(rank):
        shard = TEXTS[bounds[rank] : bounds[rank + 1]]
        sampler = sampler_of(shard, dp=3, rank=rank, group=dist.group.WORLD)
        collator = Collator(measure=MEASURE, rule=sampler.terms.rule, budget=256)
        check_start(sampler, collator, steps=0)
        progress, seen = Progress(sampler), []
        loader = DataLoader(PackedDataset(collator), sampler=sampler, batch_size=None, num_workers=1 - rank % 2)
        for batch in in_lockstep(loader):
            progress.trained(batch)
            seen.append(batch.ids)
        return seen, sampler.packs, sampler.steps, sampler.histogram, progress.state_dict()

    told, _ = on_ranks(job, world=3)
    columns = [seen for seen, *_ in told]
    assert {len(column) for column in columns} == {max(packs for _, packs, *_ in told)} == {steps for _, _, steps, *_ in told}
    assert sorted(name for column in columns for ids in column for name in ids) == sorted(text["id"] for text in TEXTS)
    assert [sum(not ids for ids in column) for column in columns] == [steps - packs for _, packs, steps, *_ in told]
    whole = Histogram.of([MEASURE.measure(example).tokens for example in examples()])
    assert all(histogram == whole for *_, histogram, _ in told)
    assert len({json.dumps(state) for *_, state in told}) == 1


def examples():
    from packfp8.data import as_examples

    return as_examples(TEXTS)


def test_ranks_give_packs_of_like_cost_in_each_step():
    """The same rank by cost on every rank: far nearer to each other than packs in order of arrival."""
    letters = np.random.default_rng(0).lognormal(3.0, 0.7, 6000).clip(1, 200).astype(int).tolist()
    texts = [{"id": f"t{n}", "text": "a" * count} for n, count in enumerate(letters)]
    samplers = [sampler_of(texts[rank::4], dp=4, rank=rank, steps=400) for rank in range(4)]
    costs = [[cost(sampler, pack) for pack in sampler.planned()] for sampler in samplers]
    by_step = np.array([row for row in zip(*costs, strict=True) if all(row)])
    shuffled = np.stack([np.random.default_rng(n).permutation(column) for n, column in enumerate(by_step.T)]).T
    assert imbalance(by_step) < 0.2 * imbalance(shuffled)


def cost(sampler, pack):
    return sampler.terms.cost_of([sampler._items[index][2] for index in pack]) if pack else 0.0


def test_a_state_goes_on_after_its_step_on_every_rank():
    for rank in range(2):
        sampler = sampler_of(TEXTS[rank::2], dp=2, rank=rank, steps=60)
        sampler.set_epoch(2)
        whole = names(sampler)
        state = json.loads(json.dumps(sampler.state_dict(step=6)))
        resumed = sampler_of(TEXTS[rank::2], dp=2, rank=rank, steps=60)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert names(resumed) == whole[7:]
        resumed.set_epoch(3)
        assert len(list(resumed)) == 60
        resumed.load_state_dict(sampler.state_dict(step=59))
        assert names(resumed) == []


CHANGES = {
    "steps": {"steps": 61},
    "shards": {"shard": TEXTS[1::2]},
    "terms": {"seed": 1},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_of_other_terms_or_shards_is_refused(lines_of, name):
    settings = {"shard": TEXTS[::2], "dp": 2, "steps": 60}
    state = sampler_of(**settings).state_dict(step=3)
    with pytest.raises(StateError) as refusal:
        sampler_of(**{**settings, **CHANGES[name]}).load_state_dict(state)
    lines = lines_of(str(refusal.value))
    assert lines["what"] == f"the state was saved under another {name}"
    assert lines["got"].startswith(f"{name} ")
    assert lines["expected"].startswith(f"{name} ")
    assert "other examples" in lines["because"]
    assert "shards and number of ranks" in lines["fix"]


@pytest.mark.parametrize("step", [-2, 60])
def test_a_step_that_the_epoch_does_not_have_is_refused(lines_of, step):
    with pytest.raises(StateError) as refusal:
        sampler_of(TEXTS[::2], dp=2, steps=60).state_dict(step=step)
    lines = lines_of(str(refusal.value))
    assert lines["got"] == f"step {step}"
    assert lines["expected"] == "-1 to 59"
    assert "on every rank" in lines["because"]
    assert "batch.step" in lines["fix"]


def test_faults_are_raised_or_set_aside_by_policy():
    bad = [*TEXTS[:20], {"id": "long", "text": "a" * 400}, {"id": "empty", "text": ""}]
    with pytest.raises(BudgetError, match="long"):
        sampler_of(bad, on_fault="set_aside")
    sampler = sampler_of(bad, on_fault="set_aside", over_budget="set_aside")
    assert [one.id for one in sampler.set_aside] == ["long", "empty"]
    assert sorted(name for pack in names(sampler) for name in pack) == sorted(text["id"] for text in TEXTS[:20])


def test_an_empty_shard_takes_part_in_every_step(on_ranks):
    def job(rank):
        sampler = sampler_of(TEXTS[:40] if rank else [], dp=2, rank=rank, group=dist.group.WORLD)
        return [len(pack) for pack in sampler]

    (none, all_of_them), _ = on_ranks(job)
    assert none == [0] * len(all_of_them)
    assert sum(all_of_them) == 40


def test_what_cannot_be_sharded_is_refused(lines_of):
    with pytest.raises(ConfigError) as lazy:
        sampler_of(iter(TEXTS))
    lines = lines_of(str(lazy.value))
    assert lines["what"] == "the shard is not in memory"
    assert "list_iterator" in lines["got"]
    assert "eager" in lines["expected"]
    assert "planned from the lengths" in lines["because"]
    assert "PackingSampler" in lines["fix"]
    with pytest.raises(ConfigError) as alone:
        sampler_of(dp=2)
    lines = lines_of(str(alone.value))
    assert lines["what"].startswith("the group that agrees")
    assert lines["got"] == "1 ranks"
    assert lines["expected"].startswith("2 ranks")
    assert "cut short" in lines["because"]
    assert "get_group" in lines["fix"]
    with pytest.raises(ConfigError) as few:
        sampler_of(dp=2, steps=sampler_of().packs - 1)
    lines = lines_of(str(few.value))
    assert lines["got"] == f"{sampler_of().packs - 1} steps"
    assert lines["expected"] == f"at least {sampler_of().packs}"
    assert "once in an epoch" in lines["because"]
    assert "agree" in lines["fix"]
    assert len(sampler_of(dp=2, steps=sampler_of().packs)) == sampler_of().packs
