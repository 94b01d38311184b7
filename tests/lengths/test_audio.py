"""AudioFrames: presets against the formulas of their sources, laws, and the shortest clip."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import resample_poly

from packfp8.errors import LengthError
from packfp8.lengths import AudioFrames, Conv

convs = st.builds(Conv, st.integers(1, 5), st.integers(1, 4), st.integers(0, 2), st.integers(1, 2), st.booleans())
descriptions = st.builds(
    AudioFrames,
    sample_rate=st.sampled_from([8_000, 16_000]),
    window_samples=st.integers(1, 60),
    hop_samples=st.integers(1, 30),
    padding_samples=st.integers(0, 80),
    drop_last=st.booleans(),
    convs=st.lists(convs, max_size=3).map(tuple),
    block_frames=st.sampled_from([0, 0, 5, 16, 40]),
)


# -- presets ----------------------------------------------------------------------------------------------------------


def test_fastconformer_is_the_hop_count_halved_three_times_rounding_up():
    frames = AudioFrames.fastconformer()
    for samples in range(1, 30_000, 7):
        features = samples // 160
        assert frames.feature_frames(samples) == features
        assert frames.encoder_frames(samples) == -(-features // 8)
    assert frames.encoder_frames(16_000 * 10) == 125
    assert frames.shortest_samples == 160


def test_nemo_1_counts_one_feature_frame_more():
    old, new = AudioFrames.fastconformer(drop_last=False), AudioFrames.fastconformer()
    assert [old.feature_frames(n) - new.feature_frames(n) for n in (160, 1_279, 1_280, 99_999)] == [1, 1, 1, 1]
    # 1,280 samples: 8 frames give one encoder frame, 9 give two
    assert (new.encoder_frames(1_280), old.encoder_frames(1_280)) == (1, 2)


def test_the_features_of_fastconformer_are_a_centred_stft_less_its_last_row():
    with_last = AudioFrames.fastconformer(drop_last=False)
    for samples in (1, 159, 160, 161, 511, 512, 4_000):
        stft = torch.stft(torch.zeros(samples), 512, 160, window=torch.ones(512), pad_mode="constant", return_complex=True)
        assert with_last.feature_frames(samples) == stft.shape[-1]


def test_whisper_gives_1500_frames_to_every_clip_it_takes():
    frames = AudioFrames.whisper()
    assert frames.feature_frames(np.array([1, 16_000, 480_000])).tolist() == [3_000] * 3
    assert frames.encoder_frames(np.array([1, 16_000, 480_000])).tolist() == [1_500] * 3
    assert frames.shortest_samples == 1


def test_whispers_valid_frames_are_those_that_its_attention_mask_keeps():
    frames = AudioFrames.whisper(valid=True)
    mask = np.zeros(480_000, dtype=np.int64)
    for samples in (1, 159, 160, 161, 320, 321, 12_345, 480_000):
        mask[:samples] = 1
        assert frames.feature_frames(samples) == mask[::160].sum()
        assert frames.encoder_frames(samples) == (mask[::160].sum() - 1) // 2 + 1
    assert frames.encoder_frames(480_000) == 1_500


def test_kaldi_snips_or_keeps_the_edges():
    snipped, kept = AudioFrames.kaldi(), AudioFrames.kaldi(snip_edges=False)
    assert [snipped.feature_frames(n) for n in (399, 400, 559, 560)] == [0, 1, 1, 2]
    assert [kept.feature_frames(n) for n in (79, 80, 239, 240)] == [0, 1, 1, 2]
    assert AudioFrames.kaldi(sample_rate=44_100).window_samples == 1_102  # 1,102.5, rounded down
    assert AudioFrames.kaldi(sample_rate=22_050, snip_edges=False).feature_frames(22_050) == (22_050 + 110) // 220


def test_linear_takes_whole_groups_of_samples_and_per_second_is_the_same_by_its_rate():
    assert [AudioFrames.linear(1_280).encoder_frames(n) for n in (1_279, 1_280, 2_559, 2_560)] == [0, 1, 1, 2]
    assert AudioFrames.per_second(12.5) == AudioFrames.per_second("12.5") == AudioFrames.linear(1_280)
    assert AudioFrames.per_second(25, sample_rate=8_000) == AudioFrames.linear(320, sample_rate=8_000)


def test_stacking_drops_the_rest_or_pads_it():
    frames = AudioFrames.linear(160)
    assert [frames.stacked(4).encoder_frames(160 * n) for n in (3, 4, 7, 8)] == [0, 1, 1, 2]
    assert [frames.stacked(4, ceil=True).encoder_frames(160 * n) for n in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]


def test_blocks_of_100_frames_through_three_convolutions_give_5_of_40_and_83_of_640():
    whole = AudioFrames.fastconformer()
    blocks = AudioFrames(sample_rate=16_000, window_samples=400, hop_samples=160, convs=whole.convs, block_frames=100)
    assert (blocks.subsampled(40), blocks.subsampled(640)) == (5, 83)
    assert blocks.subsampled(100) == 13
    assert whole.subsampled(640) == 80  # one run over all is another encoder


def test_42_frames_are_9_where_the_second_halving_is_counted_and_17_where_it_is_forgotten():
    front = (Conv(3), Conv(3, 2), Conv(3))  # (N - 7) // 2
    halved = AudioFrames.kaldi(convs=(*front, Conv(2, 2, ceil=True)))
    assert AudioFrames.kaldi(convs=front).subsampled(42) == (42 - 7) // 2 == 17
    assert halved.subsampled(42) == ((42 - 7) // 2 + 1) // 2 == 9
    for n in range(9, 400):
        assert halved.subsampled(n) == ((n - 7) // 2 + 1) // 2


# -- laws -------------------------------------------------------------------------------------------------------------


@given(frames=descriptions)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_an_array_counts_as_its_elements(frames):
    samples = np.arange(1, 400)
    array = frames.encoder_frames(samples)
    assert array.dtype == np.int64
    assert array.tolist() == [frames.encoder_frames(n) for n in samples.tolist()]
    assert type(frames.encoder_frames(7)) is int
    assert frames.encoder_frames(samples.reshape(3, 133).astype(np.int32)).tolist() == array.reshape(3, 133).tolist()


@given(frames=descriptions)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_shortest_clip_is_the_first_of_all_lengths_that_has_a_frame(frames):
    heard = np.flatnonzero(frames.encoder_frames(np.arange(1, 20_000)))
    if len(heard):
        assert frames.shortest_samples == heard[0] + 1
        assert not heard[0] or frames.encoder_frames(int(heard[0])) == 0
    else:
        with pytest.raises(LengthError, match="no clip gives a single encoder frame"):
            _ = frames.shortest_samples


@given(frames=descriptions)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_without_blocks_no_count_falls_with_length(frames):
    if not frames.block_frames:
        assert (np.diff(frames.encoder_frames(np.arange(1, 3_000))) >= 0).all()


@given(samples=st.integers(1, 5_000), rates=st.tuples(*[st.sampled_from([8_000, 16_000, 22_050, 44_100, 48_000])] * 2))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_resampled_is_the_length_that_scipy_returns(samples, rates):
    source, target = rates
    frames = AudioFrames.linear(sample_rate=target)
    assert frames.resampled(samples, source) == len(resample_poly(np.zeros(samples), target, source))
    assert frames.resampled(np.array([samples]), source).tolist() == [frames.resampled(samples, source)]


def test_a_clip_of_a_billion_seconds_is_counted_without_overflow():
    samples = 48_000 * 10**9
    frames = AudioFrames.fastconformer()
    assert frames.resampled(np.array([samples]), 48_000).tolist() == [samples // 3]
    assert frames.encoder_frames(np.array([samples // 3])).tolist() == [frames.encoder_frames(samples // 3)]


def test_the_fingerprint_follows_the_description_and_nothing_else():
    a, b = AudioFrames.fastconformer(), AudioFrames.fastconformer()
    assert a.fingerprint == b.fingerprint == pickle.loads(pickle.dumps(a)).fingerprint
    assert len(a.fingerprint) == 16
    assert AudioFrames.linear(np.int64(1_280)).fingerprint == AudioFrames.linear(1_280).fingerprint
    others = [AudioFrames.fastconformer(drop_last=False), AudioFrames.whisper(), AudioFrames.linear(), AudioFrames.kaldi()]
    assert len({f.fingerprint for f in [a, *others]}) == 5


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, -45_760, 1.5, float("nan"), None, True, "16000"])
def test_an_impossible_length_is_refused(bad, five_lines):
    for call in (AudioFrames.fastconformer().encoder_frames, lambda n: AudioFrames.linear().resampled(n, 16_000)):
        with pytest.raises(LengthError) as error:
            call(bad)
        five_lines(
            error.value,
            what="a clip has an impossible length",
            got=f"{bad!r} samples",
            expected="a whole number of samples, at least 1",
            because="no encoder frame",
            fix="repair the manifest",
        )


def test_the_first_impossible_length_of_an_array_is_named():
    with pytest.raises(LengthError, match="clip 2 has an impossible length") as error:
        AudioFrames.linear().encoder_frames(np.array([5, 7, 0, -1]))
    assert error.value.got == "0 samples"
    with pytest.raises(LengthError):
        AudioFrames.linear().encoder_frames(np.array([5.0, 7.0]))


def test_a_clip_over_the_limit_is_refused_and_one_at_the_limit_is_not(five_lines):
    for frames in (AudioFrames.whisper(), AudioFrames.whisper(valid=True)):
        assert frames.encoder_frames(480_000) == 1_500
        with pytest.raises(LengthError) as error:
            frames.encoder_frames(np.array([16_000, 480_001]))
        five_lines(
            error.value,
            what="clip 1 is longer than the encoder takes",
            got="480001 samples",
            expected="at most 480000 samples at 16000 Hz",
            because="audio is never cut",
            fix="shorter clips",
        )


def test_a_description_without_any_frame_is_refused_when_its_shortest_clip_is_asked_for(five_lines):
    for never in (
        AudioFrames(sample_rate=8_000, window_samples=80, hop_samples=80, convs=(Conv(9),), block_frames=8),
        AudioFrames(sample_rate=8_000, window_samples=80, hop_samples=80, limit_samples=79),
    ):
        with pytest.raises(LengthError) as error:
            _ = never.shortest_samples
        five_lines(
            error.value,
            what="no clip gives a single encoder frame",
            got="AudioFrames(sample_rate=8000",
            expected="some clip has a frame",
            because="shorter than the convolutions need",
            fix="packfp8.lengths.probe",
        )


@pytest.mark.parametrize("name", ["sample_rate", "window_samples", "hop_samples", "padding_samples", "limit_samples"])
def test_a_size_that_cannot_be_is_refused(name, five_lines):
    sizes = {"sample_rate": 16_000, "window_samples": 400, "hop_samples": 160}
    with pytest.raises(LengthError) as error:
        AudioFrames(**{**sizes, name: -1})
    five_lines(
        error.value,
        what=f"{name} of AudioFrames cannot be",
        got="-1",
        expected="a whole number of at least",
        because="integers only",
        fix="the real layer",
    )


def test_padding_to_a_limit_that_is_not_given_is_refused(five_lines):
    with pytest.raises(LengthError) as error:
        AudioFrames(sample_rate=16_000, window_samples=400, hop_samples=160, pads_to_limit=True)
    five_lines(
        error.value,
        what="pad every clip to a limit",
        got="limit_samples=0",
        expected="at least 1",
        because="known only by its length",
        fix="480_000",
    )


@pytest.mark.parametrize("rate", [12, 0, -25, 32_000])
def test_a_rate_whose_frame_is_not_whole_samples_is_refused(rate, five_lines):
    with pytest.raises(LengthError) as error:
        AudioFrames.per_second(rate)
    five_lines(
        error.value,
        what="not a whole number of samples",
        got=f"{rate} frames a second at 16000 Hz",
        expected="divides the sample rate",
        because="drifts over a long clip",
        fix="12.5",
    )


def test_a_sample_rate_that_cannot_be_is_refused():
    with pytest.raises(LengthError, match="the sample rate of a clip cannot be"):
        AudioFrames.linear().resampled(16_000, 0)
