"""State: what comes after a step is the same from its state, whatever ran ahead; states that do not fit are refused."""

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lhotse import CutSet
from torch.utils.data import DataLoader

from packfp8.data import Collator, PackedDataset
from packfp8.data.steps import HISTORY_STEPS
from packfp8.errors import StateError
from packfp8.lengths import Measure
from packfp8.packing import PackCost

ASIDE = {"over_budget": "set_aside", "on_fault": "set_aside"}


@pytest.fixture(scope="module")
def uneven(make_cuts):
    """400 cuts of 0.1 to 9 s, some of them too long, or without a length."""
    return make_cuts([[0.0, 14.0][n % 2] if n % 41 == 7 else 0.1 + n * 37 % 90 / 10 for n in range(400)])


def saved(state):
    """The state after a trip through a file."""
    return json.loads(json.dumps(state))


@settings(max_examples=25)
@given(st.data())
def test_after_any_step_the_rest_of_the_epoch_is_the_same(uneven, sampler_of, ids_of, data):
    options = ASIDE | data.draw(
        st.fixed_dictionaries(
            {
                "dp": st.integers(1, 3),
                "layout": st.sampled_from(["thd", "bshd"]),
                "window": st.sampled_from([1, 3, 20]),
                "lookahead": st.sampled_from([1, 30]),
                "frame_budget": st.sampled_from([None, 190]),
                "shuffle": st.booleans(),
                "end": st.sampled_from(["fill", "drop"]),
            }
        )
    )
    lazy, epoch = data.draw(st.booleans()), data.draw(st.integers(0, 2))
    cuts = CutSet(Lazy(uneven)) if lazy else uneven
    first = sampler_of(cuts, accepts=odd, **options)
    first.set_epoch(epoch)
    packs = ids_of(first)
    step = data.draw(st.integers(-1, len(packs) - 1))
    other = sampler_of(cuts, accepts=odd, **options)
    other.load_state_dict(saved(first.state_dict(step=step)))
    assert other.epoch == epoch
    assert [pack.step for pack in other] == list(range(step + 1, len(packs)))
    other.load_state_dict(first.state_dict(step=step))
    assert ids_of(other) == packs[step + 1 :]
    assert other.set_aside == first.set_aside
    assert ids_of(other) == packs  # what follows is a whole epoch


class Lazy:
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(list(self.items))


def odd(cut):
    return int(cut.id[1:]) % 5 != 1


def test_a_state_of_a_resumed_run_leads_on_as_that_of_the_first(uneven, sampler_of, ids_of):
    first = sampler_of(uneven, dp=2, **ASIDE)
    packs = ids_of(first)
    state = first.state_dict(step=40)
    assert state["mark"]["set_aside"]
    second, third = sampler_of(uneven, dp=2, **ASIDE), sampler_of(uneven, dp=2, **ASIDE)
    second.load_state_dict(state)
    assert second.state_dict() == state  # loaded, and nothing drawn yet
    drawn = iter(second)
    assert second.state_dict() == state  # begun, and nothing drawn yet
    for _ in range(20):
        next(drawn)
    third.load_state_dict(saved(second.state_dict()))
    assert ids_of(third) == packs[61:] != []


@pytest.mark.parametrize("dp", [1, 4])
def test_resuming_measures_only_what_was_held_and_plans_only_a_few_steps_again(make_cuts, sampler_of, measure, ids_of, dp):
    class Counting:
        sample_rate, template, fingerprint, calls = measure.sample_rate, measure.template, measure.fingerprint, 0

        def __call__(self, example):
            Counting.calls += 1
            return measure(example)

    cuts = make_cuts([0.1 + n * 37 % 90 / 10 for n in range(3000)])
    first, second = (sampler_of(cuts, dp=dp, lookahead=32, measure=Counting()) for _ in range(2))
    packs = ids_of(first)
    state = first.state_dict(step=len(packs) * 3 // 4)
    assert state["step"] - state["mark"]["step"] < 24
    assert len(json.dumps(state)) < 6000
    Counting.calls = 0
    second.load_state_dict(saved(state))
    assert ids_of([next(second)]) == packs[state["step"] + 1 : state["step"] + 2]
    assert Counting.calls < 32 + (24 + 2 * 4) * dp * 6


def test_the_state_is_the_same_on_every_rank_and_small(uneven, sampler_of):
    states = []
    for rank in range(3):
        sampler = sampler_of(uneven, dp=3, rank=rank, **ASIDE)
        list(sampler)
        states.append(sampler.state_dict(step=20))
    assert states[0] == states[1] == states[2]
    assert len(json.dumps(states[0])) < 12_000


@pytest.mark.parametrize("workers", [1, 2])
def test_the_state_follows_what_training_consumed_and_the_next_epoch_is_whole(texts, workers, sampler_of, measure):
    def loader_of(sampler):
        dataset = PackedDataset(Collator(measure=measure, rule=sampler.terms.rule, budget=256))
        return DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=workers, prefetch_factor=2)

    def seen(loader):
        return [(batch.ids, batch.checksum, batch.input_ids.tolist()) for batch in loader]

    whole = [seen(loader_of(sampler_of(texts))), None]
    sampler = sampler_of(texts)
    sampler.set_epoch(1)
    whole[1] = seen(loader_of(sampler))

    sampler = sampler_of(texts)
    batches = iter(loader_of(sampler))
    next(batches)
    state = sampler.state_dict(step=next(batches).step)
    assert sampler.state_dict()["step"] > state["step"] == 1  # the workers have been given more than was consumed
    del batches

    resumed = sampler_of(texts)
    resumed.load_state_dict(saved(state))
    loader, epochs = loader_of(resumed), []
    for epoch in range(resumed.epoch, 2):
        resumed.set_epoch(epoch)
        epochs.append(seen(loader))
    assert epochs == [whole[0][2:], whole[1]]
    assert whole[0] != whole[1]


