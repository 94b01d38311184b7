"""Hugging Face transformers: real models with random weights, packed and one by one."""

import pytest
import torch
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs

from packfp8.data.consumers import LOSS
from packfp8.errors import ConfigError
from packfp8.model.isolation import prove_isolation

SIZES = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(attention):
    return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=attention)).double().eval()


def qwen3(attention):
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, attn_implementation=attention)).double().eval()


def loss_sums(model, batch):
    """{id: sum of the losses of its labels} of a packed forward, from the logits."""
    logits = model(input_ids=rows(batch), **batch.kwargs("hf")).logits.view(*batch.input_ids.shape, -1)
    logits, labels = batch.unpack(logits), batch.unpack(batch.labels)
    return {name: cross_entropy(logits[name], labels[name]) for name in batch.ids}


def cross_entropy(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def rows(batch):
    return batch.input_ids.unsqueeze(0) if batch.layout == "thd" else batch.input_ids


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("build", [llama, qwen3])
def test_losses_packed_equal_losses_one_by_one(build, attention, layout, texts, pack, alone):
    model, batch = build(attention), pack(texts, layout)
    packed = loss_sums(model, batch)
    for example in texts:
        ids, labels = alone(example)
        expected = cross_entropy(model(input_ids=ids[None]).logits[0], labels)
        torch.testing.assert_close(packed[example.id], expected)


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_the_models_own_loss_is_that_of_our_labels_which_are_not_shifted_once_more(layout, texts, pack):
    model, batch = llama("sdpa"), pack(texts, layout)
    out = model(input_ids=rows(batch), num_items_in_batch=batch.num_supervised, **batch.kwargs("hf"))
    expected = sum(loss_sums(model, batch).values()) / batch.num_supervised
    torch.testing.assert_close(out.loss, expected.float())
    twice = {name: value for name, value in batch.kwargs("hf").items() if name != "shift_labels"}
    shifted_again = model(input_ids=rows(batch), num_items_in_batch=batch.num_supervised, **twice).loss
    assert abs(shifted_again - out.loss) > 1e-3


def test_gradients_packed_equal_the_sum_of_those_one_by_one(texts, pack, alone):
    model, batch = llama("sdpa"), pack(texts)
    model(input_ids=rows(batch), num_items_in_batch=1, **batch.kwargs("hf")).loss.backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for ids, labels in map(alone, texts):
        out = model(input_ids=ids[None], labels=labels[None], shift_labels=labels[None], num_items_in_batch=1)
        out.loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-4, atol=1e-5)  # its loss is float32


def test_sequences_found_in_our_positions_are_our_slots(texts, pack):
    batch = pack(texts)
    found = find_packed_sequence_indices(batch.kwargs("hf")["position_ids"])
    assert found.tolist() == batch.seq_idx[None].tolist()
    assert find_packed_sequence_indices(pack(texts, "bshd").kwargs("hf")["position_ids"]) is None


def test_offsets_are_spelled_as_its_flash_attention_reads_them(texts, pack):
    offsets = {name for name in FlashAttentionKwargs.__annotations__ if name.startswith(("cu_seq", "max_length"))}
    assert offsets <= set(pack(texts).kwargs("hf"))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("change", [{"use_cache": True}, {"attention_mask": True}], ids=["cache", "mask of ones"])
def test_a_cache_or_a_mask_of_ones_would_join_the_sequences(change, attention, texts, pack, alone):
    model, batch = llama(attention), pack(texts)
    if "attention_mask" in change:
        change = {"attention_mask": torch.ones(1, batch.tokens)}
    logits = model(input_ids=rows(batch), **{**batch.kwargs("hf"), **change}).logits[0]
    ids, _ = alone(texts[3])
    assert not torch.allclose(batch.unpack(logits)["s3"], model(input_ids=ids[None]).logits[0])


def lfm2():
    return Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])).double().eval()


def granite():
    config = GraniteMoeHybridConfig(
        **SIZES,
        layer_types=["mamba", "attention"],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
        num_local_experts=0,
        shared_intermediate_size=48,
    )
    return GraniteMoeHybridForCausalLM(config).double().eval()


def conv_by_seq_idx(hidden, weight, bias=None, activation=None, *, seq_idx=None, **_):
    """What the CUDA kernel `causal_conv1d_fn` does with `seq_idx`: each run of one id is convolved alone."""
    runs = [hidden] if seq_idx is None else hidden.split(seq_idx[0].unique_consecutive(return_counts=True)[1].tolist(), dim=-1)
    width, groups = weight.shape[-1], weight.shape[0]
    each = [
        torch.nn.functional.conv1d(x, weight[:, None], bias, padding=width - 1, groups=groups)[..., : x.shape[-1]] for x in runs
    ]
    return torch.cat(each, dim=-1)


def test_a_hybrid_model_reads_seq_idx_and_keeps_the_sequences_apart(texts, pack, alone, monkeypatch):
    monkeypatch.setattr("transformers.models.lfm2.modeling_lfm2.causal_conv1d_fn", conv_by_seq_idx)
    model, batch = lfm2(), pack(texts)
    packed = loss_sums(model, batch)
    without = {name: value for name, value in batch.kwargs("hf").items() if name != "seq_idx"}
    joined = batch.unpack(model(input_ids=rows(batch), **without).logits[0])
    for example in texts:
        ids, labels = alone(example)
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        torch.testing.assert_close(packed[example.id], cross_entropy(logits, labels))
    assert not torch.allclose(joined["s4"], logits)


@pytest.mark.parametrize("kernel", ["mamba2_chunk_scan", "causal_conv1d_fn"])
def test_a_mamba_layer_hands_our_seq_idx_to_its_kernels(kernel, texts, pack, monkeypatch):
    """Their fallbacks for the CPU take `seq_idx` and ignore it, so only the hand-over can be seen here."""
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as module

    seen, fallback = [], getattr(module, kernel)
    monkeypatch.setattr(module, kernel, lambda *args, **kwargs: seen.append(kwargs["seq_idx"]) or fallback(*args, **kwargs))
    batch = pack(texts)
    granite()(input_ids=rows(batch), **batch.kwargs("hf"))
    assert seen
    assert all(torch.equal(ids, batch.seq_idx[None]) for ids in seen)
    assert seen[0].dtype == torch.int32


def test_prove_isolation_passes_what_we_hand_over_and_catches_a_cache_and_a_convolution_that_ignores_seq_idx(texts, pack):
    batch = pack(texts)

    def proved(model, **change):
        metadata = {name: value for name, value in batch.kwargs("hf").items() if name not in LOSS} | change

        def run(embeddings, **kwargs):
            return model(inputs_embeds=embeddings[None], **kwargs).logits[0]

        prove_isolation(run, model.get_input_embeddings()(batch.input_ids), batch, metadata)

    proved(llama("sdpa"))
    with pytest.raises(ConfigError, match="ignores cu_seq_lens_q, cu_seq_lens_k, seq_idx"):
        proved(llama("sdpa"), use_cache=True)
    with pytest.raises(ConfigError, match=r"ignores .*seq_idx"):
        proved(lfm2())
