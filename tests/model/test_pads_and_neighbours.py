"""What fills pads, and what another sequence says, changes nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from packfp8.data import Clip, Collator, Example, Turn
from packfp8.layout import place
from packfp8.model import wrapper
from packfp8.rule import align

LAYOUTS = pytest.mark.parametrize("layout", ["thd", "bshd"])
CPS = pytest.mark.parametrize("cp", [1, 2])


def with_other_pads(batch):
    """Ids of pads and of audio positions are drawn at random: both are only stand-ins."""
    draw = torch.randint(0, 272, batch.input_ids.shape, generator=torch.Generator().manual_seed(1))
    free = batch.padding_mask.clone()
    free.view(-1)[batch.audio_destination] = True
    assert free.sum() > 10
    return replace(batch, input_ids=torch.where(free, draw, batch.input_ids))


def parts(batches, outputs):
    return batches[0].unpack([out.logits for out in outputs])


def gradients(model, outputs):
    model.zero_grad()
    sum(out.loss for out in outputs).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@LAYOUTS
@CPS
def test_ids_at_pads_and_audio_positions_do_not_matter(run_ranks, mixed, layout, cp):
    model, batches, outputs = run_ranks(mixed, "block", layout, cp)
    again, others, changed = run_ranks(mixed, "block", layout, cp, change=with_other_pads)
    assert_same(parts(batches, outputs), parts(others, changed))
    assert_same(gradients(model, outputs), gradients(again, changed))


@LAYOUTS
@CPS
def test_large_embeddings_at_pads_do_not_matter(run_ranks, mixed, layout, cp, monkeypatch):
    model, batches, outputs = run_ranks(mixed, "block", layout, cp)

    splice = wrapper.splice

    def loud(embeddings, frames, batch, *rest):
        spliced = splice(embeddings, frames, batch, *rest)
        return torch.where(batch.padding_mask[..., None], 1e4 * torch.arange(1, 17, dtype=spliced.dtype), spliced)

    monkeypatch.setattr(wrapper, "splice", loud)
    again, others, changed = run_ranks(mixed, "block", layout, cp)
    assert outputs[0].logits.sub(changed[0].logits).abs().max() > 1e-3, "the pads' own states did change"
    assert_same(parts(batches, outputs), parts(others, changed))
    assert_same(gradients(model, outputs), gradients(again, changed))


@LAYOUTS
@CPS
def test_another_sequence_does_not_matter(run_ranks, mixed, layout, cp):
    """Every token of one sequence is another, audio and text; all others stay what they were."""
    _, batches, outputs = run_ranks(mixed, "block", layout, cp)
    before = parts(batches, outputs)
    for position, example in enumerate(mixed):
        turns = tuple(Turn(turn.role, tuple(_other(part) for part in turn.parts)) for turn in example.turns)
        swapped = [*mixed[:position], Example(id=example.id, turns=turns), *mixed[position + 1 :]]
        _, others, changed = run_ranks(swapped, "block", layout, cp)
        after = parts(others, changed)
        assert not torch.allclose(before[example.id], after.pop(example.id))
        assert len(after) == 5
        assert_same({name: before[name] for name in after}, after)


def test_a_row_of_filler_is_finite_and_adds_nothing(build, measure, mixed):
    """BSHD: rows that hold no example; a query that saw no key would be NaN."""
    rule = align("block", layout="bshd")
    batch = Collator(measure=measure, rule=rule)(mixed[:2])
    rows, size = batch.input_ids.shape
    filler = {
        "input_ids": torch.zeros(2, size, dtype=torch.int64),
        "labels": torch.full((2, size), -100),
        "position_ids": torch.arange(size).expand(2, size),
        "seq_idx": torch.tensor([[rows], [rows + 1]], dtype=torch.int32).expand(2, size),
        "padding_mask": torch.ones(2, size, dtype=torch.bool),
    }
    slots = place(batch.slots.lengths[:rows], rule, total=4 * size, rows=4)
    padded = replace(batch, **{n: torch.cat((getattr(batch, n), rest)) for n, rest in filler.items()}, slots=slots)
    model = build(rule)
    plain = model(batch, global_supervised=batch.num_supervised)
    with_filler = model(padded, global_supervised=batch.num_supervised, return_logits=True)
    assert with_filler.logits.isfinite().all()
    assert_same(gradients(model, [plain]), gradients(model, [with_filler]))


def _other(part):
    if isinstance(part, str):
        return part.translate(str.maketrans("abcdefghijklmnopqrstuvwxyz", "zyxwvutsrqponmlkjihgfedcba"))
    return Clip(source=np.ascontiguousarray(part.source[::-1]) * 3, num_samples=part.num_samples, sample_rate=part.sample_rate)