@pytest.fixture(scope="module")
def texts():
    return [{"id": f"t{n}", "text": "ab" * (3 + n * 29 % 50)} for n in range(60)]


def test_after_the_last_step_nothing_is_left_and_the_next_epoch_is_whole(uneven, sampler_of, ids_of):
    first = sampler_of(uneven, **ASIDE)
    packs = ids_of(first)
    resumed = sampler_of(uneven, **ASIDE)
    resumed.load_state_dict(first.state_dict(step=len(packs) - 1))
    resumed.set_epoch(0)
    assert ids_of(resumed) == []
    resumed.set_epoch(1)
    first.set_epoch(1)
    assert ids_of(resumed) == ids_of(first) != []


def test_another_epoch_forgets_the_loaded_state(uneven, sampler_of, ids_of):
    first, other = sampler_of(uneven, **ASIDE), sampler_of(uneven, **ASIDE)
    packs = ids_of(first)
    other.load_state_dict(first.state_dict(step=5))
    other.set_epoch(1)
    other.set_epoch(0)
    assert ids_of(other) == packs


def test_a_jsonl_gz_is_resumed_by_reading_it_again(uneven, sampler_of, ids_of, tmp_path):
    good = CutSet([cut for cut in uneven if cut.duration and cut.duration < 9])
    good.to_file(tmp_path / "cuts.jsonl.gz")
    lazy = CutSet.from_file(tmp_path / "cuts.jsonl.gz")
    assert lazy.is_lazy
    first, second = sampler_of(lazy, dp=2, shuffle_buffer=50), sampler_of(lazy, dp=2, shuffle_buffer=50)
    packs = ids_of(first)
    second.load_state_dict(saved(first.state_dict(step=17)))
    assert ids_of(second) == packs[18:] != []


TERMS = {
    "budget": {"budget": 512},
    "seed": {"seed": 1},
    "rule": {"recipe": "bf16"},
    "measure": {"measure": Measure(frames=None)},
    "lookahead": {"lookahead": 7},
    "window": {"window": 2},
    "max_sequences": {"max_sequences": 3},
    "frame_budget": {"frame_budget": 240},
    "max_seqlen": {"max_seqlen": 250},
    "shuffle": {"shuffle": False},
    "shuffle_buffer": {"shuffle_buffer": 5},
    "cost": {"cost": PackCost(linear=1.0)},
    "over_budget": {"over_budget": "error"},
    "on_fault": {"on_fault": "error"},
    "end": {"end": "drop"},
}


@pytest.mark.parametrize("name", TERMS)
def test_a_state_saved_under_other_terms_is_refused(uneven, sampler_of, lines_of, name):
    saved_by, other = sampler_of(uneven, **ASIDE), sampler_of(uneven, **ASIDE | TERMS[name])
    next(saved_by)
    with pytest.raises(StateError) as refusal:
        other.load_state_dict(saved_by.state_dict())
    lines = lines_of(refusal.value)
    assert lines["what"] == f"the state was saved under another {name}"
    assert lines["got"] == f"{name} {saved_by.terms.summary()[name]!r}"
    assert lines["expected"] == f"{name} {other.terms.summary()[name]!r}"
    assert "repeated and others lost" in lines["because"]
    assert "settings of the saved run" in lines["fix"]


def test_every_term_is_compared(uneven, sampler_of):
    assert set(sampler_of(uneven).terms.summary()) == {*TERMS, "dp"}


def test_a_state_of_another_world_size_is_refused_with_the_reason(uneven, sampler_of, lines_of):
    with pytest.raises(StateError) as refusal:
        sampler_of(uneven, dp=4).load_state_dict(sampler_of(uneven, dp=2).state_dict())
    lines = lines_of(refusal.value)
    assert "world of another size" in lines["what"]
    assert lines["got"] == "2 data-parallel ranks when it was saved, 4 now"
    assert lines["expected"] == "the same number"
    assert "one pack for each rank" in lines["because"]
    assert "as many data-parallel ranks" in lines["fix"]


