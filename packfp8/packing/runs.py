"""Runs: a packing of a histogram, in which equal packs are told once; and its expansion to item ids.

A run says: packs `start` to `start + packs` each take `each` sequences of size number `size`, after the `held` that
they hold already. A corpus of any number of examples needs a few thousand runs, since runs count distinct lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_CHUNK = 1 << 16  # sequences placed in one go: the temporary arrays stay in the cache, 512 KiB of int64 each


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """A packing of a histogram.

    Attributes:
        table: int64 [runs, 5], columns start, packs, size, each, held; the runs of a size in the order of its items.
        num_packs: packs in all.
    """

    table: np.ndarray
    num_packs: int

    @classmethod
    def of(cls, rows: list[tuple[int, int, int, int, int]], num_packs: int) -> Runs:
        """Return the packing that the rows describe, in any order."""
        table = np.array(rows, dtype=np.int64).reshape(-1, 5)
        table = table[np.argsort(table[:, 2], kind="stable")]
        table.flags.writeable = False
        return cls(table=table, num_packs=num_packs)

    def offsets(self) -> np.ndarray:
        """Return int64 [num_packs + 1]: pack p has the members from offsets[p] to offsets[p + 1]."""
        start, packs, _, each, _ = self.table.T
        change = np.zeros(self.num_packs + 1, dtype=np.int64)
        np.add.at(change, start, each)
        np.subtract.at(change, start + packs, each)
        offsets = np.zeros(self.num_packs + 1, dtype=np.int64)
        np.cumsum(np.cumsum(change)[:-1], out=offsets[1:])
        return offsets

    def members(self, offsets: np.ndarray, order: np.ndarray) -> np.ndarray:
        """Return int64 [examples], the item ids pack by pack.

        Args:
            offsets: as `offsets()` returns them.
            order: int64 [examples], the item ids by size number, all of size 0 first.
        """
        members = np.empty(len(order), dtype=np.int64)
        done = 0
        for slots in self._slots(offsets):
            members[slots] = order[done : done + len(slots)]
            done += len(slots)
        return members

    def _slots(self, offsets: np.ndarray) -> Iterator[np.ndarray]:
        """Yield, in the order of the items, the places in `members` that they take, at most about _CHUNK at a time."""
        for start, packs, each, held in _pieces(self.table):
            # one row per (run, pack), then one per sequence
            pack = _ramps(start, packs)
            each, held = np.repeat(each, packs), np.repeat(held, packs)
            yield _ramps(offsets[pack] + held, each)


def _pieces(table: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield columns start, packs, each, held of the runs in order, of about _CHUNK sequences; longer runs are split."""
    start, packs, _, each, held = table.T
    sizes = packs * each
    if not len(sizes):
        return
    if sizes.max() > _CHUNK:
        parts = -(-sizes // _CHUNK)
        part = _ramps(np.zeros_like(parts), parts)
        start, packs, each, held, parts = (np.repeat(column, parts) for column in (start, packs, each, held, parts))
        first, last = packs * part // parts, packs * (part + 1) // parts
        start, packs = start + first, last - first
        sizes = packs * each
    chunk = np.cumsum(sizes) // _CHUNK
    cuts = np.flatnonzero(np.diff(chunk)) + 1
    for rows in np.split(np.arange(len(sizes)), cuts):
        yield start[rows], packs[rows], each[rows], held[rows]


def _ramps(first: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the concatenation of arange(first[i], first[i] + lengths[i]) over i."""
    ends = np.cumsum(lengths)
    return np.repeat(first - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)
