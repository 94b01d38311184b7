"""deal() and Dealer: each pack once, like costs in a step, the same everywhere and after a resume."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfp8.errors import ConfigError, StateError
from packfp8.packing import Dealer, deal, imbalance
from packfp8.packing.deal import _noise

costs_lists = st.lists(st.integers(0, 30), max_size=80)
worlds = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(-3, 3), st.integers(0, 3))


@given(costs_lists, worlds)
def test_every_pack_is_in_one_step_or_remains(costs, world):
    ranks, window, seed, patience = world
    steps, remaining = deal(costs, ranks, window, seed, patience)
    assert steps.shape == (len(costs) // ranks, ranks)
    assert steps.dtype == remaining.dtype == np.int64
    assert len(remaining) < ranks
    assert sorted([*steps.ravel().tolist(), *remaining.tolist()]) == list(range(len(costs)))


@given(costs_lists, worlds)
def test_without_patience_each_window_is_dealt_out_and_no_step_overlaps_another_in_cost(costs, world):
    ranks, window, seed, _ = world
    steps, remaining = deal(costs, ranks, window, seed, patience=0)
    for number in range(len(costs) // (ranks * window)):
        dealt = steps[number * window : (number + 1) * window]
        first = number * window * ranks
        assert sorted(dealt.ravel().tolist()) == list(range(first, first + window * ranks))
        spans = sorted((min(costs[pack] for pack in step), max(costs[pack] for pack in step)) for step in dealt)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    last = steps[len(costs) // (ranks * window) * window :].ravel()
    assert all(costs[kept] <= costs[pack] for kept in remaining for pack in last)


@given(st.lists(st.integers(0, 1000), min_size=40, max_size=80), worlds)
def test_no_pack_waits_longer_than_its_patience_and_no_more_than_two_windows_are_held(costs, world):
    ranks, window, seed, patience = world
    dealer = Dealer(ranks, window, seed, patience)
    size = ranks * window
    for pack, cost in enumerate(costs):
        dealer.push(pack, cost)
        while (step := dealer.pop()) is not None:
            assert all((pack // size) - (one // size) <= patience for one in step)
        assert len(dealer) <= 2 * size
    if len(costs) % size == 0:
        assert all(len(costs) // size - 1 - one // size < patience for one in dealer.remaining)


def test_only_uneven_steps_wait_and_then_meet_their_like():
    dealer = Dealer(2, window=2, patience=1)
    for pack, cost in [("a", 100), ("b", 1), ("c", 1), ("d", 1)]:
        dealer.push(pack, cost)
    assert sorted(dealer.pop()) == ["c", "d"]
    assert dealer.pop() is None
    assert dealer.remaining == ("a", "b")
    for pack, cost in [("e", 1), ("f", 1), ("g", 100), ("h", 1)]:
        dealer.push(pack, cost)
    steps = sorted(sorted(dealer.pop()) for _ in range(3))
    assert steps == [["a", "g"], ["b", "e"], ["f", "h"]]


def test_an_uneven_step_waits_no_longer_than_its_patience():
    dealer = Dealer(2, window=1, patience=2)
    dealt = []
    for pack, cost in enumerate([100, 1, 1, 1, 1, 1]):
        dealer.push(pack, cost)
        while (step := dealer.pop()) is not None:
            dealt.append((pack, sorted(step)))
    assert dealt == [(3, [2, 3]), (5, [0, 1]), (5, [4, 5])] or dealt == [(3, [2, 3]), (5, [4, 5]), (5, [0, 1])]


@given(costs_lists, worlds)
def test_dealing_one_by_one_is_dealing_at_once(costs, world):
    ranks, window, seed, patience = world
    dealer = Dealer(ranks, window, seed, patience)
    steps = []
    for pack, cost in enumerate(costs):
        dealer.push(pack, cost)
        while (step := dealer.pop()) is not None:
            steps.append(step)
        assert len(dealer) == pack + 1 - ranks * len(steps)
    dealer.flush()
    while (step := dealer.pop()) is not None:
        steps.append(step)
    whole, remaining = deal(costs, ranks, window, seed, patience)
    assert steps == whole.tolist()
    assert list(dealer.remaining) == remaining.tolist()


@given(costs_lists, worlds, st.booleans())
def test_a_state_saved_at_any_step_continues_byte_for_byte(costs, world, pops):
    dealer = Dealer(*world)
    saved = [json.dumps(dealer.state_dict())]
    for pack, cost in enumerate(costs):
        dealer.push([pack, "id"], cost / 3)
        if pops:
            dealer.pop()
        saved.append(json.dumps(dealer.state_dict()))
    for step in range(len(costs)):
        other = Dealer(*world)
        other.load_state_dict(json.loads(saved[step]))
        other.push([step, "id"], costs[step] / 3)
        if pops:
            other.pop()
        assert json.dumps(other.state_dict()) == saved[step + 1]


def test_the_deal_is_the_same_on_every_machine():
    steps, remaining = deal([5, 1, 4, 2, 3, 9, 8], ranks=2, window=3, seed=1)
    assert (steps.tolist(), remaining.tolist()) == ([[0, 2], [5, 6], [3, 4]], [1])


def test_the_noise_is_splitmix64():
    assert [hex(word) for word in _noise(0, 0, 2)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]  # its known outputs


def test_the_seed_orders_steps_and_ranks_and_changes_no_step():
    costs = np.random.default_rng(0).random(640).tolist()
    one, other = deal(costs, 8, 16, seed=0).steps, deal(costs, 8, 16, seed=1).steps
    assert one.tolist() != other.tolist()
    assert sorted(map(sorted, one.tolist())) == sorted(map(sorted, other.tolist()))


def test_no_rank_gets_the_dearest_pack_of_every_step_and_steps_do_not_fall_in_cost():
    costs = np.random.default_rng(0).random(8 * 32 * 10)
    dealt = costs[deal(costs, 8, 32, patience=0).steps]
    dearest = np.bincount(dealt.argmax(axis=1), minlength=8)
    assert dearest.min() > 10
    assert abs(np.corrcoef(np.arange(32), dealt[:32].mean(axis=1))[0, 1]) < 0.5


def test_dealing_leaves_little_time_idle():
    costs = np.exp(np.random.default_rng(0).normal(0, 0.5, 64 * 32 * 4))
    arrived, at_once, patient = (
        imbalance(costs[steps])
        for steps in (np.arange(len(costs)).reshape(-1, 64), *(deal(costs, 64, 32, 0, one).steps for one in (0, 4)))
    )
    assert patient < 0.7 * at_once < 0.07 * arrived


def test_one_pack_on_four_ranks_remains():
    steps, remaining = deal([3.0], 4)
    assert (steps.shape, remaining.tolist()) == ((0, 4), [0])
    assert deal([], 4).remaining.tolist() == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_cost_that_does_not_sort_is_refused(bad, five_lines):
    with pytest.raises(ConfigError) as raised:
        deal([1.0, bad], 2)
    five_lines(
        raised.value,
        what="a pack's cost is not a number to sort by",
        got=repr(bad),
        expected="a finite number, at least 0",
        because="same order",
        fix="PackCost",
    )


@pytest.mark.parametrize(("name", "least"), [("ranks", 1), ("window", 1), ("patience", 0)])
def test_a_setting_that_is_no_count_is_named(name, least):
    Dealer(**({"ranks": 2} | {name: least}))
    with pytest.raises(ConfigError, match=f"{name} is not a count\n.*\n  expected: a whole number, at least {least}"):
        Dealer(**({"ranks": 2} | {name: least - 1}))


def test_a_state_of_another_world_is_refused(five_lines):
    with pytest.raises(StateError) as raised:
        Dealer(4).load_state_dict(Dealer(2).state_dict())
    five_lines(
        raised.value,
        what="saved by a Dealer with other settings",
        got="ranks 2",
        expected="ranks 4",
        because="other packs",
        fix="resume with the settings",
    )
