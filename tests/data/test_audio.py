"""Audio is read in one place: right samples, right channel, right length, or one clear error."""

from __future__ import annotations

import dataclasses
import io
import os
from pathlib import Path

import lhotse
import numpy as np
import pytest
import soundfile
from lhotse.audio import AudioSource

from packfp8.data.audio import load_clip, probe_file, samples_at
from packfp8.data.example import Clip
from packfp8.errors import AudioError

KINDS = {
    "wav": ("WAV", "PCM_16"),
    "flac": ("FLAC", "PCM_16"),
    "opus": ("OGG", "OPUS"),
    "ogg": ("OGG", "VORBIS"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
}
REAL = Path(os.environ.get("PACKFP8_TEST_DATA", "absent")) / "audio"
REAL_FILES = sorted(REAL.iterdir()) if REAL.is_dir() else []
needs_real_audio = pytest.mark.skipif(not REAL_FILES, reason="PACKFP8_TEST_DATA is not set: no real audio here")


def tone(samples: int, rate: int = 16_000, hertz: float = 440.0) -> np.ndarray:
    return 0.3 * np.sin(2 * np.pi * hertz * np.arange(samples) / rate)


def write(path: Path, wave: np.ndarray, rate: int = 16_000, kind: str = "wav") -> Path:
    container, subtype = KINDS[kind]
    soundfile.write(path, wave, rate, format=container, subtype=subtype)
    return path


def clip_of(source, num_samples, rate=16_000, start=None, channel=None) -> Clip:
    return Clip(source=source, num_samples=num_samples, sample_rate=rate, start_sample=start, channel=channel)


def load(clip: Clip, rate: int = 16_000, resample: bool = False, tolerance: int = 0):
    return load_clip(clip, rate, resample=resample, tolerance_samples=tolerance)


def lines_of(clip: Clip, **options) -> dict[str, str]:
    """The five lines of the error that loading the clip raises."""
    with pytest.raises(AudioError) as caught:
        load(clip, **options)
    what, *rest = str(caught.value).split("\n")
    lines = {"what": what} | {key.strip(): text.strip() for key, text in (line.split(":", 1) for line in rest)}
    assert list(lines) == ["what", "got", "expected", "because", "fix"]
    assert all(lines.values())
    return lines


# ---- what is read


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_is_what_soundfile_decodes(tmp_path, kind):
    path = write(tmp_path / f"a b ü 音.{kind}", tone(20_003), kind=kind)
    expected, _ = soundfile.read(path, dtype="float32")
    loaded = load(clip_of(path, 20_003))
    assert (loaded.samples.dtype, loaded.trimmed_samples) == (np.float32, 0)
    for source in (path, str(path), path.read_bytes()):
        # Two runs of the mp3 decoder may differ by 6e-8.
        np.testing.assert_allclose(load(clip_of(source, 20_003)).samples, expected, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [0, 1, 5_001, 70_123])
def test_a_part_of_a_file_is_that_part(tmp_path, kind, start):
    path = write(tmp_path / f"x.{kind}", tone(90_003), kind=kind)
    whole, _ = soundfile.read(path, dtype="float32")
    loaded = load(clip_of(path, 7_777, start=start))
    assert loaded.trimmed_samples == 0
    np.testing.assert_allclose(loaded.samples, whole[start : start + 7_777], atol=2e-3)


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE", "AVERAGE"])
def test_a_part_of_an_mp3_does_not_lack_the_bits_that_earlier_frames_hold(mode):
    buffer = io.BytesIO()
    soundfile.write(buffer, tone(200_003), 16_000, format="MP3", bitrate_mode=mode, compression_level=0.99)
    whole = soundfile.read(io.BytesIO(buffer.getvalue()), dtype="float32")[0]
    for start in np.random.default_rng(0).integers(0, 195_000, 20).tolist():
        loaded = load(clip_of(buffer.getvalue(), 5_000, start=start))
        np.testing.assert_allclose(loaded.samples, whole[start : start + 5_000], atol=1e-4)


def test_a_part_of_a_file_that_cannot_seek_is_that_part():
    buffer = io.BytesIO()
    soundfile.write(buffer, tone(20_000), 16_000, format="WAV", subtype="GSM610")
    whole = soundfile.read(io.BytesIO(buffer.getvalue()), dtype="float32")[0]
    for start, count in ((None, len(whole)), (5_001, 7_777)):
        loaded = load(clip_of(buffer.getvalue(), count, start=start))
        np.testing.assert_array_equal(loaded.samples, whole[start or 0 :][:count])


def test_samples_cannot_be_written_to(tmp_path):
    loaded = load(clip_of(tone(100), 100))
    with pytest.raises(ValueError, match="read-only"):
        loaded.samples[0] = 1.0


# ---- channels


def test_several_channels_become_their_mean_whatever_the_layout(tmp_path):
    left, right = tone(48_000), tone(48_000, hertz=700.0)
    mean = ((left + right) / 2).astype(np.float32)
    interleaved, planar = np.stack([left, right], axis=1), np.stack([left, right])
    path = write(tmp_path / "stereo.wav", interleaved)
    cut = lhotse.Recording.from_file(path).to_cut()
    for source in (interleaved, planar, planar.astype(np.float32), path, path.read_bytes(), cut):
        np.testing.assert_allclose(load(clip_of(source, 48_000)).samples, mean, atol=1e-4)
    np.testing.assert_allclose(load(clip_of(mean, 48_000)).samples, mean)


@pytest.mark.parametrize("channel", [0, 1])
def test_one_channel_can_be_chosen(tmp_path, channel):
    waves = np.stack([tone(4_000), tone(4_000, hertz=700.0)])
    path = write(tmp_path / "stereo.wav", waves.T)
    recording = lhotse.Recording.from_file(path)
    mono_cut = lhotse.MonoCut("one", 0.0, recording.duration, channel=channel, recording=recording)
    for clip in (clip_of(waves, 4_000, channel=channel), clip_of(path, 4_000, channel=channel), clip_of(mono_cut, 4_000)):
        np.testing.assert_allclose(load(clip).samples, waves[channel], atol=1e-4)


def test_the_time_axis_of_an_array_may_differ_from_the_declared_length_within_the_tolerance():
    loaded = load(clip_of(np.zeros((2, 1_000)), 990), tolerance=10)
    assert (loaded.samples.shape, loaded.trimmed_samples) == ((990,), 10)


def test_an_axis_as_long_as_declared_is_time_though_the_other_is_within_the_tolerance():
    waves = np.arange(24.0).reshape(4, 6)
    np.testing.assert_array_equal(load(clip_of(waves, 6), tolerance=5).samples, waves.mean(axis=0))
    np.testing.assert_array_equal(load(clip_of(waves, 4), tolerance=5).samples, waves.mean(axis=1))


@pytest.mark.parametrize(("shape", "declared"), [((2, 2), 2), ((2, 48_000), 47_000), ((3, 4, 5), 5), ((), 1)])
def test_an_array_with_an_unclear_time_axis_is_refused(shape, declared):
    lines = lines_of(clip_of(np.zeros(shape), declared))
    assert lines["what"] == "audio in an array does not show which axis is time"
    assert lines["got"] == f"shape {shape}, {declared} samples declared"
    assert "exactly one is as long as declared" in lines["expected"]
    assert "destroys the signal" in lines["because"]
    assert "num_samples" in lines["fix"]


@pytest.mark.parametrize("channel", [-1, 2])
def test_a_channel_that_is_not_there_is_refused(channel):
    lines = lines_of(clip_of(np.zeros((2, 100)), 100, channel=channel))
    assert lines["what"] == f"audio in an array has no channel {channel}"
    assert lines["got"] == f"channel {channel} of 2"
    assert lines["expected"] == "0 to 1"
    assert "belongs to one channel" in lines["because"]
    assert "channel" in lines["fix"]


def test_a_cut_of_a_channel_that_its_file_lacks_is_refused(tmp_path):
    recording = lhotse.Recording.from_file(write(tmp_path / "mono.wav", tone(4_000)))
    source = dataclasses.replace(recording.sources[0], channels=[0, 1])
    recording = dataclasses.replace(recording, sources=[source], channel_ids=[0, 1])
    cut = lhotse.MonoCut("second", 0.0, recording.duration, channel=1, recording=recording)
    assert lines_of(clip_of(cut, 4_000))["what"] == "audio of 'second' has no channel 1"


def test_integers_are_refused_because_their_full_scale_is_unknown():
    lines = lines_of(clip_of(np.zeros(100, dtype=np.int16), 100))
    assert lines["what"] == "audio in an array does not hold floating point numbers"
    assert lines["got"] == "dtype int16"
    assert "float32" in lines["expected"]
    assert "full scale" in lines["because"]
    assert "32768" in lines["fix"]


# ---- sample rates


@pytest.mark.parametrize(("rate", "target"), [(48_000, 16_000), (44_100, 16_000), (8_000, 16_000), (22_050, 16_000)])
def test_resampling_keeps_pitch_and_gives_the_length_known_beforehand(rate, target):
    samples = rate + 7
    loaded = load(clip_of(tone(samples, rate), samples, rate), target, resample=True)
    expected = samples_at(samples, rate, target)
    assert (len(loaded.samples), loaded.trimmed_samples) == (expected, 0)
    inside = slice(200, expected - 200)
    np.testing.assert_allclose(loaded.samples[inside], tone(expected, target)[inside], atol=5e-3)


@pytest.mark.parametrize("start", [None, 0, 16_001])
def test_a_length_in_samples_of_the_encoder_fits_a_file_of_another_rate(tmp_path, start):
    path = write(tmp_path / "cd.wav", tone(88_199, 44_100), 44_100)
    declared = 31_999 if start is None else 12_345
    loaded = load(clip_of(path, declared, start=start), resample=True)
    assert (len(loaded.samples), loaded.trimmed_samples) == (declared, 0)
    inside = slice(200, declared - 200)
    np.testing.assert_allclose(loaded.samples[inside], tone(40_000)[(start or 0) :][inside], atol=5e-3)


def test_another_rate_is_refused_unless_resampling_was_asked_for(tmp_path):
    path = write(tmp_path / "x.wav", tone(8_000, 8_000), 8_000)
    lines = lines_of(clip_of(path, 8_000, 8_000))
    assert lines["what"] == f"audio file {str(path)!r} has another sample rate than the encoder"
    assert lines["got"] == "8000 Hz"
    assert lines["expected"] == "16000 Hz"
    assert "too slow or too fast" in lines["because"]
    assert "resample=True" in lines["fix"]


# ---- declared and decoded length


@pytest.mark.parametrize("extra", [-30, -1, 1, 30])
def test_within_the_tolerance_the_end_is_trimmed_or_filled_with_zeros_and_counted(tmp_path, extra):
    wave = tone(5_000 + extra).astype(np.float32)
    for source in (wave, write(tmp_path / "x.wav", wave), lhotse.Recording.from_file(tmp_path / "x.wav")):
        if isinstance(source, lhotse.Recording):
            source = dataclasses.replace(source, num_samples=5_000, duration=5_000 / 16_000)
        loaded = load(clip_of(source, 5_000), tolerance=abs(extra))
        both = min(5_000, 5_000 + extra)
        assert (len(loaded.samples), loaded.trimmed_samples) == (5_000, extra)
        np.testing.assert_allclose(loaded.samples[:both], wave[:both], atol=1e-4)
        assert not loaded.samples[both:].any()


@pytest.mark.parametrize("extra", [-31, 31])
def test_one_sample_beyond_the_tolerance_is_refused(tmp_path, extra):
    path = write(tmp_path / "x.wav", tone(5_000 + extra))
    lines = lines_of(clip_of(path, 5_000), tolerance=30)
    assert lines["what"] == f"audio file {str(path)!r} is not as long as its manifest says"
    assert lines["got"] == f"{5_000 + extra} samples at 16000 Hz"
    assert lines["expected"] == "5000 samples, within 30"
    assert "declared length" in lines["because"]
    assert "manifest" in lines["fix"]


def test_a_whole_file_ten_times_as_long_as_declared_is_refused_and_a_named_part_of_it_is_not(tmp_path):
    path = write(tmp_path / "x.flac", tone(78_277), kind="flac")
    assert lines_of(clip_of(path, 7_916))["got"] == "78277 samples at 16000 Hz"
    assert len(load(clip_of(path, 7_916, start=0)).samples) == 7_916


@pytest.mark.parametrize(("start", "got"), [(4_000, 1_000), (5_000, 0), (9_000, 0)])
def test_a_part_that_runs_past_the_end_of_the_file_is_refused(tmp_path, start, got):
    lines = lines_of(clip_of(write(tmp_path / "x.wav", tone(5_000)), 2_000, start=start))
    assert lines["got"] == f"{got} samples" + (" at 16000 Hz" if got else "")


@pytest.mark.parametrize("kind", ["wav", "opus"])
def test_a_file_cut_off_in_the_middle_is_refused(tmp_path, kind):
    path = write(tmp_path / f"x.{kind}", np.random.default_rng(0).normal(0, 0.1, 48_000), kind=kind)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    lines_of(clip_of(path, 48_000), tolerance=400)


# ---- lhotse


@pytest.fixture
def recording(tmp_path):
    return lhotse.Recording.from_file(write(tmp_path / "whole.flac", tone(32_000), kind="flac"))


def test_a_cut_is_read_like_its_file_whole_in_part_and_from_memory(recording):
    wave, _ = soundfile.read(recording.sources[0].source, dtype="float32")
    part = recording.to_cut().truncate(offset=0.507, duration=1.0)
    source = AudioSource(type="memory", channels=[0], source=Path(recording.sources[0].source).read_bytes())
    in_memory = dataclasses.replace(recording, sources=[source])
    for whole in (recording, recording.to_cut(), in_memory, in_memory.to_cut()):
        np.testing.assert_array_equal(load(clip_of(whole, 32_000)).samples, wave)
    np.testing.assert_array_equal(load(clip_of(part, 16_000)).samples, wave[8_112:24_112])
    np.testing.assert_array_equal(load(clip_of(part, 16_000)).samples, part.load_audio()[0])


def test_transformed_padded_and_mixed_cuts_are_what_lhotse_makes_of_them(recording):
    cut = recording.to_cut()
    for made in (cut.pad(duration=3.0), cut.perturb_volume(0.5), cut.append(cut), cut.resample(8_000)):
        clip = clip_of(made, made.num_samples, made.sampling_rate)
        np.testing.assert_array_equal(load(clip, made.sampling_rate).samples, made.load_audio()[0])


def test_audio_that_lhotse_would_make_up_by_mirroring_is_refused(recording):
    declared = 32_000 + 7_000
    wrong = dataclasses.replace(recording, num_samples=declared, duration=declared / 16_000)
    assert wrong.load_audio().shape == (1, declared), "lhotse no longer fills in: read cuts through it again"
    lines = lines_of(clip_of(wrong.to_cut(), declared))
    assert lines["what"] == "audio of 'whole' is not as long as its manifest says"
    assert lines["got"] == "32000 samples at 16000 Hz"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the standard modules that lhotse's last resort imports
def test_a_cut_whose_file_is_missing_is_refused_plain_or_transformed(recording, tmp_path):
    lost = recording.with_path_prefix(tmp_path / "lost")
    source = dataclasses.replace(lost.sources[0], source=str(tmp_path / "lost.flac"))
    cut = dataclasses.replace(lost, sources=[source]).to_cut()
    assert lines_of(clip_of(cut, 32_000))["what"] == "audio of 'whole' is missing"
    assert lines_of(clip_of(cut.perturb_volume(2.0), 32_000))["what"].endswith("cannot be read")


def test_a_cut_without_a_recording_is_refused():
    cut = lhotse.MonoCut("bare", 0.0, 1.0, channel=0)
    stand_in = type("Bare", (), {"id": "bare", "sampling_rate": 16_000, "load_audio": cut.load_audio})()
    lines = lines_of(clip_of(stand_in, 16_000))
    assert (lines["what"], lines["got"]) == ("audio of 'bare' cannot be read", "the cut has no recording")


# ---- what cannot be audio


def test_a_missing_file_is_refused(tmp_path):
    lines = lines_of(clip_of(tmp_path / "no such.wav", 100))
    assert lines["what"] == f"audio file {str(tmp_path / 'no such.wav')!r} is missing"
    assert lines["got"] == "no file of this name"
    assert "can be read" in lines["expected"]
    assert "silence" in lines["because"]
    assert "manifest" in lines["fix"]


@pytest.mark.parametrize("name", ["x.wav", "x.flac", "x.opus", "x.mp3", "x.raw", "x.txt"])
def test_a_file_that_is_not_audio_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"certainly no audio" * 20)
    lines = lines_of(clip_of(path, 100))
    assert lines["what"] == f"audio file {str(path)!r} cannot be read"
    assert "soundfile" in lines["expected"]
    assert "broken file" in lines["because"]
    assert "remove the example" in lines["fix"]


