"""Waveforms of a batch: each in a row of its own, or all in one row of constant length, each in a room of its own."""

from __future__ import annotations

import numpy as np
import torch

from packfp8.data.audio import Loaded
from packfp8.lengths import LEAST_ROOM_FRAMES, AudioFrames, rooms


def waveforms(audio: list[Loaded]) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 `[clips, samples]` with zeros on the right, and int64 `[clips]` lengths."""
    lens = np.array([loaded.samples.size for loaded in audio], np.int64)
    waves = np.zeros((len(audio), int(lens.max()) if audio else 0), np.float32)
    for row, loaded in zip(waves, audio):
        row[: loaded.samples.size] = loaded.samples
    return torch.from_numpy(waves), torch.from_numpy(lens)


def one_row(audio: list[Loaded], frames: AudioFrames, frame_budget: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 `[1, samples]`, int64 `[clips_max]` lengths and int64 `[clips_max + 1]` offsets of rooms.

    The shapes follow from the budget alone: `samples` are those of `frame_budget` encoder frames. Clips that are not there have
    length 0 and repeat the last offset.

    Args:
        audio: clips whose rooms fit `frame_budget`, as `in_rooms` has seen to.
        frames: of which `check_rooms` holds, so that each clip fits its room.
    """
    clips_max = frame_budget // LEAST_ROOM_FRAMES
    row = np.zeros((1, frame_budget * frames.stride_samples), np.float32)
    lens, offsets = np.zeros(clips_max, np.int64), np.zeros(clips_max + 1, np.int64)
    lens[: len(audio)] = sizes = np.array([loaded.samples.size for loaded in audio], np.int64)
    offsets[1 : len(audio) + 1] = np.cumsum(rooms(frames.encoder_frames(sizes))) * frames.stride_samples if audio else 0
    offsets[len(audio) + 1 :] = offsets[len(audio)]
    for loaded, begin in zip(audio, offsets):
        row[0, begin : begin + loaded.samples.size] = loaded.samples
    return torch.from_numpy(row), torch.from_numpy(lens), torch.from_numpy(offsets)
