"""E. Sampling, packing and distribution: who gets which examples, how many steps there are, and what the budget means."""

from collections import Counter
from itertools import count, islice

import numpy as np
import pytest
from torch.utils.data import DataLoader

from packfp8 import BudgetError, ConfigError, StreamPacker, Topology, align, pack
from packfp8.data import Collator, PackedDataset, PackingSampler
from packfp8.data.reshard import check_loader

WORLDS = (2, 3, 4)


@pytest.fixture
def sampler_of(measure):
    """sampler_of(items, budget, dp=1, rank=0, recipe, layout, **options) -> a sampler of one rank."""

    def sampler_of(items, budget, *, dp=1, rank=0, recipe="bf16", layout="thd", cp=1, tp=1, **options):
        rule = align(recipe, Topology(dp=dp, dp_rank=rank, cp=cp, tp=tp), layout=layout)
        return PackingSampler(items, measure=measure, rule=rule, budget=budget, **options)

    return sampler_of


@pytest.fixture
def loader_of(measure, sampler_of):
    """loader_of(items, budget, wrap, **options) -> a loader of packs, its sampler wrapped."""

    def loader_of(items, budget, wrap=lambda sampler: sampler, **options):
        sampler = sampler_of(items, budget, **options)
        dataset = PackedDataset(Collator(measure=measure, rule=sampler.terms.rule, budget=budget))
        return DataLoader(dataset, sampler=wrap(sampler), batch_size=None)

    return loader_of


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_without_audio_runs_its_encoder_and_nobody_waits(world, ranks):
    """The all-gather of an encoder waits for the rank that skips it. Audio on rank 0, text on rank 1, nothing on rank 2.

    pytorch/torchtitan#4777; huggingface/transformers#37186; modelscope/ms-swift#9639.
    """
    found = ranks[world]["audio on one rank"]
    assert {one["clips"] for one in found} == {0, 1}
    assert all(one["difference"] < 1e-12 for one in found)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("scenario", "examples"), [("five packs", 5), ("one example", 1)])
