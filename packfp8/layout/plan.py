"""Plan: everything about a pack that follows from lengths alone, for one CP rank.

It is made before any audio is read, and it is the same on every rank but for the slab. All that the collator does after it is
to fill in ids and samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from packfp8.layout.rooms import in_rooms
from packfp8.layout.shard import cp_index
from packfp8.layout.share import dealt, held
from packfp8.layout.slots import Slots, place
from packfp8.rule import Alignment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Where every token of one pack sits, as the CP rank of `rule.topology` sees it.

    Args:
        index: int64 `[T/cp]`, positions in the pack of the tokens that this rank holds.
        position_ids: int64 `[T/cp]`, position within the slot; runs on through its padding.
        seq_idx: int32 `[T/cp]`, number of the slot; filler has its own, one for each of its slots.
        padding_mask: bool `[T/cp]`, True = pad.
        clips: int64 `[encoded]`, the clips that this rank encodes, in order: those of which it holds at least one frame, or its
            share of all.
        audio_source: int64 `[frames sent]`, rows of those clips' encoder output, flattened from `[encoded, frames_max]`; with a
            frame budget as `in_rooms` says.
        audio_destination: int64 `[frames received]`, where frames stand among this rank's tokens.
        frames_max: encoder frames of the longest of those clips, 0 without clips; the frame budget where there is one.
        frames_sent, frames_received: to and from each CP rank, itself included; another only where encoders are shared.
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
    frames_sent: tuple[int, ...]
    frames_received: tuple[int, ...]
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
    longest: int | None = None,
    ids: Sequence[str] = (),
    share_encoder: bool = False,
    frame_budget: int | None = None,
) -> Plan:
    """The plan of one pack for the CP rank that `rule.topology` names.

    Args:
        lengths: real tokens of each sequence.
        clips: (sequence, start within it, encoder frames) of every clip, in the order in which they are heard.
        total, rows, longest: as for `place`.
        ids: names of the sequences, part of the checksum.
        share_encoder: whether each clip is encoded by one CP rank, and its frames travel.
        frame_budget: encoder frames of one row in which all clips stand; without it each has a row. Not with `share_encoder`.

    Raises:
        what `place` raises.
        BudgetError: the clips do not fit the frame budget.
    """
    slots = place(lengths, rule, total=total, rows=rows, longest=longest)
    topology = rule.topology
    index = cp_index(slots.offsets, topology.cp, topology.cp_rank)
    slot_of = np.repeat(np.arange(len(slots.lengths)), slots.sizes // topology.cp)
    position_ids = index - slots.offsets[slot_of]
    spans = np.asarray(clips, dtype=np.int64).reshape(-1, 3)
    heard = (dealt if share_encoder else held)(spans, slots, topology)
    if frame_budget is not None:
        heard = in_rooms(heard, spans[heard.clips, 2], topology, frame_budget=frame_budget, tokens=index.size)
    return Plan(
        rule=rule,
        slots=slots,
        index=index,
        position_ids=position_ids,
        seq_idx=slot_of.astype(np.int32),
        padding_mask=position_ids >= slots.lengths[slot_of],
        clips=heard.clips,
        audio_source=heard.source,
        audio_destination=heard.destination,
        frames_max=heard.frames_max,
        frames_sent=heard.sent,
        frames_received=heard.received,
        checksum=_checksum(rule, slots, spans, ids, share_encoder),
    )


def _checksum(rule: Alignment, slots: Slots, spans: np.ndarray, ids: Sequence[str], share_encoder: bool) -> str:
    digest = hashlib.blake2b(rule.fingerprint.encode() + b" shared" * share_encoder, digest_size=8)
    for array in (slots.lengths, slots.offsets, spans):
        digest.update(f"{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    digest.update(repr(tuple(ids)).encode())  # repr: no two lists of ids are spelled alike
    return digest.hexdigest()
