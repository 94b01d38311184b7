"""GatherOverRanks: the keys of all CP ranks, for a decoder whose attention sees them by slot and position."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class GatherOverRanks:
    """(tensor, dimension) -> the tensors of all ranks of a group, in rank order, joined along it.

    Gradients flow back: each rank's share is summed over the ranks that used it. Set it as `PlainDecoder.gather` under CP.

    Args:
        group: the CP process group; all its ranks hold slabs of equal shape.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, tensor: Tensor, dim: int) -> Tensor:
        return _Gather.apply(tensor, dim, self.group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        shares = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shares, tensor.contiguous(), group=group)
        return torch.cat(shares, dim)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # An all-reduce and a cut rather than a reduce-scatter: gloo has it too, and this decoder is for small models.
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)], None, None
