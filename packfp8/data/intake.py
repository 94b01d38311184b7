"""Intake: which of a batch's items come into its pack and which are set aside, before anything of the pack is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from packfp8.data.audio import Loaded, load_clip
from packfp8.data.batch import SetAside
from packfp8.data.clip import Clip
from packfp8.data.example import Example, as_example, name_of_item
from packfp8.data.longest_slot import longer_than_a_slot
from packfp8.errors import BudgetError, PackError
from packfp8.lengths import Encoded, Measure, rooms
from packfp8.lengths.measure import MOST_TOKENS
from packfp8.rule import Alignment

_TOLD_EARLY_TOKENS = 1 << 24  # an example over the budget and over this is refused before 128 MB are taken for its ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What came in.

    Attributes:
        kept: examples of the pack, in order, and their tokens.
        aside: items that were left out, with the reason.
        loaded: audio that was read on the way, by the `id` of its clip.
    """

    kept: list[tuple[Example, Encoded]] = field(default_factory=list)
    aside: list[SetAside] = field(default_factory=list)
    loaded: dict[int, Loaded] = field(default_factory=dict)

    @property
    def clips(self) -> list[Clip]:
        """All clips of the pack, in the order in which they are heard."""
        return [clip for example, _ in self.kept for clip in example.clips]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(encoded.ids) for _, encoded in self.kept]


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Takes items in, to the bounds and by the policies of a `Collator`, whose arguments these are."""

    measure: Measure
    rule: Alignment
    budget: int | None
    max_sequences: int | None
    frame_budget: int | None
    max_seqlen: int | None
    over_budget: str
    on_fault: str
    resample: bool
    tolerance_samples: int

    def take(self, items: Iterable) -> Taken:
        """What comes into the pack of `items`.

        Raises:
            ExampleError, LengthError, AudioError, BudgetError: a fault, under the policy "error".
        """
        taken = Taken()
        for position, item in enumerate(items):
            self._try(lambda item=item, at=position: taken.kept.append(self._encode(item, at)), taken.aside, item, position)
        taken.kept[:] = self._within_budget(taken.kept, taken.aside)
        if self.on_fault == "set_aside":
            taken.kept[:] = self._with_audio(taken)
        return taken

    def load(self, clip: Clip) -> Loaded:
        """The audio of a clip.

        Raises:
            AudioError: it cannot be read.
        """
        tolerance = self.tolerance_samples
        return load_clip(clip, self.measure.sample_rate, resample=self.resample, tolerance_samples=tolerance)

    def _encode(self, item: object, position: int) -> tuple[Example, Encoded]:
        example = as_example(item, sample_rate=self.measure.sample_rate, template=self.measure.template, position=position)
        most_tokens = MOST_TOKENS if self.budget is None else max(self.budget, _TOLD_EARLY_TOKENS)
        return example, self.measure.encode(example, most_tokens=most_tokens)

    def _try(self, act: Callable[[], object], aside: list[SetAside], item: object, position: int) -> None:
        """Does it; a fault is raised, or noted where the user chose so."""
        try:
            act()
        except PackError as fault:
            if (self.over_budget if isinstance(fault, BudgetError) else self.on_fault) == "error":
                raise
            aside.append(SetAside(id=name_of_item(item, position), reason=str(fault)))

    def _within_budget(self, kept: list, aside: list[SetAside]) -> list:
        """The examples that fit the budgets together, in order."""
        sizes = [(1, self.rule.slot(len(encoded)), len(encoded), _rooms(encoded)) for _, encoded in kept]
        # The whole first: in BSHD, more rows may need fewer tokens (16 rows of 1 make a pack of 16, 15 one of 240).
        if not kept or self._over(*_together(sizes), kept[-1][0].id) is None:
            return kept
        fits, used = [], (0, 0, 0, 0)
        for (example, encoded), size in zip(kept, sizes, strict=True):
            more = _together([used, size])
            fault = self._over(*more, example.id)
            if fault is None:
                fits.append((example, encoded))
                used = more
            elif self.over_budget == "error":
                raise fault
            else:
                aside.append(SetAside(id=example.id, reason=str(fault)))
        return fits

    def _over(self, sequences: int, tokens: int, longest: int, frames: int, name: str) -> BudgetError | None:
        """Why so many sequences are no pack of ours, or None. THD asks the `tokens` of all slots, BSHD the `longest`."""
        rule = self.rule
        if self.max_seqlen is not None and longest > self.max_seqlen:  # a legal slot: rounded up, none comes to lie beyond it
            return longer_than_a_slot(name, longest, self.max_seqlen)
        if self.max_sequences is not None and sequences > self.max_sequences:
            return _no_fit(name, f"{sequences} sequences", f"at most {self.max_sequences} sequences")
        if self.frame_budget is not None and frames > self.frame_budget:
            got = f"{frames} encoder frames in the rooms of its clips and those before"
            return _no_fit(name, got, f"at most {self.frame_budget} encoder frames", "frame_budget")
        if self.budget is None:
            return None
        if rule.layout == "bshd":
            row = -(-longest // rule.row(sequences)) * rule.row(sequences)
            if sequences * row <= self.budget:
                return None
            return _no_fit(name, f"{sequences} rows of {row}, {sequences * row} tokens", f"at most {self.budget} tokens")
        capacity = rule.floor(self.budget)
        if tokens <= capacity:
            return None
        return _no_fit(name, f"{tokens} tokens of slots", f"at most {capacity} tokens, the budget of {self.budget} floored")

    def _with_audio(self, taken: Taken) -> list:
        """The examples whose every clip could be read."""
        sound, aside, loaded = [], taken.aside, taken.loaded
        for position, (example, encoded) in enumerate(taken.kept):
            before = len(aside)
            self._try(
                lambda example=example: loaded.update({id(clip): self.load(clip) for clip in example.clips}),
                aside,
                example,
                position,
            )
            if len(aside) == before:
                sound.append((example, encoded))
        return sound


def _rooms(encoded: Encoded) -> int:
    """Encoder frames of the rooms of an example's clips."""
    return sum(rooms(clip.encoder_frames) for clip in encoded.clips)


def _together(sizes: list[tuple[int, int, int, int]]) -> tuple[int, int, int, int]:
    """Sequences, tokens of slots, tokens of the longest, and frames of rooms, of several together."""
    sequences, tokens, longest, frames = zip(*sizes, strict=True)
    return sum(sequences), sum(tokens), max(longest), sum(frames)


def _no_fit(name: str, got: str, expected: str, bound: str = "the budget") -> BudgetError:
    return BudgetError(
        f"example {name!r} does not fit the pack",
        got=got,
        expected=expected,
        because="the budget is a bound, not an aim, and neither audio nor text is ever cut",
        fix=f"raise {bound}, give PackingSampler the same, or a batch fewer examples, or choose over_budget='set_aside'",
    )
