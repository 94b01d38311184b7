"""The plain models: exact frame counts, clips that do not hear each other, attention as written out by hand."""

import math

import pytest
import torch

from packfp8.errors import ConfigError, LengthError
from packfp8.lengths import AudioFrames, probe
from packfp8.lengths.encoder_probe import probe_lengths
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder, attend, rotated, rotations, visible
from packfp8.model.plain_encoder import PlainEncoder, mel_filters

FRAMES = AudioFrames.fastconformer()


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    return PlainEncoder(width=4, mel_bins=8).eval()


def test_frame_counts_are_those_of_the_formula(encoder):
    report = probe(encoder, FRAMES)
    assert report.total == 2_000
    report.check()


def test_frame_counts_do_not_depend_on_other_clips(encoder):
    probe(encoder, FRAMES, probe_lengths(FRAMES, 160), clips_per_call=8).check()


def test_the_probe_would_see_an_encoder_that_is_one_convolution_short(encoder):
    encoder.convs = encoder.convs[:2]
    encoder.frames = AudioFrames(sample_rate=16_000, window_samples=512, hop_samples=160, convs=FRAMES.convs[:2])
    with pytest.raises(LengthError, match="disagrees with the encoder at 50 of 100 lengths"):
        probe(encoder, FRAMES, probe_lengths(FRAMES, 100)).check()


def test_a_clip_sounds_the_same_alone_and_beside_others(encoder):
    encoder.double()
    lens = torch.tensor([160, 3_333, 16_000, 8_001])
    audio = torch.randn(4, 16_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    together, counts = encoder(audio, lens)
    for row, n in enumerate(lens.tolist()):
        alone, (count,) = encoder(audio[row : row + 1, :n], lens[row : row + 1])
        assert count == counts[row] == FRAMES.encoder_frames(n)
        torch.testing.assert_close(together[row, :count], alone[0, :count], rtol=0, atol=1e-10)


def packed_row(clips):
    """`[1, samples]`, lengths and offsets of `clips` in rooms, and room for five more frames and three more clips."""
    rooms = torch.tensor([1280 * (FRAMES.encoder_frames(len(clip)) + 1 if len(clip) else 1) for clip in clips])
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), rooms.cumsum(0)))
    row = torch.zeros(1, int(offsets[-1]) + 5 * 1280, dtype=torch.float64)
    for clip, begin in zip(clips, offsets.tolist()):
        row[0, begin : begin + len(clip)] = clip
    lens = torch.tensor([len(clip) for clip in clips] + [0] * 3)
    return row, lens, torch.cat((offsets, offsets[-1:].expand(3)))


