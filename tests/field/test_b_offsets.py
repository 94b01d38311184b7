"""B. Offsets, positions, masks and longest lengths: what attention is told of a pack."""

import pickle
import warnings
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from packfp8 import BudgetError, ConfigError, StreamPacker, Topology, align
from packfp8.data import Collator
from packfp8.data.consumers import SEQUENCE_SHAPED
from packfp8.layout import place
from packfp8.model.indexing import widest_row
from packfp8.report import report

OFFSETS = ("te", "te_real", "automodel", "hf", "varlen")  # consumers that take offsets, and can be told without their library


def test_the_number_of_offsets_is_chosen_and_what_exceeds_it_opens_a_new_pack(collate, docs):
    """Thousands of placeholders slow rotary embeddings, and more documents than a kernel's cap corrupt data silently.

    65 one-token documents and a cap of 64; 3 documents and room for 4,096. NVIDIA/TransformerEngine#2599; google/grain#1000.
    """
    packer = StreamPacker(4096, max_sequences=64)
    for key in range(65):
        packer.push(key, 1)
    packer.flush()
    packs = list(iter(packer.pop, None))
    assert [len(pack) for pack in packs] == [64, 1]
    static = {"static": True, "budget": 8192, "frame_budget": 2}
    (batch,) = collate(docs(*[1] * 64), max_sequences=64, **static)
    assert len(batch.cu_seqlens) == 66
    assert batch.slots.sequences == 64
    with pytest.raises(BudgetError, match="does not fit the pack"):
        collate(docs(*[1] * 65), max_sequences=64, **static)
    (batch,) = collate(docs(5, 6, 7), max_sequences=4096, **static)
    assert (len(batch.cu_seqlens), batch.slots.sequences) == (4098, 3)


@pytest.mark.parametrize("padded", [16, 512, 8192])
def test_the_tail_of_a_pack_is_one_segment_however_long(padded, collate, docs):
    """Positions of zero in the tail made each pad a sequence of its own. One document of 10. axolotl-ai-cloud/axolotl#2739."""
    (batch,) = collate(docs(10), budget=padded, static=True, max_sequences=1, frame_budget=2)
    assert batch.cu_seqlens.tolist() == [0, 10, padded]
    assert batch.seq_idx.unique_consecutive().tolist() == [0, 1]
    assert batch.position_ids[10:].tolist() == list(range(padded - 10))


@pytest.mark.parametrize(("lengths", "offsets"), [((3, 1, 4), [0, 3, 4, 8]), ((1, 1, 1), [0, 1, 2, 3]), ((1,), [0, 1])])
def test_documents_of_one_token_are_kept_apart_and_have_no_label(lengths, offsets, collate, docs):
    """A boundary looked for where positions fall is missed between two zeros. modelscope/ms-swift#9903, #9904."""
    (batch,) = collate(docs(*lengths), "bf16")
    assert batch.cu_seqlens.tolist() == offsets
    assert batch.num_supervised == sum(length - 1 for length in lengths)
    assert [n for n, label in enumerate(batch.labels.tolist()) if label == -100] == [end - 1 for end in offsets[1:]]


def test_offsets_are_told_and_never_found_in_positions(collate, docs, model_of):
    """Positions from 1, or with three axes, gave no segments or wrong ones, and illegal accesses. One document of 8.

    huggingface/transformers#39814, #44911, #47496; verl-project/verl#1270. Three axes are the model's to make: ours are `[T]`.
    """
    (batch,) = collate(docs(8, 5), "bf16")
    for positions in (batch.position_ids + 1, batch.position_ids.expand(3, -1)):
        moved = replace(batch, position_ids=positions)
        for consumer in OFFSETS:
            told, expected = moved.kwargs(consumer), batch.kwargs(consumer)
            for name in set(told) - SEQUENCE_SHAPED - {"qkv_format", "attn_mask_type"}:  # which are texts
                assert torch.equal(*map(torch.as_tensor, (told[name], expected[name])))
    model = model_of(batch.rule)
    shifted = replace(batch, position_ids=batch.position_ids + 1)  # a rotation knows distances only
    one, other = (model(b, global_supervised=11, return_logits=True).logits for b in (batch, shifted))
    torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9)


def test_packs_have_no_mask_of_ones_and_a_model_without_offsets_is_refused(collate, docs, model_of, lines_of):
    """A mask of ones made attention cross documents, and the loss still fell. Documents of 4 and 4.

    huggingface/transformers#46634.
    """
    (batch,) = collate(docs(4, 4), "bf16")
    for consumer in ("te", "te_real", "automodel", "hf", "varlen", "flex", "ssm", "plain"):
        assert batch.kwargs(consumer).get("attention_mask") is None
    model = model_of(batch.rule)
    model.llm.layouts = ("bshd",)
    with pytest.raises(ConfigError) as refusal:
        model(batch, global_supervised=6)
    assert "attend across the sequences" in lines_of(refusal.value)["what"]
    (alone,) = collate(docs(4), "bf16")
    assert torch.isfinite(model(alone, global_supervised=3).loss)  # one document needs no offsets


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_the_longest_length_is_a_python_int_on_every_way(layout, collate, docs):
    """A 0-d tensor keys kernel caches anew at every step, tens of seconds each, or breaks torch.compile.

    modelscope/ms-swift#9797, #9798; Dao-AILab/flash-attention#2507; huggingface/transformers#44973.
    """
    (batch,) = collate(docs(3, 9, 1), layout=layout)
    for way in (batch, batch.to("cpu"), pickle.loads(pickle.dumps(batch)), batch.as_thd()):
        assert type(way.max_seqlen) is int
        assert way.max_seqlen == max(way.slots.sizes)
    told = [name_value for consumer in OFFSETS for name_value in batch.as_thd().kwargs(consumer).items()]
    longest = {name: value for name, value in told if name.startswith("max_")}
    assert len(longest) == 7
    assert {type(value) for value in longest.values()} == {int}


