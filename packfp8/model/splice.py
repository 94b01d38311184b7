"""splice: a rank's tokens with the audio frames in their places, by index operations of constant number.

    embeddings  t t t . . . . t t | t . . t t        audio_destination: the dots, counted flat over this rank's tokens
    frames      a a a x | b b x x                    audio_source: rows of the flattened [clips * audio_frames], without x

Both indices were made on the CPU, from lengths alone. Nothing here asks the device how many frames there are.

A static batch has its clips in one row, and indices of constant length. Beyond its real entries the source is one past the
frames and the destination one past the tokens: these go nowhere, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from packfp8.data import PackedBatch
from packfp8.errors import LengthError
from packfp8.model.encoder_share import alone
from packfp8.model.rows import placed, placed_within, taken, taken_within


def splice(
    embeddings: Tensor, frames: Tensor, batch: PackedBatch, exchange: Callable[[Tensor, PackedBatch], Tensor] = alone
) -> Tensor:
    """`embeddings` `[..., hidden]` with `frames` at the audio positions; gradients reach both.

    Args:
        embeddings: one vector per token of this rank, text and audio positions alike.
        frames: `[clips, frames, hidden]`, at least `batch.audio_frames` a clip. More, as an encoder that pads gives, are cut
            off by their shape alone. With no audio in the batch none is placed: the gradient is zero, and the encoder stays in
            the graph.
        batch: says which row goes where.
        exchange: fetches what other CP ranks encoded (`FrameExchange`).

    Raises:
        LengthError: fewer frames than the plan has placed.
        what `exchange` raises.
    """
    take, place = (taken, placed) if batch.audio_offsets is None else (taken_within, placed_within)
    rows = take(narrowed(frames, batch).flatten(0, 1), batch.audio_source).to(embeddings.dtype)
    flat = place(embeddings.flatten(0, -2), exchange(rows, batch), batch.audio_destination)
    return flat.reshape(embeddings.shape)


def narrowed(frames: Tensor, batch: PackedBatch) -> Tensor:
    """The first `batch.audio_frames` frames of each clip: a view.

    Raises:
        LengthError: there are fewer.
    """
    clips, longest = batch.audio.shape[0], batch.audio_frames
    if frames.shape[0] < clips or frames.shape[1] < longest:
        raise LengthError(
            "the encoder gave fewer frames than the plan has placed",
            got=f"{frames.shape[1]} frames for {frames.shape[0]} clips of {batch.audio.shape[1]} samples",
            expected=f"at least {longest} frames for {clips} clips (of {', '.join(batch.ids[:4])})",
            because="each clip's room in the pack was cut by the length formula before any audio was read",
            fix="compare formula and encoder: packfp8.probe(encoder, measure.frames).check()",
        )
    return frames[:, :longest] if clips else frames


def check_encoder_lens(lens: Tensor, batch: PackedBatch) -> None:
    """Nothing, where every clip has as many true frames as the plan has placed of it.

    On a CPU the first clip that is short is named. On a GPU, and in compiled code, the check is queued behind the encoder, and
    the process stops with the same words at its next synchronisation; nothing waits for it.

    Args:
        lens: integers `[clips]`, frames of each clip by the encoder's own account.

    Raises:
        LengthError: on a CPU, a clip has fewer.
    """
    if not batch.audio.shape[0]:
        return
    clip, frame = _clips_and_frames(batch)
    placed = torch.zeros_like(lens)
    placed.scatter_reduce_(0, clip, (frame + 1).to(lens.dtype), "amax")
    enough = lens >= placed
    if lens.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(enough.all(), "packfp8: the encoder gave a clip fewer frames than the plan has placed")
    elif not enough.all():
        row = int(enough.to(torch.uint8).argmin())
        raise LengthError(
            f"the encoder gave clip {row} of the batch fewer frames than the plan has placed",
            got=f"{int(lens[row])} frames for {int(batch.audio_lens[row])} samples",
            expected=f"at least {int(placed[row])}",
            because="the frames after a clip's end are padding, and would be heard as audio",
            fix="compare formula and encoder: packfp8.probe(encoder, measure.frames).check()",
        )


def _clips_and_frames(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """int64 `[entries]` of `audio_source`: of which clip, and which of its frames; frame -1 where there is none."""
    source, frames = batch.audio_source, batch.audio_frames
    if batch.audio_offsets is None:
        return source // frames, source % frames
    begins = batch.audio_offsets // (batch.audio.shape[1] // frames)
    clip = torch.searchsorted(begins[1:], source, right=True).clamp(max=begins.shape[0] - 2)
    return clip, torch.where(source < frames, source - begins[clip], -1)
