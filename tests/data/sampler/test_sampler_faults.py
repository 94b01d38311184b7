"""Faults: what is broken is refused or named, what breaks off says so, and no rank is left waiting for another."""

import itertools

import pytest

from packfp8.data import as_example
from packfp8.errors import BudgetError, ConfigError, ExampleError, LengthError, StateError


class Breaking:
    """A source that raises after `after` items, until it is repaired."""

    def __init__(self, items, after):
        self.items, self.after = list(items), after

    def __iter__(self):
        for number, item in enumerate(self.items):
            if number == self.after:
                raise OSError("the disk is gone")
            yield item


def draw(packs, drawn):
    for pack in packs:
        drawn.append(pack)  # one by one, so that what came before a failure is kept


def test_a_source_that_raises_in_the_middle_is_heard_and_never_taken_for_the_end(make_cuts, sampler_of, ids_of, lines_of):
    cuts = make_cuts([0.1 + n * 37 % 90 / 10 for n in range(200)])
    packs = ids_of(sampler_of(cuts, dp=2, rank=1, shuffle=False, lookahead=16))
    source, drawn = Breaking(cuts, after=120), []
    sampler = sampler_of(source, dp=2, rank=1, shuffle=False, lookahead=16)
    with pytest.raises(OSError, match="disk is gone"):
        draw(sampler, drawn)
    assert len(drawn) > 10
    with pytest.raises(StateError) as again:
        next(sampler)
    lines = lines_of(again.value)
    assert "broke off" in lines["what"]
    assert lines["got"] == f"a failure while step {len(drawn)} was planned"
    assert "walked to its end" in lines["expected"]
    assert "leaves the others waiting" in lines["because"]
    assert "load the state" in lines["fix"]

    source.after = None
    sampler.load_state_dict(sampler.state_dict(step=drawn[-1].step))
    assert ids_of(drawn) + ids_of(sampler) == packs


def test_rejected_examples_at_the_head_of_the_stream_cost_no_step(make_cut, sampler_of, ids_of):
    bad = [
        make_cut(f"bad{n}", seconds, text)
        for n, (seconds, text) in enumerate([(0.0, "a"), (None, "a"), (1.0, " "), (99.0, "a")] * 50)
    ]
    good = [make_cut(f"good{n}", 1.0) for n in range(20)]
    options = {"dp": 2, "shuffle": False, "over_budget": "set_aside", "on_fault": "set_aside"}
    samplers = [sampler_of(bad + good, rank=rank, **options) for rank in range(2)]
    columns = [ids_of(sampler) for sampler in samplers]
    assert columns == [ids_of(sampler_of(good, rank=rank, **options)) for rank in range(2)]
    assert [one.id for one in samplers[0].set_aside] == [cut.id for cut in bad]


def test_each_fault_is_named_with_its_reason(make_cut, sampler_of, ids_of):
    faults = {"zero": (0.0, "a"), "none": (None, "a"), "silent": (1.0, ""), "short": (0.01, "a"), "long": (20.0, "a")}
    cuts = [make_cut(name, *fault) for name, fault in faults.items()] + [
        make_cut("good"),
        {"id": "odd", "nothing": 1},
        object(),
    ]
    sampler = sampler_of(cuts, shuffle=False, over_budget="set_aside", on_fault="set_aside")
    assert ids_of(sampler) == [["good"]]
    reasons = {one.id: one.reason for one in sampler.set_aside}
    assert list(reasons) == ["zero", "none", "silent", "short", "long", "odd", "example-7"]
    for name, words in zip(reasons, ["duration", "duration", "no text", "too short", "longer than a pack", "no text", "type"]):
        assert words in reasons[name]
        assert reasons[name].count("\n") == 4


@pytest.mark.parametrize(
    ("seconds", "text", "error"), [(0.0, "a", LengthError), (1.0, "", ExampleError), (20.0, "a", BudgetError)]
)
@pytest.mark.parametrize("dp", [1, 3])
def test_by_default_a_fault_is_raised_on_every_rank_and_names_the_example(
    make_cuts, make_cut, sampler_of, seconds, text, error, dp
):
    cuts = [*make_cuts([1.0] * 5), make_cut("culprit", seconds, text)]
    for rank in range(dp):
        with pytest.raises(error, match="culprit"):
            list(sampler_of(cuts, dp=dp, rank=rank))


def test_the_two_policies_are_apart(make_cuts, make_cut, sampler_of):
    long, silent = make_cut("long", 20.0), make_cut("silent", 1.0, "")
    with pytest.raises(BudgetError, match="long"):
        list(sampler_of([long, silent], on_fault="set_aside"))
    with pytest.raises(ExampleError, match="silent"):
        list(sampler_of([long, silent], over_budget="set_aside", shuffle=False))


