"""Real tokens a second of a training step: packs against padded bucketed batches of the same data, in BF16 and FP8.

    python tests/gpu/bench_tokens.py

Lengths are those of read speech: 1.3 to 35 s, most at 12 to 16 s; 12.5 audio frames and 3 text tokens a second, 40 tokens of
prompt. The rival batches as lhotse's bucketing samplers do: 30 buckets of equal share, each batch of one bucket, `count *
longest` up to the budget (here it never exceeds it), last partial batches left out. Both train one language model, THD against
BSHD with fused attention, by AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable

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


def bucketed(lengths: np.ndarray, rule: Alignment, budget: int) -> list[list[int]]:
    """Indices of the sequences of each padded batch; within a bucket in order of arrival, without its last, partial batch."""
    edges, made = np.quantile(lengths, np.linspace(0, 1, BUCKETS + 1)[1:-1]), []
    bucket_of = np.searchsorted(edges, lengths)
    for bucket in range(BUCKETS):
        open_batch: list[int] = []
        for n in np.flatnonzero(bucket_of == bucket).tolist():
            rows = len(open_batch) + 1
            row = rule.row(rows)
            longest = max(lengths[n], *(lengths[m] for m in open_batch), 0)
            if rows * (-(-longest // row) * row) > budget:
                made.append(open_batch)
                open_batch = []
            open_batch.append(n)
    return [batch for batch in made if batch]


def collated(groups: Iterable[list[int]], texts: list[Example], rule: Alignment) -> list[PackedBatch]:
    """The batches of all groups, on the GPU. Ids are told apart by their place."""
    collator = Collator(measure=MEASURE, rule=rule)
    named = [[Example(id=f"{n}", turns=texts[n].turns) for n in group] for group in groups]
    return [collator(group).to("cuda") for group in named]


def real_tokens_a_second(recipe: str, batches: list[PackedBatch], sizes: DecoderSizes, rule: Alignment) -> tuple[float, float]:
    """Real tokens a second over all batches, and the mean milliseconds of a step."""
    torch.manual_seed(0)
    fp8 = Fp8.te(recipe) if recipe != "bf16" else None
    model = PackedModel(encoder=None, projector=None, llm=TeDecoder(sizes), rule=rule, fp8=fp8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(batch: PackedBatch) -> None:
        model(batch, global_supervised=batch.num_supervised).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for batch in batches:  # every shape once: kernels and plans are chosen by shape
        step(batch)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for batch in batches:
        step(batch)
    stop.record()
    torch.cuda.synchronize()
    seconds = start.elapsed_time(stop) / 1e3
    real = sum(int(batch.slots.lengths.sum()) for batch in batches)
    return real / seconds, 1e3 * seconds / len(batches)


@click.command()
@click.option("--budget", default=16_384, show_default=True, help="Tokens of a batch, padding included.")
@click.option("--count", default=20_000, show_default=True, help="Sequences.")
@click.option("--steps", default=24, show_default=True, help="Batches of each kind that are timed, drawn at random.")
@click.option("--hidden", default=2048, show_default=True)
@click.option("--layers", default=8, show_default=True)
def main(budget: int, count: int, steps: int, hidden: int, layers: int) -> None:
    """Print real tokens a second and the ratio."""
    print(header())
    sizes = DecoderSizes(
        vocab=32_768, hidden=hidden, ffn=hidden * 11 // 4 // 16 * 16, layers=layers, heads=hidden // 128, kv_heads=8
    )
    lengths = speech_lengths(count)
    texts = sequences(lengths)
    print(f"{sizes}\n{count} sequences, {lengths.sum()} real tokens, mean {lengths.mean():.0f}; budget {budget} tokens\n")
    print(f"{'':<9}{'batches':<9}{'steps':>6}{'real / padded':>15}{'ms a step':>11}{'real tokens/s':>15}{'packs / padded':>16}")
    for recipe in ("bf16", "current", "block"):
        before = 0.0
        for layout, group in (("bshd", bucketed), ("thd", packed)):
            rule = align(recipe, layout=layout)
            groups = np.random.default_rng(1).permutation(np.array(group(lengths, rule, budget), dtype=object))[:steps]
            made = collated(groups, texts, rule)
            real = sum(int(batch.slots.lengths.sum()) for batch in made) / sum(batch.tokens for batch in made)
            rate, milliseconds = real_tokens_a_second(recipe, made, sizes, rule)
            ratio = f"{rate / before:>16.3f}" if before else ""
            before = rate
            name = "padded" if layout == "bshd" else "packs"
            print(f"{recipe:<9}{name:<9}{len(made):>6}{real:>15.4f}{milliseconds:>11.1f}{rate:>15.0f}{ratio}", flush=True)


if __name__ == "__main__":
    main()
