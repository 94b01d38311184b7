"""Adapters: what each consumer is told, that nothing is copied on the way, and packed equals one by one where a CPU can."""

import dataclasses
import inspect
import sys
import types
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from packfp8.data import Collator, Example, Turn
from packfp8.data.consumers import CONSUMERS, LOSS, REPLICATED, SEQUENCE_SHAPED
from packfp8.data.consumers.attention import causal_document_mask
from packfp8.errors import ConfigError
from packfp8.lengths import Measure
from packfp8.rule import Topology, align

TEXTS = ("a", "good morning to you", "no", "what a long and winding road this sentence takes", "yes")
SLAB_IS_ENOUGH = ("te", "te_real", "automodel", "megatron", "plain")


def make(layout="thd", topology=None, **collator):
    examples = [Example(id=f"s{n}", turns=(Turn("assistant", (text,)),)) for n, text in enumerate(TEXTS)]
    rule = align("block", topology or Topology(), layout=layout)
    return Collator(measure=Measure(frames=None), rule=rule, **collator)(examples)


@pytest.fixture
def megatron_core(monkeypatch):
    """megatron_core(extra=()) puts a stand-in for megatron-core in place, with `extra` fields; tests/peers has the real one."""

    def megatron_core(extra=()):
        offsets = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        names = ("qkv_format", *offsets, "max_seqlen_q", "max_seqlen_kv", "local_cp_size", "cp_group", *extra)
        module = types.ModuleType("megatron.core.packed_seq_params")
        module.PackedSeqParams = dataclasses.make_dataclass("PackedSeqParams", [(n, object, None) for n in names])
        for name in ("megatron", "megatron.core"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", module)

    return megatron_core


def lines(caught):
    return str(caught.value).splitlines()


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("consumer", sorted(set(CONSUMERS) - {"te_real", "varlen"}))
def test_sequence_shaped_keys_have_one_value_a_token_and_all_others_are_declared_replicated(consumer, layout, megatron_core):
    megatron_core()
    batch = make(layout)
    given = batch.kwargs(consumer)
    assert given
    for name, value in given.items():
        assert (name in SEQUENCE_SHAPED) != (name in REPLICATED), name
        if name in SEQUENCE_SHAPED:
            assert value.numel() == batch.tokens, name


def test_each_declared_key_is_given_by_some_consumer(megatron_core):
    megatron_core()
    cp = Topology(cp=2, cp_rank=1)
    given = {
        name
        for consumer in CONSUMERS
        for batch in (make(), make(topology=cp))
        if batch.rule.topology.cp == 1 or consumer in SLAB_IS_ENOUGH
        for name in batch.kwargs(consumer)
    }
    assert given == SEQUENCE_SHAPED | REPLICATED
    assert LOSS <= SEQUENCE_SHAPED


@pytest.mark.parametrize("consumer", SLAB_IS_ENOUGH)
def test_under_cp_offsets_stay_those_of_the_whole_pack_and_token_keys_are_the_slabs(consumer, megatron_core):
    megatron_core()
    whole, batch = make(topology=Topology(cp=2)), make(topology=Topology(cp=2, cp_rank=1))
    for name, value in batch.kwargs(consumer).items():
        if name in SEQUENCE_SHAPED:
            assert value.numel() * 2 == batch.slots.total
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, whole.kwargs(consumer)[name])
            assert value[-1] in (batch.slots.total, int(batch.slots.lengths.sum()))


@pytest.mark.parametrize("consumer", sorted(set(CONSUMERS) - set(SLAB_IS_ENOUGH)))
def test_a_consumer_that_sees_one_rank_alone_refuses_a_slab(consumer):
    with pytest.raises(ConfigError) as caught:
        make(topology=Topology(cp=2)).kwargs(consumer)
    what, got, expected, because, fix = lines(caught)
    assert consumer in what
    assert "cp 2" in got
    assert "cp 1" in expected
    assert "two chunks" in because
    assert "'te'" in fix


@pytest.mark.parametrize("consumer", sorted(set(CONSUMERS) - {"te"}))
def test_only_transformer_engine_takes_the_sequence_first(consumer):
    batch = make("bshd", Topology(tp=2, sp=True)).as_sbhd()
    with pytest.raises(ConfigError) as caught:
        batch.kwargs(consumer)
    assert "sbhd" in lines(caught)[1]
    assert "as_thd()" in lines(caught)[4]


