"""Drawing: the one style of all charts, in a notebook as in a page; and a chart as SVG that follows the reader's theme.

Colours are those of Okabe and Ito (2008), which colour-blind people tell apart. In a page each is a CSS variable, so that one
drawing serves light and dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

from packfp8.errors import ConfigError

INK, MUTED, GRID = "#1a1a19", "#5f5f5b", "#d9d9d4"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b05b90", "#8a6d00", "#4d4d4a")
"""Blue, vermilion, green, purple, ochre, grey; purple and ochre darker than theirs, to be read on white."""

MARKERS = ("o", "s", "^", "D", "v", "X")
"""A second sign beside the colour, for lines that a legend tells apart."""

_WIDTH_INCHES, _HEIGHT_INCHES = 4.3, 2.75
_VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid"} | {c: f"c{n}" for n, c in enumerate(COLOURS, 1)}
_STYLE = {
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.labelsize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
}

Draw = Callable[[object], None]
"""Draws a chart into matplotlib axes."""


def svg(draw: Draw, name: str) -> str:
    """The chart as an `<svg>` element whose colours are CSS variables.

    Args:
        draw: the chart.
        name: tells its ids from those of other charts in the page.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    matplotlib = _matplotlib()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = matplotlib.figure.Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"<svg [^>]*?viewBox=\"([^\"]+)\"[^>]*>", r'<svg viewBox="\1" aria-hidden="true">', text, count=1)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return text.strip()


def sheet(charts: list[tuple[str, Draw]], columns: int = 2):
    """All charts, each under its title, in one matplotlib figure.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    rows = -(-len(charts) // columns)
    with painted((columns * _WIDTH_INCHES, rows * (_HEIGHT_INCHES + 0.3))) as figure:
        for part, (title, draw) in zip(figure.subfigures(rows, columns, squeeze=False).flat, charts):
            part.suptitle(title, x=0.02, ha="left", fontsize=10.5, fontweight="bold")
            draw(part.add_subplot())
    return figure


@contextmanager
def painted(size_inches: tuple[float, float]) -> Iterator:
    """A matplotlib figure on white in the house's style, which holds within the block.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    matplotlib = _matplotlib()
    with matplotlib.rc_context({**_STYLE, "figure.facecolor": "white", "savefig.facecolor": "white"}):
        yield matplotlib.figure.Figure(figsize=size_inches, layout="constrained")


def legend(axes, columns: int) -> None:
    """A legend above the axes, where no line can run through it."""
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=columns, handlelength=1.6, columnspacing=1.2)


def thousands(axis) -> None:
    """Tick labels as 1,000."""
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def powers(axes, values: list[int]) -> None:
    """An x axis of token counts in powers of two: 4k is 4,096."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value // 1024}k" if value % 1024 == 0 else str(value) for value in values])
    axes.minorticks_off()


def _matplotlib() -> ModuleType:
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as fault:
        raise ConfigError(
            "charts are drawn by matplotlib, which is not installed",
            got=str(fault),
            expected="the package matplotlib",
            because="a page without its charts would be the table that the terminal prints",
            fix="pip install 'packfp8[report]', or leave out --html",
        ) from fault
    return matplotlib
