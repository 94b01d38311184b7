"""Report: what the packing achieves on a corpus, as numbers; and as sentences, a table, a figure and a page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from packfp8.layout import Buckets
from packfp8.lengths import Histogram
from packfp8.packing import Bounds
from packfp8.report.constancy import Constancy
from packfp8.report.counting import Counting
from packfp8.report.dry_run import Stream
from packfp8.report.rivals import Rival
from packfp8.report.tally import Rejected
from packfp8.report.what_if import WhatIf
from packfp8.rule import Alignment

WORKS = ("attention", "encoder_frames", "supervised")
"""What ranks can be out of balance in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waste:
    """Tokens by cause.

    Attributes:
        slot: rounding sequences up to their slots.
        filler: rest of the packs, counted against full ones.
        over_budget: real tokens of sequences longer than a pack, which no pack holds.
    """

    slot: int
    filler: int
    over_budget: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """What the packing achieves.

    Attributes:
        sources: the manifests, as given.
        rule: what must divide what.
        budget: as asked.
        counting: what a line means in tokens.
        histogram: lengths of all readable examples.
        bare: examples that came as a bare length: their audio and their labels are not known.
        rejected: lines that could not be read.
        packed: lengths of the examples that a pack can hold.
        stream: the dry run of the sampler.
        bounds: least packs that any packing needs.
        what_if: other budgets, topologies and recipes.
        static: what packs of constant shape cost, where asked for.
        compare: other ways of batching, where asked for.
        verdict: what a payoff file says about the budget; empty without one.
        lookahead, max_sequences: of the sampler.
    """

    sources: tuple[str, ...]
    rule: Alignment
    budget: int
    counting: Counting
    histogram: Histogram
    bare: int
    rejected: Rejected
    packed: Histogram
    stream: Stream
    bounds: Bounds
    what_if: WhatIf
    static: Constancy | None = None
    compare: tuple[Rival, ...] = ()
    verdict: str = ""
    lookahead: int = 256
    max_sequences: int | None = None

    @property
    def capacity(self) -> int:
        """Tokens of a full pack: the budget floored to the rule."""
        return self.stream.capacity

    @property
    def examples(self) -> int:
        """Readable examples, those over the budget too."""
        return self.histogram.examples

    @property
    def over_budget(self) -> int:
        """Examples longer than a pack."""
        return self.histogram.examples - self.packed.examples

    @property
    def walked(self) -> int:
        """Examples that the dry run walked."""
        return int(self.stream.sequences.sum())

    @property
    def tokens_real(self) -> int:
        """Real tokens in packs."""
        return self.packed.tokens

    @property
    def tokens_total(self) -> int:
        """packs * capacity = real + slot + filler."""
        return self.packs * self.capacity

    @cached_property
    def packs(self) -> int:
        """Packs of an epoch; of more than the walked examples, as many as their fill says."""
        if self._complete:
            return self.stream.packs
        full = self.stream.steady_fill * self.capacity
        return max(self.bounds.best, math.ceil(self.slot_tokens / full))

    @cached_property
    def slot_tokens(self) -> int:
        """Tokens of all slots."""
        walked = int(self.stream.slot_tokens.sum())
        if self._complete:
            return walked
        if self.rule.layout == "thd":
            return self.packed.aligned(self.rule.sequence).tokens
        return round(walked * self.packed.tokens / int(self.stream.real_tokens.sum()))

    @property
    def steps(self) -> int:
        """Steps of an epoch; in the last one some ranks may have no examples."""
        return -(-self.packs // self.rule.topology.dp)

    @property
    def fill(self) -> float:
        """Slot tokens over packs * capacity."""
        return self.slot_tokens / max(1, self.tokens_total)

    @property
    def fill_real(self) -> float:
        """Real tokens over packs * capacity."""
        return self.tokens_real / max(1, self.tokens_total)

    @property
    def waste(self) -> Waste:
        """Tokens by cause; with the real ones, slot and filler make `tokens_total`."""
        return Waste(
            slot=self.slot_tokens - self.tokens_real,
            filler=self.tokens_total - self.slot_tokens,
            over_budget=self.histogram.tokens - self.packed.tokens,
        )

    @property
    def sequences_per_pack(self) -> dict[str, float]:
        """Least, median, mean and most sequences of a pack."""
        counts = self.stream.sequences
        if not len(counts):
            return {"min": 0, "median": 0, "mean": 0.0, "max": 0}
        median, mean = float(np.median(counts)), float(counts.mean())
        return {"min": int(counts.min()), "median": median, "mean": mean, "max": int(counts.max())}

    @property
    def shapes(self) -> int:
        """Distinct shapes of the packs walked: tokens, sequences, longest slot. A static compile makes a step for each.

        Packs of a `Collator(static=True)` have one; those of `Collator(buckets=True)`, `shapes_in_buckets`.
        """
        totals = [self.rule.pack(tokens) for tokens in self.stream.slot_tokens.tolist()]
        return len(set(zip(totals, self.stream.sequences.tolist(), self.stream.longest_tokens.tolist(), strict=True)))

    @property
    def shapes_in_buckets(self) -> int | None:
        """Distinct shapes of the same packs rounded up to buckets: tokens, offsets, `max_seqlen`. None for padded rows."""
        if self.rule.layout == "bshd":
            return None
        capacity = self.capacity
        buckets = Buckets(rule=self.rule, capacity=capacity, max_sequences=self.max_sequences, longest_slot=capacity)
        shapes = set()
        columns = (self.stream.slot_tokens, self.stream.sequences, self.stream.longest_tokens)
        for used, sequences, longest in zip(*(column.tolist() for column in columns), strict=True):
            tokens = buckets.tokens(used)
            filler = tokens - used
            shapes.add((tokens, buckets.offsets(sequences + (filler > 0)), buckets.longest(max(longest, filler))))
        return len(shapes)

    @property
    def imbalance(self) -> dict[str, float | None]:
        """Idle share by kind of work: 1 - mean / max over ranks, averaged over steps; None where lengths are bare."""
        return {work: self.stream.idle(work) if work == "attention" or not self.bare else None for work in WORKS}

    @property
    def sentences(self) -> tuple[str, str, str]:
        """Three sentences that a person can act on."""
        from packfp8.report.sentences import sentences

        return sentences(self)

    def to_dict(self) -> dict:
        """The figures under the keys of `packfp8 report --json`."""
        waste = self.waste
        rivals = [{"name": rival.name, "packs": rival.packs, "fill_real": rival.fill_real} for rival in self.compare]
        return {
            "examples": self.examples,
            "rejected": self.rejected.count,
            "tokens_real": self.tokens_real,
            "tokens_total": self.tokens_total,
            "fill": self.fill,
            "fill_real": self.fill_real,
            "packs": self.packs,
            "packs_bound": self.bounds.best,
            "steps": self.steps,
            "waste": {"slot": waste.slot, "filler": waste.filler, "over_budget": waste.over_budget},
            "sequences_per_pack": self.sequences_per_pack,
            "imbalance": self.imbalance,
            "compare": rivals or None,
            "shapes": {"distinct": self.shapes, "in_buckets": self.shapes_in_buckets},
            "static": self.static.to_dict() if self.static else None,
        }

    def table(self):
        """The figures for a terminal: a rich renderable."""
        from packfp8.report.table import report_table

        return report_table(self)

    def figure(self):
        """All charts in one matplotlib figure."""
        from packfp8.report.charts import figure

        return figure(self)

    def html(self) -> str:
        """One page that needs no network: sentences, charts and figures."""
        from packfp8.report.page import report_page

        return report_page(self)

    def _repr_html_(self) -> str:
        from packfp8.report.page import report_fragment

        return report_fragment(self)

    @property
    def _complete(self) -> bool:
        return self.walked == self.packed.examples
