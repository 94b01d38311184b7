"""Collator: a drop-in `collate_fn` from a list of examples to one rank's `PackedBatch`.

items -> examples -> ids and targets -> plan (from lengths alone) -> audio of the clips that this rank holds -> tensors
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch

from packfp8.data.audio import Loaded, load_clip
from packfp8.data.batch import IGNORED, PackedBatch, SetAside
from packfp8.data.clip import Clip
from packfp8.data.content import checksum, cu_seqlens, ids_and_labels, waveforms
from packfp8.data.example import Example, as_example, name_of_item
from packfp8.errors import BudgetError, ConfigError, ExampleError, PackError
from packfp8.layout import Plan, make_plan
from packfp8.lengths import Encoded, Measure
from packfp8.lengths.measure import MOST_TOKENS
from packfp8.rule import Alignment, checked_rule

POLICIES = ("error", "set_aside")
_TOLD_EARLY_TOKENS = 1 << 24  # an example over the budget and over this is refused before 128 MB are taken for its ids


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
        static: every pack has the budget's tokens, `max_sequences + 2` offsets and one `max_seqlen`.
        max_sequences: most sequences of a pack; needed with `static`.
        share_encoder: whether each clip is encoded by one CP rank, and its frames sent to those that hold them: the model must
            then have the CP group.

    Raises:
        ConfigError: an unknown policy, no room for a sequence, or `static` without its bounds.
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
        share_encoder: bool = False,
    ) -> None:
        checked_rule(rule)
        for name, policy in (("over_budget", over_budget), ("on_fault", on_fault)):
            if policy not in POLICIES:
                raise _unknown_policy(name, policy)
        if max_sequences is not None and max_sequences < 1:
            raise _no_sequences(max_sequences)
        if static and (budget is None or max_sequences is None or rule.layout == "bshd"):
            raise _static_without_bounds(budget, max_sequences, rule)
        self.measure, self.rule, self.budget = measure, rule, budget
        self.over_budget, self.on_fault = over_budget, on_fault
        self.resample, self.static, self.max_sequences = resample, static, max_sequences
        self.share_encoder = share_encoder
        frames = measure.frames
        hop = frames.hop_samples if frames else 0
        self.tolerance_samples = hop if tolerance_samples is None else tolerance_samples
        if budget is not None:
            rule.floor(budget)
        self._most_tokens = MOST_TOKENS if budget is None else max(budget, _TOLD_EARLY_TOKENS)

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
        return self._collate(items, step, [self.rule])[0]

    def slabs(self, items: Iterable, *, step: int = 0) -> tuple[PackedBatch, ...]:
        """The batches of all CP ranks, in their order; each clip is read once."""
        topology = self.rule.topology
        ranks = [replace(topology, cp_rank=rank) for rank in range(topology.cp)]
        return self._collate(items, step, [replace(self.rule, topology=rank) for rank in ranks])

    def _collate(self, items: Iterable, step: int, rules: list[Alignment]) -> tuple[PackedBatch, ...]:
        aside: list[SetAside] = []
        kept: list[tuple[Example, Encoded]] = []
        for position, item in enumerate(items):
            self._try(lambda item=item, position=position: kept.append(self._encode(item, position)), aside, item, position)
        kept = self._within_budget(kept, aside)
        loaded: dict[int, Loaded] = {}
        if self.on_fault == "set_aside":
            kept = self._with_audio(kept, loaded, aside)
        clips = [clip for example, _ in kept for clip in example.clips]
        plans = [self._plan(kept, rule) for rule in rules]
        for n in sorted({int(n) for plan in plans for n in plan.clips}):
            if id(clips[n]) not in loaded:
                loaded[id(clips[n])] = self._load(clips[n])
        audio = [[loaded[id(clips[n])] for n in plan.clips] for plan in plans]
        return tuple(self._batch(plan, kept, heard, step, tuple(aside)) for plan, heard in zip(plans, audio, strict=True))

    def _encode(self, item: object, position: int) -> tuple[Example, Encoded]:
        example = as_example(item, sample_rate=self.measure.sample_rate, template=self.measure.template, position=position)
        return example, self.measure.encode(example, most_tokens=self._most_tokens)

    def _try(self, act, aside: list[SetAside], item: object, position: int) -> None:
        """Does it; a fault is raised, or noted where the user chose so."""
        try:
            act()
        except PackError as fault:
            if (self.over_budget if isinstance(fault, BudgetError) else self.on_fault) == "error":
                raise
            aside.append(SetAside(id=name_of_item(item, position), reason=str(fault)))

    def _within_budget(self, kept: list, aside: list[SetAside]) -> list:
        """The examples that fit the budget together, in order."""
        lengths = [len(encoded.ids) for _, encoded in kept]
        slots = [self.rule.slot(n) for n in lengths]
        # The whole first: in BSHD, more rows may need fewer tokens (16 rows of 1 make a pack of 16, 15 one of 240).
        if not kept or self._over(len(kept), sum(slots), max(lengths), kept[-1][0].id) is None:
            return kept
        fits, used, longest = [], 0, 0
        for (example, encoded), length, slot in zip(kept, lengths, slots, strict=True):
            fault = self._over(len(fits) + 1, used + slot, max(longest, length), example.id)
            if fault is None:
                fits.append((example, encoded))
                used, longest = used + slot, max(longest, length)
            elif self.over_budget == "error":
                raise fault
            else:
                aside.append(SetAside(id=example.id, reason=str(fault)))
        return fits

    def _over(self, sequences: int, tokens: int, longest: int, name: str) -> BudgetError | None:
        """Why so many sequences are no pack of ours, or None. THD asks the `tokens` of all slots, BSHD the `longest`."""
        rule = self.rule
        if self.max_sequences is not None and sequences > self.max_sequences:
            got, most = f"{sequences} sequences", f"at most {self.max_sequences} sequences"
        elif self.budget is None:
            return None
        elif rule.layout == "bshd":
            row = -(-longest // rule.row(sequences)) * rule.row(sequences)
            if sequences * row <= self.budget:
                return None
            got, most = f"{sequences} rows of {row}, {sequences * row} tokens", f"at most {self.budget} tokens"
        else:
            capacity = rule.floor(self.budget)
            if tokens <= capacity:
                return None
            got, most = f"{tokens} tokens of slots", f"at most {capacity} tokens, the budget of {self.budget} floored"
        return BudgetError(
            f"example {name!r} does not fit the pack",
            got=got,
            expected=most,
            because="the budget is a bound, not an aim, and neither audio nor text is ever cut",
            fix="raise the budget, give fewer examples to a batch, or choose over_budget='set_aside'",
        )

    def _with_audio(self, kept: list, loaded: dict[int, Loaded], aside: list[SetAside]) -> list:
        """The examples whose every clip could be read."""
        sound = []
        for position, (example, encoded) in enumerate(kept):
            before = len(aside)
            self._try(
                lambda example=example: loaded.update({id(clip): self._load(clip) for clip in example.clips}),
                aside,
                example,
                position,
            )
            if len(aside) == before:
                sound.append((example, encoded))
        return sound

    def _load(self, clip: Clip) -> Loaded:
        tolerance = self.tolerance_samples
        return load_clip(clip, self.measure.sample_rate, resample=self.resample, tolerance_samples=tolerance)

    def _plan(self, kept: list, rule: Alignment) -> Plan:
        spans = [(n, c.start, c.encoder_frames) for n, (_, encoded) in enumerate(kept) for c in encoded.clips]
        return make_plan(
            [len(encoded.ids) for _, encoded in kept],
            spans,
            rule,
            total=rule.floor(self.budget) if self.static else None,
            ids=[example.id for example, _ in kept],
            share_encoder=self.share_encoder,
        )

    def _batch(self, plan: Plan, kept: list, audio: list[Loaded], step: int, aside: tuple[SetAside, ...]) -> PackedBatch:
        slots, rule = plan.slots, plan.rule
        cp = rule.topology.cp
        ids, labels = ids_and_labels([encoded for _, encoded in kept], slots)
        shape = (slots.rows, slots.total // slots.rows // cp) if slots.rows else (slots.total // cp,)
        local_labels = labels[plan.index]

        def local(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.array(array)).reshape(shape)

        waves, lens = waveforms(audio)
        return PackedBatch(
            input_ids=local(ids[plan.index]),
            labels=local(local_labels),
            position_ids=local(plan.position_ids),
            seq_idx=local(plan.seq_idx),
            padding_mask=local(plan.padding_mask),
            cu_seqlens=cu_seqlens(slots, self.max_sequences if self.static else None),
            max_seqlen=slots.total if self.static else slots.longest,
            audio=waves,
            audio_lens=lens,
            audio_source=torch.from_numpy(np.array(plan.audio_source)),
            audio_destination=torch.from_numpy(np.array(plan.audio_destination)),
            audio_frames=plan.frames_max,
            frames_sent=plan.frames_sent,
            frames_received=plan.frames_received,
            num_supervised=int(np.count_nonzero(local_labels != IGNORED)),
            ids=tuple(example.id for example, _ in kept),
            step=step,
            rule=rule,
            fingerprint=rule.fingerprint,
            checksum=checksum(plan, ids, labels),
            layout=rule.layout,
            slots=slots,
            set_aside=aside,
            trimmed_samples=sum(abs(loaded.trimmed_samples) for loaded in audio),
        )


def _one_item(item: object) -> ExampleError:
    return ExampleError(
        "the batch is one item and not a list of them",
        got=type(item).__name__,
        expected="a list of examples, cuts or dicts, or a CutSet",
        because="a pack is made of the examples of a batch; DataLoader(batch_size=None) hands over what the dataset returns",
        fix="give DataLoader a batch_size, or let the dataset return lists",
    )


def _no_sequences(max_sequences: int) -> ConfigError:
    return ConfigError(
        "packs have no room for a sequence",
        got=f"max_sequences={max_sequences}",
        expected="at least 1, or None for no bound",
        because="every example would be over it; filler is not counted",
        fix="leave out max_sequences, or give the most sequences that a pack may hold",
    )


def _unknown_policy(name: str, policy: object) -> ConfigError:
    return ConfigError(
        f"{name} is not a policy",
        got=repr(policy),
        expected="'error' or 'set_aside'",
        because="what cannot be used is either refused or counted and named; it is never lost silently",
        fix=f"choose {name}='error' or {name}='set_aside'",
    )


def _static_without_bounds(budget: int | None, max_sequences: int | None, rule: Alignment) -> ConfigError:
    return ConfigError(
        "packs cannot be static",
        got=f"budget={budget}, max_sequences={max_sequences}, layout {rule.layout!r}",
        expected="a budget, max_sequences, and layout 'thd'",
        because="a constant shape needs a constant number of tokens and of offsets",
        fix="give both bounds, e.g. budget=8192, max_sequences=64",
    )
