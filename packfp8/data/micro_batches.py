"""MicroBatches: the packs of one pipeline step, all of one shape.

sampler     pack 0   pack 1   pack 2 | pack 3   pack 4   pack 5 | pack 6
step            0 0 0                |     1 1 1                |   2, filler, filler
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.utils.data import Dataset

from packfp8.data.batch import PackedBatch
from packfp8.data.collate import Collator
from packfp8.data.dataset import check_pack
from packfp8.data.sampled_pack import SampledPack, fingerprint_of
from packfp8.errors import ConfigError


class MicroBatches(Dataset):
    """Maps the packs of one step to its micro-batches, of one shape, as `Collator.micro_batches` says; picklable.

        loader = DataLoader(
            MicroBatches(collator, count=8),
            sampler=torch.utils.data.BatchSampler(sampler, 8, drop_last=False),
            batch_size=None,
            num_workers=4,
        )
        for batches in loader:
            schedule.step(*batches)
            state = sampler.state_dict(step=batches[-1].step)

    Args:
        collator: with the sampler's measure, rule and budget.
        count: micro-batches of a step. The last step of an epoch, where packs are fewer, is completed with filler of zero
            weight.

    Raises:
        ConfigError: a count that is none.
    """

    def __init__(self, collator: Collator, *, count: int) -> None:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(
                "the number of micro-batches cannot be",
                got=repr(count),
                expected="a whole number of at least 1",
                because="a pipeline's schedule is made for a fixed number of micro-batches",
                fix="give the count that the schedule has",
            )
        self.collator, self.count = collator, count
        self.fingerprint = fingerprint_of(collator.rule, collator.measure)

    def __getitem__(self, packs: Sequence[SampledPack]) -> tuple[PackedBatch, ...]:
        """`count` batches in the packs' order; each bears its pack's step, and filler that of the last.

        Raises:
            ConfigError: something else than packs, more of them than `count`, none, or packed by another rule or measure.
            AudioError, LengthError, ExampleError, BudgetError: as the collator does.
        """
        if not isinstance(packs, (list, tuple)) or not 0 < len(packs) <= self.count:
            raise ConfigError(
                "a step is given something else than its packs",
                got=f"{len(packs)} packs" if isinstance(packs, (list, tuple)) else type(packs).__name__,
                expected=f"a list of 1 to {self.count} packs",
                because="the micro-batches of a step get one shape together, and the schedule is made for their number",
                fix=f"DataLoader(dataset, sampler=BatchSampler(sampler, {self.count}, drop_last=False), batch_size=None)",
            )
        for pack in packs:
            check_pack(pack, self.fingerprint)
        groups = [*packs, *[()] * (self.count - len(packs))]
        steps = [pack.step for pack in packs] + [packs[-1].step] * (self.count - len(packs))
        batches = self.collator.micro_batches(groups)
        return tuple(replace(batch, step=step) for batch, step in zip(batches, steps, strict=True))
