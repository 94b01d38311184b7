"""probe: does a real encoder give as many frames as the formula says?

A length formula that lags behind its encoder is among the commonest public faults, so it is compared with the module itself:
at start-up, on a CPU, over thousands of lengths, in seconds (take a small hidden size: counts do not depend on it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from packfp8.errors import LengthError
from packfp8.lengths.audio import AudioFrames

_SWEEP_SAMPLES = 1 << 19  # up to which lengths are chosen: 33 s at 16 kHz
_SWEEP_FRAMES = 1 << 12  # the same for features: 41 s at 10 ms
_SHOWN = 8  # differences that a report keeps


@dataclass(frozen=True, slots=True)
class Difference:
    """One length at which formula and encoder disagree.

    Attributes:
        samples: the clip's length (feature frames, where the encoder was probed on features).
        formula: encoder frames by `AudioFrames`.
        encoder: encoder frames that came out.
        note: what else there is to say, as the text of the encoder's own error; empty otherwise.
    """

    samples: int
    formula: int
    encoder: int
    note: str

    def __str__(self) -> str:
        return f"{self.samples}: formula {self.formula}, encoder {self.encoder}" + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What `probe` found.

    Attributes:
        agree: lengths at which both counts are equal.
        total: lengths tried.
        differences: the first lengths at which they are not, shortest first.
    """

    agree: int
    total: int
    differences: tuple[Difference, ...]

    def check(self) -> ProbeReport:
        """The report itself, where all lengths agree.

        Raises:
            LengthError: some do not; the first are named.
        """
        if self.agree == self.total and self.total:
            return self
        raise LengthError(
            f"the frame formula disagrees with the encoder at {self.total - self.agree} of {self.total} lengths",
            got="; ".join(map(str, self.differences)) or "no length was tried",
            expected="the same number of encoder frames at every length",
            because="each clip's room in the pack is cut from the formula; one frame off shifts every later token",
            fix="take window, hop, padding and convolutions of AudioFrames from the encoder that runs",
        )

    def __str__(self) -> str:
        lines = [f"{self.agree} of {self.total} lengths agree", *(f"  {difference}" for difference in self.differences)]
        more = self.total - self.agree - len(self.differences)
        return "\n".join([*lines, f"  and {more} more"] if more else lines)


def probe(
    encoder: Callable,
    frames: AudioFrames,
    lengths: Iterable[int] = (),
    *,
    feature_bins: int = 0,
    clips_per_call: int = 1,
    device: str = "cpu",
) -> ProbeReport:
    """A report of where a real encoder's frame count differs from the formula's.

    The encoder is any callable, a `torch.nn.Module` in eval mode as a rule:

        encoder(audio, audio_lens) -> output, or (output, output_lens)

        audio        float32 [clips, samples], zero on the right; with `feature_bins`, features [clips, frames, bins]
        audio_lens   int64 [clips]
        output       [clips, encoder_frames, ...]
        output_lens  integers [clips], or None: then every row of `output` counts

    Where it reports `output_lens`, those count, and they must not exceed the rows that came out. An encoder that raises
    RuntimeError gives no frame; so torch refuses a clip shorter than its kernel.

    Args:
        encoder: the callable.
        frames: the formula.
        lengths: lengths to try, in samples (feature frames with `feature_bins`); none given takes `probe_lengths(frames)`.
        feature_bins: bins of a feature frame, where the encoder takes features; 0 where it takes waveforms.
        clips_per_call: more than one clip in a call also shows encoders whose count depends on their neighbours' padding; it
            needs `output_lens`.
        device: where the encoder is.

    Raises:
        LengthError: several clips per call from an encoder that reports no lengths, or as many lengths as clips do not come.
    """
    import torch

    taken = sorted({int(n) for n in lengths}) or probe_lengths(frames, on_features=bool(feature_bins)).tolist()
    longest = max(taken, default=0)
    count = frames.subsampled if feature_bins else frames.encoder_frames
    expected = count(np.array(taken, dtype=np.int64)).tolist()
    # The same noise for every clip: counts do not depend on what is heard, and the caller's generator stays untouched.
    shape = (longest, feature_bins) if feature_bins else (longest,)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)

    differences, differing = [], 0
    with torch.no_grad():
        for at in range(0, len(taken), clips_per_call):
            clips = taken[at : at + clips_per_call]
            formulas = expected[at : at + clips_per_call]
            for n, formula, (came, note) in zip(clips, formulas, _counts(encoder, noise, clips), strict=True):
                if note.startswith("claims") or came != formula:
                    differing += 1
                    if differing <= _SHOWN:
                        differences.append(Difference(n, formula, came, note))
    return ProbeReport(agree=len(taken) - differing, total=len(taken), differences=tuple(differences))


def probe_lengths(frames: AudioFrames, count: int = 2_000, *, on_features: bool = False) -> np.ndarray:
    """`count` lengths at which a wrong formula shows: int64, ascending, in samples (or feature frames), to about half a minute.

    Half are consecutive, from one below the shortest clip that has a frame. Half stand on both sides of the lengths at which
    the formula steps up: an encoder whose count never falls with length, and which agrees there, agrees everywhere between.
    """
    formula = frames.subsampled if on_features else frames.encoder_frames
    span = _SWEEP_FRAMES if on_features else _SWEEP_SAMPLES
    if frames.limit_samples:
        span = min(span, int(frames.feature_frames(frames.limit_samples)) if on_features else frames.limit_samples)
    everything = np.arange(1, span + 1, dtype=np.int64)
    counts = formula(everything)
    start = max(int(np.argmax(counts > 0)) - 1, 0)
    dense = everything[start : start + count // 2]
    steps = everything[1:][np.diff(counts) != 0]
    edges = np.setdiff1d(np.concatenate([steps - 1, steps]), dense)[: count - len(dense)]
    chosen = np.concatenate([dense, edges])
    # A formula with few steps (a fixed window has none) is tried at even distances instead.
    others = np.setdiff1d(everything, chosen)
    spread = np.linspace(0, len(others) - 1, min(count - len(chosen), len(others)), dtype=np.int64)
    return np.sort(np.concatenate([chosen, others[spread]]))


def _counts(encoder: Callable, noise, clips: list[int]) -> Iterator[tuple[int, str]]:
    """Frames that the encoder gives each clip of one call, with a note."""
    import torch

    batch = noise.new_zeros((len(clips), max(clips), *noise.shape[1:]))
    for row, n in enumerate(clips):
        batch[row, :n] = noise[:n]
    try:
        out = encoder(batch, torch.tensor(clips, dtype=torch.int64, device=noise.device))
    except RuntimeError as error:
        yield from ((0, f"RuntimeError: {str(error).splitlines()[0]}") for _ in clips)
        return
    output, lens = out if isinstance(out, tuple) else (out, None)
    rows = output.shape[1]
    if lens is None:
        lens = [rows] if len(clips) == 1 else []
    lens = [int(n) for n in lens]
    if len(lens) != len(clips):
        raise LengthError(
            "the probed encoder does not say how many frames each clip has",
            got=f"{len(lens)} lengths for {len(clips)} clips",
            expected="output_lens with one length for each clip",
            because="the rows of a padded batch say only how long its longest clip is",
            fix="return (output, output_lens), or probe with clips_per_call=1",
        )
    yield from ((n, f"claims {n} frames, has {rows}" if n > rows else "") for n in lens)
