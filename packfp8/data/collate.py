"""Collator: a drop-in `collate_fn` from a list of examples to one rank's `PackedBatch`.

items -> examples -> ids and targets -> plan (from lengths alone) -> audio of the clips that this rank holds -> tensors
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

import numpy as np
import torch

from packfp8.data.audio import Loaded
from packfp8.data.batch import IGNORED, PackedBatch
from packfp8.data.checks import POLICIES, check_bounds, check_buckets, check_policies, check_static
from packfp8.data.content import checksum, cu_seqlens, ids_and_labels
from packfp8.data.example import Example
from packfp8.data.extent import Extent, common_extent, extent_of
from packfp8.data.intake import Intake, Taken
from packfp8.data.longest_slot import longest_slot
from packfp8.data.packed_audio import one_row, waveforms
from packfp8.errors import ExampleError
from packfp8.layout import Buckets, Constant, Least, Plan, make_plan
from packfp8.lengths import Measure
from packfp8.rule import Alignment, checked_rule

__all__ = ["POLICIES", "Collator"]


class Collator:
    """Makes one pack of the examples it is given; an importable, picklable callable.

    Args:
        measure: how examples become tokens; its frames decide the audio's sample rate.
        rule: decides the layout, and with its topology which slab this rank gets.
        budget: most tokens of a pack; without it a pack is as large as its examples need.
        over_budget: "error", or "set_aside" to leave out what does not fit and name it in `PackedBatch.set_aside`.
        on_fault: the same for an example that is broken: its text, its audio, its length. Under CP every rank then reads every
            clip of the pack, so that all leave out the same.
        resample: whether audio of another rate is resampled; otherwise it is a fault.
        tolerance_samples: how far a clip's decoded length may be from the declared one, in samples at the encoder's rate; the
            difference is cut or filled with zeros, and counted. One hop where it is left out.
        static: every pack has the budget's tokens, as many offsets, one `max_seqlen`, and its clips in one row of the frame
            budget: every tensor of a batch has one shape, whatever the pack holds.
        max_sequences: most sequences of a pack; needed with `static`.
        max_seqlen: tokens of the longest slot (THD), floored to a multiple of the rule's slot: a longer example is over the
            budget, and filler is cut into several slots, so that no position, filler's included, needs a longer table. With
            `static` it is every batch's `max_seqlen`; left out, that is the whole pack (to cuDNN's attention it is all one).
        frame_budget: most encoder frames of a pack's clips, each with its room's silence; needed with `static`, unless the
            measure knows no audio. It bounds the whole pack; each CP rank's row is as long.
        buckets: tokens, offsets and `max_seqlen` of a pack are rounded up to a few sizes (`packfp8.layout.Buckets`), so that a
            compiler meets few shapes. Needs a budget; audio stays as it is.
        share_encoder: whether each clip is encoded by one CP rank, and its frames sent to those that hold them: the model must
            then have the CP group.

    Raises:
        ConfigError: an unknown policy, no room for a sequence, a slot or a clip; `static` or `buckets` without their bounds, or
            both; `max_seqlen` of padded rows; `static` with a shared encoder, or with one whose clips cannot stand in one row
            (`packfp8.lengths.check_rooms`).
        BudgetError: a budget below the least pack.
        RuleError: a rule that is none.
    """

    def __init__(
        self,
        *,
        measure: Measure,
        rule: Alignment,
        budget: int | None = None,
        over_budget: str = "error",
        on_fault: str = "error",
        resample: bool = False,
        tolerance_samples: int | None = None,
        static: bool = False,
        max_sequences: int | None = None,
        max_seqlen: int | None = None,
        frame_budget: int | None = None,
        buckets: bool = False,
        share_encoder: bool = False,
    ) -> None:
        checked_rule(rule)
        check_policies(over_budget=over_budget, on_fault=on_fault)
        check_bounds(max_sequences=max_sequences, frame_budget=frame_budget, measure=measure)
        if static:
            check_static(budget, max_sequences, frame_budget, measure=measure, rule=rule, share_encoder=share_encoder)
        if buckets:
            check_buckets(budget, rule=rule, static=static)
        capacity = None if budget is None else rule.floor(budget)
        self.max_seqlen = None if max_seqlen is None else longest_slot(max_seqlen, rule, capacity)
        hop_samples = measure.frames.hop_samples if measure.frames else 0
        self.measure, self.rule, self.budget = measure, rule, budget
        self.max_sequences, self.frame_budget = (None if n is None else int(n) for n in (max_sequences, frame_budget))
        self.over_budget, self.on_fault, self.resample = over_budget, on_fault, resample
        self.tolerance_samples = hop_samples if tolerance_samples is None else tolerance_samples
        self.static, self.buckets, self.share_encoder = static, buckets, share_encoder
        self.sizes = self._sizes()
        self.intake = Intake(**{field.name: getattr(self, field.name) for field in fields(Intake)})

    def __call__(self, items: Iterable) -> PackedBatch:
        """The batch of a list of examples, cuts or dicts, or of a CutSet.

        Raises:
            ExampleError: no items, a single one instead of a list, or one that cannot be read as an example.
            LengthError, AudioError, BudgetError: a fault, under the policy "error".
        """
        if isinstance(items, (Mapping, str, Example)) or not isinstance(items, Iterable):
            raise _one_item(items)
        items = list(items)
        if not items:
            raise ExampleError(
                "the batch is empty",
                got="no examples",
                expected="at least one",
                because="a batch of no token is refused by the kernels, and a rank that skips a step hangs the others",
                fix="check the filters before the loader; PackingSampler gives ranks without examples a pack of zero weight",
            )
        return self.collate(items)

    def collate(self, items: Iterable, *, step: int = 0) -> PackedBatch:
        """The batch of `items` at `step`; of none, a pack of filler alone, whose loss has zero weight."""
        taken = self.intake.take(items)
        return self._made(taken, step, [self.rule], extent_of(taken, self.sizes, self.rule))[0]

    def slabs(self, items: Iterable, *, step: int = 0) -> tuple[PackedBatch, ...]:
        """The batches of all CP ranks, in their order; each clip is read once."""
        topology = self.rule.topology
        ranks = [replace(topology, cp_rank=rank) for rank in range(topology.cp)]
        rules, taken = [replace(self.rule, topology=rank) for rank in ranks], self.intake.take(items)
        return self._made(taken, step, rules, extent_of(taken, self.sizes, self.rule))

    def micro_batches(self, groups: Iterable[Iterable], *, step: int = 0) -> tuple[PackedBatch, ...]:
        """The batches of one step's micro-batches, all with tokens of one shape: that of the largest of them.

        Pipeline stages exchange activations of one shape. THD: one `T`, a multiple of the rule's total and within the budget.
        BSHD: one `[B, S/cp]`, the most rows and the longest; rows without an example are filler. Offsets and `max_seqlen` are
        each micro-batch's own, and audio too, unless `static` keeps them constant.

        Args:
            groups: the examples of each micro-batch; of none, a pack of filler alone.

        Raises:
            ExampleError: there is no micro-batch.
            BudgetError: BSHD, the most rows of the longest are over the budget, though each micro-batch is within it.
            what the batch of one group raises.
        """
        taken = [self.intake.take(group) for group in groups]
        extent = common_extent(taken, self.sizes, self.rule, self.budget)
        return tuple(self._made(one, step, [self.rule], extent)[0] for one in taken)

    def _sizes(self) -> Least | Buckets | Constant:
        if not self.static and not self.buckets:
            return Least(rule=self.rule)
        capacity = self.rule.floor(self.budget)
        bounds = {"capacity": capacity, "max_sequences": self.max_sequences, "longest_slot": self.max_seqlen or capacity}
        return Constant(**bounds) if self.static else Buckets(rule=self.rule, **bounds)

    def _made(self, taken: Taken, step: int, rules: list[Alignment], extent: Extent) -> tuple[PackedBatch, ...]:
        """The batches of a pack as the CP rank of each rule sees it."""
        clips, loaded = taken.clips, taken.loaded
        plans = [self._plan(taken, rule, extent) for rule in rules]
        for n in sorted({int(n) for plan in plans for n in plan.clips}):
            if id(clips[n]) not in loaded:
                loaded[id(clips[n])] = self.intake.load(clips[n])
        return tuple(self._batch(plan, taken, [loaded[id(clips[n])] for n in plan.clips], step) for plan in plans)

    def _plan(self, taken: Taken, rule: Alignment, extent: Extent) -> Plan:
        spans = [(n, c.start, c.encoder_frames) for n, (_, encoded) in enumerate(taken.kept) for c in encoded.clips]
        return make_plan(
            taken.lengths,
            spans,
            rule,
            total=extent.tokens,
            rows=extent.rows,
            longest=self.max_seqlen,
            ids=[example.id for example, _ in taken.kept],
            share_encoder=self.share_encoder,
            frame_budget=self.frame_budget if self.static else None,
        )

    def _batch(self, plan: Plan, taken: Taken, audio: list[Loaded], step: int) -> PackedBatch:
        slots, rule = plan.slots, plan.rule
        cp = rule.topology.cp
        ids, labels = ids_and_labels([encoded for _, encoded in taken.kept], slots)
        shape = (slots.rows, slots.total // slots.rows // cp) if slots.rows else (slots.total // cp,)
        local_labels = labels[plan.index]

        def local(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.array(array)).reshape(shape)

        waves, lens, begins = self._audio(audio)
        return PackedBatch(
            input_ids=local(ids[plan.index]),
            labels=local(local_labels),
            position_ids=local(plan.position_ids),
            seq_idx=local(plan.seq_idx),
            padding_mask=local(plan.padding_mask),
            cu_seqlens=cu_seqlens(slots, self.sizes.offsets(len(slots.sizes))),
            max_seqlen=self.sizes.longest(slots.longest),
            audio=waves,
            audio_lens=lens,
            audio_offsets=begins,
            audio_source=torch.from_numpy(np.array(plan.audio_source)),
            audio_destination=torch.from_numpy(np.array(plan.audio_destination)),
            audio_frames=plan.frames_max,
            frames_sent=plan.frames_sent,
            frames_received=plan.frames_received,
            num_supervised=int(np.count_nonzero(local_labels != IGNORED)),
            ids=tuple(example.id for example, _ in taken.kept),
            step=step,
            rule=rule,
            fingerprint=rule.fingerprint,
            checksum=checksum(plan, ids, labels),
            layout=rule.layout,
            slots=slots,
            set_aside=tuple(taken.aside),
            trimmed_samples=sum(abs(loaded.trimmed_samples) for loaded in audio),
        )

    def _audio(self, audio: list[Loaded]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Waveforms, lengths, and offsets where all stand in one row."""
        if self.static and self.frame_budget is not None:
            return one_row(audio, self.measure.frames, self.frame_budget)
        return *waveforms(audio), None


def _one_item(item: object) -> ExampleError:
    return ExampleError(
        "the batch is one item and not a list of them",
        got=type(item).__name__,
        expected="a list of examples, cuts or dicts, or a CutSet",
        because="a pack is made of the examples of a batch; DataLoader(batch_size=None) hands over what the dataset returns",
        fix="give DataLoader a batch_size, or let the dataset return lists",
    )
