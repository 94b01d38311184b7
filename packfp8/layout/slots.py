"""Slots: the rooms of one pack. THD gives each its own size, BSHD gives all the same; nothing else differs.

THD    | a a a . | b b b b b b . . | c . . . | . . . . . . . . |      . padding, the last slot is filler (or several are)
BSHD   | a a a . . . . . | b b b b b b . . | c . . . . . . . |        rows of S, right-padded
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packfp8.errors import BudgetError, ExampleError, RuleError
from packfp8.rule import Alignment

OFFSET_LIMIT = 2**31
"""Tokens that a pack stays below: attention kernels take offsets as int32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slots:
    """The slots of one pack, in order; those that hold no example (filler) come last.

    Args:
        lengths: int64 `[slots]`, real tokens in each; 0 in filler.
        offsets: int64 `[slots + 1]`, where each begins, padding included; the last is T.
        sequences: how many slots hold an example.
        rows: number of equal slots (BSHD), 0 for THD.
    """

    lengths: np.ndarray
    offsets: np.ndarray
    sequences: int
    rows: int

    def __post_init__(self) -> None:
        self.lengths.flags.writeable = self.offsets.flags.writeable = False

    @property
    def total(self) -> int:
        """Tokens of the pack, T; BSHD: B * S."""
        return int(self.offsets[-1])

    @property
    def sizes(self) -> np.ndarray:
        """int64 `[slots]`, tokens kept for each."""
        return np.diff(self.offsets)

    @property
    def longest(self) -> int:
        """Tokens of the longest slot."""
        return int(self.sizes.max())

    @property
    def waste(self) -> dict[str, int]:
        """Tokens that hold nothing, by cause: rounding within `slot`s that hold an example, and `filler`."""
        kept = int(self.offsets[self.sequences])
        return {"slot": kept - int(self.lengths.sum()), "filler": self.total - kept}

    def real(self) -> np.ndarray:
        """int64 `[sum of lengths]`, the position of every real token in the pack, sequence after sequence."""
        starts = self.offsets[:-1] - np.concatenate(([0], np.cumsum(self.lengths[:-1])))
        return np.arange(int(self.lengths.sum())) + np.repeat(starts, self.lengths)


def place(
    lengths: Sequence[int],
    rule: Alignment,
    *,
    total: int | None = None,
    rows: int | None = None,
    longest: int | None = None,
) -> Slots:
    """The slots for sequences of `lengths` real tokens, as the rule's layout sizes them.

    Args:
        lengths: whole numbers of at least 1; no sequence at all gives a pack of filler.
        total: tokens to fill the pack up to (THD) or B * S (BSHD with `rows`); the least legal total where it is left out.
        rows: number of rows (BSHD), at least one for each sequence; as many as sequences where it is left out.
        longest: most tokens of a slot, a multiple of the rule's slot (THD): filler is cut into slots of at most so many. It is
            one slot where `longest` is left out.

    Raises:
        ExampleError: a sequence without tokens, or a length that is no whole number.
        BudgetError: the slots do not fit `total`, the sequences do not fit `rows`, a slot is longer than `longest`, or the
            pack's offsets do not fit int32.
        RuleError: `total` is not a legal pack, or not the same number of tokens for each of `rows`; `longest` is no legal slot.
    """
    real = _whole(lengths)
    if real.size and real.min() < 1:
        raise ExampleError(
            f"sequence {int(real.argmin())} of the pack holds no token",
            got=f"{int(real.min())} tokens",
            expected="at least one token",
            because="a slot of no token is an attention segment of length zero, and nothing would be learned from it",
            fix="drop the example before packing",
        )
    if total is not None and total < 1:
        raise RuleError(
            "a pack of no token cannot be",
            got=f"total={total}",
            expected=f"at least {rule.total} tokens",
            because="kernels refuse a batch of no token, and a rank that skips a step hangs the others",
            fix="leave out total: a pack of no sequence is then the least pack, all filler",
        )
    if longest is not None and (longest < 1 or longest % rule.sequence):
        raise RuleError(
            "the longest slot is not a slot",
            got=f"longest={longest}",
            expected=f"a multiple of {rule.sequence}, at least {rule.sequence}",
            because="filler is cut into slots of so many tokens, and every slot obeys the rule",
            fix="floor it to a multiple of rule.sequence",
        )
    slots = _rows(real, rule, total, rows) if rule.layout == "bshd" else _own(real, rule, total, longest)
    if longest is not None and slots.longest > longest:
        raise BudgetError(
            f"slot {int(slots.sizes.argmax())} of the pack is longer than a slot may be",
            got=f"{slots.longest} tokens",
            expected=f"at most {longest}",
            because="kernels and tables of positions are told the longest slot, and need not reach further",
            fix="raise longest, or leave out the sequence",
        )
    if slots.total >= OFFSET_LIMIT:  # told here, before anything of the pack's size is made
        raise BudgetError(
            "the offsets of the pack do not fit their type",
            got=f"{slots.total} tokens",
            expected=f"less than {OFFSET_LIMIT}",
            because="attention kernels take int32 offsets, and one that wraps reads another sequence's memory",
            fix="lower the budget",
        )
    rule.check(slots.total, slots=slots.sizes.tolist(), batch=slots.rows or None)
    return slots


