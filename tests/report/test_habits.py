"""Habits of rounding: what the rule says of them, pack by pack."""

import random

import pytest

from packfp8.errors import ConfigError, RuleError
from packfp8.report.habits import FATES, HABITS, draw_habits, fate_of, judge
from packfp8.rule import Topology, align

PACKS = [random.Random(seed).choices(range(3, 400), k=8) for seed in range(200)]
NAMED = {habit.name: habit for habit in HABITS}
JOBS = [align(recipe, Topology(cp=cp, tp=tp, sp=True)) for recipe in ("block", "mxfp8") for cp in (1, 2) for tp in (1, 4)]


@pytest.mark.parametrize("rule", JOBS, ids=lambda rule: rule.fingerprint)
def test_a_pack_has_a_fate_exactly_where_the_rule_refuses_it(rule):
    draw = random.Random(0)
    for _ in range(300):
        slots = [draw.choice((4, 6, 8, 64)) for _ in range(3)]
        total = sum(slots) + draw.choice((0, 2, 8, 16, 32))
        slots.append(total - sum(slots))
        try:
            rule.check(total, slots=slots)
            refused = False
        except RuleError:
            refused = True
        assert bool(fate_of(rule, total, slots)) == refused, (total, slots)


@pytest.mark.parametrize("rule", JOBS, ids=lambda rule: rule.fingerprint)
def test_our_own_packs_are_right_everywhere_and_none_that_is_right_has_less_padding(rule):
    ours, *others = (judge(habit, rule, PACKS) for habit in reversed(HABITS))
    assert ours.fates == {}
    assert str(ours) == f"right, {ours.padding:.1%} padding"
    assert all(other.padding >= ours.padding for other in others if not other.fates)


def test_eight_rows_pass_forward_and_die_in_backward_half_of_the_time():
    verdict = judge(NAMED["pack to 8, what forward asks"], align("block"), PACKS)
    assert set(verdict.fates) == {"dies in backward"}
    assert 0.4 < verdict.fates["dies in backward"] / verdict.packs < 0.6


def test_sixteen_for_the_whole_pack_is_too_little_for_two_slabs_or_four_shards():
    habit = NAMED["pack to 16, whatever the ranks"]
    assert judge(habit, align("block"), PACKS).fates == {}
    assert set(judge(habit, align("block", Topology(cp=2)), PACKS).fates) == {"dies in backward"}
    assert set(judge(habit, align("block", Topology(tp=4, sp=True)), PACKS).fates) == {"dies in forward"}


def test_slots_that_are_left_alone_are_silently_wrong_under_cp():
    verdict = judge(NAMED["pack to 16, slots left alone"], align("block", Topology(cp=2)), PACKS)
    assert verdict.fates["wrong, silently"] > 0.9 * verdict.packs


def test_padded_batches_are_not_judged_by_these_habits():
    with pytest.raises(ConfigError) as caught:
        judge(HABITS[0], align("block", layout="bshd"), PACKS)
    assert str(caught.value).splitlines() == [
        "habits are judged on packed batches",
        "  got:      layout 'bshd'",
        "  expected: layout 'thd'",
        "  because:  the rows of a padded batch are rounded by other habits",
        "  fix:      align(..., layout='thd')",
    ]


def test_the_picture_has_a_cell_with_its_verdict_for_each_habit_and_job():
    pytest.importorskip("matplotlib", reason="charts are drawn by matplotlib")
    rules = JOBS[:2]
    (axes,) = draw_habits(PACKS, *rules).axes
    told = [text.get_text().replace("\n", ", ") for text in axes.texts]
    assert told == [str(judge(habit, rule, PACKS)) for habit in HABITS for rule in rules]
    assert len(axes.patches) == len(told)
    assert set(FATES.values()) >= {fate for text in told for fate in FATES.values() if text.startswith(fate)}
