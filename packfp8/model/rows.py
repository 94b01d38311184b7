"""Rows of features moved by an index, as fast as a copy allows; gradients move back by the same index.

torch's index kernels spend their time on index arithmetic, an element at a time. Where a row divides by 16 bytes it is moved as
16-byte elements: eight times fewer in BF16. Measured on an H200, torch 2.11: 30,000 audio frames into 42,000 tokens of 2688
features in BF16 take 0.33 ms for 0.47; the bare copy of the result takes 0.12.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_FEW_ELEMENTS = 1 << 25
"""Below this the host's launches take the time, not the device, and torch's own function is the quickest (the same machine)."""


def taken(rows: Tensor, index: Tensor) -> Tensor:
    """`rows[index]` `[n, features]`; no row may be named twice."""
    if index.numel() * rows.shape[1] < _FEW_ELEMENTS:
        return rows.index_select(0, index)
    return _Taken.apply(rows, index)


def placed(base: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """`base` `[tokens, features]` with `rows` `[n, features]` at `index` `[n]`; no place may be named twice."""
    if rows.numel() < _FEW_ELEMENTS:
        return base.index_copy(0, index, rows)
    return _Placed.apply(base, rows, index)


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = rows.shape[0]
        return _words(rows).index_select(0, index).view(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        words = _words(grad)
        return words.new_zeros((ctx.count, words.shape[1])).index_copy_(0, index, words).view(grad.dtype), None


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, base: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        base, moved = _words(base), _words(rows)
        if base.dtype != moved.dtype:  # one of them lies where it cannot be read so
            base, moved = base.view(rows.dtype), moved.view(rows.dtype)
        return base.index_copy(0, index, moved).view(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (index,) = ctx.saved_tensors
        words = _words(grad)
        return words.index_fill(0, index, 0).view(grad.dtype), words.index_select(0, index).view(grad.dtype), None


def _words(rows: Tensor) -> Tensor:
    """The same values `[n, features]`, as 16-byte elements where they divide so."""
    rows = rows.contiguous()
    if rows.shape[1] * rows.element_size() % 16 or rows.data_ptr() % 16:
        return rows
    return rows.view(torch.complex128)
