"""The command line: explain, report, demo, payoff, doctor.

Exit codes: 0 done; 1 the input breaks the rule or the data is bad; 2 wrong usage. A command imports its room when it runs, so
that `packfp8 explain` needs no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import click

from packfp8 import __version__
from packfp8.errors import PackError, RuleError
from packfp8.rule import Alignment, Topology, align

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


class _Commands(click.Group):
    """A PackError is the user's to mend: its five lines on stderr and exit code 1, no traceback."""

    def invoke(self, ctx: click.Context):
        try:
            return super().invoke(ctx)
        except PackError as fault:
            click.echo(f"error: {fault}", err=True)
            ctx.exit(1)


def _with_topology(command):
    """The options that name a topology and a layout."""
    for option in (
        click.option("--fast", is_flag=True, help="Ask for the multiples that only buy speed, too."),
        click.option("--frozen", is_flag=True, help="The FP8 layers' weights are not trained."),
        click.option(
            "--layout", type=click.Choice(["thd", "bshd"]), default="thd", show_default=True, help="Packed or padded."
        ),
        click.option("--sp", is_flag=True, help="Sequence parallelism over the TP ranks."),
        click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks."),
        click.option("--cp", type=click.IntRange(1), default=1, show_default=True, help="Context-parallel ranks."),
        click.option("--dp", type=click.IntRange(1), default=1, show_default=True, help="Data-parallel ranks."),
    ):
        command = option(command)
    return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="packfp8")
def main() -> None:
    """Packed audio-text batches whose token counts are right for FP8, context and sequence parallelism."""


@main.command(epilog="Example:  packfp8 explain block --cp 2 --tp 4 --sp")
@click.argument("recipe", callback=lambda ctx, param, value: _known(value))
@_with_topology
@click.option("--batch", type=click.IntRange(1), help="Rows on each data-parallel rank (BSHD): print the least S for them.")
@_JSON
def explain(recipe, dp, cp, tp, sp, layout, frozen, fast, batch, as_json) -> None:
    """What must divide what under RECIPE, and why."""
    if batch is not None and layout != "bshd":
        raise click.UsageError("--batch counts the rows of a padded batch: add --layout bshd")
    rule = align(recipe, Topology(dp=dp, cp=cp, tp=tp, sp=sp), layout=layout, trains_weights=not frozen, fast=fast)
    if as_json:
        click.echo(json.dumps(_explained(rule, batch), indent=2))
        return
    click.echo(str(rule))
    if batch is not None:
        click.echo(f"  {batch} rows     S a multiple of {rule.row(batch)}")


@main.command(epilog="Example:  packfp8 report 'data/*.jsonl.gz' --budget 16384 --recipe block --cp 2 --compare --html r.html")
@click.argument("manifests", nargs=-1, required=True, metavar="MANIFEST...")
@click.option("--budget", type=click.IntRange(1), required=True, help="Most tokens of a pack.")
@click.option(
    "--recipe", default="bf16", show_default=True, callback=lambda ctx, param, value: _known(value), help="FP8 recipe."
)
@_with_topology
@click.option("--lookahead", type=click.IntRange(1), default=256, show_default=True, help="Examples a pack may choose among.")
@click.option("--max-sequences", type=click.IntRange(1), help="Most sequences in a pack.")
@click.option("--frames-per-second", metavar="F", help="Encoder frames in a second of audio.  [default: 12.5]")
@click.option("--tokenizer", metavar="T", help="'bytes', tokenizer.json, module:name, or a Hugging Face name.")
@click.option("--prompt-tokens", type=click.IntRange(0), default=0, show_default=True, help="Added to every example.")
@click.option("--payoff", type=click.Path(path_type=Path), help="Saved `packfp8 payoff --json`: is the budget where FP8 wins?")
@click.option("--static", is_flag=True, help="What packs of one constant shape cost, too.")
@click.option("--frame-budget", type=click.IntRange(2), help="With --static: most encoder frames.  [default: of 95 % of packs]")
@click.option("--html", type=click.Path(path_type=Path), help="Write one page with charts.")
@click.option("--compare", is_flag=True, help="Batch the same examples in other ways, too.")
@_JSON
def report(manifests, budget, recipe, dp, cp, tp, sp, layout, frozen, fast, html, as_json, **options) -> None:
    """What packing achieves on lhotse cuts, NeMo or CSV manifests, Kaldi folders or .npy lengths.

    Start it with torchrun to split the files over processes.
    """
    if options["frame_budget"] is not None and not options["static"]:
        raise click.UsageError("--frame-budget bounds packs of constant shape: add --static")
    from packfp8.report import launched
    from packfp8.report import report as measured

    rule = {"layout": layout, "trains_weights": not frozen, "fast": fast, "topology": Topology(dp=dp, cp=cp, tp=tp, sp=sp)}
    with launched() as ranks, _reading(ranks.rank == 0) as progress:
        result = measured(manifests, budget=budget, recipe=recipe, ranks=ranks, progress=progress, **rule, **options)
        if ranks.rank != 0:
            return
    _write(result, html)
    _show(result, as_json)