def test_a_clip_sounds_the_same_in_a_packed_row_at_any_remainder_of_its_length(encoder):
    """All remainders by the hop at both ends of a frame, in random order, and clips of no sample."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.cat(
        (torch.arange(1, 162), 1280 + torch.arange(0, 161), torch.randint(0, 9_000, (60,), generator=generator))
    )
    lengths = lengths[torch.randperm(len(lengths), generator=generator)].tolist()
    clips = [torch.randn(n, dtype=torch.float64, generator=generator) for n in [*lengths, 0, 0, 1280]]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        encoder.to(dtype)
        row, lens, offsets = packed_row(clips)
        with torch.no_grad():
            together, counts = encoder(row.to(dtype), lens, offsets)
            assert together.shape == (1, row.shape[1] // 1280, 4)
            assert together.dtype == dtype
            wave = torch.zeros(len(clips), max(map(len, clips)), dtype=dtype)
            for n, clip in enumerate(clips):
                wave[n, : len(clip)] = clip
            alone, expected = encoder(wave, lens[: len(clips)])
        assert counts.tolist() == [*expected.tolist(), 0, 0, 0]
        for n, (count, begin) in enumerate(zip(expected.tolist(), (offsets // 1280).tolist())):
            torch.testing.assert_close(together[0, begin : begin + count], alone[n, :count], rtol=0, atol=tolerance)
        assert sum(expected.tolist()) > 400


def test_what_stands_in_a_room_behind_its_clip_is_not_heard(encoder):
    clips = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (2_000, 5_000)]
    row, lens, offsets = (t.float() if t.dtype == torch.float64 else t for t in packed_row(clips))
    before, _ = encoder(row, lens, offsets)
    place, behind = torch.arange(row.shape[1]), torch.ones(row.shape[1], dtype=torch.bool)
    for begin, length in zip(offsets.tolist(), (2_000, 5_000)):
        behind &= (place < begin) | (place >= begin + length)
    assert torch.equal(encoder(torch.where(behind, float("nan"), row), lens, offsets)[0], before)
    assert before.isfinite().all()


def test_gradients_of_a_packed_row_are_those_of_rows(encoder):
    encoder.double()
    clips = [torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (700, 2_600, 1_279)]
    row, lens, offsets = packed_row(clips)
    frames, counts = encoder(row, lens, offsets)
    packed = torch.cat([frames[0, b : b + n] for b, n in zip((offsets // 1280).tolist(), counts.tolist())])
    found = torch.autograd.grad(packed.sin().sum(), list(encoder.parameters()))
    alone = torch.cat([encoder(clip[None], torch.tensor([len(clip)]))[0][0] for clip in clips])
    for ours, theirs in zip(found, torch.autograd.grad(alone.sin().sum(), list(encoder.parameters()))):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_features_are_exact_in_a_model_moved_to_bf16(encoder):
    audio = torch.randn(1, 8_000, generator=torch.Generator().manual_seed(0))
    before = encoder.features(audio)
    torch.testing.assert_close(encoder.bfloat16().features(audio), before)
    assert encoder(audio, torch.tensor([8_000]))[0].dtype == torch.bfloat16


def test_a_tone_lights_the_mel_bin_that_holds_it():
    encoder = PlainEncoder(width=4, mel_bins=40)
    tone = torch.sin(2 * math.pi * 1_000 * torch.arange(16_000) / 16_000)[None]
    loudest = encoder.features(tone)[0].mean(0).argmax().item()
    mel = mel_filters(40, 512, 16_000, dtype=torch.float32, device="cpu")
    assert mel.shape == (40, 257)
    assert mel[loudest].argmax().item() in (31, 32, 33)  # bins of 31.25 Hz: 1,000 Hz is the 32nd


SIZES = DecoderSizes(vocab=20, hidden=16, ffn=24, layers=2, heads=4, kv_heads=2)


def test_attention_is_the_softmax_over_what_a_query_may_see():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(7, h, 4, generator=g, dtype=torch.float64) for h in (4, 2, 2))
    seq, pos = torch.tensor([0, 0, 0, 1, 2, 2, 2]), torch.tensor([0, 1, 2, 0, 0, 1, 2])
    mask = visible(seq, pos, seq, pos)
    out = attend(q, k, v, mask)
    for t in range(7):
        keys = [s for s in range(t + 1) if seq[s] == seq[t]]
        assert mask[t].nonzero().flatten().tolist() == keys
        for head in range(4):
            scores = torch.stack([q[t, head] @ k[s, head // 2] / 2 for s in keys]).softmax(0)
            torch.testing.assert_close(out[t, head], sum(w * v[s, head // 2] for w, s in zip(scores, keys, strict=True)))


def test_every_query_sees_itself():
    seq, pos = torch.randint(0, 4, (50,)), torch.randint(0, 9, (50,))
    assert visible(seq, pos, seq, pos).diagonal().all()


def test_rotation_is_a_turn_of_pairs_of_halves_and_of_distance_alone():
    x = torch.randn(1, 1, 4, dtype=torch.float64)

    def turned(position):
        return rotated(x, *rotations(torch.tensor([position]), SIZES, torch.float64))[0, 0]

    a, b, c, d = x[0, 0]
    s, f = math.sin, math.cos
    by_hand = [a * f(3) - c * s(3), b * f(0.03) - d * s(0.03), c * f(3) + a * s(3), d * f(0.03) + b * s(0.03)]
    torch.testing.assert_close(turned(3), torch.stack(by_hand))  # 10,000 ** (-2 / 4) = 0.01
    torch.testing.assert_close(turned(3) @ turned(5), turned(40) @ turned(42))


def test_parameters_have_the_names_and_shapes_that_other_decoders_hold():
    shapes = {name: tuple(p.shape) for name, p in PlainDecoder(SIZES).named_parameters() if "layers.1" not in name}
    assert shapes == {
        "embedding.weight": (20, 16),
        "layers.0.attn_norm.weight": (16,),
        "layers.0.qkv.weight": (32, 16),
        "layers.0.proj.weight": (16, 16),
        "layers.0.mlp_norm.weight": (16,),
        "layers.0.fc1.weight": (48, 16),
        "layers.0.fc2.weight": (16, 24),
        "norm.weight": (16,),
        "head.weight": (20, 16),
    }


@pytest.mark.parametrize("sizes", [{"layers": 0}, {"heads": 0}, {"kv_heads": -1}, {"hidden": 16.0}, {"ffn": True}], ids=repr)
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(ConfigError) as caught:
        DecoderSizes(**{"vocab": 20, "hidden": 16, **sizes})
    ((name, size),) = sizes.items()
    assert str(caught.value).splitlines() == [
        f"{name} of the decoder is no size",
        f"  got:      {size!r}",
        "  expected: a whole number of at least 1",
        "  because:  a part of no features or no layers computes nothing, and would train without a word",
        f"  fix:      give {name} as a positive int",
    ]


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError) as caught:
        DecoderSizes(vocab=20, hidden=30, heads=4)
    assert str(caught.value).splitlines() == [
        "the heads of the decoder do not divide its features",
        "  got:      hidden 30, heads 4, kv_heads 4",
        "  expected: hidden a multiple of 2 * heads, heads a multiple of kv_heads",
        "  because:  each head takes an equal share, and a rotation turns pairs of features",
        "  fix:      choose hidden = heads * head_dim with an even head_dim",
    ]
