"""What attention pays for a max_seqlen beyond the longest slot: forward and backward of packs, captured as a CUDA graph.

    python tests/gpu/bench_max_seqlen.py

The slots of a pack have about 150 tokens, as speech has; more offsets repeat the last, as static packs have them. Each line has
the time of attention under a max_seqlen, and how far output and gradients are from those under the least.
"""

from __future__ import annotations

import click
import torch
from workload import header, median_seconds

from packfp8.model import te

SLOT_TOKENS, WIDTH = 151, 128


def cases(tokens: int) -> tuple[int, ...]:
    """Values of max_seqlen."""
    return tuple(sorted({160, 640, 2048, 8192, tokens} & set(range(tokens + 1))))


def attended(tokens: int, heads: int, longest: int, device: str) -> tuple[float, list[torch.Tensor]]:
    """Milliseconds, and output and gradients."""
    torch.manual_seed(0)
    offsets = [*range(0, tokens, SLOT_TOKENS), tokens]
    offsets += offsets[-1:] * (len(offsets) // 4)
    offsets = torch.tensor(offsets, dtype=torch.int32, device=device)
    options = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
    parts = [torch.randn(tokens, n, WIDTH, **options) for n in (heads, heads, heads)]
    grad = torch.randn(tokens, heads * WIDTH, dtype=torch.bfloat16, device=device)
    told = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    attention = te.library().DotProductAttention(heads, WIDTH, qkv_format="thd")

    def run() -> torch.Tensor:
        for part in parts:
            part.grad = None
        out = attention(*parts, qkv_format="thd", attn_mask_type="padding_causal", **told)
        out.backward(grad)
        return out

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    seconds = median_seconds(graph.replay, repeats=20)
    return 1e3 * seconds, [out.detach().clone(), *(part.grad.clone() for part in parts)]


@click.command()
@click.option("--tokens", default="2048,8192,32768", show_default=True)
@click.option("--device", default="cuda", show_default=True)
def main(tokens: str, device: str) -> None:
    """Print a line for each value of max_seqlen."""
    print(header())
    print(f"{'tokens':>7} {'heads':>5} {'max_seqlen':>10} {'ms':>8} {'ratio':>6}  apart")
    for total in map(int, tokens.split(",")):
        for heads in (8, 16):
            least = None
            for longest in cases(total):
                ms, found = attended(total, heads, longest, device)
                least = least or (ms, found)
                apart = max(float((a.float() - b.float()).norm() / a.float().norm()) for a, b in zip(least[1], found))
                print(f"{total:>7} {heads:>5} {longest:>10} {ms:>8.3f} {ms / least[0]:>6.2f}  {apart:.1e}", flush=True)
                del found
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