@main.command(epilog="Example:  packfp8 demo --data my_recordings/ --layout bshd --steps 10")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of audio with a .txt beside each file.")
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True, help="Optimiser steps, of one pack each.")
@click.option("--layout", type=click.Choice(["thd", "bshd"]), default="thd", show_default=True, help="Packed or padded.")
@click.option(
    "--recipe", default="block", show_default=True, callback=lambda ctx, param, value: _known(value), help="FP8 recipe."
)
@_JSON
def demo(data, steps, layout, recipe, as_json) -> None:
    """The main job on a CPU: audio and text to packs, batches and a model that learns.

    Reads the embedded corpus, or the folder given with --data.
    """
    from packfp8.report.demo import run_demo

    _show(run_demo(data, steps=steps, layout=layout, recipe=recipe), as_json)


@main.command(epilog="Example:  packfp8 payoff --hidden 4096 --ffn 11264 --tokens 1024,4096,16384 --html payoff.html")
@click.option("--hidden", type=click.IntRange(64), default=4096, show_default=True, help="Hidden size.")
@click.option("--ffn", type=click.IntRange(16), help="Inner size of the SwiGLU MLP.  [default: 2.75 * hidden]")
@click.option("--layers", type=click.IntRange(1), default=2, show_default=True, help="Decoder layers.")
@click.option(
    "--tokens", callback=lambda ctx, param, value: _counts(value), help="Tokens of a pack.  [default: 1024,...,65536]"
)
@click.option("--recipes", metavar="NAMES", help="Only these, with commas.  [default: all that the GPU and its libraries have]")
@click.option("--html", type=click.Path(path_type=Path), help="Write one page with charts.")
@_JSON
def payoff(hidden, ffn, layers, tokens, recipes, html, as_json) -> None:
    """From how many tokens on FP8 beats BF16 on this GPU, launched eagerly and as a CUDA graph."""
    from packfp8.report import payoff as timed

    told = {} if tokens is None else {"tokens": tokens}
    told |= {} if recipes is None else {"recipes": [_known(name.strip()) for name in recipes.split(",")]}
    result = timed(hidden=hidden, ffn=ffn, layers=layers, progress=lambda case: click.echo(f"timing {case}", err=True), **told)
    _write(result, html)
    _show(result, as_json)


@main.command(epilog="Example:  packfp8 doctor --json")
@_JSON
@click.pass_context
def doctor(ctx, as_json) -> None:
    """Whether this machine would train packed FP8 batches rightly and fast; exit code 1 if not."""
    from packfp8.report import doctor as examined

    result = examined()
    _show(result, as_json)
    ctx.exit(result.exit_code)


@contextmanager
def _reading(shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on stderr while bytes are read; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _counts(text: str | None) -> list[int] | None:
    """The whole numbers of a list with commas; "..." between two of them doubles the first until the second."""
    if text is None:
        return None
    counts: list[int] = []
    try:
        for before, part in pairwise(["", *text.split(",")]):
            if part.strip() == "...":
                continue
            last = int(part)
            while before.strip() == "..." and 0 < 2 * counts[-1] < last:
                counts.append(2 * counts[-1])
            counts.append(last)
    except (ValueError, IndexError):
        counts = []
    if not counts or text.rstrip().endswith("..."):
        raise click.UsageError(f"--tokens takes whole numbers with commas, or 1024,...,65536; not {text!r}")
    return counts


def _write(result, html: Path | None) -> None:
    if html is not None:
        html.write_text(result.html(), encoding="utf-8")


def _show(result, as_json: bool) -> None:
    """The result as one JSON object or as tables for people."""
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=2))
        return
    from rich.console import Console

    Console().print(result.table())


def _known(recipe: str) -> str:
    """The recipe, where it is one; a misspelt argument is wrong usage."""
    try:
        return align(recipe).recipe
    except RuleError as fault:
        raise click.UsageError(str(fault)) from fault


def _explained(rule: Alignment, batch: int | None) -> dict:
    needs = [{name: getattr(need, name) for name in ("unit", "multiple", "because", "source", "kind")} for need in rule.needs]
    return {
        "recipe": rule.recipe,
        "layout": rule.layout,
        "sequence": rule.sequence,
        "total": rule.total,
        **({} if batch is None else {"row": rule.row(batch)}),
        "fingerprint": rule.fingerprint,
        "needs": needs,
    }


if __name__ == "__main__":
    sys.exit(main())
