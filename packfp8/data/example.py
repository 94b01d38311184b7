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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packfp8.errors import ExampleError, LengthError

ROLES = ("system", "user", "assistant")
AUDIO_MARK = "<|audio|>"
_PARTS = ("array", "bytes", "audio_filepath", "path")  # keys of a nested clip, in the order in which they are looked for


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
    name = name_of_item(item, position)
    if isinstance(item, Example):
        return item
    if isinstance(item, Mapping):
        return _from_dict(item, sample_rate, name)
    if hasattr(item, "supervisions") and hasattr(item, "sampling_rate"):
        return _from_cut(item, name)
    if hasattr(item, "text") and hasattr(item, "num_tokens"):
        return Example(id=name, turns=(Turn("assistant", (_text(item.text, name),)),))
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


def name_of_item(item: object, position: int) -> str:
    """The id of an item: its own, else where its audio is (and begins), else its place in the batch."""
    if not isinstance(item, Mapping):
        return str(getattr(item, "id", f"example-{position}"))
    if item.get("id") is not None:
        return str(item["id"])
    for key in ("audio_filepath", "audio"):
        if isinstance(item.get(key), (str, Path)):
            return str(item[key]) + (f"@{item['offset']}" if item.get("offset") else "")
    return f"example-{position}"


def _from_cut(cut, name: str) -> Example:
    custom = getattr(cut, "custom", None) or {}
    spoken = [s.text for s in sorted(cut.supervisions, key=lambda s: s.start) if s.text]
    rate = int(cut.sampling_rate)
    clip = Clip(source=cut, num_samples=samples_of(cut.duration, rate, name), sample_rate=rate)
    user = (custom["prompt"], clip) if custom.get("prompt") else (clip,)
    return Example(id=name, turns=(Turn("user", user), Turn("assistant", (_text(" ".join(spoken), name),))))


def _from_dict(item: Mapping, sample_rate: int, name: str) -> Example:
    audio = item["audio_filepath"] if item.get("audio") is None and "audio_filepath" in item else item.get("audio")
    several = isinstance(audio, (list, tuple)) and not (audio and isinstance(audio[0], (int, float)))
    pieces = [] if audio is None else list(audio) if several else [audio]
    if not pieces and (item.get("duration") is not None or item.get("num_samples") is not None):
        raise _no_audio(item, name)
    # Beside several clips a length or an offset says nothing about any of them; a rate is that of all.
    shared = item if len(pieces) == 1 else {key: item[key] for key in ("sampling_rate", "sample_rate") if key in item}
    clips = [_clip(piece, shared, sample_rate, name) for piece in pieces]
    if "messages" in item:
        return Example(id=name, turns=_turns(item["messages"], clips, name))
    prompt = (str(item["prompt"]),) if item.get("prompt") else ()
    answer = Turn("assistant", (_text(item.get("text"), name),))
    return Example(id=name, turns=(Turn("user", (*prompt, *clips)), answer) if prompt or clips else (answer,))


def _turns(messages: Sequence[Mapping], clips: list[Clip], name: str) -> tuple[Turn, ...]:
    spoken = [_message(message, name) for message in messages]
    marks = sum(content.count(AUDIO_MARK) for _, content in spoken)
    if marks != len(clips):
        raise ExampleError(
            f"example {name!r} does not have one {AUDIO_MARK} for each clip",
            got=f"{marks} marks, {len(clips)} clips",
            expected="as many marks as clips, in the order in which they are heard",
            because="a mark is where the frames of one clip are placed; counted per clip, not per example",
            fix=f"write {AUDIO_MARK} in the message once for each entry of 'audio'",
        )
    _text("".join(content.replace(AUDIO_MARK, "") for role, content in spoken if role == "assistant"), name)
    left, turns = iter(clips), []
    for role, content in spoken:
        pieces = re.split(f"({re.escape(AUDIO_MARK)})", content)
        turns.append(Turn(role, tuple(next(left) if p == AUDIO_MARK else p for p in pieces if p)))
    return tuple(turns)


