"""Plan: everything about a pack that follows from lengths alone, for one CP rank.

It is made before any audio is read, and it is the same on every rank but for the slab. All that the collator does after it is
to fill in ids and samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from packfp8.layout.shard import cp_index
from packfp8.layout.slots import Slots, place
from packfp8.rule import Alignment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Where every token of one pack sits, as the CP rank of `rule.topology` sees it.

    Args:
        index: int64 `[T/cp]`, positions in the pack of the tokens that this rank holds.
        position_ids: int64 `[T/cp]`, position within the slot; runs on through its padding.
        seq_idx: int32 `[T/cp]`, number of the slot; filler has its own.
        padding_mask: bool `[T/cp]`, True = pad.
        clips: int64 `[held]`, the clips of the pack of which this rank holds at least one frame, in order.
        audio_source: int64 `[frames]`, rows of those clips' encoder output, flattened from `[held, frames_max]`.
        audio_destination: int64 `[frames]`, where they stand among this rank's tokens.
        frames_max: encoder frames of the longest of those clips; 0 without clips.
        checksum: text, equal on all CP and TP peers of one pack.
    """

    rule: Alignment
    slots: Slots
    index: np.ndarray
    position_ids: np.ndarray
    seq_idx: np.ndarray
    padding_mask: np.ndarray
    clips: np.ndarray
    audio_source: np.ndarray
    audio_destination: np.ndarray
    frames_max: int
    checksum: str

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False


def make_plan(
    lengths: Sequence[int],
    clips: Sequence[tuple[int, int, int]],
    rule: Alignment,
    *,
    total: int | None = None,
    rows: int | None = None,
    ids: Sequence[str] = (),
) -> Plan:
    """The plan of one pack for the CP rank that `rule.topology` names.

    Args:
        lengths: real tokens of each sequence.
        clips: (sequence, start within it, encoder frames) of every clip, in the order in which they are heard.
        total, rows: as for `place`.
        ids: names of the sequences, part of the checksum.

    Raises:
        what `place` raises.
    """
    slots = place(lengths, rule, total=total, rows=rows)
    topology = rule.topology
    index = cp_index(slots.offsets, topology.cp, topology.cp_rank)
    slot_of = np.repeat(np.arange(len(slots.lengths)), slots.sizes // topology.cp)
    position_ids = index - slots.offsets[slot_of]
    spans = np.asarray(clips, dtype=np.int64).reshape(-1, 3)
    held, source, destination, frames_max = _audio(spans, slots, index)
    return Plan(
        rule=rule,
        slots=slots,
        index=index,
        position_ids=position_ids,
        seq_idx=slot_of.astype(np.int32),
        padding_mask=position_ids >= slots.lengths[slot_of],
        clips=held,
        audio_source=source,
        audio_destination=destination,
        frames_max=frames_max,
        checksum=_checksum(rule, slots, spans, ids),
    )


def _audio(spans: np.ndarray, slots: Slots, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Clips that this rank holds, and for each of its audio tokens the encoder row and the place among its tokens."""
    sequence, start, frames = spans.T
    clip_of = np.repeat(np.arange(len(spans)), frames)
    frame_of = np.arange(clip_of.size) - np.repeat(np.cumsum(frames) - frames, frames)
    local = np.full(slots.total, -1, dtype=np.int64)
    local[index] = np.arange(index.size)
    destination = local[(slots.offsets[sequence] + start)[clip_of] + frame_of]
    here = destination >= 0
    clip_of, frame_of, destination = clip_of[here], frame_of[here], destination[here]
    held, row_of = np.unique(clip_of, return_inverse=True)
    frames_max = int(frames[held].max()) if held.size else 0
    return held, row_of * frames_max + frame_of, destination, frames_max


def _checksum(rule: Alignment, slots: Slots, spans: np.ndarray, ids: Sequence[str]) -> str:
    digest = hashlib.blake2b(rule.fingerprint.encode(), digest_size=8)
    for array in (slots.lengths, slots.offsets, spans):
        digest.update(f"{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    digest.update(repr(tuple(ids)).encode())  # repr: no two lists of ids are spelled alike
    return digest.hexdigest()
