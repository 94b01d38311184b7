"""The corpora of the packing benchmarks: int32 [n] tokens of n examples, synthetic by name or real from a CSV file."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np

_FRAMES_PER_SECOND, _TOKENS_PER_SECOND, _PROMPT_TOKENS = 12.5, 3.0, 40


def librispeech_like(num: int, capacity: int, seed: int = 0) -> np.ndarray:
    """Return read speech: durations of 1.3 to 35 s with most of their mass at 12 to 16 s, frames, text and a prompt."""
    rng = np.random.default_rng(seed)
    long = rng.normal(14.0, 1.3, num)
    short = rng.lognormal(1.8, 0.6, num)
    seconds = np.clip(np.where(rng.random(num) < 0.8, long, short), 1.3, 35.0)
    return (np.floor(_FRAMES_PER_SECOND * seconds) + np.floor(_TOKENS_PER_SECOND * seconds) + _PROMPT_TOKENS).astype(np.int32)


def lognormal(num: int, capacity: int, seed: int = 0) -> np.ndarray:
    """Return exp(N(5.5, 0.9)), clipped to 4 and the capacity."""
    return np.clip(np.exp(np.random.default_rng(seed).normal(5.5, 0.9, num)), 4, capacity).astype(np.int32)


def few(num: int, capacity: int, seed: int = 0) -> np.ndarray:
    """Return lengths uniform on a sixth to three quarters of the capacity: few to a pack."""
    return np.random.default_rng(seed).integers(capacity // 6, 3 * capacity // 4 + 1, num, dtype=np.int32)


SYNTHETIC = {"libri": librispeech_like, "lognormal": lognormal, "few": few}


def real() -> dict[str, np.ndarray]:
    """Return the corpora of PACKFP8_TEST_DATA by file name: floor(12.5 * seconds) + utf8_bytes // 4 + 24 tokens."""
    folder = os.environ.get("PACKFP8_TEST_DATA")
    corpora = {}
    for path in sorted(Path(folder, "lengths").glob("*.csv")) if folder else ():
        with path.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
        corpora[path.stem] = np.array(
            [int(12.5 * float(row["duration_s"])) + int(row["utf8_bytes"] or row["chars"]) // 4 + 24 for row in rows],
            dtype=np.int32,
        )
    return corpora
