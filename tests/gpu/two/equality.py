"""Two GPUs compute what one computes: context parallel, tensor and sequence parallel, in BF16 and in FP8.

    torchrun --nproc-per-node 2 tests/gpu/two/equality.py [--only cp --only tp ...]

Each line is a case, with the relative distance of logits and gradients from one GPU's, and of both from the plain decoder in
float32. It ends with a non-zero code where a bound is missed. `--device cpu` runs it with stand-ins for Transformer Engine.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from pathlib import Path

import click
import numpy as np
import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2])]

from workload import header, median_seconds  # noqa: E402

from packfp8 import Clip, Collator, Example, Fp8, Measure, PackedModel, Template, Topology, Turn, align  # noqa: E402
from packfp8.data.corpus import texts  # noqa: E402
from packfp8.layout import cp_index, place  # noqa: E402
from packfp8.lengths import AudioFrames  # noqa: E402
from packfp8.model import te  # noqa: E402
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder  # noqa: E402
from packfp8.model.plain_encoder import PlainEncoder, PlainProjector  # noqa: E402
from packfp8.model.te_decoder import TeDecoder, plain_name  # noqa: E402
from packfp8.model.tensor_split import TensorSplit  # noqa: E402

FRAMES = AudioFrames.fastconformer()
HOWS = ("p2p", "all_gather", "a2a")
FP8 = ("current", "block", "delayed")
GOLDEN = HERE.parents[1] / "rule" / "golden.csv"


class Bench:
    """This rank's device, and the verdicts so far."""

    def __init__(self, device: str, hidden: int, quick: bool) -> None:
        self.rank, self.device, self.quick = dist.get_rank(), device, quick
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float64
        self.sizes = DecoderSizes(vocab=272, hidden=hidden, ffn=2 * hidden, layers=2, heads=8, kv_heads=4)
        self.missed: list[str] = []
        torch.manual_seed(0)
        decoder = PlainDecoder(self.sizes)
        for weight in (decoder.embedding.weight, decoder.head.weight):
            torch.nn.init.normal_(weight, std=0.1)
        self.state = decoder.state_dict()

    def say(self, *words: object) -> None:
        if self.rank == 0:
            print(*words, flush=True)

    def verdict(self, name: str, told: str, **bounds: tuple[float, float]) -> None:
        """Prints a case; every bound is (found, most)."""
        over = [f"{key} {found:.2e} > {most:.0e}" for key, (found, most) in bounds.items() if not found <= most]
        self.missed += [f"{name}: {one}" for one in over]
        self.say(f"{name:<44} {told}  {'ok' if not over else 'MISSED ' + ', '.join(over)}")


def main_examples() -> list[Example]:
    """Speech, text, two clips in one example, and sequences of a single token."""
    generator = np.random.default_rng(0)

    def clip(samples):
        wave = 0.1 * generator.standard_normal(samples).astype(np.float32)
        return Clip(source=wave, num_samples=samples, sample_rate=16_000)

    made = [Example(id=f"one token {n}", turns=(Turn("system", ("a",)),)) for n in range(3)]
    for n in range(9):
        parts = (clip(int(generator.integers(8_000, 90_000))),) if n % 3 else ("name a colour",)
        made.insert(2 * n, Example(id=f"e{n}", turns=(Turn("user", parts), Turn("assistant", ("word " * (n + 1),)))))
    two = (clip(9_000), " and ", clip(30_000))
    return [*made, Example(id="two clips", turns=(Turn("user", two), Turn("assistant", ("the second",))))]


def measure(frames: AudioFrames | None) -> Measure:
    """A system turn has no marks, so that a sequence can be one token."""
    return Measure(frames=frames, template=Template(roles={**Template().roles, "system": ("", "")}))


