"""Training on the embedded corpus: BF16 by three seeds, and each FP8 recipe by the first of them. A table and a picture.

    python tests/gpu/train_curves.py --picture tests/gpu/results/curves.png

Every run of one seed begins with the same parameters and sees the same packs in the same order. The question is whether the
mean loss of the last 50 steps of an FP8 run is within 2 % of BF16's, or within the spread of its three seeds.
"""

from __future__ import annotations

import time
from pathlib import Path

import click
import torch
from workload import MasterAdamW, batches, build, examples, header, packs

from packfp8 import align
from packfp8.model.plain_decoder import DecoderSizes

LAST = 50
RUNS = (
    ("bf16", 0),
    ("bf16", 1),
    ("bf16", 2),
    ("plain", 0),
    ("current", 0),
    ("block", 0),
    ("delayed", 0),
    ("tensorwise", 0),
)
"""Variant and seed. "plain" is the decoder in plain torch in BF16, which torchao's recipes are run on."""


def train(variant: str, seed: int, sizes: DecoderSizes, groups: list, steps: int, lr: float, device: str, workers: int):
    """The loss of each step, `[steps]`, and the seconds of a step."""
    rule = align("bf16" if variant == "plain" else variant)
    made = batches(rule, groups, device, workers)
    model = build(variant, sizes, rule, seed=seed, device=device)
    optimizer, losses = MasterAdamW(model, lr), []
    started = time.perf_counter()
    for step in range(steps):
        batch = made[step % len(made)]
        out = model(batch, global_supervised=batch.num_supervised)
        out.loss.backward()
        optimizer.step()
        if model.fp8:
            model.fp8.after_optimizer_step(model)
        losses.append(out.loss.detach())
    losses = torch.stack(losses).cpu()
    return losses, (time.perf_counter() - started) / steps


@click.command()
@click.option("--steps", default=320, show_default=True)
@click.option("--budget", default=2048, show_default=True, help="Tokens of a pack.")
@click.option("--hidden", default=512, show_default=True)
@click.option("--layers", default=6, show_default=True)
@click.option("--lr", default=2e-4, show_default=True)
@click.option("--device", default="cuda", show_default=True)
@click.option("--workers", default=12, show_default=True, help="Processes that read audio.")
@click.option("--only", multiple=True, help="Variants to run; all where none is given.")
@click.option("--picture", type=click.Path(path_type=Path), help="PNG file for all curves.")
def main(steps, budget, hidden, layers, lr, device, workers, only, picture) -> None:
    """Train every variant, and print the table."""
    print(header())
    sizes = DecoderSizes(vocab=272, hidden=hidden, ffn=hidden * 11 // 4 // 16 * 16, layers=layers, heads=8, kv_heads=4)
    chosen, curves = examples(), {}
    # delayed, current, block and tensorwise round packs alike; BF16 gets the same, so that all see the same examples
    groups = {seed: packs(align("block"), budget, steps, seed, chosen) for seed in (0, 1, 2)}
    print(f"{sizes}\n{steps} steps of packs of {budget} tokens, AdamW {lr}, {len(chosen)} examples\n")
    for variant, seed in RUNS:
        if not only or variant in only:
            curves[variant, seed], seconds = train(variant, seed, sizes, groups[seed], steps, lr, device, workers)
            first, last = curves[variant, seed][0].item(), curves[variant, seed][-LAST:].mean().item()
            print(
                f"{variant:<10} seed {seed}  first {first:.4f}  last {LAST} {last:.4f}  {1e3 * seconds:.1f} ms a step",
                flush=True,
            )
    table(curves)
    if picture:
        draw(curves, picture)


def table(curves: dict) -> None:
    """Prints how far each variant ends from BF16."""
    means = {run: curve[-LAST:].mean().item() for run, curve in curves.items()}
    seeds = [mean for (variant, _), mean in means.items() if variant == "bf16"]
    if not seeds:
        return
    base, spread = means["bf16", 0], max(seeds) - min(seeds)
    print(
        f"\nBF16: mean of the last {LAST} steps {base:.4f} (seed 0), spread of three seeds {spread:.4f} ({spread / base:.2%})"
    )
    for (variant, _), mean in means.items():
        if variant != "bf16":
            near, inside = abs(mean - base) <= 0.02 * base, min(seeds) <= mean <= max(seeds)
            verdict = " and ".join(["within 2 %"] * near + ["inside the spread"] * inside) or "OUTSIDE both"
            print(f"{variant:<10} {mean:.4f}  {mean / base - 1:+.2%} of BF16: {verdict}")


def draw(curves: dict, path: Path) -> None:
    """Writes all curves into one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (whole, close) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for (variant, seed), curve in curves.items():
        smooth = curve.unfold(0, 10, 1).mean(-1)
        grey = variant == "bf16" and seed
        style = {"color": "0.75", "lw": 1} if grey else {"lw": 1.2}
        name = "BF16, plain torch" if variant == "plain" else f"BF16, seed {seed}" if variant == "bf16" else variant
        for axes in (whole, close):
            axes.plot(range(10, len(curve) + 1), smooth, label=name, **style)
    whole.set(xlabel="step", ylabel="loss, nats a token (mean of 10 steps)", title="training loss")
    steps = max(len(curve) for curve in curves.values())
    tail = torch.stack([curve[-2 * LAST :] for curve in curves.values()])
    close.set(xlabel="step", title=f"the last {2 * LAST} steps", xlim=(steps - 2 * LAST, steps))
    close.set_ylim(0.9 * tail.min().item(), 1.1 * tail.max().item())
    close.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
