"""D. Audio and text as people have them: lengths that are wrong, channels, rates, lines of a manifest."""

import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from lhotse.audio import AudioSource

from packfp8 import AudioError, AudioFrames, BudgetError, ByteTokenizer, ExampleError, LengthError, Measure, align, probe
from packfp8.data import Collator, PackedDataset, PackingSampler
from packfp8.data.audio import probe_file
from packfp8.lengths.conv import Conv
from packfp8.report import report

BLOCKS = AudioFrames(  # a block encoder: three halvings in blocks of 100 feature frames
    sample_rate=16_000, window_samples=160, hop_samples=160, convs=(Conv(3, 2, 1),) * 3, block_frames=100
)


def cut(name, seconds, text="abc", recorded=2000.0):
    """A cut whose audio is nowhere."""
    source = AudioSource(type="file", channels=[0], source=f"/nowhere/{name}.wav")
    recording = Recording(
        id=name, sources=[source], sampling_rate=16_000, num_samples=int(recorded * 16_000), duration=recorded
    )
    spoken = [SupervisionSegment(id=name, recording_id=name, start=0, duration=1.0, text=text)]
    return MonoCut(id=name, start=0, duration=seconds, channel=0, supervisions=spoken, recording=recording)


def speech_measure(**changes):
    return Measure(**{"frames": AudioFrames.fastconformer(), **changes})


def test_audio_is_never_cut_to_fit_a_text_budget(collate, spoken, lines_of):
    """A cutoff in tokens left 2,498 placeholders for 4,220 frames. QwenLM/Qwen2-Audio#117."""
    items = [spoken(4220, name="long"), spoken(100, name="short")]
    with pytest.raises(BudgetError) as refusal:
        collate(items, budget=2500)
    lines = lines_of(refusal.value)
    assert "'long'" in lines["what"]
    assert "neither audio nor text is ever cut" in lines["because"]
    (batch,) = collate(items, budget=2500, over_budget="set_aside")
    assert batch.ids == ("short",)
    assert [one.id for one in batch.set_aside] == ["long"]
    (whole,) = collate(items, budget=5000)
    assert whole.audio_destination.numel() == 4320


@pytest.mark.parametrize(("mel", "frames", "stale"), [(40, 5, 10), (640, 83, 160)])
def test_frames_are_counted_by_the_encoder_that_runs(mel, frames, stale):
    """A formula of two convolutions outlived its block encoder: 10 frames for 5.

    40 feature frames give 5, and 640 give 83 in blocks. The probe compares a formula with the real encoder at start-up.
    NVIDIA-NeMo/Megatron-Bridge#5256; huggingface/transformers#45088.
    """
    item = {"id": "x", "audio": np.zeros(mel * 160, np.float32), "text": "abc"}
    batch = Collator(measure=speech_measure(frames=BLOCKS), rule=align("bf16"))([item])
    assert batch.audio_frames == batch.audio_destination.numel() == frames
    old = AudioFrames(sample_rate=16_000, window_samples=160, hop_samples=160, convs=(Conv(3, 2, 1),) * 2)
    assert old.encoder_frames(mel * 160) == stale

    def encoder(audio, lens):
        return torch.zeros(len(lens), BLOCKS.encoder_frames(int(lens.max())), 1), None

    assert probe(encoder, BLOCKS, [mel * 160]).check().agree == 1
    with pytest.raises(LengthError, match="disagrees with the encoder"):
        probe(encoder, old, [mel * 160]).check()


def test_each_clip_of_a_conversation_is_counted_and_placed_by_itself(collate, spoken):
    """Placeholders counted per row failed rows of two clips: 100 and 250 frames. NVIDIA-NeMo/Megatron-Bridge#5256."""
    (batch,) = collate([spoken(100, 250)], "bf16")
    assert batch.audio_lens.tolist() == [1600, 4000]
    assert batch.audio_destination.tolist() == list(range(350))
    assert batch.audio_source.tolist() == [*range(100), *range(250, 500)]  # rows of [2 clips, 250 frames]
    clips = [np.zeros(1600, np.float32), np.zeros(4000, np.float32)]
    messages = [{"role": "user", "content": "<|audio|>"}, {"role": "assistant", "content": "1"}]
    with pytest.raises(ExampleError, match=r"1 marks, 2 clips"):
        collate([{"id": "x", "messages": messages, "audio": clips}])


