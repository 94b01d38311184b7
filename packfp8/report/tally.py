"""Tally: how many examples have which encoder frames and text tokens. The tally of two manifests is the sum of theirs.

A corpus of any size is one small table of this kind. Everything that a report says follows from it, so that ranks that
count different files and add up come to the report of a single process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from packfp8.lengths import Histogram

NAMED = 10
"""Rejected lines that are named; the others are only counted."""

MOST = (1 << 31) - 1
"""Largest count of one example's frames or tokens: two of them share one int64 key. 5 years of audio at 12.5 frames/s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """Lines that could not be read: how many, and the first ten as "file:line: reason"."""

    count: int = 0
    named: tuple[str, ...] = ()

    def __add__(self, other: Rejected) -> Rejected:
        return Rejected(count=self.count + other.count, named=(self.named + other.named)[:NAMED])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tally:
    """Distinct pairs of encoder frames and text tokens, and how often each occurs.

    Attributes:
        encoder_frames: int64 [k], audio tokens of an example; pairs are in ascending order, frames first.
        text_tokens: int64 [k], its text tokens, without a prompt.
        counts: int64 [k], each at least 1.
        bare: examples that came as a bare length, which stands under text_tokens: their audio is not told apart.
    """

    encoder_frames: np.ndarray
    text_tokens: np.ndarray
    counts: np.ndarray
    bare: int = 0

    def __post_init__(self) -> None:
        for name in ("encoder_frames", "text_tokens", "counts"):
            array = np.asarray(getattr(self, name), dtype=np.int64)
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @classmethod
    def of(cls, encoder_frames: np.ndarray, text_tokens: np.ndarray) -> Tally:
        """The tally of examples with these counts, each int64 [n] of 0 to MOST."""
        keys, counts = np.unique(_keys(encoder_frames, text_tokens), return_counts=True)
        return cls.of_keys(keys, counts)

    @classmethod
    def of_lengths(cls, histogram: Histogram) -> Tally:
        """The tally of examples of which only the lengths are known."""
        frames = np.zeros_like(histogram.lengths)
        return cls(encoder_frames=frames, text_tokens=histogram.lengths, counts=histogram.counts, bare=histogram.examples)

    @classmethod
    def of_keys(cls, keys: np.ndarray, counts: np.ndarray, bare: int = 0) -> Tally:
        """The tally of distinct ascending `keys` (int64 [k]) that occur `counts` times."""
        return cls(encoder_frames=keys >> 31, text_tokens=keys & MOST, counts=counts, bare=bare)

    @classmethod
    def total(cls, tallies: Iterable[Tally]) -> Tally:
        """The sum of any number of tallies."""
        parts = list(tallies)
        if not parts:
            return NOTHING
        keys, places = np.unique(np.concatenate([part.keys for part in parts]), return_inverse=True)
        counts = np.zeros(len(keys), dtype=np.int64)
        np.add.at(counts, places, np.concatenate([part.counts for part in parts]))
        return cls.of_keys(keys, counts, bare=sum(part.bare for part in parts))

    @property
    def keys(self) -> np.ndarray:
        """int64 [k], ascending: a pair as one number."""
        return _keys(self.encoder_frames, self.text_tokens)

    @property
    def examples(self) -> int:
        """Number of examples."""
        return int(self.counts.sum())

    def tokens(self, prompt_tokens: int = 0) -> np.ndarray:
        """int64 [k]: length of the sequence of each pair."""
        return self.encoder_frames + self.text_tokens + prompt_tokens

    def supervised(self, prompt_tokens: int = 0) -> np.ndarray:
        """int64 [k]: labels of each pair. Text is learned, but for a sequence's first token, which is nobody's label."""
        starts_with_text = (self.encoder_frames == 0) & (prompt_tokens == 0)
        return np.maximum(self.text_tokens - starts_with_text, 0)

    def histogram(self, prompt_tokens: int = 0) -> Histogram:
        """The histogram of the sequences' lengths."""
        lengths, places = np.unique(self.tokens(prompt_tokens), return_inverse=True)
        counts = np.zeros(len(lengths), dtype=np.int64)
        np.add.at(counts, places, self.counts)
        return Histogram(lengths=lengths, counts=counts)

    def only(self, chosen: np.ndarray) -> Tally:
        """The pairs of which `chosen` (bool [k]) is true."""
        frames, text, counts = self.encoder_frames[chosen], self.text_tokens[chosen], self.counts[chosen]
        return Tally(encoder_frames=frames, text_tokens=text, counts=counts, bare=self.bare)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tally):
            return NotImplemented
        columns = ("encoder_frames", "text_tokens", "counts")
        return self.bare == other.bare and all(np.array_equal(getattr(self, c), getattr(other, c)) for c in columns)

    __hash__ = None


def _keys(encoder_frames: np.ndarray, text_tokens: np.ndarray) -> np.ndarray:
    return (np.asarray(encoder_frames, dtype=np.int64) << 31) | np.asarray(text_tokens, dtype=np.int64)


_NONE = np.zeros(0, dtype=np.int64)
NOTHING = Tally(encoder_frames=_NONE, text_tokens=_NONE, counts=_NONE)
