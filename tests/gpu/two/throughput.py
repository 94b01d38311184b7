"""Real tokens a second of two GPUs against one, by each way to use them; and how long the faster of two ranks is idle.

    torchrun --nproc-per-node 2 tests/gpu/two/throughput.py

Encoder and decoder are trained by AdamW on packs of the embedded corpus and of texts of exp(N(5.5, 0.9)) tokens. In the column
"one GPU" each GPU trains the same model for itself, at the same time; its mean counts.

    fsdp     each rank a pack of the budget; FSDP2, torchao's weights gathered in FP8
    cp       both ranks one pack, cut in slabs, p2p; FSDP2 over the same ranks, clips encoded once
    tp       both ranks one pack, heads and FFN divided, with SP

Idle is 1 - mean / max of the times that the ranks of a step compute, without their collectives: each pack is timed by itself,
and the same packs are put into steps in order of arrival and by `deal()`.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2])]  # of the benchmarks beside this folder

import click  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bench_tokens import lognormal_lengths, sequences, speech_lengths  # noqa: E402
from sharded import PLAIN, Ranks, forget, fp8_of, rule_of  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from workload import MEASURE  # noqa: E402

from packfp8 import Alignment, Clip, Collator, Example, StreamPacker, Topology, Turn, corpus, deal  # noqa: E402
from packfp8.data import PackedBatch  # noqa: E402
from packfp8.data.example import as_example  # noqa: E402
from packfp8.model import PackedModel  # noqa: E402
from packfp8.model.loss import count_supervised  # noqa: E402
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder  # noqa: E402
from packfp8.model.plain_encoder import PlainEncoder, PlainProjector  # noqa: E402
from packfp8.model.te_decoder import TeDecoder  # noqa: E402
from packfp8.packing import PackCost, imbalance  # noqa: E402

WIDTH = 256  # of the encoder
ONE, FSDP, CP, TP = "one GPU", "fsdp dp 2", "cp 2", "tp 2 with SP"
CELLS = {
    "bf16": (ONE, FSDP, CP, TP),
    "current": (ONE, FSDP),
    "block": (ONE, FSDP, CP, TP),
    "delayed": (ONE, FSDP),
    "plain": (ONE, FSDP),
    "tensorwise": (ONE, FSDP),
}
"""Variant -> ways. The decoder in plain torch attends over all pairs of a pack: it takes the small budget only."""


def spoken() -> list[Example]:
    """The corpus, decoded."""
    examples = []
    for n, cut in enumerate(corpus()):
        wave, example = cut.load_audio()[0], as_example(cut, position=n)
        clip = Clip(source=wave, num_samples=len(wave), sample_rate=16_000)
        turns = [replace(turn, parts=tuple(p if isinstance(p, str) else clip for p in turn.parts)) for turn in example.turns]
        examples.append(replace(example, turns=tuple(turns)))
    return examples


def mixed(tokens: int, longest: int) -> list[Example]:
    """Utterances of the corpus and texts in turn, of as many tokens in all, under ids of their own."""
    utterances, lengths = spoken(), lognormal_lengths(1 + tokens // 200)
    texts, made, total = sequences(lengths.clip(max=longest)), [], 0
    order = np.random.default_rng(0).permutation(len(utterances))
    while total < tokens:
        n = len(made)
        part = utterances[order[n // 4 % len(order)]] if n % 4 else texts[n // 4 % len(texts)]
        made.append(replace(part, id=f"{n}"))
        total += MEASURE.measure(part).tokens
    return made


def speech(tokens: int) -> list[Example]:
    """Noise as long as utterances of read speech are, each with its answer, of as many tokens in all."""
    noise = 0.1 * np.random.default_rng(0).standard_normal(36 * 16_000).astype(np.float32)
    made = []
    for n, length in enumerate(speech_lengths(1 + tokens // 200).tolist()):
        seconds = (length - 40) / 15.5
        wave = noise[: int(16_000 * seconds)]
        clip = Clip(source=wave, num_samples=len(wave), sample_rate=16_000)
        made.append(Example(id=f"{n}", turns=(Turn("user", (clip,)), Turn("assistant", ("a" * (30 + int(3 * seconds)),)))))
    return made


def packed(examples: list[Example], rule: Alignment, budget: int, count: int) -> list[list[Example]]:
    """The first packs that are made of the examples."""
    packer, made = StreamPacker(rule.floor(budget), multiple=rule.sequence), []
    for n, example in enumerate(examples):
        packer.push(n, MEASURE.measure(example).tokens)
    packer.flush()
    while len(made) < count:
        made.append([examples[key] for key in packer.pop()])
    return made


def costs(packs: list[list[Example]], sizes: DecoderSizes) -> list[float]:
    """The work of each pack."""
    cost = PackCost.of_model(hidden=sizes.hidden, layers=sizes.layers, encoder_hidden=WIDTH, encoder_layers=1)
    told = [[MEASURE.measure(example) for example in pack] for pack in packs]
    return [cost([one.tokens for one in pack], sum(sum(one.encoder_frames) for one in pack)) for pack in told]


class Bench:
    """This rank, the sizes, and the packs of each budget.

    Args:
        steps, rounds: timed are so many steps at once, so often; the median counts.
    """

    def __init__(self, ranks: Ranks, sizes: DecoderSizes, steps: int, rounds: int) -> None:
        self.ranks, self.sizes, self.steps, self.rounds = ranks, sizes, steps, rounds
        self.mesh = {name: ranks.mesh(name) for name in ("dp", "cp", "tp")}

    def model(self, variant: str, way: str) -> PackedModel:
        """A model in BF16."""
        device, rule = self.ranks.device, self.rule(variant, way)
        torch.manual_seed(0)
        encoder, projector = PlainEncoder(width=WIDTH), PlainProjector(width=WIDTH, hidden=self.sizes.hidden)
        plain = variant in PLAIN
        if plain:
            with torch.device(device):
                llm = PlainDecoder(self.sizes).bfloat16()
        else:
            split = {"tp_group": self.mesh["tp"].get_group(), "sp": True} if way == TP else {}
            llm = TeDecoder(self.sizes, device=device, **split)
        if way == CP:
            stream = torch.cuda.Stream() if device.type == "cuda" else object()
            llm.split_context(self.mesh["cp"].get_group(), comm="p2p", stream=stream)
        model = PackedModel(
            encoder=encoder.to(device, torch.bfloat16),
            projector=projector.to(device, torch.bfloat16),
            llm=llm,
            rule=rule,
            consumer="plain" if plain else "te",
            frames=MEASURE.frames,
            fp8=fp8_of(variant, device, sharded=way == FSDP),
            cp_group=self.mesh["cp"].get_group() if way == CP else None,
        )
        if way in (FSDP, CP):
            for part in (*model.llm.layers, model):
                fully_shard(part, mesh=self.mesh["dp" if way == FSDP else "cp"])
        return model

    def rule(self, variant: str, way: str) -> Alignment:
        """The rule of this rank's packs."""
        n, rank = self.ranks.world, self.ranks.rank
        topologies = {
            ONE: Topology(),
            FSDP: Topology(dp=n, dp_rank=rank),
            CP: Topology(cp=n, cp_rank=rank),
            TP: Topology(tp=n, sp=True, tp_rank=rank),
        }
        return rule_of(variant, topologies[way])

    def batches(self, packs: list[list[Example]], variant: str, way: str) -> list[PackedBatch]:
        """This rank's batch of each step: its column where ranks have packs of their own, else the pack of all."""
        own = packs[self.ranks.rank :: self.ranks.world] if way in (ONE, FSDP) else packs
        collator = Collator(measure=MEASURE, rule=self.rule(variant, way), share_encoder=way == CP)
        return [collator(pack).to(self.ranks.device) for pack in own[: self.steps]]

    def rate(self, model: PackedModel, optimizer, batches: list[PackedBatch], way: str) -> tuple[float, float]:
        """Real tokens a second of all ranks, or of one alone, and the seconds of a step."""
        group = {FSDP: self.mesh["dp"], CP: self.mesh["cp"]}.get(way)
        counts = [count_supervised([batch], group, device=self.ranks.device) for batch in batches]

        def run() -> float:
            dist.barrier(self.ranks.host)
            started = time.perf_counter()
            for batch, count in zip(batches, counts, strict=True):
                model(batch, global_supervised=count).loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                if model.fp8:
                    model.fp8.after_optimizer_step(model)
            if self.ranks.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - started

        run()
        seconds = statistics.median(run() for _ in range(self.rounds))
        real = sum(int(batch.slots.lengths.sum()) for batch in batches)
        told: list = [None] * self.ranks.world
        dist.all_gather_object(told, (real, seconds), group=self.ranks.host)
        slowest = max(seconds for _, seconds in told)
        if way == ONE:
            rate = statistics.mean(real / seconds for real, seconds in told)
        else:
            rate = (sum(real for real, _ in told) if way == FSDP else real) / slowest
        return rate, slowest / len(batches)

    def cell(self, variant: str, way: str, packs: dict[int, list[list[Example]]]) -> dict[int, float]:
        """Prints and returns the rate at each budget."""
        forget(self.ranks.device)
        model, rates = self.model(variant, way), {}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        for budget in list(packs)[: 1 if variant in PLAIN else None]:
            batches = self.batches(packs[budget], variant, way)
            rates[budget], seconds = self.rate(model, optimizer, batches, way)
            peak = torch.cuda.max_memory_allocated() / 1e9 if self.ranks.device.type == "cuda" else 0.0
            self.ranks.tell(f"{variant:<11}{way:<14}{budget:>7}{1e3 * seconds:>11.1f}{rates[budget]:>15.0f}{peak:>9.1f} GB")
            del batches
        del model, optimizer
        gc.collect()
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return rates

    def idle(self, kind: str, examples: list[Example], budget: int, count: int, model: PackedModel) -> None:
        """Prints the idle time of the same packs in order of arrival and dealt, by the clock and by their cost."""
        ranks, packs = self.ranks, packed(examples, model.rule, budget, count)
        collator, seconds = Collator(measure=MEASURE, rule=model.rule), np.zeros(count)
        mine = [collator(packs[n]).to(ranks.device) for n in range(ranks.rank, count, ranks.world)]
        for _ in range(2):  # shapes are met in the first pass, the second counts
            for n, batch in zip(range(ranks.rank, count, ranks.world), mine, strict=True):
                seconds[n] = self._clocked(model, batch)
        told: list = [None] * ranks.world
        dist.all_gather_object(told, seconds, group=ranks.host)
        seconds, work = np.sum(told, axis=0), np.array(costs(packs, self.sizes))
        steps = {"arrival": np.arange(count).reshape(-1, ranks.world), "deal()": deal(work, ranks.world).steps}
        for name, placed in steps.items():
            by_clock, by_cost = imbalance(seconds[placed]), imbalance(work[placed])
            ranks.tell(
                f"{kind:<11}{budget:>7}  {name:<9}{by_clock:>8.2%} by the clock{by_cost:>8.2%} by cost   "
                f"{len(placed)} steps, packs of {1e3 * seconds.min():.1f} to {1e3 * seconds.max():.1f} ms"
            )

    def _clocked(self, model: PackedModel, batch: PackedBatch) -> float:
        """Seconds of forward and backward."""
        if self.ranks.device.type == "cpu":
            started = time.perf_counter()
            model(batch, global_supervised=batch.num_supervised).loss.backward()
            return time.perf_counter() - started
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        model(batch, global_supervised=batch.num_supervised).loss.backward()
        stop.record()
        torch.cuda.synchronize()
        model.zero_grad(set_to_none=True)
        return start.elapsed_time(stop) / 1e3


