"""Who encodes which clip, under context parallelism: every rank what it holds, or every clip on one rank.

held     a rank encodes each clip of which one of its tokens is a frame. A clip lies in chunks on several ranks, so it is
         encoded several times; nothing travels.
dealt    each clip is encoded by one rank, by like sums of frames; the frames that another rank's tokens want travel. Every
         rank knows from lengths alone how many go where, so no length is exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packfp8.layout.shard import cp_index
from packfp8.layout.slots import Slots
from packfp8.rule import Topology


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Heard:
    """What one CP rank encodes, and where the frames go.

    Args:
        clips: int64 `[encoded]`, the clips that this rank encodes, in order.
        source: int64 `[frames sent]`, rows of their encoder output, flattened from `[encoded, frames_max]`; first those for
            CP rank 0, then for rank 1, and so on.
        destination: int64 `[frames received]`, where the frames stand among this rank's tokens; first those from rank 0.
        frames_max: encoder frames of the longest of `clips`; 0 without clips.
        sent, received: frames to and from each CP rank, itself included.
    """

    clips: np.ndarray
    source: np.ndarray
    destination: np.ndarray
    frames_max: int
    sent: tuple[int, ...]
    received: tuple[int, ...]


def held(spans: np.ndarray, slots: Slots, topology: Topology) -> Heard:
    """What a rank encodes that encodes all that it holds.

    Args:
        spans: int64 `[clips, 3]`: sequence, start within it, encoder frames.
    """
    clip_of, frame_of, where = _frames(spans, slots)
    index = cp_index(slots.offsets, topology.cp, topology.cp_rank)
    local = np.full(slots.total, -1, dtype=np.int64)
    local[index] = np.arange(index.size)
    here = local[where] >= 0
    clips, row_of = np.unique(clip_of[here], return_inverse=True)
    frames_max = _longest(spans, clips)
    alone = tuple(int(here.sum()) if rank == topology.cp_rank else 0 for rank in range(topology.cp))
    return Heard(
        clips=clips,
        source=row_of * frames_max + frame_of[here],
        destination=local[where][here],
        frames_max=frames_max,
        sent=alone,
        received=alone,
    )


def dealt(spans: np.ndarray, slots: Slots, topology: Topology) -> Heard:
    """What a rank encodes where each clip is encoded once, by the rank that `encoder_of` names.

    Args:
        spans: as for `held`.
    """
    cp, me = topology.cp, topology.cp_rank
    clip_of, frame_of, where = _frames(spans, slots)
    rank_of, local = np.empty(slots.total, np.int64), np.empty(slots.total, np.int64)
    for rank in range(cp):
        index = cp_index(slots.offsets, cp, rank)
        rank_of[index], local[index] = rank, np.arange(index.size)
    encoder = encoder_of(spans[:, 2], cp)
    by, to = encoder[clip_of], rank_of[where]
    # Sender and receiver walk the frames in one order, the pack's: it is all that a row says about where it belongs.
    mine = np.flatnonzero(by == me)
    mine = mine[np.argsort(to[mine], kind="stable")]
    wanted = np.flatnonzero(to == me)
    wanted = wanted[np.argsort(by[wanted], kind="stable")]
    clips = np.flatnonzero(encoder == me)
    frames_max = _longest(spans, clips)
    return Heard(
        clips=clips,
        source=np.searchsorted(clips, clip_of[mine]) * frames_max + frame_of[mine],
        destination=local[where[wanted]],
        frames_max=frames_max,
        sent=tuple(np.bincount(to[mine], minlength=cp).tolist()),
        received=tuple(np.bincount(by[wanted], minlength=cp).tolist()),
    )


def encoder_of(frames: np.ndarray, ranks: int) -> np.ndarray:
    """int64 `[clips]`, the rank that encodes each: the longest first, each to the rank with the fewest frames so far.

    The fullest rank has at most 4/3 of the best possible (Graham 1969, longest processing time first).
    """
    load, encoder = np.zeros(ranks, np.int64), np.empty(len(frames), np.int64)
    for clip in np.argsort(-frames, kind="stable"):
        encoder[clip] = load.argmin()
        load[encoder[clip]] += frames[clip]
    return encoder


def _frames(spans: np.ndarray, slots: Slots) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every frame of the pack, in order: its clip, its number in the clip, its position in the pack."""
    sequence, start, frames = spans.T
    clip_of = np.repeat(np.arange(len(spans)), frames)
    frame_of = np.arange(clip_of.size) - np.repeat(np.cumsum(frames) - frames, frames)
    return clip_of, frame_of, (slots.offsets[sequence] + start)[clip_of] + frame_of


def _longest(spans: np.ndarray, clips: np.ndarray) -> int:
    return int(spans[clips, 2].max()) if clips.size else 0
