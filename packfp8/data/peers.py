"""Debug checks over a process group: that peers hold the same pack, and that all ranks plan the same steps."""

from __future__ import annotations

import hashlib
from itertools import islice

import torch
from torch import distributed as dist

from packfp8.data.batch import PackedBatch
from packfp8.data.sampler import PackingSampler
from packfp8.errors import StateError


def check_peers(batch: PackedBatch, group: dist.ProcessGroup | None = None) -> None:
    """Nothing, where every rank of the group holds the same pack. A collective: every rank of the group must call it.

    Costs one small all-gather and a synchronisation; meant for the first steps of a run, or while looking for a fault.

    Args:
        batch: this rank's.
        group: the CP peers, the TP peers, or both; all ranks where it is left out.

    Raises:
        StateError: on every rank of the group alike; it names the ranks whose pack differs from that of most.
    """
    digest = _digest(f"{batch.fingerprint} {batch.checksum}".encode())
    by_rank = _gathered((batch.step, len(batch.ids), digest), group)
    usual, others = _differing(by_rank)
    if others:
        raise StateError(
            f"rank {', '.join(map(str, others))} holds another pack than its peers",
            got="; ".join(f"rank {rank}: {_told(*by_rank[rank])}" for rank in others),
            expected=f"as rank {usual}: {_told(*by_rank[usual])}",
            because="CP and TP peers compute on one pack; from different ones they add up what does not belong together",
            fix="give the sampler of each rank a Topology with its data-parallel rank, not its global rank, and equal seeds",
        )


def check_plan(sampler: PackingSampler, group: dist.ProcessGroup | None = None, *, steps: int = 64) -> None:
    """Nothing, where the samplers of all ranks of the group plan the same steps. A collective, as `check_peers`.

    Data-parallel ranks plan all steps, each by itself. Where one of them walks another order, examples are lost and repeated,
    and no pack shows it. The steps are planned apart: the sampler stays where it is.

    Args:
        sampler: this rank's, at the same epoch as the others.
        group: all ranks where it is left out.
        steps: how many steps of the epoch are compared, by the lengths of all ranks' packs.

    Raises:
        StateError: on every rank of the group alike; it names the ranks whose plan differs from that of most.
    """
    terms = _digest(repr(sampler.terms.summary()).encode())
    planned = [[one.tokens for one in pack] for step in islice(sampler.forecast(), steps) for pack in step]
    by_rank = _gathered((sampler.epoch, terms, _digest(repr(planned).encode())), group)
    usual, others = _differing(by_rank)
    if others:
        told = "rank {}: epoch {}, terms {:014x}, plan {:014x}".format
        raise StateError(
            f"rank {', '.join(map(str, others))} plans other steps than the other ranks",
            got="; ".join(told(rank, *by_rank[rank]) for rank in others),
            expected=f"as {told(usual, *by_rank[usual])}",
            because="each rank takes its column of one plan; columns of different plans repeat some examples and lose others",
            fix="give every rank the same manifests in the same order, and the same filters, settings and epoch",
        )


def _digest(content: bytes) -> int:
    """The first 7 bytes of the SHA-256, a number that int64 holds."""
    return int.from_bytes(hashlib.sha256(content).digest()[:7], "big")


def _gathered(mine: tuple[int, ...], group: dist.ProcessGroup | None) -> dict[int, tuple[int, ...]]:
    """Each rank's numbers by its global rank, in the order of the group."""
    tensor = torch.tensor(mine, dtype=torch.int64)
    if dist.get_backend(group) == dist.Backend.NCCL:  # which gathers tensors of a GPU only
        tensor = tensor.cuda()
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return dict(zip(dist.get_process_group_ranks(group), (tuple(one.tolist()) for one in gathered), strict=True))


def _differing(by_rank: dict[int, tuple[int, ...]]) -> tuple[int, list[int]]:
    """The first rank of the most that agree, and the ranks that do not agree with it."""
    answers = list(by_rank.values())
    usual = max(by_rank, key=lambda rank: answers.count(by_rank[rank]))  # of several, the first
    return usual, [rank for rank, answer in by_rank.items() if answer != by_rank[usual]]


def _told(step: int, sequences: int, digest: int) -> str:
    return f"step {step}, {sequences} sequences, checksum {digest:014x}"
