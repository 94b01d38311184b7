"""Hugging Face transformers (5.18.0): the keyword arguments of a causal language model.

The offsets are its `FlashAttentionKwargs`. Its other attentions find the sequences in position ids that do not go up by one
(`masking_utils.find_packed_sequence_indices`), as ours do not between slots; but not beside an attention mask of ones, nor with
a key-value cache, which a model makes unless told `use_cache=False`. `ForCausalLMLoss` shifts unless it has `shift_labels`, and
is called only where there are `labels`: hence both. Hybrid models hand `seq_idx` to their Mamba or convolution layers; the
fallbacks of these for the CPU ignore it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packfp8.data.consumers.refusal import refuse_sequence_first, refuse_slab

if TYPE_CHECKING:
    from packfp8.data.batch import PackedBatch


def hf(batch: PackedBatch) -> dict:
    """Arguments of a model's forward after `input_ids` or `inputs_embeds`; packed tokens are one row, `[1, T]`.

    Raises:
        ConfigError: cp > 1, or the sequence first.
    """
    refuse_slab(batch, "hf")
    refuse_sequence_first(batch, "hf")
    if batch.layout == "bshd":  # padded on the right: a causal mask alone keeps real tokens from pads
        tokens = {"position_ids": batch.position_ids, "labels": batch.labels, "shift_labels": batch.labels}
        return tokens | {"use_cache": False}
    labels = batch.labels.unsqueeze(0)
    return {
        "use_cache": False,
        "position_ids": batch.position_ids.unsqueeze(0),
        "labels": labels,
        "shift_labels": labels,
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
        "seq_idx": batch.seq_idx.unsqueeze(0),
    }
