"""What constant shapes cost: filler and silence are what is left of the bounds, counted from packs that keep them."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from packfp8 import Topology, align
from packfp8.cli import main
from packfp8.data import Collator, PackingSampler
from packfp8.errors import ConfigError
from packfp8.lengths import Measure, Template
from packfp8.report import report
from packfp8.report.constancy import constancy
from packfp8.report.dry_run import Drawn, dry_run
from packfp8.report.tally import Tally

RULE = align("block")
SHAPE_KEYS = ("distinct", "in_buckets")
STATIC_KEYS = (
    "frame_budget", "max_sequences", "max_seqlen", "packs", "fill", "fill_real", "filler_tokens", "filler", "silent_frames",
    "silent", "unused_clips", "over_frame_budget",
)  # fmt: skip


def drawn_of(tokens, frames):
    tokens, frames = np.array(tokens, np.int64), np.array(frames, np.int64)
    return Drawn(tokens=tokens, encoder_frames=frames, supervised=np.maximum(tokens - frames, 0), complete=True)


def cost_of(drawn, **bounds):
    settings = {"budget": 256, "lookahead": 16, "max_sequences": None}
    usual = dry_run(drawn, RULE, **settings)
    longest = int(drawn.tokens.max())
    return constancy(drawn, RULE, usual, longest_tokens=longest, **{**settings, "frame_budget": None, **bounds}), usual


@pytest.fixture
def speech(tmp_path):
    """The path of a CSV of 400 utterances of 1 to 8 s."""
    seconds = 1 + 7 * np.random.default_rng(0).beta(2, 3, 400)
    rows = [f"{s:.2f},{int(12 * s)}\n" for s in seconds]
    (tmp_path / "speech.csv").write_text("duration_s,utf8_bytes\n" + "".join(rows))
    return tmp_path / "speech.csv"


EXAMPLES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=60)


@settings(max_examples=25, deadline=None)
@given(EXAMPLES, st.sampled_from([None, 61, 100]), st.sampled_from([None, 3]))
def test_filler_and_silence_are_what_clips_and_slots_leave(examples, frame_budget, most):
    text, frames = zip(*examples)
    drawn = drawn_of(np.add(text, frames), frames)
    cost, usual = cost_of(drawn, frame_budget=frame_budget, max_sequences=most)
    stream = cost.stream
    assert stream.sequences.sum() == len(examples)
    assert stream.sequences.max() <= cost.max_sequences
    assert (stream.room_frames <= cost.frame_budget).all()
    assert (stream.slot_tokens <= stream.capacity).all()
    assert cost.max_sequences == (most or usual.sequences.max())
    assert cost.filler_tokens + sum(np.add(text, frames)) == stream.packs * stream.capacity
    assert cost.silent_frames + sum(frames) == stream.packs * cost.frame_budget
    assert cost.unused_clips + np.count_nonzero(frames) == stream.packs * (cost.frame_budget // 2)
    assert cost.over_budget == 0
    assert 0 <= cost.filler < 1
    assert 0 <= cost.silent < 1


def test_the_frame_budget_is_that_of_95_of_100_packs_or_of_the_longest_clip():
    cost, usual = cost_of(drawn_of([250] * 40, range(1, 41)))
    assert sorted(usual.room_frames.tolist()) == list(range(2, 42))  # a pack for each
    assert cost.frame_budget == 41  # where 95 of 100 packs have 39.05
    cost, usual = cost_of(drawn_of([64] * 400, [9] * 400))
    assert set(usual.room_frames.tolist()) == {40}
    assert cost.frame_budget == 40


def test_an_example_with_more_audio_than_a_pack_may_hold_is_counted_and_left_out():
    cost, _ = cost_of(drawn_of([50] * 9, [30, 9, 9, 9, 9, 9, 9, 9, 10]), frame_budget=10)
    assert cost.over_budget == 2
    assert cost.stream.sequences.sum() == 7
    assert cost.to_dict()["over_frame_budget"] == 2


@pytest.mark.parametrize(
    ("longest", "cp", "told"), [(64, 1, 64), (65, 1, 128), (191, 3, 192), (127, 3, 192), (193, 3, 240), (249, 1, 256)]
)
def test_the_max_seqlen_holds_the_slot_of_the_longest_example_and_is_no_longer_than_a_pack(tmp_path, longest, cp, told):
    """Slots of cp 3 are multiples of 6: 127 tokens take 132, and 128 would leave room for 126."""
    np.save(tmp_path / "lengths.npy", np.array([5, longest, 7]))
    result = report(tmp_path / "lengths.npy", budget=256, static=True, recipe="block", topology=Topology(cp=cp))
    assert result.static.max_seqlen == result.to_dict()["static"]["max_seqlen"] == told
    bounds = {"budget": 256, "static": True, "max_sequences": result.static.max_sequences, "max_seqlen": told}
    assert Collator(measure=Measure(frames=None), rule=result.rule, **bounds).max_seqlen >= result.rule.slot(longest)


def test_where_no_pack_holds_any_example_the_bounds_can_be_used_all_the_same(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array([900, 800]))
    static = report(tmp_path / "lengths.npy", budget=256, static=True).static
    assert (static.stream.packs, static.max_seqlen, static.max_sequences) == (0, 64, 1)


def test_where_no_audio_is_known_only_tokens_cost():
    cost, _ = cost_of(drawn_of([50] * 9, [0] * 9))
    assert (cost.frame_budget, cost.silent_frames, cost.silent, cost.unused_clips) == (0, 0, 0, 0)
    assert cost.filler_tokens == 2 * 256 - 9 * 50


def test_a_report_says_how_many_shapes_there_are_and_how_many_in_buckets(speech):
    result = report(speech, budget=2048, lookahead=8)
    told = result.to_dict()["shapes"]
    assert tuple(told) == SHAPE_KEYS
    assert told["distinct"] == result.shapes > told["in_buckets"] == result.shapes_in_buckets >= 1
    assert report(speech, budget=2048, layout="bshd").to_dict()["shapes"]["in_buckets"] is None


def test_the_shapes_in_buckets_are_those_of_the_collator(tmp_path):
    """The same packs, made by a sampler and a collator of texts that long."""
    lengths = np.random.default_rng(1).integers(3, 200, 150)
    np.save(tmp_path / "lengths.npy", lengths)
    topology = Topology(cp=2)
    result = report(tmp_path / "lengths.npy", budget=600, recipe="block", topology=topology, lookahead=4)
    order = Drawn.of(Tally.of(np.zeros_like(lengths), lengths), prompt_tokens=0, seed=0, most=1000).tokens
    items = [{"id": str(n), "text": "a" * length} for n, length in enumerate(order.tolist())]
    measure = Measure(frames=None, template=Template(roles={"assistant": ("", "")}, prompt="", eos=False))
    rule = align("block", topology)
    collator = Collator(measure=measure, rule=rule, budget=600, buckets=True)
    sampler = PackingSampler(items, measure=measure, rule=rule, budget=600, lookahead=4, shuffle=False)
    batches = [collator(pack) for pack in sampler]
    assert [len(batch.ids) for batch in batches] == result.stream.sequences.tolist()
    shapes = {(batch.slots.total, len(batch.cu_seqlens), batch.max_seqlen) for batch in batches}
    assert result.shapes_in_buckets == len(shapes) > 1


def test_filler_may_be_the_longest_slot_of_a_bucket(tmp_path):
    """Packs of 33 and of 10 tokens, each in an eighth of 512: 54 of the second's 64 are filler, so both have one shape."""
    np.save(tmp_path / "lengths.npy", np.array([33, 10]))
    result = report(tmp_path / "lengths.npy", budget=512, max_sequences=1)
    assert (result.packs, result.shapes, result.shapes_in_buckets) == (2, 2, 1)


