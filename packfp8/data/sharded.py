"""ShardedPackingSampler: each data-parallel rank packs examples of its own; all ranks get the same number of steps.

`PackingSampler` lets every rank measure the examples of all, at a cost that grows with the world: with 4,096 ranks it takes
longer than a step. Here a rank measures its own shard, once in a run. What ranks share is small, and sent once:

    how many packs each has      the most is the number of steps; who has fewer ends with packs of no examples, of zero weight
    a histogram of lengths       of all shards together, for reports, and to tell one set of shards from another

In each step every rank gives its pack of the same rank by cost, so that ranks wait little for each other, though none knows the
packs of the others. Steps come in an order drawn from seed and epoch.

    by cost     dearest ...      cheapest
    rank 0      a0  a1  a2  a3
    rank 1      b0  b1  b2  (none)
    epoch 0     step 0: a2 b2    step 1: a0 b0    step 2: a3 (none)    step 3: a1 b1
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import distributed as dist
from torch.utils.data import Sampler

from packfp8.data.batch import SetAside
from packfp8.data.example import as_example, name_of_item
from packfp8.data.peers import device_of
from packfp8.data.sampled_pack import SampledPack, fingerprint_of, labelled
from packfp8.data.shard_plan import plan_shard
from packfp8.data.source import indexable
from packfp8.data.terms import Terms
from packfp8.errors import AudioError, BudgetError, ConfigError, ExampleError, LengthError, PackError, StateError
from packfp8.lengths import Histogram, Measure, Measured
from packfp8.packing import PackCost
from packfp8.rule import Alignment

FORMAT = 1


class ShardedPackingSampler(Sampler[SampledPack]):
    """Yields this rank's packs of its own shard, step after step.

        shard = cuts[topology.dp_rank :: topology.dp]          # or the manifests that belong to this rank
        sampler = ShardedPackingSampler(shard, measure=measure, rule=rule, budget=16384, group=mesh["dp"].get_group())
        loader = DataLoader(PackedDataset(collator), sampler=sampler, batch_size=None, num_workers=4)

    Deal examples to shards at random or in turn: shards of unequal length end in steps in which some ranks idle
    (`idle_steps`). CP and TP peers need the same shard. Building it is a collective over `group`.

    Args:
        shard: this rank's examples, in memory: a list, or an eager CutSet.
        group: the data-parallel ranks; None where there is one.
        steps: of an epoch, where the number is known without asking the group, as in a dry run.
        measure, rule, budget, lookahead, max_sequences, frame_budget, max_seqlen, seed, cost, over_budget, on_fault: as for
            `PackingSampler`. With a frame budget fewer examples change places from epoch to epoch: those alike in both.

    Attributes:
        epoch: which with the seed decides the order.
        packs: of this rank, the same number in every epoch.
        steps: of every rank, in every epoch.
        histogram: lengths of all shards.
        set_aside: examples of this shard that were left out, with the reason.

    Raises:
        ConfigError: a shard that is not in memory, a group of another size than dp, fewer steps than packs.
        BudgetError, ExampleError, LengthError, AudioError: an example that cannot be packed, under the policy "error".
    """

    def __init__(
        self,
        shard: Sequence,
        *,
        measure: Measure,
        rule: Alignment,
        budget: int,
        group: dist.ProcessGroup | None = None,
        steps: int | None = None,
        lookahead: int = 256,
        max_sequences: int | None = None,
        frame_budget: int | None = None,
        max_seqlen: int | None = None,
        seed: int = 0,
        cost: PackCost = PackCost(),  # noqa: B008, it is frozen
        over_budget: str = "error",
        on_fault: str = "error",
    ) -> None:
        rows = indexable(shard)
        if rows is None:
            raise _not_in_memory(shard)
        self.terms = Terms(
            measure=measure,
            rule=rule,
            budget=budget,
            lookahead=lookahead,
            max_sequences=max_sequences,
            frame_budget=frame_budget,
            max_seqlen=max_seqlen,
            seed=seed,
            shuffle=True,
            shuffle_buffer=1,
            window=1,
            cost=cost,
            over_budget=over_budget,
            on_fault=on_fault,
            end="fill",
        )
        self.epoch = 0
        self._fingerprint = fingerprint_of(rule, measure)
        self._items: list[tuple[str, object, Measured]] = []
        self._aside: list[SetAside] = []
        for index, item in enumerate(rows):
            self._admit(index, item)
        self._plan = plan_shard([measured for _, _, measured in self._items], self.terms)
        self.packs = self._plan.packs
        own = Histogram.of([measured.tokens for _, _, measured in self._items])
        self.steps, self.histogram, self._shards = self._shared(own, group, steps)
        self._start, self._last = 0, -1

    @property
    def set_aside(self) -> tuple[SetAside, ...]:
        """What was left out of this shard, with the reason."""
        return tuple(self._aside)

    @property
    def idle_steps(self) -> int:
        """Steps of an epoch in which this rank has a pack of no examples."""
        return self.steps - self.packs

    def __len__(self) -> int:
        return self.steps

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch. Another than the present one starts at its first step."""
        if epoch != self.epoch:
            self.epoch, self._start, self._last = epoch, 0, -1

    def __iter__(self) -> Iterator[SampledPack]:
        """This rank's packs of the epoch, from its start, or after the step of a state that was just loaded."""
        first, self._start = self._start, 0
        self._last = first - 1
        packs = self.planned()
        for step in range(first, self.steps):
            self._last = step
            cuts = [labelled(item, name, self._info) for name, item, _ in (self._items[index] for index in packs[step])]
            yield SampledPack(cuts, step=step, fingerprint=self._fingerprint)

    def planned(self) -> list[list[int]]:
        """The examples of each step of this epoch, as indices among those that were not set aside."""
        packs = self._plan.members(self.terms.seed, self.epoch)
        costs = [self.terms.cost_of([self._items[index][2] for index in pack]) for pack in packs]
        by_cost = np.argsort(-np.array(costs), kind="stable").tolist()
        places = list(range(self.steps))
        random.Random(f"{self.terms.seed} {self.epoch} of steps").shuffle(places)
        return [packs[by_cost[place]] if place < self.packs else [] for place in places]

    def state_dict(self, step: int | None = None) -> dict:
        """The state after `step` of this epoch was trained on: a few plain values, the same on every rank.

        Args:
            step: `batch.step`; -1 for the start of the epoch. Left out, the last step that was handed out.

        Raises:
            StateError: a step that the epoch does not have.
        """
        step = max(self._last, self._start - 1) if step is None else step
        if not -1 <= step < self.steps:
            raise StateError(
                "the sampler has no state after this step",
                got=f"step {step}",
                expected=f"-1 to {self.steps - 1}",
                because="an epoch has these steps on every rank",
                fix="pass batch.step of the batch that was trained on last, before set_epoch goes on to the next epoch",
            )
        return self._summary() | {"epoch": self.epoch, "step": step}

    def load_state_dict(self, state_dict: dict) -> None:
        """Let the next iteration go on after the step of the state.

        Raises:
            StateError: it was saved under other terms, of other shards, or in a world of another size.
        """
        expected = self._summary()
        other = sorted(name for name, value in expected.items() if state_dict.get(name) != value)
        if other:
            raise StateError(
                f"the state was saved under another {', '.join(other)}",
                got="; ".join(f"{name} {state_dict.get(name)!r}" for name in other),
                expected="; ".join(f"{name} {expected[name]!r}" for name in other),
                because="under other terms or from other shards the same steps would hold other examples",
                fix="resume with the settings, shards and number of ranks of the saved run, or start the epoch anew",
            )
        self.epoch, self._start = state_dict["epoch"], state_dict["step"] + 1
        self._last = self._start - 1

    def _summary(self) -> dict:
        return {"format": FORMAT, "terms": self.terms.summary(), "steps": self.steps, "shards": self._shards}

    @property
    def _info(self) -> dict:
        topology = self.terms.rule.topology
        return {"rank": topology.dp_rank, "world_size": topology.dp, "worker_id": None}

    def _admit(self, index: int, item: object) -> None:
        """Measure an example; by policy it is raised or set aside."""
        frames = self.terms.measure.frames
        try:
            example = as_example(item, sample_rate=frames.sample_rate if frames else 16_000, position=index)
            measured = self.terms.measure(example)
            if measured.tokens > self.terms.longest_tokens:
                raise self.terms.too_long(example.id, measured.tokens)
            self.terms.check_frames(example.id, measured)
            self._items.append((example.id, item, measured))
        except BudgetError as fault:
            self._refuse(fault, self.terms.over_budget, name_of_item(item, index))
        except (ExampleError, LengthError, AudioError) as fault:
            self._refuse(fault, self.terms.on_fault, name_of_item(item, index))

    def _refuse(self, fault: PackError, policy: str, name: str) -> None:
        if policy == "error":
            raise fault
        self._aside.append(SetAside(id=name, reason=str(fault)))

    def _shared(self, own: Histogram, group: dist.ProcessGroup | None, steps: int | None) -> tuple[int, Histogram, int]:
        """Steps of every rank, lengths of all shards, and a number that stands for the shards."""
        topology = self.terms.rule.topology
        names = "\n".join(name for name, _, _ in self._items).encode("utf-8", "surrogatepass")
        shard = zlib.crc32(names, topology.dp_rank)  # the same examples in other hands are other shards
        if topology.dp == 1 or steps is not None:
            if steps is not None and steps < self.packs:
                raise _too_few_steps(steps, self.packs)
            return (self.packs if steps is None else steps), own, shard
        size = dist.get_world_size(group) if dist.is_initialized() else 1
        if size != topology.dp:
            raise _other_group(size, topology.dp)
        most = torch.tensor([self.packs], device=device_of(group))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        counts = np.append(own.dense(self.terms.longest_tokens + 1), shard)
        total = torch.from_numpy(counts).to(device_of(group))
        dist.all_reduce(total, group=group)
        *dense, shards = total.tolist()
        return int(most), Histogram.from_dense(dense), shards


def _not_in_memory(shard: object) -> ConfigError:
    return ConfigError(
        "the shard is not in memory",
        got=type(shard).__name__,
        expected="a list of examples, or an eager CutSet",
        because="its packs are planned from the lengths of all its examples, and may hold any of them",
        fix="pass shard.to_eager(), or use PackingSampler, which walks lazy sets",
    )


def _other_group(size: int, dp: int) -> ConfigError:
    return ConfigError(
        "the group that agrees on the number of steps is not that of the data-parallel ranks",
        got=f"{size} ranks",
        expected=f"{dp} ranks, one for each shard",
        because="a rank that is not asked may have more packs, and would be cut short",
        fix='pass group=mesh["dp"].get_group()',
    )


def _too_few_steps(steps: int, packs: int) -> ConfigError:
    return ConfigError(
        "an epoch has fewer steps than this rank has packs",
        got=f"{steps} steps",
        expected=f"at least {packs}",
        because="every pack is trained on once in an epoch",
        fix="leave out steps, and let the ranks agree on them",
    )
