"""Measure: how many tokens an example has, and which, before any audio is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from packfp8.errors import BudgetError, ExampleError, LengthError
from packfp8.lengths.audio import AudioFrames
from packfp8.lengths.fingerprint import fingerprint
from packfp8.lengths.template import Template
from packfp8.lengths.text import identity, special_id, to_ids
from packfp8.lengths.tokenizer import ByteTokenizer

MOST_TOKENS = 2**31 - 1
"""Longest example of which tokens are made: offsets in a pack are int32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What packing needs to know of an example.

    Attributes:
        tokens: length of the sequence: text tokens and audio frames.
        text_tokens: of these, the text, marks included.
        encoder_frames: frames of each clip, in order.
        supervised: labels that are left after the shift by one; the first token of a sequence is nobody's label.
    """

    tokens: int
    text_tokens: int
    encoder_frames: tuple[int, ...]
    supervised: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSpan:
    """Where one clip stands in its sequence.

    Attributes:
        start: its first token.
        encoder_frames: its tokens.
        samples: its length at the encoder's sample rate.
    """

    start: int
    encoder_frames: int
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Encoded:
    """An example as tokens.

    Attributes:
        ids: int64 [tokens], read-only; `template.audio_token_id` at audio frames.
        supervised: bool [tokens], read-only; True where the token is a target.
        clips: the places of audio, in order.
    """

    ids: np.ndarray
    supervised: np.ndarray
    clips: tuple[ClipSpan, ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A function of an example: its lengths (`measure`, or the object called), and its tokens (`encode`).

    Text is tokenised in segments: all text between two clips, or between a clip and the end of its turn, is one text, however
    many parts it came in. The template's marks are segments of their own, tokenised once. So `measure` and `encode` agree.

    An example is anything with `id` and `turns`; a turn has `role` and `parts`; a part is a text, or a clip with
    `num_samples` and `sample_rate`. It is picklable where its tokenizer is (a lambda is not), also for spawned workers.

    Args:
        frames: how clips are counted; None where no example has audio.
        tokenizer: any that `packfp8.lengths.text.to_ids` takes.
        template: the marks around turns.

    Raises:
        ConfigError: the tokenizer is none, or lacks a special id that the template wants.
    """

    frames: AudioFrames | None
    tokenizer: object = field(default_factory=ByteTokenizer)
    template: Template = field(default_factory=Template)
    # Ids of the template's constants, tokenised once: role -> (before, after), and "bos", "eos", "prompt".
    _marks: dict = field(init=False, repr=False, compare=False)
    _words: dict = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pair = {role: tuple(map(self._ids, marks)) for role, marks in self.template.roles.items()}
        words = {name: self._special(name) for name in ("bos", "eos")} | {"prompt": self._ids(self.template.prompt)}
        object.__setattr__(self, "_marks", pair)
        object.__setattr__(self, "_words", words)

    def __call__(self, example) -> Measured:
        """`measure`."""
        return self.measure(example)

    def measure(self, example) -> Measured:
        """The lengths of an example.

        Raises:
            ExampleError: it is none, or has no token, a role or part that is not known, audio where `frames` is None, or text
                that still holds the template's audio mark.
            LengthError: a clip has no encoder frame, an impossible length, or is longer than the encoder takes.
        """
        text = learned = 0
        clips = []
        first = -1  # 1 or 0 once there is a token: whether the first one is supervised
        for ids, clip, supervised in self._segments(example):
            count = clip.encoder_frames if clip else len(ids)
            if first < 0 and count:
                first = int(supervised)
            if clip:
                clips.append(count)
            else:
                text += count
                learned += count * supervised
        tokens = text + sum(clips)
        if not tokens:
            raise _no_token(example)
        return Measured(tokens=tokens, text_tokens=text, encoder_frames=tuple(clips), supervised=learned - first)

    def encode(self, example, *, most_tokens: int = MOST_TOKENS) -> Encoded:
        """The tokens of an example; as many as `measure` says.

        Raises:
            ExampleError, LengthError: as `measure`.
            BudgetError: there are more than `most_tokens`; none of them is then made, nor any memory taken for them.
        """
        rows, targets, clips, at = [], [], [], 0
        segments = list(self._segments(example))
        tokens = sum(clip.encoder_frames if clip else len(ids) for ids, clip, _ in segments)
        if tokens > most_tokens:
            raise _too_many(example, tokens, most_tokens)
        for ids, clip, supervised in segments:
            if clip:
                clips.append(ClipSpan(start=at, encoder_frames=clip.encoder_frames, samples=clip.samples))
                ids = np.full(clip.encoder_frames, self.template.audio_token_id, dtype=np.int64)
            rows.append(ids)
            targets.append(np.full(len(ids), supervised, dtype=np.bool_))
            at += len(ids)
        if not at:
            raise _no_token(example)
        encoded = Encoded(ids=np.concatenate(rows), supervised=np.concatenate(targets), clips=tuple(clips))
        encoded.ids.flags.writeable = encoded.supervised.flags.writeable = False
        return encoded

    @property
    def sample_rate(self) -> int:
        """Hz that the encoder expects; 16,000 where no example has audio."""
        return self.frames.sample_rate if self.frames else 16_000

    @property
    def fingerprint(self) -> str:
        """Short text over template, tokenizer and frames: equal where every example gets the same tokens."""
        frames = self.frames.fingerprint if self.frames else "no audio"
        return fingerprint("measure", self.template.fingerprint, identity(self.tokenizer), frames)

    def _segments(self, example) -> Iterator[tuple[np.ndarray | None, ClipSpan | None, bool]]:
        """The example in order: (ids, None, supervised) of text, or (None, clip, False) of audio; clips start at 0 here."""
        if not hasattr(example, "turns"):
            raise _no_turns(example)
        words, heard = self._words, 0
        yield words["bos"], None, False
        for turn in example.turns:
            if turn.role not in self._marks:
                raise _unknown_role(example, turn.role, self._marks)
            before, after = self._marks[turn.role]
            answer = turn.role == "assistant"
            yield before, None, False
            if turn.role == "user" and turn.parts and not any(isinstance(part, str) and part for part in turn.parts):
                yield words["prompt"], None, False
            text = ""
            for part in turn.parts:
                if isinstance(part, str):
                    text += part
                    continue
                if text:
                    yield self._text(example, text), None, answer
                    text = ""
                yield None, self._clip(example, heard, part), False
                heard += 1
            if text:
                yield self._text(example, text), None, answer
            if answer:
                yield words["eos"], None, True
            yield after, None, False

    def _clip(self, example, heard: int, clip) -> ClipSpan:
        if not (hasattr(clip, "num_samples") and hasattr(clip, "sample_rate")):
            raise ExampleError(
                f"example {example.id!r} has a part that is neither text nor a clip",
                got=type(clip).__name__,
                expected="a str, or a clip with num_samples and sample_rate",
                because="each part becomes tokens, and their number is known from text or from samples",
                fix="build the turn's parts from texts and packfp8.data.Clip",
            )
        if self.frames is None:
            raise ExampleError(
                f"example {example.id!r} has audio, and this measure knows no encoder",
                got="frames=None",
                expected="an AudioFrames",
                because="a clip's tokens are its encoder's frames",
                fix="Measure(frames=AudioFrames.fastconformer()), or the preset of your encoder",
            )
        try:
            samples = self.frames.resampled(clip.num_samples, clip.sample_rate)
            count = self.frames.encoder_frames(samples)
        except LengthError as error:
            raise LengthError(
                f"example {example.id!r}, clip {heard}: {error.what}",
                got=error.got,
                expected=error.expected,
                because=error.because,
                fix=error.fix,
            ) from error
        if not count:
            raise LengthError(
                f"example {example.id!r}, clip {heard} is too short for one encoder frame",
                got=f"{clip.num_samples} samples at {clip.sample_rate} Hz, {samples} at {self.frames.sample_rate} Hz",
                expected=f"at least {self.frames.shortest_samples} samples at {self.frames.sample_rate} Hz",
                because="a clip without a frame would be heard by nobody, and its answer learned from nothing",
                fix="drop the example, or pad the recording",
            )
        return ClipSpan(start=0, encoder_frames=count, samples=samples)

    def _text(self, example, text: str) -> np.ndarray:
        if self.template.audio in text:
            raise ExampleError(
                f"example {example.id!r} has the audio mark {self.template.audio} in its text",
                got=repr(text[:80]),
                expected="clips as parts of the turn, and no mark",
                because="the mark would be read as text, and the clip it stands for not heard",
                fix="split the text with Template.split(text, clips, id=...)",
            )
        return self._ids(text)

    def _ids(self, text: str) -> np.ndarray:
        return to_ids(self.tokenizer, text) if text else np.empty(0, dtype=np.int64)

    def _special(self, name: str) -> np.ndarray:
        mark = getattr(self.template, name)
        if isinstance(mark, str):
            return self._ids(mark)
        if mark is False:
            return self._ids("")
        return np.array([special_id(self.tokenizer, name) if mark is True else mark], dtype=np.int64)


