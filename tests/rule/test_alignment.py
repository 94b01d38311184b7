"""Laws of the rule, its words, and the errors it gives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfp8.errors import BudgetError, RuleError
from packfp8.rule import RECIPES, Topology, align, checked_rule

topologies = st.builds(Topology, dp=st.integers(1, 3), cp=st.integers(1, 6), tp=st.integers(1, 6), sp=st.booleans())
rules = st.builds(align, st.sampled_from(list(RECIPES)), topologies, layout=st.sampled_from(["thd", "bshd"]))


def error_lines(error):
    """The five lines of a PackError by name."""
    what, *rest = str(error).split("\n")
    return {"what": what, **{line.split(":", 1)[0].strip(): line.split(":", 1)[1].strip() for line in rest}}


@given(rules, st.integers(0, 5000))
def test_rounding_up_is_least_idempotent_and_monotone(rule, tokens):
    for up, multiple in ((rule.slot, rule.sequence), (rule.pack, rule.total)):
        size = up(tokens)
        assert size % multiple == 0
        assert tokens <= size < tokens + multiple
        assert up(size) == size
        assert up(tokens + 1) >= size


@given(rules, st.integers(1, 100_000))
def test_the_floor_of_a_budget_is_legal_and_the_next_pack_passes_it(rule, budget):
    if budget < rule.total:
        with pytest.raises(BudgetError):
            rule.floor(budget)
        return
    capacity = rule.floor(budget)
    assert capacity % rule.total == 0
    assert capacity <= budget < capacity + rule.total


@given(rules, st.integers(1, 40), st.integers(1, 8))
def test_every_multiple_of_the_row_is_legal(rule, batch, times):
    if rule.layout == "bshd":
        row = rule.row(batch) * times
        rule.check(batch * row, slots=[row] * batch, batch=batch)


@given(rules)
def test_every_need_carries_its_reason_and_its_source(rule):
    for need in rule.needs:
        assert need.because
        assert need.source
        assert need.kind in ("must", "fast")
        assert need.because in str(rule)
        assert need.source in str(rule)


@given(rules, st.integers(1, 9), st.integers(0, 8))
def test_the_fingerprint_leaves_out_data_parallelism_and_coordinates(rule, dp, seed):
    t = rule.topology
    other = Topology(dp, t.cp, t.tp, t.sp, seed % dp, seed % t.cp, seed % t.tp)
    assert align(rule.recipe, other, layout=rule.layout).fingerprint == rule.fingerprint


def test_fingerprints_differ_where_the_rule_differs():
    made = [align("block"), align("current"), align("block", layout="bshd"), align("block", trains_weights=False)]
    made += [align("block", Topology(cp=2)), align("block", Topology(tp=2)), align("block", Topology(tp=2, sp=True))]
    made += [align("block", Topology(tp=2, sp=True), fast=True)]
    assert len({rule.fingerprint for rule in made}) == len(made)


def test_needs_are_joined_by_lcm_and_not_by_their_maximum():
    assert align("current", Topology(tp=3, sp=True)).total == 48  # 24 and 16: max would leave a slab of 24


def test_divisibility_is_asked_of_each_shard_and_not_of_the_whole():
    with pytest.raises(RuleError) as caught:
        align("delayed", Topology(tp=4, sp=True)).check(16368)  # a multiple of 16, shards of 4092
    lines = error_lines(caught.value)
    assert lines["what"].startswith("the shard of this pack breaks the rule of delayed, THD")
    assert lines["got"] == "16368 tokens in all, 4092 in each of 4"
    assert lines["expected"] == "a multiple of 8"
    assert "ValueError in forward" in lines["because"]
    assert "measured: H200" in lines["because"]
    assert "rule.pack(n)" in lines["fix"]


def test_no_fp8_multiple_is_asked_for_where_fp8_is_off():
    assert align("bf16").total == 1
    assert align("bf16", Topology(cp=2, tp=2, sp=True)).total == 4


def test_must_and_fast_needs_are_kept_apart():
    t = Topology(tp=2, sp=True)
    assert {n.kind for n in align("block", t).needs} == {"must"}
    assert {n.kind for n in align("block", t, fast=True).needs} == {"must", "fast"}
    assert "only with fast=True" in str(align("block", t))


@pytest.mark.parametrize("recipe", ["auto", "fp8", "", None])
def test_a_recipe_that_is_not_named_is_refused(recipe):
    with pytest.raises(RuleError) as caught:
        align(recipe)
    lines = error_lines(caught.value)
    assert lines["what"] == "the recipe is not one that the rule knows"
    assert lines["got"] == repr(recipe)
    assert lines["expected"] == "one of " + ", ".join(RECIPES)
    assert "without the GPU" in lines["because"]
    assert lines["fix"] == "name the recipe that the GPUs run, on every rank alike"


def test_an_unknown_layout_is_refused():
    with pytest.raises(RuleError, match="layout is not one"):
        align("block", layout="sbhd")


def test_a_budget_below_the_least_pack_is_refused():
    with pytest.raises(BudgetError) as caught:
        align("block", Topology(cp=2)).floor(31)
    lines = error_lines(caught.value)
    assert lines["what"] == "the budget is below the least pack"
    assert lines["got"] == "31 tokens"
    assert lines["expected"] == "at least 32 tokens"
    assert "multiples of 32" in lines["because"]
    assert "raise the budget" in lines["fix"]


def test_a_slot_that_cp_cannot_halve_is_refused_by_its_place():
    with pytest.raises(RuleError) as caught:
        align("block", Topology(cp=2)).check(32, slots=[4, 7, 21])
    lines = error_lines(caught.value)
    assert lines["what"].startswith("slot 1 of the pack breaks the rule")
    assert lines["got"] == "7 tokens"
    assert lines["expected"] == "a multiple of 4"
    assert "silently" in lines["because"]


@pytest.mark.parametrize(
    ("recipe", "tp", "sizes", "split", "held"),
    [
        ("block", 1, (1000, 1024), None, "1000 input features"),
        ("block", 4, (1024, 1056), "out", "1056 output features, 264 on each of 4 TP ranks"),
        ("mxfp8", 2, (1072, 1024), "in", "1072 input features, 536 on each of 2 TP ranks"),
        ("block", 3, (1024, 1024), "out", "1024 output features, 341.333 on each of 3 TP ranks"),
    ],
)
def test_feature_sizes_are_checked_as_each_rank_holds_them(recipe, tp, sizes, split, held):
    rule = align(recipe, Topology(tp=tp))
    with pytest.raises(RuleError) as caught:
        rule.check_features("mlp.fc1", *sizes, split=split)
    lines = error_lines(caught.value)
    assert lines["what"].startswith("linear layer 'mlp.fc1' breaks the rule")
    assert lines["got"] == held
    assert lines["expected"] == f"a multiple of {rule.features}"
    assert "leave the layer in BF16" in lines["fix"]
    rule.check_features("mlp.fc1", 96 * 32, 96 * 32, split=split)


@pytest.mark.parametrize("count", [-1, 2.5, 4096.0, True, "16", None])
def test_a_count_that_is_no_whole_number_is_refused(count):
    with pytest.raises(RuleError, match="is not a count"):
        align("block").pack(count)


def test_numpy_integers_are_counts():
    assert align("block").pack(np.int32(17)) == 32


@pytest.mark.parametrize("sizes", [{"cp": 0}, {"tp": -1}, {"dp": 2, "dp_rank": 2}, {"cp": 2.0}, {"tp": True}])
def test_a_topology_without_a_place_in_it_is_refused(sizes):
    with pytest.raises(RuleError) as caught:
        Topology(**sizes)
    lines = error_lines(caught.value)
    assert "is not a group of ranks" in lines["what"]
    assert all(lines[name] for name in ("got", "expected", "because", "fix"))


def test_slots_that_do_not_make_the_total_are_refused():
    with pytest.raises(RuleError) as caught:
        align("block").check(32, slots=[16, 15])
    lines = error_lines(caught.value)
    assert lines["what"] == "the slots of the pack do not make its total"
    assert lines["got"] == "31 tokens in 2 slots"
    assert lines["expected"] == "32 tokens"
    assert lines["because"]
    assert "filler" in lines["fix"]
    align("block").check(32, slots=[16, 15, 1])


@pytest.mark.parametrize("given", ["block", None, 16])
def test_what_is_no_rule_is_refused(given):
    with pytest.raises(RuleError) as caught:
        checked_rule(given)
    lines = error_lines(caught.value)
    assert lines["what"] == "what was given as the rule is none"
    assert lines["got"] == repr(given)
    assert "align('block'" in lines["fix"]
    assert checked_rule(align("block")) == align("block")
