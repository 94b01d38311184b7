"""PackingSampler: a lhotse sampler whose batches are packs, full to the budget and of like cost over the ranks of a step.

Every data-parallel rank walks the same metadata, plans the same steps and takes its own column:

            rank 0   rank 1   rank 2
    step 0  pack     pack     pack
    step 1  pack     pack     (empty: zero weight)

So all ranks get the same number of steps, without a word between them. CP and TP peers have one data-parallel rank and
get the same packs. What it costs a rank is some 20 microseconds for each example of all ranks, two thirds of them to count its
tokens (`tests/bench/bench_sampler.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lhotse.dataset.sampling.base import CutSampler
from torch.utils.data import get_worker_info

from packfp8.data.batch import SetAside
from packfp8.data.mark import Mark, check_state, mark_of, to_state
from packfp8.data.sampled_pack import SampledPack, fingerprint_of, labelled
from packfp8.data.source import check_source, indexable
from packfp8.data.steps import HISTORY_STEPS, Step, Steps
from packfp8.data.terms import Terms
from packfp8.errors import StateError
from packfp8.lengths import Measure, Measured
from packfp8.packing import PackCost
from packfp8.rule import Alignment

ATTENTION = PackCost()
"""The cost that does without knowing the model's sizes: attention work, the part that differs from pack to pack."""


