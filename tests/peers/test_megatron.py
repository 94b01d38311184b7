"""Megatron Core: a real PackedSeqParams, and what its rotary embeddings, Mamba mixer and loss make of our batch."""

import sys
from dataclasses import fields
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy


def params_of(batch):
    params = batch.kwargs("megatron")["packed_seq_params"]
    assert type(params) is PackedSeqParams
    return params


def test_params_are_the_installed_ones_with_padded_offsets_everywhere(texts, pack):
    batch = pack(texts)
    params = params_of(batch)
    for field in fields(params):
        if field.name.startswith("cu_seqlens"):
            assert getattr(params, field.name) is batch.cu_seqlens
    assert (params.qkv_format, params.max_seqlen_q, params.max_seqlen_kv) == ("thd", batch.max_seqlen, batch.max_seqlen)
    later = {"total_tokens", "seq_idx"} & {field.name for field in fields(params)}
    assert not later, f"this version has {later}: compare them with batch.slots.total and batch.seq_idx here"


def test_batch_side_tensors_are_one_row_and_a_padded_batch_keeps_its_rows(texts, pack):
    for layout in ("thd", "bshd"):
        batch = pack(texts, layout)
        given = batch.kwargs("megatron")
        for name in ("position_ids", "labels", "loss_mask"):
            assert given[name].shape == (batch.input_ids[None] if layout == "thd" else batch.input_ids).shape


@pytest.mark.parametrize("examples", ["texts", "spoken"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_its_rotary_embedding_turns_each_token_of_the_slab_by_our_position(cp, examples, pack, request):
    examples = request.getfixturevalue(examples)
    for rank in range(cp):
        batch = pack(examples, cp=cp, cp_rank=rank)
        params, group = params_of(batch), SimpleNamespace(size=lambda: cp, rank=lambda rank=rank: rank)
        t = torch.randn(batch.tokens, 2, 8, dtype=torch.float64)
        angles = angles_at(torch.arange(params.max_seqlen_q))
        theirs = _apply_rotary_pos_emb_thd(t, params.cu_seqlens_q_padded, angles[:, None, None], cp_group=group)
        torch.testing.assert_close(theirs, turned(t, angles_at(batch.position_ids)))


def test_where_the_longest_slot_is_the_whole_pack_its_positions_run_on_and_attention_is_the_same(texts, pack):
    """With as many angles as tokens it counts from the pack's start. Rotations are relative, so the scores do not move."""
    batch = pack(texts, budget=512, static=True, max_sequences=8, frame_budget=2)
    assert batch.max_seqlen == batch.slots.total
    t, group = torch.randn(512, 1, 8, dtype=torch.float64), SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    angles = angles_at(torch.arange(batch.max_seqlen))
    theirs = _apply_rotary_pos_emb_thd(t, params_of(batch).cu_seqlens_q_padded, angles[:, None, None], cp_group=group)
    ours = turned(t, angles_at(batch.position_ids))
    same_slot = batch.seq_idx[:, None] == batch.seq_idx
    assert not torch.allclose(theirs, ours)
    scores = [torch.einsum("qhd,khd->qk", x, x)[same_slot] for x in (theirs, ours)]
    torch.testing.assert_close(*scores)


def angles_at(positions):
    half = positions[:, None].double() * 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
    return torch.cat((half, half), dim=-1)


def turned(t, angles):
    left, right = t.chunk(2, dim=-1)
    return t * angles[:, None].cos() + torch.cat((-right, left), dim=-1) * angles[:, None].sin()


@pytest.fixture
def create_packed_seq_idx(monkeypatch):
    """Its mixer's own method. The module imports Triton for kernels of inference, which is not installed beside CPU wheels of
    torch: a stand-in lets it be imported, and none of it is called."""
    for name in ("triton", "triton.language"):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, MagicMock(__spec__=None))
    from megatron.core.ssm.mamba_mixer import MambaMixer

    return lambda *args: MambaMixer._create_packed_seq_idx(None, *args)


@pytest.mark.parametrize(
    "static", [{}, {"budget": 512, "static": True, "max_sequences": 8, "frame_budget": 2}], ids=["least", "static"]
)
def test_its_mamba_mixer_makes_our_seq_idx_of_our_offsets(static, texts, pack, create_packed_seq_idx):
    batch = pack(texts, **static)
    theirs = create_packed_seq_idx(params_of(batch), batch.slots.total)
    assert torch.equal(theirs, batch.kwargs("ssm")["seq_idx"])
    assert theirs.dtype == batch.kwargs("ssm")["seq_idx"].dtype


def test_under_cp_its_mamba_mixer_sees_the_whole_pack_through_the_offsets(texts, pack, create_packed_seq_idx):
    slab, whole = pack(texts, cp=2, cp_rank=1), pack(texts, cp=2)
    theirs = create_packed_seq_idx(params_of(slab), slab.slots.total)
    sizes = torch.from_numpy(whole.slots.sizes.copy())
    assert theirs[0].tolist() == torch.arange(len(sizes)).repeat_interleave(sizes).tolist()


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_its_loss_times_our_mask_is_the_sum_over_our_labels(layout, one_rank, texts, pack):
    batch = pack(texts, layout)
    given = batch.kwargs("megatron")
    logits = torch.randn(*given["labels"].shape, 272)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    each = vocab_parallel_cross_entropy(logits.transpose(0, 1).contiguous(), given["labels"].transpose(0, 1).contiguous())
    assert each.isfinite().all()  # a label of -100 is a finite number there, which the mask then takes out
    torch.testing.assert_close((each.transpose(0, 1) * given["loss_mask"]).sum(), expected)
