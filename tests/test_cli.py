"""The command line: options and JSON keys are a contract, faults are five lines, exit codes mean what they say."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from packfp8.cli import _counts, main
from packfp8.rule import RECIPES, Topology, align


def run(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.mark.parametrize("recipe", RECIPES)
def test_explain_prints_what_the_rule_prints(recipe):
    result = run("explain", recipe, "--dp", 8, "--cp", 2, "--tp", 4, "--sp")
    assert result.exit_code == 0
    assert result.output.strip() == str(align(recipe, Topology(dp=8, cp=2, tp=4, sp=True)))


def test_explain_json_has_the_keys_of_the_contract():
    result = run("explain", "block", "--cp", 2, "--tp", 4, "--sp", "--json")
    answer = json.loads(result.output)
    assert list(answer) == ["recipe", "layout", "sequence", "total", "fingerprint", "needs"]
    assert (answer["sequence"], answer["total"]) == (4, 64)
    assert {tuple(need) for need in answer["needs"]} == {("unit", "multiple", "because", "source", "kind")}


def test_explain_gives_the_row_of_a_padded_batch():
    answer = json.loads(run("explain", "block", "--layout", "bshd", "--batch", 2, "--json").output)
    assert answer["row"] == 8
    assert "2 rows     S a multiple of 8" in run("explain", "block", "--layout", "bshd", "--batch", 2).output


def test_explain_takes_frozen_weights_and_fast_needs():
    assert json.loads(run("explain", "block", "--frozen", "--json").output)["total"] == 8
    assert json.loads(run("explain", "nvfp4", "--fast", "--json").output)["total"] == 128


@pytest.mark.parametrize(
    "words",
    [("explain", "auto"), ("explain",), ("explain", "block", "--cp", 0), ("explain", "block", "--batch", 2), ("nothing",)],
)
def test_wrong_usage_exits_with_2(words):
    assert run(*words).exit_code == 2


def test_a_recipe_left_open_is_refused_in_five_lines():
    text = run("explain", "auto").output
    assert "the recipe is not one that the rule knows" in text
    for word in ("got:", "expected:", "because:", "fix:"):
        assert word in text


def test_python_dash_m_is_the_same_program():
    words = [sys.executable, "-m", "packfp8", "explain", "block"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == run("explain", "block").output


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("1024", [1024]),
        ("1024,2048", [1024, 2048]),
        ("1024,...,8192", [1024, 2048, 4096, 8192]),
        ("3, ..., 13", [3, 6, 12, 13]),
        ("16,...,16", [16, 16]),
    ],
)
def test_token_counts_may_be_doubled_from_one_to_another(text, counts):
    assert _counts(text) == counts


@pytest.mark.parametrize("text", ["", "...", "...,4", "1,x", "1,,2"])
def test_token_counts_that_are_none_are_wrong_usage(text):
    result = run("payoff", "--tokens", text)
    assert result.exit_code == 2
    assert "--tokens takes whole numbers with commas" in result.output
