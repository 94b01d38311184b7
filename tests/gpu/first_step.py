"""Loss and gradients of one step over the same examples: one pack (THD), one padded batch (BSHD), unpacked batches of one.

    python tests/gpu/first_step.py

All three are held against the plain decoder in float32 as well: who differs from it by more than the others,
differs by more than BF16 rounding.
"""

from __future__ import annotations

import click
import torch
from workload import batches, build, examples, header

from packfp8 import align
from packfp8.model.plain_decoder import DecoderSizes
from packfp8.model.te_decoder import plain_name


def step(variant: str, sizes: DecoderSizes, layout: str, groups: list, dtype: torch.dtype = torch.bfloat16):
    """Mean loss over all supervised tokens, and its gradient by the plain decoder's names."""
    rule = align("bf16" if variant == "plain" else variant, layout=layout)
    made = batches(rule, groups, "cuda")
    model = build(variant, sizes, rule, seed=0, device="cuda")
    if dtype == torch.float32:
        model.float()
        model.load_state_dict(build("plain", sizes, rule, seed=0, device="cuda").float().state_dict())
    supervised = sum(batch.num_supervised for batch in made)
    for _ in range(2):  # delayed scaling knows no gradient's size before its first step; nothing is learned in between
        loss = 0.0
        model.zero_grad(set_to_none=True)
        for batch in made:
            out = model(batch, global_supervised=supervised)
            out.loss.backward()
            loss += out.loss.item()
    return loss, {plain_name(name): p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def distance(a: dict, b: dict) -> float:
    """The norm of the difference of all gradients over the norm of `b`'s."""
    return float((sum((a[n] - b[n]).square().sum() for n in b) / sum(b[n].square().sum() for n in b)).sqrt())


@click.command()
@click.option("--sequences", default=24, show_default=True)
def main(sequences: int) -> None:
    """Print the distances."""
    print(header())
    sizes = DecoderSizes(vocab=272, hidden=512, ffn=1408, layers=6, heads=8, kv_heads=4)
    chosen = examples()[::10][:sequences]
    one, each = [chosen], [[example] for example in chosen]
    exact = step("plain", sizes, "thd", one, torch.float32)
    print(f"{sequences} utterances; gradients: distance over all parameters\n")
    print(f"{'':<28}{'loss':>10}{'loss - f32':>12}{'to float32':>12}{'to THD':>12}")
    print(f"{'plain torch, float32':<28}{exact[0]:>10.5f}")
    for recipe in ("bf16", "current", "block", "delayed"):
        thd = step(recipe, sizes, "thd", one)
        runs = {"THD": thd, "BSHD": step(recipe, sizes, "bshd", one), "batches of one": step(recipe, sizes, "thd", each)}
        for name, (loss, grads) in runs.items():
            near = "" if name == "THD" else f"{distance(grads, thd[1]):>12.2e}"
            label = f"{recipe}, {name}"
            print(f"{label:<28}{loss:>10.5f}{loss - exact[0]:>12.5f}{distance(grads, exact[1]):>12.2e}{near}")


if __name__ == "__main__":
    main()
