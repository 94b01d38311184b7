"""check_loader: that nothing between the sampler and training deals out packs a second time.

A `PackingSampler` gives each data-parallel rank its own packs, and CP and TP peers the same. Frameworks that find a loader wrap
its sampler, to give each process every n-th batch; of packs dealt already that leaves a share of a share, and gives peers
different packs. The settings that leave packs alone:

    Accelerate        accelerator.prepare(model, optimizer), without the loader; move batches with batch.to(accelerator.device)
    Lightning         Trainer(use_distributed_sampler=False)
    Hugging Face      class PackTrainer(Trainer): get_train_dataloader(self) returns the loader itself
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.utils.data import DataLoader

from packfp8.data.collate import Collator
from packfp8.data.dataset import PackedDataset
from packfp8.data.micro_batches import MicroBatches
from packfp8.data.sampler import PackingSampler
from packfp8.errors import ConfigError
from packfp8.rule import Topology

_INNER = ("sampler", "batch_sampler", "dataset", "_sampler")
_SPELLINGS = (("num_replicas", "rank"), ("num_processes", "process_index"))
"""Of torch's DistributedSampler and Lightning's wrapper of it; of Accelerate's BatchSamplerShard and IterableDatasetShard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealer:
    """Something in a loader that deals out what passes through it.

    Args:
        name: of its class.
        ranks, rank: among how many, and which of them this is.
    """

    name: str
    ranks: int
    rank: int


def check_loader(loader: DataLoader) -> None:
    """Nothing, where this loader hands on each pack as it was made. Call it on what the framework returns, before training.

    With a `Collator` as `collate_fn` examples are dealt out and not packs: there must then be one dealer, among data-parallel
    ranks, where there are several of these.

    Raises:
        ConfigError: packs would be dealt a second time, or cut and joined; or examples are dealt to other ranks than the
            data-parallel ones, or to all the same.
    """
    parts = list(_parts(loader))
    dealers = [dealer for part in parts if (dealer := _dealer(part))]
    packed = (PackingSampler, PackedDataset, MicroBatches)  # Accelerate keeps the dataset alone
    if any(isinstance(part, packed) for part in parts):
        if dealers:
            raise _dealt_twice(dealers[0])
        return
    topologies = [part.rule.topology for part in parts if isinstance(part, Collator)]
    for topology in topologies:
        found = [(dealer.ranks, dealer.rank) for dealer in dealers]
        wanted = [(topology.dp, topology.dp_rank)] if topology.dp > 1 else []
        if found != wanted:
            raise _dealt_wrongly(dealers, topology)
    if not topologies:
        raise ConfigError(
            "the loader has no pack sampler and no collator of this library",
            got=type(loader).__name__,
            expected="a DataLoader over a PackingSampler, or with collate_fn=Collator(...)",
            because="whether its batches are dealt out rightly cannot be told",
            fix="check the DataLoader itself, or what the framework made of it",
        )


def _parts(loader: object) -> Iterator[object]:
    """The loader and what it holds, each once: samplers within samplers, datasets, the collator."""
    waiting, seen = [loader], set()
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += [getattr(part, name, None) for name in (*_INNER, "collate_fn", "base_dataloader")]


def _dealer(part: object) -> Dealer | None:
    if isinstance(part, PackingSampler):
        return None
    name = type(part).__name__
    if name == "DataLoaderDispatcher":  # Accelerate's: rank 0 reads, joins and cuts batches for all
        return Dealer(name=name, ranks=0, rank=0)
    for ranks, rank in _SPELLINGS:
        if isinstance(getattr(part, ranks, None), int) and getattr(part, ranks) > 1:
            return Dealer(name=name, ranks=getattr(part, ranks), rank=getattr(part, rank))
    return None


def _dealt_twice(dealer: Dealer) -> ConfigError:
    return ConfigError(
        "the packs of a PackingSampler would be dealt out a second time",
        got=f"{dealer.name} among {dealer.ranks} processes" if dealer.ranks else f"{dealer.name}, which joins and cuts batches",
        expected="the PackingSampler alone between the examples and the loader",
        because="each rank would train on a share of its own packs, and CP or TP peers on different ones",
        fix="Accelerate: prepare the model without the loader; Lightning: Trainer(use_distributed_sampler=False); Hugging Face "
        "Trainer: return the loader from get_train_dataloader",
    )


def _dealt_wrongly(dealers: list[Dealer], topology: Topology) -> ConfigError:
    told = ", ".join(f"{dealer.name} for rank {dealer.rank} of {dealer.ranks}" for dealer in dealers)
    return ConfigError(
        "the examples are not dealt out among the data-parallel ranks",
        got=told or "every process gets all examples",
        expected=f"rank {topology.dp_rank} of {topology.dp}" if topology.dp > 1 else "no dealing: dp is 1",
        because="CP and TP peers must see the same examples, and other ranks must not",
        fix="DistributedSampler(dataset, num_replicas=topology.dp, rank=topology.dp_rank), or a PackingSampler",
    )
