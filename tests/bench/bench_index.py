"""The index of one pack against a loop of per-sequence slices and `cat`, in one run.

    python tests/bench/bench_index.py --sequences 256 --tokens 40000

Both give a CP rank its tokens of the same pack and are compared before they are timed. The rival is what training code
usually does: for each sequence, slice its two chunks out of the pack with torch and `torch.cat` all of them. Times are the
median of the repeats, on one thread.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise

import click
import numpy as np
import torch

from packfp8.layout import cp_index, make_plan, place
from packfp8.rule import Topology, align


def slice_and_cat(tensor: torch.Tensor, offsets: list[int], cp: int, rank: int) -> torch.Tensor:
    """The rank's tokens of `tensor` `[T]`, one sequence after another."""
    parts = []
    for a, b in pairwise(offsets):
        sequence = tensor[a:b]
        chunk = (b - a) // (2 * cp)
        parts.append(sequence[rank * chunk : (rank + 1) * chunk])
        parts.append(sequence[(b - a) - (rank + 1) * chunk : (b - a) - rank * chunk])
    return torch.cat(parts)


def median_seconds(call, repeats: int) -> float:
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


@click.command()
@click.option("--sequences", default=256, show_default=True, help="Sequences of the pack.")
@click.option("--tokens", default=40_000, show_default=True, help="Real tokens of the pack.")
@click.option("--cp", default=2, type=click.IntRange(min=2), show_default=True, help="Context-parallel ranks.")
@click.option("--fields", default=4, show_default=True, help="Token tensors of a batch that are split with one index.")
@click.option("--repeats", default=200, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(sequences: int, tokens: int, cp: int, fields: int, repeats: int, seed: int) -> None:
    """Print the time of both, and the ratio."""
    torch.set_num_threads(1)
    generator = np.random.default_rng(seed)
    cuts = np.sort(generator.choice(np.arange(1, tokens), sequences - 1, replace=False))
    lengths = np.diff(np.concatenate(([0], cuts, [tokens])))
    rule = align("block", Topology(cp=cp, cp_rank=cp - 1))
    slots, rank = place(lengths, rule), cp - 1
    pack = torch.from_numpy(generator.integers(0, 32_000, slots.total))
    offsets, places = slots.offsets.tolist(), torch.arange(slots.total)

    def index_and_gather() -> list[torch.Tensor]:
        index = torch.from_numpy(cp_index(slots.offsets, cp, rank))
        return [pack[index] for _ in range(fields)]

    def index_by_slices() -> torch.Tensor:
        return slice_and_cat(places, offsets, cp, rank)

    ours = torch.from_numpy(cp_index(slots.offsets, cp, rank))
    assert torch.equal(ours, index_by_slices())
    assert all(torch.equal(field, slice_and_cat(pack, offsets, cp, rank)) for field in index_and_gather())

    click.echo(
        f"{sequences} sequences, {tokens} tokens, T {slots.total}, cp {cp}; median of {repeats}, one thread, microseconds"
    )
    rows = [
        ("the index alone", lambda: cp_index(slots.offsets, cp, rank), index_by_slices),
        (
            f"the index and {fields} token tensors",
            index_and_gather,
            lambda: [slice_and_cat(pack, offsets, cp, rank) for _ in range(fields)],
        ),
    ]
    for name, mine, rival in rows:
        fast, slow = median_seconds(mine, repeats), median_seconds(rival, repeats)
        click.echo(f"{name:<34} packfp8 {fast * 1e6:8.1f}   slices and cat {slow * 1e6:8.1f}   ratio {slow / fast:5.1f}x")
    whole = median_seconds(lambda: make_plan(lengths, [], rule, ids=["x"] * sequences), repeats)
    click.echo(f"{'the whole plan, for reference':<34} packfp8 {whole * 1e6:8.1f}")


if __name__ == "__main__":
    main()
