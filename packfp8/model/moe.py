"""Mixture of experts for packs: pads are sent to no expert, and count in no statistic.

    x [tokens, hidden] --router--> top k of E experts --sort by expert--> rows | e0 | e1 | (no row) | e3 | --experts--> back

The number of rows of each expert is asked of the device once a layer, as expert kernels want it on the host: this is the one
place between batch and loss that waits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packfp8.model import te


class MoeOutput(NamedTuple):
    """What a mixture gives.

    Attributes:
        output: shaped as the input, zero at pads.
        balance_loss: a scalar, 1 where the load is even: E * sum over experts of (share of the choices) * (mean probability),
            over real tokens (Fedus et al. 2021, arXiv 2101.03961, equation 4).
        load: int64 `[experts]`, choices of each expert by real tokens.
    """

    output: Tensor
    balance_loss: Tensor
    load: Tensor


class Moe(nn.Module):
    """A router over experts.

    Args:
        experts: `PlainExperts` or `TeExperts`.
        chosen: experts that each token is sent to.
    """

    def __init__(self, experts: nn.Module, *, hidden: int, chosen: int = 2, device=None) -> None:
        super().__init__()
        self.experts, self.chosen = experts, chosen
        # in float32: a choice between close experts must not hang on the rounding of a score
        self.router = nn.Linear(hidden, experts.count, bias=False, dtype=torch.float32, device=device)

    def forward(self, x: Tensor, padding_mask: Tensor) -> MoeOutput:
        """The mixture of `x` `[..., hidden]`, where `padding_mask` `[...]` is True at pads."""
        shape, x, pads = x.shape, x.flatten(0, -2), padding_mask.flatten()
        x = torch.where(pads[:, None], 0, x)  # what stands in a pad, NaN too, reaches nothing
        scores = self.router(x.float()).softmax(-1)
        gates, choices = scores.topk(self.chosen)
        gates = (gates / gates.sum(-1, keepdim=True)).to(x.dtype)
        nobody = self.experts.count
        choices = torch.where(pads[:, None], nobody, choices).flatten()
        counts = torch.zeros(nobody + 1, dtype=torch.int64, device=x.device).scatter_add_(0, choices, torch.ones_like(choices))
        load = counts[:nobody]
        splits = load.tolist()
        if not any(splits):
            splits[0] = 1  # a pack of filler: one row of zeros keeps the experts' weights in the graph
        order = choices.argsort(stable=True)[: sum(splits)]
        rows = self.experts(x.index_select(0, order // self.chosen), splits)
        placed = x.new_zeros(choices.numel(), x.shape[-1]).index_copy(0, order, rows).unflatten(0, (-1, self.chosen))
        gates = torch.where(pads[:, None], 0, gates)
        return MoeOutput((placed * gates[..., None]).sum(1).reshape(shape), self._balance(scores, load, pads), load)

    def _balance(self, scores: Tensor, load: Tensor, pads: Tensor) -> Tensor:
        tokens = (~pads).sum().clamp(min=1)
        probability = torch.where(pads[:, None], 0, scores).sum(0) / tokens
        return self.experts.count * (load / (tokens * self.chosen) * probability).sum()


class PlainExperts(nn.Module):
    """SwiGLU experts in plain torch, one after another: the reference. Weights `[experts, out, in]`."""

    def __init__(self, *, count: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.count = count
        self.fc1 = nn.Parameter(torch.randn(count, 2 * ffn, hidden) * hidden**-0.5)
        self.fc2 = nn.Parameter(torch.randn(count, hidden, ffn) * ffn**-0.5)

    def forward(self, rows: Tensor, splits: list[int]) -> Tensor:
        """`[rows, hidden]`: each expert's output for its rows, `splits[n]` of expert n after those of the experts before."""
        parts = zip(rows.split(splits), self.fc1, self.fc2, strict=True)
        return torch.cat([_swiglu(part @ fc1.T) @ fc2.T for part, fc1, fc2 in parts])


class TeExperts(nn.Module):
    """The same experts in one grouped GEMM a projection, by Transformer Engine.

    In FP8 each expert's rows are filled up to what the recipe's GEMMs take, by Transformer Engine's own padding; the number of
    rows of an expert is nothing that the batch could have rounded beforehand.
    """

    def __init__(self, *, count: int, hidden: int, ffn: int, dtype: torch.dtype = torch.bfloat16, device="cuda") -> None:
        super().__init__()
        library, self.count = te.library(), count
        common = {"bias": False, "params_dtype": dtype, "device": device}
        self.fc1 = library.GroupedLinear(count, hidden, 2 * ffn, **common)
        self.fc2 = library.GroupedLinear(count, ffn, hidden, **common)
        self.fill, self.unfill = library.Fp8Padding(count), library.Fp8Unpadding(count)

    def load_plain(self, experts: PlainExperts) -> TeExperts:
        """Itself, with the weights of plain experts."""
        with torch.no_grad():
            for ours, theirs in ((self.fc1, experts.fc1), (self.fc2, experts.fc2)):
                for number in range(self.count):
                    getattr(ours, f"weight{number}").copy_(theirs[number])
        return self

    def forward(self, rows: Tensor, splits: list[int]) -> Tensor:
        """`[rows, hidden]`, as `PlainExperts` gives."""
        filled = splits
        quantising = te.is_quantising()
        if quantising:
            rows, filled = self.fill(rows, splits)
        out = self.fc2(_swiglu(self.fc1(rows, filled)), filled)
        return self.unfill(out, splits) if quantising else out


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
