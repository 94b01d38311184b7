"""NeMo Automodel: its attention hand-over, its THD conversion, and one of its models, with our batch."""

from types import SimpleNamespace

import pytest
import torch
from nemo_automodel.components.attention.utils import postprocess_output_for_attn, preprocess_args_and_kwargs_for_attn
from nemo_automodel.components.distributed.thd_utils import process_input_for_thd
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.llama.model import LlamaForCausalLM
from transformers import LlamaConfig

from packfp8.data.consumers import LOSS


def handed(batch, **changes):
    """The keyword arguments that Automodel gives to Transformer Engine's attention, made by its own code."""
    q = torch.zeros(batch.tokens, 2, 8)
    return preprocess_args_and_kwargs_for_attn(q, q, q, None, "te", **{**batch.kwargs("automodel"), **changes})[3]


def test_its_attention_is_told_our_padded_offsets_and_nothing_that_changes_its_path(texts, pack):
    batch = pack(texts)
    given = handed(batch)
    assert given.pop("window_size") == (-1, 0)
    assert given == batch.kwargs("te")


@pytest.mark.parametrize("cp_rank", [0, 1])
def test_under_cp_too(cp_rank, texts, pack):
    batch = pack(texts, cp=2, cp_rank=cp_rank)
    assert {name: value for name, value in handed(batch).items() if name != "window_size"} == batch.kwargs("te")


def test_padded_offsets_beside_ours_would_turn_on_the_other_path(texts, pack):
    batch = pack(texts)
    assert handed(batch, cu_seqlens_padded=batch.cu_seqlens)["pad_between_seqs"] is True


def test_split_lengths_would_be_dropped(texts, pack):
    batch = pack(texts)
    split = {name: value for name, value in batch.kwargs("automodel").items() if name != "max_seqlen"}
    split |= {"max_seqlen_q": batch.max_seqlen, "max_seqlen_kv": batch.max_seqlen}
    q = torch.zeros(batch.tokens, 2, 8)
    assert "max_seqlen_q" not in preprocess_args_and_kwargs_for_attn(q, q, q, None, "te", **split)[3]


def converted(batch):
    """Our slots, with their padding, through Automodel's own conversion from rows to THD."""
    lengths = torch.from_numpy(batch.slots.lengths[: batch.slots.sequences].copy())
    sizes = torch.from_numpy(batch.slots.sizes[: batch.slots.sequences].copy())
    row = {"input_ids": batch.input_ids, "labels": batch.labels, "position_ids": batch.position_ids}
    row = {name: tensor[None] for name, tensor in row.items()}
    return process_input_for_thd({**row, "seq_lens": lengths[None], "seq_lens_padded": sizes[None]})


def test_its_thd_conversion_gives_our_tokens_labels_positions_and_padding(texts, pack):
    batch = pack(texts)
    theirs, ours = converted(batch), {**batch.kwargs("automodel"), "input_ids": batch.input_ids}
    for name in ("input_ids", "labels", "position_ids", "padding_mask"):
        assert torch.equal(theirs[name], ours[name]), name


def test_where_filler_is_their_last_sequence_swallows_it_and_ours_ends_before(texts, pack):
    batch = pack(texts)
    theirs = converted(batch)["cu_seqlens"]
    assert torch.equal(theirs[:-1], batch.cu_seqlens[: len(theirs) - 1])
    assert theirs[-1] == batch.cu_seqlens[-1] == batch.slots.total
    assert batch.slots.waste["filler"] > 0
    assert len(batch.cu_seqlens) == len(theirs) + 1


def test_where_slots_are_padded_theirs_takes_the_path_of_real_and_padded_offsets(spoken, pack):
    class Whole(SimpleNamespace):
        """A pack of cp 2 as one rank would see it: slots of 4, of which the first are not full."""

    batch = pack(spoken, cp=2)
    whole = Whole(
        slots=batch.slots,
        **{name: torch.zeros(batch.slots.total, dtype=torch.long) for name in ("input_ids", "labels", "position_ids")},
    )
    theirs = converted(whole)
    sequences = batch.slots.sequences
    assert batch.slots.waste["slot"] > 0
    assert torch.equal(theirs["cu_seqlens_padded"], batch.cu_seqlens[: sequences + 1])
    assert torch.equal(theirs["cu_seqlens"], batch.kwargs("te_real")["cu_seqlens_q"][: sequences + 1])


SIZES = {"vocab_size": 272, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def llama(attention_by_offsets):
    """Its Llama with random weights. Transformer Engine's attention is not on a CPU, so a stand-in reads what it is handed."""
    config = LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation="sdpa", dtype="float64")
    backend = BackendConfig(attn="sdpa", linear="torch", rms_norm="torch", rope_fusion=False)
    model = LlamaForCausalLM(config, backend).double().eval()
    for layer in model.model.layers:
        layer.self_attn.attn_module = attention_by_offsets
    return model


def run(model, batch):
    kwargs = {name: value for name, value in batch.kwargs("automodel").items() if name not in LOSS}
    return model(input_ids=batch.input_ids, use_cache=False, **kwargs).logits.reshape(*batch.input_ids.shape, -1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_its_model_gives_packed_the_logits_of_one_by_one(layout, llama, texts, pack, alone):
    batch = pack(texts, layout)
    packed = batch.unpack(run(llama, batch))
    for example in texts:
        ids, _ = alone(example)
        torch.testing.assert_close(packed[example.id], llama(input_ids=ids[None], use_cache=False).logits[0])


def test_its_output_hook_leaves_packed_tokens_as_they_are(texts, pack):
    out = torch.zeros(pack(texts).tokens, 2, 8)
    assert postprocess_output_for_attn(out, "te") is out