class NothingAsked(TorchDispatchMode):
    """Fails where a tensor's value is asked for: on a GPU the host would wait for the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function)
        assert "nonzero" not in str(function)
        return function(*args, **(kwargs or {}))


def test_no_value_of_a_tensor_is_asked_for_between_items_and_loss(collate, docs, model_of):
    """The same reports: offsets, lengths and counts are known on the host. Forward and backward of three documents."""
    with pytest.raises(AssertionError), NothingAsked():
        torch.ones(3).max().item()
    (example,) = collate(docs(2))
    model = model_of(example.rule)
    with NothingAsked():
        (batch,) = collate(docs(3, 9, 1))
        for consumer in (*OFFSETS, "flex", "ssm", "plain"):
            batch.kwargs(consumer)
        model(batch, global_supervised=batch.num_supervised).loss.backward()


def test_static_packs_have_one_shape_and_a_report_counts_those_of_others(collate, docs, tmp_path):
    """Each new shape or int compiles anew, and ranks wait until the watchdog fires. 20 packs of 20 longest documents.

    NVIDIA-NeMo/Automodel#2532; Dao-AILab/quack#150.
    """
    items = [docs(100 + 3 * n, 17) for n in range(20)]

    def shapes(**options):
        batches = [collate(one, cp=2, **options)[0] for one in items]
        return {
            (
                b.tokens,
                b.cu_seqlens.shape,
                b.max_seqlen,
                *(getattr(b, f.name).shape for f in fields(b) if f.name in SEQUENCE_SHAPED),
            )
            for b in batches
        }

    assert len(shapes(static=True, budget=512, max_sequences=4, frame_budget=2)) == 1
    assert len(shapes()) > 10
    np.save(tmp_path / "lengths.npy", [100 + 3 * n for n in range(20)] * 2)
    assert report(tmp_path / "lengths.npy", budget=160, max_sequences=1).shapes == 20


@pytest.mark.parametrize(("rows", "wraps"), [(2**31, True), (2**31 - 32, False)])
def test_offsets_are_counted_in_64_bits_and_refused_before_they_wrap(rows, wraps, lines_of):
    """Offsets beyond 2^31 read other memory, silently. Told before anything of that size is made.

    Dao-AILab/flash-attention#2611, #1311.
    """
    rule = align("bf16", Topology(cp=8))
    lengths = [rows // 2, rows // 2]
    if wraps:
        with pytest.raises(BudgetError) as refusal:
            place(lengths, rule)
        lines = lines_of(refusal.value)
        assert str(rows) in lines["got"]
        assert "int32" in lines["because"]
    else:
        assert place(lengths, rule).offsets.tolist() == [0, rows // 2, rows]


@pytest.mark.parametrize(
    ("tokens", "values", "warned"), [(225_304, 9_728, True), (2**15, 2**16, True), (2**15, 2**16 - 1, False)]
)
def test_rows_that_int32_cannot_index_are_warned_of(tokens, values, warned, collate, docs, model_of, monkeypatch):
    """225,304 rows of 9,728 values are 2,191,757,312: a kernel that multiplies in int32 wraps. The same reports."""
    (batch,) = collate(docs(5), "bf16")
    model = model_of(batch.rule)
    assert model.row_values == widest_row(model.llm) == 48  # gate and up, 2 * 24; qkv has 32
    monkeypatch.setattr(model, "row_values", values)
    monkeypatch.setattr(type(batch), "tokens", tokens)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(batch, global_supervised=4)
    assert len(caught) == warned
    for warning in caught:
        assert f"{tokens} tokens" in str(warning.message)
        assert "lower the budget" in str(warning.message)


# More of the same kind: cp 3, one slot as the whole budget, one sequence as the most, bounds from both sides.


@pytest.mark.parametrize("length", [5, 6, 7, 11, 12, 13])
def test_a_static_pack_of_one_sequence_on_three_ranks_is_told_alike_at_every_length(length, collate, docs):
    """cp 3, at most one sequence, lengths around one slot of 6 and around two: offsets, real offsets and ranks agree."""
    batches = collate(docs(length), "bf16", cp=3, static=True, budget=18, max_sequences=1, frame_budget=2)
    slot = -(-length // 6) * 6
    for batch in batches:
        assert batch.cu_seqlens.tolist() == [0, slot, 18]
        assert batch.cu_seqlens_real.tolist() == [0, length, length]
        assert batch.max_seqlen == 18
    places = torch.cat([batch.position_ids[batch.seq_idx == 0] for batch in batches])
    assert sorted(places.tolist()) == list(range(slot))


@pytest.mark.parametrize("tokens", [15, 16, 17])
def test_a_budget_of_one_slot_is_told_with_and_without_filler(tokens, measure, docs):
    """The budget is one pack of 16: one token less leaves a filler of one, one more is refused and not cut."""
    collator = Collator(measure=measure, rule=align("block"), budget=16, static=True, max_sequences=2, frame_budget=2)
    if tokens > 16:
        with pytest.raises(BudgetError, match="does not fit the pack"):
            collator(docs(tokens))
    else:
        batch = collator(docs(tokens))
        assert batch.cu_seqlens.tolist() == [0, tokens, 16, 16]
        assert batch.kwargs("te_real")["pad_between_seqs"] is (tokens < 16)
