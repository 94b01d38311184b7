"""ShardPlan: the packs of one rank's own examples, planned once from how many have which length, filled anew each epoch.

    sizes of a shard    16 16 16 32 48 48
    packs, every epoch  [48 16] [48 16] [32 16]        by the packer, from the histogram and the seed alone
    epoch 0             [e4 e0] [e5 e2] [e3 e1]        examples of one size change places
    epoch 1             [e5 e1] [e4 e0] [e3 e2]

So the number of packs is the same in every epoch, and need be agreed upon between ranks only once. With a frame budget the
size of an example is both its tokens and its frames.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packfp8.data.terms import Terms
from packfp8.lengths import Measured


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardPlan:
    """Which sizes share a pack.

    Attributes:
        sizes: int64 `[examples]`, tokens of each example, in THD rounded up to its slot; read-only.
        frames: int64 `[examples]`, encoder frames of each, 0 where there is no budget for them; read-only.
        offsets: int64 `[packs + 1]`; pack p holds places `offsets[p]` to `offsets[p + 1]`; read-only.
        places: int64 `[examples]`, places in the order by size; read-only.
    """

    sizes: np.ndarray
    frames: np.ndarray
    offsets: np.ndarray
    places: np.ndarray

    def __post_init__(self) -> None:
        for array in (self.sizes, self.frames, self.offsets, self.places):
            array.flags.writeable = False

    @property
    def packs(self) -> int:
        """Number of packs, the same in every epoch."""
        return len(self.offsets) - 1

    def members(self, seed: int, epoch: int) -> list[list[int]]:
        """The packs of an epoch as indices of examples, each once."""
        order = list(range(len(self.sizes)))
        random.Random(f"{seed} {epoch} of a shard").shuffle(order)
        shuffled = np.array(order, np.int64)
        by_size = shuffled[_by_size(self.sizes[shuffled], self.frames[shuffled])]
        examples = by_size[self.places].tolist()
        return [examples[first:last] for first, last in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist())]


def plan_shard(measured: Sequence[Measured], terms: Terms) -> ShardPlan:
    """The plan for examples of these lengths; it depends on their histogram and on the seed, not on their order."""
    multiple = 1 if terms.rule.layout == "bshd" else terms.rule.sequence
    tokens = np.array([one.tokens for one in measured], np.int64)
    sizes = -(-tokens // multiple) * multiple
    arrivals = list(range(len(sizes)))
    random.Random(f"{terms.seed} of a plan").shuffle(arrivals)  # by falling size, lookahead and window would see one size only
    frames = np.array([terms.frames_of(one) for one in measured], np.int64)
    by_size, packer, packs = _by_size(sizes, frames), terms.packer(), []
    ordered = list(zip(sizes[by_size].tolist(), frames[by_size].tolist()))
    for place in arrivals:
        packer.push(place, *ordered[place])
        while (pack := packer.pop()) is not None:
            packs.append(pack)
    packer.flush()
    while (pack := packer.pop()) is not None:
        packs.append(pack)
    offsets = np.cumsum([0, *map(len, packs)], dtype=np.int64)
    places = np.array([place for pack in packs for place in pack], np.int64)
    return ShardPlan(sizes=sizes, frames=frames, offsets=offsets, places=places)


def _by_size(sizes: np.ndarray, frames: np.ndarray) -> np.ndarray:
    """Return int64 `[examples]`: indices by size, then by frames; in the given order where both are equal."""
    return np.lexsort((frames, sizes))
