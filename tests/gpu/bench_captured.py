"""Real tokens a second of training steps: padded batches and packs, BF16 and FP8, launched kernel by kernel and captured.

    python tests/gpu/bench_captured.py

    a  padded batches from 30 length buckets, BF16, eager        d  packs of one shape, FP8, captured as one CUDA graph
    b  packs, BF16, eager                                        e  packs of one shape, BF16, captured
    c  packs, FP8, eager

"decoder" is forward and backward of its layers alone, "step" all of a step but the optimizer: encoder, projector, splice,
decoder, head and loss. The contenders of a block are timed in turn, and the medians count. GB is the most memory that tensors
took, parameters and gradients included; "held" is what a captured step keeps from others between its replays.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import click
import contenders
import torch
from contenders import Data
from floor import Floor
from kernel_times import profiled
from workload import header

from packfp8 import Alignment, align
from packfp8.model import PackedModel
from packfp8.model.plain_decoder import DecoderSizes

VOCAB = 32_768
PACKS = {2_048: 6, 8_192: 4, 32_768: 3}
"""Batches of each kind that are timed: fewer of the large ones, which vary less."""

TARGETS = (
    # budget, hidden, whole or decoder, over, by: what (d) shall reach at least
    (2_048, 1024, "decoder", "c", 3.0),
    (2_048, 1024, "step", "c", 3.0),
    (32_768, 2048, "decoder", "e", 1.25),
    (2_048, 1024, "decoder", "a", 3.0),
    (2_048, 1024, "step", "a", 3.0),
    (32_768, 2048, "decoder", "a", 1.4),
    (32_768, 2048, "step", "a", 1.4),
)


@dataclass(slots=True, kw_only=True)
class Contender:
    """One line of the table."""

    part: str
    letter: str
    recipe: str
    real_tokens: int
    batches: int
    run: Callable[[], None]
    peak_gb: float
    held_gb: float
    seconds: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Real tokens a second, by the median."""
        return self.real_tokens / statistics.median(self.seconds)


def sizes_of(hidden: int) -> DecoderSizes:
    """Eight layers with a SwiGLU of 11/4 of the hidden size."""
    ffn, heads = hidden * 11 // 4 // 16 * 16, max(2, hidden // 128)
    return DecoderSizes(vocab=VOCAB, hidden=hidden, ffn=ffn, layers=8, heads=heads, kv_heads=heads)