def test_every_rank_takes_as_many_steps_and_each_example_counts_once(scenario, examples, world, ranks):
    """One rank ended early and the others hung, or a remainder was repeated. 5 packs, and 1 example.

    lhotse-speech/lhotse#695, #1277; pytorch/pytorch#141069.
    """
    found, dp = ranks[world][scenario], 2 if world == 4 else world
    assert {one["steps"] for one in found} == {-(-examples // dp)}
    seen = Counter(name for one in found[:: world // dp] for name in one["names"])
    assert len(seen) == examples
    assert set(seen.values()) == {1}


@pytest.mark.parametrize("dp", [2, 3, 5])
def test_ranks_of_a_step_draw_alike_lengths(dp, docs, sampler_of):
    """Ranks drew from buckets of their own, and one step had very different lengths. Two kinds: 2 to 9 and 200 to 250 tokens.

    lhotse-speech/lhotse#1341, #863.
    """
    random = np.random.default_rng(dp)
    lengths = np.where(random.random(600) < 0.7, random.integers(2, 10, 600), random.integers(200, 251, 600)).tolist()
    forecasts = [list(sampler_of(docs(*lengths), 512, dp=dp, rank=rank, seed=3).forecast()) for rank in range(dp)]
    assert all(forecast == forecasts[0] for forecast in forecasts)
    spread = [max(step) / max(1, min(step)) for step in ([sum(one.tokens for one in part) for part in s] for s in forecasts[0])]
    assert max(spread[:-1]) < 1.25  # a pack of one kind beside a pack of the other may be of any ratio


def test_the_budget_is_a_bound_for_each_pack_and_counts_real_lengths(docs, sampler_of, loader_of):
    """ceil(total / budget) bins cannot hold eight documents of 7 under a budget of 8; 10 real tokens fit 1,024 at any width.

    verl-project/verl#7553, #3088.
    """
    totals = [batch.slots.total for batch in loader_of(docs(*[7] * 8), 8)]
    assert totals == [7] * 8
    assert len(pack([7] * 8, 8)) == 8
    (batch,) = loader_of(docs(10), 1024)
    assert batch.slots.total == 10


@pytest.mark.parametrize(("length", "capacity"), [(21, 20), (121, 60), (20, 20)])
def test_an_example_over_the_budget_is_refused_or_listed_and_never_cut(length, capacity, docs, sampler_of, collate, lines_of):
    """It ran out of memory later, was cut silently, came back in pieces, or crashed beyond twice the capacity.

    OpenRLHF/OpenRLHF#1280; huggingface/trl#5075, #5076, #4554; meta-pytorch/torchtune#1689; axolotl-ai-cloud/axolotl#2211.
    """
    items, fits = docs(length, 3), length <= capacity
    ways = [
        lambda policy: [[item.id for item in part] for part in sampler_of(items, capacity, over_budget=policy)],
        lambda policy: [collate(items[:1], "bf16", budget=capacity, over_budget=policy)[0].ids],
    ]
    for way in ways:
        if fits:
            assert "0" in [name for part in way("error") for name in part]
            continue
        with pytest.raises(BudgetError) as refusal:
            way("error")
        assert "'0'" in lines_of(refusal.value)["what"]
        assert "0" not in [name for part in way("set_aside") for name in part]
    sampler = sampler_of(items, capacity, over_budget="set_aside")
    list(sampler)
    assert [one.id for one in sampler.set_aside] == ([] if fits else ["0"])
    assert fits or f"{length} tokens" in sampler.set_aside[0].reason


@pytest.mark.timeout(30)
def test_an_endless_stream_that_never_fits_exactly_is_packed_on_and_on(docs, sampler_of):
    """A bin was emitted on an exact fit only, and the buffer grew for ever. Lengths of 250 to 450, a budget of 4,096.

    pytorch/torchtitan#4606; NVIDIA/Megatron-Energon#65.
    """

    class Endless:
        def __iter__(self):
            return (docs(250 + 2 * (n * 37 % 100))[0] for n in count())

    packs = list(islice(sampler_of(Endless(), 4096, shuffle=False), 12))
    assert len(packs) == 12
    packer = StreamPacker(4097, lookahead=64)  # odd: even lengths never fill it
    emitted = 0
    for n in range(2000):
        packer.push(n, 250 + 2 * (n * 37 % 100))
        while packer.pop():
            emitted += 1
        assert len(packer) <= 64 + 17
    assert emitted > 100


def test_a_new_longest_example_opens_another_padded_batch(docs, sampler_of):
    """Five of 1 and then one of 20 made 120 under a limit of 50. lhotse-speech/lhotse#1590, #640, #1145."""
    sampler = sampler_of(docs(1, 1, 1, 1, 1, 20), 50, layout="bshd", shuffle=False)
    padded = [len(part) * max(one.tokens for one in part) for (part,) in sampler.forecast()]
    assert sum(len(part) for (part,) in sampler.forecast()) == 6
    assert max(padded) <= 50


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("end", ["fill", "drop"])
def test_every_id_comes_out_once_or_is_listed(layout, end, docs, sampler_of):
    """An arbitrary number of cuts vanished in buckets, without a word. 1,000 examples, a lookahead of 500, 7 ranks.

    lhotse-speech/lhotse#610.
    """
    items = docs(*(1 + n * 61 % 90 for n in range(1000)))
    samplers = [
        sampler_of(items, 80, dp=7, rank=rank, layout=layout, lookahead=500, end=end, over_budget="set_aside")
        for rank in range(7)
    ]
    columns = [[item.id for part in sampler for item in part] for sampler in samplers]
    aside = [one.id for one in samplers[0].set_aside]
    assert sorted([name for column in columns for name in column] + aside, key=int) == [str(n) for n in range(1000)]
    assert all([one.id for one in sampler.set_aside] == aside for sampler in samplers)
    assert all(one.reason for one in samplers[0].set_aside)


class EveryNth:
    """What launchers put around a sampler that they find: each process gets every n-th of what it yields."""

    def __init__(self, sampler, num_processes, process_index):
        self.sampler, self.num_processes, self.process_index = sampler, num_processes, process_index

    def __iter__(self):
        return islice(iter(self.sampler), self.process_index, None, self.num_processes)


@pytest.mark.parametrize("processes", [2, 3])
def test_packs_that_a_launcher_would_deal_out_again_are_refused(processes, docs, loader_of, lines_of):
    """Batches of variable size were dropped, repeated or joined by Accelerate. Packs of 3, 1 and 2 examples, and more.

    huggingface/accelerate#207, #961, #2325. The settings that leave packs alone are in the error and in `packfp8.data.reshard`.
    """
    items = docs(2, 2, 2, 6, 3, 3, 4, 2, 6, 1, 1, 4)
    loaders = [
        loader_of(items, 6, dp=processes, rank=n, wrap=lambda s, n=n: EveryNth(s, processes, n)) for n in range(processes)
    ]
    seen = [name for loader in loaders for batch in loader for name in batch.ids]
    assert len(seen) < 12  # the fault: examples that nobody gets
    for loader in loaders:
        with pytest.raises(ConfigError) as refusal:
            check_loader(loader)
        lines = lines_of(refusal.value)
        assert lines["got"] == f"EveryNth among {processes} processes"
        assert "Accelerate: prepare the model without the loader" in lines["fix"]
    straight = [loader_of(items, 6, dp=processes, rank=n) for n in range(processes)]
    for loader in straight:
        check_loader(loader)
    assert sorted(name for loader in straight for batch in loader for name in batch.ids) == sorted(item.id for item in items)


@pytest.mark.parametrize("world", [3, 4])
def test_tp_peers_get_one_pack_and_a_check_names_those_that_do_not(world, ranks):
    """Data was shared out by global rank. World 4 with tp 2: ranks 0 and 1 must match; and world 3 with tp 3.

    hiyouga/LlamaFactory#10559; bghira/SimpleTuner#2143.
    """
    found, tp = ranks[world]["peers"], 3 if world == 3 else 2
    for first in range(0, world, tp):
        group = found[first : first + tp]
        assert len({one["by data-parallel rank"][0] for one in group}) == 1
        assert {one["by data-parallel rank"][1] for one in group} == {""}
        assert len({one["by global rank"][0] for one in group}) == tp
        for one in group:
            assert f"rank {first + 1}" in one["by global rank"][1]
            assert "not its global rank" in one["by global rank"][1]
    if world == 4:
        assert found[0]["by data-parallel rank"][0] != found[2]["by data-parallel rank"][0]


def test_a_pack_has_tokens_even_where_every_example_is_rejected(collate, sampler_of, docs):
    """A filter left a rank without tokens: kernels refuse, or backward collectives are skipped.

    verl-project/verl#1270; NVIDIA/Megatron-LM#3626.
    """
    broken = [{"id": "a", "text": ""}, {"id": "b", "audio": "/nowhere/b.wav", "duration": -1.0, "text": "1"}]
    for layout in ("thd", "bshd"):
        (batch,) = collate(broken, layout=layout, on_fault="set_aside")
        assert batch.tokens == 16
        assert (batch.num_supervised, batch.ids) == (0, ())
        assert [one.id for one in batch.set_aside] == ["a", "b"]
    samplers = [sampler_of(docs(3, 4), 16, dp=3, rank=rank).filter(lambda item: False) for rank in range(3)]
    assert [list(sampler) for sampler in samplers] == [[], [], []]


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_whose_every_example_is_rejected_goes_through_the_step(world, ranks):
    """The same reports, under FSDP: its pack is the least legal one, of zero weight, and the gradient that of the others."""
    found = ranks[world]["every example of one rank rejected"]
    assert found[-1]["set aside"]
    assert found[-1]["tokens"] == 16
    assert all(one["difference"] < 1e-12 for one in found)


# More of the same kind: prime worlds and prime counts, one sequence to a pack, a budget of one slot.


@pytest.mark.parametrize(("dp", "examples"), [(3, 7), (5, 11), (7, 1), (7, 6), (7, 8), (6, 6), (3, 0)])
def test_prime_worlds_share_prime_counts_without_repeating_any(dp, examples, docs, sampler_of):
    """One sequence to a pack, so that packs are as many as examples; their number and one beside a multiple of the world."""
    samplers = [sampler_of(docs(*[5] * examples), 8, dp=dp, rank=rank, max_sequences=1) for rank in range(dp)]
    columns = [[tuple(item.id for item in part) for part in sampler] for sampler in samplers]
    assert {len(column) for column in columns} == {-(-examples // dp)}
    seen = [name for column in columns for part in column for name in part]
    assert sorted(seen) == sorted(str(n) for n in range(examples))


@pytest.mark.parametrize("length", [5, 6, 7])
@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_a_budget_of_one_slot_takes_one_sequence_to_a_pack(layout, length, docs, sampler_of):
    """cp 3 and a budget of one slot of 6: lengths of 5 and 6 fit one to a pack, 7 is refused."""
    sampler = sampler_of(docs(length, 1, length), 6, cp=3, layout=layout, over_budget="set_aside")
    packs = [[item.id for item in part] for part in sampler]
    assert sorted(packs) == ([["0"], ["1"], ["2"]] if length <= 6 else [["1"]])
    assert len(sampler.set_aside) == (2 if length > 6 else 0)
