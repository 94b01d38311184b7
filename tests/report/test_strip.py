"""The strip of a pack: what is drawn is what the plan says, to the token."""

from dataclasses import replace

import numpy as np
import pytest

from packfp8.data import Clip, Example, Turn
from packfp8.layout import make_plan
from packfp8.lengths import AudioFrames, Measure
from packfp8.report.strip import AUDIO, FILLER, PADDING, TEXT, draw_packs, runs, token_kinds
from packfp8.rule import Topology, align

pytest.importorskip("matplotlib", reason="charts are drawn by matplotlib")

MEASURE = Measure(frames=AudioFrames.linear(1280))


def spoken(seconds, answer):
    clip = Clip(source="never read", num_samples=int(16_000 * seconds), sample_rate=16_000)
    return Example(id=answer, turns=(Turn("user", (clip,)), Turn("assistant", (answer,))))


EXAMPLES = [spoken(1.0, "one"), spoken(2.5, "two and a half"), spoken(0.2, "a little")]
SPLIT = Topology(cp=2, tp=2, sp=True)


def test_kinds_are_text_audio_padding_and_filler_where_the_plan_has_them():
    plan = make_plan([5, 6], [(0, 1, 2), (1, 3, 3)], align("bf16", Topology(cp=2)), total=20)
    t, a, p, f = TEXT, AUDIO, PADDING, FILLER
    assert token_kinds(plan, [(0, 1, 2), (1, 3, 3)]).tolist() == [t, a, a, t, t, p, p, p, t, t, t, a, a, a, p, p, f, f, f, f]


def test_runs_end_where_any_label_changes_and_cover_every_token_once():
    first, second = np.array([0, 0, 0, 1, 1]), np.array([5, 5, 6, 6, 6])
    assert list(runs(first, second)) == [(0, 2), (2, 3), (3, 5)]
    assert list(runs(first)) == [(0, 3), (3, 5)]


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("topology", [Topology(), Topology(cp=2), Topology(tp=2, sp=True), SPLIT], ids=str)
def test_each_bar_of_a_strip_is_as_long_as_what_it_stands_for(topology, layout):
    rule = align("block", topology, layout=layout)
    (axes,) = draw_packs(EXAMPLES, MEASURE, rule).axes
    lengths = [MEASURE.measure(example).tokens for example in EXAMPLES]
    total = make_plan(lengths, [], rule).slots.total
    drawn = {}
    for bar in axes.patches:
        row = round(bar.get_y() + bar.get_height() / 2)
        drawn[row] = drawn.get(row, 0) + bar.get_width()
    split = {1: total} | {2 + rank: total // topology.cp for rank in range(topology.cp)}
    assert drawn == {0: total} | (split if topology.shards > 1 else {})


def test_who_holds_a_token_is_who_has_it_in_its_slab():
    rule = align("block", SPLIT)
    (axes,) = draw_packs(EXAMPLES, MEASURE, rule).axes
    lengths = [MEASURE.measure(example).tokens for example in EXAMPLES]
    bars = [bar for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2) == 1]
    colours = {}
    for rank in range(2):
        plan = make_plan(lengths, [], replace(rule, topology=replace(SPLIT, cp_rank=rank)))
        colours[rank] = {
            bar.get_facecolor()
            for bar in bars
            if set(range(int(bar.get_x()), int(bar.get_x() + bar.get_width()))) <= set(plan.index.tolist())
        }
    assert [len(found) for found in colours.values()] == [1, 1]
    assert colours[0] != colours[1]


def test_strips_of_several_rules_share_one_scale_and_say_what_they_cost():
    figure = draw_packs(EXAMPLES, MEASURE, align("bf16"), align("nvfp4", SPLIT, fast=True))
    small, large = figure.axes
    assert small.get_xlim() == large.get_xlim()
    assert small.get_title(loc="left") == "bf16, THD: each slot a multiple of 1, the pack of 1; 0.0% padding"
    assert large.get_title(loc="left").startswith(
        "nvfp4, THD, cp 2, tp 2 with SP: each slot a multiple of 4, the pack of 512; "
    )
