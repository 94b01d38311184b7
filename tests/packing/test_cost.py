"""PackCost and imbalance: sums done by hand."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfp8.errors import ConfigError
from packfp8.packing import PackCost, imbalance


def test_attention_alone_is_the_sum_of_squares():
    assert PackCost()([3, 4], 99) == 25.0


def test_tokens_and_encoder_frames_add_their_weights():
    assert PackCost(linear=10, encoder=0.5)([3, 4], 8) == 25 + 70 + 4


def test_a_models_token_is_worth_twelve_times_its_width_in_pairs():
    hidden, layers, tokens = 1024, 24, 500
    cost = PackCost.of_model(hidden=hidden, layers=layers, encoder_hidden=512, encoder_layers=17)
    flops_of_a_pair = layers * 4 * hidden / 2
    assert cost.linear * flops_of_a_pair == layers * 24 * hidden**2
    assert cost.encoder * flops_of_a_pair == pytest.approx(17 * 24 * 512**2)
    assert PackCost.of_model(hidden=hidden, layers=layers)([tokens]) == tokens**2 + 12 * hidden * tokens


def test_long_sequences_do_not_overflow():
    assert PackCost()(np.array([2**20] * 4, dtype=np.int32)) == 4 * 2.0**40


@pytest.mark.parametrize("name", ["linear", "encoder"])
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_named(name, bad, five_lines):
    with pytest.raises(ConfigError) as raised:
        PackCost(**{name: bad})
    five_lines(
        raised.value,
        what=f"PackCost.{name} is not a weight",
        got=repr(bad),
        expected="at least 0",
        because="sorted by their cost",
        fix="PackCost.of_model",
    )


def test_a_cost_is_picklable_and_comparable():
    assert pickle.loads(pickle.dumps(PackCost(linear=3))) == PackCost(linear=3)


def test_imbalance_is_the_share_of_time_in_which_ranks_wait():
    assert imbalance([[4, 4], [2, 2]]) == 0
    assert imbalance([[4, 0]]) == 0.5
    assert imbalance([[4, 0], [1, 1]]) == 0.25
    assert imbalance([[0, 0]]) == 0
    assert imbalance(np.zeros((0, 8))) == 0


@given(st.lists(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), min_size=1, max_size=9), st.floats(0.1, 10))
def test_imbalance_lies_between_none_and_all_but_one_rank_and_has_no_unit(costs, unit):
    value = imbalance(costs)
    assert -1e-12 <= value <= 1 - 1 / 3 + 1e-12
    assert imbalance(np.array(costs) * unit) == pytest.approx(value, abs=1e-6)
