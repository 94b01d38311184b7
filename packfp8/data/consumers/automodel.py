"""NeMo Automodel (0.7.0): the keyword arguments of its models.

Its attention (`components/attention/utils.py`, `preprocess_args_and_kwargs_for_attn`) reads `cu_seqlens` and the singular
`max_seqlen`. `cu_seqlens_padded` beside them would turn on `pad_between_seqs`, and `max_seqlen_q`/`_kv` beside `cu_seqlens` are
dropped: none of these is given. Under CP its models are told `cp_size` and `cp_rank`, as its own THD split does
(`components/distributed/context_parallel/utils.py`, `_shard_thd_chunk_for_te`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packfp8.data.consumers.refusal import refuse_sequence_first

if TYPE_CHECKING:
    from packfp8.data.batch import PackedBatch


def automodel(batch: PackedBatch) -> dict:
    """Arguments of an Automodel model after `input_ids` or `inputs_embeds`; packed tokens are `[T]`.

    The labels are already shifted: they are for a loss outside the model, as Automodel's recipes have it. A model that is given
    labels would shift them once more.

    Raises:
        ConfigError: the sequence first.
    """
    refuse_sequence_first(batch, "automodel")
    tokens = {"position_ids": batch.position_ids, "labels": batch.labels, "padding_mask": batch.padding_mask}
    if batch.layout == "bshd":  # padded on the right: a causal mask alone keeps real tokens from pads
        return tokens
    topology = batch.rule.topology
    cp = {"cp_size": topology.cp, "cp_rank": topology.cp_rank} if topology.cp > 1 else {}
    return {"qkv_format": "thd", "cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.max_seqlen, **tokens, **cp}
