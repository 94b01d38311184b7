"""pack(): a whole corpus into packs at once, from its lengths; forecast(): how many packs, from their histogram alone.

The packing is found on the histogram of slots, in milliseconds to seconds whatever the number of examples; item ids are
then dealt into it with array operations. Memory for N examples: 8 bytes for the result, and 18 while sorting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from packfp8.lengths.histogram import Histogram, checked_lengths, chunks
from packfp8.packing.best_fit import best_fit
from packfp8.packing.bounds import Bounds, unit_bounds
from packfp8.packing.capacity import Capacity, too_long
from packfp8.packing.completion import exact_completion
from packfp8.packing.runs import Runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One way of packing that was tried: its name, the packs it needs, the seconds it took on the histogram."""

    method: str
    packs: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What packing a histogram gives.

    Attributes:
        packs: number of packs.
        capacity: tokens of a pack that slots may take: the budget floored to the multiple.
        slot_tokens, real_tokens: tokens of all slots, and of all sequences.
        bounds: lower bounds on the number of packs.
        trials: the ways of packing tried, the chosen one among them.
    """

    packs: int
    capacity: int
    slot_tokens: int
    real_tokens: int
    bounds: Bounds
    trials: tuple[Trial, ...]

    @property
    def fill(self) -> float:
        """Slot tokens over packs * capacity; 0 where there is no pack."""
        return self.slot_tokens / max(1, self.packs * self.capacity)

    @property
    def fill_real(self) -> float:
        """Real tokens over packs * capacity; 0 where there is no pack."""
        return self.real_tokens / max(1, self.packs * self.capacity)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packs:
    """Which examples share a pack: pack p holds members[offsets[p] : offsets[p + 1]].

    Attributes:
        offsets: int64 [packs + 1], read-only.
        members: int64 [examples], indices into the lengths that were packed, each once; read-only.
        forecast: sizes, fills, bounds and the ways of packing tried.
    """

    offsets: np.ndarray
    members: np.ndarray
    forecast: Forecast

    def __post_init__(self) -> None:
        self.offsets.flags.writeable = self.members.flags.writeable = False

    @property
    def fill(self) -> float:
        """Slot tokens over packs * capacity."""
        return self.forecast.fill

    @property
    def fill_real(self) -> float:
        """Real tokens over packs * capacity."""
        return self.forecast.fill_real

    @property
    def bound(self) -> int:
        """The best lower bound on the number of packs."""
        return self.forecast.bounds.best

    @property
    def l1(self) -> int:
        """The bound by tokens."""
        return self.forecast.bounds.l1

    @property
    def l2(self) -> int:
        """The bound by tokens that also knows that long sequences do not share a pack."""
        return self.forecast.bounds.l2

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, pack: int) -> np.ndarray:
        """Return the members of one pack, longest first."""
        first, last = self.offsets[range(len(self))[pack] :][:2]
        return self.members[first:last]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.members[first:last] for first, last in zip(self.offsets[:-1], self.offsets[1:]))


def pack(lengths, capacity: int, multiple: int = 1, max_sequences: int | None = None, exact: bool = False) -> Packs:
    """Return packs of at most `capacity` tokens that together hold every sequence once.

    Args:
        lengths: real tokens of every sequence, whole numbers [n].
        capacity: tokens of a pack; floored to the multiple.
        multiple: each slot is its sequence's length rounded up to this (`rule.sequence`).
        max_sequences: most sequences in a pack.
        exact: also try exact completion, and keep the packing with fewer packs.

    Raises LengthError for a length that is not a whole number of at least 1, BudgetError for a sequence longer than a
    pack; both name its index.
    """
    room = Capacity.of(capacity, multiple, max_sequences)
    lengths = checked_lengths(lengths)
    histogram = Histogram.of(lengths)
    if -(-histogram.longest // multiple) > room.units:
        index = int(np.argmax(lengths > room.tokens))
        slot = -(-int(lengths[index]) // multiple) * multiple
        raise too_long(f"sequence {index}", int(lengths[index]), room.tokens, slot=f"a slot of {slot}")
    runs, told = _packed(histogram, room, exact)
    offsets = runs.offsets()
    members = runs.members(offsets, _longest_first(lengths, multiple))
    return Packs(offsets=offsets, members=members, forecast=told)


def forecast(
    histogram: Histogram, capacity: int, multiple: int = 1, max_sequences: int | None = None, exact: bool = False
) -> Forecast:
    """Return what `pack` would report for the lengths of the histogram, without any example: milliseconds."""
    room = Capacity.of(capacity, multiple, max_sequences)
    if -(-histogram.longest // multiple) > room.units:
        slot = -(-histogram.longest // multiple) * multiple
        raise too_long("the longest sequence", histogram.longest, room.tokens, slot=f"a slot of {slot}")
    return _packed(histogram, room, exact)[1]


def _packed(histogram: Histogram, room: Capacity, exact: bool) -> tuple[Runs, Forecast]:
    """Return the packing with the fewest packs of those tried, and its figures."""
    slots = histogram.aligned(room.multiple)
    sizes, counts = slots.lengths // room.multiple, slots.counts
    least = unit_bounds(sizes, counts, room)
    falling = sizes[::-1].tolist(), counts[::-1].tolist(), room
    trials: list[Trial] = []
    best = _tried("best fit", lambda: best_fit(*falling), trials)
    if exact:
        best = min(best, _tried("exact completion", lambda: exact_completion(*falling, mixed=False), trials), key=_num_packs)
    if best.num_packs > least.best and np.diff(best.offsets()).max() == room.max_sequences:
        best = min(best, _tried("mixed completion", lambda: exact_completion(*falling, mixed=True), trials), key=_num_packs)
    told = Forecast(
        packs=best.num_packs,
        capacity=room.tokens,
        slot_tokens=slots.tokens,
        real_tokens=histogram.tokens,
        bounds=least,
        trials=tuple(trials),
    )
    return best, told


def _num_packs(runs: Runs) -> int:
    return runs.num_packs


def _tried(method: str, packing: Callable[[], Runs], trials: list[Trial]) -> Runs:
    """Return what the packing gives, after a note of its packs and seconds."""
    started = time.perf_counter()
    runs = packing()
    trials.append(Trial(method=method, packs=runs.num_packs, seconds=time.perf_counter() - started))
    return runs


def _longest_first(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Return int64 [n]: indices by slot, longest slot first, in the given order within one slot."""
    longest = -(-int(lengths.max()) // multiple) if len(lengths) else 0
    small = next(kind for kind in (np.uint16, np.uint32, np.uint64) if longest <= np.iinfo(kind).max)
    keys = np.empty(len(lengths), dtype=small)  # numpy sorts 16-bit keys by radix, in linear time
    for key, length in zip(chunks(keys), chunks(lengths)):
        key[:] = longest - (length + (multiple - 1)) // multiple
    return np.argsort(keys, kind="stable")
