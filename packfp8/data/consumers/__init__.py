"""The metadata of a batch in each consumer's spelling. An adapter renames or drops; it never computes.

    te         Transformer Engine's DotProductAttention, one padded `cu_seqlens`
    te_real    the same with real and padded offsets, for who wants pads left out of the attention's work
    automodel  NeMo Automodel's models              megatron   Megatron Core's models, with a real `PackedSeqParams`
    hf         Hugging Face transformers            ssm        Mamba's kernels
    varlen     torch `varlen_attn`                  flex       torch `flex_attention`
    plain      this project's PlainDecoder

A view (a leading axis of one) is a rename. Every key that any adapter gives is declared below as sequence-shaped or replicated.
The tensors are this CP rank's share already; code that splits batches once more (pipeline chunks, a second split) may cut the
sequence-shaped keys only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from packfp8.data.consumers.attention import flex, te, te_real, varlen
from packfp8.data.consumers.automodel import automodel
from packfp8.data.consumers.hf import hf
from packfp8.data.consumers.megatron import megatron
from packfp8.data.consumers.plain import plain
from packfp8.data.consumers.ssm import ssm

if TYPE_CHECKING:
    from packfp8.data.batch import PackedBatch

CONSUMERS: dict[str, Callable[[PackedBatch], dict]] = {
    "te": te,
    "te_real": te_real,
    "automodel": automodel,
    "megatron": megatron,
    "hf": hf,
    "ssm": ssm,
    "varlen": varlen,
    "flex": flex,
    "plain": plain,
}

SEQUENCE_SHAPED = frozenset(
    {"labels", "shift_labels", "loss_mask", "padding_mask", "position_ids", "seq_idx", "document_ids"},
)
"""Keys with one value for each token of this rank."""

REPLICATED = frozenset(
    {
        *("qkv_format", "attn_mask_type", "attention_mask", "pad_between_seqs", "packed_seq_params"),
        *("cu_seqlens", "max_seqlen", "cp_size", "cp_rank", "window_size", "use_cache"),
        *("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
        *("cu_seq_q", "cu_seq_k", "max_q", "max_k"),
    },
)
"""Keys that are the same on every CP rank but for its number: offsets are of the whole pack and never cut."""

LOSS = frozenset({"labels", "shift_labels", "loss_mask"})
"""Keys from which a model would make a loss of its own; who makes the loss outside leaves them away."""

__all__ = ["CONSUMERS", "LOSS", "REPLICATED", "SEQUENCE_SHAPED"]
