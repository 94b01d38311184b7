"""Example: one conversation of text and audio, and what a user's item must hold to become one.

Three shapes of item are taken, the ones that people already have:

    a lhotse cut            audio and the text of its supervisions; `lhotse.cut.text.TextExample` is text alone
    a dict, one clip        {"audio" | "audio_filepath": ..., "text": ..., "duration" | "num_samples": ..., "prompt": ...}
    a dict, a conversation  {"messages": [{"role": ..., "content": "... <|audio|> ..."}], "audio": [clip, ...]}

No audio is read here. A clip's length is what its manifest says; only a file that comes without any length has its header
read. Whether the decoded audio agrees is found out by `load_clip`, before a batch is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packfp8.data.as_clip import RATES, as_clip, no_audio, samples_of
from packfp8.data.clip import Clip
from packfp8.errors import ExampleError
from packfp8.lengths import Template

TEMPLATE = Template()
"""Whose audio mark is looked for where no other template is given."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One speaker's turn: text and clips in the order in which they are read; the role is one that the template knows."""

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


def as_example(item: object, *, sample_rate: int = 16_000, template: Template = TEMPLATE, position: int = 0) -> Example:
    """The example that a user's item stands for.

    Args:
        item: an `Example`, a lhotse cut or `TextExample`, or a dict as the module describes.
        sample_rate: Hz at which seconds are counted where the item names no rate.
        template: its audio mark is where messages have a clip.
        position: place of the item in its batch, its name where it has none.

    Raises:
        ExampleError: the item is of an unknown shape, has no text, or its marks and clips do not match.
        LengthError: a duration is missing, zero, negative or not finite.
    """
    name = name_of_item(item, position)
    if isinstance(item, Example):
        return item
    if isinstance(item, Mapping):
        return _from_dict(item, sample_rate, template, name)
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


def as_examples(items: Iterable, *, sample_rate: int = 16_000, template: Template = TEMPLATE) -> list[Example]:
    """The examples of a list of items or of a CutSet, in order."""
    return [as_example(item, sample_rate=sample_rate, template=template, position=n) for n, item in enumerate(items)]


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


def _from_dict(item: Mapping, sample_rate: int, template: Template, name: str) -> Example:
    audio = item["audio_filepath"] if item.get("audio") is None and "audio_filepath" in item else item.get("audio")
    several = isinstance(audio, (list, tuple)) and not (audio and isinstance(audio[0], (int, float)))
    pieces = [] if audio is None else list(audio) if several else [audio]
    if not pieces and (item.get("duration") is not None or item.get("num_samples") is not None):
        raise no_audio(item, name)
    # Beside several clips a length or an offset says nothing about any of them; a rate is that of all.
    shared = item if len(pieces) == 1 else {key: item[key] for key in RATES if key in item}
    clips = [as_clip(piece, shared, sample_rate, name) for piece in pieces]
    if item.get("messages") is not None:
        return Example(id=name, turns=_turns(item["messages"], clips, template, name))
    prompt = (str(item["prompt"]),) if item.get("prompt") else ()
    answer = Turn("assistant", (_text(item.get("text"), name),))
    return Example(id=name, turns=(Turn("user", (*prompt, *clips)), answer) if prompt or clips else (answer,))


def _turns(messages: Sequence[Mapping], clips: list[Clip], template: Template, name: str) -> tuple[Turn, ...]:
    spoken = [_message(message, template, name) for message in (messages if isinstance(messages, Iterable) else [messages])]
    template.split("".join(content for _, content in spoken), clips, id=name)  # as many marks as clips, in all
    _text("".join(content.replace(template.audio, "") for role, content in spoken if role == "assistant"), name)
    turns, heard = [], 0
    for role, content in spoken:
        first, heard = heard, heard + content.count(template.audio)
        turns.append(Turn(role, template.split(content, clips[first:heard], id=name)))
    return tuple(turns)


def _message(message: object, template: Template, name: str) -> tuple[str, str]:
    """Role and content of one of an example's messages."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
        raise ExampleError(
            f"example {name!r} has a message whose content is not text",
            got=repr(message)[:120],
            expected=f"{{'role': ..., 'content': text}}, with {template.audio} where a clip is heard",
            because="what is not text would be learned in its Python spelling, brackets and all",
            fix=f"join the parts of the content into one text, with {template.audio} for each clip",
        )
    role = message.get("role")
    if not isinstance(role, str) or role not in template.roles:
        raise ExampleError(
            f"example {name!r} has a turn of an unknown role",
            got=repr(role),
            expected=f"one of {', '.join(template.roles)}",
            because="only assistant turns are learned from, so the role decides what is supervised",
            fix="rename the role in the example's messages",
        )
    return role, message["content"]


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