def seconds_of(run: Callable[[], None], device: str) -> float:
    """By events on a GPU, by the clock elsewhere."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def entered(
    part: str, letter: str, recipe: str, model: PackedModel, batches: list, make: Callable[[], Callable], device: str
) -> Contender:
    """The contender after its first run, in which every shape is met and a step captured; and the memory that took."""
    model.zero_grad(set_to_none=True)
    before = held = peak = 0.0
    if device == "cuda":
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    run = make()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
        own = sum(p.numel() * p.element_size() for p in model.parameters())
        peak = (torch.cuda.max_memory_allocated() - before + own) / 1e9
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        held = (torch.cuda.memory_reserved() - held) / 1e9
    real = contenders.real_tokens(batches)
    return Contender(
        part=part, letter=letter, recipe=recipe, real_tokens=real, batches=len(batches), run=run, peak_gb=peak, held_gb=held
    )


def runner(part: str, is_captured: bool, model: PackedModel, batches: list, device: str) -> Callable[[], None]:
    """What runs forward and backward once for each batch."""
    if is_captured:
        return contenders.whole_captured(model, batches) if part == "step" else contenders.decoder_captured(model, batches)
    return contenders.whole(model, batches, device) if part == "step" else contenders.decoder(model, batches, device)


def settled(model: PackedModel, rule: Alignment, loss_rows: int | None, make: Callable[[], Callable]) -> Callable[[], None]:
    """What `make` makes, for a model that several contenders share with other settings."""

    def settle() -> None:
        model.rule, model.loss_rows = rule, loss_rows

    settle()
    run = make()

    def settled_run() -> None:
        settle()
        run()

    return settled_run


def entrants(part: str, data: Data, models: dict[str, PackedModel], device: str) -> list[Contender]:
    """All contenders of one part. Nothing is captured on a CPU: the decoder alone is left out there."""
    cuda, made = device == "cuda", []
    for recipe, model in models.items():
        own = model.rule
        packs, static = (contenders.ruled(batches, own) for batches in (data.packs, data.static))
        eager, captured = ("b", "e") if recipe == "bf16" else ("c", "d")
        lines = [(eager, packs, False), (captured, static, True)]
        if recipe == "bf16":
            lines.insert(0, ("a", data.padded, False))
        for letter, batches, is_captured in lines:
            rule = align("bf16", layout="bshd") if letter == "a" else own
            loss_rows = data.loss_rows if is_captured else None  # eager, the head works on as many as there are
            if not cuda and is_captured and part == "decoder":
                continue
            make = partial(settled, model, rule, loss_rows, partial(runner, part, is_captured, model, batches, device))
            try:
                made.append(entered(part, letter, recipe, model, batches, make, device))
            except (RuntimeError, ValueError) as fault:  # the others are worth their time on the device
                print(f"{part} {letter} {recipe} failed: {type(fault).__name__}: {' '.join(str(fault).split())[:600]}")
    return made


def table(made: list[Contender], rounds: int, device: str) -> None:
    """Times the contenders in turn and prints a line for each."""
    for _ in range(rounds):
        for one in made:
            one.seconds.append(seconds_of(one.run, device))
    rates = {(one.part, one.letter, one.recipe): one.rate for one in made}
    print(f"{'':<13}{'':<9}{'ms a batch':>11}{'real tokens/s':>15}{'over a':>8}{'over c':>8}{'over e':>8}{'GB':>8}{'held':>7}")
    for one in sorted(made, key=lambda one: (one.part, one.recipe != "bf16", one.recipe, one.letter)):
        over = ""
        for letter in "ace":
            against = rates.get((one.part, letter, one.recipe if letter == "c" else "bf16"))
            over += f"{one.rate / against:>8.2f}" if against else f"{'':>8}"
        ms = 1e3 * statistics.median(one.seconds) / one.batches
        name = f"{one.part:<8} {one.letter}"
        print(f"{name:<13}{one.recipe:<9}{ms:>11.2f}{one.rate:>15,.0f}{over}{one.peak_gb:>8.2f}{one.held_gb:>7.2f}", flush=True)


def verdicts(rates: dict[tuple, float], recipes: tuple[str, ...]) -> None:
    """A line for each target that was measured: passed or missed, by how much."""
    print("\ntargets of (d)")
    for budget, hidden, part, letter, least in TARGETS:
        for recipe in recipes:
            ours = rates.get((hidden, budget, part, "d", recipe))
            against = rates.get((hidden, budget, part, letter, recipe if letter == "c" else "bf16"))
            if ours and against:
                verdict = "PASS" if ours / against >= least else "MISS"
                where = f"{recipe:<8} {part:<8} hidden {hidden}, {budget:>6,} tokens"
                print(f"  {verdict}  {where}: {ours / against:.2f} x ({letter}), at least {least} asked")


@click.command()
@click.option("--hidden", default="1024,2048", show_default=True, help="Hidden sizes, of encoder and decoder.")
@click.option("--tokens", default="2048,8192,32768", show_default=True, help="Budgets.")
@click.option("--recipes", default="current,block", show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Times that each contender is timed, in turn; the median counts.")
@click.option("--quick", is_flag=True, help="Three batches of each kind, one round.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--whole-max-seqlen", is_flag=True, help="max_seqlen is the budget, not the longest slot.")
@click.option(
    "--profile", type=click.Path(dir_okay=False), help="Where the time goes at the first size: a .png, and .json beside it."
)
def main(
    hidden: str, tokens: str, recipes: str, rounds: int, quick: bool, device: str, whole_max_seqlen: bool, profile: str | None
) -> None:
    """Print real tokens a second of each contender, the ratios, and whether the targets are met."""
    print(header())
    names, rates = tuple(recipes.split(",")), {}
    floor = Floor.measured(device)
    print(f"{floor}\n", flush=True)
    for budget in map(int, tokens.split(",")):
        count = 3 if quick else PACKS.get(budget, 4)
        data = contenders.made(budget, count, device=device, whole_max_seqlen=whole_max_seqlen)
        for width in map(int, hidden.split(",")):
            began, sizes = time.perf_counter(), sizes_of(width)
            models = {recipe: contenders.build(recipe, sizes, device=device) for recipe in ("bf16", *names)}
            print(f"hidden {width}, {budget:,} tokens: {data.told}, {data.loss_rows} rows for the head", flush=True)
            for part in ("decoder", "step"):  # one after the other: captured steps hold their memory
                made = entrants(part, data, models, device)
                table(made, 1 if quick else rounds, device)
                rates |= {(width, budget, part, one.letter, one.recipe): one.rate for one in made}
                if profile is not None and part == "step":
                    profiled(made, profile, device, floor.milliseconds(sizes, data.static, data.loss_rows))
                    profile = None
                made.clear()
                for model in models.values():
                    model.zero_grad(set_to_none=True)
                gc.collect()
            print(floor.told(sizes, data.static, data.loss_rows))
            print(f"{time.perf_counter() - began:.0f} s for this block\n", flush=True)
    verdicts(rates, names)


if __name__ == "__main__":
    main()