class PackingSampler(CutSampler):
    """Yields this rank's packs, step after step; from metadata alone, audio is never read.

        loader = DataLoader(PackedDataset(collator), sampler=sampler, batch_size=None, num_workers=4)
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                ...
                state = sampler.state_dict(step=batch.step)     # what comes after this batch, whatever workers prefetched

    Inside lhotse's `IterableDatasetWrapper` each worker takes every n-th step. There is no length: it is not known before the
    examples are walked; `forecast()` counts exactly.

    Args:
        cuts: a CutSet, eager or lazy, or another iterable of what `as_example` takes. A lazy set is walked by every rank.
        measure: how long examples are.
        rule: what must divide what; its topology gives the data-parallel rank and size, never the environment.
        budget: most tokens of a pack.
        lookahead: examples among which a pack may choose.
        max_sequences: most sequences in a pack.
        frame_budget: most encoder frames of a pack's audio, each clip counted with the silence that keeps it from the next
            (`packfp8.lengths.rooms`): the collator's. None does not count them.
        max_seqlen: most tokens of an example's slot (THD), less than a pack's: the collator's. None bounds it by the pack.
        seed: of the order, together with the epoch; the same on all ranks.
        shuffle: whether the order is random: of a set in memory as a whole, of a lazy one through a buffer.
        shuffle_buffer: items of that buffer. A Shar set that carries audio is held in memory as far as the buffer, the
            lookahead and the window reach.
        window: steps over which packs of like cost are brought together, where there is more than one rank.
        cost: the work of a pack.
        over_budget: "error", or "set_aside" to leave out what no pack can hold and name it in `set_aside`.
        on_fault: the same for examples without text, or with a length that cannot be.
        end: what happens when fewer packs are left than ranks: "fill" gives the others packs without examples and of zero
            weight, "drop" sets the examples of that step aside.

    Raises:
        ConfigError: an unknown policy, a count that is none, a frame budget where no example has audio, `max_seqlen` of padded
            rows, a source that can be walked only once.
        BudgetError: a budget below the least pack.
    """

    def __init__(
        self,
        cuts: Iterable,
        *,
        measure: Measure,
        rule: Alignment,
        budget: int,
        lookahead: int = 256,
        max_sequences: int | None = None,
        frame_budget: int | None = None,
        max_seqlen: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        shuffle_buffer: int = 10_000,
        window: int = 32,
        cost: PackCost = ATTENTION,
        over_budget: str = "error",
        on_fault: str = "error",
        end: str = "fill",
    ) -> None:
        check_source(cuts)
        self.terms = Terms(
            measure=measure,
            rule=rule,
            budget=budget,
            lookahead=lookahead,
            max_sequences=max_sequences,
            frame_budget=frame_budget,
            max_seqlen=max_seqlen,
            seed=seed,
            shuffle=shuffle,
            shuffle_buffer=shuffle_buffer,
            window=window,
            cost=cost,
            over_budget=over_budget,
            on_fault=on_fault,
            end=end,
        )
        topology = rule.topology
        super().__init__(shuffle=shuffle, drop_last=end == "drop", world_size=topology.dp, rank=topology.dp_rank, seed=seed)
        self.cuts = cuts
        self._fingerprint = fingerprint_of(rule, measure)
        self._start: dict | None = None  # a state that the next iteration goes on from
        self._column: _Column | None = None  # the iteration that this process drew from last
        self._ahead: Steps | None = None  # steps planned for states of packs that other processes hand out

    def __iter__(self) -> Iterator[SampledPack]:
        """This rank's packs of the epoch, from its start, or after the step of a state that was just loaded."""
        self.diagnostics.reset_current_epoch()
        self._column = _Column(self, self._steps(self._start), -1 if self._start is None else self._start["step"])
        return self._column

    def __next__(self) -> SampledPack:
        if self._column is None:
            iter(self)
        return next(self._column)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, which with the seed decides the order. Another than the present one starts anew."""
        if epoch != self.epoch:
            self._column = self._ahead = None
        super().set_epoch(epoch)

    def allow_iter_to_reset_state(self) -> None:
        """Forget a loaded state: the next iteration starts at the beginning of its epoch."""
        super().allow_iter_to_reset_state()
        self._start = None

    def filter(self, predicate) -> PackingSampler:
        """Leave out what `predicate` rejects, counted in `diagnostics`; on every rank the same."""
        self._column = self._ahead = None
        return super().filter(predicate)

    @property
    def set_aside(self) -> tuple[SetAside, ...]:
        """What this epoch's plan has set aside so far, with the reason; complete when the epoch is."""
        steps = self._ahead if self._column is None else self._column.steps
        return () if steps is None else steps.set_aside

    def state_dict(self, step: int | None = None) -> dict:
        """The state after `step` of this epoch was trained on: plain values, the same on every rank.

        A few kilobytes; with several ranks also some 7 bytes for each example of the packs that wait in the dealer, at most two
        windows of steps: 0.6 MB for 64 ranks and packs of 40 sequences.

        Args:
            step: `batch.step`. Left out, the last step that was handed out, which with workers is ahead of training.

        Raises:
            StateError: a step that was not handed out, or is further back than 1,024 steps.
        """
        if self._column is not None:
            steps, last = self._column.steps, self._column.last
            step = last if step is None else step
            if step > last:
                raise _unknown_step(step, f"at most {last}, the last that was handed out")
        else:
            first = -1 if self._start is None else self._start["step"]
            step = first if step is None else step
            steps = self._planned_to(step)
        mark = steps.mark_before(step + 1)
        if mark is None:
            raise _unknown_step(step, f"at least {steps.marks[0].step - 1}: states of the last {HISTORY_STEPS} steps are kept")
        aside = steps.aside_before(mark)
        return to_state(terms=self.terms.summary(), epoch=self.epoch, step=step, mark=mark, set_aside=aside)

    def load_state_dict(self, state_dict: dict) -> None:
        """Let the next iteration go on after the step of the state. The set is walked again up to there, no audio is read.

        Raises:
            StateError: it was saved under another rule, measure, budget, seed or other terms, or in a world of another size.
        """
        state = check_state(state_dict, self.terms.summary())
        self._column = self._ahead = None
        super().set_epoch(state["epoch"])
        self._start = state

    def forecast(self, epoch: int | None = None) -> Iterator[tuple[tuple[Measured, ...], ...]]:
        """The steps of an epoch as lengths: for each step, for each rank, the lengths of its pack's sequences.

        Planned apart: the sampler stays where it is.

        Args:
            epoch: the present one where it is left out.
        """
        steps = Steps(self.terms, self.cuts, epoch=self.epoch if epoch is None else epoch, accepts=self._filter_fn)
        for step in steps:
            yield tuple(tuple(held.measured for held in pack) for pack in step.packs)

    @property
    def num_cuts(self) -> int | None:
        """Number of examples in memory; None for a lazy set."""
        rows = indexable(self.cuts)
        return None if rows is None else len(rows)

    @property
    def remaining_cuts(self) -> None:
        """None: not known exactly."""
        return None

    @property
    def remaining_duration(self) -> None:
        """None: not known exactly."""
        return None

    def __getstate__(self):
        # A copy has the settings, the epoch and a loaded state. An iteration that is under way stays with its process.
        twin = object.__new__(type(self))
        twin.__dict__ = {**self.__dict__, "_column": None, "_ahead": None}
        return CutSampler.__getstate__(twin)

    def _steps(self, state: dict | None) -> Steps:
        mark: Mark | None = None if state is None else mark_of(state)
        aside = () if state is None else state["mark"]["set_aside"]
        return Steps(self.terms, self.cuts, epoch=self.epoch, accepts=self._filter_fn, mark=mark, aside=aside)

    def _planned_to(self, step: int) -> Steps:
        """Steps planned past `step`, for packs that were handed out in a worker's copy of this sampler."""
        if self._ahead is None or self._ahead.mark_before(step + 1) is None:
            self._ahead = self._steps(self._start)
        while self._ahead.next_step <= step:
            if next(self._ahead, None) is None:
                raise _unknown_step(step, f"at most {self._ahead.next_step - 1}, the last of the epoch")
        return self._ahead

    def _pack(self, step: Step) -> SampledPack:
        """This rank's pack of a step."""
        worker = get_worker_info()
        info = {"rank": self.rank, "world_size": self.world_size, "worker_id": None if worker is None else worker.id}
        held = step.packs[self.rank]
        cuts = SampledPack([labelled(one.item, one.name, info) for one in held])
        for transform in self._transforms:
            cuts = transform(cuts)
        if held:  # lhotse takes a batch without cuts for a mistake
            self.diagnostics.keep(cuts)
        return SampledPack(cuts, step=step.number, fingerprint=self._fingerprint)


