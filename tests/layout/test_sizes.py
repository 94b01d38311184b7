"""Sizes: buckets are legal, large enough, few, and never over the capacity; constant ones are constant."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfp8.layout import Buckets, Constant, Least
from packfp8.rule import Topology, align

RULES = [align("block"), align("delayed", Topology(cp=2, tp=4, sp=True)), align("bf16"), align("mxfp8", Topology(cp=4))]


@given(st.sampled_from(RULES), st.integers(1, 300), st.data())
def test_a_bucket_holds_its_pack_and_is_a_legal_total_within_the_capacity(rule, packs, data):
    capacity = packs * rule.total
    buckets = Buckets(rule=rule, capacity=capacity, max_sequences=None, longest_slot=capacity)
    used = data.draw(st.integers(0, capacity // rule.sequence)) * rule.sequence
    tokens = buckets.tokens(used)
    assert used <= tokens <= capacity
    assert tokens % rule.total == 0
    assert tokens - used < capacity / 8 + rule.total or used == 0
    rule.check(tokens)


@pytest.mark.parametrize("rule", RULES)
def test_there_are_at_most_eight_totals_and_more_tokens_never_take_a_smaller_one(rule):
    buckets = Buckets(rule=rule, capacity=64 * rule.total, max_sequences=None, longest_slot=64 * rule.total)
    totals = [buckets.tokens(used) for used in range(0, 64 * rule.total + 1, rule.sequence)]
    assert totals == sorted(totals)
    assert sorted(set(totals)) == [n * 8 * rule.total for n in range(1, 9)]


def test_a_bucket_holds_one_token_less_than_it_and_not_one_more():
    buckets = Buckets(rule=align("bf16"), capacity=800, max_sequences=None, longest_slot=800)
    assert [buckets.tokens(n) for n in (0, 1, 99, 100, 101, 700, 701, 800)] == [100, 100, 100, 100, 200, 700, 800, 800]


@given(st.integers(1, 3000), st.sampled_from([None, 3, 50]))
def test_offsets_and_the_longest_are_powers_of_two_or_the_most_there_can_be(n, most):
    buckets = Buckets(rule=align("bf16"), capacity=3000, max_sequences=most, longest_slot=3000)
    longest = buckets.longest(n)
    assert n <= longest <= 3000
    assert longest == 3000 or (longest & (longest - 1) == 0 and longest < 2 * n)
    slots = min(n, (most or 2999) + 1)
    given_slots = buckets.offsets(slots) - 1
    assert slots <= given_slots <= (most or 2999) + 1
    assert given_slots == (most or 2999) + 1 or (given_slots & (given_slots - 1) == 0 and given_slots < 2 * slots)


@given(st.integers(1, 900), st.integers(1, 60), st.integers(0, 900))
def test_buckets_with_a_longest_slot_hold_the_offsets_of_every_pack_and_no_longer_a_slot(longest, most, filler):
    buckets = Buckets(rule=align("bf16"), capacity=900, max_sequences=most, longest_slot=longest)
    slots = most + -(-filler // longest)
    assert slots < buckets.offsets(slots) <= most + -(-900 // longest) + 1
    assert longest == buckets.longest(longest) >= buckets.longest(max(1, longest - 1)) >= longest - 1


@pytest.mark.parametrize(("longest", "offsets"), [(512, 9), (511, 10), (256, 10), (255, 11), (64, 16), (1, 520)])
def test_constant_sizes_are_the_bounds_whatever_the_pack_holds(longest, offsets):
    sizes = Constant(capacity=512, max_sequences=7, longest_slot=longest)
    assert {(sizes.tokens(n), sizes.offsets(n), sizes.longest(n)) for n in range(9)} == {(512, offsets, longest)}


@given(st.sampled_from(RULES), st.integers(0, 5000))
def test_the_least_sizes_are_those_of_the_pack(rule, n):
    sizes = Least(rule=rule)
    assert (sizes.offsets(n), sizes.longest(n)) == (n + 1, n)
    used = rule.slot(n) if n else 0
    legal = np.arange(rule.total, used + 2 * rule.total, rule.total)
    assert sizes.tokens(used) == legal[legal >= used][0]
