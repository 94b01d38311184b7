"""Real tokens a second of a training step: packs against padded batches of the same data, in BF16 and FP8.

    python tests/gpu/bench_tokens.py --lengths speech

Two rivals batch as lhotse's samplers do, `count * longest` up to the budget (never exceeded here): from 30 buckets of equal
share, and in order of arrival. All train one language model by AdamW, THD against BSHD, with fused attention.

    speech      1.3 to 35 s, most at 12 to 16 s; 12.5 audio frames and 3 text tokens a second, 40 tokens of prompt
    lognormal   exp(N(5.5, 0.9)) tokens
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

import click
import numpy as np
import torch
from workload import header

from packfp8 import Alignment, Measure, StreamPacker, align
from packfp8.data import Collator, Example, PackedBatch, Turn
from packfp8.model import Fp8, PackedModel
from packfp8.model.plain_decoder import DecoderSizes
from packfp8.model.te_decoder import TeDecoder

MEASURE = Measure(frames=None)
BUCKETS = 30


def speech_lengths(count: int, seed: int = 0) -> np.ndarray:
    """Tokens of `count` utterances of read speech."""
    generator = np.random.default_rng(seed)
    long = generator.random(count) < 0.75
    seconds = np.where(long, generator.normal(14, 1.5, count), generator.lognormal(1.6, 0.6, count)).clip(1.3, 35)
    return (12.5 * seconds).astype(int) + (3 * seconds).astype(int) + 40


def lognormal_lengths(count: int, seed: int = 0) -> np.ndarray:
    """Tokens of `count` mixed examples: exp(N(5.5, 0.9)), 16 to 8192."""
    return np.exp(np.random.default_rng(seed).normal(5.5, 0.9, count)).clip(16, 8192).astype(int)


LENGTHS = {"speech": speech_lengths, "lognormal": lognormal_lengths}


def sequences(lengths: np.ndarray) -> list[Example]:
    """Texts of exactly these lengths in tokens; a third is supervised."""
    marks = MEASURE.measure(_text(1, 1)).tokens - 2
    return [_text(n - marks - n // 3, n // 3) for n in lengths.tolist()]


def _text(asked: int, answered: int) -> Example:
    return Example(id=f"{asked}+{answered}", turns=(Turn("user", ("q" * asked,)), Turn("assistant", ("a" * answered,))))


def packed(lengths: np.ndarray, rule: Alignment, budget: int) -> list[list[int]]:
    """Indices of the sequences of each pack."""
    packer, made = StreamPacker(rule.floor(budget), multiple=rule.sequence), []
    for n, length in enumerate(lengths.tolist()):
        packer.push(n, length)
    packer.flush()
    while (keys := packer.pop()) is not None:
        made.append(keys)
    return made


def in_order(lengths: np.ndarray, rule: Alignment, budget: int, chosen: np.ndarray | None = None) -> list[list[int]]:
    """Indices of the sequences of each padded batch, in order of arrival, without the last, partial one."""
    made, open_batch, longest = [], [], 0
    for n in range(len(lengths)) if chosen is None else chosen.tolist():
        rows, most = len(open_batch) + 1, max(longest, int(lengths[n]))
        row = rule.row(rows)
        if rows * (-(-most // row) * row) > budget:
            made.append(open_batch)
            open_batch, most = [], int(lengths[n])
        open_batch.append(n)
        longest = most
    return made


def bucketed(lengths: np.ndarray, rule: Alignment, budget: int) -> list[list[int]]:
    """The same within each of 30 buckets of equal share."""
    edges = np.quantile(lengths, np.linspace(0, 1, BUCKETS + 1)[1:-1])
    bucket_of = np.searchsorted(edges, lengths)
    return [batch for n in range(BUCKETS) for batch in in_order(lengths, rule, budget, np.flatnonzero(bucket_of == n))]


def collated(groups: Iterable[list[int]], texts: list[Example], rule: Alignment) -> list[PackedBatch]:
    """The batches of all groups, on the GPU. Ids are told apart by their place."""
    collator = Collator(measure=MEASURE, rule=rule)
    named = [[Example(id=f"{n}", turns=texts[n].turns) for n in group] for group in groups]
    return [collator(group).to("cuda") for group in named]


def runner(recipe: str, batches: list[PackedBatch], sizes: DecoderSizes, rule: Alignment) -> Callable[[], float]:
    """A function that trains one step on every batch and returns the seconds; every shape has been met before."""
    torch.manual_seed(0)
    fp8 = Fp8.te(recipe) if recipe != "bf16" else None
    model = PackedModel(encoder=None, projector=None, llm=TeDecoder(sizes), rule=rule, fp8=fp8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def run() -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for batch in batches:
            model(batch, global_supervised=batch.num_supervised).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 1e3

    run()
    return run


@click.command()
@click.option("--lengths", "kind", type=click.Choice(list(LENGTHS)), default="speech", show_default=True)
@click.option("--budget", default=16_384, show_default=True, help="Tokens of a batch, padding included.")
@click.option("--count", default=20_000, show_default=True, help="Sequences.")
@click.option("--steps", default=16, show_default=True, help="Batches of each kind that are timed, drawn at random.")
@click.option("--rounds", default=3, show_default=True, help="Times that each kind is timed, in turn; the median counts.")
@click.option("--hidden", default=2048, show_default=True)
@click.option("--layers", default=8, show_default=True)
def main(kind: str, budget: int, count: int, steps: int, rounds: int, hidden: int, layers: int) -> None:
    """Print real tokens a second and the ratio."""
    print(header())
    sizes = DecoderSizes(
        vocab=32_768, hidden=hidden, ffn=hidden * 11 // 4 // 16 * 16, layers=layers, heads=hidden // 128, kv_heads=8
    )
    lengths = LENGTHS[kind](count)
    texts = sequences(lengths)
    print(f"{sizes}\n{count} sequences, {lengths.sum()} real tokens, mean {lengths.mean():.0f}; budget {budget} tokens\n")
    print(f"{'':<9}{'batches':<10}{'real / padded':>14}{'ms a step':>11}{'real tokens/s':>15}{'packs over this':>17}")
    for recipe in ("bf16", "current", "block"):
        runs, real, tokens = {}, {}, {}
        for name, layout, group in (("packs", "thd", packed), ("buckets", "bshd", bucketed), ("arrival", "bshd", in_order)):
            rule = align(recipe, layout=layout)
            groups = group(lengths, rule, budget)
            chosen = np.random.default_rng(1).choice(len(groups), steps, replace=False)
            made = collated([groups[n] for n in chosen], texts, rule)
            real[name], tokens[name] = sum(int(b.slots.lengths.sum()) for b in made), sum(b.tokens for b in made)
            runs[name] = runner(recipe, made, sizes, rule)
        seconds = [{name: run() for name, run in runs.items()} for _ in range(rounds)]
        seconds = {name: statistics.median(each[name] for each in seconds) for name in runs}
        for name in runs:
            rate, ratio = real[name] / seconds[name], real["packs"] / seconds["packs"] / real[name] * seconds[name]
            full = f"{real[name] / tokens[name]:>14.4f}{1e3 * seconds[name] / steps:>11.1f}"
            print(f"{recipe:<9}{name:<10}{full}{rate:>15.0f}{ratio:>17.3f}", flush=True)


if __name__ == "__main__":
    main()
