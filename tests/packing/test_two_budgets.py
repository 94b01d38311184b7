"""Two budgets at once: packs within tokens, encoder frames and sequences; full in that which is short; none of it lost."""

from __future__ import annotations

import json
import random
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packfp8.errors import BudgetError, ConfigError, LengthError, StateError
from packfp8.packing import RowPacker, StreamPacker

examples = st.lists(st.tuples(st.integers(1, 24), st.one_of(st.just(0), st.integers(0, 12))), max_size=60)
shapes = st.tuples(
    st.integers(24, 60), st.integers(1, 4), st.integers(1, 7), st.integers(1, 9) | st.none(), st.integers(12, 40)
)


class Rows:
    """A rule for padded batches: B * S in multiples of 4."""

    def row(self, batch: int) -> int:
        """Return the least S for `batch` rows."""
        return (4, 2, 4, 1)[batch % 4 - 1]


@pytest.fixture(scope="module")
def paired(drain):
    """paired(packer, [(tokens, frames), ...]): all packs of a stream whose keys are 0, 1, 2, ..."""

    def run(packer, examples) -> list[list[int]]:
        packs = []
        for key, (length, frames) in enumerate(examples):
            packer.push(key, length, frames)
            packs += drain(packer)
        packer.flush()
        return packs + drain(packer)

    return run


def packer_of(shape, **options) -> StreamPacker:
    capacity, multiple, lookahead, most, frame_budget = shape
    return StreamPacker(capacity * multiple, multiple, lookahead, most, **{"frame_budget": frame_budget, **options})


