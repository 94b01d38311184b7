"""The rule against ranks simulated literally: tokens are dealt one by one, then each rank's rows are put to the hardware."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfp8.errors import RuleError
from packfp8.rule import RECIPES, Topology, align


def hardware_runs(recipe, quantised_rows, gemm_rows, trained):
    """What was measured, said a second time and in other words: which row counts pass forward and backward."""
    if recipe in ("delayed", "current", "block"):
        return quantised_rows % 8 == 0 and (gemm_rows % 16 == 0 or not trained)
    if recipe in ("tensorwise", "rowwise"):
        return gemm_rows % 16 == 0
    return quantised_rows % {"mxfp8": 32, "nvfp4": 16}.get(recipe, 1) == 0


def fast_rows(recipe, quantised_rows, gathered):
    return quantised_rows % 128 == 0 if recipe == "nvfp4" or (recipe == "block" and gathered) else True


def zigzag(tokens, cp):
    """The tokens of one slot for each CP rank, or None where the chunks come out unequal."""
    chunk, rest = divmod(len(tokens), 2 * cp)
    if cp > 1 and rest:
        return None
    if cp == 1:
        return [tokens]
    pieces = [tokens[i * chunk : (i + 1) * chunk] for i in range(2 * cp)]
    return [pieces[r] + pieces[2 * cp - 1 - r] for r in range(cp)]


def is_legal(recipe, topology, slots, *, trained, fast, layout="thd"):
    """Deals every token to its CP and SP rank, then asks the hardware about each rank's rows."""
    slabs = [[] for _ in range(topology.cp)]
    start = 0
    for size in slots:
        parts = zigzag(list(range(start, start + size)), topology.cp)
        if parts is None:
            return False
        for slab, part in zip(slabs, parts):
            if layout == "bshd" and topology.sp and len(part) % topology.tp:
                return False  # SP cuts the rows of a padded batch, each into equal shares
            slab.extend(part)
        start += size
    ranks = topology.tp if topology.sp else 1
    for slab in slabs:
        if len(slab) % ranks:
            return False
        shard = slab[: len(slab) // ranks]
        if not hardware_runs(recipe, len(shard), len(slab), trained):
            return False
        if fast and not fast_rows(recipe, len(shard), topology.sp and topology.tp > 1):
            return False
    return True


WORLDS = [(c, t, s) for c, t, s in product((1, 2, 3, 4), (1, 2, 3, 4), (False, True))]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("trained", "fast"), [(True, False), (False, False), (True, True)])
def test_no_total_that_the_ranks_refuse_and_none_larger_than_the_least_they_accept(recipe, trained, fast):
    for cp, tp, sp in WORLDS:
        topology = Topology(cp=cp, tp=tp, sp=sp)
        rule = align(recipe, topology, trains_weights=trained, fast=fast)
        for tokens in range(1, min(2 * rule.total, 400) + 1):
            legal = is_legal(recipe, topology, [tokens], trained=trained, fast=fast)
            assert legal == (tokens % rule.total == 0), (recipe, topology, tokens)
        assert is_legal(recipe, topology, [rule.total], trained=trained, fast=fast)
        if rule.total > 1:
            assert not is_legal(recipe, topology, [rule.total - 1], trained=trained, fast=fast)


@given(
    st.sampled_from(list(RECIPES)),
    st.sampled_from(WORLDS),
    st.booleans(),
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
)
def test_a_pack_of_rounded_slots_and_filler_is_legal_on_every_rank(recipe, world, trained, lengths):
    topology = Topology(*(1, world[0], world[1], world[2]))
    rule = align(recipe, topology, trains_weights=trained)
    slots = [rule.slot(n) for n in lengths]
    total = rule.pack(sum(slots))
    slots += [total - sum(slots)] if total > sum(slots) else []
    assert is_legal(recipe, topology, slots, trained=trained, fast=False)
    rule.check(total, slots=slots)
    assert total - sum(rule.slot(n) for n in lengths) < rule.total


@given(st.sampled_from(list(RECIPES)), st.sampled_from(WORLDS), st.booleans(), st.integers(1, 24))
def test_the_row_of_a_padded_batch_is_the_least_that_every_rank_accepts(recipe, world, trained, batch):
    topology = Topology(1, *world)
    rule = align(recipe, topology, layout="bshd", trains_weights=trained)
    row = rule.row(batch)
    for size in range(1, row + 1):
        legal = is_legal(recipe, topology, [size] * batch, trained=trained, fast=False, layout="bshd")
        assert legal == (size == row), (size, row)
    rule.check(batch * row, slots=[row] * batch, batch=batch)


@given(st.sampled_from(list(RECIPES)), st.sampled_from(WORLDS), st.integers(1, 400), st.sampled_from(["thd", "bshd"]))
def test_check_agrees_with_the_ranks_for_any_total(recipe, world, tokens, layout):
    topology = Topology(1, *world)
    rule = align(recipe, topology, layout=layout)
    batch = 1 if layout == "bshd" else None
    legal = is_legal(recipe, topology, [tokens], trained=True, fast=False, layout=layout)
    if legal:
        rule.check(tokens, slots=[tokens], batch=batch)
    else:
        with pytest.raises(RuleError):
            rule.check(tokens, slots=[tokens], batch=batch)


def test_the_oracle_itself_can_say_no():
    assert not is_legal("block", Topology(), [8], trained=True, fast=False)
    assert is_legal("block", Topology(), [8], trained=False, fast=False)
    assert not is_legal("delayed", Topology(tp=4, sp=True), [16368], trained=True, fast=False)
