"""Three sentences of a report that a person can act on: how much is wasted, the largest cause, what to do."""

from __future__ import annotations

from packfp8.report.result import Report

_IDLE = 0.05  # idle share of a step above which balance is the thing to mend
_FEW_STEPS = 10  # steps of an epoch below which its last one weighs more than the packing
_WORTH = 0.005  # share of the tokens that is worth a change of settings
_NAMES = {"attention": "attention", "encoder_frames": "the audio encoder", "supervised": "the loss"}


def sentences(report: Report) -> tuple[str, str, str]:
    """How much, why, and what to do about it."""
    if not report.packs:
        return (
            f"A budget of {report.budget:,} tokens holds none of the {report.examples:,} examples.",
            f"The longest has {report.histogram.longest:,} tokens and the shortest {int(report.histogram.lengths[0]):,}.",
            f"Raise the budget to {_budget_for_all(report):,} to take all of them.",
        )
    return _how_much(report), _why(report), report.verdict or _advice(report)


def _how_much(report: Report) -> str:
    dp = report.rule.topology.dp
    steps = several(report.steps, "step") + (f" on {dp} ranks" if dp > 1 else "")
    rest = -report.packs % dp
    empty = f", {several(rest, 'pack')} of the last one empty" if rest else ""
    return (
        f"A budget of {report.budget:,} wastes {percent(1 - report.fill_real)} of its tokens: {several(report.packs, 'pack')} "
        f"({steps}{empty}), where no packing could do with fewer than {report.bounds.best:,}."
    )


def _why(report: Report) -> str:
    waste, total = report.waste, max(1, report.tokens_total)
    causes = {"slot": waste.slot / total, "filler": waste.filler / total, "over": waste.over_budget / total}
    cause = max(causes, key=causes.get)
    if not any(causes.values()):
        return "Nothing is lost: every slot is full, and so is every pack."
    if cause == "over":
        share = waste.over_budget / report.histogram.tokens
        lost = f"{several(report.over_budget, 'example')} of over {_longest(report):,} tokens cannot be packed"
        return (
            f"The largest cause is the budget itself: {lost}, {percent(share)} of all tokens; "
            f"{_budget_for_all(report):,} would take every one."
        )
    if cause == "slot" and report.rule.layout == "bshd":
        return (
            f"The largest cause is padding to the longest row, {percent(causes['slot'])} of all tokens: "
            "layout thd has slots of their own sizes."
        )
    if cause == "slot":
        return (
            f"The largest cause is rounding slots up to {report.rule.sequence} tokens, {percent(causes['slot'])}: "
            f"that is twice cp ({report.rule.topology.cp}), so half as many context-parallel ranks would halve it."
        )
    mean = report.sequences_per_pack["mean"]
    if report.packs * report.capacity - report.slot_tokens < report.capacity:
        return (
            f"The largest cause is filler in the last pack, {waste.filler:,} tokens of the whole epoch: "
            f"{mean:.1f} sequences share a pack, and all the others are full."
        )
    remedy = "a larger lookahead or budget fills better" if mean < 8 else "a larger lookahead fills better"
    return (
        f"The largest cause is filler, {percent(causes['filler'])}: {mean:.1f} sequences share a pack of "
        f"{report.capacity:,} tokens, and {remedy}."
    )


def _advice(report: Report) -> str:
    idle = {work: share for work, share in report.imbalance.items() if share is not None}
    worst = max(idle, key=idle.get)
    if report.packs < _FEW_STEPS * report.rule.topology.dp:
        return (
            f"So short an epoch, {several(report.steps, 'step')}, is decided by its last one: "
            "judge the budget by the whole corpus, or by a smaller budget."
        )
    if report.rule.topology.dp > 1 and idle[worst] > _IDLE:
        return (
            f"Ranks wait {percent(idle[worst])} of each step for the slowest in {_NAMES[worst]}: "
            "a wider window of steps, or a cost that weighs this work, deals packs more evenly."
        )
    here = report.what_if.here
    same_cp = report.what_if.by_budget.get(report.rule.topology.cp, ())
    best = min(same_cp, key=lambda guess: (guess.waste + guess.over_budget, guess.budget), default=here)
    gain = here.waste + here.over_budget - best.waste - best.over_budget
    if gain > _WORTH:
        return f"A budget of {best.budget:,} would save {percent(gain)} of the tokens."
    padded = {rival.name: rival for rival in report.compare}.get("padded, 30 buckets")
    if padded:
        more = padded.packs / max(1, report.compare[-1].packs)
        return f"Padded batches from 30 buckets would take {more:.2f} times as many steps of the same budget."
    return f"No budget up to {same_cp[-1].budget:,} would save more than {percent(max(gain, 0.001))}: keep this one."


def percent(share: float) -> str:
    """A share as a person writes it, with more digits near 0 and near 100: 12 %, 3.4 %, 0.05 %, 99.98 %."""
    number = 100 * share
    if 0 < number < 0.005:
        return "less than 0.01 %"
    far = min(number, 100 - number)
    digits = 0 if far >= 9.95 or far == 0 else 1 if far >= 0.95 else 2
    return f"{number:.{digits}f} %"


def several(count: int, noun: str) -> str:
    """ "1 pack", "2 packs"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _longest(report: Report) -> int:
    from packfp8.report.what_if import longest

    return longest(report.capacity, report.rule)


def _budget_for_all(report: Report) -> int:
    """Least budget that holds the longest example."""
    return report.rule.pack(report.rule.slot(report.histogram.longest))
