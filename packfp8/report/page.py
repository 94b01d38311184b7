"""Page: a report or a payoff as one HTML file that asks for nothing from a network: no script, no font, no image file."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib import resources

from packfp8.report import charts as report_charts
from packfp8.report import payoff_charts
from packfp8.report.constant_rows import constant_rows
from packfp8.report.drawing import svg
from packfp8.report.payoff import Payoff
from packfp8.report.result import WORKS, Report
from packfp8.report.sentences import percent, several
from packfp8.report.what_if import RANKS

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # a browser would refuse whatever asked for more
_WORK = {"attention": "attention", "encoder_frames": "encoder frames", "supervised": "labels"}


_BLOCK_MODES = {
    ("linear", "eager"): "linear layers, eager",
    ("linear", "graph"): "linear layers, graph",
    ("layer", "eager"): "decoder layers, eager",
    ("layer", "graph"): "decoder layers, graph",
}


def report_page(report: Report) -> str:
    """The whole page of a report."""
    return _page(f"Packing report: {several(report.examples, 'example')}, budget {report.budget:,}", report_fragment(report))


def payoff_page(payoff: Payoff) -> str:
    """The whole page of a payoff."""
    return _page(f"FP8 payoff: {payoff.device}", payoff_fragment(payoff))


def report_fragment(report: Report) -> str:
    """The page's content, with its style: what a notebook shows."""
    first, *rest = report.sentences
    parts = [
        "<header><h1>Packing report</h1>",
        f"<p class=meta>{escape(_what(report))}</p></header>",
        f"<section class=said><p class=first>{escape(first)}</p>{''.join(f'<p>{escape(s)}</p>' for s in rest)}</section>",
        _tiles(report),
        "<div class=cards>",
        _charts(report_charts.charts(report), "r"),
        _table("Figures", ("", "tokens", "of full packs"), _figures(report)),
        _table("Packs of one shape", ("", "", ""), constant_rows(report), wide=True) if report.static else "",
        _table("Ways of batching", ("", "packs", "real tokens", "steps, of ours"), _rivals(report)) if report.compare else "",
        _table("What if: recipe, and TP with SP", ("multiple of a pack, tokens wasted", *_tps()), _recipes(report), wide=True),
        "</div>",
        _rejected(report),
        f"<footer><p>{escape(_how(report))}</p></footer>",
    ]
    return _fragment(parts)


def payoff_fragment(payoff: Payoff) -> str:
    """The page's content, with its style: what a notebook shows."""
    sizes = payoff.sizes
    versions = ", ".join(f"{name} {number}" for name, number in payoff.versions.items())
    what = f"{payoff.device}; {versions}; hidden {sizes.hidden}, ffn {sizes.ffn}, {several(sizes.layers, 'layer')}"
    failed = [(f"{r.case.recipe}, {r.case.block}, {r.case.mode}, {r.case.tokens:,}", r.reason) for r in payoff.rows if r.reason]
    parts = [
        f"<header><h1>Where FP8 beats BF16</h1><p class=meta>{escape(what)}</p></header>",
        '<div class="cards two">',
        _charts(payoff_charts.charts(payoff), "p"),
        _table("Faster than BF16 from so many tokens on", ("", *_BLOCK_MODES.values()), _wins(payoff), wide=True),
        _table("Milliseconds, forward and backward", ("", *(f"{t:,}" for t in payoff.tokens)), _times(payoff), wide=True),
        _table("Could not be timed", ("case", "reason"), failed, wide=True) if failed else "",
        "</div>",
        f"<footer><p>Packs of sequences of {sizes.sequence_tokens} tokens; medians of repeats; faster "
        "means faster in every pair of repeats.</p></footer>",
    ]
    return _fragment(parts)


def _page(title: str, body: str) -> str:
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><link rel=icon href="data:,">'
        f"<title>{escape(title)}</title><style>body{{margin:0}}</style></head>\n<body>{body}</body></html>\n"
    )


def _fragment(parts: Iterable[str]) -> str:
    style = resources.files("packfp8.report").joinpath("page.css").read_text("utf-8")
    return f"<style>{style}</style>\n<div class=packfp8>\n" + "\n".join(part for part in parts if part) + "\n</div>"


def _charts(made: list[report_charts.Chart], prefix: str) -> str:
    figures = [
        f"<figure><h2>{escape(chart.title)}</h2>{svg(chart.draw, f'{prefix}-{chart.name}')}"
        f"<figcaption>{escape(chart.caption)}</figcaption></figure>"
        for chart in made
    ]
    return "\n".join(figures)


