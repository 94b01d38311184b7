"""What stands in a pack: ids and labels, offsets, and the checksum of all that its peers must agree on."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from packfp8.data.batch import IGNORED
from packfp8.errors import BudgetError
from packfp8.layout import Plan, Slots
from packfp8.lengths import Encoded


def ids_and_labels(encoded: list[Encoded], slots: Slots) -> tuple[np.ndarray, np.ndarray]:
    """int64 `[T]` ids and labels of the whole pack. Labels are shifted within each sequence, before any split."""
    ids, labels = np.zeros(slots.total, np.int64), np.full(slots.total, IGNORED, np.int64)
    if encoded:
        flat = np.concatenate([e.ids for e in encoded])
        target = np.concatenate([e.supervised for e in encoded])
        shifted = np.where(np.append(target[1:], False), np.append(flat[1:], 0), IGNORED)
        shifted[np.cumsum(slots.lengths[: slots.sequences]) - 1] = IGNORED  # the next token is another sequence's
        real = slots.real()
        ids[real], labels[real] = flat, shifted
    return ids, labels


def cu_seqlens(slots: Slots, count: int) -> torch.Tensor:
    """int32 `[count]`, padded offsets, the last repeated where there are fewer."""
    if slots.total >= 2**31:
        raise BudgetError(
            "the offsets of the pack do not fit their type",
            got=f"{slots.total} tokens",
            expected=f"less than {2**31}",
            because="attention kernels take int32 offsets, and one that wraps reads another sequence's memory",
            fix="lower the budget",
        )
    offsets = np.append(slots.offsets, np.full(count - len(slots.offsets), slots.total))
    return torch.from_numpy(offsets.astype(np.int32))


def checksum(plan: Plan, ids: np.ndarray, labels: np.ndarray) -> str:
    """The plan's checksum and every token of the whole pack: two peers with one id for two texts differ."""
    return hashlib.blake2b(plan.checksum.encode() + ids.tobytes() + labels.tobytes(), digest_size=8).hexdigest()
