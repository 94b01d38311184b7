"""Lower bounds: how many packs any packer needs at least."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packfp8.lengths.histogram import Histogram
from packfp8.packing.capacity import Capacity


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Lower bounds on the number of packs.

    Attributes:
        l1: slot tokens over the capacity, rounded up.
        l2: the Martello-Toth bound: long sequences need a pack each, and only short ones can share with them.
        sequences: examples over max_sequences, rounded up.
    """

    l1: int
    l2: int
    sequences: int

    @property
    def best(self) -> int:
        """The largest of the bounds."""
        return max(self.l1, self.l2, self.sequences)


def bounds(histogram: Histogram, capacity: int, multiple: int = 1, max_sequences: int | None = None) -> Bounds:
    """Return the lower bounds for packing the histogram's lengths, each at most the capacity."""
    slots = histogram.aligned(multiple)
    return unit_bounds(slots.lengths // multiple, slots.counts, Capacity.of(capacity, multiple, max_sequences))


def unit_bounds(sizes: np.ndarray, counts: np.ndarray, capacity: Capacity) -> Bounds:
    """Return the lower bounds for counts[i] sequences of sizes[i] units, sizes int64 [k] strictly ascending."""
    total = int(sizes @ counts)
    l1 = -(-total // capacity.units)
    return Bounds(
        l1=l1, l2=max(l1, _l2(sizes, counts, capacity.units)), sequences=-(-int(counts.sum()) // capacity.max_sequences)
    )


def _l2(sizes: np.ndarray, counts: np.ndarray, units: int) -> int:
    """Return the largest bound over all thresholds t up to half a pack (Martello and Toth 1990, section 8.3.2).

    Sequences longer than half a pack sit in packs of their own. Where such a one is longer than units - t, no sequence
    of t or more joins it; the room beside the others is all that those from t to half a pack can share.
    """
    number = np.concatenate(([0], np.cumsum(counts)))
    tokens = np.concatenate(([0], np.cumsum(counts * sizes)))
    half = np.searchsorted(sizes, units // 2, side="right")  # the first size above half a pack
    threshold = sizes[:half]
    if not half:
        return int(number[-1])
    above = np.searchsorted(sizes, units - threshold, side="right")
    shared = (number[above] - number[half]) * units - (tokens[above] - tokens[half])
    extra = np.maximum(0, -((shared - (tokens[half] - tokens[:half])) // units))
    return int(number[-1] - number[half] + extra.max())
