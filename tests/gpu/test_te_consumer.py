"""What the consumers are told, through their own kernels on a GPU: packed equals one by one, forward and gradients.

Context parallelism over two GPUs: `torchrun --nproc-per-node 2 tests/gpu/te_consumer_cp.py`.
"""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from packfp8 import ConfigError, Topology, align
from packfp8.data import Example, Turn
from packfp8.data.consumers.attention import causal_document_mask
from packfp8.model import PackedModel, te
from packfp8.model.te_decoder import TeDecoder

pytestmark = pytest.mark.gpu

HEADS, GROUPS, WIDTH = 8, 4, 64
BF16 = 1e-2
TEXTS = [Example(id=f"t{n}", turns=(Turn("assistant", ("word " * (n + 1),)),)) for n in range(6)]


def inputs(batch):
    """q, k, v and the gradient of the output, in the batch's layout; large garbage at pads, no gradient from there."""
    torch.manual_seed(0)
    shape, real = tuple(batch.input_ids.shape), ~batch.padding_mask[..., None, None]
    q, k, v = (
        torch.where(real, torch.randn(*shape, n, WIDTH, device="cuda"), 1e3).bfloat16().requires_grad_()
        for n in (HEADS, GROUPS, GROUPS)
    )
    return q, k, v, torch.where(real, torch.randn(*shape, HEADS, WIDTH, device="cuda"), 0).bfloat16()


def alone(q, k, v, grad):
    """Output and gradients of one sequence `[tokens, heads, width]` in float32."""
    parts = [x.detach().float().requires_grad_() for x in (q, k, v)]
    qs, ks, vs = (x.repeat_interleave(HEADS // x.shape[1], 1).transpose(0, 1) for x in parts)
    out = F.scaled_dot_product_attention(qs, ks, vs, is_causal=True).transpose(0, 1)
    out.backward(grad.float())
    return [out.detach(), *(x.grad for x in parts)]


def errors(batch, found, q, k, v, grad, distance):
    """Of the output and of each gradient: the distance of all real rows from those of each sequence alone."""
    whole = [batch.unpack(x.detach()) for x in (q, k, v, grad)]
    expected = [alone(*(x[name] for x in whole)) for name in batch.ids]
    found = [batch.unpack(x.detach()) for x in found]
    return [
        distance(torch.cat([x[name] for name in batch.ids]), torch.cat([sequence[n] for sequence in expected]))
        for n, x in enumerate(found)
    ]


LAYOUTS = {
    "thd": lambda collate: collate(align("block", Topology())),
    "static": lambda collate: collate(align("block"), budget=2048, static=True, max_sequences=40, frame_budget=2048),
    "bshd": lambda collate: collate(align("block", Topology(), layout="bshd")),
    "rows as slots": lambda collate: collate(align("block", Topology(tp=2, sp=True), layout="bshd")).as_thd(),
    "sequence first": lambda collate: collate(align("block", Topology(tp=2, sp=True), layout="bshd")).as_sbhd(),
}


@pytest.mark.parametrize("consumer", ["te", "te_real"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transformer_engine_packed_equals_one_by_one(consumer, layout, collate, distance):
    batch = LAYOUTS[layout](collate)
    if consumer == "te_real" and batch.layout != "thd":
        pytest.skip("real and padded offsets are of packed batches")
    q, k, v, grad = inputs(batch)
    attention = te.library().DotProductAttention(HEADS, WIDTH, num_gqa_groups=GROUPS)
    out = attention(q, k, v, **batch.kwargs(consumer)).reshape(q.shape)
    out.backward(grad)
    found = errors(batch, (out, q.grad, k.grad, v.grad), q, k, v, grad, distance)
    print(f"\n{consumer}, {layout}: output, dq, dk, dv " + " ".join(f"{e:.2e}" for e in found), end="")
    assert max(found) < BF16


def test_varlen_attn_packed_equals_one_by_one(collate, distance):
    from torch.nn.attention.varlen import varlen_attn

    batch = collate(align("block", Topology()))
    q, k, v, grad = inputs(batch)
    wide = [x.repeat_interleave(HEADS // x.shape[1], 1) for x in (q, k, v)]
    out = varlen_attn(*wide, **batch.kwargs("varlen"))
    out.backward(grad)
    found = errors(batch, (out, q.grad, k.grad, v.grad), q, k, v, grad, distance)
    assert max(found) < BF16


def test_compiled_flex_attention_packed_equals_one_by_one(collate, distance):
    batch = collate(align("block", Topology()))
    q, k, v, grad = inputs(batch)
    mask_mod = causal_document_mask(**batch.kwargs("flex"))
    mask = create_block_mask(mask_mod, B=None, H=None, Q_LEN=batch.tokens, KV_LEN=batch.tokens, device="cuda")
    rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out = torch.compile(flex_attention)(*rows, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)
    out.backward(grad)
    found = errors(batch, (out, q.grad, k.grad, v.grad), q, k, v, grad, distance)
    assert max(found) < BF16


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_the_te_decoder_is_proved_to_keep_sequences_apart_to_the_last_bit(layout, collate, plain_state, sizes):
    rule = align("block", Topology(), layout=layout)
    model = PackedModel(encoder=None, projector=None, llm=TeDecoder(sizes).load_plain(plain_state), rule=rule)
    model.prove_isolation(collate(rule, TEXTS))


def test_a_te_decoder_that_loses_its_offsets_is_caught(collate, plain_state, sizes, monkeypatch):
    rule = align("block", Topology())
    batch = collate(rule, TEXTS)
    llm = TeDecoder(sizes).load_plain(plain_state)
    forward = llm.forward

    def joined(x, **kwargs):
        ends = torch.tensor([0, batch.slots.total], dtype=torch.int32, device="cuda")
        told = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": len(x), "max_seqlen_kv": len(x)}
        return forward(x, **{**kwargs, **told})

    monkeypatch.setattr(llm, "forward", joined)
    with pytest.raises(ConfigError, match="ignores cu_seqlens_q, cu_seqlens_kv"):
        PackedModel(encoder=None, projector=None, llm=llm, rule=rule).prove_isolation(batch)
