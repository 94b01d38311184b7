"""A report's figures are those of the packs that the sampler makes; nothing is counted twice and nothing forgotten."""

import importlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfp8 import Topology, align
from packfp8.errors import BudgetError, ExampleError
from packfp8.lengths import Histogram
from packfp8.packing import pack
from packfp8.report import report
from packfp8.report.dry_run import Drawn, dry_run
from packfp8.report.rivals import compare
from packfp8.report.sentences import percent
from packfp8.report.tally import Tally
from packfp8.report.what_if import sorted_batches, what_if

KEYS = (
    "examples", "rejected", "tokens_real", "tokens_total", "fill", "fill_real", "packs", "packs_bound", "steps", "waste",
    "sequences_per_pack", "imbalance", "compare", "shapes", "static",
)  # fmt: skip


@pytest.fixture
def speech():
    """1,500 lengths like those of read speech."""
    return np.random.default_rng(0).gamma(4, 40, 1500).astype(np.int64) + 10


def test_the_keys_are_those_that_scripts_read(lengths_file, speech):
    told = report(lengths_file(speech), budget=2048).to_dict()
    assert tuple(told) == KEYS
    assert tuple(told["waste"]) == ("slot", "filler", "over_budget")
    assert tuple(told["imbalance"]) == ("attention", "encoder_frames", "supervised")
    assert tuple(told["sequences_per_pack"]) == ("min", "median", "mean", "max")
    assert told["compare"] is told["static"] is None
    assert json.loads(json.dumps(told)) == told


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("topology", [Topology(), Topology(dp=3, cp=2, tp=2, sp=True)], ids=str)
def test_real_slot_and_filler_tokens_make_the_packs(lengths_file, speech, layout, topology):
    result = report(lengths_file(speech), budget=700, recipe="block", topology=topology, layout=layout)
    waste = result.waste
    assert result.tokens_real + waste.slot + waste.filler == result.tokens_total == result.packs * result.capacity
    assert result.tokens_real + waste.over_budget == speech.sum()
    assert min(waste.slot, waste.filler) >= 0
    assert result.stream.sequences.sum() + result.over_budget == len(speech)
    assert result.steps == -(-result.packs // topology.dp)
    assert result.packs >= result.bounds.best
    assert result.fill_real <= result.fill <= 1


def test_slots_are_rounded_as_the_rule_says(lengths_file, speech):
    rule = align("block", Topology(cp=4))
    result = report(lengths_file(speech), budget=4096, recipe="block", topology=Topology(cp=4))
    assert result.slot_tokens == sum(rule.slot(int(length)) for length in speech)


def test_sequences_over_the_budget_are_counted_and_the_cure_is_exact(lengths_file):
    path = lengths_file(np.array([100, 200, 1001, 5000]))
    result = report(path, budget=1000, recipe="current", topology=Topology(cp=2))
    assert (result.over_budget, result.waste.over_budget) == (2, 6001)
    said = result.sentences[1]
    assert "2 examples" in said
    cure = int(said.split("; ")[1].split()[0].replace(",", ""))
    assert report(path, budget=cure, recipe="current", topology=Topology(cp=2)).over_budget == 0
    step = align("current", Topology(cp=2)).total
    assert report(path, budget=cure - step, recipe="current", topology=Topology(cp=2)).over_budget == 1


def test_a_budget_that_holds_nothing_says_so(lengths_file):
    result = report(lengths_file(np.array([500, 600])), budget=100)
    assert (result.packs, result.fill, result.tokens_total) == (0, 0, 0)
    assert "none of the 2 examples" in result.sentences[0]
    result.table()
    assert "none of the 2 examples" in result.html()


def test_more_examples_than_a_dry_run_walks_give_the_figures_of_all(lengths_file, speech, monkeypatch):
    module = importlib.import_module("packfp8.report.measure")
    path = lengths_file(np.tile(speech, 4))
    whole = report(path, budget=4096, topology=Topology(cp=2))
    monkeypatch.setattr(module, "MOST_EXAMPLES", 1500)
    part = report(path, budget=4096, topology=Topology(cp=2))
    assert part.walked == 1500 < whole.walked == 6000
    assert part.tokens_real == whole.tokens_real
    assert part.slot_tokens == whole.slot_tokens
    assert abs(part.packs - whole.packs) <= 2
    assert part.waste.filler + part.waste.slot + part.tokens_real == part.tokens_total


def test_balance_is_of_ranks_in_one_step():
    rule = align("bf16", Topology(dp=2))
    drawn = Drawn(
        tokens=np.array([8, 8, 4, 4]),
        encoder_frames=np.array([6, 0, 1, 1]),
        supervised=np.array([1, 7, 2, 2]),
        complete=True,
    )
    stream = dry_run(drawn, rule, budget=8, lookahead=8, max_sequences=None)
    assert sorted(stream.sequences.tolist()) == [1, 1, 2]
    # dealt by attention work, 64, 64 and 32: the last step has one rank without a pack
    assert sorted(map(sorted, stream.attention.tolist())) == [[0, 32], [64, 64]]
    assert stream.idle("attention") == pytest.approx((0 + 0.5) / 2)
    assert stream.idle("encoder_frames") == pytest.approx((0.5 + 0.5) / 2)
    assert stream.idle("supervised") == pytest.approx((1 - 4 / 7 + 0.5) / 2)


def test_bare_lengths_have_no_known_frames_or_labels(lengths_file, speech):
    imbalance = report(lengths_file(speech), budget=2048, topology=Topology(dp=4)).imbalance
    assert imbalance["attention"] > 0
    assert imbalance["encoder_frames"] is imbalance["supervised"] is None


def test_the_order_of_the_lines_changes_nothing(lengths_file, speech):
    first = report(lengths_file(speech), budget=2048, topology=Topology(dp=4), compare=True)
    second = report(lengths_file(speech[::-1].copy(), "other.npy"), budget=2048, topology=Topology(dp=4), compare=True)
    assert first.to_dict() == second.to_dict()


def test_nothing_readable_is_an_error_and_rejected_lines_are_not(tmp_path, write, rows, lines_of):
    (tmp_path / "bad.jsonl").write_text("{\n{\n")
    with pytest.raises(ExampleError) as caught:
        report(tmp_path / "bad.jsonl", budget=1024)
    assert "no line" in lines_of(caught.value)[0]
    result = report([tmp_path / "bad.jsonl", write("nemo.json", rows)], budget=1024)
    assert result.to_dict()["rejected"] == 2


def test_a_budget_below_one_pack_is_told_before_anything_is_read(tmp_path):
    with pytest.raises(BudgetError):
        report(tmp_path / "missing", budget=15, recipe="block")


# -- rivals, against the rules told literally ------------------------------------------------------------------------------


def _oracle(lengths, budget, padded):
    """Batches in order of arrival: a list of lists."""
    batches = []
    for length in lengths:
        batch = [*batches[-1], length] if batches else [length]
        size = len(batch) * max(batch) if padded else sum(batch)
        if batches and size <= budget:
            batches[-1] = batch
        else:
            batches.append([length])
    return batches


@given(st.lists(st.integers(1, 64), min_size=1, max_size=60))
def test_rivals_batch_by_their_rules(lengths):
    tokens = np.array(lengths)
    drawn = Drawn(tokens=tokens, encoder_frames=tokens * 0, supervised=tokens, complete=True)
    rule = align("bf16")
    stream = dry_run(drawn, rule, budget=64, lookahead=16, max_sequences=None)
    rivals = {rival.name: rival for rival in compare(drawn, rule, stream, budget=64, lookahead=16, max_sequences=None)}
    assert rivals["padded batches"].packs == len(_oracle(lengths, 64, padded=True))
    assert rivals["next fit"].packs == len(_oracle(lengths, 64, padded=False))
    assert rivals["best-fit decreasing"].packs == len(pack(tokens, 64))
    assert rivals["packfp8"].packs == stream.packs
    rounded = -(-tokens // 16) * 16
    assert rounded.sum() / 64 <= rivals["each sequence to 16"].packs <= len(lengths)
    assert all(rival.fill_real == pytest.approx(tokens.sum() / (rival.packs * 64)) for rival in rivals.values())


def test_rivals_honour_the_most_sequences(lengths_file):
    result = report(lengths_file(np.full(60, 10)), budget=1000, max_sequences=6, compare=True)
    assert {rival.packs for rival in result.compare if "buckets" not in rival.name} == {10}


# -- what if ---------------------------------------------------------------------------------------------------------------


def test_what_if_knows_the_rule_of_each_guess(speech):
    rule = align("block", Topology(dp=2, cp=2))
    found = what_if(Histogram.of(speech), rule, budget=4096, max_sequences=None)
    assert found.here.rule.total == rule.total
    assert found.here in found.by_budget[2]
    for cp, guesses in found.by_budget.items():
        assert [guess.budget for guess in guesses] == sorted(guess.budget for guess in guesses)
        assert {guess.rule.sequence for guess in guesses} == {2 * cp if cp > 1 else 1}
    assert found.by_recipe["mxfp8", 4].rule == align("mxfp8", Topology(dp=2, cp=2, tp=4, sp=True))
    waste = [found.by_budget[cp][1].waste for cp in (1, 2, 4, 8)]
    assert waste == sorted(waste)
    assert waste[0] < 0.001 < waste[3]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_sorted_batches_are_those_of_rows_taken_longest_first(lengths):
    rule, budget = align("bf16", layout="bshd"), 64
    falling, batches, at = sorted(lengths, reverse=True), 0, 0
    while at < len(falling):
        at += budget // falling[at]
        batches += 1
    assert sorted_batches(Histogram.of(np.array(lengths)), budget, rule, None) == batches


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0 %"),
        (1, "100 %"),
        (0.5, "50 %"),
        (0.0345, "3.5 %"),
        (0.0005, "0.05 %"),
        (0.99981, "99.98 %"),
        (1e-6, "less than 0.01 %"),
    ],
)
def test_shares_have_more_digits_near_their_ends(share, text):
    assert percent(share) == text


# -- the main job on real lengths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dialog_mandarin", "meeting_english", "read_sanskrit"])
def test_real_lengths_pack_at_least_as_well_as_every_rival(outside_data, name):
    path = outside_data / "lengths" / f"{name}.csv"
    result = report(path, budget=4096, recipe="block", topology=Topology(cp=2), prompt_tokens=24, compare=True)
    assert result.rejected.count == 0
    assert result.packs == min(rival.packs for rival in result.compare) == result.bounds.best
    assert all(sentence.endswith(".") for sentence in result.sentences)


def test_a_tally_keeps_its_pairs_together_in_the_order_drawn():
    tally = Tally.of(np.array([3, 3, 9]), np.array([1, 1, 2]))
    drawn = Drawn.of(tally, prompt_tokens=5, seed=1, most=10)
    assert sorted(zip(drawn.tokens.tolist(), drawn.encoder_frames.tolist(), drawn.supervised.tolist())) == [
        (9, 3, 1), (9, 3, 1), (16, 9, 2),
    ]  # fmt: skip
