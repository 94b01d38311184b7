"""The sampler on lhotse cuts: microseconds an example by part, beside lhotse's DynamicCutSampler on the same cuts; its fill.

    python tests/bench/bench_sampler.py [--num 20000] [--budget 4096] [--repeats 3] [--json]

Times are processor seconds, the least of the repeats, on one thread, for cuts in memory and from a jsonl.gz. "packer" is
StreamPacker alone. "planning" is the sampler where lengths are looked up instead of measured and cuts come as examples: walk,
packer, dealer, marks, handing out. Shares are of lhotse's own time. Fill is that of real lengths, read through the sampler,
before the final pack; it needs PACKFP8_TEST_DATA.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from pathlib import Path

import click
import numpy as np
from corpora import real
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from lhotse.audio import AudioSource
from lhotse.dataset import DynamicCutSampler

from packfp8.data import Example, PackingSampler, as_example
from packfp8.lengths import AudioFrames, Measure, Measured, Template
from packfp8.packing import StreamPacker
from packfp8.rule import Topology, align

_TEXT = "and the old light house near a long winding river was seen by everyone who passed"
_WORDS = _TEXT.split()
_PARTS = (("as_example", 12), ("measure", 9), ("planning", 10), ("packer", 8))


class Known:
    """A measure that looks lengths up by the example's id."""

    sample_rate, template, fingerprint = 16_000, Template(), "known"

    def __init__(self, lengths: dict[str, Measured]) -> None:
        self.lengths = lengths

    def __call__(self, example) -> Measured:
        """Return the length of the example."""
        return self.lengths[example.id]


def speech(num: int) -> CutSet:
    """Return cuts of read speech, 1.3 to 35 s, three words a second, whose audio does not exist."""
    rng = np.random.default_rng(0)
    long, short = rng.normal(14.0, 1.3, num), rng.lognormal(1.8, 0.6, num)
    seconds = np.clip(np.where(rng.random(num) < 0.8, long, short), 1.3, 35.0).round(2)
    cuts = []
    for number, duration in enumerate(seconds.tolist()):
        name, text = f"cut-{number}", " ".join(_WORDS[k % len(_WORDS)] for k in range(number, number + int(3 * duration)))
        source = AudioSource(type="file", channels=[0], source=f"/nowhere/{name}.wav")
        recording = Recording(name, [source], sampling_rate=16_000, num_samples=round(duration * 16_000), duration=duration)
        spoken = SupervisionSegment(id=name, recording_id=name, start=0, duration=duration, text=text)
        cuts.append(MonoCut(name, start=0, duration=duration, channel=0, supervisions=[spoken], recording=recording))
    return CutSet(cuts)


def least_seconds(call, repeats: int) -> float:
    """Return the processor seconds of the fastest of the calls; other loads of the machine are not counted."""
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        call()
        seconds.append(time.process_time() - started)
    return min(seconds)


def stream(lengths: list[int], budget: int) -> None:
    """Pack the lengths."""
    packer = StreamPacker(budget)
    for key, length in enumerate(lengths):
        packer.push(key, length)
        packer.pop()


def walk_through(sampler) -> None:
    """Draw every batch."""
    for _ in sampler:
        pass


