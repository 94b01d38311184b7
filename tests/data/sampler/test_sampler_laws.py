"""Laws: over any world, source and filter, ranks get equal steps, and every example is in one pack or named."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lhotse import CutSet

from packfp8.data import as_example
from packfp8.errors import BudgetError, PackError
from packfp8.lengths import Measured
from packfp8.packing import PackCost, RowPacker, StreamPacker, deal

GOOD = st.floats(0.05, 9).map(lambda seconds: round(seconds, 2))
BAD = st.sampled_from([0.0, -2.86, None, float("nan"), 14.0, 1e9])  # no length, or more than a pack holds
SECONDS = st.one_of(GOOD, GOOD, GOOD, BAD)
WORLDS = {
    "seconds": st.lists(SECONDS, max_size=40),
    "dp": st.integers(1, 5),
    "layout": st.sampled_from(["thd", "bshd"]),
    "options": st.fixed_dictionaries(
        {
            "window": st.integers(1, 3),
            "lookahead": st.integers(1, 9),
            "seed": st.integers(0, 3),
            "max_sequences": st.sampled_from([None, 1, 3]),
            "frame_budget": st.sampled_from([None, 100, 181]),
            "shuffle": st.booleans(),
            "cp": st.sampled_from([1, 2]),
        }
    ),
    "keep": st.sampled_from([None, 2, 3]),
    "end": st.sampled_from(["fill", "drop"]),
}


@pytest.fixture(scope="module")
def all_ranks(make_cuts, sampler_of):
    """A function from a world to its cuts and the sampler of each rank, run to the end, with its packs."""

    def all_ranks(seconds, dp, layout, options, keep, end, lazy=False):
        cuts = make_cuts(seconds)
        source = CutSet(Lazy(cuts)) if lazy else cuts
        accepts = None if keep is None else lambda cut: int(cut.id[1:]) % keep == 0
        policies = {"over_budget": "set_aside", "on_fault": "set_aside", "end": end, "accepts": accepts}
        samplers = [sampler_of(source, dp=dp, rank=rank, layout=layout, **options, **policies) for rank in range(dp)]
        return cuts, accepts, samplers, [list(sampler) for sampler in samplers]

    return all_ranks


class Lazy:
    """A source that comes one by one."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return (item for item in self.items)


@settings(max_examples=80)
@given(world=st.fixed_dictionaries(WORLDS | {"lazy": st.booleans()}))
def test_ranks_get_equal_steps_and_every_example_is_in_one_pack_or_named(all_ranks, world):
    cuts, accepts, samplers, columns = all_ranks(**world)
    assert len({len(column) for column in columns}) == 1
    assert [pack.step for pack in columns[0]] == list(range(len(columns[0])))

    packed = [cut.id for column in columns for pack in column for cut in pack]
    aside = [one.id for one in samplers[0].set_aside]
    assert all(sampler.set_aside == samplers[0].set_aside for sampler in samplers)
    assert Counter(packed + aside) == Counter(cut.id for cut in cuts if accepts is None or accepts(cut))
    if world["end"] == "fill":
        empty = sum(not len(pack) for column in columns for pack in column)
        assert empty < world["dp"]
    else:
        assert all(len(pack) for column in columns for pack in column)


