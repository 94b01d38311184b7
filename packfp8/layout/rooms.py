"""The frames of clips that stand in one row of constant length, each in a room of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from packfp8.errors import BudgetError
from packfp8.layout.share import Heard
from packfp8.lengths import rooms
from packfp8.rule import Topology


def in_rooms(heard: Heard, frames: np.ndarray, topology: Topology, *, frame_budget: int, tokens: int) -> Heard:
    """What `held` says, for an encoder that has all clips in one row of `frame_budget` encoder frames.

    Its indices have constant shapes. Real entries come first; after them the source is `frame_budget`, one past the encoder's
    rows, and the destination `tokens`, one past this rank's: a place that is cut off.

    Args:
        heard: from `held`; no frame travels.
        frames: int64 `[encoded]`, encoder frames of each of its clips.
        tokens: of this rank.

    Raises:
        BudgetError: the rooms need more frames.
    """
    ends = np.cumsum(rooms(frames))
    used = int(ends[-1]) if ends.size else 0
    if used > frame_budget:
        raise BudgetError(
            "the clips do not fit the frame budget of the pack",
            got=f"{used} encoder frames in the rooms of {len(frames)} clips",
            expected=f"at most {frame_budget}",
            because="the encoder's input has one shape, and audio is never cut",
            fix="give fewer clips, or raise frame_budget",
        )
    row, frame = np.divmod(heard.source, max(1, heard.frames_max))
    begins = ends - rooms(frames)
    constant = tuple(frame_budget * (rank == topology.cp_rank) for rank in range(topology.cp))
    return replace(
        heard,
        source=_filled(begins[row] + frame, frame_budget, frame_budget),
        destination=_filled(heard.destination, frame_budget, tokens),
        frames_max=frame_budget,
        sent=constant,
        received=constant,
    )


def _filled(index: np.ndarray, size: int, value: int) -> np.ndarray:
    """int64 `[size]`: the index, then `value`."""
    return np.append(index, np.full(size - len(index), value, np.int64))
