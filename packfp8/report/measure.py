"""report(): manifests and settings to a Report."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from packfp8.errors import ConfigError, ExampleError
from packfp8.packing import bounds
from packfp8.report.constancy import check_constant, constancy
from packfp8.report.counting import Counting
from packfp8.report.dry_run import MOST_EXAMPLES, Drawn, dry_run
from packfp8.report.manifests import find_manifests
from packfp8.report.payoff import Payoff
from packfp8.report.ranks import Ranks
from packfp8.report.reading import Progress, read
from packfp8.report.result import Report
from packfp8.report.rivals import compare as compared
from packfp8.report.tally import Rejected, Tally
from packfp8.report.what_if import fits, longest, what_if
from packfp8.rule import Topology, align


def report(
    paths: str | Path | Iterable[str | Path],
    *,
    budget: int,
    recipe: str = "bf16",
    topology: Topology | None = None,
    layout: str = "thd",
    trains_weights: bool = True,
    fast: bool = False,
    lookahead: int = 256,
    max_sequences: int | None = None,
    frames_per_second: float | str | None = None,
    tokenizer: object = None,
    prompt_tokens: int = 0,
    compare: bool = False,
    seed: int = 0,
    payoff: str | Path | None = None,
    static: bool = False,
    frame_budget: int | None = None,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Report:
    """What packing these manifests to a budget achieves; no audio is read.

    Args:
        paths: manifests, folders and globs: lhotse cuts (jsonl, jsonl.gz, Shar), NeMo, CSV, Kaldi, `.npy` lengths.
        budget: most tokens of a pack.
        recipe, topology, layout, trains_weights, fast: as `align` takes them.
        lookahead, max_sequences: as the sampler takes them.
        frames_per_second: encoder frames in a second of audio; 12.5 (FastConformer 8x) by default.
        tokenizer: any that `Measure` takes, or a name; by default text is UTF-8 bytes // 4.
        prompt_tokens: added to every example.
        compare: also batch the same examples in other ways.
        seed: of the order in which the sampler walks.
        payoff: a file that `packfp8 payoff --json` wrote: says whether the budget is where FP8 wins.
        static: also say what packs of constant shape cost, as `Collator(static=True)` makes them.
        frame_budget: with `static`, most encoder frames of a pack's clips, their rooms' silence counted; the 95th percentile
            of packs without it by default.
        ranks: processes to split the files over, all of which call this; see `packfp8.report.ranks.launched`.
        progress: called with bytes done and bytes in all.

    Raises:
        PackError: settings that contradict each other, a path that names nothing, or nothing that can be read.
    """
    if frame_budget is not None and not static:
        raise _frames_of_nothing(frame_budget)
    rule = align(recipe, topology, layout=layout, trains_weights=trains_weights, fast=fast)
    if static:
        check_constant(rule)
    capacity = rule.floor(budget)
    counting = Counting.of(frames_per_second, tokenizer, prompt_tokens)
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    ranks = ranks or Ranks()

    def count(manifests: list) -> tuple[Tally, Rejected]:
        return read(manifests, counting, progress=progress, cores=ranks.cores)

    tally, rejected = ranks.counted(lambda: find_manifests(paths), count)
    if not tally.examples:
        raise _nothing(rejected)
    histogram = tally.histogram(prompt_tokens)
    packed = fits(histogram, capacity, rule)
    fitting = tally.only(tally.tokens(prompt_tokens) <= longest(capacity, rule))
    drawn = Drawn.of(fitting, prompt_tokens=prompt_tokens, seed=seed, most=MOST_EXAMPLES)
    stream = dry_run(drawn, rule, budget=budget, lookahead=lookahead, max_sequences=max_sequences)
    rivals = ()
    if compare:
        rivals = compared(drawn, rule, stream, budget=budget, lookahead=lookahead, max_sequences=max_sequences)
    constant = None
    if static:
        bounded = {"budget": budget, "lookahead": lookahead, "max_sequences": max_sequences, "frame_budget": frame_budget}
        constant = constancy(drawn, rule, stream, longest_tokens=packed.longest, **bounded)
    return Report(
        sources=tuple(map(str, paths)),
        rule=rule,
        budget=budget,
        counting=counting,
        histogram=histogram,
        bare=tally.bare,
        rejected=rejected,
        packed=packed,
        stream=stream,
        bounds=bounds(packed, capacity, rule.sequence, max_sequences),
        what_if=what_if(histogram, rule, budget=budget, max_sequences=max_sequences),
        compare=rivals,
        static=constant,
        verdict=Payoff.load(payoff).verdict(recipe, capacity // rule.topology.cp) if payoff else "",
        lookahead=lookahead,
        max_sequences=max_sequences,
    )


def _nothing(rejected: Rejected) -> ExampleError:
    return ExampleError(
        "no line of the manifests can be read",
        got=f"{rejected.count} rejected lines; {rejected.named[0] if rejected.named else 'the files are empty'}",
        expected="at least one example with a duration or a length",
        because="there is nothing to pack",
        fix="check that these are the manifests, and what their lines hold",
    )


def _frames_of_nothing(frame_budget: int) -> ConfigError:
    return ConfigError(
        "a frame budget without packs of constant shape",
        got=f"frame_budget={frame_budget}, static=False",
        expected="both, or neither",
        because="the figures of ordinary packs do not depend on it, and a setting that does nothing hides a mistake",
        fix="add static=True (--static), or leave out the frame budget",
    )
