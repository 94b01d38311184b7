"""The metadata of a batch in each consumer's spelling. An adapter renames or drops; it never computes.

What Transformer Engine may be told was measured on an H200 (torch 2.11.0+cu130, Transformer Engine 2.20.2, cuDNN 9.19). One
padded `cu_seqlens` for everything is right with cp 1 and 2. Real and padded offsets with `pad_between_seqs=False` are silently
wrong by 25 %. `bshd` under TE's sequence parallelism is gathered along the batch and attended in halves, silently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

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


CONSUMERS: dict[str, Callable[[PackedBatch], dict]] = {"te": te}
