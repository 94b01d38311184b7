"""PackedBatch: one rank's micro-batch. Tensors are local to the CP rank, offsets are of the whole pack.

    layout   tokens are            made by
    thd      [T/cp]                the rule's layout "thd"
    bshd     [B, S/cp]             the rule's layout "bshd"
    sbhd     [S/cp, B]             `as_sbhd()`, for Transformer Engine under SP

Every tensor is declared below as sequence-shaped (split over CP ranks) or replicated; what splits a batch asks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from packfp8.data.consumers import CONSUMERS
from packfp8.errors import ConfigError, ExampleError
from packfp8.layout import Slots, cp_inverse
from packfp8.rule import Alignment

SEQUENCE_SHAPED = ("input_ids", "labels", "position_ids", "seq_idx", "padding_mask")
"""One value for each token of the slab."""
REPLICATED = ("cu_seqlens",)
"""The same on every CP rank; never cut along the sequence."""
AUDIO = ("audio", "audio_lens", "audio_offsets", "audio_source", "audio_destination")
"""This rank's clips and where their frames go; `audio_offsets` is None where each clip has a row of its own."""
IGNORED = -100
"""Label of a token from which nothing is learned: `ignore_index` of torch's cross_entropy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """An example that was left out, and why."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """One rank's micro-batch.

    Args:
        input_ids: int64, token ids; audio positions hold the template's audio id and pads hold 0, both only valid rows of the
            embedding. Nothing is ever decided by an id.
        labels: int64, shifted per sequence before sharding; -100 on audio, prompt, pads and each sequence's last token.
        position_ids: int64, restart per slot, run on through its padding, global under CP.
        seq_idx: int32, slot number, in-slot padding included; filler has its own, one for each of its slots.
        padding_mask: bool, True = pad.
        cu_seqlens: int32 `[slots + 1]`, padded offsets of the whole pack. Static: `[max_sequences + most slots of filler + 1]`,
            the last repeated; filler alone is one slot, or `ceil(tokens / max_seqlen)` where the collator has a `max_seqlen`.
        max_seqlen: tokens of the longest slot, a Python int: a tensor would key kernel caches anew at every step. Static: of
            the longest that a slot may be, the whole pack or the collator's `max_seqlen`.
        audio: float32 `[clips, samples]`, waveforms of the clips that this rank encodes, zeros on the right: those of which it
            holds a frame, or its share of the pack's. Static: `[1, samples]`, the clips one after another, each in a room of
            its own (`packfp8.lengths.rooms`); `samples` are those of `audio_frames` encoder frames.
        audio_lens: int64 `[clips]`, samples of each. Static: `[audio_frames // 2]`, 0 for clips that are not there.
        audio_offsets: int64 `[clips + 1]`, static: the sample at which each room begins, and the end of the last, repeated for
            clips that are not there. None where each clip has a row.
        audio_source: int64 `[frames]`, rows of the encoder's output flattened to `[clips * audio_frames]`. Static:
            `[audio_frames]`, rows of its one row, then `audio_frames`, a row that is not there.
        audio_destination: int64 `[frames]`, where they stand among this rank's tokens, flat. Static: `[audio_frames]`, then
            `tokens`, a place that is not there.
        audio_frames: encoder frames of the longest of those clips. Static: the frame budget.
        frames_sent, frames_received: frames to and from each CP rank, itself included; to another only where encoders are
            shared. Then `audio_source` goes rank by rank over those sent, `audio_destination` over those received.
        num_supervised: labels of this CP rank that are not -100.
        ids: names of the sequences, slot after slot.
        step: number of the step that this batch belongs to, for `sampler.state_dict(step=batch.step)`.
        rule: the rule that the batch was made by.
        fingerprint: the rule's, which a model compares with its own.
        checksum: of the whole pack, its ids, places and tokens; equal on all CP and TP peers.
        layout: "thd", "bshd" or "sbhd".
        slots: lengths and offsets on the host.
        set_aside: examples left out of this pack, with the reason.
        trimmed_samples: samples cut or filled in within the tolerance, over this rank's clips.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    seq_idx: Tensor
    padding_mask: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    audio: Tensor
    audio_lens: Tensor
    audio_offsets: Tensor | None
    audio_source: Tensor
    audio_destination: Tensor
    audio_frames: int
    frames_sent: tuple[int, ...]
    frames_received: tuple[int, ...]
    num_supervised: int
    ids: tuple[str, ...]
    step: int
    rule: Alignment
    fingerprint: str
    checksum: str
    layout: str
    slots: Slots
    set_aside: tuple[SetAside, ...]
    trimmed_samples: int

    @property
    def tokens(self) -> int:
        """Tokens that this rank holds, padding included."""
        return self.input_ids.numel()

    @property
    def loss_mask(self) -> Tensor:
        """float32, 1 where a label is learned from, shaped as the tokens."""
        return (self.labels != IGNORED).float()

    @property
    def cu_seqlens_real(self) -> Tensor:
        """int32, offsets of the real tokens as if no padding stood between them; as many as `cu_seqlens`, filler counts 0."""
        real = np.zeros(len(self.cu_seqlens), np.int32)
        slots = len(self.slots.lengths)
        real[1 : slots + 1] = np.cumsum(self.slots.lengths)
        real[slots + 1 :] = real[slots]
        return torch.from_numpy(real).to(self.cu_seqlens.device)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """The batch with every tensor on `device`; numbers stay Python numbers."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self, device: torch.device | str | None = None) -> PackedBatch:
        """The batch with every tensor in page-locked memory; `DataLoader(pin_memory=True)` calls this."""
        return self._each(lambda tensor: tensor.pin_memory(device) if device else tensor.pin_memory())

    def kwargs(self, consumer: str) -> dict:
        """What `consumer` calls the metadata of this batch. An adapter renames or drops, it never computes.

        Raises:
            ConfigError: an unknown consumer, or one that would be wrong with this layout.
        """
        if consumer not in CONSUMERS:
            raise ConfigError(
                "the consumer of the batch is not known",
                got=repr(consumer),
                expected=f"one of {', '.join(CONSUMERS)}",
                because="each library spells offsets and lengths in its own way, and drops what it does not know",
                fix="name one of these, or take cu_seqlens, max_seqlen, position_ids and seq_idx from the batch",
            )
        return CONSUMERS[consumer](self)

    def as_thd(self) -> PackedBatch:
        """The same pack as THD: the rows of a padded batch are slots of equal size, one after another. Nothing is copied."""
        if self.layout == "thd":
            return self
        batch = self if self.layout == "bshd" else self._transposed("bshd")
        flat = {name: getattr(batch, name).reshape(-1) for name in SEQUENCE_SHAPED}
        return replace(batch, **flat, layout="thd")

    def as_sbhd(self) -> PackedBatch:
        """The same padded batch with the sequence first, as Transformer Engine must have it under SP.

        Raises:
            ConfigError: a packed batch has no rows to put second.
        """
        if self.layout == "thd":
            raise ConfigError(
                "a packed batch cannot be given sequence first",
                got="layout 'thd'",
                expected="layout 'bshd'",
                because="slots of different sizes are not columns of one array",
                fix="make the batch with align(..., layout='bshd')",
            )
        return self if self.layout == "sbhd" else self._transposed("sbhd")

    def unpack(self, tensor: Tensor | Sequence[Tensor]) -> dict[str, Tensor]:
        """The real tokens of each sequence by its id, in their order.

        Args:
            tensor: one value (or vector) per token, shaped as this batch's tokens and then anything; with cp > 1 the slabs of
                all CP ranks in order.

        Raises:
            ExampleError: two sequences of the pack have one id.
            ConfigError: not as many slabs as CP ranks, or not shaped as the tokens.
        """
        cp = self.rule.topology.cp
        slabs = [tensor] if isinstance(tensor, Tensor) else list(tensor)
        shape = tuple(self.input_ids.shape)
        if len(slabs) != cp or any(tuple(slab.shape[: len(shape)]) != shape for slab in slabs):
            raise ConfigError(
                "what shall be unpacked does not match the pack",
                got=f"{len(slabs)} tensors of shapes {[tuple(slab.shape) for slab in slabs]}",
                expected=f"{cp} of shape {shape} and then anything",
                because="each CP rank holds two chunks of every slot; only all slabs together hold a sequence",
                fix="gather the slabs over the CP group and pass them in rank order",
            )
        if len(set(self.ids)) < len(self.ids):
            raise ExampleError(
                "two sequences of one pack have the same id",
                got=sorted({name for name in self.ids if self.ids.count(name) > 1}),
                expected="ids that differ",
                because="one would hide the other",
                fix="make ids unique; lhotse's CutSet.repeat() does so unless preserve_id=True",
            )
        rows = [slab.transpose(0, 1) if self.layout == "sbhd" else slab for slab in slabs]
        flat = torch.cat([row.reshape(-1, *row.shape[len(shape) :]) for row in rows])
        order = torch.from_numpy(cp_inverse(self.slots.offsets, cp)[self.slots.real()]).to(flat.device)
        parts = flat[order].split(self.slots.lengths[: self.slots.sequences].tolist())
        return dict(zip(self.ids, parts, strict=True))

    def _each(self, change) -> PackedBatch:
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        return replace(self, **{name: change(value) for name, value in tensors.items()})

    def _transposed(self, layout: str) -> PackedBatch:
        slow, fast = self.input_ids.shape
        turned = {name: getattr(self, name).transpose(0, 1).contiguous() for name in SEQUENCE_SHAPED}
        destination = self.audio_destination % fast * slow + self.audio_destination // fast
        return replace(self, **turned, audio_destination=destination, layout=layout)
