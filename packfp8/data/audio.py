"""The one place where audio is read: a clip in, mono float32 samples of exactly the declared length out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.signal import resample_poly

from packfp8.data.clip import Clip
from packfp8.data.decode import decode, name_of, no_channel, probe_file, samples_at
from packfp8.errors import AudioError

__all__ = ["Loaded", "load_clip", "probe_file", "samples_at"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """The audio of one clip.

    Args:
        samples: float32 `[samples]`, mono at the rate that was asked for, read-only.
        trimmed_samples: what the decoded audio had beyond the declared length, cut from its end; negative where it had
            less and zeros were added. One sample of rounding between two rates is not counted.
    """

    samples: np.ndarray
    trimmed_samples: int


def load_clip(clip: Clip, sample_rate: int, *, resample: bool, tolerance_samples: int) -> Loaded:
    """The audio of `clip`, mono at `sample_rate` Hz: `samples_at(clip.num_samples, clip.sample_rate, sample_rate)` samples.

    Args:
        clip: what to read. With `start_sample` None it is the whole source, which must be as long as declared;
            otherwise it is a part of a source that may go on after it.
        sample_rate: Hz of the result.
        resample: whether audio of another rate is resampled (polyphase); otherwise it is an error.
        tolerance_samples: the largest difference from the declared length that is trimmed or filled with zeros, in
            samples at `sample_rate`.

    Raises:
        AudioError: the audio is missing, broken, empty, not finite, of another rate, has no such channel or an unclear
            channel axis, or is not as long as declared.
    """
    name = name_of(clip.source)
    decoded = decode(clip, tolerance_samples=tolerance_samples * clip.sample_rate / sample_rate)
    waves = _select(decoded.waves, clip.channel, name)
    _check_content(waves, name)
    wave = waves.mean(axis=0, dtype=np.float64).astype(np.float32) if len(waves) > 1 else waves[0]
    if decoded.rate != sample_rate:
        if not resample:
            raise _other_rate(decoded.rate, sample_rate, name)
        common = math.gcd(sample_rate, decoded.rate)
        wave = resample_poly(wave, sample_rate // common, decoded.rate // common).astype(np.float32, copy=False)
    expected = samples_at(clip.num_samples, clip.sample_rate, sample_rate)
    excess = len(wave) - expected
    # A length declared at one rate and decoded at another may round to one sample more or less.
    rounding = int(decoded.rate != clip.sample_rate)
    if abs(excess) > tolerance_samples + rounding:
        raise _other_length(len(wave), expected, tolerance_samples, sample_rate, name)
    return Loaded(samples=_fit(wave, expected), trimmed_samples=excess if abs(excess) > rounding else 0)


def _select(waves: np.ndarray, channel: int | None, name: str) -> np.ndarray:
    """`[channels, samples]`: the one channel that was asked for, or all."""
    if channel is None:
        return waves
    whole = isinstance(channel, (int, np.integer)) and not isinstance(channel, bool)
    if not whole or not 0 <= channel < len(waves):
        raise no_channel(channel, len(waves), name)
    return waves[channel : channel + 1]


def _fit(wave: np.ndarray, expected: int) -> np.ndarray:
    """float32 `[expected]`, read-only: cut at the end, or zeros added there."""
    samples = np.zeros(expected, dtype=np.float32)
    samples[: len(wave)] = wave[:expected]
    samples.flags.writeable = False
    return samples


def _check_content(waves: np.ndarray, name: str) -> None:
    if not waves.size:
        raise AudioError(
            f"{name} has no samples",
            got="0 samples",
            expected="at least one",
            because="a clip without samples has no encoder frame",
            fix="correct where the clip begins, or remove the example",
        )
    finite = np.isfinite(waves)
    if not finite.all():
        raise AudioError(
            f"{name} has samples that are not finite",
            got=f"{np.count_nonzero(~finite)} of {waves.size} samples are NaN or infinite",
            expected="finite samples",
            because="one NaN reaches every parameter through the loss",
            fix="repair or remove the file",
        )


def _other_rate(rate: int, sample_rate: int, name: str) -> AudioError:
    return AudioError(
        f"{name} has another sample rate than the encoder",
        got=f"{rate} Hz",
        expected=f"{sample_rate} Hz",
        because="the encoder would hear it too slow or too fast, and its frames would not match its length",
        fix="allow resampling (resample=True), or resample the files beforehand",
    )


def _other_length(got: int, expected: int, tolerance_samples: int, sample_rate: int, name: str) -> AudioError:
    return AudioError(
        f"{name} is not as long as its manifest says",
        got=f"{got} samples at {sample_rate} Hz",
        expected=f"{expected} samples, within {tolerance_samples}",
        because="its place in the pack was decided from the declared length",
        fix="correct the manifest, name where the clip begins if a part is meant, or allow a larger tolerance",
    )
