"""Tables for the terminal: report, payoff and doctor as rich renderables."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from packfp8.report.constant_rows import constant_rows
from packfp8.report.doctor import BAD, OK, Doctor
from packfp8.report.payoff import Payoff
from packfp8.report.result import Report
from packfp8.report.sentences import percent, several
from packfp8.report.timing import BLOCKS, MODES

_WORK = {"attention": "attention", "encoder_frames": "encoder frames", "supervised": "supervised tokens"}
_STYLE = {OK: "green", BAD: "bold red"}


def report_table(report: Report) -> RenderableType:
    """Sentences, figures, rivals and what was rejected."""
    parts: list[RenderableType] = [Padding(Text(" ".join(report.sentences)), (0, 0, 1, 0)), _figures(report)]
    if report.compare:
        parts.append(_rivals(report))
    if report.rejected.count:
        parts.append(_rejected(report))
    return Group(*parts, Text(f"Tokens: {report.counting}.{_walked(report)}", style="dim"))


def payoff_table(payoff: Payoff) -> RenderableType:
    """Milliseconds of BF16, and how many times faster each recipe is."""
    sizes = f"hidden {payoff.sizes.hidden}, ffn {payoff.sizes.ffn}, {payoff.sizes.layers} layers"
    title = Text(f"{payoff.device}, {sizes}, forward and backward")
    return Group(title, *(_gains(payoff, block, mode) for block in BLOCKS for mode in MODES), *_wins(payoff))


def doctor_table(doctor: Doctor) -> RenderableType:
    """Findings, and the cures of those that need one."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in doctor.findings:
        mark = {"ok": "ok", "note": "-", "bad": "BAD"}[finding.status]
        value = Text(finding.value)
        if finding.cure:
            value.append(f"\ncure: {finding.cure}", style="italic")
        table.add_row(Text(mark, style=_STYLE.get(finding.status, "yellow")), finding.name, value)
    verdict = "Training here would be wrong or needlessly slow: see BAD." if doctor.exit_code else "Nothing stands in the way."
    return Group(table, Text(verdict))


def _figures(report: Report) -> Table:
    waste, total, dp = report.waste, max(1, report.tokens_total), report.rule.topology.dp
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_column(style="dim")
    over = f"{report.over_budget:,} of them longer than a pack" if report.over_budget else ""
    table.add_row("examples", f"{report.examples:,}", over)
    table.add_row("rejected lines", f"{report.rejected.count:,}", "")
    table.add_row("packs", f"{report.packs:,}", f"of {report.capacity:,} tokens; at least {report.bounds.best:,} are needed")
    table.add_row("steps", f"{report.steps:,}", f"on {several(dp, 'data-parallel rank')}")
    table.add_row("fill", percent(report.fill), "slots, of full packs")
    table.add_row("fill, real tokens", percent(report.fill_real), f"{report.tokens_real:,} of {report.tokens_total:,}")
    slot = "padding of rows" if report.rule.layout == "bshd" else f"slots are multiples of {report.rule.sequence}"
    table.add_row("waste: slot", percent(waste.slot / total), slot)
    table.add_row("waste: filler", percent(waste.filler / total), f"packs are multiples of {report.rule.total}")
    table.add_row("over the budget", f"{waste.over_budget:,}", "tokens that no pack holds")
    counts = report.sequences_per_pack
    spread = f"{counts['min']} to {counts['max']}, median {counts['median']:g}"
    table.add_row("sequences a pack", f"{counts['mean']:.1f}", spread)
    buckets = "" if report.shapes_in_buckets is None else f"{report.shapes_in_buckets:,} in buckets, "
    table.add_row("shapes", f"{report.shapes:,}", f"tokens, sequences, longest slot; {buckets}1 of static packs")
    for name, value, note in constant_rows(report):
        table.add_row(name, value, note)
    for work, idle in report.imbalance.items() if dp > 1 else ():
        table.add_row(f"idle: {_WORK[work]}", "unknown" if idle is None else percent(idle), "1 - mean / max over ranks")
    return table


def _rivals(report: Report) -> Table:
    table = Table(box=box.SIMPLE, title="The same examples, batched in other ways", title_justify="left")
    for name, justify in (("", "left"), ("packs", "right"), ("real tokens", "right"), ("steps, of ours", "right")):
        table.add_column(name, justify=justify)
    ours = max(1, report.compare[-1].packs)
    for rival in report.compare:
        style = "bold" if rival is report.compare[-1] else ""
        table.add_row(rival.name, f"{rival.packs:,}", percent(rival.fill_real), f"{rival.packs / ours:.2f}x", style=style)
    return table


def _rejected(report: Report) -> Text:
    more = report.rejected.count - len(report.rejected.named)
    lines = [f"Rejected lines: {report.rejected.count:,}", *(f"  {line}" for line in report.rejected.named)]
    return Text("\n".join([*lines, *([f"  and {more:,} more"] if more else []), ""]), overflow="fold")


def _walked(report: Report) -> str:
    if report.walked == report.packed.examples:
        return ""
    return f" Packs by a dry run over {report.walked:,} of {report.packed.examples:,} examples, drawn at random."


def _gains(payoff: Payoff, block: str, mode: str) -> Table:
    recipes = [r for r in payoff.baselines if any(row.case.block == block and row.case.recipe == r for row in payoff.rows)]
    what = {"linear": "linear layers", "layer": "decoder layers"}[block], {"eager": "eager", "graph": "CUDA graph"}[mode]
    table = Table(box=box.SIMPLE, title=f"{what[0]}, {what[1]}: times as fast as BF16, ± half the spread", title_justify="left")
    table.add_column("tokens", justify="right")
    table.add_column("BF16, ms", justify="right")
    for recipe in recipes:
        table.add_column(recipe, justify="right")
    for tokens in payoff.tokens:
        base = payoff.row(block, "bf16", mode, tokens)
        first = f"{base.median:.2f}" if base and base.milliseconds else (base.reason if base else "")
        table.add_row(f"{tokens:,}", first, *(_gain(payoff, block, recipe, mode, tokens) for recipe in recipes))
    return table


def _gain(payoff: Payoff, block: str, recipe: str, mode: str, tokens: int) -> Text:
    gain = payoff.gain(block, recipe, mode, tokens)
    if gain is None:
        row = payoff.row(block, recipe, mode, tokens)
        return Text("failed" if row and row.reason else "", style="dim")
    style = "green" if gain.least > 1 else "red" if gain.most < 1 else ""
    return Text(f"{gain.ratio:.2f} ±{(gain.most - gain.least) / 2:.2f}", style=style)


def _wins(payoff: Payoff) -> list[Text]:
    told = []
    for won in payoff.to_dict()["wins_from"]:
        where = f"from {won['tokens']:,} tokens on" if won["tokens"] else "nowhere in this range"
        told.append(Text(f"{won['block']:<7} {won['mode']:<6} {won['recipe']:<20} faster than BF16 {where}"))
    failed = [row for row in payoff.rows if row.reason]
    told += [Text(f"failed: {r.case.recipe} {r.case.block} {r.case.mode} {r.case.tokens:,}: {r.reason}") for r in failed[:10]]
    return told
