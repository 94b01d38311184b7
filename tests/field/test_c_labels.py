"""C. Labels, the loss and masks for other layers: what is learned from a pack, and what its pads may touch."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from packfp8 import ByteTokenizer, Measure, Template, Topology, align
from packfp8.data import Collator, Example, Turn
from packfp8.model.loss import loss_sum
from packfp8.model.moe import Moe, PlainExperts

IGNORED = -100


def test_no_label_crosses_into_the_next_document(collate, docs):
    """The last token of A learned to predict the first of B, worst where B has no masked prompt. Documents 1 2 3 and 4 5.

    pytorch/torchtitan#4075; meta-pytorch/torchtune#1177; huggingface/trl#5854.
    """
    (batch,) = collate(docs("1 2 3", "4 5"), "bf16")
    expected = [2, 3, IGNORED, 5, IGNORED]
    assert batch.labels.tolist() == expected
    for consumer, name in (("automodel", "labels"), ("hf", "shift_labels")):
        assert batch.kwargs(consumer)[name].flatten().tolist() == expected
    alone = [collate(docs(text), "bf16")[0].labels for text in ("1 2 3", "4 5")]
    assert torch.cat(alone).tolist() == expected


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_nan_at_pads_reaches_neither_loss_nor_gradients(layout, collate, docs, model_of):
    """NaN times a mask of zero is NaN. One pad or more whose states are NaN.

    NVIDIA-NeMo/Megatron-Bridge#3117, #2914; pytorch/pytorch#24816.
    """
    (batch,) = collate(docs(5, 2), layout=layout)
    hidden = torch.randn(*batch.input_ids.shape, 16, dtype=torch.float64)
    weight = torch.randn(272, 16, dtype=torch.float64, requires_grad=True)
    hidden = torch.where(batch.padding_mask[..., None], torch.nan, hidden).requires_grad_()
    total = loss_sum(hidden, weight, batch.labels)
    total.backward()
    real = ~batch.padding_mask
    expected = F.cross_entropy(hidden.detach()[real] @ weight.detach().T, batch.labels[real], reduction="sum")
    torch.testing.assert_close(total.detach(), expected)
    assert torch.isfinite(weight.grad).all()
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_a_row_of_pads_alone_sees_itself(layout, collate, docs, model_of):
    """A query that may see nothing softmaxes to NaN. A pack that is all padding. The same reports."""
    (batch,) = collate([], layout=layout)
    assert bool(batch.padding_mask.all())
    out = model_of(batch.rule)(batch, global_supervised=0, return_logits=True)
    assert torch.isfinite(out.logits).all()


def test_a_batch_without_a_label_has_a_loss_of_zero_with_a_graph(collate, docs, model_of):
    """0 / 0 is NaN and reaches every parameter. Three documents of one token.

    NVIDIA-NeMo/Automodel#3796; allenai/OLMo-core#657.
    """
    (batch,) = collate(docs(1, 1, 1))
    assert batch.num_supervised == 0
    model = model_of(batch.rule)
    out = model(batch, global_supervised=torch.tensor(0))
    out.loss.backward()
    assert out.loss.item() == 0
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("scenario", ["one rank without a label", "no rank with a label"])
def test_a_rank_without_a_label_joins_every_collective(scenario, world, ranks):
    """The same reports, on real ranks under FSDP: nobody waits, and the gradient is that of one batch."""
    for found in ranks[world][scenario]:
        assert found["difference"] < 1e-12
        assert found["finite"]
    assert min(found["supervised"] for found in ranks[world][scenario]) == 0


@pytest.mark.parametrize("world", [2, 3, 4])
def test_tokens_weigh_alike_on_ranks_with_few_labels_and_with_many(world, ranks):
    """A mean of means gives the one label of rank 1 the weight of the five of rank 0.

    pytorch/torchtitan#1842; huggingface/transformers#34242; NVIDIA-NeMo/Speech#15648.
    """
    found = ranks[world]["five labels and one"]
    assert [one["supervised"] for one in found][:2] == ([5, 1] if world < 4 else [5, 5])
    assert all(one["difference"] < 1e-12 for one in found)
    assert all(one["mean of means"] > 1e-3 for one in found)  # the fault would show


@pytest.mark.parametrize("windows", [[(5, 61)], [(5, 61), (9,)], [(2, 3, 4), (61, 1)]])
def test_accumulated_gradients_are_those_of_one_batch(windows, collate, docs, model_of):
    """A mean of micro-batch means leans to the short one: 4 labels and 60. The partial last window too.

    meta-pytorch/torchtune#1875; huggingface/transformers#35203.
    """
    for window in windows:
        micro = [collate(docs(length))[0] for length in window]
        (whole,) = collate(docs(*window))
        count = sum(batch.num_supervised for batch in micro)
        assert count == whole.num_supervised == sum(window) - len(window)
        model, reference = model_of(whole.rule), model_of(whole.rule)
        for batch in micro:
            model(batch, global_supervised=count).loss.backward()
        reference(whole, global_supervised=count).loss.backward()
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_the_end_of_an_answer_is_learned_though_pads_have_its_id(layout):
    """Masking by id removes every EOS where pad_id == eos_id. huggingface/transformers#23530."""
    tokenizer = ByteTokenizer(pad_is_eos=True)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    template = Template(roles={"assistant": ("", "")})
    collator = Collator(
        measure=Measure(frames=None, tokenizer=tokenizer, template=template), rule=align("block", layout=layout)
    )
    batch = collator([Example(id=text, turns=(Turn("assistant", (text,)),)) for text in ("yes", "no")])
    assert int((batch.labels == tokenizer.eos_token_id).sum()) == 2
    assert batch.num_supervised == len("yes") + len("no")
    assert set(batch.labels[batch.padding_mask].tolist()) == {IGNORED}


