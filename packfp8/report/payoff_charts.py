"""The charts of a payoff: how many times as fast as BF16 each recipe is, over tokens."""

from __future__ import annotations

from functools import partial

from packfp8.report.charts import Chart
from packfp8.report.drawing import COLOURS, INK, MARKERS, legend, powers, sheet
from packfp8.report.payoff import Payoff
from packfp8.report.timing import BLOCKS, MODES

_BLOCK = {"linear": "Linear layers", "layer": "Decoder layers"}
_MODE = {"eager": "launched eagerly", "graph": "as a CUDA graph"}


def charts(payoff: Payoff) -> list[Chart]:
    """One chart for every block and mode."""
    caption = "Above 1 FP8 is faster than BF16 in the same mode; the band is least to most."
    return [
        Chart(
            name=f"{block}-{mode}",
            title=f"{_BLOCK[block]}, {_MODE[mode]}",
            caption=caption,
            draw=partial(_gains, payoff, block, mode),
        )
        for block in BLOCKS
        for mode in MODES
    ]


def figure(payoff: Payoff):
    """All charts in one matplotlib figure."""
    return sheet([(chart.title, chart.draw) for chart in charts(payoff)])


def _gains(payoff: Payoff, block: str, mode: str, axes) -> None:
    number = 0
    for recipe in payoff.baselines:
        gains = {tokens: payoff.gain(block, recipe, mode, tokens) for tokens in payoff.tokens}
        gains = {tokens: gain for tokens, gain in gains.items() if gain}
        if not gains:
            continue
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        number += 1
        low, high = [gain.least for gain in gains.values()], [gain.most for gain in gains.values()]
        axes.fill_between(list(gains), low, high, color=colour, alpha=0.15, linewidth=0)
        ratios = [gain.ratio for gain in gains.values()]
        axes.plot(list(gains), ratios, color=colour, marker=marker, label=recipe)
    axes.axhline(1, color=INK, linewidth=1)
    powers(axes, list(payoff.tokens))
    axes.set_ylim(bottom=0)
    axes.set(xlabel="tokens in a rank's pack", ylabel="times as fast as BF16")
    if number:
        legend(axes, 3)
