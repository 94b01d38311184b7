"""Rooms: clips one after another in one row of audio, each as if it were alone.

    samples   a a a a a a a a a | . . . . . . | b b b b | . . . . |      a room begins at a multiple of the stride
    frames    a     a     a     | .           | b       | .       |      its last frame is silence, and placed nowhere

One row of constant length is what an encoder of constant shape takes. The silence keeps clips apart: what a window or a
convolution of one clip reaches beyond it is the same nothing as where each clip has a row.
"""

from __future__ import annotations

import numpy as np

from packfp8.errors import ConfigError
from packfp8.lengths.audio import AudioFrames

SILENT_FRAMES = 1
"""Encoder frames of silence that end a room."""

LEAST_ROOM_FRAMES = 1 + SILENT_FRAMES
"""Of the smallest room, one frame of its clip and one of silence: a budget of frames has at most so many times fewer clips."""


def rooms(encoder_frames):
    """Encoder frames of the rooms of clips that have so many (int, or an int64 array)."""
    return encoder_frames + SILENT_FRAMES


def check_rooms(frames: AudioFrames) -> None:
    """Nothing, where clips of every length are kept apart by their rooms.

    Proved over all lengths: one stride more of samples is one frame more, so that one length of each remainder tells of all.
    The padding on both sides together is taken for either side, which asks for a little more than is needed.

    Raises:
        ConfigError: the encoder's input is of a fixed length or cut into blocks, or a clip, one of its windows or convolutions
            reaches beyond its room.
    """
    if frames.limit_samples or frames.block_frames:
        size = f"limit_samples={frames.limit_samples}, block_frames={frames.block_frames}"
        raise _no_rooms(size, "neither", "the window or the blocks of such an encoder begin with each clip (Whisper: 30 s)")
    first = frames.shortest_samples
    samples = np.arange(first, first + frames.stride_samples)
    room = rooms(frames.encoder_frames(samples)) * frames.stride_samples
    _check_within(samples + frames.padding_samples, room, samples, "samples, padding included")
    counts, step = frames.feature_frames(samples), frames.hop_samples
    for conv in frames.convs:
        left, right = conv.sides
        beyond = max(left, right + conv.ceil * (conv.stride - 1))
        _check_within((counts + beyond) * step, room, samples, "samples that a convolution sees")
        counts, step = conv(counts), step * conv.stride


def _check_within(reach: np.ndarray, room: np.ndarray, samples: np.ndarray, what: str) -> None:
    if (over := reach > room).any():
        at = int(over.argmax())
        raise _no_rooms(
            f"{int(reach[at])} {what}, of a clip of {int(samples[at])}",
            f"at most {int(room[at])}, its encoder frames and {SILENT_FRAMES} of silence",
            "what reaches into the next room would be heard as another clip",
        )


def _no_rooms(got: str, expected: str, because: str) -> ConfigError:
    return ConfigError(
        "clips of this encoder cannot stand in one row",
        got=got,
        expected=expected,
        because=because,
        fix="leave out static, or take an encoder whose convolutions are padded, as AudioFrames.fastconformer()",
    )
