"""Where FP8 pays is decided from repeats and their spread; a stand-in does the timing."""

import json

import pytest

from packfp8.errors import ConfigError
from packfp8.report import payoff, report
from packfp8.report.payoff import Payoff
from packfp8.report.timing import BLOCKS, COMPILED, MODES, Gain, Row, Sizes, Untimed


class Stand:
    """A GPU on which launches cost 8 ms in FP8 and 4 in BF16, and a thousand tokens 1 ms in FP8 and 2 in BF16."""

    device, versions, recipes = "stand-in", {"torch": "0"}, ("current", "rowwise")

    def __init__(self, spread=0.0):
        self.spread, self.seen = spread, []

    def baseline(self, recipe):
        return "bf16" if recipe == "current" else COMPILED

    def blocks(self, recipe):
        return BLOCKS if recipe in ("bf16", "current") else ("linear",)

    def time(self, case):
        self.seen.append(case)
        if case.recipe == "rowwise" and case.tokens > 8192:
            raise Untimed("out of memory")
        slow = case.recipe in ("bf16", COMPILED)
        launch = 0 if case.mode == "graph" else 4 if slow else 8
        middle = max(launch, (2 if slow else 1) * case.tokens / 1000)
        return tuple(middle * (1 + self.spread * place) for place in (-1, 0, 1))


@pytest.fixture
def told():
    return payoff(hidden=1024, layers=1, tokens=[16384, 1024, 4096, 2048, 8192], timer=Stand())


def test_every_recipe_is_timed_with_its_own_bf16(told):
    cases = {(row.case.block, row.case.recipe, row.case.mode, row.case.tokens) for row in told.rows}
    assert len(cases) == len(told.rows) == 5 * len(MODES) * (2 + 2 + 1 + 1)
    assert told.gain("linear", "rowwise", "graph", 1024).ratio == pytest.approx(2)


def test_only_the_wanted_recipes_are_timed_and_one_that_is_not_here_is_told(lines_of):
    assert set(payoff(tokens=[1024], recipes=["current"], timer=Stand()).baselines) == {"current"}
    with pytest.raises(ConfigError) as refused:
        payoff(tokens=[1024], recipes=["current", "mxfp8"], timer=Stand())
    assert lines_of(refused.value) == [
        "a recipe cannot be timed here",
        "  got:      mxfp8",
        "  expected: among current, rowwise",
        "  because:  stand-in or the installed libraries do not have it",
        "  fix:      leave it out, or see `packfp8 doctor`",
    ]


def test_fp8_wins_from_where_every_larger_count_wins(told):
    assert told.wins_from("layer", "current", "eager") == 4096
    assert told.wins_from("layer", "current", "graph") == 1024
    assert told.wins_from("linear", "rowwise", "eager") == 4096


def test_a_gain_within_the_spread_is_no_win():
    assert payoff(tokens=[1024], timer=Stand(spread=0.30)).wins_from("layer", "current", "graph") == 1024
    assert payoff(tokens=[1024], timer=Stand(spread=0.34)).wins_from("layer", "current", "graph") is None


def test_the_spread_is_of_all_pairs_of_repeats(told):
    case = told.rows[0].case
    bf16, fp8 = (Row(case=case, milliseconds=times) for times in ((2.0, 3.0, 4.0), (1.0, 1.5, 2.0)))
    assert Gain.of(bf16, fp8) == Gain(ratio=2.0, least=1.0, most=4.0)


def test_a_case_that_cannot_be_timed_keeps_its_reason(told):
    row = told.row("linear", "rowwise", "graph", 16384)
    assert (row.milliseconds, row.reason) == ((), "out of memory")
    assert told.gain("linear", "rowwise", "graph", 16384) is None


def test_a_saved_payoff_is_the_same_when_it_is_loaded(told, tmp_path):
    (tmp_path / "p.json").write_text(json.dumps(told.to_dict()))
    assert Payoff.load(tmp_path / "p.json") == told
    keys = "device versions hidden ffn layers sequence_tokens baselines rows wins_from"
    assert tuple(told.to_dict()) == tuple(keys.split())


def test_the_verdict_names_the_side_of_a_budget(told):
    assert "on the winning side only as a graph" in told.verdict("current", 2000)
    assert "are on the winning side for current" in told.verdict("current", 16000)
    assert "no timing of mxfp8" in told.verdict("mxfp8", 16000)
    losing = payoff(tokens=[1024, 8192], timer=Stand(spread=0.34)).verdict("current", 1024)
    assert "on the losing side" in losing


def test_a_report_takes_the_verdict_of_a_saved_payoff(told, tmp_path, lengths_file):
    (tmp_path / "p.json").write_text(json.dumps(told.to_dict()))
    path = lengths_file([300] * 500)
    result = report(path, budget=4096, recipe="current", payoff=tmp_path / "p.json")
    assert result.sentences[2] == told.verdict("current", 4096)


@pytest.mark.parametrize("text", ["{}", "[]", "not json", '{"hidden": 1}'])
def test_a_file_that_is_no_payoff_is_told(tmp_path, text, lines_of):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        Payoff.load(tmp_path / "p.json")
    assert "is not a saved payoff" in lines_of(caught.value)[0]


@pytest.mark.parametrize("wrong", [{"hidden": 100}, {"ffn": 100}, {"layers": 0}, {"tokens": [100]}, {"tokens": []}], ids=str)
def test_sizes_that_fp8_cannot_have_are_told(wrong, lines_of):
    with pytest.raises(ConfigError) as caught:
        payoff(**{"timer": Stand(), **wrong})
    lines_of(caught.value)


def test_heads_are_as_wide_as_hidden_allows():
    assert [Sizes(hidden=hidden, ffn=16, layers=1).head_dim for hidden in (4096, 320)] == [128, 64]


def test_progress_is_told_each_case_before_it_runs():
    seen, timer = [], Stand()
    payoff(tokens=[1024], timer=timer, progress=seen.append)
    assert seen == timer.seen


def test_without_a_gpu_it_says_so_in_one_error(monkeypatch, lines_of):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError) as caught:
        payoff()
    assert "no CUDA GPU" in lines_of(caught.value)[1]