def test_the_second_halving_is_counted():
    """42 frames through two filters of 3 by 2 are 9; a formula without the second halving says 17. k2-fsa/icefall#603, #686."""
    icefall = AudioFrames.kaldi(convs=(Conv(3, 1), Conv(3, 2), Conv(3, 2)))
    assert [icefall.subsampled(n) for n in (42, 41, 43)] == [((n - 7) // 2 + 1) // 2 for n in (42, 41, 43)]
    assert icefall.subsampled(42) == 9


@pytest.mark.parametrize(("excess", "kept"), [(0, True), (160, True), (-160, True), (161, False), (-161, False)])
def test_a_clip_that_is_one_hop_off_is_trimmed_and_counted_and_more_is_refused(excess, kept, sound):
    """Concatenated cuts disagreed by one frame, 1,231 for 1,232. The declared length is the one truth. k2-fsa/icefall#2025."""
    item = {"id": "x", "audio": sound("x.wav", 16_000 + excess), "num_samples": 16_000, "text": "abc"}
    collator = Collator(measure=speech_measure(), rule=align("block"))
    if kept:
        batch = collator([item])
        assert batch.trimmed_samples == abs(excess)
        assert batch.audio_lens.tolist() == [16_000]
        assert batch.audio_destination.numel() == 13
    else:
        with pytest.raises(AudioError, match="not as long as its manifest says"):
            collator([item])


@pytest.mark.parametrize("decoded", [782_677, 7_916])
def test_audio_that_is_not_as_long_as_declared_is_refused_or_set_aside(decoded, sound, lines_of):
    """The loader gave the whole file for a slice: 79,168 samples declared, 782,677 loaded; or a shorter one.

    lhotse-speech/lhotse#1437, #1225, #644.
    """
    wrong = {"id": "wrong", "audio": sound("x.wav", decoded), "num_samples": 79_168, "text": "abc"}
    right = {"id": "right", "audio": sound("y.wav", 1600), "num_samples": 1600, "text": "abc"}
    options = {"measure": speech_measure(), "rule": align("block"), "budget": 256}
    with pytest.raises(AudioError) as refusal:
        Collator(**options)([wrong, right])
    lines = lines_of(refusal.value)
    assert str(decoded) in lines["got"]
    assert "79168" in lines["expected"]
    batch = Collator(**options, on_fault="set_aside")([wrong, right])
    assert batch.ids == ("right",)
    assert [one.id for one in batch.set_aside] == ["wrong"]


IMPOSSIBLE = {
    "negative": -2.86,
    "zero": 0.0,
    "none": None,
    "nan": float("nan"),
    "endless": float("inf"),
    "ages": 1e9,
    "text": "1",
}


def test_impossible_durations_are_rejected_by_name_and_the_rest_goes_on():
    """One bad item ended the run. Durations of -2.86, 0, nothing, NaN, 0.05 s, 1e9 s; NaN and ages are our own addition.

    lhotse-speech/lhotse#1448, #1541; k2-fsa/icefall#1392; NVIDIA-NeMo/Speech#8862.
    """
    cuts = [cut(name, seconds) for name, seconds in IMPOSSIBLE.items()] + [cut("tiny", 0.05), cut("good", 2.0)]
    measure = speech_measure(frames=AudioFrames.kaldi(convs=(Conv(3, 1), Conv(3, 2), Conv(3, 2))))
    options = {"measure": measure, "rule": align("block"), "budget": 256}
    sampler = PackingSampler(cuts, **options, on_fault="set_aside", over_budget="set_aside")
    packed = [item.id for pack in sampler for item in pack]
    assert packed == ["good"]
    reasons = {one.id: one.reason for one in sampler.set_aside}
    assert reasons.keys() == {*IMPOSSIBLE, "tiny"}
    for name in ("negative", "zero", "none", "nan", "endless", "text"):
        assert "impossible duration" in reasons[name]
    assert "too short for one encoder frame" in reasons["tiny"]
    assert "longer than a pack" in reasons["ages"]
    with pytest.raises(LengthError, match="'negative'"):
        list(PackingSampler(cuts, **options, shuffle=False))


def test_a_report_counts_what_it_rejects_and_goes_on(tmp_path):
    """The same reports, for manifests: NaN, null, a text and a truth value among good lines."""
    path = tmp_path / "manifest.jsonl"
    path.write_text(
        "".join(
            json.dumps({"audio_filepath": n, "duration": s, "text": "abcd"}) + "\n"
            for n, s in {**IMPOSSIBLE, "yes": True, "ok": 2.0}.items()
        )
    )
    found = report(path, budget=256)
    assert found.examples == 1
    assert found.rejected.count == len(IMPOSSIBLE) + 1
    assert any("impossible duration -2.86" in line for line in found.rejected.named)


def test_channels_are_averaged_along_their_own_axis_and_never_guessed(lines_of):
    """Averaging along time destroys the signal. Arrays of (2, 48000), (48000, 2) and (48000,) in one batch.

    lhotse-speech/lhotse#1563, #552; huggingface/transformers#47886; NVIDIA-NeMo/Speech#1489.
    """
    mono = np.linspace(-0.5, 0.5, 48_000, dtype=np.float32)
    stereo = np.stack((mono + 0.25, mono - 0.25))
    items = [
        {"id": str(n), "audio": wave, "num_samples": 48_000, "text": "abc"} for n, wave in enumerate((stereo, stereo.T, mono))
    ]
    collator = Collator(measure=speech_measure(), rule=align("block"))
    batch = collator(items)
    assert batch.audio.shape == (3, 48_000)
    torch.testing.assert_close(batch.audio, torch.from_numpy(mono).expand(3, -1))
    assert len(set(batch.slots.lengths[:3].tolist())) == 1  # channels make no frames
    with pytest.raises(LengthError) as refusal:
        collator([{"id": "unclear", "audio": stereo, "text": "abc"}])
    assert "look alike" in lines_of(refusal.value)["because"]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x1c"])
def test_a_line_of_a_manifest_ends_at_a_newline_byte_only(separator, tmp_path):
    """`splitlines` breaks a record that holds U+2028, U+2029 or U+0085. Tokens are the tokenizer's. huggingface/tau#354."""
    text, path = f"one{separator}two", tmp_path / "m.jsonl"
    lines = [{"audio_filepath": f"{n}.wav", "duration": 1.0, "text": text} for n in range(3)]
    path.write_bytes(b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines))
    found = report(path, budget=256, tokenizer=ByteTokenizer())
    assert (found.examples, found.rejected.count) == (3, 0)
    assert found.tokens_real == 3 * (12 + len(text.encode()))
    CutSet([cut("x", 1.0, text)]).to_file(tmp_path / "cuts.jsonl")
    (read,) = CutSet.from_file(tmp_path / "cuts.jsonl")
    assert read.supervisions[0].text == text
    (pack,) = PackingSampler([read], measure=speech_measure(), rule=align("block"), budget=256)
    assert [one.id for one in pack] == ["x"]


# More of the same kind: MP3 in stereo at 48 kHz, one sample, names that shells dislike, Windows line ends.


@pytest.mark.parametrize("name", ["Two Speakers (take 2).mp3", "räume/Öl & 你好 #1.mp3", 'quote\'d "name".mp3'])
def test_stereo_mp3_at_48_khz_under_any_name_is_as_long_as_it_decodes(name, sound):
    """MP3 has lost samples at both ends, 48 kHz is three times the encoder's rate, and two channels are one signal."""
    wave = np.random.default_rng(0).normal(0, 0.1, (48_000 + 1, 2))
    path = sound(name, wave, 48_000)
    samples, rate, channels = probe_file(path)
    assert (rate, channels) == (48_000, 2)
    collator = Collator(measure=speech_measure(), rule=align("block"), resample=True)
    batch = collator([{"audio": str(path), "text": "abc"}])
    assert batch.audio_lens.tolist() == [-(-samples // 3)]
    assert batch.ids == (str(path),)
    assert batch.audio_destination.numel() == AudioFrames.fastconformer().encoder_frames(-(-samples // 3))
    with pytest.raises(AudioError, match="another sample rate"):
        Collator(measure=speech_measure(), rule=align("block"))([{"audio": str(path), "text": "abc"}])


@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1), (1, 2)])
def test_a_clip_of_one_sample_is_heard_where_the_encoder_can_and_refused_where_it_cannot(shape, lines_of):
    """One sample is a frame of an encoder that takes samples, and none of one that takes windows; an unclear axis fails."""
    item = {"id": "tick", "audio": np.full(shape, 0.5, np.float32), "num_samples": 1, "text": "abc"}
    each = Collator(measure=speech_measure(frames=AudioFrames.linear(1)), rule=align("block"))
    if shape == (1, 1):
        with pytest.raises(AudioError, match="does not show which axis is time"):
            each([item])
    else:
        batch = each([item])
        assert batch.audio.tolist() == [[0.5]]
        assert batch.audio_destination.numel() == 1
    with pytest.raises(LengthError) as refusal:
        Collator(measure=speech_measure(), rule=align("block"))([item])
    lines = lines_of(refusal.value)
    assert "'tick'" in lines["what"]
    assert lines["expected"] == "at least 160 samples at 16000 Hz"


@pytest.mark.parametrize("seconds", [Fraction(159, 16_000), Fraction(160, 16_000), Fraction(161, 16_000)])
def test_the_shortest_clip_is_refused_one_sample_below(seconds):
    """A clip of 159, 160 and 161 samples given in seconds: FastConformer has its first frame at 160."""
    source = [{"id": "x", "audio": np.zeros(int(seconds * 16_000), np.float32), "duration": float(seconds), "text": "abc"}]
    rule = align("block")
    sampler = PackingSampler(source, measure=speech_measure(), rule=rule, budget=64, on_fault="set_aside")
    dataset = PackedDataset(Collator(measure=speech_measure(), rule=rule, budget=64))
    batches = [dataset[pack] for pack in sampler]
    assert [batch.audio_frames for batch in batches] == ([] if seconds < Fraction(1, 100) else [1])
