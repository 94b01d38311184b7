"""Packed attention through Transformer Engine equals each sequence alone, in float32: forward and all three gradients."""

import pytest
import torch
from torch.nn import functional as F

from packfp8 import Topology, align
from packfp8.layout import place
from packfp8.model import te

pytestmark = pytest.mark.gpu

LENGTHS = (37, 5, 1, 120, 64, 1, 1, 250)
HEADS, GROUPS, WIDTH = 8, 4, 64


def _alone(q, k, v, grad, slots):
    """Output and gradients of real rows, each sequence by itself in float32; zero at pads."""
    out, grads = torch.zeros_like(q, dtype=torch.float32), [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for start, length in zip(slots.offsets[:-1].tolist(), slots.lengths.tolist()):
        if length:
            rows = slice(start, start + length)
            parts = [x[rows].float().requires_grad_() for x in (q, k, v)]
            qs, ks, vs = (x.transpose(0, 1) for x in (parts[0], *(x.repeat_interleave(HEADS // GROUPS, 1) for x in parts[1:])))
            y = F.scaled_dot_product_attention(qs, ks, vs, is_causal=True).transpose(0, 1)
            y.backward(grad[rows].float())
            out[rows] = y.detach()
            for whole, part in zip(grads, parts):
                whole[rows] = part.grad
    return out, *grads


@pytest.mark.parametrize("repeated", [0, 3], ids=lambda n: f"{n} repeated offsets")
@pytest.mark.parametrize("filler", [0, 59, 700], ids=lambda n: f"filler {n}")
@pytest.mark.parametrize("cp", [1, 2], ids=lambda n: f"slots of cp {n}")
def test_packed_attention_equals_each_sequence_alone(distance, cp, filler, repeated):
    torch.manual_seed(filler + repeated)
    rule = align("bf16", Topology(cp=cp))
    used = sum(map(rule.slot, LENGTHS))
    slots = place(LENGTHS, rule, total=rule.pack(used + filler))
    offsets = torch.tensor([*slots.offsets.tolist(), *[slots.total] * repeated], dtype=torch.int32, device="cuda")
    real = torch.zeros(slots.total, dtype=torch.bool, device="cuda")
    real[torch.from_numpy(slots.real().copy()).cuda()] = True
    q, k, v = (
        torch.where(real[:, None, None], torch.randn(slots.total, n, WIDTH, device="cuda"), 1e4).bfloat16().requires_grad_()
        for n in (HEADS, GROUPS, GROUPS)
    )
    grad = torch.where(real[:, None, None], torch.randn(slots.total, HEADS, WIDTH, device="cuda"), 0).bfloat16()
    attention = te.library().DotProductAttention(HEADS, WIDTH, num_gqa_groups=GROUPS, qkv_format="thd")
    out = attention(
        q,
        k,
        v,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=slots.total,
        max_seqlen_kv=slots.total,
    ).reshape(slots.total, HEADS, WIDTH)
    out.backward(grad)
    expected = _alone(q.detach(), k.detach(), v.detach(), grad, slots)
    found = out.detach(), q.grad, k.grad, v.grad
    errors = [distance(a[real], b[real]) for a, b in zip(found, expected)]
    print(f"\ncp {cp} filler {filler} repeated {repeated}: output, dq, dk, dv " + " ".join(f"{e:.2e}" for e in errors), end="")
    assert max(errors) < 1e-2  # BF16: 2^-8 an element
    assert all(e > 0 for e in errors)
    one_token = [start for start, n in zip(slots.offsets.tolist(), slots.lengths.tolist()) if n == 1]
    rows = torch.tensor(one_token, device="cuda")
    assert distance(out.detach()[rows], v.detach()[rows].repeat_interleave(HEADS // GROUPS, 1)) < 1e-2
