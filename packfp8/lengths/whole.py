"""Whole numbers: sizes and lengths in samples are checked once, where they come in."""

from __future__ import annotations

import numpy as np

from packfp8.errors import LengthError


def checked_size(what: str, value: object, *, least: int) -> int:
    """`value`, a whole number of at least `least`; LengthError names it otherwise."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= least:
        return int(value)
    raise LengthError(
        f"{what} cannot be",
        got=repr(value),
        expected=f"a whole number of at least {least}",
        because="lengths are counted in integers only; a rounded float is one frame off somewhere",
        fix="pass the number that the real layer has",
    )


def whole_samples(samples):
    """`samples` as an int or an int64 array, each at least 1."""
    if type(samples) is int and samples > 0:
        return samples
    array = np.asarray(samples)
    if array.dtype.kind in "iu" and not np.any(short := array < 1):
        return int(array) if array.ndim == 0 else array.astype(np.int64)
    where, value = ("a clip", repr(samples)) if array.dtype.kind not in "iu" else first(array, short)
    raise LengthError(
        f"{where} has an impossible length",
        got=f"{value} samples",
        expected="a whole number of samples, at least 1",
        because="a clip without samples has no encoder frame, and a length that is not whole is one frame off somewhere",
        fix="repair the manifest, or convert seconds with round(seconds * sample_rate)",
    )


def first(samples, bad) -> tuple[str, int]:
    """The name and the value of the first bad length."""
    flat = np.ravel(samples)
    at = int(np.flatnonzero(bad)[0])
    return ("a clip" if np.ndim(samples) == 0 else f"clip {at}"), int(flat[at])
