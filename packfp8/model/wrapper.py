"""PackedModel: encoder, projector and language model around one `PackedBatch`: check, splice, run, loss.

    audio --encoder--> [clips, frames, d] --projector--> [clips, frames, hidden] --\
    input_ids --llm.embed--> [tokens, hidden] ---------------------------------- splice --llm (FP8)--> hidden --head--> loss

What it asks of its parts:

    encoder(audio [clips, samples], audio_lens [clips]) -> [clips, frames, d], or (that, its lengths [clips])
    projector(x [clips, frames, d]) -> [clips, frames, hidden]; it may stack frames where the measure counts them so
    llm.embed(ids) -> [..., hidden]
    llm(embeddings, **metadata) -> [..., hidden], the states before the head; `batch.kwargs(consumer)` without the labels
    llm.head                 a module with `weight` [vocab, hidden] and no bias
    llm.layouts              the layouts ("thd", "bshd", "sbhd") in which it keeps the sequences of a batch apart
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from packfp8.data import PackedBatch
from packfp8.data.consumers import LOSS
from packfp8.errors import ConfigError, StateError
from packfp8.lengths import AudioFrames
from packfp8.model.encoder_share import FrameExchange, alone
from packfp8.model.handover import handed, restored
from packfp8.model.indexing import warn_if_wrapping, widest_row
from packfp8.model.isolation import prove_isolation
from packfp8.model.loss import CHUNK_TOKENS, loss_sum, scaled, supervised_rows
from packfp8.model.splice import check_encoder_lens, splice
from packfp8.rule import Alignment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from packfp8.model.fp8 import Fp8


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
        rule: the one that the batches are made by, with this rank's topology.
        consumer: how the language model spells the metadata of a batch: a key of `packfp8.data.consumers.CONSUMERS`.
        frames: of the measure; says how long the clip is that a rank without audio hears. Needed with an encoder.
        fp8: how the language model runs in FP8; None is none.
        loss_chunk_tokens: tokens whose logits are held at a time.
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
        rule: Alignment,
        consumer: str = "te",
        frames: AudioFrames | None = None,
        fp8: Fp8 | None = None,
        loss_chunk_tokens: int = CHUNK_TOKENS,
        cp_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        _check_parts(encoder, projector, llm, frames)
        self.encoder, self.projector = encoder, projector
        self.llm = fp8.prepare(llm, rule) if fp8 else llm
        self.rule, self.consumer, self.frames, self.fp8 = rule, consumer, frames, fp8
        self.loss_chunk_tokens = loss_chunk_tokens
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
            ConfigError: the language model would mix up the sequences of this batch; a count below the batch's own.
            LengthError: the encoder gave fewer frames than were placed.
        """
        self._check(batch, global_supervised)
        warn_if_wrapping(batch, self.row_values)
        own = handed(batch, self.consumer, self.llm.layouts)
        embeddings = self._spliced(own)
        metadata = {key: value for key, value in own.kwargs(self.consumer).items() if key not in LOSS}
        with self.fp8.forward_context() if self.fp8 else nullcontext():
            hidden = self.llm(embeddings, **metadata, **llm_kwargs)
        rows, labels = supervised_rows(hidden, own.labels, batch.num_supervised)
        total = loss_sum(rows, self.llm.head.weight, labels, chunk_tokens=self.loss_chunk_tokens)
        logits = restored(self.llm.head(hidden), own, batch) if return_logits else None
        return PackedOutput(scaled(total, self.rule.topology, global_supervised), total, logits)

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
        self._check(batch, batch.num_supervised)
        own = handed(batch, self.consumer, self.llm.layouts)
        metadata = {key: value for key, value in own.kwargs(self.consumer).items() if key not in LOSS}
        training = [module for module in self.modules() if module.training]
        self.eval()
        try:
            with torch.no_grad():
                prove_isolation(self.llm, self._spliced(own), own, metadata, tolerance=tolerance)
        finally:
            for module in training:
                module.training = True

    def _spliced(self, batch: PackedBatch) -> Tensor:
        """The embeddings of this rank's tokens, audio in place.

        The encoder runs also where no clip is: FSDP gathers its weights on all ranks or on none. It then hears the shortest
        clip of silence, of which nothing is placed, so that every gradient is zero.
        """
        embeddings = self.llm.embed(batch.input_ids)
        if self.encoder is None:
            return embeddings
        audio, lens = batch.audio, batch.audio_lens
        if not audio.shape[0]:
            audio = audio.new_zeros((1, self.frames.shortest_samples))
            lens = torch.full((1,), self.frames.shortest_samples, dtype=lens.dtype, device=lens.device)
        out = self.encoder(audio, lens)
        out, out_lens = out if isinstance(out, tuple) else (out, None)
        frames = self.projector(out)
        if out_lens is not None and frames.shape[1] == out.shape[1]:  # a projector that stacks frames has its own lengths
            check_encoder_lens(out_lens, batch)
        return splice(embeddings, frames, batch, self.exchange)

    def _check(self, batch: PackedBatch, global_supervised: int | Tensor) -> None:
        if batch.fingerprint != self.rule.fingerprint:
            raise StateError(
                f"the batch of {', '.join(batch.ids[:4]) or 'no sequence'} was made by another rule than the model's",
                got=batch.fingerprint,
                expected=self.rule.fingerprint,
                because="its slots and total were rounded for another recipe, layout or split",
                fix="give collator and PackedModel the same align(...)",
            )
        made_for, here = batch.rule.topology.cp_rank, self.rule.topology.cp_rank
        if made_for != here:
            raise StateError(
                "the batch is the slab of another rank",
                got=f"cp_rank {made_for}",
                expected=f"cp_rank {here}",
                because="two ranks would train on one slab, and another would train nobody",
                fix="build both rules from this rank's mesh: Topology.from_mesh(mesh)",
            )
        if self.encoder is None and batch.audio.shape[0]:
            raise ConfigError(
                f"the batch of {', '.join(batch.ids[:4])} has audio, and the model has no encoder",
                got=f"{batch.audio.shape[0]} clips",
                expected="a batch of text",
                because="the places of the audio would keep the embedding of a stand-in token",
                fix="give PackedModel an encoder and a projector",
            )
        if not isinstance(global_supervised, Tensor) and global_supervised < batch.num_supervised:
            raise ConfigError(
                "global_supervised is less than this batch has by itself",
                got=global_supervised,
                expected=f"at least {batch.num_supervised}",
                because="it counts the supervised tokens of all micro-batches and ranks of the step",
                fix="pass count_supervised(batches, group)",
            )