@click.command()
@click.option("--hidden", default=2048, show_default=True)
@click.option("--layers", default=8, show_default=True)
@click.option("--vocab", default=32_768, show_default=True)
@click.option(
    "--budget", "budgets", multiple=True, type=int, default=(8192, 32_768), show_default=True, help="Tokens of a pack."
)
@click.option("--steps", default=5, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--idle-packs", default=24, show_default=True)
@click.option("--only", multiple=True, help="Variants to run, or `idle`; all where none is given.")
@click.option("--seconds", default=130.0, show_default=True, help="No variant is begun after so many.")
@click.option("--device", default="cuda", show_default=True)
def main(hidden, layers, vocab, budgets, steps, rounds, idle_packs, only, seconds, device) -> None:
    """Print both tables."""
    started = time.perf_counter()
    ranks = Ranks(device)
    ranks.header()
    heads = max(2, hidden // 128)
    sizes = DecoderSizes(
        vocab=vocab, hidden=hidden, ffn=hidden * 11 // 4 // 16 * 16, layers=layers, heads=heads, kv_heads=max(2, heads // 2)
    )
    bench = Bench(ranks, sizes, steps, rounds)
    examples = mixed(max(budgets) * (steps * ranks.world + 2), min(budgets))
    packs = {}
    for budget in budgets:
        made = packed(examples, bench.rule("bf16", CP), budget, steps * ranks.world)
        packs[budget] = [made[n] for n in deal(costs(made, sizes), ranks.world).steps.ravel()]
    ranks.tell(f"{sizes}\n{rounds} rounds of {steps} steps, medians\n")
    ranks.tell(f"{'':<11}{'':<14}{'budget':>7}{'ms a step':>11}{'real tokens/s':>15}{'peak':>9}")
    rates = {}
    for variant, ways in CELLS.items():
        if not only or variant in only:
            late: list = [time.perf_counter() - started > seconds]
            dist.broadcast_object_list(late, group=ranks.host)
            if late[0]:
                ranks.tell(f"{variant:<11}not run: {seconds:.0f} s are over")
                continue
            for way in ways:
                rates[variant, way] = bench.cell(variant, way, packs)
    if rates:
        ranks.tell(f"\n{'over one GPU':<25}" + "".join(f"{budget:>9}" for budget in budgets))
    for (variant, way), found in rates.items():
        if way != ONE:
            ratios = "".join(f"{rate / rates[variant, ONE][budget]:>9.3f}" for budget, rate in found.items())
            ranks.tell(f"{variant:<11}{way:<14}{ratios}")
    ranks.tell(f"{time.perf_counter() - started:.0f} s\n")
    if not only or "idle" in only:
        forget(ranks.device)
        model = bench.model("bf16", ONE)
        for budget in budgets:
            tokens = budget * (idle_packs + 4)
            kinds = {"lognormal": sequences(lognormal_lengths(tokens // 200).clip(max=budget)), "speech": speech(tokens)}
            for kind, chosen in kinds.items():
                named = [replace(one, id=f"{n}") for n, one in enumerate(chosen)]
                bench.idle(kind, named, budget, idle_packs, model)
    ranks.tell(f"{time.perf_counter() - started:.0f} s")
    dist.barrier(ranks.host)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
