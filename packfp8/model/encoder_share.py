"""FrameExchange: each CP rank encodes its share of the pack's clips, and only the frames that another rank holds travel.

    encoded here   a a a a | c c c c c c        sent in one all-to-all, rank by rank; the gradients come back the same way
    held here      a a . . | b b | c c . .

Without it a clip is encoded by every rank that holds a chunk of it. How many frames go where is part of the plan, made on the
CPU from lengths alone: no lengths are exchanged, and nothing waits for the device.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from packfp8.data import PackedBatch
from packfp8.errors import ConfigError


class FrameExchange:
    """(rows for all ranks, batch) -> the rows that this rank holds, in the order of `batch.audio_destination`.

    A collective, forward and backward: every rank of the group calls it for every batch, also one that has no audio.

    Args:
        group: the CP process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, rows: Tensor, batch: PackedBatch) -> Tensor:
        """`[frames received, hidden]` of `rows` `[frames sent, hidden]`.

        Raises:
            ConfigError: the group has another size than the batch's cp.
        """
        size, cp = dist.get_world_size(self.group), batch.rule.topology.cp
        if size != cp:
            raise ConfigError(
                "the group that exchanges frames is not the CP group",
                got=f"{size} ranks",
                expected=f"{cp} ranks",
                because="the plan says how many frames go to each CP rank, and to no other",
                fix='PackedModel(cp_group=mesh["cp"].get_group())',
            )
        return _AllToAll.apply(rows, batch.frames_sent, batch.frames_received, self.group)


def alone(rows: Tensor, batch: PackedBatch) -> Tensor:
    """The rows as they are: this rank encoded all that it holds, as `check_alone` has seen."""
    return rows


def check_alone(batch: PackedBatch) -> None:
    """Nothing, where no frame of the batch must travel.

    Raises:
        ConfigError: some must.
    """
    here = batch.rule.topology.cp_rank
    if sum(batch.frames_sent) != batch.frames_sent[here] or sum(batch.frames_received) != batch.frames_received[here]:
        raise ConfigError(
            f"the encoder is shared over CP ranks for the batch of {', '.join(batch.ids[:4])}, and the model has no group",
            got=f"frames sent {batch.frames_sent}, received {batch.frames_received}",
            expected=f"all of them at CP rank {here}",
            because="frames that another rank encoded have to be fetched from there",
            fix="PackedModel(cp_group=...), or Collator(share_encoder=False)",
        )


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out