@given(world=st.fixed_dictionaries(WORLDS))
def test_no_pack_is_over_the_budget_in_tokens_sequences_or_frames(all_ranks, measure, world):
    _, _, samplers, columns = all_ranks(**world)
    rule, budget = samplers[0].terms.rule, 256
    most = world["options"]["max_sequences"] or 256
    most_frames = world["options"]["frame_budget"] or 512
    for pack in (pack for column in columns for pack in column if len(pack)):
        measured = [measure(as_example(cut)) for cut in pack]
        tokens = [one.tokens for one in measured]
        assert sum(frames + 1 for one in measured for frames in one.encoder_frames) <= most_frames
        if world["layout"] == "bshd":
            row = rule.row(len(tokens))
            assert len(tokens) * -(-max(tokens) // row) * row <= budget
        else:
            assert sum(map(rule.slot, tokens)) <= rule.floor(budget)
        assert len(tokens) <= most


@given(world=st.fixed_dictionaries(WORLDS))
def test_packs_are_those_of_the_packer_and_the_deal_in_order_of_arrival(all_ranks, measure, world):
    world["options"]["shuffle"] = False
    cuts, accepts, samplers, columns = all_ranks(**world)
    assert union_by_step(columns) == literal_steps(cuts, accepts, samplers[0].terms, measure)


def union_by_step(columns):
    return [[[cut.id for cut in pack] for pack in step] for step in zip(*columns, strict=True)]


def literal_steps(cuts, accepts, terms, measure):
    """The whole set at once: lengths in order, one packer, one deal, empty packs for ranks that are left over."""
    rule, dp, measured = terms.rule, terms.rule.topology.dp, {}
    for cut in cuts:
        try:
            if accepts is None or accepts(cut):
                measured[cut.id] = measure(as_example(cut))
        except PackError:
            pass
    options = {"lookahead": terms.lookahead, "max_sequences": terms.max_sequences, "over_budget": "set_aside"}
    options["frame_budget"] = terms.frame_budget
    thd = rule.layout == "thd"
    packer = StreamPacker(rule.floor(256), rule.sequence, **options) if thd else RowPacker(rule, 256, **options)
    for name, one in measured.items():
        packer.push(name, one.tokens, sum(one.encoder_frames) + len(one.encoder_frames))
    packer.flush()
    packs = list(iter(packer.pop, None))

    def work(pack):
        tokens = [measured[name].tokens for name in pack]
        row = None if thd else rule.row(len(pack))
        slots = map(rule.slot, tokens) if thd else [-(-max(tokens) // row) * row] * len(pack)
        return sum(slot * slot for slot in slots)

    if dp == 1:
        return [[pack] for pack in packs]
    dealt = deal(list(map(work, packs)), dp, window=terms.window, seed=terms.seed * 1_000_003)
    steps = [[packs[index] for index in step] for step in dealt.steps]
    rest = [packs[index] for index in dealt.remaining]
    return [*steps, rest + [[]] * (dp - len(rest))] if rest and terms.end == "fill" else steps


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_the_longest_sequence_taken_is_the_longest_that_the_packer_takes(sampler_of, layout, cp):
    terms = sampler_of([], layout=layout, cp=cp, budget=250).terms
    terms.packer().push("fits", terms.longest_tokens)
    with pytest.raises(BudgetError):
        terms.packer().push("does not", terms.longest_tokens + 1)


@pytest.mark.parametrize(
    ("layout", "cp", "work"),
    [("thd", 1, 10**2 + 50**2), ("thd", 2, 12**2 + 52**2), ("bshd", 1, 2 * 56**2), ("bshd", 4, 2 * 64**2)],
)
def test_the_cost_of_a_pack_counts_its_slots_or_rows_and_its_frames(sampler_of, layout, cp, work):
    pack = [Measured(tokens=n, text_tokens=n - 5, encoder_frames=(2, 3), supervised=1) for n in (10, 50)]
    assert sampler_of([], layout=layout, cp=cp).terms.cost_of(pack) == work
    assert sampler_of([], layout=layout, cp=cp, cost=PackCost(encoder=7.0)).terms.cost_of(pack) == work + 70


def test_ranks_of_a_step_have_packs_of_like_cost(make_cuts, sampler_of):
    seconds = [0.2 + (n * 37 % 90) / 10 for n in range(2000)]
    idle = {}
    for window in (1, 16):
        waits = []
        for step in sampler_of(make_cuts(seconds), dp=8, window=window).forecast():
            work = [sum(one.tokens**2 for one in pack) for pack in step]
            waits.append(1 - sum(work) / len(work) / max(work))
        idle[window] = sum(waits) / len(waits)
    assert idle[16] < idle[1] / 3
