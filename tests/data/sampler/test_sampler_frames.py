"""The sampler's frame budget: what it counts, that no pack is over it, and that the collator's is the same."""

import pytest

from packfp8.data import Collator, Example, PackedDataset, PackingSampler, Turn
from packfp8.errors import BudgetError, ConfigError, StateError
from packfp8.lengths import AudioFrames, Measure
from packfp8.rule import Topology, align


@pytest.fixture(scope="module")
def spoken(make_clip):
    """60 examples, every third of two clips and every fourth of text alone; clips of 1 to 12 frames."""

    def spoken(number):
        clips = [] if number % 4 == 3 else [make_clip(number, 1 + number * 5 % 12)]
        if number % 3 == 2:
            clips.append(make_clip(number, 3))
        return Example(id=f"e{number}", turns=(Turn("user", (*clips, "what?")), Turn("assistant", ("x" * (number % 9 + 1),))))

    return [spoken(number) for number in range(60)]


def frames_of(measured):
    return sum(frames + 1 for frames in measured.encoder_frames)


def test_each_clip_is_counted_with_one_frame_of_silence(spoken, sampler_of, measure):
    terms = sampler_of([], frame_budget=99).terms
    assert measure(spoken[2]).encoder_frames == (11, 3)
    assert terms.frames_of(measure(spoken[2])) == 12 + 4
    assert terms.frames_of(measure(spoken[7])) == 0
    assert sampler_of([]).terms.frames_of(measure(spoken[2])) == 0  # not counted


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("dp", [1, 3])
def test_the_forecast_counts_the_packs_that_the_frame_budget_leaves(spoken, sampler_of, ids_of, layout, dp):
    samplers = [sampler_of(spoken, dp=dp, rank=rank, layout=layout, frame_budget=20) for rank in range(dp)]
    steps = list(samplers[0].forecast())
    packs = [pack for step in steps for pack in step]
    assert len(steps) == len(list(samplers[0]))
    assert max(sum(map(frames_of, pack)) for pack in packs) <= 20
    assert sorted(name for sampler in samplers for pack in ids_of(sampler) for name in pack) == sorted(e.id for e in spoken)
    free = [pack for step in sampler_of(spoken, dp=dp, layout=layout).forecast() for pack in step]
    assert len(packs) > len(free)  # it does bind
    assert max(sum(map(frames_of, pack)) for pack in free) > 20


def test_where_frames_bind_packs_are_hardly_more_than_their_frames_need(spoken, sampler_of, measure):
    frames = sum(frames_of(measure(example)) for example in spoken)
    assert len(list(sampler_of(spoken, frame_budget=40).forecast())) <= frames / 40 + 2


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_an_example_of_exactly_the_frame_budget_is_packed_and_one_more_frame_is_refused(
    make_clip, sampler_of, ids_of, lines_of, layout
):
    talk = Example(id="talk", turns=(Turn("user", (make_clip(1, 7), make_clip(2, 5))), Turn("assistant", ("a",))))
    assert ids_of(sampler_of([talk], layout=layout, frame_budget=14)) == [["talk"]]
    with pytest.raises(BudgetError) as refusal:
        list(sampler_of([talk], layout=layout, frame_budget=13))
    lines = lines_of(refusal.value)
    assert lines["what"] == "example 'talk' has more audio than a pack may hold"
    assert (lines["got"], lines["expected"]) == ("14 encoder frames", "at most 13 encoder frames")
    assert "never cut" in lines["because"]
    assert "raise frame_budget" in lines["fix"]
    sampler = sampler_of([talk], layout=layout, frame_budget=13, over_budget="set_aside")
    assert list(sampler) == []
    assert [one.id for one in sampler.set_aside] == ["talk"]


def test_a_static_collator_of_the_same_frame_budget_takes_every_pack_in_one_shape(spoken, measure):
    rule, bounds = align("block", Topology()), {"budget": 256, "max_sequences": 9, "frame_budget": 50}
    measure = Measure(frames=AudioFrames.linear(800))
    sampler = PackingSampler(spoken, measure=measure, rule=rule, **bounds)
    dataset = PackedDataset(Collator(measure=measure, rule=rule, static=True, **bounds))
    batches = [dataset[pack] for pack in sampler]
    assert len(batches) > 5
    assert {batch.audio.shape for batch in batches} == {(1, 50 * 800)}
    assert {batch.audio_source.shape for batch in batches} == {(50,)}
    assert sorted(name for batch in batches for name in batch.ids) == sorted(example.id for example in spoken)


@pytest.mark.parametrize(
    ("options", "what", "got"),
    [
        ({"frame_budget": 0}, "frame_budget is not a count", "0"),
        ({"frame_budget": 2.5}, "frame_budget is not a count", "2.5"),
        ({"frame_budget": True}, "frame_budget is not a count", "True"),
        ({"frame_budget": 1}, "packs have no room for a clip", "frame_budget=1"),
        ({"frame_budget": 9, "measure": Measure(frames=None)}, "bounds nothing", "frame_budget=9, Measure(frames=None)"),
    ],
)
@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_a_frame_budget_that_cannot_be_is_refused_before_the_first_pack(sampler_of, lines_of, layout, options, what, got):
    with pytest.raises(ConfigError) as refusal:
        sampler_of([], layout=layout, **options)
    lines = lines_of(refusal.value)
    assert what in lines["what"]
    assert lines["got"] == got


def test_what_was_counted_otherwise_when_the_state_was_saved_is_noticed(spoken, sampler_of, make_clip, measure):
    """As many tokens, other clips: the packs that were open would be over the budget."""

    def joined(example):
        turns = example.turns
        clips = [part for part in turns[0].parts if not isinstance(part, str)]
        if len(clips) < 2:
            return example
        frames = sum(clip.num_samples // 800 for clip in clips)
        return Example(id=example.id, turns=(Turn("user", (make_clip(0, frames), "what?")), *turns[1:]))

    others = [joined(one) for one in spoken]
    assert [measure(one).tokens for one in others] == [measure(one).tokens for one in spoken]
    options = {"shuffle": False, "frame_budget": 20, "lookahead": 8}
    first = sampler_of(spoken, **options)
    state = [first.state_dict() for _ in first][16]
    assert state["mark"]["step"] > 0
    again = sampler_of(spoken, **options)
    again.load_state_dict(state)
    assert len(list(again)) > 2
    changed = sampler_of(others, **options)
    changed.load_state_dict(state)
    with pytest.raises(StateError, match="do not come as they came before"):
        list(changed)
