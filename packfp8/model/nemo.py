"""NeMo Speech (nemo-toolkit 3.0.0): a pack in the place of what `SALMAutomodel.prepare_inputs` makes of a batch.

    class PackedSALM(SALMAutomodel):
        def prepare_inputs(self, batch):
            return salm_inputs(self, batch["pack"], shortest_samples=measure.frames.shortest_samples)

    loader = DataLoader(dataset, collate_fn=SalmCollator(collator=collator), ...)

Everything after it, loss and logging included, is SALM's own. Its packing is not needed then: no loop over utterances, no wait
for the device, and totals that the FP8 recipe, context and sequence parallelism accept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from packfp8.data import Collator, PackedBatch
from packfp8.data.consumers import LOSS
from packfp8.errors import ConfigError
from packfp8.model.encoder_share import alone
from packfp8.model.splice import check_encoder_lens, splice


@dataclass(frozen=True, slots=True, kw_only=True)
class SalmCollator:
    """A `collate_fn` whose batches SALM's training step can log: `{"pack": PackedBatch, "input_ids": ...}`.

    Its step counts the tokens of `batch["input_ids"]` beside what `prepare_inputs` returns; so these are the pack's.
    """

    collator: Collator

    def __call__(self, items: Iterable) -> dict:
        """The batch of `items`.

        Raises:
            what the collator raises.
        """
        pack = self.collator(items)
        return {"pack": pack, "input_ids": pack.input_ids}


def salm_inputs(
    model, batch: PackedBatch, *, shortest_samples: int, exchange: Callable[[Tensor, PackedBatch], Tensor] = alone
) -> dict:
    """What `prepare_inputs` returns: `input_embeds` (THD `[T/cp, hidden]`, BSHD `[B, S, hidden]`), `attention_mask` (None),
    `target_ids`, already shifted, and `llm_kwargs`.

    Args:
        model: a `SALMAutomodel`, or anything with its `perception` and `_embed_tokens`.
        batch: on the model's device.
        shortest_samples: length of the silence that a rank without audio encodes, so that FSDP gathers on every rank.
        exchange: `FrameExchange(cp_group)` where CP ranks share the encoder; else each encodes the clips that it holds.

    Raises:
        ConfigError: a padded batch under CP, which SALM cannot run.
        LengthError: perception gave fewer frames than were placed.
    """
    if batch.layout != "thd" and batch.rule.topology.cp > 1:
        raise ConfigError(
            "SALM cannot run a padded batch under context parallelism",
            got=f"layout {batch.layout!r}, cp {batch.rule.topology.cp}",
            expected="layout 'thd', or cp 1",
            because="its rows would be attended by their shares alone (validate_parallelism_compatibility refuses it too)",
            fix="align(..., layout='thd')",
        )
    audio, lens = batch.audio, batch.audio_lens
    if not audio.shape[0]:
        audio = audio.new_zeros((1, shortest_samples))
        lens = torch.full((1,), shortest_samples, dtype=lens.dtype, device=lens.device)
    frames, frame_lens = model.perception(input_signal=audio, input_signal_length=lens)
    check_encoder_lens(frame_lens, batch)
    given = batch.kwargs("automodel")
    return {
        "input_embeds": splice(model._embed_tokens(batch.input_ids), frames, batch, exchange),
        "attention_mask": None,
        "target_ids": given["labels"],
        "llm_kwargs": {name: value for name, value in given.items() if name not in LOSS},
    }