def test_an_example_over_the_budget_says_what_would_fit(make_cut, sampler_of, lines_of):
    with pytest.raises(BudgetError) as refusal:
        list(sampler_of([make_cut("long", 20.0)], budget=250))
    lines = lines_of(refusal.value)
    assert lines["what"] == "example 'long' is longer than a pack"
    assert lines["got"].endswith(" tokens")
    assert lines["expected"] == "at most 240, what a budget of 250 holds under the rule"
    assert "never cut" in lines["because"]
    assert "set_aside" in lines["fix"]


def test_exactly_the_budget_fits_and_one_token_more_does_not(sampler_of, measure):
    def of_tokens(tokens):
        own = measure(as_example({"text": "a"})).tokens - 1
        return {"id": "text", "text": "a" * (tokens - own)}

    assert [len(pack) for pack in sampler_of([of_tokens(256)])] == [1]
    with pytest.raises(BudgetError):
        list(sampler_of([of_tokens(257)]))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_an_endless_stream_that_never_fits_exactly_is_packed_on_and_on(make_cut, sampler_of, layout):
    class Endless:
        def __iter__(self):
            return (make_cut(f"c{n}", 2.0 + n % 7 / 10) for n in itertools.count())

    sampler = sampler_of(Endless(), dp=2, layout=layout, recipe="bf16", budget=255, lookahead=16, shuffle_buffer=32)
    packs = list(itertools.islice(sampler, 200))
    names = [cut.id for pack in packs for cut in pack]
    assert all(len(pack) for pack in packs)
    assert len(set(names)) == len(names)
    assert sampler.state_dict(step=150)["step"] == 150


@pytest.mark.parametrize("end", ["fill", "drop"])
@pytest.mark.parametrize("examples", [0, 1])
def test_less_than_one_step_is_the_same_number_of_steps_on_every_rank(make_cuts, columns_of, sampler_of, examples, end):
    cuts = make_cuts([1.0] * examples)
    columns = columns_of(cuts, 4, end=end)
    if examples and end == "fill":
        assert sorted(columns) == [[[]], [[]], [[]], [["c000"]]]
    else:
        assert columns == [[], [], [], []]
    sampler = sampler_of(cuts, dp=4, end=end)
    list(sampler)
    assert [one.id for one in sampler.set_aside] == (["c000"] if examples and end == "drop" else [])
    assert len(list(sampler.forecast())) == len(columns[0])


def test_a_step_that_is_dropped_names_its_examples(make_cuts, sampler_of, lines_of):
    sampler = sampler_of(make_cuts([9.0] * 5), dp=3, rank=2, end="drop", shuffle=False)
    assert [len(pack) for pack in sampler] == [1]
    assert len(sampler.set_aside) == 2
    lines = lines_of(sampler.set_aside[0].reason)
    assert "in the last step, which is not whole" in lines["what"]
    assert (lines["got"], lines["expected"]) == ("2 packs", "3, one for each rank")
    assert "end='drop'" in lines["because"]
    assert "end='fill'" in lines["fix"]


def test_a_filter_that_rejects_everything_gives_no_step_on_any_rank(make_cuts, columns_of):
    assert columns_of(make_cuts([1.0] * 9), 3, accepts=lambda cut: False) == [[], [], []]


@pytest.mark.parametrize("name", ["over_budget", "on_fault", "end"])
def test_an_unknown_policy_is_refused(make_cuts, sampler_of, lines_of, name):
    with pytest.raises(ConfigError) as refusal:
        sampler_of(make_cuts([1.0]), **{name: "ignore"})
    lines = lines_of(refusal.value)
    assert lines["what"] == f"{name} is not a policy"
    assert lines["got"] == "'ignore'"
    assert lines["expected"] == ("'fill' or 'drop'" if name == "end" else "'error' or 'set_aside'")
    assert "as many steps" in lines["because"]
    assert lines["fix"].startswith(f"choose {name}=")


@pytest.mark.parametrize("options", [{"seed": "randomized"}, {"seed": -1}, {"seed": True}, {"shuffle_buffer": 0}])
def test_a_seed_or_buffer_that_ranks_cannot_share_is_refused(make_cuts, sampler_of, lines_of, options):
    (name, value), *_ = options.items()
    with pytest.raises(ConfigError) as refusal:
        sampler_of(make_cuts([1.0]), **options)
    lines = lines_of(refusal.value)
    assert name in lines["what"]
    assert lines["got"] == repr(value)
    assert lines["expected"].startswith("a whole number of at least")
    assert "repeat some and lose others" in lines["because"]
    assert "on every rank" in lines["fix"]


@pytest.mark.parametrize(
    "options", [{"lookahead": 0}, {"window": 0, "dp": 2}, {"max_sequences": 0}, {"frame_budget": 0}, {"budget": 15}]
)
def test_bounds_are_checked_before_the_first_pack(make_cuts, sampler_of, options):
    with pytest.raises((ConfigError, BudgetError)):
        sampler_of(make_cuts([1.0]), **options)
