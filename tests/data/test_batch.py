"""PackedBatch: every field as documented, unpacked again, handed over, moved and pickled."""

import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from packfp8.data import Example, PackedBatch, Turn
from packfp8.data.batch import AUDIO, REPLICATED, SEQUENCE_SHAPED
from packfp8.errors import ConfigError, ExampleError

LAYOUTS = ["thd", "bshd"]
CPS = [1, 2, 4]
FRAME = 800


def encoded_rows(batch):
    """What an encoder of one frame for every 800 samples gives: the mean of each frame, flattened `[clips * audio_frames]`."""
    clips = len(batch.audio)
    return batch.audio.reshape(clips, -1, FRAME).mean(-1).reshape(-1) if clips else torch.zeros(0)


def heard(batch):
    """The frame at each of the batch's tokens, shaped as they are; -1 where none stands."""
    flat = torch.full((batch.tokens,), -1.0)
    flat[batch.audio_destination] = encoded_rows(batch)[batch.audio_source]
    return flat.reshape(batch.input_ids.shape)


def expected_sequences(examples, measure):
    """Per example, walked by hand: ids, labels, position, the frame heard at each token."""
    expected = {}
    for example in examples:
        encoded = measure.encode(example)
        labels = [
            encoded.ids[n + 1] if n + 1 < len(encoded) and encoded.supervised[n + 1] else -100 for n in range(len(encoded))
        ]
        frames = np.full(len(encoded), -1.0)
        for clip, span in zip(example.clips, encoded.clips, strict=True):
            frames[span.start : span.start + span.encoder_frames] = clip.source[::FRAME]
        expected[example.id] = (encoded.ids.tolist(), labels, list(range(len(encoded))), frames.tolist())
    return expected


# ---- fields


