"""AudioFrames: samples -> feature frames -> encoder frames, in integers.

A clip's length in the language model is known from its manifest, before any audio is read:

    samples  --window, hop, padding-->  feature frames (about 10 ms)  --convolutions-->  encoder frames (about 80 ms)

Every count is exact or it is an error: one frame off moves every later token of the pack.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from math import gcd, prod

import numpy as np

from packfp8.errors import LengthError
from packfp8.lengths.conv import Conv
from packfp8.lengths.fingerprint import fingerprint
from packfp8.lengths.whole import checked_size, first, whole_samples

_LONGEST = 1 << 48  # samples; 558 years at 16 kHz: a description that yields no frame by then never does
_LEAST = {
    **dict.fromkeys(("sample_rate", "window_samples", "hop_samples"), 1),
    **dict.fromkeys(("padding_samples", "block_frames", "limit_samples"), 0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioFrames:
    """A feature extractor and its subsampling, as far as they decide a length.

    Feature frames are `(samples + padding - window) // hop + 1`, less one where the last is dropped. That one line holds the
    centred STFT of `torch.stft` (padding = window = n_fft), Kaldi's snipped edges (no padding) and its kept ones.

    Args:
        sample_rate: Hz that the encoder expects.
        window_samples: samples that one frame looks at: n_fft of a centred STFT, else the analysis window.
        hop_samples: samples from one frame to the next.
        padding_samples: samples of padding, both sides together.
        drop_last: the last feature frame is left out.
        convs: the subsampling, first layer first.
        block_frames: the convolutions run on blocks of so many feature frames, and on the rest alone; 0 is one run over all.
        limit_samples: longest clip that the encoder takes; 0 is no limit. Nothing is ever cut.
        pads_to_limit: every clip is padded to the limit before its features are taken, so that each has the same length.

    Raises:
        LengthError: a size is out of range, or every clip shall be padded to a limit that is not given.
    """

    sample_rate: int
    window_samples: int
    hop_samples: int
    padding_samples: int = 0
    drop_last: bool = False
    convs: tuple[Conv, ...] = ()
    block_frames: int = 0
    limit_samples: int = 0
    pads_to_limit: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            object.__setattr__(self, name, checked_size(f"{name} of AudioFrames", getattr(self, name), least=least))
        if self.pads_to_limit and not self.limit_samples:
            raise LengthError(
                "AudioFrames shall pad every clip to a limit that it does not have",
                got="pads_to_limit=True, limit_samples=0",
                expected="limit_samples of at least 1",
                because="a fixed window is known only by its length",
                fix="limit_samples=480_000 for Whisper's 30 s at 16 kHz",
            )
        for name, kind in (("convs", tuple), ("drop_last", bool), ("pads_to_limit", bool)):
            object.__setattr__(self, name, kind(getattr(self, name)))

    # -- presets ------------------------------------------------------------------------------------------------------

    @classmethod
    def fastconformer(cls, *, drop_last: bool = True) -> AudioFrames:
        """FastConformer and Parakeet: 16 kHz, 10 ms hop, three convolutions of kernel 3, stride 2, padding 1 (8x).

        Convolutions: Rekesh et al. 2023 (arXiv 2305.05084), NeMo `ConvSubsampling` with `dw_striding`, transformers
        `ParakeetEncoderSubsamplingConv2D`. Features: centred STFT of n_fft 512, hop 160, NeMo `FilterbankFeatures`.

        Args:
            drop_last: the length that NeMo 2 and transformers' Parakeet count, `samples // 160`; their STFT has one row
                more, which is masked. False is NeMo 1: `samples // 160 + 1`. (Before that, `ceil(samples / 160)`: the
                same features with `padding_samples=511` and `drop_last=False`.)
        """
        stack = (Conv(3, 2, 1),) * 3
        return cls(
            sample_rate=16_000, window_samples=512, hop_samples=160, padding_samples=512, drop_last=drop_last, convs=stack
        )

    @classmethod
    def whisper(cls, *, valid: bool = False) -> AudioFrames:
        """Whisper: 16 kHz, clips of at most 30 s, 10 ms hop, convolutions (kernel 3, stride 1) and (kernel 3, stride 2).

        Radford et al. 2022 (arXiv 2212.04356); transformers `WhisperFeatureExtractor` (chunk_length 30, n_fft 400, hop 160,
        the last STFT frame dropped) and `WhisperEncoder` (padding 1, `max_source_positions` 1,500).

        Args:
            valid: False counts what the encoder gives: each clip padded to 3,000 feature and 1,500 encoder frames. True
                counts the frames that the extractor's attention mask keeps of them, `ceil(samples / 160)`, subsampled.
        """
        features = {"padding_samples": 399} if valid else {"padding_samples": 400, "drop_last": True}
        return cls(
            sample_rate=16_000,
            window_samples=400,
            hop_samples=160,
            **features,
            convs=(Conv(3, 1, 1), Conv(3, 2, 1)),
            limit_samples=480_000,
            pads_to_limit=not valid,
        )

    @classmethod
    def kaldi(
        cls,
        *,
        sample_rate: int = 16_000,
        window_ms: int = 25,
        hop_ms: int = 10,
        snip_edges: bool = True,
        convs: tuple[Conv, ...] = (),
    ) -> AudioFrames:
        """Kaldi's front end, and any convolutions after it.

        Kaldi `feat/feature-window.cc`, `NumFrames`: with snipped edges a frame counts where its window fits wholly; without,
        samples / hop rounded half up. Window and hop in samples are rounded down (`feature-window.h`, `WindowSize`).

        Args:
            sample_rate: in Hz.
            window_ms, hop_ms: milliseconds.
            snip_edges: Kaldi's default is True; lhotse's and icefall's is False.
            convs: the subsampling.
        """
        window, hop = sample_rate * window_ms // 1000, sample_rate * hop_ms // 1000
        padding = 0 if snip_edges else window - hop + hop // 2
        return cls(sample_rate=sample_rate, window_samples=window, hop_samples=hop, padding_samples=padding, convs=tuple(convs))

    @classmethod
    def linear(cls, samples_per_frame: int = 1280, *, sample_rate: int = 16_000) -> AudioFrames:
        """One encoder frame for every `samples_per_frame` whole samples: a linear layer over stacked samples.

        The default is 12.5 frames a second at 16 kHz, the rate of FastConformer 8x.
        """
        return cls(sample_rate=sample_rate, window_samples=samples_per_frame, hop_samples=samples_per_frame)

    @classmethod
    def per_second(cls, frames_per_second: int | float | str | Fraction, *, sample_rate: int = 16_000) -> AudioFrames:
        """`linear` by its rate: "12.5" at 16 kHz is one frame for 1,280 samples.

        Raises:
            LengthError: a frame would not be a whole number of samples.
        """
        checked_size("sample_rate of AudioFrames", sample_rate, least=1)
        rate = Fraction(str(frames_per_second))
        samples = sample_rate / rate if rate > 0 else Fraction(0)
        if samples.denominator != 1 or samples < 1:
            raise LengthError(
                "a frame of this rate is not a whole number of samples",
                got=f"{frames_per_second} frames a second at {sample_rate} Hz",
                expected="a rate that divides the sample rate",
                because="lengths are counted in integers; a rounded frame drifts over a long clip",
                fix="choose a rate such as 12.5, 25 or 50, or AudioFrames.linear(samples_per_frame)",
            )
        return cls.linear(int(samples), sample_rate=sample_rate)

    def stacked(self, frames: int, *, ceil: bool = False) -> AudioFrames:
        """The same encoder with `frames` of its frames stacked into one: a linear subsampler, a projector's stacking.

        Args:
            frames: how many become one.
            ceil: a rest of fewer frames is padded to one more; else it is dropped.
        """
        return replace(self, convs=(*self.convs, Conv(frames, frames, ceil=ceil)))

    # -- counts -------------------------------------------------------------------------------------------------------

    def feature_frames(self, samples):
        """Feature frames of clips of `samples` at `sample_rate`: an int for an int, int64 for an array of any shape.

        Raises:
            LengthError: a length is not a whole number of at least 1, or is over the limit.
        """
        samples = self._checked(samples)
        if self.pads_to_limit:
            samples = samples * 0 + self.limit_samples
        frames = (samples + (self.padding_samples - self.window_samples)) // self.hop_samples + 1 - self.drop_last
        return frames * (frames > 0)

    def encoder_frames(self, samples):
        """Encoder frames of clips of `samples` at `sample_rate`: an int for an int, int64 for an array of any shape.

        0 where a clip is too short for one; `shortest_samples` says where that ends.

        Raises:
            LengthError: a length is not a whole number of at least 1, or is over the limit.
        """
        return self.subsampled(self.feature_frames(samples))

    def subsampled(self, frames):
        """Encoder frames of `frames` feature frames (int, or an int64 array of any shape); 0 of none."""
        if not self.block_frames:
            return self._convolved(frames)
        whole, rest = frames // self.block_frames, frames % self.block_frames
        return whole * self._convolved(self.block_frames) + self._convolved(rest)

    def resampled(self, samples, sample_rate: int):
        """Samples that a clip has at this encoder's rate, where it has `samples` at `sample_rate` Hz.

        The exact ratio, rounded up: what `scipy.signal.resample_poly` returns (its documentation: the signal's length times
        up / down, rounded up).

        Raises:
            LengthError: a length or the rate is not a whole number of at least 1.
        """
        checked_size("the sample rate of a clip", sample_rate, least=1)
        samples = whole_samples(samples)
        common = gcd(self.sample_rate, int(sample_rate))
        up, down = self.sample_rate // common, int(sample_rate) // common
        return -(-samples * up // down)

    @property
    def shortest_samples(self) -> int:
        """Least samples that give at least one encoder frame, found exactly.

        Raises:
            LengthError: no clip gives a frame (a block or the limit is shorter than the convolutions need).
        """
        # No layer's output falls as its input grows, and a block that gives nothing gives nothing however often it comes,
        # so the lengths without a frame are the first ones and bisection finds their end.
        low, high = 0, min(1, self.limit_samples or 1)
        while not self.encoder_frames(high):
            low, high = high, min(2 * high, self.limit_samples or _LONGEST)
            if low == high:
                raise LengthError(
                    "no clip gives a single encoder frame",
                    got=self,
                    expected="a description under which some clip has a frame",
                    because="the block or the limit is shorter than the convolutions need",
                    fix="compare window, hop, block and convolutions with the real encoder: packfp8.lengths.probe",
                )
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.encoder_frames(middle) else (middle, high)
        return high

    @property
    def stride_samples(self) -> int:
        """Samples from one encoder frame to the next: the hop times the strides of all convolutions."""
        return self.hop_samples * prod(conv.stride for conv in self.convs)

    @property
    def fingerprint(self) -> str:
        """Short text, equal for equal descriptions on every machine."""
        return fingerprint("frames", astuple(self))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _convolved(self, frames):
        for conv in self.convs:
            frames = conv(frames)
        return frames

    def _checked(self, samples):
        samples = whole_samples(samples)
        if self.limit_samples and np.any(over := np.asarray(samples) > self.limit_samples):
            where, longest = first(samples, over)
            raise LengthError(
                f"{where} is longer than the encoder takes",
                got=f"{longest} samples",
                expected=f"at most {self.limit_samples} samples at {self.sample_rate} Hz",
                because="its window is fixed (Whisper: 30 s), and audio is never cut",
                fix="cut the recording into shorter clips, or set the example aside",
            )
        return samples
