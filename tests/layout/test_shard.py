"""The split over CP and SP ranks: equal to its formula and to a literal split, a partition, and invertible."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfp8.errors import RuleError
from packfp8.layout import cp_index, cp_inverse, place, sp_slice
from packfp8.rule import Topology, align

SIZES = [1, 2, 3, 4, 8]
cps = st.sampled_from(SIZES)
chunks = st.lists(st.integers(0, 12), min_size=1, max_size=10)


def offsets_of(sizes):
    return np.concatenate(([0], np.cumsum(np.array(sizes, dtype=np.int64))))


def by_the_formula(sizes, cp, rank):
    """For slot [a, b) and c = (b - a) / (2 * cp): [a + r*c, a + (r+1)*c) then [b - (r+1)*c, b - r*c)."""
    held, a = [], 0
    for size in sizes:
        b, c = a + size, size // (2 * cp)
        held += list(range(a + rank * c, a + (rank + 1) * c))
        held += list(range(b - (rank + 1) * c, b - rank * c))
        a = b
    return held


@given(cps, chunks)
def test_equals_the_formula(cp, chunks):
    sizes = [n * 2 * cp for n in chunks]
    for rank in range(cp):
        index = cp_index(offsets_of(sizes), cp, rank)
        assert index.dtype == np.int64
        assert index.tolist() == by_the_formula(sizes, cp, rank)


@given(cps, chunks)
def test_equals_a_literal_split_of_each_sequence(split_literally, cp, chunks):
    names = [[(slot, n) for n in range(size * 2 * cp)] for slot, size in enumerate(chunks)]
    flat = [name for slot in names for name in slot]
    index = [cp_index(offsets_of([len(slot) for slot in names]), cp, rank) for rank in range(cp)]
    assert [[flat[n] for n in held] for held in index] == split_literally(names, cp)


def test_the_drawing_of_the_module_is_right():
    assert cp_index(np.array([0, 8]), 2, 0).tolist() == [0, 1, 6, 7]
    assert cp_index(np.array([0, 8]), 2, 1).tolist() == [2, 3, 4, 5]
    assert cp_index(np.array([0, 4, 12]), 2, 0).tolist() == [0, 3, 4, 5, 10, 11]


@given(cps, chunks)
def test_every_token_is_on_exactly_one_rank_and_all_ranks_hold_as_many(cp, chunks):
    offsets = offsets_of([n * 2 * cp for n in chunks])
    held = [cp_index(offsets, cp, rank) for rank in range(cp)]
    assert {len(index) for index in held} == {offsets[-1] // cp}
    assert sorted(np.concatenate(held).tolist()) == list(range(offsets[-1]))


@given(cps, chunks)
def test_the_inverse_puts_the_slabs_together_again(cp, chunks):
    offsets = offsets_of([n * 2 * cp for n in chunks])
    pack = np.random.default_rng(0).integers(0, 1000, offsets[-1])
    slabs = np.concatenate([pack[cp_index(offsets, cp, rank)] for rank in range(cp)])
    inverse = cp_inverse(offsets, cp)
    assert inverse.dtype == np.int64
    assert slabs[inverse].tolist() == pack.tolist()


@given(cps.filter(lambda cp: cp > 1), chunks)
def test_the_causal_work_of_all_ranks_is_within_a_chunk_of_equal(cp, chunks):
    sizes = [n * 2 * cp for n in chunks]
    offsets = offsets_of(sizes)
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
    work = [int(position[cp_index(offsets, cp, rank)].sum()) for rank in range(cp)]
    assert max(work) == min(work)


@given(cps, st.lists(st.integers(1, 60), max_size=8), st.sampled_from(["thd", "bshd"]))
def test_the_slots_of_a_rule_can_always_be_cut(cp, lengths, layout):
    rule = align("block", Topology(cp=cp, tp=2, sp=True), layout=layout)
    slots = place(lengths, rule)
    for rank in range(cp):
        slab = cp_index(slots.offsets, cp, rank)
        shards = [slab[sp_slice(len(slab), 2, tp_rank)] for tp_rank in range(2)]
        assert np.concatenate(shards).tolist() == slab.tolist()
        assert {len(shard) for shard in shards} == {slots.total // rule.topology.shards}


@given(st.sampled_from([2, 3, 4, 8]), chunks, st.integers(0, 9), st.data())
def test_one_token_more_or_less_in_a_slot_is_refused_and_not_dropped(lines_of, cp, chunks, bad, data):
    sizes = [n * 2 * cp for n in chunks]
    bad %= len(sizes)
    sizes[bad] += data.draw(st.sampled_from([n for n in (-1, 1) if sizes[bad] + n > 0]))
    with pytest.raises(RuleError) as caught:
        cp_index(offsets_of(sizes), cp, 0)
    assert lines_of(caught.value) == {
        "what": f"slot {bad} cannot be cut for context parallelism",
        "got": f"{sizes[bad]} tokens",
        "expected": f"a multiple of {2 * cp}",
        "because": "each of the cp ranks takes one chunk from either end of every slot",
        "fix": "round each slot with rule.slot(n)",
    }
    with pytest.raises(RuleError):
        cp_inverse(offsets_of(sizes), cp)


@given(st.integers(1, 8), st.integers(0, 40))
def test_sp_gives_equal_contiguous_shards_in_rank_order(tp, rows):
    slab = np.arange(tp * rows)
    shards = [slab[sp_slice(len(slab), tp, rank)] for rank in range(tp)]
    assert {len(shard) for shard in shards} == {rows}
    assert np.concatenate(shards).tolist() == slab.tolist()


@pytest.mark.parametrize("tokens", [63, 65])
def test_a_slab_that_sp_cannot_share_equally_is_refused(lines_of, tokens):
    assert sp_slice(64, 4, 3) == slice(48, 64)
    with pytest.raises(RuleError) as caught:
        sp_slice(tokens, 4, 3)
    assert lines_of(caught.value) == {
        "what": "the slab cannot be cut into equal shards",
        "got": f"{tokens} tokens for 4 SP ranks",
        "expected": "a multiple of 4",
        "because": "reduce-scatter and all-gather move equal shards",
        "fix": "round the pack with rule.pack(n)",
    }