@pytest.mark.parametrize("source", [b"", b"RIFF", b"OggS" + bytes(100)])
def test_bytes_that_are_not_audio_are_refused(source):
    assert lines_of(clip_of(source, 100))["what"] == f"audio in {len(source)} bytes cannot be read"


def test_a_folder_is_refused(tmp_path):
    assert lines_of(clip_of(tmp_path, 100))["what"].endswith("cannot be read")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_samples_that_are_not_finite_are_refused(value):
    wave = np.zeros((2, 100))
    wave[:, 7] = value, -value
    lines = lines_of(clip_of(wave, 100))
    assert lines["what"] == "audio in an array has samples that are not finite"
    assert lines["got"] == "2 of 200 samples are NaN or infinite"
    assert lines["expected"] == "finite samples"
    assert "every parameter" in lines["because"]
    assert "repair" in lines["fix"]


def test_audio_without_samples_is_refused(tmp_path):
    lines = lines_of(clip_of(write(tmp_path / "x.wav", np.zeros(0)), 100))
    assert lines["what"].endswith("has no samples")
    assert lines["got"] == "0 samples"
    assert lines["expected"] == "at least one"
    assert "encoder frame" in lines["because"]
    assert "remove the example" in lines["fix"]


# ---- probing


@pytest.mark.parametrize("kind", KINDS)
def test_a_probed_file_is_as_long_as_it_decodes(tmp_path, kind):
    path = write(tmp_path / f"x.{kind}", np.zeros((12_345, 2)), 48_000, kind)
    samples, rate, channels = probe_file(path)
    assert (rate, channels) == (48_000, 2)
    assert samples == len(soundfile.read(path)[0])
    assert probe_file(path.read_bytes()) == (samples, rate, channels)