def _table(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, wide: bool = False) -> str:
    """A table whose first column names its rows; a wide one takes the width of the page."""
    cells = "".join(f"<th scope=col>{escape(name)}</th>" for name in head)
    body = "".join(
        f"<tr><th scope=row>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>" for row in rows
    )
    size = "table wide" if wide else "table"
    return f'<section class="{size}"><h2>{escape(title)}</h2><div><table><tr>{cells}</tr>{body}</table></div></section>'


def _tiles(report: Report) -> str:
    mean = report.sequences_per_pack["mean"]
    tiles = [
        ("real tokens", percent(report.fill_real)),
        ("packs", f"{report.packs:,}"),
        ("least possible", f"{report.bounds.best:,}"),
        ("steps", f"{report.steps:,}"),
        ("sequences a pack", f"{mean:.1f}"),
        ("examples", f"{report.examples:,}"),
    ]
    return f"<dl class=tiles>{''.join(f'<div><dt>{name}</dt><dd>{value}</dd></div>' for name, value in tiles)}</dl>"


def _figures(report: Report) -> list[tuple[str, str, str]]:
    waste, total = report.waste, max(1, report.tokens_total)
    rows = [
        ("real", report.tokens_real),
        ("slot padding", waste.slot),
        ("filler", waste.filler),
        ("full packs", report.tokens_total),
    ]
    told = [(name, f"{tokens:,}", percent(tokens / total)) for name, tokens in rows]
    told.append(("over the budget", f"{waste.over_budget:,}", several(report.over_budget, "example")))
    idle = [(work, report.imbalance[work]) for work in WORKS] if report.rule.topology.dp > 1 else []
    return told + [(f"idle: {_WORK[work]}", "", "unknown" if share is None else percent(share)) for work, share in idle]


def _rivals(report: Report) -> list[tuple[str, ...]]:
    ours = max(1, report.compare[-1].packs)
    return [(r.name, f"{r.packs:,}", percent(r.fill_real), f"{r.packs / ours:.2f}") for r in report.compare]


def _tps() -> list[str]:
    return [f"TP {tp}" for tp in RANKS]


def _recipes(report: Report) -> list[tuple[str, ...]]:
    guesses = report.what_if.by_recipe
    rows = {}
    for recipe in dict.fromkeys(name for name, _ in guesses):
        found = [guesses.get((recipe, tp)) for tp in RANKS]
        rows[recipe] = tuple(f"{g.rule.total}, {percent(g.waste)}" if g else "over the budget" for g in found)
    alike: dict[tuple[str, ...], list[str]] = {}
    for recipe, cells in rows.items():
        alike.setdefault(cells, []).append(recipe)
    return [(", ".join(recipes), *cells) for cells, recipes in alike.items()]


def _wins(payoff: Payoff) -> list[tuple[str, ...]]:
    def cell(recipe: str, block: str, mode: str) -> str:
        if payoff.row(block, recipe, mode, payoff.tokens[0]) is None:
            return ""
        start = payoff.wins_from(block, recipe, mode)
        return f"{start:,}" if start else "not in this range"

    return [(recipe, *(cell(recipe, *place) for place in _BLOCK_MODES)) for recipe in payoff.baselines]


def _times(payoff: Payoff) -> list[tuple[str, ...]]:
    cases = dict.fromkeys((row.case.recipe, row.case.block, row.case.mode) for row in payoff.rows)
    rows = []
    for recipe, block, mode in cases:
        found = [payoff.row(block, recipe, mode, tokens) for tokens in payoff.tokens]
        cells = (f"{row.median:.2f}" if row and row.milliseconds else "-" for row in found)
        rows.append((f"{recipe}, {block}, {mode}", *cells))
    return rows


def _rejected(report: Report) -> str:
    if not report.rejected.count:
        return ""
    more = report.rejected.count - len(report.rejected.named)
    lines = [*report.rejected.named, *([f"and {more:,} more"] if more else [])]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<section class=rejected><h2>{several(report.rejected.count, 'rejected line')}</h2><ul>{items}</ul></section>"


def _what(report: Report) -> str:
    rule = report.rule
    names = ", ".join(report.sources[:3]) + (f" and {len(report.sources) - 3} more" if len(report.sources) > 3 else "")
    return (
        f"{names}: {rule.recipe}, {rule.layout.upper()}, {rule.topology}; slots of {rule.sequence}, packs of {rule.total}; "
        f"budget {report.budget:,}, lookahead {report.lookahead}"
    )


def _how(report: Report) -> str:
    walked = f"{report.walked:,} of {report.packed.examples:,}" if report.walked != report.packed.examples else "all"
    guessed = "rows sorted by length, which no bucketing betters" if report.rule.layout == "bshd" else "best fit"
    return (
        f"Tokens of an example: {report.counting}. Packs come from a dry run of the sampler over {walked} examples in shuffled "
        f"order; filler is counted against full packs. What-if figures come from the histogram, by {guessed}."
    )