def batch_of(kind: str, rule, device: str):
    """A batch of audio and text; or of text alone with much filler and repeated offsets."""
    if kind == "audio":
        return Collator(measure=measure(FRAMES), rule=rule)(main_examples()).to(device)
    chosen = [*texts()[:6], *(Example(id=f"one token {n}", turns=(Turn("system", ("a",)),)) for n in range(3))]
    collator = Collator(measure=measure(None), rule=rule, static=True, budget=2048, max_sequences=16)
    return collator(chosen).to(device)


def model_of(bench: Bench, rule, llm, consumer: str, recipe: str | None, dtype) -> PackedModel:
    torch.manual_seed(1)
    encoder, projector = PlainEncoder(width=64), PlainProjector(width=64, hidden=bench.sizes.hidden)
    encoder.convs.to(dtype)
    encoder.norm.to(dtype)
    parts = {"encoder": encoder.to(bench.device), "projector": projector.to(bench.device, dtype)}
    fp8 = Fp8.te(recipe) if recipe else None
    return PackedModel(**parts, llm=llm, rule=rule, consumer=consumer, frames=FRAMES, fp8=fp8)


def step(model: PackedModel, batch, count) -> tuple:
    """Logits as the batch is shaped, and gradients by the plain decoder's names."""
    model.zero_grad(set_to_none=True)
    out = model(batch, global_supervised=count, return_logits=True)
    out.loss.backward()
    return out.logits.detach(), {plain_name(n): p.grad for n, p in model.named_parameters() if p.grad is not None}


def one_gpu(bench: Bench, kind: str, recipe: str | None, exact: bool = False) -> tuple:
    """The same examples on this GPU alone: logits by sequence, and gradients."""
    rule = align(recipe or "bf16")
    if exact:
        rule, llm, consumer, dtype = align("bf16"), PlainDecoder(bench.sizes).to(bench.device), "plain", torch.float32
        llm.load_state_dict(bench.state)
        if bench.device == "cpu":
            llm, dtype = llm.double(), torch.float64
    else:
        llm, consumer, dtype = TeDecoder(bench.sizes, dtype=bench.dtype, device=bench.device), "te", bench.dtype
        llm.load_plain(bench.state)
    batch = batch_of(kind, rule, bench.device)
    logits, grads = step(model_of(bench, rule, llm, consumer, None if exact else recipe, dtype), batch, batch.num_supervised)
    return batch.unpack(logits), grads


def two_gpus(bench: Bench, kind: str, recipe: str | None, topology: Topology, layout: str, how: str, taken=None) -> tuple:
    """The same over both GPUs: logits by sequence, and this rank's gradients, under CP of both ranks together."""
    group = dist.group.WORLD
    rule = align(recipe or "bf16", topology, layout=layout)
    split = {"tp_group": group, "sp": topology.sp} if topology.tp > 1 else {}
    llm = TeDecoder(bench.sizes, dtype=bench.dtype, device=bench.device, **split).load_plain(bench.state)
    if topology.cp > 1:
        llm.split_context(group, comm=how, stream=object() if bench.device == "cpu" else None)
    if taken:
        llm.layouts = taken
    batch = batch_of(kind, rule, bench.device)
    count = torch.tensor(batch.num_supervised, device=bench.device)
    if topology.cp > 1:
        dist.all_reduce(count)
    logits, grads = step(model_of(bench, rule, llm, "te", recipe, bench.dtype), batch, count)
    if topology.cp == 1:
        return batch.unpack(logits), grads
    slabs = [torch.empty_like(logits) for _ in range(topology.cp)]
    dist.all_gather(slabs, logits.contiguous())
    for name in grads:
        grads[name] = grads[name].float() / topology.cp  # FSDP averages over dp * cp
        dist.all_reduce(grads[name])
    return batch.unpack(slabs), grads


def distance(a: dict, b: dict, over_ranks: bool = False) -> float:
    """The norm of the difference over the norm of b."""
    parts = torch.zeros(2, dtype=torch.float64)
    for name, y in b.items():
        x, y = a[name].double(), y.double()
        parts += torch.stack(((x - y).square().sum(), y.square().sum())).cpu()
    if over_ranks:
        parts = parts.to(next(iter(b.values())).device)
        dist.all_reduce(parts)
    return float((parts[0] / parts[1]).sqrt())


