"""The longest slot that a pack may have: what kernels are told as `max_seqlen`, whatever a pack holds."""

from __future__ import annotations

from packfp8.data.checks import is_count
from packfp8.errors import BudgetError, ConfigError
from packfp8.rule import Alignment


def longest_slot(max_seqlen: int, rule: Alignment, capacity: int | None) -> int:
    """Tokens of the longest slot: `max_seqlen` floored to a multiple of the rule's slot, and at most the capacity.

    Args:
        capacity: tokens of a full pack; None where packs have no bound.

    Raises:
        ConfigError: less than a slot, or no whole number; or padded rows, which are all as long as the longest.
    """
    if rule.layout == "bshd":
        raise ConfigError(
            "padded rows have no bound of their own",
            got=f"max_seqlen={max_seqlen}, layout 'bshd'",
            expected="no max_seqlen, or layout 'thd'",
            because="all rows of a batch are as long as its longest, and how long that may be follows from their number",
            fix="leave out max_seqlen, or pack with layout='thd'",
        )
    if not is_count(max_seqlen, rule.sequence):
        raise ConfigError(
            "packs have no room for a slot",
            got=f"max_seqlen={max_seqlen!r}",
            expected=f"a whole number of at least {rule.sequence}, or None for no bound but the pack",
            because=f"every slot is a multiple of {rule.sequence} tokens, filler's too",
            fix="leave out max_seqlen, or give the one that `packfp8 report --static` prints",
        )
    floored = max_seqlen.__index__() // rule.sequence * rule.sequence
    return floored if capacity is None else min(floored, capacity)


def longer_than_a_slot(name: str, tokens: int, longest: int) -> BudgetError:
    """The error for an example whose slot would be longer than `longest`."""
    return BudgetError(
        f"example {name!r} is longer than a slot may be",
        got=f"{tokens} tokens",
        expected=f"at most {longest}, the max_seqlen that kernels are told",
        because="kernels and tables of positions reach no further than max_seqlen, and a sequence is never cut",
        fix="raise max_seqlen, or choose over_budget='set_aside' to leave such examples out and have them named",
    )
