"""A tally is a sum of examples: in any order, in any parts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfp8.errors import ConfigError
from packfp8.lengths import AudioFrames, Histogram
from packfp8.report.counting import SAMPLE_RATE, Counting, load_tokenizer
from packfp8.report.tally import MOST, NOTHING, Rejected, Tally

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=60)


def _tally(examples):
    frames, text = np.array(examples, dtype=np.int64).reshape(-1, 2).T
    return Tally.of(frames, text)


@given(pairs, st.integers(0, 60), st.randoms(use_true_random=False))
def test_the_tally_of_parts_is_the_sum_of_theirs_in_any_order(examples, cut, rng):
    shuffled = rng.sample(examples, len(examples))
    parts = [_tally(shuffled[:cut]), NOTHING, _tally(shuffled[cut:])]
    assert Tally.total(parts) == _tally(examples)
    assert Tally.total(parts).examples == len(examples)


@given(pairs.filter(bool), st.integers(1, 30))
def test_lengths_are_frames_and_text_and_prompt(examples, prompt):
    assert _tally(examples).histogram(prompt) == Histogram.of(np.array([f + t + prompt for f, t in examples]))


def test_the_first_token_of_a_sequence_is_nobodys_label():
    tally = _tally([(0, 5), (3, 5)])
    assert tally.supervised().tolist() == [4, 5]
    assert tally.supervised(prompt_tokens=2).tolist() == [5, 5]


def test_the_largest_pair_keeps_its_two_numbers():
    tally = _tally([(MOST, MOST), (0, MOST), (MOST, 0)])
    assert tally.encoder_frames.tolist() == [0, MOST, MOST]
    assert tally.text_tokens.tolist() == [MOST, 0, MOST]


def test_rejected_lines_add_up_and_ten_keep_their_names():
    six = Rejected(count=6, named=tuple(f"f:{n}" for n in range(6)))
    assert six + six == Rejected(count=12, named=tuple(f"f:{n}" for n in [*range(6), *range(4)]))


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=20))
def test_seconds_give_the_frames_of_the_linear_encoder(samples):
    seconds = np.array(samples) / SAMPLE_RATE
    assert (
        Counting.of("12.5").encoder_frames(seconds).tolist()
        == AudioFrames.per_second("12.5").encoder_frames(np.array(samples)).tolist()
    )


def test_frames_are_counted_in_integers_where_floating_point_is_one_off():
    assert int(12.5 * 4.56) == 56
    assert Counting().encoder_frames(np.array([4.56])).tolist() == [57]


def test_any_rate_counts_the_whole_frames():
    assert Counting.of("8.333333").encoder_frames(np.array([3.0, 12.0])).tolist() == [24, 99]


def test_seconds_that_cannot_be_are_marked():
    assert Counting().encoder_frames(np.array([np.nan, np.inf, -1.0, 0.0, 1e12, 1e-9])).tolist() == [-1] * 6


def test_text_is_estimated_from_its_bytes_or_counted_by_a_tokenizer():
    assert Counting().text_counter()("fünfzehn bytes") == 15 // 4
    assert Counting.of(tokenizer="bytes").text_counter()("fünf") == 5
    assert Counting.of(tokenizer="packfp8.lengths:ByteTokenizer").text_counter()("fünf") == 5
    assert "floor(12.5 frames/s * seconds)" in str(Counting())


@pytest.mark.parametrize(
    "settings",
    [
        {"frames_per_second": 0},
        {"frames_per_second": "fast"},
        {"frames_per_second": 1e9},
        {"prompt_tokens": -1},
        {"prompt_tokens": 1.5},
        {"tokenizer": "no_such_module:thing"},
        {"tokenizer": 7},
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_told(settings, lines_of):
    with pytest.raises(ConfigError) as caught:
        Counting.of(**settings)
    lines_of(caught.value)


def test_a_missing_tokenizer_is_told_by_its_name(lines_of):
    with pytest.raises(ConfigError) as caught:
        load_tokenizer("/nowhere/tokenizer.json:x")
    assert "/nowhere/tokenizer.json:x" in lines_of(caught.value)[0]