def compared(bench: Bench, name: str, found: tuple, one: tuple, exact: tuple, recipe: str | None, share=lambda n, x: x) -> None:
    """Prints how far two GPUs are from one, and both from float32."""
    told = []
    for n in range(2):
        own = {k: x if n == 0 else share(k, x) for k, x in one[n].items()}
        true = {k: x if n == 0 else share(k, x) for k, x in exact[n].items()}
        told += [distance(found[n], own, bool(n)), distance(found[n], true, bool(n)), distance(own, true, bool(n))]
    same_l, two_l, one_l, same_g, two_g, one_g = told
    line = f"logits {same_l:.1e} (float32: {two_l:.1e}, one GPU {one_l:.1e})  "
    line += f"gradients {same_g:.1e} (float32: {two_g:.1e}, one GPU {one_g:.1e})"
    if bench.device == "cpu":
        bench.verdict(name, line, logits=(same_l, 1e-6), gradients=(same_g, 1e-6))
    elif recipe is None:
        bench.verdict(name, line, logits=(same_l, 1e-2), gradients=(same_g, 2e-2))
    else:  # scales and tiles are cut at other rows, so that roundings differ: no further from the truth than one GPU is
        bench.verdict(name, line, logits=(two_l, 1.25 * one_l + 1e-3), gradients=(two_g, 1.25 * one_g + 1e-3))


def context_parallel(bench: Bench) -> None:
    """cp 2 against cp 1."""
    recipes = (None,) if bench.device == "cpu" else (None, "block")
    for kind in ("audio", "filler"):
        exact = one_gpu(bench, kind, None, exact=True)
        for recipe in recipes:
            one = one_gpu(bench, kind, recipe)
            for layout in ("thd", "bshd") if kind == "audio" else ("thd",):
                for how in HOWS:
                    topology = Topology(cp=2, cp_rank=bench.rank)
                    found = two_gpus(bench, kind, recipe, topology, layout, how)
                    compared(bench, f"cp 2 {how}, {layout}, {recipe or 'bf16'}, {kind}", found, one, exact, recipe)


def indices(bench: Bench) -> None:
    """Our index against Transformer Engine's kernel."""
    if bench.device == "cpu":
        return
    te.library()  # the kernels load after it alone
    import transformer_engine_torch as kernels

    generator, equal, tried = np.random.default_rng(bench.rank), 0, 0
    for _ in range(100):
        for cp in (2, 4, 8):
            slots = place(generator.integers(1, 900, generator.integers(1, 40)).tolist(), align("block", Topology(cp=cp)))
            offsets = torch.tensor(slots.offsets, dtype=torch.int32, device="cuda")
            offsets = torch.cat((offsets, offsets[-1].expand(int(generator.integers(0, 4)))))
            for rank in range(cp):
                theirs = kernels.thd_get_partitioned_indices(offsets, slots.total, cp, rank).cpu().numpy()
                equal += int(np.array_equal(theirs, cp_index(slots.offsets, cp, rank)))
                tried += 1
    bench.verdict("indices against thd_get_partitioned_indices", f"{equal} of {tried} equal", unequal=(tried - equal, 0))


def tensor_parallel(bench: Bench) -> None:
    """tp 2, with and without SP, against tp 1."""
    recipes = (None,) if bench.device == "cpu" else (None, *FP8)
    split = TensorSplit(group=dist.group.WORLD, sp=True)

    def share(name, whole):
        return split.share(name, whole, bench.sizes)

    exact = one_gpu(bench, "audio", None, exact=True)
    for recipe in recipes:
        one = one_gpu(bench, "audio", recipe)
        for sp, layout, taken in (
            (False, "thd", None),
            (True, "thd", None),
            (True, "bshd", None),
            (True, "bshd", ("sbhd",)),
        ):
            topology = Topology(tp=2, tp_rank=bench.rank, sp=sp)
            found = two_gpus(bench, "audio", recipe, topology, layout, "", taken)
            how = "sbhd" if taken else "bshd as slots" if layout == "bshd" else "thd"
            name = f"tp 2{' with SP' if sp else ''}, {how}, {recipe or 'bf16'}"
            compared(bench, name, found, one, exact, recipe, share)


