"""Laws of slots: THD and BSHD are one layout with two sizings; filler is a slot of its own; nothing is cut."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from packfp8.errors import BudgetError, ExampleError, PackError, RuleError
from packfp8.layout import place
from packfp8.rule import RECIPES, Topology, align

topologies = st.builds(Topology, cp=st.integers(1, 4), tp=st.integers(1, 4), sp=st.booleans())
rules = st.builds(align, st.sampled_from(list(RECIPES)), topologies, layout=st.sampled_from(["thd", "bshd"]))
thd = rules.filter(lambda rule: rule.layout == "thd")
bshd = rules.filter(lambda rule: rule.layout == "bshd")
lengths = st.lists(st.integers(1, 150), max_size=9)


def is_legal(rule, total, sizes, rows):
    try:
        rule.check(total, slots=sizes, batch=rows or None)
    except RuleError:
        return False
    return True


# ---- laws of both sizings


@given(rules, lengths)
def test_every_token_of_a_pack_is_real_or_lost_to_one_cause(rule, lengths):
    slots = place(lengths, rule)
    assert set(slots.waste) == {"slot", "filler"}
    assert min(slots.waste.values()) >= 0
    assert sum(lengths) + sum(slots.waste.values()) == slots.total


@given(rules, lengths)
def test_sequences_keep_their_order_and_filler_comes_last_and_holds_nothing(rule, lengths):
    slots = place(lengths, rule)
    assert slots.sequences == len(lengths)
    assert slots.lengths.tolist() == lengths + [0] * (len(slots.sizes) - len(lengths))
    assert (slots.lengths <= slots.sizes).all()
    assert (slots.sizes > 0).all()
    assert slots.waste["filler"] == slots.sizes[len(lengths) :].sum()


@given(rules, lengths)
def test_offsets_are_sums_of_sizes_and_the_pack_is_legal(rule, lengths):
    slots = place(lengths, rule)
    assert slots.offsets[0] == 0
    assert slots.offsets[-1] == slots.total == slots.sizes.sum()
    assert slots.longest == max(slots.sizes)
    assert slots.lengths.dtype == slots.offsets.dtype == np.int64
    assert is_legal(rule, slots.total, slots.sizes.tolist(), slots.rows)


@given(rules, lengths)
def test_the_real_tokens_are_those_at_the_head_of_each_slot(rule, lengths):
    slots = place(lengths, rule)
    expected = []
    for number, length in enumerate(lengths):
        expected += range(slots.offsets[number], slots.offsets[number] + length)
    assert slots.real().tolist() == expected


@given(rules, lengths)
def test_its_arrays_cannot_be_written_to_and_the_users_are_left_alone(rule, lengths):
    given = np.array(lengths, dtype=np.int64)
    slots = place(given, rule)
    assert given.flags.writeable
    for array in (slots.lengths, slots.offsets):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


@given(rules)
def test_no_sequence_at_all_gives_the_least_pack_as_filler(rule):
    slots = place([], rule)
    assert slots.sequences == slots.lengths.sum() == slots.real().size == 0
    assert slots.waste == {"slot": 0, "filler": slots.total}
    assert slots.total == (rule.row(1) if slots.rows else rule.total)


# ---- THD


@given(thd, lengths)
def test_thd_gives_each_sequence_the_least_slot_and_the_pack_the_least_total(rule, lengths):
    slots = place(lengths, rule)
    used = sum(rule.slot(n) for n in lengths)
    assert slots.sizes[: len(lengths)].tolist() == [rule.slot(n) for n in lengths]
    assert slots.rows == 0
    assert slots.total - rule.total < used or slots.total == rule.total
    if slots.total > rule.total:
        with pytest.raises(BudgetError):
            place(lengths, rule, total=slots.total - rule.total)


@given(thd, lengths)
def test_filler_is_one_slot_of_its_own_and_none_where_nothing_is_left(rule, lengths):
    slots = place(lengths, rule)
    left = slots.total - sum(rule.slot(n) for n in lengths)
    assert slots.sizes[len(lengths) :].tolist() == ([left] if left else [])


@given(thd, lengths, st.integers(1, 60), st.integers(0, 12))
def test_filler_is_cut_into_the_fewest_slots_of_at_most_the_longest_and_every_other_slot_stays(rule, lengths, units, more):
    longest = rule.slot(max(lengths, default=1)) + units * rule.sequence
    total = place(lengths, rule).total + more * rule.total
    whole, cut = place(lengths, rule, total=total), place(lengths, rule, total=total, longest=longest)
    assert cut.longest <= longest
    assert (cut.total, cut.sequences, cut.waste) == (whole.total, whole.sequences, whole.waste)
    assert cut.sizes[: len(lengths)].tolist() == whole.sizes[: len(lengths)].tolist()
    filler = cut.sizes[len(lengths) :]
    assert len(filler) == -(-whole.waste["filler"] // longest)
    assert (cut.lengths[len(lengths) :] == 0).all()
    assert (filler > 0).all()
    assert (filler % rule.sequence == 0).all()
    assert cut.real().tolist() == whole.real().tolist()


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_a_sequence_whose_slot_is_the_longest_fits_and_one_more_is_refused(lines_of, layout):
    rule = align("bf16", Topology(cp=2), layout=layout)
    assert place([5, 8], rule, longest=8).longest == 8
    with pytest.raises(BudgetError) as caught:
        place([5, 9], rule, longest=8)
    assert lines_of(caught.value) == {
        "what": f"slot {0 if layout == 'bshd' else 1} of the pack is longer than a slot may be",
        "got": "12 tokens",
        "expected": "at most 8",
        "because": "kernels and tables of positions are told the longest slot, and need not reach further",
        "fix": "raise longest, or leave out the sequence",
    }


@pytest.mark.parametrize("longest", [0, -4, 3, 6])
def test_a_longest_slot_that_is_no_slot_is_refused(lines_of, longest):
    with pytest.raises(RuleError) as caught:
        place([1], align("bf16", Topology(cp=2)), longest=longest)
    assert lines_of(caught.value) == {
        "what": "the longest slot is not a slot",
        "got": f"longest={longest}",
        "expected": "a multiple of 4, at least 4",
        "because": "filler is cut into slots of so many tokens, and every slot obeys the rule",
        "fix": "floor it to a multiple of rule.sequence",
    }


def test_filler_does_not_grow_the_last_sequences_slot():
    slots = place([10, 11], align("block"), total=64)
    assert slots.offsets.tolist() == [0, 10, 21, 64]
    assert slots.lengths.tolist() == [10, 11, 0]
    assert slots.waste == {"slot": 0, "filler": 43}


def test_one_token_sequences_have_slots_of_their_own():
    assert place([3, 1, 4], align("bf16")).offsets.tolist() == [0, 3, 4, 8]
    assert place([1, 1, 1], align("bf16")).offsets.tolist() == [0, 1, 2, 3]


def test_the_slot_is_rounded_for_cp_and_only_the_pack_for_fp8():
    slots = place([3, 5], align("block", Topology(cp=2, tp=2, sp=True)))
    assert slots.sizes.tolist() == [4, 8, 20]
    assert slots.waste == {"slot": 4, "filler": 20}


@given(thd, lengths, st.integers(0, 3))
def test_a_total_that_is_given_is_kept(rule, lengths, more):
    total = place(lengths, rule).total + more * rule.total
    slots = place(lengths, rule, total=total)
    assert slots.total == total
    assert len(slots.sizes) <= len(lengths) + 1


# ---- BSHD


@given(bshd, lengths.filter(len))
def test_bshd_gives_every_sequence_a_row_of_the_least_size(rule, lengths):
    slots = place(lengths, rule)
    assert slots.rows == len(lengths) == len(slots.sizes)
    size = next(s for s in range(max(lengths), 10_000) if is_legal(rule, s * slots.rows, [s] * slots.rows, slots.rows))
    assert set(slots.sizes) == {size}
    assert slots.waste["filler"] == 0


@given(bshd, lengths, st.integers(1, 12), st.integers(1, 3))
def test_rows_and_total_that_are_given_are_kept(rule, lengths, rows, times):
    assume(rows >= len(lengths))
    least = place(lengths, rule, rows=rows)
    assert least.rows == rows
    total = least.total * times
    slots = place(lengths, rule, total=total, rows=rows)
    assert (slots.total, slots.rows, set(slots.sizes)) == (total, rows, {total // rows})
    assert slots.waste["filler"] == (rows - len(lengths)) * slots.longest
    if rule.row(rows) < least.longest:
        with pytest.raises(BudgetError):
            place(lengths, rule, total=least.total - rows * rule.row(rows), rows=rows)


@given(st.sampled_from(list(RECIPES)), topologies, lengths.filter(len))
def test_both_layouts_hold_the_same_real_tokens(recipe, topology, lengths):
    packed, padded = (place(lengths, align(recipe, topology, layout=layout)) for layout in ("thd", "bshd"))
    assert packed.lengths[: packed.sequences].tolist() == padded.lengths.tolist() == lengths


# ---- errors


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize(("lengths", "position", "got"), [([0], 0, 0), ([3, 0, 2], 1, 0), ([3, 2, -7], 2, -7)])
def test_a_sequence_without_tokens_is_refused(lines_of, layout, lengths, position, got):
    with pytest.raises(ExampleError) as caught:
        place(lengths, align("block", layout=layout))
    assert lines_of(caught.value) == {
        "what": f"sequence {position} of the pack holds no token",
        "got": f"{got} tokens",
        "expected": "at least one token",
        "because": "a slot of no token is an attention segment of length zero, and nothing would be learned from it",
        "fix": "drop the example before packing",
    }


@pytest.mark.parametrize("lengths", [[2.5], [3.0], [float("nan")], [True, False], ["3"], [None]])
def test_a_length_that_is_no_whole_number_is_refused(lines_of, lengths):
    with pytest.raises(ExampleError) as caught:
        place(lengths, align("block"))
    lines = lines_of(caught.value)
    assert lines["what"] == "the lengths of the pack are not whole numbers"
    assert lines["got"].startswith(f"{lengths[:1]!r}"[:-1])
    assert lines["expected"] == "integers"
    assert "a token lost" in lines["because"]
    assert "Measure" in lines["fix"]


def test_slots_beyond_the_total_are_refused(lines_of):
    rule = align("block", Topology(cp=2))
    assert place([29, 3], rule, total=64).total == 64
    with pytest.raises(BudgetError) as caught:
        place([29, 3], rule, total=32)
    assert lines_of(caught.value) == {
        "what": "the sequences do not fit the pack",
        "got": "36 tokens of slots",
        "expected": "at most 32",
        "because": "a sequence is never cut: a truncated row would lose its last labels, or frames that a clip still sends",
        "fix": "give fewer sequences, or raise the budget",
    }


@pytest.mark.parametrize(
    ("options", "got", "expected"),
    [
        ({"rows": 1}, "2 rows", "at most 1"),
        ({"total": 32}, "17 tokens in a row", "at most 16"),
        ({"total": 48, "rows": 3}, "17 tokens in a row", "at most 16"),
    ],
)
def test_sequences_beyond_the_rows_or_their_size_are_refused(lines_of, options, got, expected):
    with pytest.raises(BudgetError) as caught:
        place([17, 1], align("block", layout="bshd"), **options)
    lines = lines_of(caught.value)
    assert (lines["what"], lines["got"], lines["expected"]) == ("the sequences do not fit the pack", got, expected)
    assert "never cut" in lines["because"]
    assert "fewer sequences" in lines["fix"]


@pytest.mark.parametrize(("layout", "total"), [("thd", 24), ("thd", 33), ("bshd", 24), ("bshd", 34)])
def test_a_total_that_is_no_legal_pack_is_refused(lines_of, layout, total):
    with pytest.raises(RuleError) as caught:
        place([5, 5], align("block", layout=layout), total=total)
    lines = lines_of(caught.value)
    assert "breaks the rule of block" in lines["what"]
    assert f"{total} tokens" in lines["got"] or f"{total // 2} tokens" in lines["got"]


def test_a_total_that_is_not_whole_rows_is_refused_and_not_shrunk(lines_of):
    rule = align("bf16", layout="bshd")
    assert place([5, 5, 5], rule, total=99, rows=3).total == 99
    with pytest.raises(RuleError) as caught:
        place([5, 5, 5], rule, total=100, rows=3)
    assert lines_of(caught.value) == {
        "what": "the total of the pack is not the same number of tokens for each row",
        "got": "100 tokens in 3 rows",
        "expected": "a multiple of 3",
        "because": "rows are of one size, and a token beyond the last row would be nobody's",
        "fix": "take the total from rule.floor(budget, batch=rows)",
    }


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("total", [0, -16])
@pytest.mark.parametrize("lengths", [[], [5]])
def test_a_pack_of_no_token_is_refused(lines_of, layout, total, lengths):
    with pytest.raises(RuleError) as caught:
        place(lengths, align("block", layout=layout), total=total)
    assert lines_of(caught.value) == {
        "what": "a pack of no token cannot be",
        "got": f"total={total}",
        "expected": "at least 16 tokens",
        "because": "kernels refuse a batch of no token, and a rank that skips a step hangs the others",
        "fix": "leave out total: a pack of no sequence is then the least pack, all filler",
    }


def test_no_row_at_all_is_refused():
    with pytest.raises(PackError, match="the number of rows is not a count"):
        place([], align("block", layout="bshd"), rows=0)
