"""The loss of a pack: a sum over supervised tokens, whose logits are never held all at once, and the one right scale.

The sum of a pack equals the sum over its sequences one by one. Divided by the supervised tokens of the whole accumulation
window, over all data- and context-parallel ranks, it gives the gradient of one big batch, whatever shares of it each rank
and each micro-batch had.

Own chunks, not liger-kernel's fused loss: that one waits for the device in every call (`target_mask.sum().item()` in its
`fused_linear_cross_entropy`), which also keeps it out of a CUDA graph, and as Triton code it cannot be checked in float64 on
a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from packfp8.data import PackedBatch
from packfp8.data.batch import IGNORED
from packfp8.errors import ConfigError
from packfp8.rule import Topology

CHUNK_TOKENS = 1024
"""Rows whose logits are held at a time. Enough to keep a GEMM busy; with 128k entries of vocabulary 0.5 GB in float32."""


def loss_sum(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """The sum of the cross-entropies of `hidden @ weight.T` over the labels that are not -100: a scalar, at least float32.

    Time is three GEMMs (the gradient is made on the way, as the logits are there), memory is the logits of one chunk and the
    gradients of `hidden` and, in float32, of `weight`. Rows that are not supervised are selected away before the first GEMM:
    NaN in them reaches neither the loss nor a gradient. With no supervised row the loss is zero, with a graph.

    Args:
        hidden: `[..., hidden]`.
        weight: `[vocab, hidden]` of the head, in the same dtype; a DTensor is gathered.
        labels: int64 `[...]`, already shifted.
        chunk_tokens: rows at a time.
    """
    if hasattr(weight, "full_tensor"):
        weight = weight.full_tensor()
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _ChunkedCrossEntropy.apply(hidden.flatten(0, -2), weight, labels.flatten(), chunk_tokens, wanted)


def supervised_rows(hidden: Tensor, labels: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
    """The rows of `hidden` that have a label, and as many others as make `count`, `[count, hidden]`; and their labels.

    Found without a wait. Prompts, audio and padding then cost the head nothing.

    Args:
        hidden: `[..., hidden]`.
        labels: int64 `[...]`.
        count: known on the host: labels that are not -100, `batch.num_supervised`, or more of a constant number. None keeps all
            rows.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    if count is None:
        return hidden, labels
    rows = (labels == IGNORED).to(torch.uint8).argsort(stable=True)[:count]
    return hidden.index_select(0, rows), labels.index_select(0, rows)


def is_replayed() -> bool:
    """Whether the code runs to be captured as a CUDA graph or compiled: what one batch counts must not be a shape there."""
    return torch.compiler.is_compiling() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def scaled(total: Tensor, topology: Topology, global_supervised: int | Tensor) -> Tensor:
    """`total * (dp * cp) / global_supervised`, zero where nothing is supervised.

    FSDP and DDP average gradients over the dp * cp ranks; the product undoes it, so that what remains is the gradient of one
    batch that holds every token of the window.
    """
    is_tensor = isinstance(global_supervised, Tensor)
    least_one = global_supervised.reshape(()).clamp(min=1) if is_tensor else max(global_supervised, 1)
    return total * (topology.dp * topology.cp) / least_one


def count_supervised(batches: Sequence[PackedBatch], group=None, *, device: torch.device | str = "cpu") -> Tensor:
    """Supervised tokens of an accumulation window over all dp and cp ranks: int64, a scalar on `device`.

    Call it before the window's first backward. The counts are numbers on the host; one all-reduce adds them up, and the result
    stays on the device, so nothing waits.

    Args:
        batches: this rank's micro-batches of the window.
        group: process group, or one-dimensional DeviceMesh, of the dp * cp ranks (`mesh["dp", "cp"]._flatten()`); TP peers
            hold the same tokens and are not in it. None where there is one such rank.
        device: where the group reduces: a GPU for NCCL.

    Raises:
        ConfigError: no batch, or a group of another size than dp * cp.
    """
    if not batches:
        raise ConfigError(
            "the accumulation window has no micro-batch",
            got="no batches",
            expected="at least one on every rank",
            because="a rank that skips a step hangs the others",
            fix="PackingSampler gives ranks without examples a pack of zero weight",
        )
    topology = batches[0].rule.topology
    ranks = topology.dp * topology.cp
    group = group.get_group() if hasattr(group, "get_group") else group
    size = 1 if group is None else dist.get_world_size(group)
    if size != ranks:
        raise ConfigError(
            "the group that counts supervised tokens is not that of the data- and context-parallel ranks",
            got=f"{size} ranks" if group is not None else "no group",
            expected=f"{ranks} ranks: dp {topology.dp} * cp {topology.cp}",
            because="a count over fewer ranks makes the loss too large, and one over TP peers counts each token twice",
            fix='pass group=mesh["dp", "cp"]._flatten().get_group()',
        )
    count = torch.tensor(sum(batch.num_supervised for batch in batches), dtype=torch.int64).to(device, non_blocking=True)
    if ranks > 1:
        dist.all_reduce(count, group=group)
    return count


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, wanted: bool) -> Tensor:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if wanted and ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=exact) if wanted and ctx.needs_input_grad[1] else None
        for start in range(0, hidden.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            supervised = (labels[part] != IGNORED)[:, None]
            rows = torch.where(supervised, hidden[part], 0)
            target = torch.where(supervised, labels[part, None], 0)
            logits = (rows @ weight.T).to(exact)
            norms = logits.logsumexp(-1, keepdim=True)
            total += torch.where(supervised, norms - logits.gather(-1, target), 0).sum()
            if d_hidden is None and d_weight is None:
                continue
            grad = logits.sub_(norms).exp_()  # the softmax, in the memory of the logits
            grad.scatter_add_(-1, target, torch.full_like(norms, -1))
            grad = torch.where(supervised, grad, 0).to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[part] = grad @ weight
            if d_weight is not None:
                d_weight += grad.T @ rows
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, outer: Tensor):
        d_hidden, d_weight = ctx.saved_tensors
        return (
            None if d_hidden is None else (d_hidden * outer).to(d_hidden.dtype),
            None if d_weight is None else (d_weight * outer).to(ctx.dtype),
            None,
            None,
            None,
        )