def _too_many(example, tokens: int, most_tokens: int) -> BudgetError:
    return BudgetError(
        f"example {example.id!r} does not fit the pack",
        got=f"{tokens} tokens",
        expected=f"at most {most_tokens} tokens",
        because="so long an example is a fault of its manifest, or would not fit the memory of any machine",
        fix="correct its duration, or choose over_budget='set_aside'",
    )


def _no_turns(example) -> ExampleError:
    return ExampleError(
        "what shall be measured is not an example",
        got=type(example).__name__,
        expected="an object with id and turns, as packfp8.data.Example",
        because="marks, texts and clips are counted turn by turn",
        fix="measure(packfp8.data.as_example(item)), for a cut or a dict",
    )


def _no_token(example) -> ExampleError:
    return ExampleError(
        f"example {example.id!r} has no token",
        got=f"{len(example.turns)} turns, all empty",
        expected="at least one token of text or audio",
        because="a sequence of no tokens has no slot in a pack",
        fix="drop the example, or give it text or a clip",
    )


def _unknown_role(example, role: object, known) -> ExampleError:
    return ExampleError(
        f"example {example.id!r} has a turn of a role that the template does not know",
        got=repr(role),
        expected=f"one of {', '.join(known)}",
        because="the role decides the marks around a turn, and only the assistant's text is learned",
        fix="rename the role, or give its marks: Template(roles={..., role: (before, after)})",
    )
