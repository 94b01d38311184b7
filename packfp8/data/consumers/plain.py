"""`packfp8.model.plain_decoder.PlainDecoder`: attention by a mask, from which slot a token is of and where in it it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packfp8.data.consumers.refusal import refuse_sequence_first

if TYPE_CHECKING:
    from packfp8.data.batch import PackedBatch


def plain(batch: PackedBatch) -> dict:
    """Arguments of its forward after the embeddings, shaped as the tokens. With cp > 1 it gathers both over the CP ranks.

    Raises:
        ConfigError: the sequence first.
    """
    refuse_sequence_first(batch, "plain")
    return {"position_ids": batch.position_ids, "seq_idx": batch.seq_idx}