def rows_under_sp(bench: Bench) -> None:
    """What moves on the second rank when the first token of every row is changed, the rows handed over as each layout."""
    rule = align("bf16", Topology(tp=2, tp_rank=bench.rank, sp=True), layout="bshd")
    decoder = TeDecoder(bench.sizes, dtype=bench.dtype, device=bench.device, tp_group=dist.group.WORLD, sp=True)
    decoder.load_plain(bench.state)
    batch = batch_of("audio", rule, bench.device)
    for layout, least in (("bshd", 0.0), ("sbhd", 1.0)):
        tokens = 1 if layout == "bshd" else 0
        told = {"qkv_format": layout, "attn_mask_type": "causal"}
        with torch.no_grad():
            before = decoder.embed(batch.input_ids if layout == "bshd" else batch.as_sbhd().input_ids)
            after = before.clone()
            after.select(tokens, 0).neg_()
            shards = [x.chunk(2, dim=tokens)[bench.rank].contiguous() for x in (before, after)]
            rotate = decoder._rotation(shards[0] if layout == "bshd" else before, layout, told)
            for layer in decoder.layers:
                shards = [layer(x, rotate, told, None) for x in shards]
        moved = ((shards[1] - shards[0]).select(tokens, 0).abs().amax(-1) > 0).double().mean()
        dist.broadcast(moved, 1)
        name = f"{layout} under SP: rows of the second rank that move"
        bench.verdict(name, f"{moved.item():.0%} (expected {least:.0%})", wrong=(abs(moved.item() - least), 0))
    try:
        decoder(decoder.embed(batch.input_ids), qkv_format="bshd", attn_mask_type="causal")
        refused = 1
    except te.ConfigError:
        refused = 0
    bench.verdict("bshd under SP given to TeDecoder", "refused" if not refused else "accepted", accepted=(refused, 0))