def _whole(lengths: Sequence[int]) -> np.ndarray:
    """int64 `[sequences]`."""
    given = np.asarray(lengths).reshape(-1)
    if given.size and given.dtype.kind not in "iu":
        raise ExampleError(
            "the lengths of the pack are not whole numbers",
            got=f"{given.tolist()[:4]} of dtype {given.dtype}",
            expected="integers",
            because="tokens are counted in integers; a rounded length is a token lost, or one that is not there",
            fix="take the lengths from Measure",
        )
    return given.astype(np.int64)


def _own(real: np.ndarray, rule: Alignment, total: int | None, longest: int | None) -> Slots:
    """THD: each slot its own length rounded up, and filler for what is left, in slots of at most `longest`."""
    sizes = -(-real // rule.sequence) * rule.sequence
    used = int(sizes.sum())
    total = max(rule.pack(used), rule.total) if total is None else total
    _fits(used, total)
    left = total - used
    whole, rest = divmod(left, left + 1 if longest is None else longest)
    filler = [longest] * whole + [rest] * (rest > 0)
    return Slots(
        lengths=np.concatenate((real, np.zeros(len(filler), np.int64))),
        offsets=np.concatenate(([0], np.cumsum(np.concatenate((sizes, np.array(filler, np.int64)))))),
        sequences=len(real),
        rows=0,
    )


def _rows(real: np.ndarray, rule: Alignment, total: int | None, rows: int | None) -> Slots:
    """BSHD: B rows of S, where S is the least legal size that holds the longest; rows without an example are filler."""
    rows = max(1, len(real)) if rows is None else rows
    if rows < len(real):
        _fits(len(real), rows, "rows")
    step = rule.row(rows)
    longest = int(real.max()) if real.size else 1
    size = -(-longest // step) * step if total is None else total // rows
    if total is not None and total % rows:
        raise RuleError(
            "the total of the pack is not the same number of tokens for each row",
            got=f"{total} tokens in {rows} rows",
            expected=f"a multiple of {rows * step}",
            because="rows are of one size, and a token beyond the last row would be nobody's",
            fix="take the total from rule.floor(budget, batch=rows)",
        )
    _fits(longest, size, "tokens in a row")
    return Slots(
        lengths=np.concatenate((real, np.zeros(rows - len(real), np.int64))),
        offsets=np.arange(rows + 1, dtype=np.int64) * size,
        sequences=len(real),
        rows=rows,
    )


def _fits(used: int, room: int, what: str = "tokens of slots") -> None:
    if used > room:
        raise BudgetError(
            "the sequences do not fit the pack",
            got=f"{used} {what}",
            expected=f"at most {room}",
            because="a sequence is never cut: a truncated row would lose its last labels, or frames that a clip still sends",
            fix="give fewer sequences, or raise the budget",
        )
