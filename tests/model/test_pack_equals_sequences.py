"""The loss of a pack is the sum of the losses of its sequences run one by one, in every layout, split and rule."""

import pytest
import torch
from torch.nn import functional as F

from packfp8.data import Collator, Example, Turn
from packfp8.rule import Topology, align

RULES = [("bf16", 1, False), ("block", 1, False), ("mxfp8", 1, False), ("block", 2, True)]


def one_by_one(model, measure, examples):
    """The oracle: no pack, no plan; each clip encoded alone, placed by a loop, each sequence attended with a causal mask."""
    losses = {}
    for example in examples:
        encoded = measure.encode(example)
        ids = torch.tensor(encoded.ids)
        x = list(model.llm.embed(ids))
        for span, clip in zip(encoded.clips, example.clips, strict=True):
            audio = torch.tensor(clip.source)[None]
            frames, _ = model.encoder(audio, torch.tensor([len(clip.source)]))
            for n, frame in enumerate(model.projector(frames)[0]):
                x[span.start + n] = frame
        positions = torch.arange(len(ids))
        hidden = model.llm(torch.stack(x), position_ids=positions, seq_idx=torch.zeros_like(positions))
        labels = torch.where(torch.tensor(encoded.supervised), ids, -100)
        losses[example.id] = F.cross_entropy(model.llm.head(hidden)[:-1], labels[1:], ignore_index=-100, reduction="sum")
    return losses


def gradients(model, total):
    model.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize(("recipe", "tp", "sp"), RULES)
def test_loss_and_gradients_are_those_of_the_sequences(run_ranks, measure, mixed, recipe, tp, sp, layout, cp):
    model, _, outputs = run_ranks(mixed, recipe, layout, cp, tp=tp, sp=sp)
    packed = sum(out.loss_sum for out in outputs)
    expected = sum(one_by_one(model, measure, mixed).values())
    assert expected > 100  # of 32 supervised tokens
    assert packed.item() == pytest.approx(expected.item(), rel=0, abs=1e-9)
    theirs, ours = gradients(model, expected), gradients(model, packed)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    assert all(theirs[name].abs().max() > 1e-6 for name in theirs), "a gradient that is zero shows nothing"


@pytest.mark.parametrize("cp", [1, 2])
def test_filler_and_repeated_offsets_add_nothing(run_ranks, measure, mixed, cp):
    model, batches, outputs = run_ranks(mixed, "block", "thd", cp, static=True, budget=512, max_sequences=9, frame_budget=60)
    assert batches[0].slots.waste["filler"] > 100
    assert batches[0].cu_seqlens.tolist()[-3:] == [512] * 3
    expected = sum(one_by_one(model, measure, mixed).values())
    assert sum(out.loss_sum for out in outputs).item() == pytest.approx(expected.item(), rel=0, abs=1e-9)


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_unpacked_logits_are_those_of_each_sequence_alone(run_ranks, measure, mixed, layout, cp):
    model, batches, outputs = run_ranks(mixed, "block", layout, cp)
    parts = batches[0].unpack([out.logits for out in outputs])
    labels = batches[0].unpack([batch.labels for batch in batches])
    for name, loss in one_by_one(model, measure, mixed).items():
        again = F.cross_entropy(parts[name], labels[name], ignore_index=-100, reduction="sum")
        assert again.item() == pytest.approx(loss.item(), rel=0, abs=1e-9), name


def test_logits_have_the_shape_of_the_batch_where_it_was_handed_over_otherwise(build, measure, mixed):
    """A row of one pack as BSHD, rows as THD: the same numbers, in the batch's own shape."""
    rule = align("bf16", layout="bshd")
    batch = Collator(measure=measure, rule=rule)(mixed)
    model = build(rule)
    as_rows = model(batch, global_supervised=99, return_logits=True)
    model.llm.layouts = ("thd",)
    as_slots = model(batch, global_supervised=99, return_logits=True)
    assert as_rows.logits.shape == (*batch.input_ids.shape, 272)
    torch.testing.assert_close(as_rows.logits, as_slots.logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("kind", ["text only", "audio only"])
def test_a_pack_of_one_kind_alone(run_ranks, measure, mixed, layout, kind):
    chosen = [e for e in mixed if (not e.clips if kind == "text only" else e.id == "clip alone")]
    model, _, (out,) = run_ranks(chosen, "block", layout)
    expected = sum(one_by_one(model, measure, chosen).values())
    assert out.loss_sum.item() == pytest.approx(expected.item(), rel=0, abs=1e-9)
    grads = gradients(model, out.loss)
    assert not any(grad.abs().max() for name, grad in grads.items() if not name.startswith("llm"))


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("recipe", ["bf16", "block"])
def test_dp_ranks_and_accumulation_give_the_gradient_of_one_batch(run_ranks, build, measure, mixed, layout, recipe):
    """Mean over two ranks of two micro-batches each, as FSDP and accumulation do it, against all sequences at once."""
    rules = [align(recipe, Topology(dp=2, dp_rank=rank), layout=layout) for rank in range(2)]
    shares = [[mixed[:1], mixed[1:3]], [mixed[3:4], mixed[4:]]]
    batches = [[Collator(measure=measure, rule=rule)(share) for share in own] for rule, own in zip(rules, shares)]
    count = sum(batch.num_supervised for own in batches for batch in own)
    model = build(rules[0])
    total = sum(model(b, global_supervised=torch.tensor(count)).loss for own in batches for b in own) / 2
    ours = gradients(model, total)
    mean = sum(one_by_one(model, measure, mixed).values()) / count
    theirs = gradients(model, mean)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-10)


def test_sequences_of_one_token_have_no_label(run_ranks, measure):
    ones = [Example(id=str(n), turns=(Turn("system", ("a",)),)) for n in range(3)]
    assert [measure(one).tokens for one in ones] == [1, 1, 1]
    _, (batch,), (out,) = run_ranks(ones, "block")
    assert batch.num_supervised == 0
    assert out.loss.item() == out.loss_sum.item() == 0
