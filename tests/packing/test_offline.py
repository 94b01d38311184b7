"""pack() against item-by-item best fit, against the least number of packs, and its promises."""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packfp8.errors import BudgetError, ConfigError, LengthError
from packfp8.lengths.histogram import Histogram
from packfp8.packing import bounds, completion, forecast, pack, runs
from packfp8.packing.capacity import Capacity
from packfp8.packing.completion import exact_completion

corpora = st.lists(st.integers(1, 40), max_size=60)
few = st.lists(st.integers(1, 12), min_size=1, max_size=8)


def best_fit_item_by_item(sizes: list[int], capacity: int) -> list[int]:
    """What each pack holds when every item, longest first, goes where the least room is left after it."""
    packs: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [held for held in packs if held + size <= capacity]
        if fitting:
            packs[packs.index(max(fitting))] += size
        else:
            packs.append(size)
    return packs


def least_packs(sizes: list[int], capacity: int, most: int) -> int:
    """The least number of packs, by trying every pack for every sequence."""

    @cache
    def packs(left: tuple[int, ...], open_packs: tuple[tuple[int, int], ...]) -> int:
        if not left:
            return len(open_packs)
        size, rest = left[0], left[1:]
        tries = [packs(rest, tuple(sorted((*open_packs, (size, 1)))))]
        for at, (held, number) in enumerate(open_packs):
            if held + size <= capacity and number < most:
                others = open_packs[:at] + open_packs[at + 1 :]
                tries.append(packs(rest, tuple(sorted((*others, (held + size, number + 1))))))
        return min(tries)

    return packs(tuple(sorted(sizes, reverse=True)), ())


