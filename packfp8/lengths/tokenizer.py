"""ByteTokenizer: UTF-8 bytes as tokens, so that everything runs without a download."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_BYTES = 256  # values of a byte: the ids 0 to 255


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteTokenizer:
    """A tokenizer of 256 bytes and the special ids bos (256), eos (257) and pad (258), which no text can spell.

    Args:
        pad_is_eos: padding has the id of eos, as in many pretrained tokenizers; then there is no id 258.
    """

    pad_is_eos: bool = False

    @property
    def bos_token_id(self) -> int:
        return _BYTES

    @property
    def eos_token_id(self) -> int:
        return _BYTES + 1

    @property
    def pad_token_id(self) -> int:
        return self.eos_token_id if self.pad_is_eos else _BYTES + 2

    @property
    def vocab_size(self) -> int:
        """Number of ids: 259, or 258 where padding is eos."""
        return self.pad_token_id + 1

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`: int64 [bytes of its UTF-8]. A lone surrogate, as JSON may hold, becomes its three bytes."""
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special ids; bytes that are not UTF-8 become U+FFFD."""
        data = bytes(i for i in map(int, ids) if 0 <= i < _BYTES)
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return data.decode("utf-8", "replace")
