"""Checks over a process group: that ranks start with the same settings, plan the same steps, and peers hold the same pack."""

from __future__ import annotations

import hashlib
from itertools import islice

import torch
from torch import distributed as dist

from packfp8.data.batch import PackedBatch
from packfp8.data.collate import Collator
from packfp8.data.sampler import PackingSampler
from packfp8.errors import StateError

COLLATED_BY = (
    *("budget", "over_budget", "on_fault", "resample", "tolerance_samples", "static", "max_sequences", "frame_budget"),
    *("max_seqlen", "buckets", "share_encoder"),
)
"""Settings of a collator that peers must share, beside its rule and measure."""


def check_start(
    sampler: PackingSampler, collator: Collator, group: dist.ProcessGroup | None = None, *, steps: int = 64
) -> None:
    """Nothing, where all ranks of the group start alike. A collective; call it once, before training.

    First the settings are compared: rule, measure, budget, seed and whatever else decides packs; then, as `check_plan` does,
    the steps that follow from them and from the examples.

    Args:
        sampler, collator: this rank's.
        group: all ranks where it is left out.
        steps: how many steps of the plan are compared; 0 for the settings alone.

    Raises:
        StateError: on every rank of the group alike; it names the ranks that differ from most, and the settings.
    """
    mine = {"epoch": sampler.epoch, **sampler.terms.summary()}
    mine |= {"collator's rule": collator.rule.fingerprint, "collator's measure": collator.measure.fingerprint}
    mine |= {f"collator's {name}": getattr(collator, name) for name in COLLATED_BY}
    told: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, {name: repr(value) for name, value in mine.items()}, group=group)
    by_rank = dict(zip(dist.get_process_group_ranks(group), told, strict=True))
    usual, others = differing(by_rank)
    if others:
        names = [name for name in by_rank[usual] if any(by_rank[rank].get(name) != by_rank[usual][name] for rank in others)]
        told_by = {rank: ", ".join(f"{name} {by_rank[rank].get(name)}" for name in names) for rank in (usual, *others)}
        raise StateError(
            f"rank {', '.join(map(str, others))} starts with another {', '.join(names)} than the other ranks",
            got="; ".join(f"rank {rank}: {told_by[rank]}" for rank in others),
            expected=f"as rank {usual}: {told_by[usual]}",
            because="each rank plans all steps by itself; other settings repeat some examples, lose others, or hang the ranks",
            fix="build sampler and collator from one configuration, the same on every rank",
        )
    if steps:
        check_plan(sampler, group, steps=steps)


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
    usual, others = differing(by_rank)
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
    usual, others = differing(by_rank)
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
    tensor = torch.tensor(mine, dtype=torch.int64, device=device_of(group))
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return dict(zip(dist.get_process_group_ranks(group), (tuple(one.tolist()) for one in gathered), strict=True))


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's tensors must be: NCCL takes those of a GPU only."""
    nccl = dist.get_backend(group) == dist.Backend.NCCL
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def differing(by_rank: dict) -> tuple[int, list[int]]:
    """The first rank of the most that agree, and the ranks that do not agree with it."""
    answers = list(by_rank.values())
    usual = max(by_rank, key=lambda rank: answers.count(by_rank[rank]))  # of several, the first
    return usual, [rank for rank, answer in by_rank.items() if answer != by_rank[usual]]


def _told(step: int, sequences: int, digest: int) -> str:
    return f"step {step}, {sequences} sequences, checksum {digest:014x}"
