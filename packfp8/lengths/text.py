"""Text to ids through any tokenizer: the embedded one, a Hugging Face one, any object with `encode`, a plain callable.

A length is always what the tokenizer gives, never a guess from the number of characters.
"""

from __future__ import annotations

import inspect
from functools import lru_cache

import numpy as np

from packfp8.errors import ConfigError
from packfp8.lengths.fingerprint import fingerprint

# Upper and lower case, digits, runs of spaces, a line break, accents, a script without spaces, a character outside the
# basic plane: what tokenizers differ in.
_SAMPLE = "The quick  brown fox, 12 345.67 €\n\tnaïve Ångström — 你好，世界 نعم 🎧"


def to_ids(tokenizer: object, text: str) -> np.ndarray:
    """The ids of one text without special tokens around it: int64 [tokens], read-only.

    Args:
        tokenizer: an object with `encode(text)` (with `add_special_tokens`, where it takes that), or a callable text -> ids.
            Ids may come as a list, an array or tensor, an object with `ids`, or a mapping with `input_ids`.

    Raises:
        ConfigError: the object is no tokenizer, or what it gives is not a flat row of ids of at least 0.
    """
    named = isinstance(tokenizer, str)  # the name of a tokenizer has a method encode too, of another kind
    if named or not (hasattr(tokenizer, "encode") or callable(tokenizer)):
        raise ConfigError(
            "the tokenizer can neither be called nor has it a method encode for text",
            got=repr(tokenizer) if named else type(tokenizer).__name__,
            expected="a callable text -> ids, a Hugging Face tokenizer, or an object with encode(text)",
            because="token counts come from the tokenizer that the model was trained with",
            fix="pass packfp8.lengths.ByteTokenizer(), or the model's own tokenizer, loaded",
        )
    if not hasattr(tokenizer, "encode"):
        given = tokenizer(text)
    elif _takes_special_tokens(type(tokenizer)):
        given = tokenizer.encode(text, add_special_tokens=False)
    else:
        given = tokenizer.encode(text)
    return _row(given, tokenizer)


def identity(tokenizer: object) -> str:
    """Short text that changes with what the tokenizer does: its class, the size of its vocabulary, the ids of a fixed text."""
    return fingerprint(type(tokenizer).__qualname__, _vocab_size(tokenizer), to_ids(tokenizer, _SAMPLE).tolist())


def special_id(tokenizer: object, name: str) -> int:
    """The tokenizer's own id of a special token.

    Args:
        name: "bos" or "eos".

    Raises:
        ConfigError: the tokenizer has none.
    """
    found = getattr(tokenizer, f"{name}_token_id", None)
    if isinstance(found, (int, np.integer)) and not isinstance(found, bool):
        return int(found)
    raise ConfigError(
        f"the template wants the tokenizer's own {name}, and it has none",
        got=f"{type(tokenizer).__name__} with {name}_token_id = {found!r}",
        expected=f"a tokenizer with an integer {name}_token_id",
        because="a model that never sees the end of an answer does not learn to stop"
        if name == "eos"
        else "an id that is guessed belongs to some other token",
        fix=f"Template({name}=<id>), Template({name}='<text>'), or Template({name}=False) to do without",
    )


@lru_cache  # asking for a signature costs more than a short text
def _takes_special_tokens(kind: type) -> bool:
    try:
        return "add_special_tokens" in inspect.signature(getattr(kind, "encode", None)).parameters
    except (TypeError, ValueError):  # some compiled methods have no signature to ask
        return False


def _row(given: object, tokenizer: object) -> np.ndarray:
    """`given` as int64 [tokens], read-only."""
    if hasattr(given, "ids"):
        given = given.ids
    elif isinstance(given, dict) or hasattr(given, "keys"):
        given = given["input_ids"]
    ids = np.asarray(given)
    if ids.size == 0:
        ids = ids.reshape(-1).astype(np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or (ids.size and ids.min() < 0):
        raise ConfigError(
            "the tokenizer does not give a flat row of ids",
            got=f"{type(tokenizer).__name__}: {str(given)[:80]}",
            expected="integers of at least 0, in one dimension",
            because="each id is one token of the pack and a row of the embedding",
            fix="wrap the tokenizer in a function text -> list of ids, for one text at a time",
        )
    ids = ids.astype(np.int64, copy=False).view()
    ids.flags.writeable = False
    return ids


def _vocab_size(tokenizer: object) -> int:
    """Number of ids, added ones included where the tokenizer tells; 0 where it tells nothing."""
    if hasattr(tokenizer, "__len__"):
        return len(tokenizer)
    if hasattr(tokenizer, "get_vocab_size"):
        return int(tokenizer.get_vocab_size())
    return int(getattr(tokenizer, "vocab_size", 0))