class _Column:
    """One rank's packs of a pass; in a loader's worker that iterates the sampler itself, that worker's share of them.

    Attributes:
        steps: the pass.
        last: number of the last step handed out.
    """

    def __init__(self, sampler: PackingSampler, steps: Steps, last: int) -> None:
        self.steps, self.last = steps, last
        self._sampler, self._after = sampler, last

    def __iter__(self) -> _Column:
        return self

    def __next__(self) -> SampledPack:
        sampler, filtered = self._sampler, self.steps.filtered
        if sampler._column is self:
            sampler._start = None  # a loaded state serves one iteration
        worker = get_worker_info()
        try:
            step = next(self.steps)
            while step.number <= self._after or not _is_mine(step.number - self._after - 1, worker):
                step = next(self.steps)
        finally:
            sampler.diagnostics.current_epoch_stats.discarded_cuts += self.steps.filtered - filtered
        self.last = step.number
        return sampler._pack(step)


def _is_mine(step: int, worker) -> bool:
    """Whether a worker that iterates the sampler itself hands out the step; the loader asks its workers in turn."""
    return worker is None or step % worker.num_workers == worker.id


def _unknown_step(step: int, expected: str) -> StateError:
    return StateError(
        "the sampler has no state after this step",
        got=f"step {step}",
        expected=expected,
        because="a state is kept for the steps that training can have reached, so that what was prefetched comes again",
        fix="pass batch.step of the batch that was trained on last, before set_epoch goes on to the next epoch",
    )
