"""Extent: the tokens and rows that a pack gets, by itself or as the largest of several."""

from __future__ import annotations

from dataclasses import dataclass

from packfp8.data.intake import Taken
from packfp8.errors import BudgetError, ExampleError
from packfp8.layout import Buckets, Constant, Least
from packfp8.rule import Alignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Tokens of a pack, over all CP ranks.

    Args:
        tokens: T; BSHD: B * S.
        rows: B; None in THD.
    """

    tokens: int
    rows: int | None


def extent_of(taken: Taken, sizes: Least | Buckets | Constant, rule: Alignment) -> Extent:
    """What one pack needs."""
    return _extent([taken], sizes, rule)


def common_extent(taken: list[Taken], sizes: Least | Buckets | Constant, rule: Alignment, budget: int | None) -> Extent:
    """What holds each of several packs.

    Raises:
        ExampleError: there is no pack.
        BudgetError: BSHD, the most rows of the longest are over the budget.
    """
    if not taken:
        raise ExampleError(
            "the step has no micro-batch",
            got="no groups of examples",
            expected="at least one group, which may be empty",
            because="a rank that skips a step hangs the others",
            fix="give as many groups as the pipeline has micro-batches; an empty one becomes filler of zero weight",
        )
    extent = _extent(taken, sizes, rule)
    if rule.layout == "bshd" and budget is not None and extent.tokens > budget:
        raise _rows_over_budget(taken, extent, budget)
    return extent


def _extent(taken: list[Taken], sizes: Least | Buckets | Constant, rule: Alignment) -> Extent:
    if rule.layout == "thd":
        return Extent(tokens=max(sizes.tokens(sum(map(rule.slot, one.lengths))) for one in taken), rows=None)
    rows = max(1, *(len(one.kept) for one in taken))
    longest = max(1, *(max(one.lengths, default=1) for one in taken))
    return Extent(tokens=rows * -(-longest // rule.row(rows)) * rule.row(rows), rows=rows)


def _rows_over_budget(taken: list[Taken], extent: Extent, budget: int) -> BudgetError:
    length, name = max((len(encoded), example.id) for one in taken for example, encoded in one.kept)
    return BudgetError(
        f"micro-batches with the row of example {name!r} have no common shape within the budget",
        got=f"{extent.rows} rows of {extent.tokens // extent.rows}, {extent.tokens} tokens; its row has {length}",
        expected=f"at most {budget} tokens",
        because="pipeline stages exchange one [B, S]; packs of many short rows and of few long ones are both within the budget",
        fix="pack with layout='thd', where one T within the budget holds every pack; or give each micro-batch as many rows",
    )