def test_tensors_are_handed_over_and_not_copied(megatron_core):
    megatron_core()
    batch = make()
    own = {getattr(batch, field.name).data_ptr() for field in dataclasses.fields(batch) if field.name in vars_of(batch)}
    for consumer in set(CONSUMERS) - {"te_real", "megatron"}:
        for name, value in batch.kwargs(consumer).items():
            if isinstance(value, torch.Tensor):
                assert value.data_ptr() in own, (consumer, name)


def vars_of(batch):
    return {f.name for f in dataclasses.fields(batch) if isinstance(getattr(batch, f.name), torch.Tensor)}


def test_an_unknown_consumer_is_named_with_those_that_are_known():
    with pytest.raises(ConfigError) as caught:
        make().kwargs("fla")
    what, got, expected, because, fix = lines(caught)
    assert "not known" in what
    assert "'fla'" in got
    assert all(name in expected for name in CONSUMERS)
    assert "own way" in because
    assert "cu_seqlens" in fix


def test_transformer_engine_gets_one_padded_tensor_and_a_python_int():
    batch = make()
    given = batch.kwargs("te")
    assert given["cu_seqlens_q"] is batch.cu_seqlens is given["cu_seqlens_kv"]
    assert type(given["max_seqlen_q"]) is int
    assert not {"cu_seqlens_q_padded", "pad_between_seqs"} & set(given)


def test_transformer_engine_never_gets_a_padded_batch_as_bshd_under_sp():
    batch = make("bshd", Topology(tp=2, sp=True))
    with pytest.raises(ConfigError) as caught:
        batch.kwargs("te")
    what, got, expected, because, fix = lines(caught)
    assert "bshd under SP" in what
    assert "tp 2" in got
    assert "sequence first" in expected
    assert "silently" in because
    assert "as_sbhd" in fix
    assert batch.as_sbhd().kwargs("te") == {"qkv_format": "sbhd", "attn_mask_type": "causal"}
    assert batch.as_thd().kwargs("te")["qkv_format"] == "thd"


def test_a_padded_batch_is_causal_and_never_padding_causal():
    assert make("bshd", Topology(cp=2)).kwargs("te") == {"qkv_format": "bshd", "attn_mask_type": "causal"}


def test_real_and_padded_offsets_come_together_with_pad_between_seqs():
    batch = make()
    given = batch.kwargs("te_real")
    assert given["pad_between_seqs"] is True
    assert given["cu_seqlens_q_padded"] is batch.cu_seqlens
    real = given["cu_seqlens_q"]
    assert real.dtype == torch.int32
    assert real.diff().tolist() == batch.slots.lengths.tolist()
    assert (real.diff() <= batch.cu_seqlens.diff()).all()
    assert given["max_seqlen_q"] >= int(real.diff().max())
    with pytest.raises(ConfigError, match="real and padded offsets are of packed batches"):
        make("bshd").kwargs("te_real")


def test_real_offsets_of_a_static_pack_are_as_many_as_the_padded_and_repeat_the_last():
    batch = make(budget=512, static=True, max_sequences=9)
    assert batch.cu_seqlens_real.shape == batch.cu_seqlens.shape == (11,)
    assert batch.cu_seqlens_real[5:].tolist() == [int(batch.slots.lengths.sum())] * 6


def test_automodel_gets_the_singular_keys_and_no_padded_offsets():
    given = make().kwargs("automodel")
    assert set(given) == {"qkv_format", "cu_seqlens", "max_seqlen", "position_ids", "labels", "padding_mask"}
    assert make(topology=Topology(cp=2, cp_rank=1)).kwargs("automodel").items() >= {"cp_size": 2, "cp_rank": 1}.items()
    assert set(make("bshd").kwargs("automodel")) == {"position_ids", "labels", "padding_mask"}


def test_hugging_face_gets_no_mask_and_shifted_labels_under_both_names():
    batch = make()
    given = batch.kwargs("hf")
    assert "attention_mask" not in given
    assert given["use_cache"] is False  # with a cache its masks take the row for one sequence
    assert given["labels"] is given["shift_labels"]
    assert given["labels"].shape == given["position_ids"].shape == given["seq_idx"].shape == (1, batch.tokens)
    assert given["cu_seq_lens_q"].dtype == torch.int32
    assert type(given["max_length_q"]) is int


