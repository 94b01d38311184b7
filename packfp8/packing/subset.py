"""Subset sums as bit sets: bit n of a Python int says that a sum of n units can be reached.

One shift and one `or` over a whole int add an item to all sums at once: a few hundred items cost microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable


def fullest(parts: Iterable[tuple[object, int]], room: int) -> tuple[list, int]:
    """Return the names of parts whose sizes add up as near to `room` as any do without passing it, and their sum.

    Args:
        parts: (name, size) with size at least 1. Parts given first are preferred: the last one chosen stands as early
            as it can, then the one before it, and so on. None is looked at once the room is met exactly.
        room: units to fill.
    """
    mask, exact = (2 << room) - 1, 1 << room
    reached, trail = 1, []
    for name, size in parts:
        if size <= room:
            trail.append((reached, name, size))
            reached = (reached | reached << size) & mask
            if reached >= exact:
                break
    total = left = reached.bit_length() - 1
    chosen = []
    for before, name, size in reversed(trail):
        if not before >> left & 1:  # not reached without this part
            chosen.append(name)
            left -= size
    return chosen[::-1], total


def fullest_of(most: int, parts: Iterable[tuple[object, int]], room: int) -> tuple[list, int]:
    """Return the same with at most `most` parts, with as few of them as will do; the cost grows with `most`."""
    mask, exact = (2 << room) - 1, 1 << room
    reached, trail = [1] + [0] * most, []  # reached[k]: sums of exactly k parts
    for name, size in parts:
        if size <= room:
            trail.append((tuple(reached), name, size))
            for k in range(most, 0, -1):
                reached[k] |= (reached[k - 1] << size) & mask
            if max(reached) >= exact:
                break
    k = max(range(most + 1), key=lambda parts: reached[parts].bit_length())
    total = left = reached[k].bit_length() - 1
    chosen = []
    for before, name, size in reversed(trail):
        if not before[k] >> left & 1:
            chosen.append(name)
            left -= size
            k -= 1
    return chosen[::-1], total