@given(examples, shapes)
@settings(max_examples=200)
def test_every_key_comes_out_once_and_no_pack_is_over_any_of_its_three_limits(paired, examples, shape):
    capacity, multiple, _, most, frame_budget = shape
    packs = paired(packer_of(shape), examples)
    assert sorted(key for pack in packs for key in pack) == list(range(len(examples)))
    for pack in packs:
        assert sum(-(-examples[key][0] // multiple) for key in pack) <= capacity
        assert sum(examples[key][1] for key in pack) <= frame_budget
        assert 1 <= len(pack) <= (most or len(examples))


@given(examples, shapes)
@settings(max_examples=200)
def test_a_pack_is_closed_only_when_nobody_who_waits_fits_in_it(drain, examples, shape):
    capacity, multiple, _, most, frame_budget = shape
    packer, waiting = packer_of(shape), {}
    for key, (length, frames) in enumerate(examples):
        packer.push(key, length, frames)
        waiting[key] = (-(-length // multiple), frames)
        for pack in drain(packer):
            taken = [waiting.pop(one) for one in pack]
            units = capacity - sum(size for size, _ in taken)
            left = frame_budget - sum(frames for _, frames in taken)
            if len(pack) < (most or capacity):
                assert not [one for one in waiting.values() if one[0] <= units and one[1] <= left]


@given(st.lists(st.tuples(st.integers(1, 24), st.integers(0, 12)), min_size=30, max_size=120), shapes)
def test_nobody_waits_longer_than_the_lookahead_and_one_pack(drain, examples, shape):
    packer = packer_of(shape)
    for now, (length, frames) in enumerate(examples):
        packer.push(now, length, frames)
        for pack in drain(packer):
            assert all(now - key <= shape[2] + len(pack) for key in pack)


@given(examples, shapes)
def test_a_state_saved_at_any_step_continues_byte_for_byte(drain, examples, shape):
    packer = packer_of(shape, over_budget="set_aside", frame_budget=min(shape[-1], 9))
    saved, popped = [json.dumps(packer.state_dict())], [[]]
    for key, (length, frames) in enumerate(examples):
        packer.push(key, length, frames)
        popped.append(drain(packer) if key % 2 else [])
        saved.append(json.dumps(packer.state_dict()))
    for step in range(len(examples)):
        other = packer_of(shape, over_budget="set_aside", frame_budget=min(shape[-1], 9))
        other.load_state_dict(json.loads(saved[step]))
        for key in range(step, len(examples)):
            assert json.dumps(other.state_dict()) == saved[key]
            other.push(key, *examples[key])
            assert (drain(other) if key % 2 else []) == popped[key + 1]
        assert json.dumps(other.state_dict()) == saved[-1]


# -- without a frame budget -------------------------------------------------------------------------------------------


@given(examples, shapes)
def test_a_frame_budget_that_nothing_meets_changes_no_pack(paired, examples, shape):
    assert paired(packer_of(shape, frame_budget=10**9), examples) == paired(packer_of(shape, frame_budget=None), examples)


@pytest.mark.parametrize(
    ("capacity", "multiple", "lookahead", "most", "packs", "checksum"),
    [
        (4096, 1, 256, None, 313, 218747106),
        (8192, 16, 64, None, 161, 180479576),
        (2048, 4, 256, 7, 629, 4196823909),
        (32_768, 1, 256, 64, 63, 3825181289),
        (4095, 1, 16, 12, 340, 2254569580),
    ],
)
def test_without_a_frame_budget_the_packs_are_those_recorded_before_there_was_one(
    paired, capacity, multiple, lookahead, most, packs, checksum
):
    examples = [(20 + key * key * 7919 % 601, key % 50) for key in range(4000)]
    made = paired(StreamPacker(capacity, multiple, lookahead, most), examples)
    assert (len(made), zlib.crc32(repr(made).encode())) == (packs, checksum)


def test_without_a_frame_budget_frames_are_not_counted(paired):
    assert paired(StreamPacker(20), [(10, 10**9), (10, 10**9)]) == [[0, 1]]


# -- how full ---------------------------------------------------------------------------------------------------------


def mixed(kind: str, num: int = 6000) -> list[tuple[int, int]]:
    """(tokens, frames) of examples of 5 to 400 frames, and as much text as the kind of corpus has."""
    draw = random.Random(kind)
    examples = []
    for key in range(num):
        frames = draw.randrange(5, 400)
        text = 24 + int(frames * draw.uniform(0.1, 0.5))
        if kind == "audio alone":
            text = 1
        if (kind == "text alone, one in two" and draw.random() < 0.5) or (kind == "text and audio in runs" and key // 40 % 2):
            text, frames = frames + text, 0
        examples.append((text + frames, frames))
    return examples


def used(examples, packs) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and frames of each pack before the last."""
    return tuple(np.array([sum(examples[key][part] for key in pack) for pack in packs[:-1]]) for part in (0, 1))


@pytest.mark.parametrize("kind", ["text beside audio", "audio alone", "text alone, one in two", "text and audio in runs"])
def test_with_frames_at_their_95th_percentile_packs_are_as_full_of_tokens_as_without(kind, paired):
    examples = mixed(kind)
    _, frames = used(examples, paired(StreamPacker(8192), examples))
    budget = int(np.percentile(frames, 95))
    tokens, frames = used(examples, paired(StreamPacker(8192, frame_budget=budget), examples))
    assert tokens.mean() >= 0.9975 * 8192
    assert frames.max() <= budget


@pytest.mark.parametrize("kind", ["text beside audio", "audio alone", "text alone, one in two", "text and audio in runs"])
@pytest.mark.parametrize("budget", [1000, 2500])
def test_where_frames_always_bind_packs_are_full_of_frames(kind, budget, paired):
    examples = mixed(kind)
    packs = paired(StreamPacker(8192, frame_budget=budget), examples)
    _, frames = used(examples, packs)
    assert frames.mean() >= 0.998 * budget
    assert len(packs) <= 1.002 * sum(frames for _, frames in examples) / budget + 1


@pytest.mark.parametrize(
    ("waiting", "second"),
    [
        ([(10, 6), (10, 1), (10, 5), (10, 2)], 3),  # 1 is over in frames; of 2, 3 and 4, 3 leaves none unused
        ([(5, 5), (10, 5), (4, 9), (4, 9)], 2),  # frames are short: 1 and 2 close the pack, and 2 leaves no token unused
    ],
)
def test_what_closes_a_pack_by_one_budget_uses_up_the_other_as_far_as_can_be(waiting, second, drain):
    packer = StreamPacker(20, lookahead=3, frame_budget=10)
    for key, one in enumerate([(10, 5), *waiting]):
        packer.push(key, *one)
    assert drain(packer) == [[0, second]]


@pytest.mark.parametrize(
    ("kind", "over"),
    [("text beside audio", 2), ("audio alone", 1), ("text alone, one in two", 5), ("text and audio in runs", 3)],
)
def test_where_both_budgets_bind_alike_hardly_a_pack_is_over_their_bound(kind, over, paired):
    examples = mixed(kind, 20_000)
    tokens, frames = map(sum, zip(*examples))
    budget = round(8192 * frames / tokens)  # no room to spare in either
    packs = paired(StreamPacker(8192, frame_budget=budget), examples)
    assert len(packs) <= -(-tokens // 8192) + over


@pytest.mark.parametrize("name", ["read_sanskrit.csv", "dialog_mandarin.csv", "meeting_english.csv"])
def test_real_lengths_fill_packs_of_8192_with_frames_at_their_95th_percentile(name, real_parts, paired):
    corpus, draw = real_parts(name), random.Random(0)
    examples = [one for _ in range(30_000 // len(corpus)) for one in draw.sample(corpus, len(corpus))]  # shuffled epochs
    _, frames = used(examples, paired(StreamPacker(8192), examples))
    budget = int(np.percentile(frames, 95))
    tokens, frames = used(examples, paired(StreamPacker(8192, frame_budget=budget), examples))
    assert len(tokens) > 50
    assert tokens.mean() >= 0.995 * 8192
    assert frames.max() <= budget


@pytest.mark.parametrize("name", ["read_sanskrit.csv", "dialog_mandarin.csv", "meeting_english.csv"])
def test_real_lengths_as_recorded_fill_their_few_packs_too(name, real_parts, paired):
    """The last pack is not full: it has room for frames, so that the others need not be closed for want of them."""
    examples = list(real_parts(name))
    packs = paired(StreamPacker(8192), examples)
    budget = int(np.percentile([sum(examples[key][1] for key in pack) for pack in packs], 95))
    tokens, frames = used(examples, paired(StreamPacker(8192, frame_budget=budget), examples))
    assert tokens.mean() >= 0.995 * 8192
    assert frames.max() <= budget


# -- faults -----------------------------------------------------------------------------------------------------------


def test_audio_of_exactly_the_frame_budget_fits_and_one_more_frame_is_refused(five_lines, paired):
    assert paired(StreamPacker(20, frame_budget=7), [(10, 7)]) == [[0]]
    for packer in (StreamPacker(20, frame_budget=7), RowPacker(Rows(), 20, frame_budget=7)):
        with pytest.raises(BudgetError) as raised:
            packer.push("cut-7", 10, 8)
        five_lines(
            raised.value,
            what="example 'cut-7' has more audio than a pack may hold",
            got="8 encoder frames",
            expected="at most 7 encoder frames",
            because="a clip is never cut",
            fix="raise frame_budget",
        )
        assert len(packer) == 0


def test_what_has_too_much_audio_is_set_aside_with_its_reason_and_the_rest_goes_on(paired):
    packer = StreamPacker(20, over_budget="set_aside", frame_budget=7)
    assert paired(packer, [(10, 3), (10, 8), (10, 4)]) == [[0, 2]]
    assert [(one.key, one.length, one.reason) for one in packer.set_aside] == [
        (1, 10, "8 encoder frames; at most 7 encoder frames")
    ]


@pytest.mark.parametrize("bad", [-1, 2.5, 0.0, True, False, None, "7", float("nan")])
def test_an_impossible_number_of_frames_is_named_by_its_key_and_changes_nothing(bad, five_lines):
    for made in (lambda: StreamPacker(20, frame_budget=7), lambda: RowPacker(Rows(), 20, frame_budget=7)):
        packer = made()
        with pytest.raises(LengthError) as raised:
            packer.push("cut-3", 4, bad)
        five_lines(
            raised.value,
            what="example 'cut-3' has no usable number of encoder frames",
            got=repr(bad),
            expected="0 where there is no audio",
            because="those of every example are known",
            fix="AudioFrames",
        )
        assert packer.state_dict() == made().state_dict()


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "4"])
def test_a_frame_budget_that_is_no_count_is_named(bad, five_lines):
    for made in (lambda: StreamPacker(20, frame_budget=bad), lambda: RowPacker(Rows(), 20, frame_budget=bad)):
        with pytest.raises(ConfigError) as raised:
            made()
        five_lines(
            raised.value,
            what="frame_budget is not a count",
            got=repr(bad),
            expected="at least 1",
            because="frames",
            fix="set frame_budget",
        )


@pytest.mark.parametrize("other", [None, 8])
def test_a_state_of_another_frame_budget_is_refused(other, five_lines):
    for made in (lambda **given: StreamPacker(60, **given), lambda **given: RowPacker(Rows(), 60, **given)):
        with pytest.raises(StateError) as raised:
            made(frame_budget=other).load_state_dict(made(frame_budget=9).state_dict())
        five_lines(
            raised.value,
            what="with other settings",
            got="frame_budget 9",
            expected=f"frame_budget {other}",
            because="other packs",
            fix="resume with the settings",
        )


def test_a_state_from_before_there_were_frame_budgets_is_refused(five_lines):
    for packer in (StreamPacker(60), RowPacker(Rows(), 60)):
        state = packer.state_dict()
        del state["settings"]["frame_budget"]
        with pytest.raises(StateError) as raised:
            packer.load_state_dict(state)
        five_lines(
            raised.value,
            what="not a state of",
            got="no frame_budget",
            expected="state_dict() returned",
            because="not whole",
            fix="unchanged",
        )


# -- rows -------------------------------------------------------------------------------------------------------------


@given(examples, st.integers(24, 200), st.integers(1, 20), st.integers(1, 9) | st.none(), st.integers(12, 20))
def test_rows_lose_nothing_and_meet_all_three_limits(paired, examples, budget, lookahead, most, frame_budget):
    packs = paired(RowPacker(Rows(), budget, lookahead, most, frame_budget=frame_budget), examples)
    assert sorted(key for pack in packs for key in pack) == list(range(len(examples)))
    for pack in packs:
        row = Rows().row(len(pack))
        assert -(-max(examples[key][0] for key in pack) // row) * row * len(pack) <= budget
        assert sum(examples[key][1] for key in pack) <= frame_budget
        assert len(pack) <= (most or len(pack))


def test_rows_use_up_the_frame_budget_and_no_more(paired):
    examples = [(10, 3)] * 12
    assert [len(pack) for pack in paired(RowPacker(Rows(), 400, frame_budget=12), examples)] == [4, 4, 4]
    assert [len(pack) for pack in paired(RowPacker(Rows(), 400, frame_budget=11), examples)] == [3, 3, 3, 3]


@given(examples, st.integers(24, 80), st.integers(1, 9))
def test_a_frame_budget_that_nothing_meets_changes_no_rows(paired, examples, budget, lookahead):
    made = [paired(RowPacker(Rows(), budget, lookahead, frame_budget=one), examples) for one in (None, 10**9)]
    assert made[0] == made[1]


def test_rows_go_on_from_a_state_with_its_frames(paired):
    examples = [(3 + key * 7 % 20, key * 5 % 9) for key in range(60)]
    packer = RowPacker(Rows(), 80, lookahead=12, frame_budget=20)
    for key, one in enumerate(examples):
        packer.push(key, *one)
    other = RowPacker(Rows(), 80, lookahead=12, frame_budget=20)
    other.load_state_dict(json.loads(json.dumps(packer.state_dict())))
    assert paired(other, examples) == paired(packer, examples)
