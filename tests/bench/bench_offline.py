"""Offline packing against item-by-item packers, in one run.

    python tests/bench/bench_offline.py [--num 10000000] [--huge 100000000] [--json]

Prints for each corpus the seconds and packs of pack() with member ids at 10^6 and at --num, those of best-fit decreasing
item by item at 10^6 and extrapolated in proportion, of next fit and of lightbinpack where it is installed; the packs of
exact completion with its own seconds; the forecast's milliseconds; then one run of --huge lengths with its peak memory.
"""

from __future__ import annotations

import json
import resource
import time

import click
import numpy as np
from corpora import SYNTHETIC, real
from rivals import best_fit_decreasing, lightbinpack, next_fit, segment_tree_best_fit_decreasing

from packfp8.lengths.histogram import Histogram
from packfp8.packing import forecast, pack

_RIVAL_NUM = 1_000_000
_CASES = [("libri", 4096), ("libri", 32_768), ("lognormal", 8192), ("lognormal", 16_384), ("few", 4096)]


def timed(function, *arguments, **named) -> tuple[object, float]:
    """Return the result and the seconds."""
    started = time.perf_counter()
    result = function(*arguments, **named)
    return result, time.perf_counter() - started


def compare(name: str, capacity: int, num: int) -> dict:
    """Return the figures of one corpus."""
    lengths = SYNTHETIC[name](num, capacity)
    part = lengths[:_RIVAL_NUM]
    packs, seconds = timed(pack, lengths, capacity)
    small, small_seconds = timed(pack, part, capacity)
    rivals = {}
    for rival in (best_fit_decreasing, segment_tree_best_fit_decreasing, next_fit, lightbinpack):
        made, took = timed(rival, part, capacity)
        rivals[rival.__name__] = None if made is None else {"packs": len(made), "seconds": took}
    exact = pack(part, capacity, exact=True).forecast.trials
    histogram = Histogram.of(lengths)
    _, forecast_seconds = timed(forecast, histogram, capacity)
    scale = num / len(part)
    return {
        "corpus": name, "capacity": capacity, "num": num,
        "packs": len(packs), "bound": packs.bound, "fill": packs.fill, "seconds": seconds,
        "small_packs": len(small), "small_bound": small.bound, "small_seconds": small_seconds,
        "exact_packs": exact[1].packs, "exact_seconds": exact[1].seconds,
        "rivals": rivals,
        "ratio": rivals["best_fit_decreasing"]["seconds"] * scale / seconds,
        "forecast_milliseconds": 1000 * forecast_seconds,
    }  # fmt: skip


def show(row: dict) -> None:
    """Print the figures of one corpus."""
    part = min(row["num"], _RIVAL_NUM)
    lines = {
        f"pack(), {row['num']:,} lengths": (row["seconds"], row["packs"]),
        f"pack(), {part:,} lengths": (row["small_seconds"], row["small_packs"]),
        "  exact completion": (row["exact_seconds"], row["exact_packs"]),
    }
    for name, rival in row["rivals"].items():
        lines[f"  {name}"] = (rival["seconds"], rival["packs"]) if rival else None
    print(f"\n{row['corpus']}, capacity {row['capacity']}: fill {100 * row['fill']:.3f} %", end=", ")
    print(f"bounds {row['bound']:,} and {row['small_bound']:,} packs")
    for name, told in lines.items():
        print(f"  {name:<36}", f"{told[0]:9.3f} s {told[1]:>11,} packs" if told else "not installed")
    print(f"  {row['ratio']:.0f}x faster than best_fit_decreasing extrapolated to {row['num']:,}")
    print(f"  forecast from the histogram: {row['forecast_milliseconds']:.1f} ms")


def huge(num: int) -> dict:
    """Return seconds and peak memory of packing `num` lognormal lengths with ids at capacity 8192."""
    lengths = np.empty(num, dtype=np.int32)
    step = 10_000_000
    for start in range(0, num, step):
        lengths[start : start + step] = SYNTHETIC["lognormal"](min(step, num - start), 8192, seed=start)
    packs, seconds = timed(pack, lengths, 8192)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"num": num, "seconds": seconds, "packs": len(packs), "fill": packs.fill, "peak_gib": peak}


@click.command()
@click.option("--num", default=10_000_000, help="lengths in each corpus")
@click.option("--huge", "huge_num", default=100_000_000, help="lengths in the last run; 0 leaves it out")
@click.option("--json", "as_json", is_flag=True)
def main(num: int, huge_num: int, as_json: bool) -> None:
    """Compare pack() with item-by-item packers."""
    rows = []
    for name, capacity in _CASES:
        rows.append(compare(name, capacity, num))
        if not as_json:
            show(rows[-1])
    told = {"synthetic": rows, "real": {}}
    for name, lengths in real().items():
        for capacity in (4096, 8192):
            packs = pack(lengths, capacity)
            rival = len(best_fit_decreasing(lengths, capacity))
            told["real"][f"{name} {capacity}"] = {"packs": len(packs), "bound": packs.bound, "rival": rival}
            if not as_json:
                print(f"{name}, capacity {capacity}: {len(packs)} packs, bound {packs.bound}, item by item {rival}")
    if huge_num:
        told["huge"] = huge(huge_num)
        if not as_json:
            print(
                "\n{num:,} lengths with ids: {seconds:.1f} s, {packs:,} packs, peak {peak_gib:.2f} GiB".format(**told["huge"])
            )
    if as_json:
        print(json.dumps(told))


if __name__ == "__main__":
    main()
