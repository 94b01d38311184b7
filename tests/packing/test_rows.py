"""RowPacker against all windows of neighbours, and its promises: legal shapes, conservation, waiting, state."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packfp8.errors import BudgetError, ConfigError, LengthError, StateError
from packfp8.packing import RowPacker


@dataclass(frozen=True, slots=True)
class Rule:
    """S is a multiple of `sequence`, and B * S of `total`."""

    sequence: int
    total: int

    def row(self, batch: int) -> int:
        return math.lcm(self.sequence, self.total // math.gcd(self.total, batch))


def padded(rule: Rule, lengths: list[int]) -> int:
    """B * S of a batch."""
    row = rule.row(len(lengths))
    return -(-max(lengths) // row) * row * len(lengths)


rules = st.builds(Rule, sequence=st.sampled_from([1, 2, 4]), total=st.sampled_from([1, 8, 16, 48]))
streams = st.lists(st.integers(1, 40), max_size=60)
shapes = st.tuples(st.integers(96, 300), st.integers(1, 9), st.integers(1, 6) | st.none())


class Literal:
    """The rules of the row packer, played with lists and all windows."""

    def __init__(self, rule, budget, lookahead, most):
        self.rule, self.budget, self.lookahead, self.most = rule, budget, lookahead, most or budget
        self.waiting: list[tuple[int, int]] = []  # (length, key)
        self.closed: list[list[int]] = []

    def push(self, key, length):
        self.waiting.append((length, key))
        while key + 1 - min(one for _, one in self.waiting) > self.lookahead:
            self.close()
            if not self.waiting:
                break

    def close(self):
        anchor = min(self.waiting, key=lambda one: one[1])
        rising = sorted(self.waiting)
        best = None
        for first in range(len(rising)):
            for last in range(first, len(rising)):
                window = rising[first : last + 1]
                lengths = [length for length, _ in window]
                if anchor in window and len(window) <= self.most and padded(self.rule, lengths) <= self.budget:
                    score = (sum(lengths), -padded(self.rule, lengths), first, last)
                    best = max(best, (score, window)) if best else (score, window)
        self.closed.append([key for _, key in best[1]])
        self.waiting = [one for one in self.waiting if one not in best[1]]


@given(rules, st.lists(st.integers(1, 40), min_size=8, max_size=60), shapes)
@settings(max_examples=200)
def test_the_batches_are_those_of_the_rules_played_literally(rule, lengths, shape):
    packer, literal = RowPacker(rule, *shape), Literal(rule, *shape)
    for key, length in enumerate(lengths):
        packer.push(key, length)
        literal.push(key, length)
        popped = []
        while (one := packer.pop()) is not None:
            popped.append(one)
        assert popped == literal.closed
        literal.closed.clear()
    packer.flush()
    while literal.waiting:
        literal.close()
    assert [packer.pop() for _ in literal.closed] == literal.closed
    assert packer.pop() is None


@given(rules, streams, shapes)
def test_every_key_comes_out_once_in_a_legal_batch_within_the_budget(rule, lengths, shape):
    budget, lookahead, most = shape
    packer = RowPacker(rule, budget, lookahead, most)
    waits, batches = [], []
    for now, length in enumerate(lengths):
        packer.push(now, length)
        while (one := packer.pop()) is not None:
            batches.append(one)
            waits += [now - key for key in one]
        assert len(packer) == now + 1 - sum(map(len, batches))
    assert max(waits, default=0) <= lookahead
    packer.flush()
    while (one := packer.pop()) is not None:
        batches.append(one)
    assert sorted(key for one in batches for key in one) == list(range(len(lengths)))
    for one in batches:
        assert padded(rule, [lengths[key] for key in one]) <= budget
        assert len(one) <= (most or len(lengths))


@given(rules, streams, shapes)
def test_a_state_saved_at_any_step_continues_byte_for_byte(rule, lengths, shape):
    budget, lookahead, most = shape
    made_with = (rule, budget // 3, lookahead, most, "set_aside")
    packer = RowPacker(*made_with)
    saved = [json.dumps(packer.state_dict())]
    for key, length in enumerate(lengths):
        packer.push(key, length)
        saved.append(json.dumps(packer.state_dict()))
    for step in range(len(lengths)):
        other = RowPacker(*made_with)
        other.load_state_dict(json.loads(saved[step]))
        other.push(step, lengths[step])
        assert json.dumps(other.state_dict()) == saved[step + 1]
        assert other.set_aside == packer.set_aside[: len(other.set_aside)]


def test_a_new_longest_example_does_not_blow_the_batch_up(packed):
    lengths = [1, 1, 1, 1, 1, 20]
    batches = packed(RowPacker(Rule(1, 1), 50, lookahead=6), lengths)
    assert sorted(map(sorted, batches)) == [[0, 1, 2, 3, 4], [5]]


def test_of_batches_with_as_many_real_tokens_the_one_with_less_padding_is_made(packed):
    lengths = [5, 3, 4, 7]  # with 5 go 3 and 4, in 15 tokens, or 7, in 14
    assert packed(RowPacker(Rule(1, 1), 15), lengths) == [[0, 3], [1, 2]]


def test_rows_are_alike_and_more_so_with_a_longer_lookahead(packed):
    lengths = np.random.default_rng(0).integers(60, 542, 20_000).tolist()
    rule, budget = Rule(4, 64), 8192
    fills = [sum(lengths) / budget / len(packed(RowPacker(rule, budget, one), lengths)) for one in (1, 64, 256, 1024)]
    assert fills == sorted(fills)
    assert fills[0] < 0.55  # rows of any lengths
    assert fills[2] > 0.8
    assert fills[3] > 0.9


def test_a_row_of_exactly_the_budget_fits_and_one_more_token_is_refused(five_lines, packed):
    assert packed(RowPacker(Rule(1, 16), 47), [32]) == [[0]]
    with pytest.raises(BudgetError) as raised:
        RowPacker(Rule(1, 16), 47).push("cut-7", 33)
    five_lines(
        raised.value,
        what="example 'cut-7' is longer than a pack",
        got="33 tokens, a row of 48",
        expected="at most 47 tokens",
        because="never cut",
        fix="set over-long examples aside",
    )


def test_what_is_set_aside_is_listed_with_its_reason(packed):
    packer = RowPacker(Rule(1, 16), 47, over_budget="set_aside")
    assert packed(packer, [33, 8, 8]) == [[1, 2]]
    assert [(one.key, one.length, one.reason) for one in packer.set_aside] == [
        (0, 33, "33 tokens, a row of 48; at most 47 tokens")
    ]


def test_a_state_of_another_rule_is_refused(five_lines):
    state = RowPacker(Rule(1, 16), 64).state_dict()
    with pytest.raises(StateError) as raised:
        RowPacker(Rule(1, 32), 64).load_state_dict(state)
    five_lines(
        raised.value,
        what="saved by a RowPacker with other settings",
        got="rows [16, 8, 16, 4",
        expected="rows [32, 16, 32, 8",
        because="other packs",
        fix="resume with the settings",
    )


@pytest.mark.parametrize("name", ["budget", "lookahead", "max_sequences"])
def test_a_setting_that_is_no_count_is_named(name):
    with pytest.raises(ConfigError, match=f"{name} is not a count"):
        RowPacker(Rule(1, 1), **({"budget": 20} | {name: 0}))


def test_an_impossible_length_is_named_by_its_key():
    with pytest.raises(LengthError, match="example 'cut-3' has no usable length"):
        RowPacker(Rule(1, 1), 20).push("cut-3", 0)


def test_batches_go_on_after_a_flush(packed):
    packer = RowPacker(Rule(1, 8), 100, lookahead=4)
    lengths = [30, 50, 20, 60, 40, 10] * 5
    assert packed(packer, lengths) == packed(packer, lengths)


def test_nothing_comes_out_of_nothing(packed):
    assert packed(RowPacker(Rule(1, 8), 100), []) == []
