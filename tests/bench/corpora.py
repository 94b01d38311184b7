"""The corpora of the packing benchmarks: int32 [n] tokens of n examples, synthetic by name or real from a CSV file."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np

_FRAMES_PER_SECOND, _TOKENS_PER_SECOND, _PROMPT_TOKENS = 12.5, 3.0, 40


def librispeech_like(num: int, capacity: int, seed: int = 0) -> np.ndarray:
    """Return read speech: durations of 1.3 to 35 s with most of their mass at 12 to 16 s, frames, text and a prompt."""
    frames, text = librispeech_parts(num, seed)
    return frames + text


def librispeech_parts(num: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the same in two: int32 [n] encoder frames, and int32 [n] tokens of text and prompt."""
    rng = np.random.default_rng(seed)
    long = rng.normal(14.0, 1.3, num)
    short = rng.lognormal(1.8, 0.6, num)
    seconds = np.clip(np.where(rng.random(num) < 0.8, long, short), 1.3, 35.0)
    frames = np.floor(_FRAMES_PER_SECOND * seconds).astype(np.int32)
    return frames, (np.floor(_TOKENS_PER_SECOND * seconds) + _PROMPT_TOKENS).astype(np.int32)


def lognormal(num: int, capacity: int, seed: int = 0) -> np.ndarray:
    """Return exp(N(5.5, 0.9)), clipped to 4 and the capacity."""
    return np.clip(np.exp(np.random.default_rng(seed).normal(5.5, 0.9, num)), 4, capacity).astype(np.int32)


def few(num: int, capacity: int, seed: int = 0) -> np.ndarray:
    """Return lengths uniform on a sixth to three quarters of the capacity: few to a pack."""
    return np.random.default_rng(seed).integers(capacity // 6, 3 * capacity // 4 + 1, num, dtype=np.int32)


SYNTHETIC = {"libri": librispeech_like, "lognormal": lognormal, "few": few}


def real_parts() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the corpora of PACKFP8_TEST_DATA by file name: int32 [n] encoder frames and int32 [n] text tokens.

    floor(12.5 * seconds) frames, and utf8_bytes // 4 + 24 tokens of text.
    """
    folder = os.environ.get("PACKFP8_TEST_DATA")
    corpora = {}
    for path in sorted(Path(folder, "lengths").glob("*.csv")) if folder else ():
        with path.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
        frames = [int(_FRAMES_PER_SECOND * float(row["duration_s"])) for row in rows]
        text = [int(row["utf8_bytes"] or row["chars"]) // 4 + 24 for row in rows]
        corpora[path.stem] = np.array(frames, dtype=np.int32), np.array(text, dtype=np.int32)
    return corpora


def real() -> dict[str, np.ndarray]:
    """Return the tokens of the corpora of PACKFP8_TEST_DATA by file name: frames and text."""
    return {name: frames + text for name, (frames, text) in real_parts().items()}
