"""PlainEncoder: log-mel features and an 8x convolutional subsampling in plain torch, counted by `AudioFrames.fastconformer()`.

    samples --STFT, hop 160, mel--> [clips, samples // 160, bins] --3 convolutions, kernel 3, stride 2--> [clips, frames, width]

A clip's frames do not depend on the clips beside it: what lies past its end is zero before every convolution. Without that,
a pack would teach something else than its sequences one by one. Clips stand in a row each, or all in one row of constant
length (`packfp8.lengths.rooms`), where the same zeros keep them apart.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packfp8.lengths import AudioFrames

_WINDOW = 400  # samples, 25 ms at 16 kHz: the usual analysis window of speech (Kaldi, NeMo)
_FLOOR = 1e-5  # added to mel energies before the logarithm; keeps silence finite
_CENTRE, _SPREAD = -4.0, 4.0  # brings log-mel energies of speech at full scale to about zero mean and unit spread


def mel_filters(bins: int, fft_samples: int, sample_rate: int, *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """`[bins, fft_samples // 2 + 1]`, triangles evenly spaced in mel = 2595 log10(1 + Hz / 700) (O'Shaughnessy 1987)."""
    nyquist = sample_rate / 2
    top_mel = 2595 * math.log10(1 + nyquist / 700)
    edges = 700 * (10 ** (torch.linspace(0, top_mel, bins + 2, dtype=dtype, device=device) / 2595) - 1)
    hertz = torch.linspace(0, nyquist, fft_samples // 2 + 1, dtype=dtype, device=device)
    left, centre, right = (edges[i : i + bins, None] for i in range(3))
    return torch.minimum((hertz - left) / (centre - left), (right - hertz) / (right - centre)).clamp(min=0)


class PlainEncoder(nn.Module):
    """An encoder of waveforms: 12.5 frames a second of `width` features.

    Attributes:
        packed: that it hears clips in one row too, where it is told their offsets.
        stride_samples: from one of its frames to the next.
    """

    packed = True

    def __init__(self, *, width: int = 128, mel_bins: int = 80) -> None:
        super().__init__()
        self.frames = AudioFrames.fastconformer()
        self.stride_samples = self.frames.stride_samples
        self.mel_bins = mel_bins
        inputs = (mel_bins, width, width)
        layers = zip(inputs, self.frames.convs, strict=True)
        self.convs = nn.ModuleList(nn.Conv1d(n, width, c.kernel, c.stride, c.padding) for n, c in layers)
        self.norm = nn.LayerNorm(width)

    def features(self, audio: Tensor) -> Tensor:
        """Log-mel energies `[clips, samples // hop, bins]` of `audio` `[clips, samples]`, in at least float32."""
        fft, hop = self.frames.window_samples, self.frames.hop_samples
        # Window and filters are made where they are used: as buffers they would be rounded by a model's move to BF16.
        like = {"dtype": torch.promote_types(self.norm.weight.dtype, torch.float32), "device": audio.device}
        stft = torch.stft(
            audio.to(like["dtype"]),
            fft,
            hop,
            win_length=_WINDOW,
            window=torch.hann_window(_WINDOW, periodic=False, **like),
            center=True,
            pad_mode="constant",  # zeros, not reflections: a clip alone and the same clip in a padded batch look alike
            return_complex=True,
        )
        power = stft.real.square() + stft.imag.square()
        mel = mel_filters(self.mel_bins, fft, self.frames.sample_rate, **like)
        return ((power[..., :-1].transpose(1, 2) @ mel.T + _FLOOR).log() - _CENTRE) / _SPREAD

    def forward(self, audio: Tensor, audio_lens: Tensor, audio_offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Frames `[clips, encoder_frames, width]` of `audio` `[clips, samples]`, and how many of them each clip has.

        Of a packed row `[1, samples]` they are `[1, samples // stride_samples, width]`: as many as the row has room for,
        whatever is in it, and each clip's are those that it has alone. Nothing is asked of the device.

        Args:
            audio_lens: int64 `[clips]`, samples of each clip; what follows in its row or its room is not heard.
            audio_offsets: int64 `[clips + 1]`, where the rooms begin in a packed row: multiples of `stride_samples`;
                clips that are not there have length 0 and repeat the last.
        """
        packed = audio_offsets is not None
        within = _WithinRooms(audio, audio_offsets, self.stride_samples) if packed else _within_rows
        x, lens = self.features(within(audio, audio_lens)), audio_lens // self.frames.hop_samples
        x = within(x.to(self.norm.weight.dtype), lens)
        for conv, count in zip(self.convs, self.frames.convs, strict=True):
            lens = count(lens)
            x = within(F.gelu(conv(x.transpose(1, 2)).transpose(1, 2)), lens)
        return self.norm(x), lens


class PlainProjector(nn.Sequential):
    """A projector from the encoder's width to the decoder's hidden size, frame by frame."""

    def __init__(self, *, width: int = 128, hidden: int = 128) -> None:
        super().__init__(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden))


def _within_rows(x: Tensor, lens: Tensor) -> Tensor:
    """`x` `[clips, time, ...]` with zeros from each clip's end on."""
    return _kept(x, torch.arange(x.shape[1], device=x.device) < lens[:, None])


class _WithinRooms:
    """(x `[1, time, ...]`, lens `[clips]`) -> `x` with zeros from each clip's end to the end of its room, at any rate."""

    def __init__(self, audio: Tensor, audio_offsets: Tensor, stride_samples: int) -> None:
        begins = audio_offsets // stride_samples
        frames = torch.arange(audio.shape[1] // stride_samples, device=audio.device)
        # After the last room comes silence that is nobody's: it counts to the last clip, and lies beyond its end.
        self.clip = torch.searchsorted(begins[1:], frames, right=True).clamp(max=begins.shape[0] - 2)
        self.place = frames - begins[self.clip]

    def __call__(self, x: Tensor, lens: Tensor) -> Tensor:
        steps = x.shape[1] // self.place.shape[0]
        time = (self.place * steps)[:, None] + torch.arange(steps, device=x.device)
        return _kept(x, (time < lens[self.clip][:, None]).reshape(1, -1))


def _kept(x: Tensor, inside: Tensor) -> Tensor:
    """`x` `[clips, time, ...]` where `inside` `[clips, time]`, zeros elsewhere."""
    return torch.where(inside if x.dim() == 2 else inside[..., None], x, 0)