def _message(message: object, name: str) -> tuple[str, str]:
    """Role and content of one of an example's messages."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
        raise ExampleError(
            f"example {name!r} has a message whose content is not text",
            got=repr(message)[:120],
            expected=f"{{'role': ..., 'content': text}}, with {AUDIO_MARK} where a clip is heard",
            because="what is not text would be learned in its Python spelling, brackets and all",
            fix=f"join the parts of the content into one text, with {AUDIO_MARK} for each clip",
        )
    role = message.get("role")
    if role not in ROLES:
        raise ExampleError(
            f"example {name!r} has a turn of an unknown role",
            got=repr(role),
            expected=f"one of {', '.join(ROLES)}",
            because="only assistant turns are learned from, so the role decides what is supervised",
            fix="rename the role in the example's messages",
        )
    return role, message["content"]


def _clip(piece: object, item: Mapping, sample_rate: int, name: str) -> Clip:
    """The clip of one 'audio' entry; a nested dict (Hugging Face's Audio column, one of several clips) may hold its lengths."""
    if isinstance(piece, Mapping):
        item, piece = {**item, **piece}, next((piece[k] for k in _PARTS if piece.get(k) is not None), None)
        if piece is None:
            raise _no_audio(item, name)
    in_file = isinstance(piece, (str, Path, bytes))
    if item.get("offset") is not None and not in_file:
        raise ExampleError(
            f"example {name!r} has an offset into audio that is not a file",
            got=f"offset {item['offset']!r} beside {type(piece).__name__}",
            expected="an offset beside a path or encoded bytes",
            because="the whole of an array or cut is heard; an offset left unused would put another text to it",
            fix="slice the array, or truncate the cut",
        )
    if hasattr(piece, "load_audio"):
        rate = int(piece.sampling_rate)
        return Clip(source=piece, num_samples=samples_of(piece.duration, rate, name), sample_rate=rate)
    rate = _rate(item.get("sampling_rate", item.get("sample_rate")), sample_rate, name)
    start = None if item.get("offset") is None else _start(item["offset"], rate, name)
    if item.get("num_samples") is not None:
        count = _checked(item["num_samples"], 1, "samples", rate, name)
    elif "duration" in item:
        count = samples_of(item["duration"], rate, name)
    elif in_file:
        from packfp8.data.audio import probe_file

        whole, file_rate, _ = probe_file(piece)
        start, rate = None if start is None else start * file_rate // rate, file_rate
        count = _checked(whole - (start or 0), 1, "samples", rate, name)
    else:
        count = _array_samples(piece, name)
    return Clip(source=piece, num_samples=count, sample_rate=rate, start_sample=start, channel=item.get("channel"))


def _rate(rate: object, default: int, name: str) -> int:
    """The item's rate in Hz, or the default where it names none."""
    if rate is None:
        return default
    if isinstance(rate, (int, float, np.number)) and rate >= 1 and int(rate) == rate:
        return int(rate)
    raise LengthError(
        f"example {name!r} has an impossible sample rate",
        got=repr(rate),
        expected="a whole number of samples a second, at least 1",
        because="seconds become samples by the rate, and samples become tokens",
        fix="correct 'sampling_rate', or leave it out for the encoder's",
    )


def _start(seconds: object, sample_rate: int, name: str) -> int:
    """The sample at which a clip begins."""
    if isinstance(seconds, (int, float, np.number)) and seconds >= 0 and math.isfinite(float(seconds) * sample_rate):
        return round(float(seconds) * sample_rate)
    raise LengthError(
        f"example {name!r} begins at an impossible offset",
        got=f"{seconds!r} s",
        expected="a finite number of seconds, at least 0",
        because="another part of the file says another text",
        fix="repair or remove the manifest line",
    )


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
    return _checked(seconds, sample_rate, "s", sample_rate, name)


def _checked(length: object, times: int, unit: str, sample_rate: int, name: str) -> int:
    """`length` in samples, `times` as many as of its unit."""
    number = isinstance(length, (int, float, np.number)) and not isinstance(length, bool)
    samples = float(length) * times if number else 0.0
    count = math.floor(samples + 0.5) if math.isfinite(samples) else 0
    if count < 1:
        raise LengthError(
            f"example {name!r} has an impossible duration",
            got=f"{length!r} {unit}",
            expected=f"a finite duration of at least one sample at {sample_rate} Hz",
            because="a clip without samples has no encoder frame, and a length that is not a number sorts anywhere",
            fix="repair or remove the manifest line",
        )
    return count


def _no_audio(item: Mapping, name: str) -> ExampleError:
    return ExampleError(
        f"example {name!r} announces audio and has none",
        got=f"keys {', '.join(map(str, item))}",
        expected=f"'audio' or 'audio_filepath', or a dict with one of {', '.join(_PARTS)}",
        because="it would be learned as text alone, without a word about the audio that was left out",
        fix="name the audio, or remove 'duration' and 'num_samples' from a text",
    )


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
