"""How a batch is handed to a language model: as it is, with its rows one after another, sequence first, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from packfp8.data import PackedBatch
from packfp8.data.batch import SEQUENCE_SHAPED
from packfp8.errors import ConfigError


def handed(batch: PackedBatch, consumer: str, layouts: Sequence[str]) -> PackedBatch:
    """The batch in a layout in which the language model keeps its sequences apart.

    A padded batch goes as it is, else as THD with equal slots, else sequence first. Under SP Transformer Engine never gets
    `bshd`: it gathers along the batch, and attends each half of a row alone, silently (measured, H200, version 2.20.2). A pack
    of one sequence is one padded row: causal attention alone keeps it from the filler after it.

    Args:
        consumer: what reads the batch's metadata.
        layouts: those in which the language model keeps sequences apart.

    Raises:
        ConfigError: it would attend across sequences.
    """
    if batch.layout == "thd":
        if "thd" in layouts:
            return batch
        if batch.slots.sequences <= 1 and "bshd" in layouts and not batch.rule.topology.gathers:
            return replace(batch, **{name: getattr(batch, name)[None] for name in SEQUENCE_SHAPED}, layout="bshd")
        raise _mixed(batch, layouts)
    gathered_along_batch = consumer == "te" and batch.rule.topology.gathers
    if "bshd" in layouts and not gathered_along_batch:
        return batch
    if "thd" in layouts:
        return batch.as_thd()
    if "sbhd" in layouts:
        return batch.as_sbhd()
    raise _mixed(batch, layouts)


def restored(tensor: Tensor, own: PackedBatch, batch: PackedBatch) -> Tensor:
    """`tensor` `[tokens of own..., features]` in the shape of `batch`, from which `own` was handed over."""
    if own.layout == "sbhd":
        tensor = tensor.transpose(0, 1)
    return tensor.reshape(*batch.input_ids.shape, tensor.shape[-1])


def _mixed(batch: PackedBatch, layouts: Sequence[str]) -> ConfigError:
    sp = ", with SP" if batch.rule.topology.gathers else ""
    return ConfigError(
        f"the language model would attend across the sequences of {', '.join(batch.ids[:4])}",
        got=f"layout {batch.layout!r} of {batch.slots.sequences} sequences{sp}, for a model of layouts {tuple(layouts)}",
        expected="a model that takes offsets ('thd')" if batch.layout == "thd" or sp else "a model that takes 'bshd'",
        because="nothing would fail: an attention without offsets takes a pack for one sequence, and the loss still falls",
        fix="build the model for THD, or make the batches with align(..., layout='bshd') and no SP",
    )
