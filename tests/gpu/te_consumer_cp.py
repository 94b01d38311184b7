"""Transformer Engine's attention under context parallelism, told by our consumers: each slab against each sequence alone.

    torchrun --nproc-per-node 2 tests/gpu/te_consumer_cp.py

Prints one line a case and ends with a non-zero code where a real row is off by more than BF16 allows.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F

from packfp8 import Topology, align
from packfp8.data import Collator, Example, Turn
from packfp8.lengths import Measure
from packfp8.model import te

HEADS, WIDTH, BF16 = 8, 64, 1e-2
CASES = [
    *(("te", "thd", how) for how in ("p2p", "all_gather", "a2a")),
    *(("te_real", "thd", how) for how in ("p2p", "all_gather", "a2a")),
    *(("te", "bshd", how) for how in ("p2p", "all_gather", "a2a")),
]


def main() -> int:
    dist.init_process_group("nccl")
    rank, cp = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    examples = [Example(id=f"s{n}", turns=(Turn("assistant", ("word " * n,)),)) for n in (30, 4, 1, 100, 50)]
    worst = max(case(*told, examples, rank, cp) for told in CASES)
    dist.destroy_process_group()
    return int(worst > BF16)


def case(consumer: str, layout: str, how: str, examples: list, rank: int, cp: int) -> float:
    """The largest relative error of output and gradients, over all ranks."""
    rules = [align("block", Topology(cp=cp, cp_rank=n), layout=layout) for n in range(cp)]
    batch = Collator(measure=Measure(frames=None), rule=rules[rank])(examples).to("cuda")
    torch.manual_seed(rank)
    shape, real = tuple(batch.input_ids.shape), ~batch.padding_mask[..., None, None]
    q, k, v, grad = (torch.where(real, torch.randn(*shape, HEADS, WIDTH, device="cuda"), 0).bfloat16() for _ in range(4))
    parts = [x.clone().requires_grad_() for x in (q, k, v)]
    attention = te.library().DotProductAttention(HEADS, WIDTH)
    attention.set_context_parallel_group(dist.group.WORLD, list(range(cp)), torch.cuda.Stream(), how)
    out = attention(*parts, **batch.kwargs(consumer)).reshape(q.shape)
    out.backward(grad)
    found = [unpacked(batch, x, cp) for x in (out.detach(), *(x.grad for x in parts))]
    told = [unpacked(batch, x, cp) for x in (q, k, v, grad)]
    error = 0.0
    for name in batch.ids:
        for x, y in zip((each[name] for each in found), alone(*(each[name] for each in told)), strict=True):
            error = max(error, float((x.float() - y).norm() / y.norm()))
    if rank == 0:
        print(f"{consumer:8} {layout:5} {how:11} {error:.2e}")
    return error


def unpacked(batch, slab: torch.Tensor, cp: int) -> dict[str, torch.Tensor]:
    slabs = [torch.empty_like(slab) for _ in range(cp)]
    dist.all_gather(slabs, slab.contiguous())
    return batch.unpack(slabs)


def alone(q, k, v, grad) -> list[torch.Tensor]:
    parts = [x.float().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in parts), is_causal=True).transpose(0, 1)
    out.backward(grad.float())
    return [out.detach(), *(x.grad for x in parts)]


if __name__ == "__main__":
    sys.exit(main())