def test_an_mpeg_header_that_counts_too_many_samples_is_not_believed():
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).normal(0, 0.1, 48_000)
    soundfile.write(buffer, noise, 16_000, format="MP3", subtype="MPEG_LAYER_III")
    half = buffer.getvalue()[: len(buffer.getvalue()) // 2]
    decoded = len(soundfile.read(io.BytesIO(half))[0])
    assert decoded < soundfile.info(io.BytesIO(half)).frames, "this header is right: take another file"
    assert probe_file(half)[0] == decoded


def test_probing_a_missing_or_broken_file_is_an_error(tmp_path):
    with pytest.raises(AudioError, match="is missing"):
        probe_file(tmp_path / "none.wav")
    with pytest.raises(AudioError, match="cannot be read"):
        probe_file(b"nothing")


# ---- real files


@needs_real_audio
@pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: path.name)
def test_real_audio_has_its_probed_length_at_every_rate(path):
    samples, rate, channels = probe_file(path)
    decoded = soundfile.read(path, dtype="float32", always_2d=True)[0]
    assert decoded.shape == (samples, channels)
    loaded = load(clip_of(path, samples, rate), rate)
    np.testing.assert_allclose(loaded.samples, decoded.mean(axis=1), atol=1e-6)
    for target in (16_000, 24_000):
        resampled = load(clip_of(path, samples, rate), target, resample=True)
        assert (len(resampled.samples), resampled.trimmed_samples) == (samples_at(samples, rate, target), 0)
        power, resampled_power = np.square(loaded.samples).mean(), np.square(resampled.samples).mean()
        assert resampled_power == pytest.approx(power, rel=0.1)


@needs_real_audio
@pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: path.name)
def test_real_audio_is_the_same_as_a_lhotse_cut_and_as_bytes(path):
    samples, rate, _ = probe_file(path)
    cut = lhotse.Recording.from_file(path).to_cut()
    tolerance = abs(cut.num_samples - samples)  # of the mp3 alone: lhotse believes its header
    assert tolerance == 0 or path.suffix == ".mp3"
    from_path = load(clip_of(path, samples, rate), rate).samples
    from_cut = load(clip_of(cut, cut.num_samples, rate), rate, tolerance=tolerance)
    assert from_cut.trimmed_samples == samples - cut.num_samples
    np.testing.assert_array_equal(from_cut.samples[:samples], from_path)
    np.testing.assert_array_equal(load(clip_of(path.read_bytes(), samples, rate), rate).samples, from_path)
