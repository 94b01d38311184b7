"""Transformer Engine's layers in plain torch, tensor and context parallel over gloo, where there is no GPU: `install()`.

They hold parameters under that library's names, in its shapes, and communicate where it does: a column-parallel layer gathers
along the first dimension under SP, a row-parallel one reduces and scatters along it. So a batch that reaches them as bshd under
SP is gathered along the batch, as there.
"""

import importlib.machinery
import sys
from contextlib import nullcontext
from types import ModuleType

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from packfp8.layout import cp_index
from packfp8.model.gather import GatherOverRanks
from packfp8.model.plain_decoder import attend, visible


class _SumBackward(torch.autograd.Function):
    """Itself forward; gradients are summed over the group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _ReduceScatter(torch.autograd.Function):
    """This rank's rows of the sum; backward gathers."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.clone()
        dist.all_reduce(x, group=group)
        return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class _Layer(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.group, self.tp = options.get("tp_group"), options.get("tp_size", 1)
        self.sp = options.get("sequence_parallel", False) and self.tp > 1
        self.make = {"dtype": options["params_dtype"], "device": options["device"]}

    def parameter(self, *shape):
        return nn.Parameter(torch.randn(*shape, **self.make) / shape[-1] ** 0.5)

    def column(self, x):
        if self.tp == 1:
            return x
        return GatherOverRanks(self.group)(x, 0) if self.sp else _SumBackward.apply(x, self.group)

    def row(self, x):
        if self.tp == 1:
            return x
        return (_ReduceScatter if self.sp else _SumForward).apply(x, self.group)


class LayerNormLinear(_Layer):
    def __init__(self, inputs, outputs, *, eps, parallel_mode=None, **options):
        super().__init__(options)
        assert (parallel_mode == "column") == (self.tp > 1)
        self.eps, self.layer_norm_weight = eps, nn.Parameter(torch.ones(inputs, **self.make))
        self.weight = self.parameter(outputs // self.tp, inputs)

    def forward(self, x, is_first_microbatch=None):
        return self.column(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps)) @ self.weight.T


class Linear(_Layer):
    def __init__(self, inputs, outputs, *, parallel_mode=None, **options):
        super().__init__(options)
        assert (parallel_mode == "row") == (self.tp > 1)
        self.weight = self.parameter(outputs, inputs // self.tp)

    def forward(self, x, is_first_microbatch=None):
        return self.row(x @ self.weight.T)


class LayerNormMLP(_Layer):
    def __init__(self, hidden, ffn, *, eps, set_parallel_mode=False, **options):
        super().__init__(options)
        assert set_parallel_mode == (self.tp > 1)
        self.eps, self.layer_norm_weight = eps, nn.Parameter(torch.ones(hidden, **self.make))
        self.fc1_weight = self.parameter(2 * ffn // self.tp, hidden)
        self.fc2_weight = self.parameter(hidden, ffn // self.tp)

    def forward(self, x, is_first_microbatch=None):
        x = self.column(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps))
        gate, up = (x @ self.fc1_weight.T).chunk(2, dim=-1)
        return self.row((F.silu(gate) * up) @ self.fc2_weight.T)


def places(tokens, layout, offsets, cp, rank):
    """Slot and position of every token of this rank, of the tokens' shape `[tokens...]`."""
    if layout == "thd":
        index = torch.from_numpy(cp_index(offsets.numpy().astype("int64"), cp, rank))
        slot = torch.searchsorted(offsets.to(torch.int64), index, right=True) - 1
        return slot, index - offsets[slot]
    if layout == "sbhd":
        return tuple(x.T for x in places((tokens[1], tokens[0]), "bshd", None, cp, rank))
    position = torch.from_numpy(cp_index(torch.tensor([0, tokens[1] * cp]).numpy(), cp, rank)).expand(tokens)
    return torch.arange(tokens[0])[:, None].expand(tokens), position


class DotProductAttention(nn.Module):
    def __init__(self, heads, width, *, num_gqa_groups, tp_size=1, **_):
        super().__init__()
        self.heads, self.cp = heads // tp_size, (1, 0)

    def set_context_parallel_group(self, group, ranks, stream, how):
        self.cp, self.gather = (dist.get_world_size(group), dist.get_rank(group)), GatherOverRanks(group)

    def forward(self, q, k, v, *, qkv_format, cu_seqlens_q=None, **_):
        assert q.shape[-2] == self.heads
        slot, position = places(q.shape[:-2], qkv_format, cu_seqlens_q, *self.cp)
        if qkv_format == "sbhd":
            q, k, v, slot, position = (x.transpose(0, 1) for x in (q, k, v, slot, position))
        dim = 0 if qkv_format == "thd" else 1
        gather = self.gather if self.cp[0] > 1 else lambda x, _: x
        k, v, k_slot, k_position = (gather(x.contiguous(), dim) for x in (k, v, slot, position))
        out = attend(q, k, v, visible(slot, position, k_slot, k_position)).flatten(-2)
        return out.transpose(0, 1) if qkv_format == "sbhd" else out


def apply_rotary_pos_emb(t, angles, *, tensor_format, fused, cu_seqlens, cp_size, cp_rank):
    _, position = places(t.shape[:-2], tensor_format, cu_seqlens, cp_size, cp_rank)
    turn = angles[position].flatten(-3, -2).to(t.dtype)
    left, right = t.chunk(2, dim=-1)
    return t * turn.cos() + torch.cat((-right, left), dim=-1) * turn.sin()


def install():
    """Puts the layers in the library's place, in this process."""
    torch.cuda.is_available = lambda: True
    layers = {c.__name__: c for c in (LayerNormLinear, Linear, LayerNormMLP, DotProductAttention)}
    run = {"checkpoint": torch.utils.checkpoint.checkpoint, "autocast": lambda **_: nullcontext()}
    homes = {
        "transformer_engine": {},
        "transformer_engine.pytorch": layers | run,
        "transformer_engine.pytorch.attention": {},
        "transformer_engine.pytorch.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
    }
    for name, content in homes.items():
        module = ModuleType(name)
        module.__dict__.update(content, __spec__=importlib.machinery.ModuleSpec(name, None))
        sys.modules[name] = module
