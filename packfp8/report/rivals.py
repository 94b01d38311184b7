"""Rivals: the same examples in the same order, batched in the ways that people use today."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from packfp8.lengths import Histogram
from packfp8.packing import StreamPacker, forecast
from packfp8.report.dry_run import Drawn, Stream
from packfp8.rule import Alignment, align

BUCKETS = 30
"""A usual number of length buckets; lhotse's DynamicBucketingSampler is commonly run with 30."""

_FP8_ROWS = 16  # what every FP8 recipe of Hopper asks of a pack (packfp8.rule): where the recipe asks for nothing itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """One way of batching.

    Attributes:
        name: what it is called.
        packs: batches it needs.
        fill_real: real tokens over packs * capacity.
    """

    name: str
    packs: int
    fill_real: float


def compare(
    drawn: Drawn, rule: Alignment, stream: Stream, *, budget: int, lookahead: int, max_sequences: int | None
) -> tuple[Rival, ...]:
    """Every rival and, last, the stream itself."""
    lengths, capacity = drawn.tokens.tolist(), stream.capacity
    most = max_sequences or capacity
    row = _rows_of(rule)
    slots = [-(-length // rule.sequence) * rule.sequence for length in lengths]
    rounding = max(rule.total, _FP8_ROWS)
    bound = Histogram.of(drawn.tokens)
    named = {
        "padded batches": _padded(lengths, budget, row, most),
        f"padded, {BUCKETS} buckets": sum(_padded(bucket, budget, row, most) for bucket in _buckets(drawn.tokens)),
        "next fit": _next_fit(slots, capacity, most),
        "best-fit decreasing": forecast(bound, capacity, rule.sequence, max_sequences).packs,
        f"each sequence to {rounding}": _rounded(lengths, budget // rounding * rounding, rounding, lookahead, max_sequences),
        "packfp8": stream.packs,
    }
    real = float(drawn.tokens.sum())
    return tuple(Rival(name=n, packs=p, fill_real=real / max(1, p * capacity)) for n, p in named.items())


def _rows_of(rule: Alignment) -> Callable[[int], int]:
    """`rule.row` of the padded layout, remembered by the number of rows."""
    padded = align(rule.recipe, rule.topology, layout="bshd", trains_weights=rule.trains_weights, fast=rule.fast)
    known: dict[int, int] = {}
    return lambda rows: known.get(rows) or known.setdefault(rows, padded.row(rows))


def _padded(lengths: list[int], budget: int, row: Callable[[int], int], most: int) -> int:
    """Batches in order of arrival, each of as many rows as the budget holds at its longest."""
    batches = rows = longest = 0
    for length in lengths:
        wider = max(longest, length)
        multiple = row(rows + 1)
        if not rows or rows == most or (rows + 1) * (-(-wider // multiple) * multiple) > budget:
            batches, rows, longest = batches + 1, 1, length
        else:
            rows, longest = rows + 1, wider
    return batches


def _buckets(tokens: np.ndarray) -> list[list[int]]:
    """The lengths by bucket, in order of arrival; buckets hold about equally many tokens, as lhotse draws their bounds."""
    rising = np.sort(tokens)
    share = np.cumsum(rising)
    bounds = rising[np.searchsorted(share, share[-1] * np.arange(1, BUCKETS) / BUCKETS)] if len(rising) else rising
    place = np.searchsorted(bounds, tokens, side="right")
    return [tokens[place == bucket].tolist() for bucket in range(BUCKETS)]


def _next_fit(slots: list[int], capacity: int, most: int) -> int:
    """Packs in order of arrival; one that the next sequence does not fit is closed."""
    packs, room, left = 0, 0, 0
    for slot in slots:
        if slot > room or not left:
            packs, room, left = packs + 1, capacity, most
        room, left = room - slot, left - 1
    return packs


def _rounded(lengths: list[int], capacity: int, multiple: int, lookahead: int, max_sequences: int | None) -> int:
    """Our own packs, if every sequence were rounded to what only the pack needs; one that no longer fits counts for a pack."""
    packer = StreamPacker(capacity, multiple, lookahead, max_sequences, over_budget="set_aside")
    for key, length in enumerate(lengths):
        packer.push(key, length)
    packer.flush()
    packs = 0
    while packer.pop() is not None:
        packs += 1
    return packs + len(packer.set_aside)
