"""Frames of clips in one row: constant shapes, each frame where it was, the rest cut off; one frame below the bound fails."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfp8.errors import BudgetError
from packfp8.layout import make_plan
from packfp8.rule import Topology, align


def rule_of(cp, rank=0):
    return align("block", Topology(cp=cp, cp_rank=rank))


@st.composite
def packs(draw):
    """Lengths of sequences, and spans of clips in them: several in one, or none."""
    lengths, spans = [], []
    for sequence in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, 3))
        for frames in draw(st.lists(st.integers(1, 9), max_size=3)):
            spans.append((sequence, at, frames))
            at += frames + draw(st.integers(0, 3))
        lengths.append(at + 1)
    return lengths, spans


@given(packs(), st.sampled_from([1, 2, 4]), st.integers(0, 20))
def test_each_frame_stands_where_it_stands_with_a_row_for_each_clip(pack, cp, more):
    lengths, spans = pack
    budget = sum(frames + 1 for *_, frames in spans) + more
    for rank in range(cp):
        plain = make_plan(lengths, spans, rule_of(cp, rank))
        plan = make_plan(lengths, spans, rule_of(cp, rank), frame_budget=budget)
        tokens, here = plain.index.size, len(plain.audio_source)
        assert plan.audio_source.shape == plan.audio_destination.shape == (budget,)
        assert plan.audio_source.dtype == plan.audio_destination.dtype == np.int64
        assert plan.audio_destination.tolist() == plain.audio_destination.tolist() + [tokens] * (budget - here)
        assert set(plan.audio_source[here:].tolist()) <= {budget}
        assert plan.frames_max == budget
        assert plan.frames_sent == plan.frames_received == tuple(budget * (r == rank) for r in range(cp))
        assert plan.clips.tolist() == plain.clips.tolist()
        row = [(-1, -1)] * budget  # the encoder's row: which frame of which clip each row is
        at = 0
        for n in plan.clips.tolist():
            row[at : at + spans[n][2]] = [(n, frame) for frame in range(spans[n][2])]
            at += spans[n][2] + 1
        rows = [(n, frame) for n in plain.clips.tolist() for frame in range(plain.frames_max)]
        assert [row[n] for n in plan.audio_source[:here]] == [rows[n] for n in plain.audio_source]


def test_a_pack_of_exactly_the_frame_budget_fits_and_one_frame_less_is_refused(five_lines):
    spans = [(0, 0, 4), (1, 2, 3)]
    assert make_plan([5, 6], spans, rule_of(1), frame_budget=9).audio_source.tolist() == [0, 1, 2, 3, 5, 6, 7, 9, 9]
    with pytest.raises(BudgetError) as caught:
        make_plan([5, 6], spans, rule_of(1), frame_budget=8)
    five_lines(
        caught.value,
        what="the clips do not fit the frame budget of the pack",
        got="9 encoder frames in the rooms of 2 clips",
        expected="at most 8",
        because="the encoder's input has one shape, and audio is never cut",
        fix="give fewer clips, or raise frame_budget",
    )


def test_a_pack_without_clips_is_sentinels_alone():
    plan = make_plan([5], [], rule_of(1), frame_budget=3)
    assert (plan.audio_source.tolist(), plan.audio_destination.tolist()) == ([3] * 3, [16] * 3)
