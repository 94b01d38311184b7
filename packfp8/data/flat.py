"""Batches as one run of bytes, and back: the tensors end to end, each at a multiple of 64 bytes, and one small description.

Nothing of a tensor passes through a pickler; the description holds names, shapes, places and the batch's plain values.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from packfp8.data.batch import PackedBatch
from packfp8.rule import Alignment

ALIGNED_BYTES = 64
"""Begin of each tensor: a cache line, and more than any element type needs for `Tensor.view(dtype)`."""


def described(batches: Sequence[PackedBatch]) -> tuple[bytes, int]:
    """The description of batches, and how many bytes their tensors take."""
    at, told = 0, []
    for batch in batches:
        places, plain = {}, {}
        for field in fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, Tensor):
                places[field.name] = (at, tuple(value.shape), value.dtype)
                at += -(-value.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
            elif field.name != "rule":  # each rank has its own
                plain[field.name] = value
        told.append((places, plain))
    return pickle.dumps(told, protocol=pickle.HIGHEST_PROTOCOL), at


def fill(flat: Tensor, description: bytes, batches: Sequence[PackedBatch]) -> None:
    """Writes the tensors of `batches` to their places in `flat`, uint8 of at least as many bytes as `described` says."""
    for batch, (places, _) in zip(batches, pickle.loads(description), strict=True):
        for name, (at, _, _) in places.items():
            value = getattr(batch, name)
            flat[at : at + value.nbytes].view(value.dtype).reshape(value.shape).copy_(value)


def restored(flat: Tensor, description: bytes, number: int, rule: Alignment) -> PackedBatch:
    """Batch `number` of those in `flat`, as the rank of `rule` holds it. The others' bytes are not kept alive."""
    places, plain = pickle.loads(description)[number]
    first = min(at for at, _, _ in places.values())
    last = max(at + _bytes(shape, dtype) for at, shape, dtype in places.values())
    own = flat[first:last].clone()
    tensors = {
        name: own[at - first : at - first + _bytes(shape, dtype)].view(dtype).reshape(shape)
        for name, (at, shape, dtype) in places.items()
    }
    return PackedBatch(**tensors, **plain, rule=rule)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
