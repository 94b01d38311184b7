"""Example: one conversation of text and audio, and what a user's item must hold to become one.

Three shapes of item are taken, the ones that people already have:

    a lhotse cut            audio and the text of its supervisions; `lhotse.cut.text.TextExample` is text alone
    a dict, one clip        {"audio" | "audio_filepath": ..., "text": ..., "duration" | "num_samples": ..., "prompt": ...}
    a dict, a conversation  {"messages": [{"role": ..., "content": "... <|audio|> ..."}], "audio": [clip, ...]}

No audio is read here. A clip's length is what its manifest says; only a file that comes without any length has its header
read. Whether the decoded audio agrees is found out by `load_clip`, before a batch is built.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packfp8.errors import ExampleError, LengthError

ROLES = ("system", "user", "assistant")
AUDIO_MARK = "<|audio|>"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Clip:
    """One piece of audio and its declared length.

    Args:
        source: a path, encoded bytes, an array (float, `[samples]` or with a channel axis), or a lhotse cut or recording.
        num_samples: declared length in samples at `sample_rate`; at least 1.
        sample_rate: in Hz. A manifest that gives seconds and no rate is counted at the encoder's rate.
        start_sample: where the clip begins, counted at `sample_rate`, in a source that may go on after it; None is the whole
            source, which must then be as long as declared.
        channel: index of the channel to take; None takes the mean over the channels.
    """

    source: object
    num_samples: int
    sample_rate: int
    start_sample: int | None = None
    channel: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One speaker's turn: text and clips in the order in which they are read. Roles: system, user, assistant."""

    role: str
    parts: tuple[str | Clip, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One training example. Only assistant turns are learned from."""

    id: str
    turns: tuple[Turn, ...]

    @property
    def clips(self) -> tuple[Clip, ...]:
        """The clips in the order in which they are heard."""
        return tuple(part for turn in self.turns for part in turn.parts if not isinstance(part, str))


def as_example(item: object, *, sample_rate: int = 16_000, position: int = 0) -> Example:
    """The example that a user's item stands for.

    Args:
        item: an `Example`, a lhotse cut or `TextExample`, or a dict as the module describes.
        sample_rate: Hz at which seconds are counted where the item names no rate.
        position: place of the item in its batch, its name where it has none.

    Raises:
        ExampleError: the item is of an unknown shape, has no text, or its marks and clips do not match.
        LengthError: a duration is missing, zero, negative or not finite.
    """
    if isinstance(item, Example):
        return item
    if isinstance(item, dict):
        return _from_dict(item, sample_rate, position)
    if hasattr(item, "supervisions") and hasattr(item, "sampling_rate"):
        return _from_cut(item)
    if hasattr(item, "text") and hasattr(item, "id"):
        return Example(id=str(item.id), turns=(Turn("assistant", (_text(item.text, str(item.id)),)),))
    raise ExampleError(
        f"item {position} of the batch is of a type that is not known",
        got=type(item).__name__,
        expected="packfp8.Example, a lhotse cut or TextExample, or a dict",
        because="its audio and text cannot be found without knowing its fields",
        fix="map the dataset to dicts with 'audio' and 'text', or build packfp8.Example yourself",
    )


def as_examples(items: Iterable, *, sample_rate: int = 16_000) -> list[Example]:
    """The examples of a list of items or of a CutSet, in order."""
    return [as_example(item, sample_rate=sample_rate, position=n) for n, item in enumerate(items)]


def _from_cut(cut) -> Example:
    name = str(cut.id)
    custom = getattr(cut, "custom", None) or {}
    spoken = [s.text for s in sorted(cut.supervisions, key=lambda s: s.start) if s.text]
    rate = int(cut.sampling_rate)
    clip = Clip(source=cut, num_samples=samples_of(cut.duration, rate, name), sample_rate=rate)
    user = (custom["prompt"], clip) if custom.get("prompt") else (clip,)
    return Example(id=name, turns=(Turn("user", user), Turn("assistant", (_text(" ".join(spoken), name),))))


def _from_dict(item: dict, sample_rate: int, position: int) -> Example:
    name = _name(item, position)
    audio = item.get("audio", item.get("audio_filepath"))
    several = isinstance(audio, (list, tuple)) and not (audio and isinstance(audio[0], (int, float)))
    pieces = [] if audio is None else list(audio) if several else [audio]
    clips = [_clip(piece, {} if several else item, sample_rate, name) for piece in pieces]
    if "messages" in item:
        return Example(id=name, turns=_turns(item["messages"], clips, name))
    prompt = (str(item["prompt"]),) if item.get("prompt") else ()
    answer = Turn("assistant", (_text(item.get("text"), name),))
    return Example(id=name, turns=(Turn("user", (*prompt, *clips)), answer) if prompt or clips else (answer,))


def _turns(messages: Sequence[dict], clips: list[Clip], name: str) -> tuple[Turn, ...]:
    marks = sum(str(m.get("content", "")).count(AUDIO_MARK) for m in messages)
    if marks != len(clips):
        raise ExampleError(
            f"example {name!r} does not have one {AUDIO_MARK} for each clip",
            got=f"{marks} marks, {len(clips)} clips",
            expected="as many marks as clips, in the order in which they are heard",
            because="a mark is where the frames of one clip are placed; counted per clip, not per example",
            fix=f"write {AUDIO_MARK} in the message once for each entry of 'audio'",
        )
    left, turns = iter(clips), []
    for message in messages:
        role = message.get("role")
        if role not in ROLES:
            raise ExampleError(
                f"example {name!r} has a turn of an unknown role",
                got=repr(role),
                expected=f"one of {', '.join(ROLES)}",
                because="only assistant turns are learned from, so the role decides what is supervised",
                fix="rename the role in the example's messages",
            )
        pieces = re.split(f"({re.escape(AUDIO_MARK)})", str(message.get("content", "")))
        turns.append(Turn(role, tuple(next(left) if p == AUDIO_MARK else p for p in pieces if p)))
    return tuple(turns)


def _clip(piece: object, item: dict, sample_rate: int, name: str) -> Clip:
    """The clip of one 'audio' entry; a nested dict (Hugging Face's Audio column, one of several clips) may hold its lengths."""
    if isinstance(piece, dict):
        item = {**item, **piece}
        piece = next((piece[k] for k in ("array", "bytes", "audio_filepath", "path") if piece.get(k) is not None), None)
    if hasattr(piece, "load_audio"):
        rate = int(piece.sampling_rate)
        return Clip(source=piece, num_samples=samples_of(piece.duration, rate, name), sample_rate=rate)
    rate = int(item.get("sampling_rate") or item.get("sample_rate") or sample_rate)
    channel = item.get("channel")
    start = None if item.get("offset") is None else round(float(item["offset"]) * rate)
    if item.get("num_samples") is not None:
        count = samples_of(item["num_samples"] / rate, rate, name)
    elif "duration" in item:
        count = samples_of(item["duration"], rate, name)
    elif isinstance(piece, (str, Path, bytes)):
        from packfp8.data.audio import probe_file

        whole, file_rate, _ = probe_file(piece)
        start, rate = None if start is None else start * file_rate // rate, file_rate
        count = whole - (start or 0)
    else:
        count = _array_samples(piece, name)
    return Clip(source=piece, num_samples=count, sample_rate=rate, start_sample=start, channel=channel)


def _array_samples(array: object, name: str) -> int:
    shape = np.shape(array)
    if len(shape) == 1 and shape[0]:
        return int(shape[0])
    raise LengthError(
        f"the length of example {name!r} cannot be read from its array",
        got=f"shape {shape}" if shape else type(array).__name__,
        expected="an array [samples], or 'num_samples' beside an array with a channel axis",
        because="[2, n] and [n, 2] look alike; averaging over the wrong axis destroys the signal",
        fix="give 'num_samples', or average the channels yourself",
    )


def samples_of(seconds: object, sample_rate: int, name: str) -> int:
    """Samples in `seconds` at `sample_rate`, rounded half up as lhotse does (`lhotse.utils.compute_num_samples`).

    Raises:
        LengthError: `seconds` is missing, not finite, or comes to less than one sample.
    """
    number = isinstance(seconds, (int, float, np.number)) and math.isfinite(seconds)
    count = math.floor(float(seconds) * sample_rate + 0.5) if number else 0
    if count < 1:
        raise LengthError(
            f"example {name!r} has an impossible duration",
            got=f"{seconds!r} s",
            expected=f"a finite duration of at least one sample at {sample_rate} Hz",
            because="a clip without samples has no encoder frame, and a length that is not a number sorts anywhere",
            fix="repair or remove the manifest line",
        )
    return count


def _text(text: object, name: str) -> str:
    if isinstance(text, str) and text.strip():
        return text
    raise ExampleError(
        f"example {name!r} has no text to learn from",
        got=repr(text),
        expected="a text that is not empty",
        because="without an answer none of its tokens would be supervised, and it would train nothing",
        fix="add the transcript, drop the example, or pass packfp8.Example with the turns you mean",
    )


def _name(item: dict, position: int) -> str:
    for key in ("id", "audio_filepath", "audio"):
        if isinstance(item.get(key), (str, int, Path)):
            return str(item[key])
    return f"example-{position}"
