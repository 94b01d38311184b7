"""Whether 32-bit indices reach every value of a pack: a warning where a kernel that uses them would wrap around."""

from __future__ import annotations

import warnings

from torch import nn

from packfp8.data import PackedBatch

LIMIT = 2**31
"""Values that int32 can count. Attention and normalisation kernels that multiply a row by its stride in int32 read other
memory beyond it, or corrupt it silently (Dao-AILab/flash-attention#2611, #1311)."""


def widest_row(llm: nn.Module) -> int:
    """Values of the widest row that a linear layer of `llm` makes of a token; embedding and head left out.

    The head's logits are made in chunks, and never of a whole pack.
    """
    head = getattr(llm, "head", None)
    apart = {id(getattr(head, "weight", None)), *(id(m.weight) for m in llm.modules() if isinstance(m, nn.Embedding))}
    return max((weight.shape[0] for weight in llm.parameters() if weight.dim() == 2 and id(weight) not in apart), default=0)


def warn_if_wrapping(batch: PackedBatch, row_values: int) -> None:
    """Warns where the rows of this rank's tokens, `row_values` wide, hold 2^31 values or more; costs no synchronisation."""
    if batch.tokens * row_values >= LIMIT:
        warnings.warn(
            f"{batch.tokens} tokens with rows of {row_values} values are {batch.tokens * row_values} values, 2^31 or more: "
            "kernels that index in 32 bits would wrap around silently; lower the budget, or raise cp or tp",
            RuntimeWarning,
            stacklevel=3,
        )
