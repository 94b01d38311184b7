"""Best fit decreasing on a histogram: the packs that item-by-item best fit makes, found a length at a time.

All sequences of one length are placed together. Among packs with the same room, one takes as many of them as fit before
the next is touched, just as item by item: so the cost follows distinct lengths and rooms, not the number of examples.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from packfp8.packing.capacity import Capacity
from packfp8.packing.runs import Runs


def best_fit(sizes: list[int], counts: list[int], capacity: Capacity) -> Runs:
    """Return the packing of counts[i] sequences of sizes[i] units, sizes strictly descending and at most the capacity's."""
    packing = _BestFit(capacity=capacity, smallest=sizes[-1] if sizes else 0)
    for number, (size, count) in enumerate(zip(sizes, counts)):
        packing.place(number, size, count)
    return Runs.of(packing.rows, packing.num_packs)


class _BestFit:
    """Open packs by their room. Packs with one history are neighbours and are kept as one group (start, packs, held)."""

    def __init__(self, *, capacity: Capacity, smallest: int) -> None:
        self.capacity = capacity
        self.smallest = smallest
        self.rooms: list[int] = []  # distinct rooms of open packs, ascending
        self.groups: dict[int, list[tuple[int, int, int]]] = {}
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.num_packs = 0

    def place(self, number: int, size: int, count: int) -> None:
        """Place `count` sequences of `size` units: tightest room first, then new packs."""
        changed: list[tuple[int, int, int, int]] = []
        first = last = bisect_left(self.rooms, size)
        while count and last < len(self.rooms):
            room = self.rooms[last]
            groups = self.groups[room]
            while count and groups:
                count = self._fill(number, size, count, room, groups.pop(), changed)
            if groups:
                break
            del self.groups[room]
            last += 1
        del self.rooms[first:last]
        if count:
            most = min(self.capacity.units // size, self.capacity.max_sequences)
            new = (self.num_packs, -(-count // most), 0)
            self.num_packs += new[1]
            self._fill(number, size, count, self.capacity.units, new, changed)
        for room, *group in changed:
            self._open(room, tuple(group))

    def _fill(self, number, size, count, room, group, changed) -> int:
        """Fill one group of equal packs as far as `count` goes; return how many sequences are left."""
        start, packs, held = group
        each = min(room // size, self.capacity.max_sequences - held)
        full = min(packs, count // each)
        if full:
            self.rows.append((start, full, number, each, held))
            changed.append((room - each * size, start, full, held + each))
            count -= full * each
            start, packs = start + full, packs - full
        if packs and count:
            self.rows.append((start, 1, number, count, held))
            changed.append((room - count * size, start, 1, held + count))
            start, packs, count = start + 1, packs - 1, 0
        if packs:
            changed.append((room, start, packs, held))
        return count

    def _open(self, room: int, group: tuple[int, int, int]) -> None:
        """Put a group back among the open ones, unless nothing more can go into it."""
        if room < self.smallest or group[2] == self.capacity.max_sequences:
            return
        if room not in self.groups:
            insort(self.rooms, room)
            self.groups[room] = []
        self.groups[room].append(group)
