"""What planning costs a rank at worlds of 8 to 4,096 data-parallel ranks, simulated: every rank walks all, or its own shard.

    python tests/distributed/planning_cost.py [--worlds 8,64,512,4096] [--packs 250] [--json]

"all" is PackingSampler: processor milliseconds and examples of a step, of all ranks' packs, from the first windows of an epoch.
"shard" is ShardedPackingSampler on a shard of so many packs: the whole of building it and planning an epoch, over its steps;
which is also that of every epoch after, without measuring. Imbalance is the share of a step for which ranks wait, by
attention, of 16 ranks; "late" the steps beyond the mean number of packs, which end the epoch with idle ranks.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import count, islice
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from packfp8.data import Clip, Example, PackingSampler, Turn
from packfp8.data.sharded import ShardedPackingSampler
from packfp8.lengths import AudioFrames, Measure
from packfp8.packing import imbalance
from packfp8.rule import Topology, align

MEASURE = Measure(frames=AudioFrames.fastconformer())
BUDGET = 4096
WINDOW = 2
RANKS = 16
_TEXT = "and the old light house near a long winding river was seen by everyone who passed " * 3


class Speech:
    """An endless set of read speech, 1.3 to 35 s, three words a second: every example with an id of its own, no audio."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        long, short = rng.normal(14.0, 1.3, 10_000), rng.lognormal(1.8, 0.6, 10_000)
        self.walked = 0
        self.seconds = np.clip(np.where(rng.random(10_000) < 0.8, long, short), 1.3, 35.0).tolist()

    def __iter__(self):
        for n in count():
            self.walked = n + 1
            seconds = self.seconds[n % 10_000]
            clip = Clip(source="nowhere", num_samples=int(seconds * 16_000), sample_rate=16_000)
            yield Example(id=str(n), turns=(Turn("user", (clip,)), Turn("assistant", (_TEXT[: int(15 * seconds)],))))


def walked(world: int) -> dict:
    """The cost of a rank that walks everyone's metadata: that of an example, times those of a step."""
    rule, speech = align("block", Topology(dp=world)), Speech()
    sampler = PackingSampler(speech, measure=MEASURE, rule=rule, budget=BUDGET, window=WINDOW, shuffle=False)
    started = time.process_time()
    steps = [sum(map(len, step)) for step in islice(sampler.forecast(), 2 * WINDOW)]
    each = (time.process_time() - started) / speech.walked
    examples = sum(steps) / len(steps)
    return {"ms_per_step": 1e3 * each * examples, "examples_per_step": examples, "us_per_example": 1e6 * each}


def sharded(world: int, packs: int) -> dict:
    """The cost of a rank that walks its own shard."""
    rule = align("block", Topology(dp=world))
    shard = list(islice(Speech(), 12 * packs))
    started = time.process_time()
    sampler = ShardedPackingSampler(shard, measure=MEASURE, rule=rule, budget=BUDGET, steps=2 * packs)
    built = time.process_time() - started
    started = time.process_time()
    sampler.planned()
    planned = time.process_time() - started
    return {
        "ms_per_step": 1e3 * (built + planned) / sampler.packs,
        "ms_per_step_later": 1e3 * planned / sampler.packs,
        "examples_per_step": len(shard) / sampler.packs,
    }


def balance(packs: int) -> dict:
    """Imbalance of both on the same examples, and the steps that sharding adds."""
    items = list(islice(Speech(), 12 * packs * RANKS))
    rule = align("block", Topology(dp=RANKS))
    dealt = PackingSampler(items, measure=MEASURE, rule=rule, budget=BUDGET)
    of_all = [[dealt.terms.cost_of(list(pack)) if pack else 0.0 for pack in step] for step in dealt.forecast()]
    columns, own = [], []
    for rank in range(RANKS):
        rule = align("block", Topology(dp=RANKS, dp_rank=rank))
        sampler = ShardedPackingSampler(items[rank::RANKS], measure=MEASURE, rule=rule, budget=BUDGET, steps=2 * packs)
        own.append(sampler.packs)
        measured = [one for _, _, one in sampler._items]
        members = sampler._plan.members(0, 0)
        costs = sorted((sampler.terms.cost_of([measured[n] for n in pack]) for pack in members), reverse=True)
        columns.append(costs)
    steps = max(own)
    by_step = np.array([column + [0.0] * (steps - len(column)) for column in columns]).T
    return {
        "all": {"imbalance": imbalance(of_all), "steps": len(of_all)},
        "shard": {"imbalance": imbalance(by_step), "steps": steps, "late": steps / (sum(own) / RANKS) - 1},
    }


@click.command()
@click.option("--worlds", default="8,64,512,4096", show_default=True, help="data-parallel ranks")
@click.option("--packs", default=250, show_default=True, help="of a shard, about")
@click.option("--json", "as_json", is_flag=True)
def main(worlds: str, packs: int, as_json: bool) -> None:
    """Measure both."""
    rows = [{"world": world, "all": walked(world), "shard": sharded(world, packs)} for world in map(int, worlds.split(","))]
    found = {"worlds": rows, "balance": balance(packs)}
    if as_json:
        print(json.dumps(found))
        return
    print(f"budget {BUDGET}; processor time of one rank; a shard of about {packs} packs")
    print(
        f"{'world':>6}{'all: ms a step':>16}{'examples a step':>17}{'shard: ms a step':>18}{'later epochs':>14}{'examples':>10}"
    )
    for row in rows:
        walk, own = row["all"], row["shard"]
        line = f"{row['world']:>6}{walk['ms_per_step']:>16.2f}{walk['examples_per_step']:>10.0f}{own['ms_per_step']:>18.3f}"
        print(f"{line}{own['ms_per_step_later']:>14.3f}{own['examples_per_step']:>10.1f}")
    every, own = found["balance"]["all"], found["balance"]["shard"]
    print(f"\n{RANKS} ranks: all {every['imbalance']:.2%} imbalance, {every['steps']} steps; ", end="")
    print(f"shards {own['imbalance']:.2%}, {own['steps']} steps, {own['late']:.2%} late")


if __name__ == "__main__":
    main()
