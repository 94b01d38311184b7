"""Histogram against plain counting, and its laws."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfp8.errors import LengthError
from packfp8.lengths import histogram as module
from packfp8.lengths.histogram import Histogram

lengths = st.lists(st.integers(1, 60), max_size=40)


def counted(histogram: Histogram) -> dict[int, int]:
    return dict(zip(histogram.lengths.tolist(), histogram.counts.tolist()))


@given(lengths)
def test_a_histogram_counts_each_length(values):
    histogram = Histogram.of(values)
    assert counted(histogram) == Counter(values)
    assert list(histogram.lengths) == sorted(set(values))
    assert (histogram.examples, histogram.tokens) == (len(values), sum(values))
    assert histogram.longest == max(values, default=0)


@given(lengths, lengths, lengths)
def test_adding_is_counting_both_and_its_order_does_not_matter(a, b, c):
    one, two, three = map(Histogram.of, (a, b, c))
    assert one + two == Histogram.of(a + b) == two.merge(one)
    assert (one + two) + three == one + (two + three)
    assert one + Histogram.of([]) == one


@given(lengths, st.integers(1, 16))
def test_aligning_is_rounding_each_length_up(values, multiple):
    slots = [-(-value // multiple) * multiple for value in values]
    assert Histogram.of(values).aligned(multiple) == Histogram.of(slots)


@given(lengths)
def test_the_dense_array_goes_there_and_back_and_adds_up(values):
    histogram = Histogram.of(values)
    dense = histogram.dense(61)
    assert dense.tolist() == np.bincount(np.array(values, np.int64), minlength=61).tolist()
    assert Histogram.from_dense(dense) == histogram
    assert Histogram.from_dense(dense + dense) == histogram + histogram


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.float64])
def test_every_kind_of_number_counts_alike(dtype):
    values = np.array([3, 200, 3, 7], dtype=dtype)
    assert counted(Histogram.of(values)) == {3: 2, 7: 1, 200: 1}


def test_chunks_and_very_long_lengths_count_alike(monkeypatch):
    values = np.random.default_rng(0).integers(1, 50, 1000)
    whole = Histogram.of(values)
    monkeypatch.setattr(module, "_CHUNK", 64)
    assert Histogram.of(values) == whole
    monkeypatch.setattr(module, "_DENSE", 20)
    assert Histogram.of(values) == whole
    assert counted(Histogram.of([10**12, 5, 10**12])) == {5: 1, 10**12: 2}


def test_the_arrays_cannot_be_changed_and_are_not_the_callers():
    given_lengths, given_counts = np.array([1, 5]), np.array([2, 3])
    histogram = Histogram(lengths=given_lengths, counts=given_counts)
    given_lengths[0] = 4
    assert counted(histogram) == {1: 2, 5: 3}
    with pytest.raises(ValueError, match="read-only"):
        histogram.lengths[0] = 9
    assert pickle.loads(pickle.dumps(histogram)) == histogram


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), 2.5, -2.86])
def test_an_impossible_length_is_named_by_its_index(bad, five_lines):
    with pytest.raises(LengthError) as raised:
        Histogram.of([7, 9, bad, 0])
    five_lines(
        raised.value,
        what="length 2 is not a sequence's length",
        got=str(bad),
        expected="a whole number of tokens, at least 1",
        because="no slot",
        fix="set such examples aside",
    )


def test_the_index_of_a_bad_length_counts_from_the_start_of_the_array(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 4)
    with pytest.raises(LengthError, match="length 10 is not"):
        Histogram.of([5] * 10 + [0] + [5] * 10)


@pytest.mark.parametrize("bad", [["a", "b"], [None, 3], [[1, 2], [3, 4]], 5, [True, False], [2**70]])
def test_what_is_no_list_of_numbers_is_refused(bad):
    with pytest.raises(LengthError, match="the lengths are not a list of whole numbers"):
        Histogram.of(bad)


@pytest.mark.parametrize(
    ("lengths", "counts"), [([5, 3], [1, 1]), ([3, 3], [1, 1]), ([0, 3], [1, 1]), ([3], [0]), ([3, 4], [1])]
)
def test_arrays_that_make_no_histogram_are_refused(lengths, counts, five_lines):
    with pytest.raises(LengthError) as raised:
        Histogram(lengths=lengths, counts=counts)
    five_lines(
        raised.value,
        what="the arrays do not make a histogram",
        got=f"lengths {lengths}, counts {counts}",
        expected="ascending from 1",
        because="counted wrongly",
        fix="Histogram.of",
    )


def test_a_dense_array_too_small_is_refused_one_below_its_least_size(five_lines):
    histogram = Histogram.of([3, 8])
    assert histogram.dense(9)[8] == 1
    with pytest.raises(LengthError) as raised:
        histogram.dense(8)
    five_lines(
        raised.value,
        what="does not fit a dense array",
        got="longest length 8, size 8",
        expected="at least 9",
        because="entry n",
        fix="agree on one size",
    )