def costs(cuts: CutSet, budget: int, repeats: int) -> list[dict]:
    """Return microseconds an example, by source and world size."""
    measure, seconds = Measure(frames=AudioFrames.fastconformer()), budget / 20
    eager = list(cuts)
    examples = [as_example(cut) for cut in eager]
    known = Known({one.id: measure(one) for one in examples})
    converted = least_seconds(lambda: [as_example(cut) for cut in eager], repeats)
    measured = least_seconds(lambda: [measure(one) for one in examples], repeats)
    packer = least_seconds(lambda: stream([one.tokens for one in known.lengths.values()], budget), repeats)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cuts.to_file(Path(folder, "cuts.jsonl.gz"))
        lazy = CutSet.from_file(Path(folder, "cuts.jsonl.gz"))
        for name, source, dp in (("memory", cuts, 1), ("memory", cuts, 8), ("memory", cuts, 64), ("jsonl.gz", lazy, 1)):
            options = {"rule": align("block", Topology(dp=dp)), "budget": budget}
            ours = PackingSampler(source, measure=measure, **options)
            lhotse = DynamicCutSampler(source, max_duration=seconds, shuffle=True, world_size=dp, rank=0)
            row = {"source": name, "dp": dp, "ours": least_seconds(lambda s=ours: walk_through(s), repeats)}
            row["lhotse"] = least_seconds(lambda s=lhotse: walk_through(s), repeats)
            if name == "memory":
                bare = PackingSampler(examples, measure=known, **options)
                row["planning"] = least_seconds(lambda s=bare: walk_through(s), repeats)
                row |= {"as_example": converted, "measure": measured, "packer": packer}
            steps = sum(1 for _ in PackingSampler(examples, measure=known, **options))
            rows.append({k: v if k in ("source", "dp") else 1e6 * v / len(eager) for k, v in row.items()})
            rows[-1]["ms_per_step"] = 1e3 * row["ours"] / steps
    return rows


def fills(budgets: tuple[int, ...]) -> list[dict]:
    """Return the fill of real lengths before the final pack, and of all packs."""
    rows = []
    for name, lengths in real().items():
        measured = [Measured(tokens=n, text_tokens=n, encoder_frames=(), supervised=1) for n in lengths.tolist()]
        items = [Example(id=str(number), turns=()) for number in range(len(measured))]
        known = Known({item.id: one for item, one in zip(items, measured)})
        for budget in budgets:
            sampler = PackingSampler(items, measure=known, rule=align("block", Topology()), budget=budget)
            packs = [sum(one.tokens for one in pack) for (pack,) in sampler.forecast()]
            full = sum(packs[:-1]) / max(1, len(packs[:-1]) * budget)
            rows.append(
                {
                    "corpus": name,
                    "budget": budget,
                    "packs": len(packs),
                    "fill": full,
                    "with_last": sum(packs) / len(packs) / budget,
                }
            )
    return rows


@click.command()
@click.option("--num", default=20_000, show_default=True, help="cuts")
@click.option("--budget", default=4096, show_default=True, help="tokens of a pack; lhotse gets a twentieth of it in seconds")
@click.option("--repeats", default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(num: int, budget: int, repeats: int, as_json: bool) -> None:
    """Measure the sampler."""
    warnings.filterwarnings("ignore", message="You are using DynamicCutSampler with an eagerly read CutSet")
    cost, fill = costs(speech(num), budget, repeats), fills((4096, 8192))
    if as_json:
        print(json.dumps({"cost": cost, "fill": fill}))
        return
    print(f"{num} cuts, budget {budget}; processor microseconds an example")
    heads = "".join(f"{part:>{width}}" for part, width in _PARTS)
    print(f"{'source':<9}{'dp':>3}{'ours':>7}{heads}{'lhotse':>8}  planning, packer / lhotse{'ms a step':>11}")
    for row in cost:
        parts = "".join(f"{row[part]:>{width}.1f}" if part in row else " " * width for part, width in _PARTS)
        shares = [f"{row[part] / row['lhotse']:.0%}" for part in ("planning", "packer") if part in row]
        line = f"{row['source']:<9}{row['dp']:>3}{row['ours']:>7.1f}{parts}{row['lhotse']:>8.1f}"
        print(f"{line}  {', '.join(shares):<25}{row['ms_per_step']:>11.2f}")
    print(f"\n{'corpus':<18}{'budget':>8}{'packs':>7}{'fill %':>9}  with the last pack")
    for row in fill:
        print(f"{row['corpus']:<18}{row['budget']:>8}{row['packs']:>7}{row['fill']:>9.3%}  {row['with_last']:.3%}")


if __name__ == "__main__":
    main()
