"""PackedDataset: reads the audio of a pack in a loader's worker and makes the batch."""

from __future__ import annotations

from torch.utils.data import Dataset

from packfp8.data.batch import PackedBatch
from packfp8.data.collate import Collator
from packfp8.data.sampled_pack import SampledPack, fingerprint_of
from packfp8.errors import ConfigError


class PackedDataset(Dataset):
    """Maps a pack of a `PackingSampler` to its batch; picklable, so that workers may be spawned.

        loader = DataLoader(PackedDataset(collator), sampler=sampler, batch_size=None, num_workers=4)

    Args:
        collator: with the sampler's measure, rule and budget. It holds this rank's CP coordinate.
    """

    def __init__(self, collator: Collator) -> None:
        self.collator = collator
        self.fingerprint = fingerprint_of(collator.rule, collator.measure)

    def __getitem__(self, pack: SampledPack) -> PackedBatch:
        """The batch of a pack, with the pack's step; of a pack without examples, filler of zero weight.

        Raises:
            ConfigError: something else than a pack, or one that was packed by another rule or measure.
            AudioError, LengthError, ExampleError, BudgetError: as the collator does.
        """
        check_pack(pack, self.fingerprint)
        return self.collator.collate(pack, step=pack.step)


def check_pack(pack: object, fingerprint: str) -> None:
    """Nothing, where it is a pack of a sampler that packs by this rule and measure.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(pack, SampledPack):
        raise ConfigError(
            "the dataset is given something else than a pack",
            got=type(pack).__name__,
            expected="a SampledPack, as PackingSampler yields",
            because="only a sampler that packs to the budget gives every rank as many steps as the others",
            fix="DataLoader(dataset, sampler=PackingSampler(...), batch_size=None), or collate_fn=Collator(...)",
        )
    if pack.fingerprint != fingerprint:
        raise ConfigError(
            "the sampler packs by another rule or measure than the collator",
            got=f"sampler {pack.fingerprint}",
            expected=f"collator {fingerprint}",
            because="a pack that is full by one may be too long, or illegal, by another",
            fix="give the same rule and measure to PackingSampler and Collator",
        )