@pytest.mark.parametrize(
    ("lengths", "layout", "recipe", "tokens"),
    [((4243,), "thd", "delayed", 4256), ((5, 7), "bshd", "delayed", 16), ((5, 7), "bshd", "mxfp8", 32)],
)
def test_every_field_of_a_token_is_padded_together(lengths, layout, recipe, tokens, collate, docs):
    """Positions or a loss mask kept the old length: 4,243 tokens of text padded; rows of 5 and 7.

    hiyouga/LlamaFactory#10736, #10659; NVIDIA-NeMo/Megatron-Bridge#4056, #2610.
    """
    (batch,) = collate(docs(*lengths), recipe, layout)
    shapes = {
        getattr(batch, name).shape for name in ("input_ids", "labels", "position_ids", "seq_idx", "padding_mask", "loss_mask")
    }
    assert shapes == {batch.input_ids.shape}
    assert batch.tokens == tokens
    assert int(batch.cu_seqlens[-1]) == tokens


def test_pads_are_sent_to_no_expert_and_count_in_no_statistic(collate, docs):
    """Auxiliary losses and expert biases counted pads. 3 real tokens and 13 pads; the mask, True at pads, is split like tokens.

    NVIDIA/Megatron-LM#1984, #2121, #4776.
    """
    (batch,) = collate(docs(3))
    assert batch.padding_mask.tolist() == [False] * 3 + [True] * 13
    torch.manual_seed(0)
    moe = Moe(PlainExperts(count=4, hidden=8, ffn=8), hidden=8, chosen=2)
    x = torch.randn(16, 8)
    padded, alone = moe(x, batch.padding_mask), moe(x[:3], batch.padding_mask[:3])
    assert int(padded.load.sum()) == 6
    assert torch.equal(padded.load, alone.load)
    torch.testing.assert_close(padded.balance_loss, alone.balance_loss)
    torch.testing.assert_close(padded.output[:3], alone.output)
    slabs = collate(docs(3), cp=2)
    assert sum(int((~slab.padding_mask).sum()) for slab in slabs) == 3
    assert all(slab.padding_mask.shape == slab.input_ids.shape for slab in slabs)


def test_state_space_layers_are_told_where_each_document_begins(collate, docs):
    """Without ids of the physical tokens a state runs on into the next document. Documents of 3 and 5, slots of 4 and 8.

    NVIDIA-NeMo/Megatron-Bridge#3484, #3474; NovaSky-AI/SkyRL#2056; state-spaces/mamba#792.
    """
    (batch,) = collate(docs(3, 5), "bf16")
    assert batch.kwargs("ssm")["seq_idx"].flatten().tolist() == [0] * 3 + [1] * 5
    slabs = collate(docs(3, 5), cp=2)
    assert all(slab.seq_idx.shape == slab.input_ids.shape for slab in slabs)
    held = sorted(index for slab in slabs for index in slab.seq_idx.tolist())
    assert held == [0] * 4 + [1] * 8 + [2] * (slabs[0].slots.total - 12)  # pads in a slot are the slot's, filler has its own


# More of the same kind: unicode answers on three ranks, and one token each on three ranks.


def test_unicode_answers_are_learned_byte_by_byte_whatever_splits_them():
    """cp 3 cuts within characters of several bytes: every byte but each sequence's first is a label, once over all ranks."""
    answers = ["naïve 你好", "🎧", "\u2028", "e\u0301"]
    measure = Measure(frames=None, template=Template(roles={"assistant": ("", "")}, eos=False))
    items = [Example(id=str(n), turns=(Turn("assistant", (text,)),)) for n, text in enumerate(answers)]
    batches = [
        Collator(measure=measure, rule=align("current", Topology(cp=3, cp_rank=rank, tp=3, sp=True)))(items)
        for rank in range(3)
    ]
    labels = batches[0].unpack([batch.labels for batch in batches])
    for n, text in enumerate(answers):
        assert bytes(labels[str(n)][:-1].tolist()) == text.encode()[1:]
        assert labels[str(n)][-1] == IGNORED
    assert sum(batch.num_supervised for batch in batches) == sum(len(text.encode()) - 1 for text in answers)


def test_changing_one_sequence_changes_no_loss_of_another(collate, docs, model_of):
    """Seven sequences of 1, 2, 3, 15, 16, 17 and 1 tokens: one is replaced, the losses of the others stay to the last digit."""
    lengths = (1, 2, 3, 15, 16, 17, 1)
    (batch,) = collate(docs(*lengths))
    model = model_of(batch.rule)
    before = batch.unpack(model(batch, global_supervised=55, return_logits=True).logits)
    other = replace(batch, input_ids=torch.where(batch.seq_idx == 3, 7, batch.input_ids))
    after = batch.unpack(model(other, global_supervised=55, return_logits=True).logits)
    for name in before:
        assert torch.equal(before[name], after[name]) == (name != "3")