# ---- as it is told


def test_json_has_the_figures_only_where_asked(speech):
    assert report(speech, budget=2048).to_dict()["static"] is None
    result = report(speech, budget=2048, static=True)
    told = result.to_dict()
    assert tuple(told["static"]) == STATIC_KEYS
    assert json.loads(json.dumps(told)) == told
    plain = report(speech, budget=2048).to_dict()
    assert {key: told[key] for key in plain if key != "static"} == {key: plain[key] for key in plain if key != "static"}


def test_the_table_and_the_page_tell_it(speech):
    run = CliRunner().invoke(main, ["report", str(speech), "--budget", "2048", "--static", "--frame-budget", "1500"])
    assert run.exit_code == 0, run.output
    for row in (
        "static: packs",
        "frame_budget=1500:",
        "static: max_seqlen",
        "static: filler",
        "static: silence",
        "static: clips unused",
    ):
        assert row in run.output
    assert "static" not in CliRunner().invoke(main, ["report", str(speech), "--budget", "2048"]).output.replace(
        "static packs", ""
    )
    static = report(speech, budget=2048, static=True, frame_budget=1500).static
    assert f"max_sequences={static.max_sequences}, " in run.output
    page = report(speech, budget=2048, static=True, frame_budget=100).html()
    assert "Packs of one shape" in page
    assert "static: over the frames" not in page
    assert "static: over the frames" in report(speech, budget=2048, static=True, frame_budget=50).html()
    assert "Packs of one shape" not in report(speech, budget=2048).html()


def test_padded_rows_are_refused_before_anything_is_read(tmp_path, five_lines):
    with pytest.raises(ConfigError) as caught:
        report(tmp_path / "missing", budget=2048, layout="bshd", static=True)
    five_lines(
        caught.value,
        what="padded rows have no constant shape",
        got="static, layout 'bshd'",
        expected="layout 'thd'",
        because="different shapes within one budget",
        fix="leave out static, or pack with layout thd",
    )


def test_a_frame_budget_of_ordinary_packs_is_refused(tmp_path, five_lines):
    with pytest.raises(ConfigError) as caught:
        report(tmp_path / "missing", budget=2048, frame_budget=100)
    five_lines(
        caught.value,
        what="a frame budget without packs of constant shape",
        got="frame_budget=100, static=False",
        expected="both, or neither",
        because="a setting that does nothing hides a mistake",
        fix="add static=True (--static), or leave out the frame budget",
    )
    run = CliRunner().invoke(main, ["report", "missing", "--budget", "2048", "--frame-budget", "100"])
    assert run.exit_code == 2
    assert "add --static" in run.output
