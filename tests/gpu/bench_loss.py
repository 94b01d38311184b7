"""Memory and time of the chunked cross-entropy against logits of the whole pack at once.

python tests/gpu/bench_loss.py
"""

from __future__ import annotations

import click
import torch
from torch.nn import functional as F
from workload import header, median_seconds

from packfp8.model.loss import CHUNK_TOKENS, loss_sum


def whole(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The same sum by torch's cross_entropy over all logits, in float32."""
    return F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")


@click.command()
@click.option("--tokens", default=32_768, show_default=True)
@click.option("--vocab", default=131_072, show_default=True)
@click.option("--hidden", default=2048, show_default=True)
def main(tokens: int, vocab: int, hidden: int) -> None:
    """Print peak memory beyond the inputs, and milliseconds, of forward and backward."""
    print(header())
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = (0.02 * torch.randn(vocab, hidden, device="cuda")).bfloat16().requires_grad_()
    labels = torch.randint(vocab, (tokens,), device="cuda")
    print(f"{tokens} tokens, vocabulary {vocab}, hidden {hidden}; chunks of {CHUNK_TOKENS}\n")
    print(f"{'':<10}{'loss a token':>14}{'peak GiB':>10}{'ms':>8}")
    for name, act in (("whole", whole), ("chunked", loss_sum)):

        def step(act=act) -> torch.Tensor:
            x.grad = weight.grad = None
            loss = act(x, weight, labels)
            loss.backward()
            return loss

        loss = step().item() / tokens
        x.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        print(f"{name:<10}{loss:>14.5f}{peak:>10.2f}{1e3 * median_seconds(step, 5):>8.0f}", flush=True)


if __name__ == "__main__":
    main()
