"""Balance of steps over ranks: the share of time for which ranks wait, dealt and in order of arrival.

    python tests/bench/bench_deal.py [--num 2000000] [--ranks 64] [--budget 16384] [--json]

Lognormal lengths to 16,384 in stream packs. Each example has audio for 80 % of its tokens on average, at 12.5 encoder
frames a second; the second weight is the encoder frames of a pack. The cost is attention alone (sum of squared lengths),
or a model's attention, matrices and encoder together. "lost" is the share of all attention time, not the mean of steps.
"""

from __future__ import annotations

import json
import time

import click
import numpy as np
from corpora import lognormal

from packfp8.packing import PackCost, StreamPacker, deal, imbalance


def stream_packs(lengths: list[int], budget: int) -> list[list[int]]:
    """Return the packs of the stream packer."""
    packer, packs = StreamPacker(budget), []
    for key, length in enumerate(lengths):
        packer.push(key, length)
        while (pack := packer.pop()) is not None:
            packs.append(pack)
    return packs


@click.command()
@click.option("--num", default=2_000_000, help="examples")
@click.option("--ranks", default=64)
@click.option("--budget", default=16_384)
@click.option("--json", "as_json", is_flag=True)
def main(num: int, ranks: int, budget: int, as_json: bool) -> None:
    """Measure the balance of steps."""
    lengths = lognormal(num, 16_384)
    frames = np.floor(lengths * np.random.default_rng(1).beta(8, 2, num)).astype(int).tolist()
    lengths = lengths.tolist()
    packs = stream_packs(lengths, budget)
    weights = {
        "attention": PackCost(),
        "whole model": PackCost.of_model(hidden=2048, layers=28, encoder_hidden=1024, encoder_layers=24),
    }
    in_pack = [([lengths[key] for key in pack], sum(frames[key] for key in pack)) for pack in packs]
    costs = {name: np.array([cost(slots, audio) for slots, audio in in_pack]) for name, cost in weights.items()}
    audio = np.array([audio for _, audio in in_pack], dtype=float)
    rows = []
    if not as_json:
        print(f"{len(packs):,} packs of {budget} over {ranks} ranks; idle share of a step, %")
        print(f"{'dealt by':<14}{'window':>8}{'patience':>10}{'attention':>11}{'lost':>8}", end="")
        print(f"{'whole model':>13}{'encoder frames':>16}{'us/pack':>9}")
    for name, cost in [("arrival", np.zeros(len(packs))), *costs.items()]:
        for window, patience in [(1, 0)] if name == "arrival" else [(8, 0), (32, 0), (8, 4), (32, 4), (32, 8)]:
            started = time.perf_counter()
            steps, _ = deal(cost, ranks, window, patience=patience)
            seconds = time.perf_counter() - started
            row = {
                "dealt_by": name, "window": window, "patience": patience,
                "attention": imbalance(costs["attention"][steps]),
                "lost": 1 - costs["attention"][steps].mean() / costs["attention"][steps].max(axis=1).mean(),
                "whole_model": imbalance(costs["whole model"][steps]), "encoder_frames": imbalance(audio[steps]),
                "microseconds": 1e6 * seconds / len(packs),
            }  # fmt: skip
            rows.append(row)
            if not as_json:
                print(
                    f"{name:<14}{window:>8}{patience:>10}{100 * row['attention']:>11.2f}{100 * row['lost']:>8.2f}"
                    f"{100 * row['whole_model']:>13.2f}"
                    f"{100 * row['encoder_frames']:>16.2f}{row['microseconds']:>9.2f}"
                )
    if as_json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
