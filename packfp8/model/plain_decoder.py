"""PlainDecoder: a decoder-only transformer in plain torch, which keeps the sequences of a pack apart on any device.

It is the reference that FP8 decoders are compared with: small, exact in float64, and with parameters that a Transformer Engine
decoder can hold as they are.

    embedding.weight           [vocab, hidden]
    layers.N.attn_norm.weight  [hidden]
    layers.N.qkv.weight        [(heads + 2 * kv_heads) * head_dim, hidden]     rows of q, then k, then v
    layers.N.proj.weight       [hidden, heads * head_dim]
    layers.N.mlp_norm.weight   [hidden]
    layers.N.fc1.weight        [2 * ffn, hidden]     SwiGLU: silu(first half) * second half
    layers.N.fc2.weight        [hidden, ffn]
    norm.weight                [hidden]
    head.weight                [vocab, hidden]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packfp8.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """Sizes of a decoder; `head_dim` is `hidden // heads`.

    Args:
        rope_base: 10,000, as in Su et al. 2021 (arXiv 2104.09864) and in Transformer Engine's RotaryPositionEmbedding.
        norm_epsilon: 1e-5, Transformer Engine's default for its layers.

    Raises:
        ConfigError: a size below 1, heads that do not divide, or a head of an odd number of features.
    """

    vocab: int
    hidden: int = 128
    ffn: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "ffn", "layers", "heads", "kv_heads"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
                raise ConfigError(
                    f"{name} of the decoder is no size",
                    got=repr(size),
                    expected="a whole number of at least 1",
                    because="a part of no features or no layers computes nothing, and would train without a word",
                    fix=f"give {name} as a positive int",
                )
        if self.hidden % self.heads or self.heads % self.kv_heads or self.head_dim % 2:
            raise ConfigError(
                "the heads of the decoder do not divide its features",
                got=f"hidden {self.hidden}, heads {self.heads}, kv_heads {self.kv_heads}",
                expected="hidden a multiple of 2 * heads, heads a multiple of kv_heads",
                because="each head takes an equal share, and a rotation turns pairs of features",
                fix="choose hidden = heads * head_dim with an even head_dim",
            )

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads


def own(tensor: Tensor, dim: int) -> Tensor:
    """The tensor itself: without context parallelism a rank's own keys are all keys."""
    return tensor


def visible(q_seq: Tensor, q_pos: Tensor, k_seq: Tensor, k_pos: Tensor) -> Tensor:
    """bool `[..., queries, keys]`: a query sees the keys of its own slot up to its own position.

    Every query sees itself, so no row is empty (a softmax over nothing is NaN). Slots and positions are of the whole pack, so
    that the queries of one CP rank can be held against the keys of all.
    """
    return (q_seq[..., :, None] == k_seq[..., None, :]) & (q_pos[..., :, None] >= k_pos[..., None, :])


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention `[..., queries, heads, head_dim]` of q over k and v `[..., keys, kv_heads, head_dim]` where `mask` allows."""
    groups = q.shape[-2] // k.shape[-2]
    k, v = (x.repeat_interleave(groups, dim=-2) if groups > 1 else x for x in (k, v))
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
    if packed := q.dim() == 3:  # the fused kernels want a batch
        q, k, v, mask = (x.unsqueeze(0) for x in (q, k, v, mask))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(-3)).transpose(-2, -3)
    return out.squeeze(0) if packed else out


def rotations(position_ids: Tensor, sizes: DecoderSizes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[..., tokens, 1, head_dim]` of each token's rotation; the halves of a head turn together."""
    exact = torch.promote_types(dtype, torch.float32)
    pairs = torch.arange(0, sizes.head_dim, 2, device=position_ids.device, dtype=exact)
    angles = position_ids[..., None].to(exact) * sizes.rope_base ** (-pairs / sizes.head_dim)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` `[..., tokens, heads, head_dim]` turned by each token's position."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class PlainLayer(nn.Module):
    """One layer: attention and a SwiGLU MLP, each after an RMSNorm and added to what came in. No biases."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.sizes = sizes
        rows = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        self.attn_norm = nn.RMSNorm(sizes.hidden, eps=sizes.norm_epsilon)
        self.qkv = nn.Linear(sizes.hidden, rows, bias=False)
        self.proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(sizes.hidden, eps=sizes.norm_epsilon)
        self.fc1 = nn.Linear(sizes.hidden, 2 * sizes.ffn, bias=False)
        self.fc2 = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor, gather: Callable[[Tensor, int], Tensor]) -> Tensor:
        sizes = self.sizes
        heads = self.qkv(self.attn_norm(x)).unflatten(-1, (-1, sizes.head_dim))
        q, k, v = heads.split((sizes.heads, sizes.kv_heads, sizes.kv_heads), dim=-2)
        k, v = gather(rotated(k, *turn), -3), gather(v, -3)
        x = x + self.proj(attend(rotated(q, *turn), k, v, mask).flatten(-2))
        gate, up = self.fc1(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.fc2(F.silu(gate) * up)


class PlainDecoder(nn.Module):
    """The decoder. Tokens are `[T]` (THD) or `[B, S]` (BSHD) alike; each slot is attended alone.

    Attributes:
        layouts: those in which it keeps the sequences of a batch apart.
        gather: (tensor, token dimension) -> the tensors of all CP ranks, in rank order, joined along it. Set it to a
            differentiable gather over the CP group where cp > 1.
    """

    consumer = "plain"
    layouts = ("thd", "bshd")

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(PlainLayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=sizes.norm_epsilon)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.gather: Callable[[Tensor, int], Tensor] = own
        # Small enough that the first logits are near zero: the loss begins at log(vocab), so that a wrong sum shows.
        for weight in (self.embedding.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    @property
    def spans_context(self) -> bool:
        """Whether it attends over the slabs of a CP group."""
        return self.gather is not own

    def embed(self, ids: Tensor) -> Tensor:
        """The embeddings `[..., hidden]` of `ids`."""
        return self.embedding(ids)

    def forward(self, embeddings: Tensor, *, position_ids: Tensor, seq_idx: Tensor) -> Tensor:
        """Hidden states, shaped as `embeddings` `[..., tokens, hidden]`; `head` makes logits of them."""
        gather = self.gather
        mask = visible(seq_idx, position_ids, gather(seq_idx, -1), gather(position_ids, -1))
        turn = rotations(position_ids, self.sizes, embeddings.dtype)
        x = embeddings
        for layer in self.layers:
            x = layer(x, turn, mask, gather)
        return self.norm(x)