def test_mamba_gets_the_ids_that_padded_offsets_mean_filler_its_own():
    batch = make()
    seq_idx = batch.kwargs("ssm")["seq_idx"]
    offsets = batch.cu_seqlens.tolist()
    assert seq_idx.dtype == torch.int32
    assert seq_idx[0].tolist() == [n for n, (a, b) in enumerate(pairwise(offsets)) for _ in range(a, b)]
    assert len(offsets) - 1 == batch.slots.sequences + 1  # a filler is there, so that its own id is seen


def test_megatron_params_hold_padded_offsets_in_every_field_that_is_read(megatron_core):
    megatron_core()
    batch = make()
    given = batch.kwargs("megatron")
    params = given["packed_seq_params"]
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert getattr(params, name) is batch.cu_seqlens
    assert params.max_seqlen_q == batch.max_seqlen
    assert given["loss_mask"].sum() == batch.num_supervised
    assert given["attention_mask"] is None
    assert make("bshd").kwargs("megatron")["packed_seq_params"] is None


def test_megatron_params_hold_total_tokens_and_seq_idx_where_the_version_has_them(megatron_core):
    megatron_core(extra=("total_tokens", "seq_idx"))
    batch = make()
    params = batch.kwargs("megatron")["packed_seq_params"]
    assert params.total_tokens == batch.slots.total
    assert params.seq_idx[0].tolist() == batch.seq_idx.tolist()
    slab = make(topology=Topology(cp=2))
    params = slab.kwargs("megatron")["packed_seq_params"]
    assert params.total_tokens == slab.slots.total == 2 * slab.tokens
    assert params.seq_idx is None  # a slab's ids are not those of the pack that Mamba sees


def test_without_megatron_the_consumer_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(ConfigError) as caught:
        make().kwargs("megatron")
    what, got, expected, because, fix = lines(caught)
    assert "needs megatron-core" in what
    assert "Error" in got
    assert "packed_seq_params" in expected
    assert "PackedSeqParams" in because
    assert "pip install" in fix


def test_varlen_arguments_are_those_of_the_installed_torch_and_give_the_shape_of_the_query():
    batch = make()
    given = batch.kwargs("varlen")
    assert set(given) <= set(inspect.signature(varlen_attn).parameters)
    assert given["window_size"] == (-1, 0)
    q = torch.empty(batch.tokens, 2, 16, dtype=torch.bfloat16, device="meta")
    on_meta = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    assert varlen_attn(q, q, q, **on_meta).shape == q.shape  # a CPU has no kernel for it; tests/gpu compares the numbers
    with pytest.raises(ConfigError, match="varlen_attn takes packed tokens"):
        make("bshd").kwargs("varlen")
    assert make("bshd").as_thd().kwargs("varlen")["max_q"] == make("bshd").slots.longest


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_packed_equals_one_by_one(layout):
    batch = make(layout)
    rows, tokens = (1, batch.tokens) if layout == "thd" else batch.input_ids.shape
    torch.manual_seed(0)
    q, k, v = (torch.randn(rows, 2, tokens, 8) for _ in range(3))
    mask_mod = causal_document_mask(**batch.kwargs("flex"))
    mask = create_block_mask(mask_mod, B=rows, H=None, Q_LEN=tokens, KV_LEN=tokens, device="cpu")
    packed = flex_attention(q, k, v, block_mask=mask)
    flat = [x.transpose(1, 2).reshape(*batch.input_ids.shape, 2, 8) for x in (q, k, v, packed)]
    each = [batch.unpack(x) for x in flat]
    for name in batch.ids:
        alone, got = [x[name].transpose(0, 1) for x in each[:3]], each[3][name]
        expected = torch.nn.functional.scaled_dot_product_attention(*alone, is_causal=True).transpose(0, 1)
        torch.testing.assert_close(got, expected)


def test_the_documentation_has_a_row_for_each_consumer():
    text = (Path(__file__).parents[2] / "notebooks" / "guides" / "consumers.md").read_text()
    told = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert set(CONSUMERS) - {"plain"} == told
