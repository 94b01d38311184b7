"""Need: one number that a count must divide by, and the reason that travels with it."""

from __future__ import annotations

from dataclasses import dataclass

UNITS = {
    "slot": "tokens of one slot (THD)",
    "row": "tokens of one row, S (BSHD)",
    "pack": "tokens of one pack",
    "slab": "tokens that one CP rank holds",
    "shard": "tokens that one SP rank holds (its slab where SP is off)",
    "features": "input and output features of a linear layer, as each rank holds them",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One divisibility need.

    Args:
        unit: what is counted, a key of `UNITS`.
        multiple: what the count must be a multiple of.
        because: what happens otherwise.
        source: where the number was measured or read.
        kind: "must" (wrong or refused otherwise) or "fast" (right, but slower otherwise).
    """

    unit: str
    multiple: int
    because: str
    source: str
    kind: str = "must"
