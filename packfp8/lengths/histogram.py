"""Histogram: how many examples have which length; the sum of two is the histogram of both sets.

A histogram holds a corpus of any size in one pair of small arrays. Shards of a corpus, or ranks, count apart and add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from packfp8.errors import LengthError

_CHUNK = 1 << 18  # lengths looked at in one go: the temporary arrays stay at 2 MiB of int64
_DENSE = 1 << 22  # longest length counted in a dense array; beyond it a chunk is sorted instead
_WHOLE = 1 << 53  # up to here a double tells neighbouring whole numbers apart (IEEE 754)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Histogram:
    """Distinct lengths and how often each occurs.

    Attributes:
        lengths: int64 [k], strictly ascending, each at least 1.
        counts: int64 [k], each at least 1.
    """

    lengths: np.ndarray
    counts: np.ndarray

    def __post_init__(self) -> None:
        for name in ("lengths", "counts"):
            array = np.array(getattr(self, name), dtype=np.int64)
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        ascending = self.lengths.ndim == 1 and not (np.diff(self.lengths, prepend=0) < 1).any()
        if not (ascending and self.counts.shape == self.lengths.shape and not (self.counts < 1).any()):
            raise LengthError(
                "the arrays do not make a histogram",
                got=f"lengths {self.lengths.tolist()[:8]}, counts {self.counts.tolist()[:8]}",
                expected="lengths ascending from 1, one count of at least 1 for each",
                because="a length that occurs twice or never would be counted wrongly by every sum over the histogram",
                fix="use Histogram.of(lengths) or Histogram.from_dense(counts)",
            )

    @classmethod
    def of(cls, lengths) -> Histogram:
        """Return the histogram of an array of lengths [n] of any size; memory is one chunk and the distinct lengths.

        Raises LengthError naming the first index whose length is not a whole number of at least 1.
        """
        total = _EMPTY
        for chunk in chunks(checked_lengths(lengths)):
            if int(chunk.max()) <= _DENSE:
                total += cls.from_dense(np.bincount(chunk.astype(np.int64, copy=False)))
            else:
                distinct, counts = np.unique(chunk, return_counts=True)
                total += cls(lengths=distinct, counts=counts)
        return total

    @classmethod
    def from_dense(cls, counts) -> Histogram:
        """Return the histogram whose length n occurs counts[n] times (int [size]); entry 0 must be 0."""
        counts = np.asarray(counts)
        present = np.flatnonzero(counts)
        return cls(lengths=present, counts=counts[present])

    def dense(self, size: int) -> np.ndarray:
        """Return int64 [size] with counts at their lengths: ranks that agree on `size` add these with an all-reduce."""
        if self.longest >= size:
            raise LengthError(
                "the histogram does not fit a dense array",
                got=f"longest length {self.longest}, size {size}",
                expected=f"a size of at least {self.longest + 1}",
                because="entry n of the dense array counts length n",
                fix="agree on one size over all ranks: the largest length allowed, plus one",
            )
        counts = np.zeros(size, dtype=np.int64)
        counts[self.lengths] = self.counts
        return counts

    def merge(self, other: Histogram) -> Histogram:
        """Return the histogram of both sets together."""
        if not len(self.lengths) or not len(other.lengths):
            return other if not len(self.lengths) else self
        return _summed(np.concatenate((self.lengths, other.lengths)), np.concatenate((self.counts, other.counts)))

    __add__ = merge

    def aligned(self, multiple: int) -> Histogram:
        """Return the histogram of the slots: every length rounded up to `multiple`."""
        return _summed(-(-self.lengths // multiple) * multiple, self.counts)

    @property
    def examples(self) -> int:
        """Number of examples."""
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        """Sum of all lengths."""
        return int(self.lengths @ self.counts)

    @property
    def longest(self) -> int:
        """The largest length; 0 where there is none."""
        return int(self.lengths[-1]) if len(self.lengths) else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        return np.array_equal(self.lengths, other.lengths) and np.array_equal(self.counts, other.counts)

    __hash__ = None

    def __repr__(self) -> str:
        return f"Histogram({self.examples} examples, {self.tokens} tokens, {len(self.lengths)} lengths up to {self.longest})"


def checked_lengths(lengths) -> np.ndarray:
    """Return lengths as an integer array [n], the given array itself where it already is one.

    Raises LengthError naming the first index that is not a whole number of at least 1 (zero, negative, NaN, a fraction).
    """
    array = np.asarray(lengths)
    if array.size == 0 and array.ndim == 1:
        return array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise _not_lengths("the lengths are not a list of whole numbers", f"{array.dtype} {list(array.shape)}")
    start = 0
    for chunk in chunks(array):
        good = chunk >= 1  # False for NaN as well
        if array.dtype.kind == "f" or array.itemsize == 8:
            good &= chunk < _WHOLE
        if array.dtype.kind == "f":
            good &= np.floor(chunk) == chunk
        if not good.all():
            index = start + int(np.argmin(good))
            raise _not_lengths(f"length {index} is not a sequence's length", array[index].item())
        start += len(chunk)
    return array.astype(np.int64) if array.dtype.kind == "f" else array


def chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield consecutive views of at most _CHUNK entries."""
    for start in range(0, len(array), _CHUNK):
        yield array[start : start + _CHUNK]


def _summed(lengths: np.ndarray, counts: np.ndarray) -> Histogram:
    """Return the histogram of lengths in any order, repeated ones added up."""
    order = np.argsort(lengths, kind="stable")
    lengths, counts = lengths[order], counts[order]
    starts = np.flatnonzero(np.diff(lengths, prepend=0))
    return Histogram(lengths=lengths[starts], counts=np.add.reduceat(counts, starts) if len(starts) else counts)


def _not_lengths(what: str, got: object) -> LengthError:
    return LengthError(
        what,
        got=got,
        expected="a whole number of tokens, at least 1",
        because="a sequence of no tokens has no slot, and a length that is not an integer comes from a broken manifest",
        fix="set such examples aside before packing, and report their number",
    )


_EMPTY = Histogram(lengths=np.zeros(0, np.int64), counts=np.zeros(0, np.int64))