def _check_parts(encoder, projector, llm, frames) -> None:
    head = getattr(llm, "head", None)
    if (encoder is None) != (projector is None) or (encoder is None) != (frames is None):
        given = {"encoder": encoder, "projector": projector, "frames": frames}
        raise ConfigError(
            "the audio side of the model is incomplete",
            got=", ".join(f"{name} {'missing' if part is None else 'given'}" for name, part in given.items()),
            expected="encoder, projector and frames, or none of them",
            because="audio is encoded, projected to the language model's features, and counted",
            fix="pass all three; frames is the AudioFrames of the measure",
        )
    missing = [name for name in ("embed", "layouts", "head") if not hasattr(llm, name)]
    if missing or getattr(head, "weight", None) is None:
        raise ConfigError(
            "the language model does not have what the wrapper drives it by",
            got=f"{type(llm).__name__} without {', '.join(missing or ['head.weight'])}",
            expected="embed(ids), layouts, and head with a weight [vocab, hidden]",
            because="audio is placed among embeddings, and the loss makes its logits in chunks",
            fix="wrap it in a small module with these attributes; see help(packfp8.model.wrapper)",
        )
    if getattr(head, "bias", None) is not None:
        raise ConfigError(
            "the head of the language model has a bias",
            got=f"bias of shape {tuple(head.bias.shape)}",
            expected="a head without bias",
            because="the chunked loss makes logits of hidden states and a weight alone",
            fix="build the head with bias=False",
        )
