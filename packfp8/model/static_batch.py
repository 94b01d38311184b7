"""StaticBatch: a batch at constant addresses of the GPU, where a captured step reads it, and the copies that lead there.

    pinned memory --stream of its own--> one of two places to wait --the step's stream--> the place that the step reads

In each place the tensors of a batch stand side by side in one buffer of bytes, so that the second copy is a single one. The
first one, over the bus, runs while the step before is computed. Events keep either from overwriting what is still read.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from packfp8.data import PackedBatch

_ALIGNED_BYTES = 256  # cudaMalloc's own alignment (CUDA C programming guide): kernels read a view as they read a tensor
_NUMBERS = ("layout", "max_seqlen", "audio_frames", "frames_sent", "frames_received")  # of which the launched kernels depend


class StaticBatch:
    """The place that a captured step reads, and two more in which batches wait.

    Args:
        example: a batch of the one shape.
        device: a GPU.
    """

    def __init__(self, example: PackedBatch, device: torch.device) -> None:
        self.device, self._form = device, _form(example)
        self._read = _Place(example, device)
        self._waiting = [_Place(example, device) for _ in range(2)]
        self._sent: list[tuple[PackedBatch, _Place]] = []
        self._stream = torch.cuda.Stream(device)

    def difference(self, batch: PackedBatch) -> str | None:
        """The first thing, as "another max_seqlen", in which the batch is not of the one shape; None where it is."""
        form = _form(batch)
        return next((f"another {name}" for name, own in self._form.items() if form[name] != own), None)

    def send(self, batch: PackedBatch) -> None:
        """Starts the copy of a batch of the one shape, of which nothing waits; one that is on a GPU already stays there.

        Two may be on their way; a third takes the place of the first.
        """
        if batch.input_ids.is_cuda:
            return
        place = self._waiting[0]
        self._waiting.reverse()
        self._sent = [pair for pair in self._sent if pair[1] is not place] + [(batch, place)]
        pinned = batch if batch.input_ids.is_pinned() else batch.pin_memory()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(place.left)
            place.fill(pinned)
            place.arrived.record(self._stream)

    def take(self, batch: PackedBatch) -> PackedBatch:
        """The batch with its tensors in the place that the step reads, once the current stream has come there."""
        if not any(sent is batch for sent, _ in self._sent):
            self.send(batch)
        place = next((place for sent, place in self._sent if sent is batch), None)
        if place is None:
            self._read.fill(batch)
        else:
            self._sent = [pair for pair in self._sent if pair[1] is not place]
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(place.arrived)
            self._read.bytes.copy_(place.bytes)
            place.left.record(stream)
        return replace(batch, **self._read.tensors)


class _Place:
    """Room for the tensors of a batch: `bytes`, and views of it by the names of the fields."""

    def __init__(self, example: PackedBatch, device: torch.device) -> None:
        like, begin, begins = _tensors(example), 0, {}
        for name, tensor in like.items():
            begins[name] = begin
            begin += -(-tensor.numel() * tensor.element_size() // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self.bytes = torch.zeros(begin, dtype=torch.uint8, device=device)
        self.tensors = {
            name: self.bytes[begins[name] :][: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            for name, tensor in like.items()
        }
        self.arrived, self.left = torch.cuda.Event(), torch.cuda.Event()

    def fill(self, batch: PackedBatch) -> None:
        """Copies the tensors of `batch` here, on the current stream."""
        for name, tensor in _tensors(batch).items():
            self.tensors[name].copy_(tensor, non_blocking=True)


def _form(batch: PackedBatch) -> dict[str, object]:
    """All that must be the same of two batches for which the same kernels run: shapes and types, and a few numbers."""
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    form = {name: (value.shape, value.dtype) if isinstance(value, Tensor) else value for name, value in values.items()}
    return {name: form[name] for name in form if name in _NUMBERS or isinstance(values[name], Tensor) or values[name] is None}


def _tensors(batch: PackedBatch) -> dict[str, Tensor]:
    return {f.name: value for f in fields(batch) if isinstance(value := getattr(batch, f.name), Tensor)}