def golden_rows(bench: Bench) -> None:
    """Every golden row of tp 2: its total passes forward and backward over both GPUs, nothing smaller does."""
    if bench.device == "cpu":
        return
    rows = [row for row in csv.DictReader(GOLDEN.read_text(encoding="utf-8").splitlines()) if row["recipe"] in FP8]
    rows = [row for row in rows if row["tp"] == "2" and row["sp"] == "sp" and row["cp"] == "1" and not row["fast"]]
    for row in rows:
        trained, batch = row["weights"] == "trained", int(row["batch"] or 1)
        rule = align(row["recipe"], Topology(tp=2, sp=True), layout=row["layout"], trains_weights=trained)
        least = rule.total if row["layout"] == "thd" else batch * rule.row(batch)
        order = align("bf16", Topology(tp=2, sp=True), layout=row["layout"])
        small = 2 if row["layout"] == "thd" else batch * order.row(batch)
        layers, fp8 = pair(256, Fp8.te(row["recipe"]), trained)
        told = {tokens: fault(layers, fp8, tokens // 2, 256) for tokens in (*range(small, least, small), least, 2 * least)}
        passed = [tokens for tokens, found in told.items() if found is None]
        wrong = sum(tokens < least for tokens in passed) + (least not in passed) + (2 * least not in passed)
        stages = ", ".join(f"{n} in {stage}" for stage, n in Counter(filter(None, told.values())).items())
        name = f"{row['recipe']}, {row['layout']}{f' B {batch}' if row['batch'] else ''}, {row['weights']}, tp 2 with SP"
        bench.verdict(name, f"{least} passes; {least // small - 1} smaller tried: {stages}", wrong=(wrong, 0))


def pair(hidden: int, fp8: Fp8 | None, trained: bool = True) -> tuple:
    """A column-parallel and a row-parallel layer under SP, as attention and its projection, without attention."""
    library, split = te.library(), TensorSplit(group=dist.group.WORLD, sp=True)
    common = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda", **split.options()}
    layers = torch.nn.ModuleList(
        (
            library.LayerNormLinear(hidden, 4 * hidden, normalization="RMSNorm", parallel_mode="column", **common),
            library.Linear(4 * hidden, hidden, parallel_mode="row", **common),
        )
    )
    return layers.requires_grad_(trained), fp8


def run(layers, fp8: Fp8 | None, x: torch.Tensor) -> torch.Tensor:
    if fp8 is None:
        return layers[1](layers[0](x))
    with te.autocast(te.make_recipe(fp8.recipe)):
        return layers[1](layers[0](x))


def fault(layers, fp8: Fp8, shard: int, hidden: int) -> str | None:
    """Where both ranks fail on shards of so many rows, and with what; None where they pass."""
    stage, found = "forward", None
    try:
        x = torch.randn(shard, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        y = run(layers, fp8, x)
        stage = "backward"
        y.backward(torch.randn_like(y))
        torch.cuda.synchronize()
    except (ValueError, RuntimeError, AssertionError) as raised:
        found = f"{stage} ({type(raised).__name__})"
    return found


def fast_gather(bench: Bench) -> None:
    """What block pays where a shard is no multiple of 128 rows, and gathers in BF16."""
    if bench.device == "cpu":
        return
    bench.say(
        f"\n{'hidden':>6} {'tokens':>7} {'shard % 128':>11} {'bf16 ms':>9} {'current ms':>11} {'block ms':>9}  block a token"
    )
    for hidden in (2048, 4096):
        made = {name: pair(hidden, Fp8.te(name) if name else None) for name in (None, "current", "block")}
        for tokens in (8192,) if bench.quick else (8192, 16384, 32768):
            base = None
            for extra in (0, 16):
                total, spent = tokens + extra, {}
                x = torch.randn(total // 2, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
                for name, (layers, fp8) in made.items():

                    def act(layers=layers, fp8=fp8, x=x):
                        y = run(layers, fp8, x)
                        y.backward(y)

                    spent[name] = 1e3 * median_seconds(act, repeats=20, warmups=5)
                each = spent["block"] / total
                base = base or each
                line = f"{hidden:>6} {total:>7} {total // 2 % 128:>11} {spent[None]:>9.3f} {spent['current']:>11.3f}"
                bench.say(f"{line} {spent['block']:>9.3f}  {each / base:.3f}x of that of whole tiles")


PARTS = {
    "indices": indices,
    "cp": context_parallel,
    "tp": tensor_parallel,
    "rows": rows_under_sp,
    "golden": golden_rows,
    "gather": fast_gather,
}


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="Parts to run; all where none is given.")
@click.option("--hidden", default=512, show_default=True)
@click.option("--device", default="cuda", show_default=True)
@click.option("--quick", is_flag=True)
def main(only, hidden, device, quick) -> None:
    """Run the parts, and say which bounds were missed."""
    if device == "cpu":
        sys.path.insert(0, str(HERE.parents[1] / "model"))
        import te_stand_in

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        te_stand_in.install()
    else:
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
    bench = Bench(device, hidden, quick)
    if device == "cuda":
        bench.say(header().replace("$ python", "$ torchrun --nproc-per-node 2").replace("gpu/equality", "gpu/two/equality"))
    for name in only or PARTS:
        PARTS[name](bench)
        dist.barrier()
    missed = torch.tensor(len(bench.missed), device=device)
    dist.all_reduce(missed)
    bench.say(f"\n{int(missed)} bounds missed")
    dist.destroy_process_group()
    sys.exit(int(missed > 0))


if __name__ == "__main__":
    main()
