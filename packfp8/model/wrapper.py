"""PackedModel: encoder, projector and language model around one `PackedBatch`: check, splice, run, loss.

    audio --encoder--> [clips, frames, d] --projector--> [clips, frames, hidden] --\
    input_ids --llm.embed--> [tokens, hidden] ---------------------------------- splice --llm (FP8)--> hidden --head--> loss

What it asks of its parts:

    encoder(audio [clips, samples], audio_lens [clips]) -> [clips, frames, d], or (that, its lengths [clips])
    encoder.packed           True, for static batches: it then hears a row of clips too, each of which begins a room,
                             encoder(audio [1, samples], audio_lens [clips], audio_offsets [clips + 1]) -> [1, frames, d], or
                             (that, lengths [clips]); a clip's frames are those that it gives for the clip alone
    projector(x [clips, frames, d]) -> [clips, frames, hidden]; it may stack frames where the measure counts them so
    llm.embed(ids) -> [..., hidden]
    llm(embeddings, **metadata) -> [..., hidden], the states before the head; `batch.kwargs(consumer)` without the labels
    llm.head                 a module with `weight` [vocab, hidden] and no bias
    llm.layouts              the layouts ("thd", "bshd", "sbhd") in which it keeps the sequences of a batch apart
    llm.spans_context        under CP, whether its attention reaches all slabs; one that does not say is taken at its word
    llm.split                a `TensorSplit`, where it has one: over the TP peers of the rule's topology, or whole
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from packfp8.data import PackedBatch
from packfp8.data.consumers import LOSS
from packfp8.lengths import AudioFrames
from packfp8.model.checks import (
    check_batch,
    check_count,
    check_is_batch,
    check_parts,
    check_recipe,
    check_rows,
    check_split,
    check_terms,
)
from packfp8.model.encoder_share import FrameExchange, alone, check_alone
from packfp8.model.handover import handed, restored
from packfp8.model.indexing import warn_if_wrapping, widest_row
from packfp8.model.isolation import prove_isolation
from packfp8.model.loss import CHUNK_TOKENS, is_replayed, loss_sum, scaled, supervised_rows
from packfp8.model.splice import check_encoder_lens, splice
from packfp8.rule import Alignment, align

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from packfp8.model.fp8 import Fp8


# One second at 16 kHz, of which every encoder of speech makes several frames. The shortest clip of all would leave a
# convolution one frame to hear, and torch 2.13 on a CPU then leaves parts of a BF16 weight gradient as the memory was: NaN, at
# times.
_SILENT_SAMPLES = 16_000


class PackedOutput(NamedTuple):
    """What a model gives for one micro-batch. A tuple, so that FSDP and DDP find the tensors whose backward they wait for.

    Attributes:
        loss: a scalar to call backward on: this rank's share, scaled for the mean over ranks.
        loss_sum: a scalar, the sum over this rank's supervised tokens.
        logits: `[tokens of the batch..., vocab]` where they were asked for, else None.
    """

    loss: Tensor
    loss_sum: Tensor
    logits: Tensor | None


class PackedModel(nn.Module):
    """An audio-text model that consumes packs. Shard the whole of it (`fully_shard(model)`), so that its parts gather in time.

    Only the language model runs in FP8, in its forward pass; encoder, projector and head keep their precision.

    Args:
        encoder, projector: both, or None for text alone.
        llm: the language model.
        rule: the one that the batches are made by, with this rank's topology. Left out, the first batch brings it; give it
            where tp splits features, so that these are checked as each rank holds them.
        consumer: how the language model spells the metadata of a batch: a key of `packfp8.data.consumers.CONSUMERS`.
        frames: of the measure; bounds the silence that a rank without audio hears. It lasts one second at 16 kHz.
        fp8: how the language model runs in FP8; None is none.
        loss_chunk_tokens: tokens whose logits are held at a time.
        loss_rows: most supervised tokens of a batch, for steps of one shape: the head then works on so many rows of every
            batch. Without it, on as many as are supervised, and on all where the step is captured or compiled.
        cp_group: the CP ranks, where they share the encoder (`Collator(share_encoder=True)`); it is then called for each batch.

    Raises:
        ConfigError: parts that do not fit together, and whatever `fp8.prepare` refuses.
    """

    def __init__(
        self,
        *,
        encoder: nn.Module | None,
        projector: nn.Module | None,
        llm: nn.Module,
        rule: Alignment | None = None,
        consumer: str = "te",
        frames: AudioFrames | None = None,
        fp8: Fp8 | None = None,
        loss_chunk_tokens: int = CHUNK_TOKENS,
        loss_rows: int | None = None,
        cp_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        check_parts(encoder, projector, llm)
        check_terms(rule, consumer, llm, fp8)
        check_rows(loss_chunk_tokens=loss_chunk_tokens, loss_rows=loss_rows)
        self.encoder, self.projector = encoder, projector
        self.llm = fp8.prepare(llm, rule or align(fp8.recipe)) if fp8 else llm
        self.rule, self.consumer, self.fp8 = rule, consumer, fp8
        self.silent_samples = _silence(frames)
        self.loss_chunk_tokens, self.loss_rows = loss_chunk_tokens, loss_rows
        self.exchange = FrameExchange(cp_group) if cp_group is not None else alone
        self.row_values = widest_row(self.llm)

    def forward(
        self, batch: PackedBatch, *, global_supervised: int | Tensor, return_logits: bool = False, **llm_kwargs
    ) -> PackedOutput:
        """The loss of one micro-batch.

        Args:
            batch: on the device of the model.
            global_supervised: supervised tokens of the whole accumulation window over dp and cp (`count_supervised`); of this
                one batch (`batch.num_supervised`) where there is one rank and no accumulation.
            return_logits: whether all logits are made too, which takes their memory; the loss does not need them.
            llm_kwargs: passed on to the language model, as `is_first_microbatch` for Transformer Engine.

        Raises:
            StateError: the batch was made by another rule, or for another rank.
            ConfigError: the language model would mix up the sequences of this batch, or is divided otherwise; something else
                than a batch; a count that is none, or below the batch's own.
            LengthError: the encoder gave fewer frames than were placed.
        """
        self.check(batch, global_supervised)
        own = handed(batch, self.consumer, self.llm.layouts)
        total, logits = self._run(own, self._metadata(own), return_logits, llm_kwargs)
        logits = restored(logits, own, batch) if return_logits else None
        return PackedOutput(scaled(total, self.rule.topology, global_supervised), total, logits)

    def compile(self, *args, **kwargs) -> None:
        """Compiles what the device does, by `torch.compile`, and leaves the checks as they are; arguments are its own.

        Static batches then compile once an epoch, and others once for each shape: nothing that one batch counts is a constant
        of the code.
        """
        self._run = torch.compile(self._run, *args, **kwargs)

    def prove_isolation(self, batch: PackedBatch, *, tolerance: float = 0.0) -> None:
        """Nothing, where no sequence of the batch moves when others, or the padding, are changed.

        Without dropout and without Transformer Engine's FP8, whose scales let rows feel each other. Five forward passes of the
        language model; under CP every rank must call it.

        Args:
            batch: of at least two sequences, on the device of the model.
            tolerance: most by which an element of another sequence's hidden states may move; more than 0 only where the FP8
                layers cannot be left (torchao).

        Raises:
            ConfigError: the language model mixes sequences; the message names the arguments that it ignores.
            StateError: as the forward pass.
        """
        self.check(batch, batch.num_supervised)
        own = handed(batch, self.consumer, self.llm.layouts)
        training = [module for module in self.modules() if module.training]
        self.eval()
        try:
            with torch.no_grad():
                prove_isolation(self.llm, self._spliced(own), own, self._metadata(own), tolerance=tolerance)
        finally:
            for module in training:
                module.training = True

    def _run(self, batch: PackedBatch, metadata: dict, return_logits: bool, llm_kwargs: dict) -> tuple[Tensor, Tensor | None]:
        """The sum of the losses, and all logits where they were asked for, of a batch that is right."""
        embeddings = self._spliced(batch)
        with self.fp8.forward_context() if self.fp8 else nullcontext():
            hidden = self.llm(embeddings, **metadata, **llm_kwargs)
        rows, labels = supervised_rows(hidden, batch.labels, self._head_rows(batch))
        total = loss_sum(rows, self.llm.head.weight, labels, chunk_tokens=self.loss_chunk_tokens)
        return total, self.llm.head(hidden) if return_logits else None

    def _metadata(self, batch: PackedBatch) -> dict:
        """What the language model is told of the batch; it makes no loss of its own."""
        return {key: value for key, value in batch.kwargs(self.consumer).items() if key not in LOSS}

    def _spliced(self, batch: PackedBatch) -> Tensor:
        """The embeddings of this rank's tokens, audio in place.

        The encoder runs also where no clip is: FSDP gathers its weights on all ranks or on none. It then hears a short
        silence, of which nothing is placed, so that every gradient is zero.
        """
        embeddings = self.llm.embed(batch.input_ids)
        if self.encoder is None:
            return embeddings
        heard = (batch.audio, batch.audio_lens)
        if batch.audio_offsets is not None:
            heard = (*heard, batch.audio_offsets)
        elif not batch.audio.shape[0]:
            lens = torch.full((1,), self.silent_samples, dtype=batch.audio_lens.dtype, device=batch.audio_lens.device)
            heard = (batch.audio.new_zeros((1, self.silent_samples)), lens)
        out = self.encoder(*heard)
        out, out_lens = out if isinstance(out, tuple) else (out, None)
        frames = self.projector(out)
        if out_lens is not None and frames.shape[1] == out.shape[1]:  # a projector that stacks frames has its own lengths
            check_encoder_lens(out_lens, batch)
        return splice(embeddings, frames, batch, self.exchange)

    def _head_rows(self, batch: PackedBatch) -> int | None:
        """How many rows the head works on: as many as are supervised, or a number that is the same for every batch."""
        if self.loss_rows is not None:
            return self.loss_rows
        return None if is_replayed() else batch.num_supervised

    def check(self, batch: PackedBatch, global_supervised: int | Tensor) -> None:
        """Nothing, where the batch is one of this model's; the first batch brings the rule where none was given.

        `forward` does it by itself. It looks at numbers on the host alone.

        Raises:
            StateError, ConfigError: as `forward`.
        """
        check_is_batch(batch)
        if self.rule is None:
            check_recipe(batch, self.fp8)
            self.rule = batch.rule
        check_batch(batch, self.rule, self.encoder)
        check_count(batch, global_supervised, self.loss_rows)
        if self.exchange is alone:
            check_alone(batch)
        check_split(self.llm, self.rule.topology)
        warn_if_wrapping(batch, self.row_values)


def _silence(frames: AudioFrames | None) -> int:
    """Samples of the silence for an encoder: at least a frame of it, at most what it takes."""
    if frames is None:
        return _SILENT_SAMPLES
    return max(frames.shortest_samples, min(_SILENT_SAMPLES, frames.limit_samples or _SILENT_SAMPLES))
