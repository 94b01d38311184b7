"""Counting: what a line of a manifest means in tokens, when only its seconds and its text are known.

    tokens = floor(frames_per_second * seconds) + text tokens + prompt tokens

Seconds become samples at 16 kHz first, rounded half up as lhotse does, and frames follow in integers: 4.56 s at 12.5 frames/s
are 57 frames, where floating point says 56.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from packfp8.errors import ConfigError
from packfp8.lengths import ByteTokenizer
from packfp8.lengths.text import to_ids

SAMPLE_RATE = 16_000
"""Hz at which seconds are counted: what speech encoders expect."""

FRAMES_PER_SECOND = "12.5"
"""Default encoder frames in a second: FastConformer's 8x subsampling of 10 ms features."""

_BYTES_PER_TOKEN = 4  # a usual rate of subword tokenizers on English; only used where no tokenizer is given


@dataclass(frozen=True, kw_only=True, slots=True)
class Counting:
    """How seconds and text are counted.

    Args:
        frames_per_second: encoder frames in a second of audio.
        tokenizer: any that `packfp8.lengths.Measure` takes; None estimates UTF-8 bytes // 4.
        prompt_tokens: added to every example.
    """

    frames_per_second: Fraction = Fraction(FRAMES_PER_SECOND)
    tokenizer: object | None = None
    prompt_tokens: int = 0

    @classmethod
    def of(cls, frames_per_second: object = None, tokenizer: object = None, prompt_tokens: int = 0) -> Counting:
        """The counting of these settings; `tokenizer` may be a name that `load_tokenizer` knows.

        Raises:
            ConfigError: a rate that is no positive number, a negative prompt, or a tokenizer that cannot be loaded.
        """
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer)
        if tokenizer is not None:
            to_ids(tokenizer, "a")  # an object that is no tokenizer is told here, not in line 1 of the manifest
        return cls(frames_per_second=_rate(frames_per_second), tokenizer=tokenizer, prompt_tokens=_prompt(prompt_tokens))

    def encoder_frames(self, seconds: np.ndarray) -> np.ndarray:
        """int64 [n] of seconds float64 [n]; -1 where they are not finite or come to less than one sample."""
        rate = self.frames_per_second
        possible = np.isfinite(seconds) & (seconds > 0) & (seconds < 1e9)  # below 2**63 after the multiplications
        samples = np.floor(np.where(possible, seconds, 0) * SAMPLE_RATE + 0.5).astype(np.int64)
        frames = samples * rate.numerator // (rate.denominator * SAMPLE_RATE)
        return np.where(samples > 0, frames, -1)

    def text_counter(self) -> Callable[[str], int]:
        """A function from a text to its number of tokens."""
        if self.tokenizer is None:
            return lambda text: len(text.encode("utf-8", "surrogatepass")) // _BYTES_PER_TOKEN
        tokenizer = self.tokenizer
        return lambda text: len(to_ids(tokenizer, text)) if text else 0

    def text_tokens(self, texts: list[str]) -> list[int]:
        """Tokens of each text; raises UnicodeEncodeError for a lone surrogate, which `text_counter` counts as three bytes."""
        if self.tokenizer is None:  # the way of every line of a large manifest: no call of a function of ours
            return [len(text.encode()) // _BYTES_PER_TOKEN for text in texts]
        return list(map(self.text_counter(), texts))

    def of_bytes(self, utf8_bytes: np.ndarray) -> np.ndarray:
        """int64 [n]: estimated tokens of texts of which only the UTF-8 bytes are known."""
        return np.asarray(utf8_bytes, dtype=np.int64) // _BYTES_PER_TOKEN

    def __str__(self) -> str:
        text = "UTF-8 bytes // 4 (no tokenizer given)" if self.tokenizer is None else type(self.tokenizer).__name__
        return f"floor({float(self.frames_per_second):g} frames/s * seconds) + text tokens + {self.prompt_tokens}; text: {text}"


def load_tokenizer(name: str) -> object:
    """The tokenizer of a name: "bytes", a `tokenizer.json`, "module:attribute", or what transformers' AutoTokenizer loads.

    Raises:
        ConfigError: nothing by that name, or the library that would read it is not installed.
    """
    if name == "bytes":
        return ByteTokenizer()
    try:
        if name.endswith(".json") and Path(name).is_file():
            return importlib.import_module("tokenizers").Tokenizer.from_file(name)
        if ":" in name and not Path(name).exists():
            module, _, attribute = name.partition(":")
            found = getattr(importlib.import_module(module), attribute)
            return found() if isinstance(found, type) else found
        return importlib.import_module("transformers").AutoTokenizer.from_pretrained(name)
    except (ImportError, AttributeError, OSError, ValueError) as fault:
        raise ConfigError(
            f"the tokenizer {name!r} cannot be loaded",
            got=f"{type(fault).__name__}: {' '.join(str(fault).split())[:200]}",
            expected="'bytes', a tokenizer.json, 'module:attribute', or a name that transformers knows",
            because="token counts come from the tokenizer that the model was trained with",
            fix="install transformers or tokenizers, or leave it out: text is then estimated as UTF-8 bytes // 4",
        ) from fault


def _rate(given: object) -> Fraction:
    try:
        rate = Fraction(FRAMES_PER_SECOND if given is None else str(given))
    except ValueError:
        rate = Fraction(0)
    if 0 < rate <= SAMPLE_RATE:
        return rate.limit_denominator(10**6)
    raise ConfigError(
        "the frame rate is not a rate",
        got=repr(given),
        expected=f"encoder frames in a second, above 0 and at most {SAMPLE_RATE}",
        because="an example's audio tokens are its seconds times this",
        fix="12.5 for FastConformer 8x, 50 for Whisper, or your encoder's own",
    )


def _prompt(given: int) -> int:
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    raise ConfigError(
        "the prompt is not a number of tokens",
        got=repr(given),
        expected="a whole number, at least 0",
        because="it is added to the length of every example",
        fix="count the tokens of your prompt and template, and pass that",
    )
