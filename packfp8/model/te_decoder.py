"""TeDecoder: the plain decoder's parameters under Transformer Engine's layers, for THD, BSHD and sequence-first batches.

    our name           Transformer Engine's, within a layer
    attn_norm.weight   qkv.layer_norm_weight      LayerNormLinear
    qkv.weight         qkv.weight
    proj.weight        proj.weight                Linear
    mlp_norm.weight    mlp.layer_norm_weight      LayerNormMLP
    fc1.weight         mlp.fc1_weight
    fc2.weight         mlp.fc2_weight

Everything else has one name in both. It keeps slots apart by their offsets, in the fused attention kernels; rotations begin
anew in every slot.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from packfp8.errors import ConfigError
from packfp8.model import te
from packfp8.model.plain_decoder import DecoderSizes
from packfp8.model.tensor_split import WHOLE, TensorSplit

_NAMES = {
    "qkv.layer_norm_weight": "attn_norm.weight",
    "mlp.layer_norm_weight": "mlp_norm.weight",
    "mlp.fc1_weight": "fc1.weight",
    "mlp.fc2_weight": "fc2.weight",
}
_TOKEN_DIM = {"thd": 0, "bshd": 1, "sbhd": 0}


class TeLayer(nn.Module):
    """One layer: attention and a SwiGLU MLP, each after an RMSNorm and added to what came in. No biases."""

    def __init__(self, sizes: DecoderSizes, split: TensorSplit, **options) -> None:
        super().__init__()
        library, self.split, self.head_dim = te.library(), split, sizes.head_dim
        self.heads = sizes.heads // split.tp, sizes.kv_heads // split.tp, sizes.kv_heads // split.tp
        rows = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        common = {"bias": False, **options, **split.options()}
        norm = {"normalization": "RMSNorm", "eps": sizes.norm_epsilon}
        column, row = ({"parallel_mode": mode} if split.tp > 1 else {} for mode in ("column", "row"))
        self.qkv = library.LayerNormLinear(sizes.hidden, rows, **norm, **column, **common)
        self.attention = library.DotProductAttention(
            sizes.heads,
            sizes.head_dim,
            num_gqa_groups=sizes.kv_heads,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            **split.options(),
        )
        self.proj = library.Linear(sizes.hidden, sizes.hidden, **row, **common)
        self.mlp = library.LayerNormMLP(
            sizes.hidden, sizes.ffn, activation="swiglu", set_parallel_mode=split.tp > 1, **norm, **common
        )

    def forward(self, x: Tensor, rotate, attended: dict, is_first_microbatch: bool | None) -> Tensor:
        self.split.sum_gradients([self.qkv.layer_norm_weight, self.mlp.layer_norm_weight])
        heads = self.qkv(x, is_first_microbatch=is_first_microbatch).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split(self.heads, dim=-2)
        mixed = self.attention(rotate(q), rotate(k), v.contiguous(), **attended)
        x = x + self.proj(mixed, is_first_microbatch=is_first_microbatch)
        return x + self.mlp(x, is_first_microbatch=is_first_microbatch)


class TeDecoder(nn.Module):
    """The decoder. It runs in FP8 within `Fp8.forward_context()`, in the precision of its parameters without.

    Attributes:
        layouts: those in which it keeps the sequences of a batch apart; under SP without "bshd", of which Transformer Engine
            would gather the batch instead of the tokens, silently.
        recompute: whether each layer's activations are computed again in backward, by Transformer Engine's own checkpointing.

    Args:
        dtype: of the parameters.
        tp_group: process group of the TP peers, each of which holds its heads and its part of the FFN; None is no split. The
            peers build their decoders together.
        sp: whether the tokens between the layers are divided among the TP peers. Embeddings come in and hidden states go out
            for the whole slab all the same.

    Raises:
        ConfigError: Transformer Engine cannot run here, or heads and FFN do not divide among the TP peers.
    """

    layouts = ("thd", "bshd", "sbhd")

    def __init__(
        self,
        sizes: DecoderSizes,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        recompute: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        sp: bool = False,
    ) -> None:
        super().__init__()
        te.library()  # before anything is put on a GPU, which may not be there either
        self.sizes, self.recompute, self._cp = sizes, recompute, (1, 0)
        self.split = TensorSplit(group=tp_group, sp=sp) if tp_group is not None else WHOLE
        self.split.check(sizes)
        if self.split.divides_tokens:
            self.layouts = tuple(layout for layout in self.layouts if layout != "bshd")
        plain = {"dtype": dtype, "device": device}
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden, **plain)
        with self.split.drawing(device):
            layers = [TeLayer(sizes, self.split, params_dtype=dtype, device=device) for _ in range(sizes.layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(sizes.hidden, eps=sizes.norm_epsilon, **plain)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False, **plain)
        for weight in (self.embedding.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)
        self.split.make_alike([self.embedding.weight, self.head.weight])

    def load_plain(self, state: Mapping[str, Tensor]) -> TeDecoder:
        """Itself, with the parameters of a plain decoder's `state_dict()`, or this rank's share of them.

        Raises:
            ConfigError: a parameter is missing, is not known, or has another shape.
        """
        own = {plain_name(name): parameter for name, parameter in self.named_parameters()}
        state = {name: self.split.share(name, value, self.sizes) for name, value in state.items()}
        wrong = sorted(own.keys() ^ state.keys()) or sorted(n for n in own if own[n].shape != state[n].shape)
        if wrong:
            raise ConfigError(
                f"parameter {wrong[0]!r} does not fit the decoder",
                got=f"{tuple(state[wrong[0]].shape) if wrong[0] in state else 'nothing'}",
                expected=f"{tuple(own[wrong[0]].shape) if wrong[0] in own else 'no such parameter'}",
                because="both decoders hold the same parameters, and one left as it was drawn would go unnoticed",
                fix="build both from one DecoderSizes",
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(state[name])
        return self

    def split_context(
        self, group: dist.ProcessGroup, *, stream: torch.cuda.Stream | None = None, comm: str = "p2p"
    ) -> TeDecoder:
        """Itself, attending over the slabs of all ranks of the CP `group`."""
        self._cp = (dist.get_world_size(group), dist.get_rank(group))
        stream = stream or torch.cuda.Stream()
        for layer in self.layers:
            layer.attention.set_context_parallel_group(group, dist.get_process_group_ranks(group), stream, comm)
        return self

    @property
    def spans_context(self) -> bool:
        """Whether it attends over the slabs of a CP group."""
        return self._cp[0] > 1

    def embed(self, ids: Tensor) -> Tensor:
        """The embeddings `[..., hidden]` of `ids`."""
        return self.embedding(ids)

    def forward(self, embeddings: Tensor, *, is_first_microbatch: bool | None = None, **attended) -> Tensor:
        """Hidden states, shaped as `embeddings`; `head` makes logits of them.

        Args:
            embeddings: `[T/cp, hidden]`, `[B, S/cp, hidden]` or `[S/cp, B, hidden]`, as `qkv_format` says.
            is_first_microbatch: True on the first micro-batch of an accumulation window, False on the others: the FP8 copies
                of the weights are then made once a window. None makes them anew every time.
            attended: `batch.kwargs("te")`.

        Raises:
            ConfigError: `bshd` under SP.
            LengthError: under SP, tokens that do not divide among the TP peers.
        """
        layout = attended["qkv_format"]
        if layout not in self.layouts:
            raise _gathers_the_batch(layout, self.split)
        rotate = self._rotation(embeddings, layout, attended)
        x = self.split.enter(embeddings)
        for layer in self.layers:
            if self.recompute:
                x = te.checkpoint(layer, x, rotate, attended, is_first_microbatch)
            else:
                x = layer(x, rotate, attended, is_first_microbatch)
        return self.norm(self.split.leave(x))

    def _rotation(self, x: Tensor, layout: str, attended: dict):
        """A function that turns `[..., heads, head_dim]` by each token's place in its slot."""
        cp, cp_rank = self._cp
        longest = attended["max_seqlen_q"] if layout == "thd" else x.shape[_TOKEN_DIM[layout]] * cp
        offsets = attended.get("cu_seqlens_q_padded", attended.get("cu_seqlens_q"))
        angles = te.rotary_angles(longest, self.sizes.head_dim, self.sizes.rope_base, x.device)

        def rotate(t: Tensor) -> Tensor:
            return te.rotated(t, angles, layout, offsets, cp, cp_rank)

        return rotate


def plain_name(name: str) -> str:
    """What the plain decoder calls a parameter of this one."""
    for own, plain in _NAMES.items():
        if name.endswith(own):
            return name.removesuffix(own) + plain
    return name


def _gathers_the_batch(layout: str, split: TensorSplit) -> ConfigError:
    return ConfigError(
        f"a batch cannot reach this decoder as {layout}",
        got=f"qkv_format {layout!r}, tp {split.tp} with SP",
        expected="thd with equal slots, or sbhd",
        because="Transformer Engine gathers along the first dimension, which is the batch: halves of a row are attended alone, "
        "silently (measured: two H200, version 2.20.2)",
        fix="batch.as_thd() or batch.as_sbhd(); PackedModel does so by itself",
    )
