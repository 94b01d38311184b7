"""How far attention kernels reach: slots and a max_seqlen whose product is near 2^31 values, each in a process of its own.

    python tests/gpu/attention_reach.py

A pack of short slots and many repeated offsets, as static packs have them, is attended under two values of max_seqlen: that of
its longest slot, and that of the row. Output and gradients must not differ. Values: slots * max_seqlen * heads * head_dim.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import click
import torch
from workload import header

from packfp8.model import te

TOKENS, WIDTH, LIMIT = 4096, 128, 2**31
CASES = (  # slots, max_seqlen, heads, key heads
    (31, 32768, 16, 8),
    (33, 32768, 16, 8),
    (62, 32768, 8, 4),
    (66, 32768, 8, 4),
    (252, 32768, 16, 8),
    (252, 8192, 8, 4),
    (264, 8192, 8, 4),
    (127, 8192, 16, 16),
    (129, 8192, 16, 16),
    (252, 640, 16, 8),
)


def attended(slots: int, longest: int, heads: int, keys: int) -> list[torch.Tensor]:
    """Output and gradients of a pack whose offsets repeat to `slots`, told that its longest slot has `longest` tokens."""
    torch.manual_seed(0)
    many = min(slots, 16)
    offsets = [*range(0, TOKENS + 1, TOKENS // many)][: many + 1]
    offsets = torch.tensor(offsets + offsets[-1:] * (slots - many), dtype=torch.int32, device="cuda")
    tokens = int(offsets[-1])
    options = {"dtype": torch.bfloat16, "device": "cuda", "requires_grad": True}
    parts = [torch.randn(tokens, n, WIDTH, **options) for n in (heads, keys, keys)]
    grad = torch.randn(tokens, heads * WIDTH, dtype=torch.bfloat16, device="cuda")
    told = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    attention = te.library().DotProductAttention(heads, WIDTH, num_gqa_groups=keys, qkv_format="thd")
    out = attention(*parts, qkv_format="thd", attn_mask_type="padding_causal", **told)
    out.backward(grad)
    torch.cuda.synchronize()
    return [out.detach(), *(part.grad for part in parts)]


def verdict(case: tuple[int, int, int, int]) -> str:
    """What a process of its own found."""
    command = [sys.executable, __file__, "--case", *map(str, case)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    told = done.stdout.strip() or next((line for line in done.stderr.splitlines()[::-1] if "rror" in line), "no word")[:90]
    slots, longest, heads, _ = case
    values = slots * longest * heads * WIDTH
    return f"{slots:>5} {longest:>10} {heads:>5} {values / LIMIT:>12.3f}  {told}"


@click.command()
@click.option("--case", nargs=4, type=int, help="One case, in this process.")
def main(case) -> None:
    """Print a line for each case."""
    if case:
        slots, longest, heads, keys = case
        short, long = (attended(slots, told, heads, keys) for told in (TOKENS // min(slots, 16), longest))
        gap = max(float((a.float() - b.float()).norm() / a.float().norm()) for a, b in zip(short, long, strict=True))
        print(f"right, apart by {gap:.1e}" if gap < 1e-2 else f"WRONG by {gap:.1e}")
        return
    print(header())
    print("slots max_seqlen heads values/2^31")
    with ThreadPoolExecutor(5) as pool:
        for line in pool.map(verdict, CASES):
            print(line, flush=True)


if __name__ == "__main__":
    main()
