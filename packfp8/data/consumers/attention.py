"""Attention: Transformer Engine's DotProductAttention, torch's varlen_attn and FlexAttention.

What Transformer Engine may be told was measured on an H200 (torch 2.11.0+cu130, Transformer Engine 2.20.2, cuDNN 9.19). One
padded `cu_seqlens` for everything is right with cp 1 and 2. Real and padded offsets with `pad_between_seqs=False` are silently
wrong by 25 %. `bshd` under TE's sequence parallelism is gathered along the batch and attended in halves, silently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from packfp8.data.consumers.refusal import refuse_sequence_first, refuse_slab
from packfp8.errors import ConfigError

if TYPE_CHECKING:
    from packfp8.data.batch import PackedBatch


def te(batch: PackedBatch) -> dict:
    """Arguments of `transformer_engine.pytorch.DotProductAttention.forward`.

    Raises:
        ConfigError: a padded batch under SP; it must be handed over as THD with equal slots or sequence first.
    """
    if batch.layout == "thd":
        return {
            "qkv_format": "thd",
            "attn_mask_type": "padding_causal",
            "cu_seqlens_q": batch.cu_seqlens,
            "cu_seqlens_kv": batch.cu_seqlens,
            "max_seqlen_q": batch.max_seqlen,
            "max_seqlen_kv": batch.max_seqlen,
        }
    if batch.layout == "bshd" and batch.rule.topology.gathers:
        raise ConfigError(
            "a padded batch cannot reach Transformer Engine as bshd under SP",
            got=f"layout 'bshd', {batch.rule.topology}",
            expected="THD with equal slots, or sequence first",
            because="TE gathers along the first dimension, which is the batch: each half of a row is attended alone, silently",
            fix="batch.as_thd() or batch.as_sbhd()",
        )
    # rows are padded on the right, so a causal mask alone keeps real tokens from pads; padding masks are refused under CP
    return {"qkv_format": batch.layout, "attn_mask_type": "causal"}


def te_real(batch: PackedBatch) -> dict:
    """Arguments of `DotProductAttention.forward` with real and padded offsets: pads are left out of the attention's work.

    Right with the fused backend, cp 1 and 2, and only with `pad_between_seqs=True`, which is therefore said wherever there is a
    pad. A pack without any has one kind of offsets, and False: True would cost it the backends that know no padding.

    Raises:
        ConfigError: a padded batch, which has no offsets.
    """
    if batch.layout != "thd":
        raise ConfigError(
            "real and padded offsets are of packed batches",
            got=f"layout {batch.layout!r}",
            expected="layout 'thd'",
            because="rows of equal size have no offsets; Transformer Engine reads these only as thd",
            fix="batch.as_thd(), or consumer 'te'",
        )
    if not sum(batch.slots.waste.values()):
        return te(batch) | {"pad_between_seqs": False}
    real, padded = batch.cu_seqlens_real, batch.cu_seqlens
    offsets = {"cu_seqlens_q": real, "cu_seqlens_kv": real, "cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
    return te(batch) | offsets | {"pad_between_seqs": True}


def varlen(batch: PackedBatch) -> dict:
    """Arguments of `torch.nn.attention.varlen.varlen_attn` (torch 2.11 to 2.13) after query, key and value.

    `window_size=(-1, 0)` is its spelling of a causal mask: any distance back, none ahead.

    Raises:
        ConfigError: cp > 1, or a padded batch, which must be flattened first.
    """
    refuse_slab(batch, "varlen")
    if batch.layout != "thd":
        raise ConfigError(
            "varlen_attn takes packed tokens",
            got=f"layout {batch.layout!r}",
            expected="layout 'thd'",
            because="its query is [tokens, heads, head_dim], one sequence after another",
            fix="batch.as_thd(): rows of equal size are slots",
        )
    return {
        "cu_seq_q": batch.cu_seqlens,
        "cu_seq_k": batch.cu_seqlens,
        "max_q": batch.max_seqlen,
        "max_k": batch.max_seqlen,
        "window_size": (-1, 0),
    }


def flex(batch: PackedBatch) -> dict:
    """What FlexAttention needs to keep sequences apart: `document_ids`, `[T]` or `[B, S]`, for `causal_document_mask`.

    Raises:
        ConfigError: cp > 1, or the sequence first.
    """
    refuse_slab(batch, "flex")
    refuse_sequence_first(batch, "flex")
    return {"document_ids": batch.seq_idx}


def causal_document_mask(document_ids: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The `mask_mod` for `torch.nn.attention.flex_attention.create_block_mask`: each document alone, causal within.

    Args:
        document_ids: integers `[T]`, for a packed batch given to attention as one row, or `[B, S]`.
    """
    rows = document_ids if document_ids.dim() == 2 else document_ids.unsqueeze(0)

    def allowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (rows[b, q] == rows[b, kv]) & (q >= kv)

    return allowed
