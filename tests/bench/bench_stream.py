"""Streaming packers: fill before the final pack, microseconds an example, longest wait; next fit beside them.

    python tests/bench/bench_stream.py [--num 1000000] [--lookahead 256] [--json]

The packs are counted but for the last one, which holds what the stream ended with. Real corpora where PACKFP8_TEST_DATA is set.
"""

from __future__ import annotations

import json
import math
import time

import click
import numpy as np
from corpora import SYNTHETIC, real
from rivals import next_fit

from packfp8.packing import RowPacker, StreamPacker

_BUDGETS = [2048, 4096, 8192, 16_384, 32_768, 131_072]


class Rows:
    """A rule for padded batches: B * S in multiples of 16."""

    def row(self, batch: int) -> int:
        """Return the least S for `batch` rows."""
        return 16 // math.gcd(16, batch)


def fill_of(packs: list[list[int]], sizes: list[int], budget: int) -> float:
    """Return the share of the budget that the packs before the last fill."""
    full = packs[:-1]
    return sum(sizes[key] for pack in full for key in pack) / max(1, len(full) * budget)


def stream(packer, lengths: np.ndarray, budget: int) -> dict:
    """Return the figures of one pass of the lengths through a packer."""
    sizes = lengths.tolist()
    packs, wait = [], 0
    started = time.perf_counter()
    for key, size in enumerate(sizes):
        packer.push(key, size)
        while (pack := packer.pop()) is not None:
            packs.append(pack)
            wait = max(wait, key - min(pack))
    packer.flush()
    while (pack := packer.pop()) is not None:
        packs.append(pack)
    seconds = time.perf_counter() - started
    if sorted(key for pack in packs for key in pack) != list(range(len(sizes))):
        raise SystemExit("an example was lost or repeated")
    counts = [len(pack) for pack in packs]
    return {
        "packs": len(packs), "fill": fill_of(packs, sizes, budget), "microseconds": 1e6 * seconds / len(sizes),
        "longest_wait": wait, "most_in_a_pack": max(counts), "fewest_in_a_pack": min(counts[:-1], default=counts[-1]),
    }  # fmt: skip


@click.command()
@click.option("--num", default=1_000_000, help="examples in each synthetic corpus")
@click.option("--lookahead", default=256)
@click.option("--json", "as_json", is_flag=True)
def main(num: int, lookahead: int, as_json: bool) -> None:
    """Measure the streaming packers."""
    rows = []
    if not as_json:
        print(f"lookahead {lookahead}; fill before the final pack")
        print(
            f"{'corpus':<18}{'budget':>8}{'packer':>8}{'fill %':>10}{'next fit %':>12}{'us/example':>12}{'wait':>7}  in a pack"
        )
    synthetic = [(name, num, budget) for name in ("libri", "lognormal", "few") for budget in _BUDGETS]
    corpora = [(name, SYNTHETIC[name](num, budget), budget) for name, num, budget in synthetic]
    corpora += [(name, lengths, budget) for name, lengths in real().items() for budget in (4096, 8192)]
    for name, lengths, budget in corpora:
        rival = fill_of(next_fit(lengths, budget), lengths.tolist(), budget)
        packers = {"stream": StreamPacker(budget, lookahead=lookahead)}
        if budget <= 16_384:
            packers["rows"] = RowPacker(Rows(), budget, lookahead)
        for kind, packer in packers.items():
            part = lengths if kind == "stream" else lengths[: max(10_000, num // 10)]
            row = {"corpus": name, "budget": budget, "packer": kind, "next_fit": rival} | stream(packer, part, budget)
            rows.append(row)
            if not as_json:
                print(
                    f"{name:<18}{budget:>8}{kind:>8}{100 * row['fill']:>10.4f}{100 * rival:>12.2f}"
                    f"{row['microseconds']:>12.2f}{row['longest_wait']:>7}  {row['fewest_in_a_pack']}-{row['most_in_a_pack']}"
                )
    if as_json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