@pytest.mark.parametrize("state", [None, {}, {"epoch": 0}, "format", "mark"])
def test_what_is_no_state_is_refused(uneven, sampler_of, lines_of, state):
    sampler = sampler_of(uneven)
    if state in ("format", "mark"):
        state = sampler.state_dict() | {state: None}
    with pytest.raises(StateError) as refusal:
        sampler.load_state_dict(state)
    lines = lines_of(refusal.value)
    assert "not a state of a PackingSampler" in lines["what"]
    assert ("NoneType" if state is None else "keys") in lines["got"]
    assert "state_dict() returned" in lines["expected"]
    assert "continued exactly" in lines["because"]
    assert "unchanged" in lines["fix"]


@pytest.mark.parametrize("change", ["order", "fewer", "filter", "longer", "aside"])
def test_a_source_that_comes_otherwise_than_before_is_refused(uneven, sampler_of, lines_of, make_cut, change):
    first = sampler_of(uneven, shuffle=False, **ASIDE)
    list(first)
    cuts = list(uneven)
    held = first.state_dict(step=60)["mark"]["held"]
    cuts = {
        "order": cuts[1:] + cuts[:1],
        "fewer": cuts[:100],
        "filter": cuts,
        "longer": [make_cut(cut.id, 2.0) if n in held else cut for n, cut in enumerate(cuts)],
        "aside": [make_cut(cut.id, 1.0) if cut.duration == 14.0 else cut for cut in cuts],
    }[change]
    accepts = (lambda cut: cut.id != "c003") if change == "filter" else None
    other = sampler_of(CutSet(cuts), shuffle=False, accepts=accepts, **ASIDE)
    other.load_state_dict(first.state_dict(step=60))
    with pytest.raises(StateError) as refusal:
        next(other)
    lines = lines_of(refusal.value)
    assert "do not come as they came" in lines["what"]
    assert lines["got"] == ("100 examples" if change == "fewer" else "other examples, or another order")
    assert ("at least" if change == "fewer" else "of the saved run") in lines["expected"]
    assert "repeat and lose" in lines["because"]
    assert "a whole number as its seed" in lines["fix"]


def test_states_reach_back_as_far_as_is_said_and_no_further_than_was_handed_out(sampler_of, lines_of, make_cuts, ids_of):
    sampler = sampler_of(make_cuts([9.0] * (HISTORY_STEPS + 300)), shuffle=False)
    packs = ids_of(sampler)
    last = len(packs) - 1
    other = sampler_of(sampler.cuts, shuffle=False)
    other.load_state_dict(sampler.state_dict(step=last - HISTORY_STEPS))
    assert ids_of(other) == packs[-HISTORY_STEPS:]
    for step, expected in ((2, "at least"), (last + 1, f"at most {last}, the last that was handed out")):
        with pytest.raises(StateError) as refusal:
            sampler.state_dict(step=step)
        lines = lines_of(refusal.value)
        assert "no state after this step" in lines["what"]
        assert lines["got"] == f"step {step}"
        assert expected in lines["expected"]
        assert "prefetched comes again" in lines["because"]
        assert "batch.step" in lines["fix"]


def test_a_sampler_that_only_workers_iterate_plans_up_to_the_step_asked_for(uneven, sampler_of, ids_of, lines_of):
    first, apart = sampler_of(uneven, **ASIDE), sampler_of(uneven, **ASIDE)
    packs = ids_of(first)
    for step in (40, 12, len(packs) - 1):
        assert apart.state_dict(step=step) == first.state_dict(step=step)
    apart._ahead.marks.popleft()  # as after many steps
    assert apart.state_dict(step=2) == first.state_dict(step=2)
    with pytest.raises(StateError) as refusal:
        apart.state_dict(step=len(packs))
    assert "the last of the epoch" in lines_of(refusal.value)["expected"]


def test_a_pickled_sampler_keeps_settings_epoch_and_a_loaded_state(uneven, sampler_of, ids_of):
    first = sampler_of(uneven, dp=2, rank=1, accepts=odd, **ASIDE)
    first.set_epoch(3)
    packs = ids_of(first)
    copy = pickle.loads(pickle.dumps(first))
    assert ids_of(copy) == packs
    copy.load_state_dict(first.state_dict(step=4))
    assert ids_of(pickle.loads(pickle.dumps(copy))) == packs[5:]


def test_two_iterations_do_not_disturb_each_other(uneven, sampler_of, ids_of):
    sampler = sampler_of(uneven, **ASIDE)
    packs = ids_of(sampler)
    old = iter(sampler)
    assert ids_of([next(old)]) == packs[:1]
    assert ids_of(sampler) == packs
    state = sampler.state_dict(step=3)
    sampler.load_state_dict(state)
    assert ids_of(old) == packs[1:]
    assert ids_of(sampler) == packs[4:]
