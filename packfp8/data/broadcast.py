"""PeerLoader: the packs of one data-parallel rank for all its CP and TP peers, built by each of them or by one.

    broadcast=False     every peer reads and packs the same examples (the default: no word between them)
    broadcast=True      the group's first rank reads; then, for each step, to all:
                            a header of three numbers     what follows, how long the description is, how long the tensors are
                            one run of bytes              the tensors of every CP rank, then the description

Worth it where reading audio is the bottleneck: one decoder for cp * tp ranks, and each clip is read once. Each rank keeps its
own slab of what passes. Where the building rank fails, the others are told, and raise too instead of waiting for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader, Dataset

from packfp8.data.batch import PackedBatch
from packfp8.data.collate import Collator
from packfp8.data.dataset import PackedDataset
from packfp8.data.flat import described, fill, restored
from packfp8.data.peers import device_of
from packfp8.data.sampled_pack import SampledPack, fingerprint_of
from packfp8.data.sampler import PackingSampler
from packfp8.errors import ConfigError, StateError

STEP, FAILED, DONE = range(3)


class Slabs(Dataset):
    """Maps a pack of a `PackingSampler` to the batches of all CP ranks; picklable, so that workers may be spawned."""

    def __init__(self, collator: Collator) -> None:
        self.collator = collator

    def __getitem__(self, pack: SampledPack) -> tuple[PackedBatch, ...]:
        """The batches, in the order of the CP ranks.

        Raises:
            AudioError, LengthError, ExampleError, BudgetError: as the collator does.
        """
        return self.collator.slabs(pack, step=pack.step)


class PeerLoader:
    """An iterable of this rank's batches; every peer must draw from its own as often as the others.

        loader = PeerLoader(sampler, collator, group=mesh["cp", "tp"]._flatten().get_group(), broadcast=True, num_workers=4)

    Args:
        sampler: of this rank, with the seed and epoch of its peers'. `sampler.state_dict(step=batch.step)` is right on each of
            them, also where another rank reads.
        collator: with this rank's rule.
        group: its CP and TP peers, all of one data-parallel rank. With NCCL the batches arrive on the current GPU.
        broadcast: whether the group's first rank builds the packs of all.
        settings: of the `DataLoader`: workers, prefetching, pinning.

    Raises:
        ConfigError: sampler and collator of different rules or measures; with `broadcast`, a group of another size than
            cp * tp.
        StateError: with `broadcast`, peers of different rules or measures, on every rank alike.
    """

    def __init__(
        self,
        sampler: PackingSampler,
        collator: Collator,
        *,
        group: dist.ProcessGroup | None = None,
        broadcast: bool = False,
        **settings,
    ) -> None:
        self.sampler, self.dataset, self.group = sampler, PackedDataset(collator), group
        self.rule, self.broadcast, self.settings = collator.rule, broadcast, settings
        packed_by = fingerprint_of(sampler.terms.rule, sampler.terms.measure)
        if packed_by != self.dataset.fingerprint:
            raise ConfigError(
                "the sampler packs by another rule or measure than the collator",
                got=f"sampler {packed_by}",
                expected=f"collator {self.dataset.fingerprint}",
                because="a pack that is full by one may be too long, or illegal, by another",
                fix="give the same rule and measure to PackingSampler and Collator",
            )
        if broadcast:
            self.source, self.device = dist.get_process_group_ranks(group)[0], device_of(group)
            self._check_group()

    def __iter__(self) -> Iterator[PackedBatch]:
        """The batches of the sampler's epoch.

        Raises:
            what the sampler and the dataset raise; on the other peers, StateError in their words.
        """
        if not self.broadcast:
            yield from self._loader(self.dataset)
        elif dist.get_rank() == self.source:
            yield from self._send_all()
        else:
            yield from self._receive_all()

    def _loader(self, dataset: Dataset) -> DataLoader:
        return DataLoader(dataset, sampler=self.sampler, batch_size=None, **self.settings)

    def _send_all(self) -> Iterator[PackedBatch]:
        packs = None
        while True:
            try:
                packs = iter(self._loader(Slabs(self.dataset.collator))) if packs is None else packs
                slabs = next(packs, None)
            except Exception as fault:  # whatever it is, the others wait
                self._send(FAILED, f"{type(fault).__name__}: {fault}".encode())
                raise
            if slabs is None:
                return self._send(DONE, b"")
            yield self._send(STEP, *described(slabs), slabs)

    def _send(self, kind: int, text: bytes, tensor_bytes: int = 0, slabs: tuple[PackedBatch, ...] = ()) -> PackedBatch | None:
        """Sends to all peers; the sender's own slab, from the same bytes as theirs, so that it is where theirs are."""
        flat = torch.empty(len(text) + tensor_bytes, dtype=torch.uint8)
        if text:
            flat[tensor_bytes:] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if slabs:
            fill(flat, text, slabs)
        header = torch.tensor([kind, len(text), tensor_bytes])
        dist.broadcast(header.to(self.device), self.source, group=self.group)
        flat = flat.to(self.device)
        if len(flat):
            dist.broadcast(flat, self.source, group=self.group)
        return restored(flat, text, self.rule.topology.cp_rank, self.rule) if slabs else None

    def _receive_all(self) -> Iterator[PackedBatch]:
        while True:
            header = torch.empty(3, dtype=torch.int64, device=self.device)
            dist.broadcast(header, self.source, group=self.group)
            kind, text_bytes, tensor_bytes = header.tolist()
            if kind == DONE:
                return
            flat = torch.empty(text_bytes + tensor_bytes, dtype=torch.uint8, device=self.device)
            dist.broadcast(flat, self.source, group=self.group)
            text = flat[tensor_bytes:].cpu().numpy().tobytes()
            if kind == FAILED:
                raise _source_failed(self.source, text.decode())
            yield restored(flat, text, self.rule.topology.cp_rank, self.rule)

    def _check_group(self) -> None:
        topology, size = self.rule.topology, dist.get_world_size(self.group)
        if size != topology.cp * topology.tp:
            raise ConfigError(
                "the group that shares packs is not that of the CP and TP peers",
                got=f"{size} ranks",
                expected=f"{topology.cp * topology.tp}: cp {topology.cp} * tp {topology.tp}",
                because="these hold one pack, and no other rank does",
                fix='group=mesh["cp", "tp"]._flatten().get_group()',
            )
        told = [None] * size
        dist.all_gather_object(told, self.dataset.fingerprint, group=self.group)
        if len(set(told)) > 1:
            raise StateError(
                "CP and TP peers would read one pack by different rules or measures",
                got="; ".join(
                    f"rank {n}: {text}" for n, text in zip(dist.get_process_group_ranks(self.group), told, strict=True)
                ),
                expected="one rule and one measure",
                because="a slab that another rule cut is not the share that this rank's model expects",
                fix="build sampler and collator from the same configuration on every rank",
            )


def _source_failed(rank: int, told: str) -> StateError:
    return StateError(
        f"rank {rank}, which builds the packs of this group, could not build the next",
        got=" | ".join(line.strip() for line in told.splitlines()),
        expected="a pack on every peer",
        because="with broadcast=True this rank has its packs from there and would wait for ever",
        fix=f"see the error of rank {rank}",
    )
