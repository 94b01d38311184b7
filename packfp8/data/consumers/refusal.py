"""Refusals that several adapters share: a layout or a split that the consumer would read wrongly, without a word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packfp8.errors import ConfigError

if TYPE_CHECKING:
    from packfp8.data.batch import PackedBatch


def refuse_sequence_first(batch: PackedBatch, consumer: str) -> None:
    """Nothing, unless the sequence stands first.

    Raises:
        ConfigError: it does; only Transformer Engine reads that.
    """
    if batch.layout == "sbhd":
        raise ConfigError(
            f"consumer {consumer!r} does not take the sequence first",
            got="layout 'sbhd'",
            expected="layout 'thd' or 'bshd'",
            because="it would read the tokens of one position as one sequence",
            fix="pass the batch as the collator made it, or batch.as_thd()",
        )


def refuse_slab(batch: PackedBatch, consumer: str) -> None:
    """Nothing, unless this rank holds only a share of each sequence.

    Raises:
        ConfigError: cp > 1, and the consumer knows no other rank.
    """
    topology = batch.rule.topology
    if topology.cp > 1:
        raise ConfigError(
            f"consumer {consumer!r} knows no context parallelism",
            got=f"cp {topology.cp}",
            expected="cp 1",
            because="a rank holds two chunks of every slot; the offsets are of the whole pack, and a kernel that sees one rank "
            "alone would attend, or scan, across the gap",
            fix="use 'te', 'automodel' or 'megatron' under CP, or Topology(cp=1)",
        )
