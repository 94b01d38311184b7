"""check_peers: a debug check that ranks which must hold the same pack do."""

from __future__ import annotations

import hashlib

import torch
from torch import distributed as dist

from packfp8.data.batch import PackedBatch
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
    digest = hashlib.sha256(f"{batch.fingerprint} {batch.checksum}".encode()).digest()[:7]
    mine = torch.tensor([batch.step, len(batch.ids), int.from_bytes(digest, "big")], dtype=torch.int64)
    if dist.get_backend(group) == dist.Backend.NCCL:  # which gathers tensors of a GPU only
        mine = mine.cuda()
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    packs = [tuple(one.tolist()) for one in gathered]
    most = max(packs, key=packs.count)  # of several, that of the first rank
    ranks = dist.get_process_group_ranks(group)
    others = [(rank, pack) for rank, pack in zip(ranks, packs, strict=True) if pack != most]
    if others:
        raise StateError(
            f"rank {', '.join(str(rank) for rank, _ in others)} holds another pack than its peers",
            got="; ".join(f"rank {rank}: {_told(*pack)}" for rank, pack in others),
            expected=f"as rank {ranks[packs.index(most)]}: {_told(*most)}",
            because="CP and TP peers compute on one pack; from different ones they add up what does not belong together",
            fix="give the sampler of each rank a Topology with its data-parallel rank, not its global rank, and equal seeds",
        )


def _told(step: int, sequences: int, digest: int) -> str:
    return f"step {step}, {sequences} sequences, checksum {digest:014x}"
