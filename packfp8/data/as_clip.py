"""How a clip is found in a user's item: its source, its declared length, its part. No audio is decoded here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from packfp8.data.clip import Clip
from packfp8.data.decode import probe_file
from packfp8.errors import ExampleError, LengthError

RATES = ("sampling_rate", "sample_rate")  # Hugging Face's and lhotse's spelling, and the other one
_PARTS = ("array", "bytes", "audio_filepath", "path")  # keys of a nested clip, in the order in which they are looked for


def as_clip(piece: object, item: Mapping, sample_rate: int, name: str) -> Clip:
    """The clip of one 'audio' entry of an item.

    Args:
        piece: a source, or a dict (Hugging Face's Audio column, one of several clips) that may hold its own lengths.
        item: where 'duration', 'num_samples', 'offset', 'sampling_rate' and 'channel' stand.
        sample_rate: Hz at which seconds are counted where no rate is named.
        name: the example's id, for errors.

    Raises:
        LengthError: a length, an offset or a rate that cannot be.
        ExampleError: no audio at all, or an offset into audio that is not a file.
        AudioError: a file without a declared length is missing or broken.
    """
    if isinstance(piece, Mapping):
        item, piece = {**item, **piece}, next((piece[k] for k in _PARTS if piece.get(k) is not None), None)
        if piece is None:
            raise no_audio(item, name)
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
    rate = _rate(next((item[key] for key in RATES if item.get(key) is not None), sample_rate), name)
    start = None if item.get("offset") is None else _start(item["offset"], rate, name)
    if item.get("num_samples") is not None:
        count = _checked(item["num_samples"], 1, "samples", rate, name)
    elif "duration" in item:
        count = samples_of(item["duration"], rate, name)
    elif in_file:
        whole, file_rate, _ = probe_file(piece)
        start, rate = None if start is None else start * file_rate // rate, file_rate
        count = _checked(whole - (start or 0), 1, "samples", rate, name)
    else:
        count = _array_samples(piece, name)
    return Clip(source=piece, num_samples=count, sample_rate=rate, start_sample=start, channel=item.get("channel"))


def _rate(rate: object, name: str) -> int:
    """A rate in Hz as an int."""
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


def no_audio(item: Mapping, name: str) -> ExampleError:
    """The error of an item that has a length or an audio entry, and no audio."""
    return ExampleError(
        f"example {name!r} announces audio and has none",
        got=f"keys {', '.join(map(str, item))}",
        expected=f"'audio' or 'audio_filepath', or a dict with one of {', '.join(_PARTS)}",
        because="it would be learned as text alone, without a word about the audio that was left out",
        fix="name the audio, or remove 'duration' and 'num_samples' from a text",
    )
