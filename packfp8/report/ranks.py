"""Ranks: files split over the processes that torchrun started, and their tallies added up by one all-reduce.

    gather   what each rank could not do, and which pairs of lengths it met
    reduce   how often each pair occurs

Every rank takes part in both, also one that failed: so nobody waits for it, and all of them raise its error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from packfp8.errors import ConfigError, PackError
from packfp8.report.manifests import Manifest
from packfp8.report.tally import Rejected, Tally
from packfp8.report.workers import num_cores

Count = Callable[[list[Manifest]], tuple[Tally, Rejected]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among those of a launch.

    Attributes:
        rank, size: its place, and how many there are.
        neighbours: how many of them are on this machine, it included.
    """

    rank: int = 0
    size: int = 1
    neighbours: int = 1

    @property
    def cores(self) -> int:
        """Cores for this process; those of its machine are shared with its neighbours."""
        return max(1, num_cores() // self.neighbours)

    def counted(self, find: Callable[[], tuple[Manifest, ...]], count: Count) -> tuple[Tally, Rejected]:
        """The tally of all manifests, each counted by one rank; the same on every rank.

        Args:
            find: the manifests; called on every rank.
            count: the tally of some of them.

        Raises:
            PackError: what the first failing rank raised, on every rank.
        """
        if self.size == 1:
            try:
                return count(list(find()))
            except OSError as error:
                raise unreadable(error) from error
        fault, names, tally, rejected = None, None, Tally.total([]), Rejected()
        try:
            manifests = find()
            names = [str(manifest.path) for manifest in manifests]
            tally, rejected = count(list(manifests)[self.rank :: self.size])
        except (PackError, OSError) as error:
            fault = error if isinstance(error, PackError) else unreadable(error)
        keys = tally.keys
        heard = _gathered({"fault": fault, "names": names, "keys": keys, "rejected": rejected, "bare": tally.bare})
        for rank, one in enumerate(heard):
            if one["fault"] is not None:
                raise one["fault"]
            if one["names"] != heard[0]["names"]:
                raise _other_files(rank, one["names"], heard[0]["names"])
        union = np.unique(np.concatenate([one["keys"] for one in heard]))
        counts = np.zeros(len(union), dtype=np.int64)
        counts[np.searchsorted(union, keys)] = tally.counts
        total = Tally.of_keys(union, _all_reduced(counts), bare=sum(one["bare"] for one in heard))
        return total, sum((one["rejected"] for one in heard), Rejected())


@contextmanager
def launched() -> Iterator[Ranks]:
    """The ranks that torchrun started, with a gloo group while the context lasts; a single one where it started none."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        yield Ranks()
        return
    import torch.distributed as dist

    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo")
    try:
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        yield Ranks(rank=dist.get_rank(), size=dist.get_world_size(), neighbours=neighbours)
    finally:
        if mine:
            dist.destroy_process_group()


def unreadable(fault: OSError) -> ConfigError:
    """The error for a file that the system does not give."""
    return ConfigError(
        f"{fault.filename or 'a manifest'} cannot be read",
        got=f"{type(fault).__name__}: {fault.strerror or fault}",
        expected="a file that this process may read",
        because="a report on part of the data would look like a report on all of it",
        fix="check the path and its permissions on every machine, or leave it out",
    )


def _gathered(value: dict) -> list[dict]:
    import torch.distributed as dist

    heard: list = [None] * dist.get_world_size()
    dist.all_gather_object(heard, value)
    return heard


def _all_reduced(counts: np.ndarray) -> np.ndarray:
    import torch
    import torch.distributed as dist

    tensor = torch.from_numpy(counts)
    dist.all_reduce(tensor)
    return tensor.numpy()


def _other_files(rank: int, got: list[str], expected: list[str]) -> ConfigError:
    differing = sorted({*got} ^ {*expected})
    return ConfigError(
        f"rank {rank} finds other manifests than rank 0",
        got=f"{len(got)} files",
        expected=f"the {len(expected)} files of rank 0; they differ in {', '.join(differing[:3]) or 'their order'}",
        because="each rank counts every n-th file: over different lists some would be counted twice and others never",
        fix="give paths that every machine sees alike",
    )
