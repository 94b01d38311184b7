"""The sampler's bound on the longest slot: what is longer is refused or named, and the collator's is the same."""

import pytest

from packfp8.data import Collator, Example, PackedDataset, ShardedPackingSampler, Turn
from packfp8.errors import BudgetError, ConfigError
from packfp8.lengths import Measure, Template
from packfp8.rule import Topology, align

TEXT = Measure(frames=None, template=Template(roles={"assistant": ("", "")}, prompt="", eos=False))
WRITTEN = [Example(id=f"e{n}", turns=(Turn("assistant", ("x" * (1 + 7 * n % 90),)),)) for n in range(200)]
BOUNDS = {"measure": TEXT, "budget": 256, "max_sequences": 9, "max_seqlen": 65}
CP2 = {**BOUNDS, "rule": align("block", Topology(cp=2))}


def of_tokens(name, tokens):
    return Example(id=name, turns=(Turn("assistant", ("x" * tokens,)),))


@pytest.mark.parametrize("kind", ["every rank plans all", "each its shard"])
def test_the_longest_slot_fits_and_one_token_more_is_refused_with_the_bound(sampler_of, lines_of, kind):
    """Slots of cp 2 are multiples of 4: 65 leaves room for 64."""

    def packs(*examples, **options):
        if kind == "each its shard":
            return list(ShardedPackingSampler(list(examples), **CP2, **options))
        return list(sampler_of(examples, **BOUNDS, cp=2, **options))

    assert len(packs(of_tokens("a", 64))) == 1
    with pytest.raises(BudgetError) as refusal:
        packs(of_tokens("b", 65))
    assert lines_of(refusal.value) == {
        "what": "example 'b' is longer than a slot may be",
        "got": "65 tokens",
        "expected": "at most 64, the max_seqlen that kernels are told",
        "because": "kernels and tables of positions reach no further than max_seqlen, and a sequence is never cut",
        "fix": "raise max_seqlen, or choose over_budget='set_aside' to leave such examples out and have them named",
    }
    assert len(packs(of_tokens("a", 64), of_tokens("b", 65), over_budget="set_aside")) == 1


def test_a_bound_over_the_budget_bounds_nothing(sampler_of):
    assert sampler_of([], max_seqlen=1000).terms.longest_tokens == 256
    with pytest.raises(BudgetError, match="is longer than a pack\n"):
        list(sampler_of([of_tokens("a", 257)], measure=TEXT, max_seqlen=1000))


def test_a_static_collator_of_the_same_bounds_takes_every_pack_in_one_shape(sampler_of):
    sampler = sampler_of(WRITTEN, **BOUNDS, cp=2, over_budget="set_aside", lookahead=4)
    dataset = PackedDataset(Collator(static=True, **CP2))
    batches = [dataset[pack] for pack in sampler]
    assert {(len(batch.cu_seqlens), batch.max_seqlen, batch.slots.total) for batch in batches} == {(14, 64, 256)}
    assert max(batch.slots.longest for batch in batches) == 64
    assert len({len(batch.slots.sizes) - batch.slots.sequences for batch in batches}) > 1  # 0, 1 and more slots of filler
    aside = {one.id for one in sampler.set_aside}
    assert aside == {example.id for example in WRITTEN if len(example.turns[0].parts[0]) > 64} != set()
    assert sorted(name for batch in batches for name in batch.ids) == sorted({e.id for e in WRITTEN} - aside)


@pytest.mark.parametrize("bad", [0, 3, -1, 8.0, True])
def test_a_bound_without_room_for_a_slot_is_refused_before_the_first_pack(sampler_of, bad):
    with pytest.raises(ConfigError, match="packs have no room for a slot"):
        sampler_of([], cp=2, max_seqlen=bad)


def test_a_bound_of_padded_rows_is_refused(sampler_of):
    with pytest.raises(ConfigError, match="padded rows have no bound of their own"):
        sampler_of([], layout="bshd", max_seqlen=64)
