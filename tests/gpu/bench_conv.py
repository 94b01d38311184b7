"""The encoder's convolutions as `torch.nn.Conv1d` runs them and by one GEMM: forward and backward in BF16, kernel 3, stride 2.

python tests/gpu/bench_conv.py
"""

from __future__ import annotations

import click
import torch
from torch import nn
from workload import header, median_seconds

from packfp8.model.plain_encoder import convolved

SHAPES = ((1, 6_056, 80, 1024), (1, 3_028, 1024, 1024), (1, 24_000, 1024, 1024), (16, 600, 1024, 1024), (16, 1_500, 256, 256))
"""Clips, frames, features in and out: packed rows of 2,048 and more tokens, and clips in rows of their own."""


@click.command()
@click.option("--device", default="cuda", show_default=True)
def main(device) -> None:
    """Print a line for each shape."""
    print(header())
    print(f"{'clips':>5} {'frames':>7} {'in':>5} {'out':>5} {'Conv1d ms':>10} {'GEMM ms':>8} {'ratio':>6}  apart")
    for clips, frames, inputs, outputs in SHAPES:
        torch.manual_seed(0)
        conv = nn.Conv1d(inputs, outputs, 3, 2, 1, device=device, dtype=torch.bfloat16)
        x = torch.randn(clips, frames, inputs, device=device, dtype=torch.bfloat16, requires_grad=True)

        def rival(conv=conv, x=x):
            return conv(x.transpose(1, 2)).transpose(1, 2)

        def ours(conv=conv, x=x):
            return convolved(x, conv)

        grad = torch.randn_like(ours())
        apart = float((ours() - rival()).float().norm() / rival().float().norm())
        spent = [1e3 * median_seconds(lambda way=way, grad=grad: way().backward(grad), repeats=20) for way in (rival, ours)]
        line = f"{clips:>5} {frames:>7} {inputs:>5} {outputs:>5} {spent[0]:>10.3f} {spent[1]:>8.3f}"
        print(f"{line} {spent[0] / spent[1]:>6.2f}  {apart:.1e}", flush=True)


if __name__ == "__main__":
    main()
