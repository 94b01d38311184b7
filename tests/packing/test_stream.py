"""StreamPacker against its rules played literally, and its promises: conservation, limits, waiting, state."""

from __future__ import annotations

import copy
import json
import pickle
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packfp8.errors import BudgetError, ConfigError, LengthError, StateError
from packfp8.packing import StreamPacker, pack

streams = st.lists(st.integers(1, 24), max_size=60)
shapes = st.tuples(st.integers(24, 60), st.integers(1, 4), st.integers(1, 7), st.integers(1, 9) | st.none())


class Literal:
    """The rules of the stream packer, played with lists and all subsets."""

    def __init__(self, capacity, multiple, lookahead, most):
        self.units, self.multiple, self.lookahead = capacity // multiple, multiple, lookahead
        self.most = most or self.units
        self.waiting: list[tuple[int, int]] = []  # (key, size), oldest first
        self.arrived = 0
        self.open: list[tuple[int, int]] = []
        self.closed: list[list[int]] = []

    def push(self, key, length):
        self.waiting.append((key, -(-length // self.multiple)))
        self.arrived += 1
        if self.open:
            self.step(ending=False)
        while self.waiting and self.arrived - self.waiting[0][0] > self.lookahead:
            self.step(ending=False)

    def flush(self):
        while self.waiting:
            self.step(ending=True)
        if self.open:
            self.close()

    def step(self, ending):
        room = self.units - sum(size for _, size in self.open)
        slots = self.most - len(self.open)
        sizes = [size for _, size in self.waiting]
        if not self.open:
            return self.take(self.waiting[0])
        if sizes[0] <= room:
            if ending:
                far = sum(sizes) <= room and len(sizes) <= slots
            elif slots <= 3:
                far = slots * max(sizes) <= room
            else:
                far = room - sizes[0] >= 3 * sum(sizes) / len(sizes)
            if far:
                return self.take(self.waiting[0])
        best = self.best(sizes, room, slots)
        if not best:
            return self.close()
        exact = sum(sizes[place] for place in best) == room and len(best) <= slots
        for one in [self.waiting[place] for place in best][: None if exact else 1]:
            self.take(one)
        return None

    @staticmethod
    def best(sizes, room, slots):
        """The fullest set, as old as can be; within the slots left, as far as these are few."""
        fitting = [
            places
            for number in range(len(sizes) + 1)
            for places in combinations(range(len(sizes)), number)
            if sum(sizes[place] for place in places) <= room
        ]

        def total(places):
            return sum(sizes[place] for place in places)

        top = max(map(total, fitting))
        free = min((places for places in fitting if total(places) == top), key=lambda places: places[::-1])
        if len(free) <= slots or slots > 8:
            return free
        fitting = [places for places in fitting if len(places) <= slots]
        top = max(map(total, fitting))
        equal = [places for places in fitting if total(places) == top]
        if top == room:
            newest = min(places[-1] for places in equal)
            equal = [places for places in equal if places[-1] == newest]
        return min(equal, key=lambda places: (len(places), places[::-1]))

    def take(self, one):
        self.waiting.remove(one)
        self.open.append(one)
        if sum(size for _, size in self.open) == self.units or len(self.open) == self.most:
            self.close()

    def close(self):
        self.closed.append([key for key, _ in self.open])
        self.open = []


@given(st.lists(st.integers(1, 24), min_size=12, max_size=80), shapes)
@settings(max_examples=250)
def test_the_packs_are_those_of_the_rules_played_literally(lengths, shape):
    capacity, multiple, lookahead, most = shape
    packer = StreamPacker(capacity * multiple, multiple, lookahead, most)
    literal = Literal(capacity * multiple, multiple, lookahead, most)
    for key, length in enumerate(lengths):
        packer.push(key, length)
        literal.push(key, length)
        popped = []
        while (one := packer.pop()) is not None:
            popped.append(one)
        assert popped == literal.closed
        literal.closed.clear()
    packer.flush()
    literal.flush()
    assert [packer.pop() for _ in literal.closed] == literal.closed
    assert packer.pop() is None


@given(streams, shapes)
def test_every_key_comes_out_once_and_no_pack_is_over_its_limits(lengths, shape):
    capacity, multiple, lookahead, most = shape
    packer = StreamPacker(capacity * multiple, multiple, lookahead, most)
    for key, length in enumerate(lengths):
        packer.push(key, length)
        assert len(packer) == key + 1
    packer.flush()
    packs = []
    while (one := packer.pop()) is not None:
        packs.append(one)
    assert sorted(key for one in packs for key in one) == list(range(len(lengths)))
    assert len(packer) == 0
    for one in packs:
        assert sum(-(-lengths[key] // multiple) * multiple for key in one) <= capacity * multiple
        assert 1 <= len(one) <= (most or len(lengths))


def waits(packer, lengths) -> list[tuple[int, int]]:
    """(pushes between an example's own and that which closed its pack, examples in the pack) of each example."""
    seen = []
    for now, length in enumerate(lengths):
        packer.push(now, length)
        while (one := packer.pop()) is not None:
            seen += [(now - key, len(one)) for key in one]
    return seen


@given(st.lists(st.integers(1, 24), min_size=30, max_size=120), shapes)
def test_nobody_waits_longer_than_the_lookahead_and_one_pack(lengths, shape):
    capacity, multiple, lookahead, most = shape
    for wait, pack_size in waits(StreamPacker(capacity * multiple, multiple, lookahead, most), lengths):
        assert wait <= lookahead + pack_size


@pytest.mark.parametrize("capacity", [700, 4096, 32_768])
def test_nobody_waits_longer_on_long_streams_either(capacity):
    lengths = np.clip(np.exp(np.random.default_rng(1).normal(5.5, 0.9, 20_000)), 4, 700).astype(int).tolist()
    seen = waits(StreamPacker(capacity), lengths)
    assert len(seen) > 19_000
    assert all(wait <= 256 + pack_size for wait, pack_size in seen)


@given(st.lists(st.integers(1, 30), max_size=40), shapes)
def test_a_state_saved_at_any_step_continues_byte_for_byte(lengths, shape):
    capacity, multiple, lookahead, most = shape
    made_with = (capacity * multiple // 2, multiple, lookahead, most, "set_aside")
    packer = StreamPacker(*made_with)
    saved = [json.dumps(packer.state_dict())]
    popped = []  # packs out by the time of each state
    packs: list[list[int]] = []
    for key, length in enumerate(lengths):
        popped.append(len(packs))
        packer.push(key, length)
        if key % 2 and (one := packer.pop()) is not None:
            packs.append(one)
        saved.append(json.dumps(packer.state_dict()))
    for step in range(len(lengths)):
        other = StreamPacker(*made_with)
        other.load_state_dict(json.loads(saved[step]))
        again = []
        for key in range(step, len(lengths)):
            assert json.dumps(other.state_dict()) == saved[key]
            other.push(key, lengths[key])
            if key % 2 and (one := other.pop()) is not None:
                again.append(one)
        assert json.dumps(other.state_dict()) == saved[-1]
        assert again == packs[popped[step] :]
        assert other.set_aside == packer.set_aside


def test_a_state_is_small_and_not_tied_to_the_packer():
    packer = StreamPacker(4096)
    for key in range(100_000):
        packer.push(key, 40 + key * 7 % 500)
        packer.pop()
    state = packer.state_dict()
    before = copy.deepcopy(state)
    for key in range(1000):
        packer.push(key, 77)
    assert state == before
    assert len(json.dumps(state)) < 10_000


def test_a_packer_is_picklable_with_its_state(packed):
    lengths = np.random.default_rng(0).integers(1, 99, 500).tolist()
    packer = StreamPacker(300, lookahead=20)
    for key, length in enumerate(lengths):
        packer.push(key, length)
    other = pickle.loads(pickle.dumps(packer))
    assert packed(other, lengths) == packed(packer, lengths)


@pytest.mark.parametrize(
    ("name", "value"),
    [("capacity", 50), ("multiple", 3), ("lookahead", 9), ("max_sequences", 4), ("over_budget", "set_aside")],
)
def test_a_state_of_other_settings_is_refused(name, value, five_lines):
    saved = {"capacity": 60, "multiple": 1, "lookahead": 8, "max_sequences": 5, "over_budget": "error"}
    state = StreamPacker(**saved).state_dict()
    with pytest.raises(StateError) as raised:
        StreamPacker(**(saved | {name: value})).load_state_dict(state)
    five_lines(
        raised.value,
        what="saved by a StreamPacker with other settings",
        got=f"{name} {saved[name]!r}",
        expected=name,
        because="other packs",
        fix="resume with the settings",
    )


@pytest.mark.parametrize("state", [{}, None, [1], {"settings": {}, "lookahead": {}}])
def test_what_is_no_state_is_refused(state, five_lines):
    with pytest.raises(StateError) as raised:
        StreamPacker(60).load_state_dict(state)
    five_lines(
        raised.value,
        what="not a state of StreamPacker",
        got="no ",
        expected="state_dict()",
        because="not whole",
        fix="unchanged",
    )


def test_a_sequence_of_exactly_the_capacity_fits_and_one_more_token_is_refused(five_lines, packed):
    assert packed(StreamPacker(20), [20]) == [[0]]
    packer = StreamPacker(22, multiple=4)
    with pytest.raises(BudgetError) as raised:
        packer.push("cut-7", 21)
    five_lines(
        raised.value,
        what="example 'cut-7' is longer than a pack",
        got="21 tokens, a slot of 24",
        expected="at most 20 tokens",
        because="never cut",
        fix="set over-long examples aside",
    )
    assert len(packer) == 0


def test_what_is_set_aside_is_listed_with_its_reason_and_the_rest_goes_on(packed):
    packer = StreamPacker(20, over_budget="set_aside")
    assert packed(packer, [21, 10, 121, 10]) == [[1, 3]]
    assert [(one.key, one.length) for one in packer.set_aside] == [(0, 21), (2, 121)]
    assert packer.set_aside[1].reason == "121 tokens, a slot of 121; at most 20 tokens"


def test_an_unknown_policy_is_refused(five_lines):
    with pytest.raises(ConfigError) as raised:
        StreamPacker(20, over_budget="truncate")
    five_lines(
        raised.value,
        what="over_budget is not a policy",
        got="'truncate'",
        expected="error or set_aside",
        because="never cut or lost",
        fix="set over_budget",
    )


@pytest.mark.parametrize("name", ["capacity", "multiple", "lookahead", "max_sequences"])
@pytest.mark.parametrize("bad", [0, -1, 1.5, "4"])
def test_a_setting_that_is_no_count_is_named(name, bad):
    with pytest.raises(ConfigError, match=f"{name} is not a count"):
        StreamPacker(**({"capacity": 20} | {name: bad}))


@pytest.mark.parametrize("bad", [0, -2.86, 0.0, None, float("nan"), 2.5, True, "7"])
def test_an_impossible_length_is_named_by_its_key_and_changes_nothing(bad, five_lines):
    packer = StreamPacker(20)
    with pytest.raises(LengthError) as raised:
        packer.push("cut-3", bad)
    five_lines(
        raised.value,
        what="example 'cut-3' has no usable length",
        got=repr(bad),
        expected="at least 1",
        because="no slot",
        fix="set such examples aside",
    )
    assert packer.state_dict() == StreamPacker(20).state_dict()


def test_an_endless_stream_whose_lengths_never_fit_exactly_is_emitted(drain):
    packer = StreamPacker(4095)
    packs = []
    for key in range(20_000):
        packer.push(key, 250 + key * 74 % 202 // 2 * 2)  # even lengths, odd capacity
        packs += drain(packer)
        assert len(packer) <= 256 + 17
    assert sum(map(len, packs)) > 19_700
    assert {len(one) for one in packs} <= set(range(9, 17))


def test_equal_lengths_are_packed_as_many_as_fit(packed):
    packs = packed(StreamPacker(4096), [1000] * 1001)
    assert [len(one) for one in packs] == [4] * 250 + [1]


def test_nothing_comes_out_of_nothing(packed):
    assert packed(StreamPacker(20), []) == []
    assert packed(StreamPacker(20), [3]) == [[0]]


def test_packing_goes_on_after_a_flush(packed):
    packer = StreamPacker(100, lookahead=4)
    lengths = [30, 50, 20, 60, 40, 10] * 5
    assert packed(packer, lengths) == packed(packer, lengths)


def test_arrival_order_holds_while_the_pack_is_far_from_full(packed):
    lengths = np.random.default_rng(0).integers(150, 250, 5000).tolist()
    packs = packed(StreamPacker(131_072), lengths)
    assert packs[0][:600] == list(range(600))


@pytest.mark.parametrize("multiple", [1, 4, 64])
@pytest.mark.parametrize("capacity", [2048, 4096, 4097, 8191, 32_768, 131_072])
def test_any_budget_is_filled_to_the_last_unit(capacity, multiple, packed):
    lengths = np.random.default_rng(0).integers(60, 542, 30_000).tolist()
    packs = packed(StreamPacker(capacity, multiple), lengths)
    slots = [sum(-(-lengths[key] // multiple) * multiple for key in one) for one in packs]
    assert sum(slots[:-1]) >= 0.9998 * (len(slots) - 1) * (capacity // multiple * multiple)


def test_where_the_number_of_sequences_limits_the_packs_each_has_that_number(packed):
    lengths = np.random.default_rng(0).integers(60, 542, 3000).tolist()
    packs = packed(StreamPacker(32_768, max_sequences=64), lengths)
    assert [len(one) for one in packs] == [64] * 46 + [56]


@pytest.mark.parametrize("name", ["read_sanskrit.csv", "dialog_mandarin.csv", "meeting_english.csv"])
@pytest.mark.parametrize("capacity", [4096, 8192])
def test_real_lengths_fill_every_pack_before_the_last(name, capacity, real_lengths, packed):
    lengths = real_lengths(name)
    packs = packed(StreamPacker(capacity), lengths)
    slots = [sum(lengths[key] for key in one) for one in packs]
    assert sum(slots[:-1]) >= 0.999 * (len(slots) - 1) * capacity
    assert len(packs) == pack(lengths, capacity).bound