def slots_of(packs, lengths, multiple: int) -> list[int]:
    return [sum(-(-lengths[member] // multiple) * multiple for member in one) for one in packs]


@given(corpora, st.integers(40, 90))
def test_best_fit_fills_each_pack_as_item_by_item_best_fit_does(lengths, capacity):
    packs = pack(lengths, capacity)
    assert sorted(slots_of(packs, lengths, 1)) == sorted(best_fit_item_by_item(lengths, capacity))


@pytest.mark.parametrize("seed", range(4))
def test_best_fit_is_item_by_item_best_fit_on_thousands_of_lengths_too(seed):
    lengths = np.clip(np.exp(np.random.default_rng(seed).normal(3, 0.9, 3000)), 1, 200).astype(int)
    rooms: list[int] = []  # ascending
    number = 0
    for size in sorted(lengths.tolist(), reverse=True):
        at = bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms.pop(at)
        else:
            room, number = 200, number + 1
        rooms.insert(bisect_left(rooms, room - size), room - size)
    assert len(pack(lengths, 200)) == number


@given(corpora, st.integers(44, 90), st.integers(1, 4), st.integers(1, 12) | st.none(), st.booleans())
def test_every_id_is_in_one_pack_and_no_pack_is_over_its_limits(lengths, capacity, multiple, most, exact):
    packs = pack(lengths, capacity, multiple, most, exact)
    slots = slots_of(packs, lengths, multiple)
    assert sorted(packs.members.tolist()) == list(range(len(lengths)))
    assert all(0 < held <= capacity // multiple * multiple for held in slots)
    assert all(1 <= len(one) <= (most or len(lengths)) for one in packs)
    assert packs.bound <= len(packs)
    room = len(packs) * (capacity // multiple * multiple)
    assert packs.fill == pytest.approx(sum(slots) / room if room else 0)
    assert packs.fill_real == pytest.approx(sum(lengths) / room if room else 0)
    assert packs.offsets.dtype == packs.members.dtype == np.int64


@given(few, st.integers(12, 20), st.integers(1, 8) | st.none())
def test_bounds_never_pass_the_least_number_of_packs_and_packing_never_beats_it(lengths, capacity, most):
    least = least_packs(lengths, capacity, most or len(lengths))
    packs = pack(lengths, capacity, max_sequences=most, exact=True)
    assert max(packs.l1, packs.l2) <= packs.bound <= least <= len(packs)
    assert packs.l2 >= packs.l1
    assert bounds(Histogram.of(lengths), capacity, max_sequences=most).best == packs.bound


@given(few, st.integers(12, 20))
def test_best_fit_is_within_its_proven_ratio_of_the_least(lengths, capacity):
    assert 9 * len(pack(lengths, capacity)) <= 11 * least_packs(lengths, capacity, len(lengths)) + 6  # 11/9 OPT + 6/9


@given(corpora, st.integers(40, 90), st.integers(1, 12) | st.none())
def test_exact_keeps_the_better_and_tells_both(lengths, capacity, most):
    packs = pack(lengths, capacity, max_sequences=most, exact=True)
    tried = {trial.method: trial.packs for trial in packs.forecast.trials}
    assert {"best fit", "exact completion"} <= tried.keys()
    assert len(packs) == min(tried.values()) <= len(pack(lengths, capacity, max_sequences=most))
    assert all(trial.seconds >= 0 for trial in packs.forecast.trials)


@given(corpora, st.integers(40, 90), st.integers(1, 3), st.integers(1, 12) | st.none(), st.booleans())
def test_the_forecast_is_what_packing_gives(lengths, capacity, multiple, most, exact):
    capacity *= multiple
    told = forecast(Histogram.of(lengths), capacity, multiple, most, exact)
    packs = pack(lengths, capacity, multiple, most, exact)
    assert (told.packs, told.fill, told.fill_real, told.bounds) == (
        len(packs), packs.fill, packs.fill_real, packs.forecast.bounds
    )  # fmt: skip


@given(
    st.lists(st.integers(1, 9) | st.integers(1, 40), max_size=80),
    st.integers(40, 90),
    st.integers(1, 12) | st.none(),
    st.booleans(),
)
@settings(max_examples=150)
def test_completion_takes_every_sequence_once_within_the_limits(lengths, capacity, most, mixed):
    histogram = Histogram.of(lengths)
    sizes, counts = histogram.lengths[::-1].tolist(), histogram.counts[::-1].tolist()
    room = Capacity.of(capacity, 1, most)
    found = exact_completion(sizes, counts, room, mixed=mixed)
    offsets = found.offsets()
    members = found.members(offsets, np.sort(lengths)[::-1].astype(np.int64))
    assert sorted(members.tolist()) == sorted(lengths)
    held = [members[first:last].sum() for first, last in pairwise(offsets)]
    assert max(held, default=0) <= capacity
    assert max(np.diff(offsets), default=0) <= room.max_sequences


def test_exact_completion_reaches_the_bound_where_best_fit_does_not():
    lengths = np.random.default_rng(0).integers(60, 542, 20_000)
    packs = pack(lengths, 4096, exact=True)
    assert len(packs) == packs.bound < len(pack(lengths, 4096))


def test_completion_that_may_look_at_few_lengths_only_still_takes_all(monkeypatch):
    lengths = np.random.default_rng(0).integers(1, 400, 3000)
    monkeypatch.setattr(completion, "_TRAIL_BITS", 4096)
    packs = pack(lengths, 1024, exact=True)
    assert sorted(packs.members.tolist()) == list(range(3000))
    assert packs.fill > 0.99


def test_where_the_number_of_sequences_limits_the_packs_short_ones_are_not_left_to_the_end():
    lengths = np.clip(np.exp(np.random.default_rng(0).normal(5.5, 0.9, 20_000)), 4, 8192).astype(int)
    packs = pack(lengths, 8192, max_sequences=40)
    tried = {trial.method: trial.packs for trial in packs.forecast.trials}
    assert np.diff(packs.offsets).max() <= 40
    assert len(packs) == tried["mixed completion"] < 0.96 * tried["best fit"]
    assert len(packs) < 1.01 * packs.bound


def test_where_it_just_limits_them_nearly_all_packs_have_that_number():
    lengths = np.random.default_rng(0).integers(60, 542, 20_000)
    packs = pack(lengths, 4096, max_sequences=14)
    tried = {trial.method: trial.packs for trial in packs.forecast.trials}
    assert len(packs) < 1.02 * packs.bound < 0.95 * tried["best fit"]


def test_long_sequences_need_a_pack_each_and_the_second_bound_knows_it():
    packs = pack([51] * 10 + [50], 100)
    assert (packs.l1, packs.l2, packs.bound, len(packs)) == (6, 11, 11, 11)
    packs = pack([60, 60, 45, 45, 45], 100)
    assert (packs.l1, packs.l2, len(packs)) == (3, 4, 4)


def test_a_number_of_sequences_is_a_bound_too():
    packs = pack([1] * 10, 100, max_sequences=3)
    assert (packs.bound, len(packs)) == (4, 4)


def test_a_budget_that_total_over_budget_would_underrate_is_kept():
    assert [len(one) for one in pack([7] * 8, 8)] == [1] * 8


def test_a_sequence_of_exactly_the_capacity_fits_and_one_more_token_does_not(five_lines):
    assert len(pack([20], 20)) == 1
    with pytest.raises(BudgetError) as raised:
        pack([3, 20, 21, 121], 20)
    five_lines(
        raised.value,
        what="sequence 2 is longer than a pack",
        got="21 tokens, a slot of 21",
        expected="at most 20 tokens",
        because="never cut",
        fix="raise the budget",
    )


def test_the_capacity_is_floored_to_the_multiple_before_anything_else():
    packs = pack([4, 4, 4, 4], 15, multiple=4)
    assert [len(one) for one in packs] == [3, 1]
    assert packs.forecast.capacity == 12
    with pytest.raises(BudgetError, match="sequence 0 is longer than a pack\n  got:      13 tokens, a slot of 16"):
        pack([13], 15, multiple=4)


def test_a_capacity_below_one_slot_is_refused(five_lines):
    assert len(pack([1], 4, multiple=4)) == 1
    with pytest.raises(BudgetError) as raised:
        pack([1], 3, multiple=4)
    five_lines(
        raised.value,
        what="does not hold a single slot",
        got="capacity 3",
        expected="at least 4 tokens",
        because="multiple of 4",
        fix="raise the budget",
    )


@pytest.mark.parametrize("name", ["capacity", "multiple", "max_sequences"])
@pytest.mark.parametrize("bad", [0, -3, 2.5, True, "8"])
def test_a_setting_that_is_no_count_is_named(name, bad, five_lines):
    with pytest.raises(ConfigError) as raised:
        pack([1], **({"capacity": 8} | {name: bad}))
    five_lines(
        raised.value,
        what=f"{name} is not a count",
        got=repr(bad),
        expected="a whole number, at least 1",
        because="counts tokens",
        fix=f"set {name}",
    )


@pytest.mark.parametrize("bad", [0, -1, float("nan")])
def test_an_impossible_length_is_named_by_its_index(bad):
    with pytest.raises(LengthError, match="length 1 is not a sequence's length"):
        pack([7, bad, 3], 8)


def test_a_forecast_names_the_longest_sequence():
    with pytest.raises(BudgetError, match="the longest sequence is longer than a pack\n  got:      9 tokens"):
        forecast(Histogram.of([3, 9]), 8)


def test_no_sequence_gives_no_pack():
    packs = pack([], 100, exact=True)
    assert (len(packs), packs.fill, packs.bound, packs.members.tolist()) == (0, 0, 0, [])
    assert list(packs) == []


def test_packs_are_read_by_number_and_cannot_be_changed():
    packs = pack([5, 9, 3, 4], 10)
    assert [packs[number].tolist() for number in range(len(packs))] == [one.tolist() for one in packs]
    assert packs[-1].tolist() == packs[len(packs) - 1].tolist()
    with pytest.raises(IndexError):
        packs[len(packs)]
    for array in (packs.members, packs.offsets):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_equal_slots_keep_the_order_of_arrival():
    assert pack([4, 3, 4, 3], 100, multiple=4).members.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("scale", [1, 300, 10**6])
def test_long_lengths_sort_alike(scale):
    lengths = np.random.default_rng(0).integers(1, 1000, 2000)
    packs = pack(lengths * scale, 1000 * scale)
    assert packs.members.tolist() == pack(lengths, 1000).members.tolist()


def test_members_dealt_in_chunks_are_the_same(monkeypatch):
    lengths = np.random.default_rng(0).integers(1, 30, 5000)
    whole = pack(lengths, 100)
    monkeypatch.setattr(runs, "_CHUNK", 50)
    assert pack(lengths, 100).members.tolist() == whole.members.tolist()
    ones = pack(np.ones(1000, np.int64), 300)
    assert sorted(ones.members.tolist()) == list(range(1000))


@pytest.mark.parametrize("name", ["read_sanskrit.csv", "dialog_mandarin.csv", "meeting_english.csv"])
@pytest.mark.parametrize("capacity", [4096, 8192])
def test_real_lengths_need_no_more_packs_than_the_bound(name, capacity, real_lengths):
    packs = pack(real_lengths(name), capacity, exact=True)
    assert len(packs) == packs.bound
