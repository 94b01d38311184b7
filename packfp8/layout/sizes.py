"""How large the parts of a pack are told to be: as large as they are, one of a few sizes, or always the same.

                     tokens of the pack         offsets                            max_seqlen
    Least            what its slots need        one more than slots                the longest slot
    Buckets          eighths of the capacity    a power of two + 1                 a power of two
    Constant         the capacity               max_sequences + filler's + 1       the longest that a slot may be

Filler takes as many slots as the longest slot goes into the capacity: one, where a slot may be as long as the pack.

A compiler makes a program for each set of sizes that it meets, and takes seconds to minutes for it. Packs of a sampler are
nearly full, so that most fall into the highest eighth; powers of two leave a handful of values for the rest. The price is
filler, and offsets of slots that are not there; nothing real is longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from packfp8.rule import Alignment

EIGHTHS = 8
"""Totals of bucketed packs: at most so many, and rounding adds less than an eighth of the capacity and one multiple."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """The sizes of packs as they are."""

    rule: Alignment

    def tokens(self, used: int) -> int:
        """Tokens of a pack whose slots have `used`, filler left out."""
        return max(self.rule.pack(used), self.rule.total)

    def offsets(self, slots: int) -> int:
        """How many offsets tell of `slots`, filler's counted."""
        return slots + 1

    def longest(self, tokens: int) -> int:
        """`max_seqlen` where the longest slot has `tokens`."""
        return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """A few sizes, each at least that of the pack.

    Args:
        rule: whose multiples the totals are.
        capacity: tokens of a full pack, a multiple of the rule's total.
        max_sequences: most sequences of a pack, filler left out; None where only the capacity bounds them.
        longest_slot: tokens of the longest slot that a pack may have, filler's counted; at most the capacity.
    """

    rule: Alignment
    capacity: int
    max_sequences: int | None
    longest_slot: int

    def tokens(self, used: int) -> int:
        """Least eighth of the capacity, rounded up to the rule, that holds `used`."""
        eighths = max(1, -(-EIGHTHS * used // self.capacity))
        return min(self.capacity, self.rule.pack(-(-eighths * self.capacity // EIGHTHS)))

    def offsets(self, slots: int) -> int:
        """One more than the least power of two of at least `slots`, or than the most slots that a pack may have."""
        most = self.capacity // self.rule.sequence
        if self.max_sequences is not None:
            most = self.max_sequences + -(-self.capacity // self.longest_slot)
        return min(_power(slots), most) + 1

    def longest(self, tokens: int) -> int:
        """Least power of two of at least `tokens`, or the longest that a slot may be."""
        return min(_power(tokens), self.longest_slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One size for all packs.

    Args:
        capacity: tokens of every pack.
        max_sequences: most sequences of a pack, filler left out.
        longest_slot: tokens of the longest slot that a pack may have, filler's counted; at most the capacity.
    """

    capacity: int
    max_sequences: int
    longest_slot: int

    def tokens(self, used: int) -> int:
        """The capacity."""
        return self.capacity

    def offsets(self, slots: int) -> int:
        """Those of the most sequences, of the most slots of filler, and the end."""
        return self.max_sequences + -(-self.capacity // self.longest_slot) + 1

    def longest(self, tokens: int) -> int:
        """The longest that a slot may be: a filler slot may be as long."""
        return self.longest_slot


def _power(n: int) -> int:
    """The least power of two of at least n."""
    return 1 << max(0, n - 1).bit_length()
