"""probe against real modules: right formulas agree at every length, and each public wrong one is caught."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from packfp8.errors import LengthError
from packfp8.lengths import AudioFrames, Conv, probe
from packfp8.lengths.encoder_probe import probe_lengths


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Subsampler(torch.nn.Module):
    """Convolutions over features [clips, frames, bins]; says no lengths."""

    def __init__(self, *convs: tuple[int, int, int], bins: int = 2) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Conv1d(bins, bins, *conv) for conv in convs))

    def forward(self, features, lens):
        return self.layers(features.transpose(1, 2)).transpose(1, 2)


class FastConformerLike(torch.nn.Module):
    """Waveform -> centred STFT without its last row -> three convolutions, lengths carried along as NeMo does."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(torch.nn.Conv1d(2, 2, 3, 2, 1) for _ in range(3))
        self.register_buffer("window", torch.hann_window(400))
        self.register_buffer("bank", torch.rand(2, 257))

    def forward(self, audio, audio_lens):
        lens = audio_lens // 160
        spectrum = torch.stft(audio, 512, 160, 400, self.window, pad_mode="constant", return_complex=True).abs()
        x = (self.bank @ spectrum)[..., : int(lens.max())]
        for conv in self.convs:
            x, lens = conv(x), (lens - 1) // 2 + 1
        return x.transpose(1, 2), lens


THREE = ((3, 2, 1),) * 3


# -- right formulas ---------------------------------------------------------------------------------------------------


def test_a_fastconformer_front_end_agrees_at_2000_lengths_of_audio():
    report = probe(FastConformerLike().eval(), AudioFrames.fastconformer())
    assert (report.agree, report.total, report.differences) == (2_000, 2_000, ())
    assert report.check() is report


def test_several_clips_per_call_agree_where_lengths_are_carried_along():
    frames = AudioFrames.fastconformer()
    assert probe(FastConformerLike().eval(), frames, range(160, 40_000, 37), clips_per_call=16).check().total == 1_077


def test_a_whisper_like_pair_of_convolutions_agrees_at_2000_lengths_of_features():
    whisper = AudioFrames.whisper(valid=True)
    assert probe(Subsampler((3, 1, 1), (3, 2, 1)), whisper, feature_bins=2).check().total == 2_000


def test_a_convolution_stack_without_padding_agrees_and_too_short_a_clip_is_no_frame_on_both_sides():
    zipformer = AudioFrames.kaldi(convs=(Conv(3), Conv(3, 2), Conv(3)))
    report = probe(Subsampler((3, 1, 0), (3, 2, 0), (3, 1, 0)), zipformer, range(1, 2_001), feature_bins=2)
    assert report.check().total == 2_000
    assert zipformer.subsampled(8) == 0


def test_transformers_own_whisper_encoder_agrees():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(d_model=4, encoder_layers=1, encoder_attention_heads=1, encoder_ffn_dim=4, num_mel_bins=2)
    encoder = WhisperEncoder(config).eval()

    def run(features, lens):  # the encoder takes 3,000 frames and nothing else
        return encoder(features.transpose(1, 2)).last_hidden_state

    whisper = AudioFrames.whisper()
    assert probe(run, whisper, [whisper.feature_frames(1), whisper.feature_frames(480_000)], feature_bins=2).check()
    assert whisper.encoder_frames(1) == config.max_source_positions == 1_500


def test_transformers_own_parakeet_subsampling_agrees_at_2000_lengths():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.parakeet.modeling_parakeet import ParakeetEncoderConfig, ParakeetEncoderSubsamplingConv2D

    config = ParakeetEncoderConfig(num_mel_bins=8, subsampling_conv_channels=2, hidden_size=2)
    subsampling = ParakeetEncoderSubsamplingConv2D(config).eval()
    report = probe(lambda x, lens: subsampling(x), AudioFrames.fastconformer(), feature_bins=8)
    assert report.check().total == 2_000


