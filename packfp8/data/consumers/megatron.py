"""Megatron Core (0.16.1): the keyword arguments of `GPTModel.forward`, with a real `PackedSeqParams`.

Readers disagree on the field: rotary embeddings and Mamba take `cu_seqlens_q_padded` and fall back to `cu_seqlens_q`
(`transformer/attention.py`, `ssm/mamba_mixer.py`), the multimodal split takes the padded one alone
(`models/multimodal/llava_model.py`). All four are therefore one tensor of padded offsets, measured right in Transformer Engine.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from packfp8.data.consumers.refusal import refuse_sequence_first
from packfp8.errors import ConfigError

if TYPE_CHECKING:
    from packfp8.data.batch import PackedBatch


def megatron(batch: PackedBatch) -> dict:
    """Arguments of `GPTModel.forward` after `input_ids`; packed tokens are one row, `[1, T/cp]`.

    Its loss is per token; `loss_mask` says which of them count.

    Raises:
        ConfigError: megatron-core is not installed, or the sequence first.
    """
    refuse_sequence_first(batch, "megatron")
    packed = batch.layout == "thd"
    tokens = {name: getattr(batch, name) for name in ("position_ids", "labels", "loss_mask")}
    if packed:
        tokens = {name: tensor.unsqueeze(0) for name, tensor in tokens.items()}
    return {"attention_mask": None, "packed_seq_params": packed_seq_params(batch) if packed else None, **tokens}


def packed_seq_params(batch: PackedBatch):
    """The installed version's `PackedSeqParams` of a packed batch; `total_tokens` and `seq_idx` where it has them.

    Raises:
        ConfigError: megatron-core is not installed.
    """
    try:
        from megatron.core.packed_seq_params import PackedSeqParams
    except ImportError as error:
        raise ConfigError(
            "consumer 'megatron' needs megatron-core",
            got=f"{type(error).__name__}: {error}",
            expected="an importable megatron.core.packed_seq_params",
            because="the offsets travel in its own PackedSeqParams, whose fields differ between versions",
            fix="pip install 'megatron-core>=0.13,<=0.16.1'",
        ) from error
    offsets = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    known = {
        "qkv_format": "thd",
        **dict.fromkeys(offsets, batch.cu_seqlens),
        "max_seqlen_q": batch.max_seqlen,
        "max_seqlen_kv": batch.max_seqlen,
        "total_tokens": batch.slots.total,  # Mamba under CP sees the whole pack, and makes its ids from this
    }
    if batch.rule.topology.cp == 1:
        known["seq_idx"] = batch.seq_idx.unsqueeze(0)
    names = {field.name for field in fields(PackedSeqParams) if field.init}
    return PackedSeqParams(**{name: value for name, value in known.items() if name in names})
