"""Mamba's kernels (`mamba_ssm`'s `mamba_chunk_scan_combined`, `causal_conv1d_fn`): where a state begins anew.

They take `seq_idx`, int32 `[batch, tokens]`, over the tokens that they see: padding belongs to its slot and filler has its own.
Under CP Megatron and Automodel give their Mamba layers all tokens of the pack and a share of the heads, and make the ids from
offsets: use these consumers there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packfp8.data.consumers.refusal import refuse_sequence_first, refuse_slab

if TYPE_CHECKING:
    from packfp8.data.batch import PackedBatch


def ssm(batch: PackedBatch) -> dict:
    """Arguments of a Mamba kernel: `seq_idx` `[1, T]` for packed tokens in one row; for rows `[B, S]`, each its own id.

    Raises:
        ConfigError: cp > 1, or the sequence first.
    """
    refuse_slab(batch, "ssm")
    refuse_sequence_first(batch, "ssm")
    return {"seq_idx": batch.seq_idx.unsqueeze(0) if batch.layout == "thd" else batch.seq_idx}
