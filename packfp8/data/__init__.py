"""Data: the edge to lhotse and torch."""

from packfp8.data.batch import PackedBatch, SetAside
from packfp8.data.broadcast import PeerLoader
from packfp8.data.clip import Clip
from packfp8.data.collate import Collator
from packfp8.data.corpus import corpus
from packfp8.data.dataset import PackedDataset
from packfp8.data.example import Example, Turn, as_example, as_examples
from packfp8.data.lockstep import in_lockstep
from packfp8.data.micro_batches import MicroBatches
from packfp8.data.peers import check_peers, check_plan, check_start
from packfp8.data.progress import Progress
from packfp8.data.reshard import check_loader
from packfp8.data.sampler import PackingSampler
from packfp8.data.sharded import ShardedPackingSampler

__all__ = [
    "Clip",
    "Collator",
    "Example",
    "MicroBatches",
    "PackedBatch",
    "PackedDataset",
    "PackingSampler",
    "PeerLoader",
    "Progress",
    "SetAside",
    "ShardedPackingSampler",
    "Turn",
    "as_example",
    "as_examples",
    "check_loader",
    "check_peers",
    "check_plan",
    "check_start",
    "corpus",
    "in_lockstep",
]
