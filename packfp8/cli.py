"""The command line: explain, report, demo, payoff, doctor.

Exit codes: 0 done; 1 the input breaks the rule or the data is bad; 2 wrong usage. A command imports its room when it runs, so
that `packfp8 explain` needs no torch.
"""

from __future__ import annotations

import json
import sys
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
