"""Rooms: which encoders' clips stay apart in one row, proved against torch's own convolutions; and which are refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packfp8.errors import ConfigError, LengthError
from packfp8.lengths import SILENT_FRAMES, AudioFrames, Conv, check_rooms, rooms

FASTCONFORMER = AudioFrames.fastconformer()
PACKABLE = {
    "FastConformer": FASTCONFORMER,
    "FastConformer of NeMo 1": AudioFrames.fastconformer(drop_last=False),
    "FastConformer before": AudioFrames(
        sample_rate=16_000, window_samples=512, hop_samples=160, padding_samples=511, convs=(Conv(3, 2, 1),) * 3
    ),
    "stacked by 4": FASTCONFORMER.stacked(4),
    "stacked by 4, rounded up": FASTCONFORMER.stacked(4, ceil=True),
    "causal": AudioFrames(
        sample_rate=16_000,
        window_samples=512,
        hop_samples=160,
        padding_samples=512,
        drop_last=True,
        convs=(Conv(3, 2, (2, 0)),) * 3,
    ),
    "Kaldi, padded": AudioFrames.kaldi(convs=(Conv(3, 2, 1),) * 3),
    "Kaldi, whole edges": AudioFrames.kaldi(snip_edges=False, convs=(Conv(3, 2, 1),) * 2),
    "linear": AudioFrames.linear(),
    "50 a second": AudioFrames.per_second(50),
}
UNPACKABLE = {
    "Whisper": AudioFrames.whisper(),
    "Whisper, valid frames": AudioFrames.whisper(valid=True),
    "Kaldi alone": AudioFrames.kaldi(),
    "Kaldi, convolutions without padding": AudioFrames.kaldi(convs=(Conv(3, 2), Conv(3, 2))),
    "blocks": AudioFrames(sample_rate=16_000, window_samples=160, hop_samples=160, convs=(Conv(3, 2, 1),), block_frames=100),
}


@pytest.mark.parametrize(
    ("name", "stride"), [("FastConformer", 1280), ("stacked by 4", 5120), ("linear", 1280), ("50 a second", 320)]
)
def test_the_stride_is_the_hop_times_all_convolutions(name, stride):
    assert PACKABLE[name].stride_samples == stride


@pytest.mark.parametrize("frames", PACKABLE.values(), ids=PACKABLE)
def test_a_clip_of_every_length_fits_its_room_with_the_window_that_reaches_beyond_it(frames):
    """Three strides of lengths, so each remainder thrice; one stride more is one frame more."""
    check_rooms(frames)
    stride, first = frames.stride_samples, frames.shortest_samples
    samples = np.arange(first, first + 3 * stride)
    counts = frames.encoder_frames(samples)
    assert (counts[stride:] == counts[:-stride] + 1).all()
    assert (samples + frames.padding_samples <= rooms(counts) * stride).all()
    assert (rooms(counts) == counts + SILENT_FRAMES).all()


def test_a_clip_of_fastconformer_leaves_at_least_1121_samples_of_silence():
    samples = np.arange(FASTCONFORMER.shortest_samples, 200_000)
    silence = rooms(FASTCONFORMER.encoder_frames(samples)) * 1280 - samples
    assert silence.min() == 1280 - 159  # 159 samples after the last hop
    assert silence.max() == 2 * 1280 - 160


def masked(wave, frames, spans):
    """Encoder frames of one row, by torch: every layer sees zeros outside the clips; `spans` are (first sample, samples)."""
    window, hop = frames.window_samples, frames.hop_samples
    half = frames.padding_samples // 2
    x = torch.nn.functional.pad(wave, (half, frames.padding_samples - half + window))
    x = x.unfold(0, window, hop)[: len(wave) // hop + 1].sum(1) + 1.0  # silence is not zero as a feature: 1
    counts, step = [frames.feature_frames(n) for _, n in spans], hop
    x = kept(x, spans, counts, step)
    for conv in frames.convs:
        left, right = conv.sides
        padded = torch.nn.functional.pad(x, (left, right + conv.kernel * conv.stride))
        x = padded.unfold(0, conv.span, conv.stride)[: -(-len(x) // conv.stride)].sum(1) + 1.0  # a bias: zeros come out as 1
        counts, step = [conv(count) for count in counts], step * conv.stride
        x = kept(x, spans, counts, step)
    return x


def kept(x, spans, counts, step):
    """`x` where a clip is, 0 elsewhere."""
    there = torch.zeros(len(x), dtype=torch.bool)
    for (begin, _), count in zip(spans, counts):
        there[begin // step : begin // step + count] = True
    return torch.where(there, x, torch.zeros_like(x))


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(set(PACKABLE) - {"50 a second", "linear"})), st.lists(st.integers(1, 9_000), min_size=2, max_size=4)
)
def test_in_one_row_each_clip_is_encoded_as_if_it_were_alone(name, lengths):
    frames = PACKABLE[name]
    lengths = [max(n, frames.shortest_samples) for n in lengths]
    stride, begins, at = frames.stride_samples, [], 0
    for n in lengths:
        begins.append(at)
        at += int(rooms(frames.encoder_frames(n))) * stride
    row = torch.zeros(at, dtype=torch.float64)
    waves = [torch.from_numpy(np.random.default_rng(n).integers(1, 1000, n).astype(np.float64)) for n in lengths]
    for begin, wave in zip(begins, waves):
        row[begin : begin + len(wave)] = wave
    together = masked(row, frames, list(zip(begins, lengths)))
    for begin, wave in zip(begins, waves):
        count = frames.encoder_frames(len(wave))
        alone = masked(torch.cat((wave, wave.new_zeros(4 * stride))), frames, [(0, len(wave))])[:count]
        assert alone.abs().min() > 0
        assert torch.equal(together[begin // stride : begin // stride + count], alone)


@pytest.mark.parametrize("frames", UNPACKABLE.values(), ids=UNPACKABLE)
def test_an_encoder_whose_clips_would_hear_each_other_is_refused(frames):
    with pytest.raises(ConfigError, match="clips of this encoder cannot stand in one row"):
        check_rooms(frames)


def test_a_fixed_window_is_refused_line_by_line(five_lines):
    with pytest.raises(ConfigError) as caught:
        check_rooms(AudioFrames.whisper())
    five_lines(
        caught.value,
        what="clips of this encoder cannot stand in one row",
        got="limit_samples=480000, block_frames=0",
        expected="neither",
        because="the window or the blocks of such an encoder begin with each clip (Whisper: 30 s)",
        fix="leave out static, or take an encoder whose convolutions are padded, as AudioFrames.fastconformer()",
    )


def test_convolutions_without_padding_are_refused_by_the_clip_that_is_too_long(five_lines):
    with pytest.raises(ConfigError) as caught:
        check_rooms(AudioFrames.kaldi(convs=(Conv(3, 2), Conv(3, 2))))
    five_lines(
        caught.value,
        what="clips of this encoder cannot stand in one row",
        got="1360 samples, padding included, of a clip of 1360",
        expected="at most 1280, its encoder frames and 1 of silence",
        because="what reaches into the next room would be heard as another clip",
        fix="leave out static",
    )


@pytest.mark.parametrize(("left", "apart"), [(2, True), (3, False)])
def test_a_convolution_that_reaches_one_feature_too_far_is_refused(left, apart, five_lines):
    """A frame is two features, which a clip may fill; so two of silence lie before the next clip, and no more."""
    frames = AudioFrames(sample_rate=16_000, window_samples=160, hop_samples=160, convs=(Conv(1 + left, 2, (left, 0)),))
    if apart:
        return check_rooms(frames)
    with pytest.raises(ConfigError) as caught:
        check_rooms(frames)
    five_lines(
        caught.value,
        what="clips of this encoder cannot stand in one row",
        got="800 samples that a convolution sees, of a clip of 320",
        expected="at most 640, its encoder frames and 1 of silence",
        because="heard as another clip",
        fix="leave out static",
    )


def test_a_window_that_reaches_beyond_the_silence_is_refused(five_lines):
    """Frames of 160 samples, seen through a window of 800 that is padded: it would hear the next clip."""
    with pytest.raises(ConfigError) as caught:
        check_rooms(AudioFrames(sample_rate=16_000, window_samples=800, hop_samples=160, padding_samples=800))
    five_lines(
        caught.value,
        what="clips of this encoder cannot stand in one row",
        got="801 samples, padding included, of a clip of 1",
        expected="at most 320, its encoder frames and 1 of silence",
        because="heard as another clip",
        fix="leave out static",
    )


def test_a_description_without_a_frame_is_told_as_such():
    with pytest.raises(LengthError, match="no clip gives a single encoder frame"):
        check_rooms(AudioFrames(sample_rate=16_000, window_samples=160, hop_samples=160, convs=(Conv(2**60, 1),)))