@pytest.mark.parametrize("cp", CPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_field_has_its_type_and_shape(batches_of, examples, layout, cp):
    for batch in batches_of(examples, layout=layout, cp=cp, step=5):
        total, slots = batch.slots.total, len(batch.slots.lengths)
        tokens = (total // cp,) if layout == "thd" else (len(examples), total // len(examples) // cp)
        clips, frames = len(batch.audio_lens), len(batch.audio_source)
        kinds = {
            "input_ids": (torch.int64, tokens),
            "labels": (torch.int64, tokens),
            "position_ids": (torch.int64, tokens),
            "seq_idx": (torch.int32, tokens),
            "padding_mask": (torch.bool, tokens),
            "cu_seqlens": (torch.int32, (slots + 1,)),
            "audio": (torch.float32, (clips, max(batch.audio_lens.tolist(), default=0))),
            "audio_lens": (torch.int64, (clips,)),
            "audio_source": (torch.int64, (frames,)),
            "audio_destination": (torch.int64, (frames,)),
        }
        tensors = {f.name for f in fields(batch) if isinstance(getattr(batch, f.name), torch.Tensor)}
        assert tensors == set(kinds) == {*SEQUENCE_SHAPED, *REPLICATED, *AUDIO} - {"audio_offsets"}
        for name, (dtype, shape) in kinds.items():
            tensor = getattr(batch, name)
            assert (name, tensor.dtype, tuple(tensor.shape)) == (name, dtype, shape)
            assert tensor.is_contiguous()
        for name in ("max_seqlen", "num_supervised", "step", "audio_frames", "trimmed_samples"):
            assert type(getattr(batch, name)) is int
        assert batch.step == 5
        assert batch.ids == tuple(example.id for example in examples)
        assert batch.max_seqlen == batch.slots.longest == max(np.diff(batch.cu_seqlens))
        assert batch.cu_seqlens.tolist() == batch.slots.offsets.tolist()
        assert batch.fingerprint == batch.rule.fingerprint
        assert batch.layout == batch.rule.layout == layout
        assert batch.tokens == total // cp
        assert (batch.set_aside, batch.trimmed_samples) == ((), 0)


@pytest.mark.parametrize("cp", CPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_is_the_one_of_its_example(batches_of, examples, measure, layout, cp):
    batches = batches_of(examples, layout=layout, cp=cp)
    unpacked = [
        batches[0].unpack([get(batch) for batch in batches])
        for get in (lambda b: b.input_ids, lambda b: b.labels, lambda b: b.position_ids, heard)
    ]
    for name, wanted in expected_sequences(examples, measure).items():
        for values, expected in zip(unpacked, wanted, strict=True):
            assert values[name].tolist() == expected


@pytest.mark.parametrize("cp", CPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pads_have_no_label_no_frame_and_a_valid_id(batches_of, examples, layout, cp):
    batches = batches_of(examples, layout=layout, cp=cp)
    for batch in batches:
        assert (batch.labels[batch.padding_mask] == -100).all()
        assert (batch.input_ids[batch.padding_mask] == 0).all()
        assert (heard(batch)[batch.padding_mask] == -1).all()
    pads = sum(int(batch.padding_mask.sum()) for batch in batches)
    assert pads == batches[0].slots.total - int(batches[0].slots.lengths.sum())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_holds_only_the_clips_of_which_it_has_a_frame(batches_of, examples, layout):
    batches = batches_of(examples, layout=layout, cp=4)
    assert any(len(batch.audio) < 7 for batch in batches)
    for batch in batches:
        frames = heard(batch)
        assert sorted({int(value) for value in frames[frames >= 0]}) == [int(wave[0]) for wave in batch.audio]
        assert batch.audio_lens.tolist() == [int((wave > 0).sum()) for wave in batch.audio]
        assert batch.audio_frames == max(batch.audio_lens.tolist(), default=0) // FRAME
    assert sum(len(batch.audio_source) for batch in batches) == 7 + 5 + 9 + 3 + 1 + 40 + 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_alone_has_audio_of_no_clips(batches_of, examples, layout):
    (batch,) = batches_of([examples[2], examples[3]], layout=layout)
    assert batch.audio.shape == (0, 0)
    assert batch.audio_lens.shape == batch.audio_source.shape == batch.audio_destination.shape == (0,)
    assert batch.audio_frames == 0


def test_each_batch_has_tensors_of_its_own(collator_of, rule_of, examples):
    collator = collator_of(rule_of())
    first, second = collator(examples), collator(examples)
    tensors = [value for batch in (first, second) for f in fields(batch) if torch.is_tensor(value := getattr(batch, f.name))]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors) == 2 * 10
    first.labels.fill_(7)
    assert second.labels.max() != 7


# ---- unpack


@pytest.mark.parametrize("cp", CPS)
@pytest.mark.parametrize("layout", ["thd", "bshd", "sbhd", "bshd as thd"])
def test_unpack_is_the_inverse_of_packing(batches_of, examples, layout, cp):
    batches = batches_of(examples, layout="thd" if layout == "thd" else "bshd", cp=cp)
    change = {"sbhd": PackedBatch.as_sbhd, "bshd as thd": PackedBatch.as_thd}.get(layout, lambda batch: batch)
    batches = [change(batch) for batch in batches]
    slots = batches[0].slots
    # a value that is different for every real token of the pack, as a vector of two
    values = [batch.seq_idx * 1000 + batch.position_ids for batch in batches]
    unpacked = batches[0].unpack([torch.stack((value, -value), dim=-1) for value in values])
    assert list(unpacked) == [example.id for example in examples]
    for number, (name, length) in enumerate(zip(unpacked, slots.lengths)):
        expected = number * 1000 + torch.arange(length)
        assert unpacked[name].tolist() == torch.stack((expected, -expected), dim=-1).tolist()
    one = values[0] if cp == 1 else values
    assert batches[-1].unpack(one)["long"].tolist() == unpacked["long"][:, 0].tolist()


def test_unpack_carries_gradients(batches_of, examples):
    batches = batches_of(examples, cp=2)
    slabs = [torch.zeros(batch.input_ids.shape, requires_grad=True) for batch in batches]
    sum(values.sum() for values in batches[0].unpack(slabs).values()).backward()
    for batch, slab in zip(batches, slabs):
        assert torch.equal(slab.grad, (~batch.padding_mask).float())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cp", CPS)
def test_a_pack_of_filler_unpacks_to_nothing(batches_of, layout, cp):
    batches = batches_of([], layout=layout, cp=cp)
    assert batches[0].unpack([batch.input_ids for batch in batches]) == {}


@pytest.mark.parametrize(
    ("layout", "cp", "tensors"),
    [
        ("thd", 2, lambda batch: batch.input_ids),
        ("thd", 1, lambda batch: [batch.input_ids] * 2),
        ("thd", 1, lambda batch: batch.input_ids[:-1]),
        ("thd", 1, lambda batch: []),
        ("bshd", 1, lambda batch: batch.input_ids.reshape(-1)),
        ("bshd", 1, lambda batch: batch.input_ids.T),
    ],
)
def test_what_is_not_shaped_as_the_pack_is_not_unpacked(batches_of, lines_of, examples, layout, cp, tensors):
    batch = batches_of(examples, layout=layout, cp=cp)[0]
    with pytest.raises(ConfigError) as caught:
        batch.unpack(tensors(batch))
    lines = lines_of(caught.value)
    given = tensors(batch)
    given = [given] if isinstance(given, torch.Tensor) else given
    assert lines["what"] == "what shall be unpacked does not match the pack"
    assert lines["got"] == f"{len(given)} tensors of shapes {[tuple(t.shape) for t in given]}"
    assert lines["expected"] == f"{cp} of shape {tuple(batch.input_ids.shape)} and then anything"
    assert "two chunks of every slot" in lines["because"]
    assert "in rank order" in lines["fix"]


def test_two_sequences_of_one_id_are_not_unpacked(batches_of, lines_of, examples):
    (batch,) = batches_of([examples[0], examples[3], examples[0]])
    assert batch.ids == ("one clip", "letter", "one clip")
    with pytest.raises(ExampleError) as caught:
        batch.unpack(batch.input_ids)
    assert lines_of(caught.value) == {
        "what": "two sequences of one pack have the same id",
        "got": "['one clip']",
        "expected": "ids that differ",
        "because": "one would hide the other",
        "fix": "make ids unique; lhotse's CutSet.repeat() does so unless preserve_id=True",
    }


# ---- the same pack in another order


@pytest.mark.parametrize("cp", CPS)
def test_a_padded_batch_as_thd_is_its_rows_one_after_another(batches_of, examples, cp):
    for batch in batches_of(examples, layout="bshd", cp=cp):
        packed = batch.as_thd()
        assert packed.layout == "thd"
        for name in SEQUENCE_SHAPED:
            assert torch.equal(getattr(packed, name), torch.cat(list(getattr(batch, name))))
        assert set(np.diff(packed.cu_seqlens)) == {packed.max_seqlen}
        assert torch.equal(heard(packed), heard(batch).reshape(-1))
        assert packed.as_thd() is packed


@pytest.mark.parametrize("cp", CPS)
def test_a_padded_batch_sequence_first_is_its_transpose_with_the_same_audio(batches_of, examples, cp):
    for batch in batches_of(examples, layout="bshd", cp=cp):
        turned = batch.as_sbhd()
        assert turned.layout == "sbhd"
        for name in SEQUENCE_SHAPED:
            assert torch.equal(getattr(turned, name), getattr(batch, name).T)
            assert getattr(turned, name).is_contiguous()
        assert torch.equal(heard(turned), heard(batch).T)
        assert turned.as_sbhd() is turned
        back = turned.as_thd()
        assert torch.equal(heard(back), heard(batch.as_thd()))
        assert torch.equal(back.labels, batch.labels.reshape(-1))
        assert turned.num_supervised == batch.num_supervised


def test_a_packed_batch_has_no_sequence_first(batches_of, lines_of, examples):
    (batch,) = batches_of(examples)
    with pytest.raises(ConfigError) as caught:
        batch.as_sbhd()
    assert lines_of(caught.value) == {
        "what": "a packed batch cannot be given sequence first",
        "got": "layout 'thd'",
        "expected": "layout 'bshd'",
        "because": "slots of different sizes are not columns of one array",
        "fix": "make the batch with align(..., layout='bshd')",
    }


# ---- hand-over


@pytest.mark.parametrize("static", [False, True])
def test_te_is_told_one_padded_cu_seqlens_and_a_python_int(batches_of, examples, static):
    for batch in batches_of(examples, cp=2, static=static, budget=1024, max_sequences=20, frame_budget=90):
        told = batch.kwargs("te")
        assert (told["qkv_format"], told["attn_mask_type"]) == ("thd", "padding_causal")
        assert told["cu_seqlens_q"] is told["cu_seqlens_kv"] is batch.cu_seqlens
        assert told["max_seqlen_q"] == told["max_seqlen_kv"] == batch.max_seqlen
        assert type(told["max_seqlen_q"]) is int
        assert not {"cu_seqlens_q_padded", "cu_seqlens_kv_padded", "pad_between_seqs"} & set(told)


@pytest.mark.parametrize("sp", [False, True])
def test_te_is_told_a_causal_mask_for_padded_batches(batches_of, examples, sp):
    (batch,) = batches_of(examples, layout="bshd", tp=2, sp=sp)
    if not sp:
        assert batch.kwargs("te") == {"qkv_format": "bshd", "attn_mask_type": "causal"}
    assert batch.as_sbhd().kwargs("te") == {"qkv_format": "sbhd", "attn_mask_type": "causal"}
    assert batch.as_thd().kwargs("te")["qkv_format"] == "thd"
    assert batch.as_thd().kwargs("te")["cu_seqlens_q"].tolist() == batch.slots.offsets.tolist()


def test_te_never_gets_bshd_under_sp(batches_of, lines_of, examples):
    (batch,) = batches_of(examples, layout="bshd", tp=2, sp=True)
    with pytest.raises(ConfigError) as caught:
        batch.kwargs("te")
    lines = lines_of(caught.value)
    assert lines["what"] == "a padded batch cannot reach Transformer Engine as bshd under SP"
    assert lines["got"] == "layout 'bshd', dp 1, cp 1, tp 2 with SP"
    assert lines["expected"] == "THD with equal slots, or sequence first"
    assert "TE gathers along the first dimension" in lines["because"]
    assert lines["fix"] == "batch.as_thd() or batch.as_sbhd()"


@pytest.mark.parametrize("consumer", ["TE", "flash", "", None])
def test_an_unknown_consumer_is_refused(batches_of, lines_of, examples, consumer):
    (batch,) = batches_of(examples)
    with pytest.raises(ConfigError) as caught:
        batch.kwargs(consumer)
    lines = lines_of(caught.value)
    assert lines["what"] == "the consumer of the batch is not known"
    assert lines["got"] == repr(consumer)
    assert lines["expected"].startswith("one of ")
    assert "in its own way" in lines["because"]
    assert "cu_seqlens" in lines["fix"]


# ---- transfer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_to_moves_every_tensor_and_keeps_the_numbers(batches_of, examples, layout):
    (batch,) = batches_of(examples, layout=layout)
    moved = batch.to("meta", non_blocking=True)
    for field in fields(batch):
        before, after = getattr(batch, field.name), getattr(moved, field.name)
        if isinstance(before, torch.Tensor):
            assert (after.device.type, after.dtype, after.shape) == ("meta", before.dtype, before.shape)
            assert before.device.type == "cpu"
        else:
            assert after is before
    assert torch.equal(batch.to("cpu").input_ids, batch.input_ids)


def test_pin_memory_pins_every_tensor_and_keeps_type_and_numbers(batches_of, examples, monkeypatch):
    (batch,) = batches_of(examples)
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *device: pinned.append(device) or tensor.clone())
    copy = batch.pin_memory()
    assert type(copy) is PackedBatch
    assert pinned == [()] * 10
    assert (copy.max_seqlen, copy.ids) == (batch.max_seqlen, batch.ids)
    batch.pin_memory("cuda")
    assert pinned[10:] == [("cuda",)] * 10


def test_the_pinning_thread_of_a_dataloader_knows_the_batch(batches_of, examples, monkeypatch):
    from torch.utils.data._utils.pin_memory import pin_memory

    (batch,) = batches_of(examples)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *device: tensor + 0)
    pinned = pin_memory(batch)
    assert type(pinned) is PackedBatch
    assert pinned.labels is not batch.labels
    assert torch.equal(pinned.labels, batch.labels)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pickle_round_trip_changes_nothing(batches_of, examples, layout):
    (batch,) = batches_of(examples, layout=layout)
    copy = pickle.loads(pickle.dumps(batch))
    for field in fields(batch):
        before, after = getattr(batch, field.name), getattr(copy, field.name)
        if isinstance(before, torch.Tensor):
            assert torch.equal(before, after)
            assert before.dtype == after.dtype
        elif field.name == "slots":
            assert (after.lengths.tolist(), after.offsets.tolist()) == (before.lengths.tolist(), before.offsets.tolist())
        else:
            assert after == before
    assert copy.unpack(copy.input_ids).keys() == batch.unpack(batch.input_ids).keys()


def test_a_batch_cannot_be_changed_by_accident(batches_of, examples):
    (batch,) = batches_of(examples)
    with pytest.raises(AttributeError):
        batch.labels = None
    with pytest.raises(ValueError, match="read-only"):
        batch.slots.lengths[0] = 1
    assert replace(batch, step=3).step == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_stands_in_one_sequence_changes_nothing_in_another(batches_of, examples, layout):
    other = Example(id="letter", turns=(Turn("assistant", ("b",)),))
    (before,), (after,) = (batches_of([*examples[:3], letter, *examples[4:]], layout=layout) for letter in (examples[3], other))
    for name in ("input_ids", "labels"):
        old, new = before.unpack(getattr(before, name)), after.unpack(getattr(after, name))
        assert {key for key in old if not torch.equal(old[key], new[key])} == {"letter"}
    assert torch.equal(before.audio, after.audio)
