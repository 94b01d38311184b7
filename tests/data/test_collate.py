"""Collator: what is conserved, budgets, static packs, policies that agree on all ranks, workers."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lhotse import CutSet
from torch.utils.data import DataLoader

from packfp8.data import Clip, Collator, Example, PackingSampler, Turn, corpus
from packfp8.data.content import cu_seqlens
from packfp8.errors import AudioError, BudgetError, ConfigError, ExampleError, RuleError
from packfp8.layout import Slots
from packfp8.lengths import AudioFrames, Measure
from packfp8.rule import align

IGN = -100
# ---- conservation and policies


def batch_ids(batch):
    return sorted([*batch.ids, *(left.id for left in batch.set_aside)])


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(16, 200), st.sampled_from(["thd", "bshd"]), st.data())
def test_every_id_comes_out_once_or_is_set_aside_with_its_reason(bare, docs, lengths, budget, layout, data):
    most = data.draw(st.one_of(st.none(), st.integers(1, 5)))
    rule = align("block", layout=layout)
    items = docs(*(" ".join(["7"] * n) for n in lengths))
    batch = bare(rule, budget=budget, over_budget="set_aside", max_sequences=most)(items)
    assert batch_ids(batch) == sorted(item.id for item in items)
    assert batch.slots.total <= budget
    assert len(batch.ids) <= (most or len(items))
    for left in batch.set_aside:
        assert left.reason.startswith(f"example {left.id!r} does not fit the pack\n  got:")
    kept = [n for n, item in enumerate(items) if item.id in batch.ids]
    assert batch.slots.lengths[: len(kept)].tolist() == [lengths[n] for n in kept]
    if kept and (most is None or len(kept) < most):  # one more would not have fitted
        for left in batch.set_aside:
            more = bare(rule, budget=budget, max_sequences=most)
            with pytest.raises(BudgetError):
                more([*(items[n] for n in kept), items[int(left.id)]])


def test_more_rows_may_need_fewer_tokens_and_are_not_refused_on_the_way(bare, docs):
    rule = align("block", layout="bshd")
    items = docs(*["1"] * 16)
    assert bare(rule, budget=16)(items).slots.total == 16  # 15 rows of 1 would need 15 * 16
    assert bare(rule, budget=16, over_budget="set_aside")(items).set_aside == ()


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("extra", [0, 1])
def test_a_sequence_of_exactly_the_budget_fits_and_one_token_more_does_not(bare, docs, layout, extra):
    collator = bare(align("block", layout=layout), budget=33)
    item = docs(" ".join(["1"] * (32 + extra)))
    if not extra:
        assert collator(item).slots.total == 32
        return
    with pytest.raises(BudgetError, match="example '0' does not fit the pack"):
        collator(item)


def test_an_example_over_the_budget_is_refused_line_by_line(bare, docs, lines_of):
    with pytest.raises(BudgetError) as caught:
        bare(align("block"), budget=47)(docs("1", " ".join(["2"] * 32), "3"))
    assert lines_of(caught.value) == {
        "what": "example '1' does not fit the pack",
        "got": "33 tokens of slots",
        "expected": "at most 32 tokens, the budget of 47 floored",
        "because": "the budget is a bound, not an aim, and neither audio nor text is ever cut",
        "fix": "raise the budget, give PackingSampler the same, or a batch fewer examples, or choose over_budget='set_aside'",
    }


def test_padded_rows_over_the_budget_are_refused_by_their_number_and_size(bare, docs, lines_of):
    with pytest.raises(BudgetError) as caught:
        bare(align("block", layout="bshd"), budget=47)(docs("1", "2 2 2 2 2 2 2 2 2", "3"))
    lines = lines_of(caught.value)
    assert lines["what"] == "example '2' does not fit the pack"
    assert (lines["got"], lines["expected"]) == ("3 rows of 16, 48 tokens", "at most 47 tokens")


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_sequences_over_their_greatest_number_are_refused(bare, docs, lines_of, layout):
    with pytest.raises(BudgetError) as caught:
        bare(align("block", layout=layout), max_sequences=2)(docs("1", "2", "3"))
    lines = lines_of(caught.value)
    assert lines["what"] == "example '2' does not fit the pack"
    assert (lines["got"], lines["expected"]) == ("3 sequences", "at most 2 sequences")


def broken_mix(wav, examples):
    """Examples of which some are broken in text, length or audio, with the ids of these."""
    short = wav("short.wav", 16_000)
    (short.parent / "noise.wav").write_bytes(b"not audio at all")
    bad = [
        {"id": "no text", "audio": short, "duration": 1.0, "text": " "},
        {"id": "nan", "audio": short, "duration": float("nan"), "text": "a"},
        {"id": "missing", "audio": short.parent / "absent.wav", "duration": 1.0, "text": "a"},
        {"id": "broken", "audio": short.parent / "noise.wav", "duration": 1.0, "text": "a"},
        {"id": "longer", "audio": short, "duration": 4.0, "text": "a"},
        {"id": "too short", "audio": np.zeros(799, np.float32), "text": "a"},
    ]
    mixed = [*examples[:2], *bad[:3], examples[2], *bad[3:], *examples[3:]]
    return mixed, [item["id"] for item in bad]


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_what_is_set_aside_is_the_same_on_all_ranks_and_the_rest_goes_on(batches_of, wav, examples, cp, layout):
    items, bad = broken_mix(wav, examples)
    batches = batches_of(items, layout=layout, cp=cp, on_fault="set_aside")
    assert sorted(left.id for left in batches[0].set_aside) == sorted(bad)
    for batch in batches:
        assert batch.set_aside == batches[0].set_aside
        assert batch.ids == tuple(example.id for example in examples)
        assert batch.checksum == batches[0].checksum
        for left in batch.set_aside:
            assert left.reason.count("\n") == 4
            assert left.id in left.reason or "audio file" in left.reason
    sound = batches_of(examples, layout=layout, cp=cp)
    for batch, wanted in zip(batches, sound):
        for name in ("input_ids", "labels", "audio", "audio_source", "audio_destination", "cu_seqlens"):
            assert torch.equal(getattr(batch, name), getattr(wanted, name))


def test_without_the_policy_the_first_broken_example_is_raised(collator_of, rule_of, wav, examples):
    items, _ = broken_mix(wav, examples)
    with pytest.raises(ExampleError, match="example 'no text' has no text"):
        collator_of(rule_of())(items)


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_where_every_example_is_set_aside_a_legal_pack_of_zero_weight_is_left(batches_of, layout):
    batches = batches_of([{"id": "x", "text": ""}], layout=layout, cp=2, on_fault="set_aside")
    for batch in batches:
        assert batch.ids == ()
        assert [left.id for left in batch.set_aside] == ["x"]
        assert (batch.num_supervised, bool(batch.padding_mask.all())) == (0, True)
        batch.rule.check(batch.slots.total, slots=batch.slots.sizes.tolist(), batch=batch.slots.rows or None)


def test_a_clip_used_by_two_examples_is_heard_by_both(batches_of, make_clip):
    clip = make_clip(3, 4)
    items = [Example(id=name, turns=(Turn("user", (clip,)), Turn("assistant", (name,)))) for name in ("a", "b")]
    (batch,) = batches_of(items, on_fault="set_aside")
    assert batch.audio_lens.tolist() == [3200, 3200]
    assert torch.equal(batch.audio[0], batch.audio[1])


def test_trimmed_samples_are_counted(batches_of, wav):
    items = [{"id": str(n), "audio": wav(f"{n}.wav", 16_000 + n), "num_samples": 16_000, "text": "a"} for n in (0, 30, 800)]
    (batch,) = batches_of(items)
    assert batch.trimmed_samples == 830
    assert batch.audio_lens.tolist() == [16_000] * 3
    with pytest.raises(AudioError, match="is not as long as its manifest says"):
        batches_of(items, tolerance_samples=799)


# ---- checksum


def test_the_checksum_is_equal_on_all_peers_of_a_pack_and_not_for_two_texts_of_one_id(collator_of, rule_of, examples):
    ranks = [{"cp": 2, "tp": 2, "cp_rank": c, "tp_rank": t} for c in range(2) for t in range(2)]
    made = [collator_of(rule_of(**rank)) for rank in ranks]
    assert len({collator(examples).checksum for collator in made}) == 1
    peers = [[*examples[:6], Example(id="short", turns=(*examples[6].turns[:1], Turn("assistant", (text,))))] for text in "zq"]
    assert made[0](peers[0]).checksum == made[3](examples).checksum
    assert made[0](peers[1]).checksum != made[3](examples).checksum


def test_the_checksum_differs_where_only_what_is_learned_differs(bare, docs):
    learned, asked = docs("1 2 9")[0], Example(id="0", turns=(Turn("user", ("1 2",)), Turn("assistant", ("9",))))
    one, other = (bare(align("block"))([example]) for example in (learned, asked))
    assert torch.equal(one.input_ids, other.input_ids)
    assert one.checksum != other.checksum


# ---- static packs


@pytest.mark.parametrize("cp", [1, 2])
def test_static_packs_have_one_shape_and_one_max_seqlen(batches_of, examples, cp):
    seen = set()
    for items in ([], examples[:1], examples[2:4], examples):
        for batch in batches_of(items, cp=cp, static=True, budget=520, max_sequences=7, frame_budget=90):
            tokens = 512 // cp
            shapes = {tuple(getattr(batch, name).shape) for name in ("input_ids", "labels", "position_ids", "seq_idx")}
            assert shapes == {(tokens,)}
            assert batch.cu_seqlens.shape == (7 + 2,)
            used = len(batch.slots.offsets)
            assert batch.cu_seqlens[:used].tolist() == batch.slots.offsets.tolist()
            assert set(batch.cu_seqlens[used - 1 :].tolist()) == {512}
            assert batch.max_seqlen >= batch.slots.longest
            seen.add((batch.max_seqlen, type(batch.max_seqlen)))
    assert seen == {(512, int)}


def test_a_static_pack_that_is_full_to_the_last_token_repeats_its_last_offset_once_more(bare, docs):
    batch = bare(align("block"), static=True, budget=16, max_sequences=2)(docs("1 " * 9, "2 " * 7))
    assert batch.cu_seqlens.tolist() == [0, 9, 16, 16]


def test_a_static_pack_does_not_take_more_sequences_than_its_offsets(bare, docs, examples):
    collator = bare(align("block"), static=True, budget=64, max_sequences=2, over_budget="set_aside")
    batch = collator(docs("1", "2", "3"))
    assert [left.id for left in batch.set_aside] == ["2"]
    assert batch.cu_seqlens.tolist() == [0, 1, 2, 64]


@pytest.mark.parametrize(
    ("options", "layout", "got"),
    [
        ({"max_sequences": 4}, "thd", "budget=None, max_sequences=4, layout 'thd'"),
        ({"budget": 64}, "thd", "budget=64, max_sequences=None, layout 'thd'"),
        ({"budget": 64, "max_sequences": 4}, "bshd", "budget=64, max_sequences=4, layout 'bshd'"),
    ],
)
def test_static_without_its_bounds_is_refused(bare, lines_of, options, layout, got):
    with pytest.raises(ConfigError) as caught:
        bare(align("block", layout=layout), static=True, **options)
    assert lines_of(caught.value) == {
        "what": "packs cannot be static",
        "got": got,
        "expected": "a budget, max_sequences, and layout 'thd'",
        "because": "a constant shape needs a constant number of tokens and of offsets",
        "fix": "give both bounds, e.g. budget=8192, max_sequences=64",
    }


@pytest.mark.parametrize("total", [2**31 - 1, 2**31])
def test_offsets_that_would_wrap_in_int32_are_refused(lines_of, total):
    slots = Slots(lengths=np.array([total]), offsets=np.array([0, total]), sequences=1, rows=0)
    if total < 2**31:
        assert cu_seqlens(slots, 2).tolist() == [0, total]
        return
    with pytest.raises(BudgetError) as caught:
        cu_seqlens(slots, 2)
    assert lines_of(caught.value) == {
        "what": "the offsets of the pack do not fit their type",
        "got": f"{2**31} tokens",
        "expected": f"less than {2**31}",
        "because": "attention kernels take int32 offsets, and one that wraps reads another sequence's memory",
        "fix": "lower the budget",
    }


# ---- drop-in use


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_the_embedded_corpus_is_taken_as_a_cutset_and_as_a_list_of_cuts(layout):
    cuts = corpus().subset(first=6)
    collator = Collator(measure=Measure(frames=AudioFrames.fastconformer()), rule=align("block", layout=layout))
    batch, same = collator(cuts), collator(list(cuts))
    assert isinstance(cuts, CutSet)
    assert batch.ids == same.ids == tuple(cut.id for cut in cuts)
    assert torch.equal(batch.input_ids, same.input_ids)
    assert torch.equal(batch.audio, same.audio)
    assert batch.audio_lens.tolist() == [cut.num_samples for cut in cuts]
    frames = AudioFrames.fastconformer()
    assert len(batch.audio_source) == sum(frames.encoder_frames(cut.num_samples) for cut in cuts)


def test_a_pickled_collator_makes_the_same_batches(collator_of, rule_of, examples):
    collator = collator_of(
        rule_of(cp=2, cp_rank=1), budget=1024, over_budget="set_aside", on_fault="set_aside", max_sequences=9
    )
    copy = pickle.loads(pickle.dumps(collator))
    assert vars(copy) == vars(collator)
    assert copy(examples).checksum == collator(examples).checksum


def test_a_spawned_worker_sends_whole_batches_and_whole_errors(collator_of, rule_of, lines_of, wav, examples):
    items = [*examples, {"id": "lost", "audio": wav("x.wav", 8_000).parent / "lost.wav", "duration": 1.0, "text": "a"}]
    collator = collator_of(rule_of(cp=2, cp_rank=1))
    loader = DataLoader(items, batch_size=7, collate_fn=collator, num_workers=1, multiprocessing_context="spawn")
    batches = iter(loader)
    got, wanted = next(batches), collator(examples)
    for name in ("input_ids", "labels", "position_ids", "seq_idx", "padding_mask", "cu_seqlens", "audio", "audio_destination"):
        assert torch.equal(getattr(got, name), getattr(wanted, name))
    assert (got.ids, got.rule, got.checksum, got.max_seqlen) == (wanted.ids, wanted.rule, wanted.checksum, wanted.max_seqlen)
    assert torch.equal(got.as_thd().labels, wanted.labels)
    with pytest.raises(AudioError) as caught:
        next(batches)
    message = str(caught.value)
    assert "Caught AudioError in DataLoader worker" in message
    for line in (
        "lost.wav' is missing",
        "  got:      no file of this name",
        "  because:  a clip without",
        "  fix:      correct",
    ):
        assert line in message


# ---- configuration


@pytest.mark.parametrize("name", ["over_budget", "on_fault"])
@pytest.mark.parametrize("policy", ["drop", "", None, "Error"])
def test_an_unknown_policy_is_refused(collator_of, rule_of, lines_of, name, policy):
    with pytest.raises(ConfigError) as caught:
        collator_of(rule_of(), **{name: policy})
    assert lines_of(caught.value) == {
        "what": f"{name} is not a policy",
        "got": repr(policy),
        "expected": "'error' or 'set_aside'",
        "because": "what cannot be used is either refused or counted and named; it is never lost silently",
        "fix": f"choose {name}='error' or {name}='set_aside'",
    }


@pytest.mark.parametrize("most", [0, -1, 5.0, "5", True, []])
def test_no_room_for_a_sequence_is_refused(collator_of, rule_of, lines_of, most):
    with pytest.raises(ConfigError) as caught:
        collator_of(rule_of(), max_sequences=most)
    assert lines_of(caught.value) == {
        "what": "packs have no room for a sequence",
        "got": f"max_sequences={most!r}",
        "expected": "a whole number of at least 1, or None for no bound",
        "because": "every example would be over it; filler is not counted",
        "fix": "leave out max_sequences, or give the most sequences that a pack may hold",
    }


def test_the_tolerance_is_one_hop_of_the_encoder_unless_given(rule_of):
    measure = Measure(frames=AudioFrames.fastconformer())
    assert Collator(measure=measure, rule=rule_of()).tolerance_samples == 160
    assert Collator(measure=measure, rule=rule_of(), tolerance_samples=0).tolerance_samples == 0


def test_a_clip_of_another_rate_is_resampled_only_where_asked(batches_of, wav):
    wave = 0.3 * np.sin(2 * np.pi * 200 * np.arange(8_000) / 8_000)
    items = [{"id": "phone", "audio": wav("phone.wav", wave, 8_000), "text": "a"}]
    with pytest.raises(AudioError, match="another sample rate than the encoder"):
        batches_of(items)
    (batch,) = batches_of(items, resample=True)
    assert batch.audio_lens.tolist() == [16_000]
    assert len(batch.audio_source) == 20
    expected = 0.3 * np.sin(2 * np.pi * 200 * np.arange(16_000) / 16_000)
    np.testing.assert_allclose(batch.audio[0][500:-500], expected[500:-500], atol=5e-3)


def test_stereo_is_averaged_over_its_channels_and_counts_like_mono(batches_of, wav):
    left, right = np.full(16_000, 0.5), np.full(16_000, -0.25)
    planar = np.stack([left, right]).astype(np.float32)
    items = [
        {"id": "planar", "audio": planar, "num_samples": 16_000, "text": "a"},
        {"id": "interleaved", "audio": planar.T, "num_samples": 16_000, "text": "a"},
        {"id": "file", "audio": wav("stereo.wav", planar.T), "text": "a"},
        {"id": "one", "audio": wav("stereo.wav", planar.T), "text": "a", "channel": 1},
        {"id": "mono", "audio": planar[0], "text": "a"},
    ]
    (batch,) = batches_of(items)
    assert [round(float(wave.mean()), 3) for wave in batch.audio] == [0.125, 0.125, 0.125, -0.25, 0.5]
    assert batch.audio_lens.tolist() == [16_000] * 5
    assert set(batch.slots.lengths[:5]) == {batch.slots.lengths[0]}


def test_clips_of_one_batch_come_padded_with_zeros_on_the_right(batches_of, examples):
    (batch,) = batches_of(examples)
    for wave, length in zip(batch.audio, batch.audio_lens):
        assert (wave[:length] > 0).all()
        assert not wave[length:].any()


def test_a_clip_object_of_the_users_is_left_as_it_was(batches_of):
    wave = np.ones(1600, np.float32)
    clip = Clip(source=wave, num_samples=1600, sample_rate=16_000)
    batches_of([Example(id="x", turns=(Turn("user", (clip,)), Turn("assistant", ("a",))))])
    wave[0] = 2.0
    assert wave.flags.writeable


def test_a_recipes_name_is_no_rule_for_a_collator_or_a_sampler():
    measure = Measure(frames=None)
    with pytest.raises(RuleError, match="what was given as the rule is none"):
        Collator(measure=measure, rule="block")
    with pytest.raises(RuleError, match="what was given as the rule is none"):
        PackingSampler([], measure=measure, rule="block", budget=64)
