"""The charts of a report. Each is a function of the report and matplotlib axes; none holds a figure that the report has not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from packfp8.report.drawing import COLOURS, INK, MARKERS, MUTED, legend, powers, sheet, thousands
from packfp8.report.result import WORKS, Report
from packfp8.report.sentences import percent

_BINS = 40
_POINTS = 120  # points of the fill over the epoch: more cannot be told apart at 400 pixels
_BUDGETS = "Tokens wasted or left out, by budget and CP ranks; the last pack counts what it holds."
_WORK = {"attention": "attention", "encoder_frames": "encoder frames", "supervised": "labels"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart: its short name, its title, what it shows in words, and the function that draws it."""

    name: str
    title: str
    caption: str
    draw: Callable


def charts(report: Report) -> list[Chart]:
    """The charts that this report has data for, in the order of the page."""
    slot = "rows" if report.rule.layout == "bshd" else "slots"
    made = [
        ("lengths", "Lengths", f"Examples by length: real tokens, and the {slot} that they take.", _lengths),
        ("waste", "Waste by cause", "Share of all tokens of full packs; over the budget: of all real tokens.", _waste),
        ("fill", "Fill over the epoch", "Real tokens of full packs, in order; the band is least to most.", _fill),
        ("sequences", "Sequences in a pack", "Packs by the number of sequences that they hold.", _sequences),
        (
            "budgets",
            "What if: budget and CP",
            "Tokens wasted or left out, by budget and CP ranks; the last pack counts what it holds.",
            _budgets,
        ),
    ]
    if report.rule.topology.dp > 1:
        caption = "Share of a step for which ranks wait for the slowest, averaged over steps."
        made.append(("idle", "Idle ranks", caption, _idle))
    if report.compare:
        caption = "Real tokens in batches of the same budget, from the same examples in the same order."
        made.append(("compare", "Ways of batching", caption, _compare))
    return [Chart(name=n, title=t, caption=c, draw=partial(draw, report)) for n, t, c, draw in made]


def figure(report: Report):
    """All charts in one matplotlib figure."""
    return sheet([(chart.title, chart.draw) for chart in charts(report)])


def _lengths(report: Report, axes) -> None:
    histogram, multiple = report.packed, report.rule.sequence
    if not histogram.examples:
        return _empty(axes)
    top = max(histogram.longest, 2)
    logarithmic = top > 20 * max(1, _median(histogram))
    edges = np.geomspace(max(1, histogram.lengths[0]), top + 1, _BINS) if logarithmic else np.linspace(0, top + 1, _BINS)
    real, _ = np.histogram(histogram.lengths, edges, weights=histogram.counts)
    slots = np.minimum(-(-histogram.lengths // multiple) * multiple, top)
    aligned, _ = np.histogram(slots, edges, weights=histogram.counts)
    axes.stairs(real, edges, fill=True, color=COLOURS[0], alpha=0.45, label="real")
    axes.stairs(aligned, edges, color=COLOURS[1], label=f"rounded to {multiple}" if multiple > 1 else "slot")
    if logarithmic:
        axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set(xlabel="tokens of an example", ylabel="examples")
    thousands(axes.xaxis)
    thousands(axes.yaxis)
    axes.grid(visible=False, axis="x")
    legend(axes, 2)


def _waste(report: Report, axes) -> None:
    waste, total = report.waste, max(1, report.tokens_total)
    names = ["slot", "filler", "over the budget"]
    shares = [waste.slot / total, waste.filler / total, waste.over_budget / max(1, report.histogram.tokens)]
    _bars(axes, names, shares, [COLOURS[0], COLOURS[1], COLOURS[3]])
    axes.set_xlabel("wasted tokens, %")


def _fill(report: Report, axes) -> None:
    stream = report.stream
    if not stream.packs:
        return _empty(axes)
    fills = 100 * stream.real_tokens / stream.capacity
    groups = np.array_split(fills, min(_POINTS, len(fills)))
    ends = np.cumsum([len(group) for group in groups])
    axes.fill_between(ends, [g.min() for g in groups], [g.max() for g in groups], color=COLOURS[0], alpha=0.2, linewidth=0)
    axes.plot(ends, [g.mean() for g in groups], color=COLOURS[0])
    low = min(90.0, 10 * (fills.min() // 10)) if len(fills) < 20 else min(90.0, 10 * (np.quantile(fills, 0.02) // 10))
    axes.set_ylim(max(0, low), 100.5)
    axes.set(xlabel="pack", ylabel="real tokens, %")
    thousands(axes.xaxis)


def _sequences(report: Report, axes) -> None:
    counts = report.stream.sequences
    if not len(counts):
        return _empty(axes)
    values, packs = np.unique(counts, return_counts=True)
    if len(values) <= _BINS:
        axes.bar(values, packs, width=0.85, color=COLOURS[0])
    else:
        axes.hist(counts, bins=_BINS, color=COLOURS[0])
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="sequences in a pack", ylabel="packs")
    thousands(axes.yaxis)
    axes.grid(visible=False, axis="x")


def _budgets(report: Report, axes) -> None:
    guesses = report.what_if.by_budget
    chosen = report.rule.topology.cp
    shown = [cp for cp in guesses if guesses[cp]][-4:]
    for cp, colour, marker in zip(shown, COLOURS, MARKERS):
        lost = [100 * (1 - (1 - guess.waste) * (1 - guess.over_budget)) for guess in guesses[cp]]
        budgets = [guess.budget for guess in guesses[cp]]
        style = {"linewidth": 2.4} if cp == chosen else {"linewidth": 1.3}
        axes.plot(budgets, lost, color=colour, marker=marker, label=f"CP {cp}", **style)
    here = report.what_if.here
    axes.axvline(here.budget, color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
    powers(axes, sorted({guess.budget for cp in shown for guess in guesses[cp] if guess.budget & (guess.budget - 1) == 0}))
    axes.set_ylim(bottom=0)
    axes.set(xlabel="budget, tokens (dashed: this one)", ylabel="lost, %")
    legend(axes, 4)


def _idle(report: Report, axes) -> None:
    works = [work for work in WORKS if report.imbalance[work] is not None]
    _bars(axes, [_WORK[work] for work in works], [report.imbalance[work] for work in works], [COLOURS[0]] * len(works))
    axes.set_ylim(len(WORKS) - 0.5, -0.5)
    axes.set_xlabel("idle, % of a step")


def _compare(report: Report, axes) -> None:
    colours = [MUTED] * (len(report.compare) - 1) + [COLOURS[0]]
    _bars(axes, [rival.name for rival in report.compare], [rival.fill_real for rival in report.compare], colours)
    axes.set_xlim(0, 118)
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.set_xlabel("real tokens, % of full packs")


def _bars(axes, names: list[str], shares: list[float], colours: list[str]) -> None:
    """Horizontal bars from the top down, each with its value."""
    places = range(len(names))
    axes.barh(places, [100 * share for share in shares], height=0.62, color=colours)
    axes.set_yticks(places, names)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, max(0.1, 122 * max(shares, default=0)))
    for place, share in zip(places, shares):
        axes.annotate(percent(share), (100 * share, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=10)


def _median(histogram) -> int:
    half = np.searchsorted(np.cumsum(histogram.counts), histogram.examples / 2)
    return int(histogram.lengths[half])


def _empty(axes) -> None:
    axes.text(0.5, 0.5, "no pack", ha="center", va="center", transform=axes.transAxes)
