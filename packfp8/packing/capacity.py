"""Capacity: what one pack can hold, counted in units of the slot's multiple."""

from __future__ import annotations

from dataclasses import dataclass

from packfp8.errors import BudgetError, ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """The budget of a pack, floored up front: whatever is packed into it needs no cutting after.

    Attributes:
        multiple: tokens of a unit; every slot is a whole number of units.
        units: slots of a pack take at most so many units.
        max_sequences: a pack holds at most so many sequences; at most `units`, since a slot takes one unit or more.
    """

    multiple: int
    units: int
    max_sequences: int

    @classmethod
    def of(cls, capacity: int, multiple: int = 1, max_sequences: int | None = None) -> Capacity:
        """Return the capacity of packs of at most `capacity` tokens whose slots are multiples of `multiple`.

        Raises ConfigError for a value that is not a whole number of at least 1, BudgetError for less than one slot.
        """
        capacity, multiple = counted("capacity", capacity), counted("multiple", multiple)
        units = capacity // multiple
        if units < 1:
            raise BudgetError(
                "the capacity does not hold a single slot",
                got=f"capacity {capacity}",
                expected=f"at least {multiple} tokens",
                because=f"every slot is a multiple of {multiple} tokens, as the rule asks",
                fix="raise the budget",
            )
        most = units if max_sequences is None else min(units, counted("max_sequences", max_sequences))
        return cls(multiple=multiple, units=units, max_sequences=most)

    @property
    def tokens(self) -> int:
        """Tokens that the slots of a pack may take: the capacity floored to the multiple."""
        return self.units * self.multiple


def counted(name: str, value: int, least: int = 1) -> int:
    """Return the setting as an int; raises ConfigError where it is not a whole number of at least `least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise ConfigError(
            f"{name} is not a count",
            got=repr(value),
            expected=f"a whole number, at least {least}",
            because=f"{name} counts tokens, frames, sequences, packs, ranks or windows",
            fix=f"set {name} to such an int",
        )
    return value.__index__()


def too_long(name: str, length: int, budget: int, *, slot: str) -> BudgetError:
    """Return the error for a sequence that no pack can hold; `slot` says what the sequence would take."""
    return BudgetError(
        f"{name} is longer than a pack",
        got=f"{length} tokens, {slot}",
        expected=f"at most {budget} tokens",
        because="a sequence is never cut: a cut would drop audio frames or supervised tokens",
        fix="raise the budget, or set over-long examples aside",
    )


def too_many_frames(name: str, frames: int, budget: int) -> BudgetError:
    """Return the error for a sequence whose audio no pack can hold."""
    return BudgetError(
        f"{name} has more audio than a pack may hold",
        got=f"{frames} encoder frames",
        expected=f"at most {budget} encoder frames",
        because="the encoder's input has room for so many, and a clip is never cut",
        fix="raise frame_budget, or set such examples aside",
    )
