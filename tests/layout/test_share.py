"""Sharing the encoder over CP ranks: each clip once, evenly, and what is sent is what is received."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfp8.layout import make_plan
from packfp8.layout.share import encoder_of
from packfp8.rule import Topology, align


@st.composite
def packs(draw):
    """(lengths, clips, cp, layout): sequences with none, one or two clips each, not touching."""
    lengths, clips = [], []
    for n in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, 3))
        for _ in range(draw(st.integers(0, 2))):
            frames = draw(st.integers(1, 30))
            clips.append((n, at, frames))
            at += frames + draw(st.integers(0, 3))
        lengths.append(at + draw(st.integers(1, 4)))
    return lengths, clips, draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(["thd", "bshd"]))


def plans_of(lengths, clips, cp, layout, **options):
    rules = [align("bf16", Topology(cp=cp, cp_rank=rank), layout=layout) for rank in range(cp)]
    return [make_plan(lengths, clips, rule, **options) for rule in rules]


def encoded(plan, clips):
    """What an encoder gives for the plan's clips, flattened: (clip, frame) of each row, (-1, -1) for rows of padding."""
    rows = np.full((len(plan.clips), plan.frames_max, 2), -1)
    for row, clip in zip(rows, plan.clips):
        row[: clips[clip][2]] = [(clip, frame) for frame in range(clips[clip][2])]
    return rows.reshape(-1, 2)


def exchanged(plans, clips):
    """Each rank's rows after an all-to-all of what the plans say."""
    sent = [np.split(encoded(p, clips)[p.audio_source], np.cumsum(p.frames_sent)[:-1]) for p in plans]
    return [np.concatenate([sent[source][rank] for source in range(len(plans))]) for rank in range(len(plans))]


@given(packs())
def test_every_token_gets_the_frame_that_it_gets_where_every_rank_encodes_what_it_holds(pack):
    clips = pack[1]
    shared = plans_of(*pack, share_encoder=True)
    for rows, plan, whole in zip(exchanged(shared, clips), shared, plans_of(*pack)):
        tokens, expected = np.full((2, len(plan.index), 2), -1)
        tokens[plan.audio_destination] = rows
        expected[whole.audio_destination] = encoded(whole, clips)[whole.audio_source]
        assert np.array_equal(tokens, expected)
        assert len(rows) == len(plan.audio_destination) == len(set(plan.audio_destination.tolist()))


@given(packs())
def test_each_clip_is_encoded_once_and_each_frame_sent_once(pack):
    clips = pack[1]
    plans = plans_of(*pack, share_encoder=True)
    assert sorted(np.concatenate([plan.clips for plan in plans]).tolist()) == list(range(len(clips)))
    for sender, plan in enumerate(plans):
        assert sum(plan.frames_sent) == len(plan.audio_source) == sum(clips[clip][2] for clip in plan.clips)
        for receiver, other in enumerate(plans):
            assert plan.frames_sent[receiver] == other.frames_received[sender]


@given(packs())
def test_without_sharing_or_with_one_rank_nothing_travels(pack):
    lengths, clips, _, layout = pack
    for rank, plan in enumerate(plans_of(*pack)):
        assert sum(plan.frames_sent) == plan.frames_sent[rank] == len(plan.audio_source)
        assert plan.frames_received == plan.frames_sent
    (one,), (alone,) = plans_of(lengths, clips, 1, layout, share_encoder=True), plans_of(lengths, clips, 1, layout)
    assert one.audio_source.tolist() == alone.audio_source.tolist()
    assert one.audio_destination.tolist() == alone.audio_destination.tolist()


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.integers(1, 8))
def test_the_fullest_rank_has_at_most_a_third_more_than_it_must(frames, ranks):
    load = np.bincount(encoder_of(np.array(frames), ranks), weights=frames, minlength=ranks)
    ordered = sorted(frames, reverse=True)
    two = ordered[ranks - 1] + ordered[ranks] if len(frames) > ranks else 0
    must = max(sum(frames) / ranks, max(frames), two)
    assert load.sum() == sum(frames)
    assert load.max() <= 4 / 3 * must


def test_sharing_is_part_of_the_checksum():
    pack = ([40, 9], [(0, 2, 30)], 2, "thd")
    assert plans_of(*pack)[0].checksum != plans_of(*pack, share_encoder=True)[0].checksum
    assert len({plan.checksum for plan in plans_of(*pack, share_encoder=True)}) == 1


@pytest.mark.parametrize("cp", [2, 4])
def test_what_sharing_saves_is_the_clips_that_lie_on_several_ranks(cp):
    lengths, clips = [200] * 8, [(n, 4, 150) for n in range(8)]
    twice = sum(len(plan.clips) for plan in plans_of(lengths, clips, cp, "thd"))
    once = sum(len(plan.clips) for plan in plans_of(lengths, clips, cp, "thd", share_encoder=True))
    assert (twice, once) == (8 * cp, 8)
