"""Exact completion on a histogram: each pack takes the largest sequence left and is then filled to the last unit.

A subset sum over the lengths that are left says which of them close the pack exactly, the largest first, so that the
short ones, with which any gap closes, remain to the end. The pack found is repeated as often as its lengths allow:
hence about one subset sum for each distinct length, whatever the number of examples.

Where max_sequences may limit the packs, long sequences would leave packs of too many short ones to the end. Then each
pack also takes short ones at once, as many as keep its number of sequences at the average of those that are left.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator

from packfp8.packing.capacity import Capacity
from packfp8.packing.runs import Runs
from packfp8.packing.subset import fullest

_TRAIL_BITS = 1 << 26  # memory of one subset sum: 8 MiB; beyond it only the largest lengths that fit are looked at


def exact_completion(sizes: list[int], counts: list[int], capacity: Capacity, mixed: bool) -> Runs:
    """Return the packing of counts[i] sequences of sizes[i] units into packs that are full to the last unit if they can.

    Args:
        sizes: units, strictly descending, at most the capacity's.
        counts: sequences of each size.
        mixed: give each pack short sequences as well as long ones, for when max_sequences limits the packs.
    """
    number = {size: i for i, size in enumerate(sizes)}
    left = _Left(sizes=sizes, counts=counts)
    rows, num_packs = [], 0
    while left.rising:
        pack = Counter({left.rising[-1]: 1})
        if mixed:
            _add_short(pack, left, capacity)
        _add_largest(pack, left, capacity)
        packs = min(left.counts[size] // each for size, each in pack.items())
        held = 0
        for size in sorted(pack, reverse=True):
            rows.append((num_packs, packs, number[size], pack[size], held))
            held += pack[size]
            left.take(size, packs * pack[size])
        num_packs += packs
    return Runs.of(rows, num_packs)


class _Left:
    """What is left of the histogram."""

    def __init__(self, *, sizes: list[int], counts: list[int]) -> None:
        self.rising = sizes[::-1]  # ascending, those of which any are left
        self.counts = dict(zip(sizes, counts))
        self.sequences = sum(counts)
        self.units = sum(size * count for size, count in zip(sizes, counts))

    def take(self, size: int, count: int) -> None:
        self.counts[size] -= count
        self.sequences -= count
        self.units -= size * count
        if not self.counts[size]:
            del self.rising[bisect_left(self.rising, size)]


def _add_short(pack: Counter, left: _Left, capacity: Capacity) -> None:
    """Add the shortest sequences left: as many as an average pack has beside the long ones that would fill it."""
    packs = max(1, left.units // capacity.units, left.sequences // capacity.max_sequences)
    largest = left.rising[-1]
    wanted = min(capacity.max_sequences, -(-left.sequences // packs)) - capacity.units // largest
    room = capacity.units - largest
    for size in left.rising:
        each = min(wanted, room // size, left.counts[size] - pack[size])
        if each <= 0:
            break
        pack[size] += each
        room -= each * size
        wanted -= each


def _add_largest(pack: Counter, left: _Left, capacity: Capacity) -> None:
    """Add the sequences that fill the pack best, largest first, within max_sequences."""
    room = capacity.units - sum(size * each for size, each in pack.items())
    slots = capacity.max_sequences - pack.total()
    while slots and room >= left.rising[0]:
        chosen, _ = fullest(_parts(left, pack, room), room)
        if not chosen:
            break
        for size, each in chosen:
            each = min(each, slots)
            pack[size] += each
            slots -= each
            room -= size * each
    for size in [size for size, each in pack.items() if not each]:
        del pack[size]


def _parts(left: _Left, pack: Counter, room: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield ((size, each), size * each), largest size first; powers of two of a size reach every number of it."""
    budget = _TRAIL_BITS // room
    for at in range(bisect_right(left.rising, room) - 1, -1, -1):
        size, power = left.rising[at], 1
        available = min(left.counts[size] - pack[size], room // size)
        while available > 0:
            each = min(power, available)
            yield (size, each), size * each
            available -= each
            power *= 2
            budget -= 1
        if budget < 0:
            return
