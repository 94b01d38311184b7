"""What if: the waste under other budgets, topologies and recipes, from the histogram of lengths alone, in milliseconds each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from packfp8.errors import BudgetError
from packfp8.lengths import Histogram
from packfp8.packing import forecast
from packfp8.rule import RECIPES, Alignment, align

BUDGETS = tuple(1 << power for power in range(11, 18))
"""2,048 to 131,072 tokens: what a rank's memory holds in practice."""

RANKS = (1, 2, 4, 8)
"""Context- and tensor-parallel ranks to try: those of one host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    """What a rule and a budget would give.

    Attributes:
        budget: tokens.
        rule: the rule in force.
        packs: packs needed.
        waste: share of the tokens in packs that are not real; the last pack counts what it holds.
        over_budget: share of all real tokens that are in sequences longer than a pack.
    """

    budget: int
    rule: Alignment
    packs: int
    waste: float
    over_budget: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """Guesses around the one that was asked about.

    Attributes:
        here: as asked.
        by_budget: cp -> guesses over rising budgets.
        by_recipe: (recipe, tp) -> guess at the budget asked about, with SP over tp ranks.
    """

    here: Guess
    by_budget: dict[int, tuple[Guess, ...]]
    by_recipe: dict[tuple[str, int], Guess]


def what_if(histogram: Histogram, rule: Alignment, *, budget: int, max_sequences: int | None) -> WhatIf:
    """The guesses for the lengths of a histogram; a combination whose least pack is over the budget is left out."""
    guess = _Guesses(histogram, max_sequences)
    budgets = sorted({*BUDGETS, budget})
    cps = sorted({*RANKS, rule.topology.cp})
    by_budget = {cp: guess.all((b, _with(rule, cp=cp)) for b in budgets) for cp in cps}
    recipes = [(name, tp, _with(rule, recipe=name, tp=tp, sp=tp > 1)) for name in RECIPES for tp in RANKS]
    by_recipe = {(name, tp): found for name, tp, other in recipes for found in guess.all([(budget, other)])}
    (here,) = guess.all([(budget, rule)])
    return WhatIf(here=here, by_budget=by_budget, by_recipe=by_recipe)


class _Guesses:
    """Guesses over one histogram; rules that come to the same multiple and capacity are packed once."""

    def __init__(self, histogram: Histogram, max_sequences: int | None) -> None:
        self._histogram, self._max_sequences = histogram, max_sequences
        self._known: dict[tuple, tuple[int, float, float]] = {}

    def all(self, cases: Iterable[tuple[int, Alignment]]) -> tuple[Guess, ...]:
        """The guesses of those cases in which a pack can be."""
        found = []
        for budget, rule in cases:
            try:
                capacity = rule.floor(budget)
            except BudgetError:
                continue
            key = (capacity, rule.sequence, rule.layout, rule.row(1) if rule.layout == "bshd" else 0)
            if key not in self._known:
                self._known[key] = self._counted(capacity, rule)
            packs, waste, over = self._known[key]
            found.append(Guess(budget=budget, rule=rule, packs=packs, waste=waste, over_budget=over))
        return tuple(found)

    def _counted(self, capacity: int, rule: Alignment) -> tuple[int, float, float]:
        fitting = fits(self._histogram, capacity, rule)
        if not fitting.examples:
            return 0, 1.0, 1.0
        if rule.layout == "bshd":
            packs, held = sorted_batches(fitting, capacity, rule, self._max_sequences), fitting.tokens
        else:
            told = forecast(fitting, capacity, rule.sequence, self._max_sequences)
            packs, held = told.packs, told.slot_tokens
        spent = max(held, (packs - 1) * capacity)  # on a small corpus the rest of the last pack would hide everything else
        return packs, 1 - fitting.tokens / spent, 1 - fitting.tokens / self._histogram.tokens


def longest(capacity: int, rule: Alignment) -> int:
    """Tokens of the longest sequence that a pack can hold."""
    multiple = rule.row(1) if rule.layout == "bshd" else rule.sequence
    return capacity // multiple * multiple


def fits(histogram: Histogram, capacity: int, rule: Alignment) -> Histogram:
    """The lengths that a pack can hold."""
    inside = histogram.lengths <= longest(capacity, rule)
    return Histogram(lengths=histogram.lengths[inside], counts=histogram.counts[inside])


def sorted_batches(histogram: Histogram, capacity: int, rule: Alignment, max_sequences: int | None) -> int:
    """Padded batches needed when rows are sorted by length, longest first: no bucketing pads less."""
    lengths, counts = histogram.lengths[::-1].tolist(), histogram.counts[::-1].tolist()
    batches, room = 0, 0  # rows that the last batch may still take
    for length, count in zip(lengths, counts):
        taken = min(room, count)
        room, count = room - taken, count - taken
        if count:
            rows = _rows(length, capacity, rule, max_sequences)
            more = -(-count // rows)
            batches, room = batches + more, more * rows - count
    return batches


def _rows(length: int, capacity: int, rule: Alignment, max_sequences: int | None) -> int:
    """Most rows of this length in a batch."""
    rows = min(capacity // length, max_sequences or capacity)
    while rows > 1 and rows * (-(-length // rule.row(rows)) * rule.row(rows)) > capacity:
        rows -= 1
    return rows


def _with(rule: Alignment, *, recipe: str | None = None, **sizes) -> Alignment:
    """The same rule with another recipe or other sizes."""
    ranks = {f"{name}_rank": 0 for name in ("dp", "cp", "tp")}
    topology = replace(rule.topology, **ranks, **sizes)
    return align(recipe or rule.recipe, topology, layout=rule.layout, trains_weights=rule.trains_weights, fast=rule.fast)
