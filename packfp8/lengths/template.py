"""Template: how the turns of a conversation become one row of tokens, and which of them are learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from packfp8.errors import ConfigError, ExampleError
from packfp8.lengths.fingerprint import fingerprint

# Plain words, so that any tokenizer spells them; a chat model's own marks are the user's to give.
_ROLES = {"system": ("System: ", "\n"), "user": ("User: ", "\n"), "assistant": ("Assistant: ", "\n")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """The marks around turns.

        [bos] before(user) [prompt] <frames of the clips> text after(user) before(assistant) answer [eos] after(assistant)

    Learned are the answer's text and its eos; not the marks, not the prompt, and never a frame of audio.

    Args:
        roles: role -> (text before a turn, text after it).
        audio: the mark that stands for one clip in raw text; only `split` looks for it.
        prompt: text before a user turn that holds clips and no text.
        bos: what begins a sequence: True is the tokenizer's own id, an int another id, a str a text; False or "" nothing.
        eos: what ends each answer, in the same spelling.
        audio_token_id: id at the places of audio frames. It need only be a valid row of the embedding: the plan knows where
            audio stands, and nothing is ever inferred from an id.

    Raises:
        ConfigError: a mark is of another type, `audio` is empty, or there is no role.
    """

    roles: Mapping[str, tuple[str, str]] = field(default_factory=lambda: dict(_ROLES))
    audio: str = "<|audio|>"
    prompt: str = "Transcribe: "
    bos: bool | int | str = False
    eos: bool | int | str = True
    audio_token_id: int = 0

    def __post_init__(self) -> None:
        roles = {role: tuple(marks) for role, marks in dict(self.roles).items()}
        object.__setattr__(self, "roles", roles)
        for role, marks in roles.items():
            if len(marks) != 2 or not all(isinstance(mark, str) for mark in marks):
                raise _bad_mark(f"roles[{role!r}]", marks, "a pair (text before, text after)")
        if not roles:
            raise _bad_mark("roles", roles, "at least one role")
        if not isinstance(self.audio, str) or not self.audio:
            raise _bad_mark("audio", self.audio, "a text that is not empty")
        if not isinstance(self.prompt, str):
            raise _bad_mark("prompt", self.prompt, "a text")
        for name in ("bos", "eos"):
            mark = getattr(self, name)
            if not isinstance(mark, (int, str)) or (not isinstance(mark, str) and mark < 0):
                raise _bad_mark(name, mark, "True, False, an id of at least 0, or a text")
        if not isinstance(self.audio_token_id, int) or self.audio_token_id < 0:
            raise _bad_mark("audio_token_id", self.audio_token_id, "an id of at least 0")

    def split(self, text: str, clips: Sequence, *, id: str) -> tuple:
        """The parts of a turn: `text` with each audio mark replaced by the next clip, in order; empty text left out.

        Args:
            text: raw text with one mark for each clip.
            clips: the clips, in the order in which they are heard.
            id: the example's name, for the error.

        Raises:
            ExampleError: there are more or fewer marks than clips.
        """
        pieces = text.split(self.audio)
        if len(pieces) - 1 != len(clips):
            raise ExampleError(
                f"example {id!r} does not have one {self.audio} for each clip",
                got=f"{len(pieces) - 1} marks, {len(clips)} clips",
                expected="as many marks as clips, in the order in which they are heard",
                because="a mark is where the frames of one clip are placed; counted per clip, not per example",
                fix=f"write {self.audio} in the text once for each clip",
            )
        parts = [pieces[0]]
        for clip, piece in zip(clips, pieces[1:], strict=True):
            parts += [clip, piece]
        return tuple(part for part in parts if not (isinstance(part, str) and not part))

    @property
    def fingerprint(self) -> str:
        """Short text, equal for equal templates on every machine."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return fingerprint("template", sorted(values.pop("roles").items()), sorted(values.items()))


def _bad_mark(name: str, got: object, expected: str) -> ConfigError:
    return ConfigError(
        f"{name} of the template cannot be",
        got=repr(got),
        expected=expected,
        because="every mark becomes tokens whose number is part of each example's length",
        fix="see help(packfp8.lengths.Template)",
    )