@pytest.fixture(scope="module")
def qwen3_omni():
    """The block encoder of public case 38, tiny: features [1, frames, 8] -> one row per encoder frame."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe, modeling_qwen3_omni_moe

    config = configuration_qwen3_omni_moe.Qwen3OmniMoeAudioEncoderConfig(
        num_mel_bins=8,
        encoder_layers=1,
        encoder_attention_heads=1,
        encoder_ffn_dim=4,
        d_model=4,
        output_dim=4,
        downsample_hidden_size=2,
    )
    encoder = modeling_qwen3_omni_moe.Qwen3OmniMoeAudioEncoder(config).eval()
    return lambda x, lens: encoder(x[0].T, feature_lens=lens).last_hidden_state[None]


LENGTHS_IN_BLOCKS = [*range(1, 210), 299, 300, 301, 640, 999, 1_000, 1_001]


def test_a_block_encoder_agrees_with_the_block_formula_and_gives_5_of_40_and_83_of_640(qwen3_omni):
    blocks = AudioFrames(
        sample_rate=16_000,
        window_samples=400,
        hop_samples=160,
        padding_samples=400,
        drop_last=True,
        convs=(Conv(3, 2, 1),) * 3,
        block_frames=100,
    )
    assert probe(qwen3_omni, blocks, LENGTHS_IN_BLOCKS, feature_bins=8).check().total == len(LENGTHS_IN_BLOCKS)
    assert (blocks.subsampled(40), blocks.subsampled(640)) == (5, 83)


# -- wrong formulas ---------------------------------------------------------------------------------------------------


def test_the_two_convolution_formula_of_a_block_encoder_is_caught_at_40_frames_of_audio(qwen3_omni):
    stale = AudioFrames.kaldi(convs=(Conv(3, 2, 1), Conv(2, 2)))
    report = probe(qwen3_omni, stale, [40], feature_bins=8)
    assert str(report) == "0 of 1 lengths agree\n  40: formula 10, encoder 5"


def test_a_forgotten_second_halving_is_caught_as_17_for_9():
    formula = AudioFrames.kaldi(convs=(Conv(3), Conv(3, 2), Conv(3)))
    front, halving = Subsampler((3, 1, 0), (3, 2, 0), (3, 1, 0)), torch.nn.AvgPool1d(2, ceil_mode=True)

    def zipformer(features, lens):
        return halving(front(features, lens).transpose(1, 2)).transpose(1, 2)

    report = probe(zipformer, formula, [42], feature_bins=2)
    assert [(d.formula, d.encoder) for d in report.differences] == [(17, 9)]


@pytest.mark.parametrize(
    "wrong",
    [
        AudioFrames.fastconformer(drop_last=False),
        AudioFrames.linear(1_280),
        AudioFrames.kaldi(convs=(Conv(3, 2, 1),) * 3),
        AudioFrames.kaldi(snip_edges=False, convs=(Conv(3, 2, 1),) * 3),
        AudioFrames(
            sample_rate=16_000,
            window_samples=512,
            hop_samples=160,
            padding_samples=512,
            drop_last=True,
            convs=(Conv(3, 2, 1), Conv(3, 2, 1), Conv(3, 2, 1, ceil=True)),
        ),
    ],
    ids=["nemo 1", "linear", "snipped", "kept", "ceil"],
)
def test_a_formula_that_is_one_frame_off_somewhere_is_caught_by_the_default_lengths(wrong):
    report = probe(FastConformerLike().eval(), wrong, probe_lengths(wrong, 400))
    assert report.total - report.agree > 0
    with pytest.raises(LengthError, match="disagrees with the encoder"):
        report.check()


def test_check_names_the_first_lengths(five_lines):
    report = probe(Subsampler(*THREE), AudioFrames.kaldi(convs=(Conv(3, 2, 1),) * 2), range(1, 101), feature_bins=2)
    assert [d.samples for d in report.differences] == list(range(5, 13))
    assert len(report.differences) == 8
    assert str(report).endswith(f"and {report.total - report.agree - 8} more")
    with pytest.raises(LengthError) as error:
        report.check()
    five_lines(
        error.value,
        what=f"disagrees with the encoder at {report.total - report.agree} of 100 lengths",
        got="5: formula 2, encoder 1; 6: formula 2, encoder 1",
        expected="the same number",
        because="one frame off",
        fix="from the encoder that runs",
    )


def test_an_encoder_that_claims_more_frames_than_it_has_is_caught_though_the_formula_says_the_same():
    def boasting(features, lens):
        return Subsampler(*THREE)(features, lens), lens // 8 + 1

    formula = AudioFrames.kaldi(convs=(Conv(8, 8, 4),))  # 9 of 64, as claimed
    report = probe(boasting, formula, [64], feature_bins=2)
    assert str(report.differences[0]) == "64: formula 9, encoder 9 (claims 9 frames, has 8)"


def test_an_encoder_whose_count_depends_on_its_neighbours_is_caught_by_several_clips_per_call():
    def by_rows(features, lens):  # the length of the padded batch, for every clip
        out = Subsampler(*THREE)(features, lens)
        return out, [out.shape[1]] * len(lens)

    frames = AudioFrames.kaldi(convs=(Conv(3, 2, 1),) * 3)
    assert probe(by_rows, frames, range(8, 80), feature_bins=2).check()
    assert probe(by_rows, frames, range(8, 80), feature_bins=2, clips_per_call=12).agree < 72


def test_an_encoder_that_raises_gives_no_frame_and_its_words_are_kept():
    report = probe(Subsampler((3, 2, 0)), AudioFrames.kaldi(convs=(Conv(3, 2, 1),)), [1, 2, 3], feature_bins=2)
    assert [(d.samples, d.formula, d.encoder) for d in report.differences] == [(1, 1, 0), (2, 1, 0), (3, 2, 1)]
    assert report.differences[0].note.startswith("RuntimeError: Calculated padded input size")


def test_several_clips_per_call_need_lengths(five_lines):
    with pytest.raises(LengthError) as error:
        probe(Subsampler(*THREE), AudioFrames.fastconformer(), [10, 11], feature_bins=2, clips_per_call=2)
    five_lines(
        error.value,
        what="does not say how many frames",
        got="0 lengths for 2 clips",
        expected="one length for each clip",
        because="how long its longest clip is",
        fix="clips_per_call=1",
    )


# -- the lengths that are tried ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frames",
    [AudioFrames.fastconformer(), AudioFrames.whisper(), AudioFrames.whisper(valid=True), AudioFrames.linear()],
    ids=["fastconformer", "whisper", "valid", "linear"],
)
@pytest.mark.parametrize("on_features", [False, True])
def test_2000_lengths_stand_on_both_sides_of_the_steps(frames, on_features):
    lengths = probe_lengths(frames, on_features=on_features)
    longest = frames.feature_frames(frames.limit_samples) if on_features and frames.limit_samples else 1 << 12
    assert len(lengths) == min(2_000, longest)
    assert (np.diff(lengths) > 0).all()
    assert lengths[0] >= 1
    assert lengths[-1] <= (frames.limit_samples or 1 << 19)
    count = frames.subsampled if on_features else frames.encoder_frames
    changes = np.flatnonzero(np.diff(count(np.arange(1, lengths[-1] + 1)))) + 2
    tried = set(lengths.tolist())
    both = [n for n in changes.tolist() if {n, n - 1} <= tried]
    assert len(both) >= min(len(changes), 400)


def test_the_callers_random_state_is_left_alone():
    encoder = Subsampler(*THREE)  # building it draws
    before = torch.random.get_rng_state()
    probe(encoder, AudioFrames.fastconformer(), range(1, 20), feature_bins=2)
    assert torch.equal(before, torch.random.get_rng_state())
