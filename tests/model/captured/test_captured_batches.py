"""What is not replayed and why, and what is copied ahead."""

from dataclasses import replace

import pytest
import torch

from packfp8.data import Collator
from packfp8.errors import ConfigError
from packfp8.model.captured import CapturedStep
from packfp8.rule import align

RULE = align("block")


# -- falling back ------------------------------------------------------------------------------------------------------


def test_a_batch_of_another_shape_runs_all_the_same_and_is_counted_by_its_reason(build, epoch, measure, mixed, graphs):
    plain, model = build(RULE), build(RULE)
    batches = epoch()
    other = Collator(measure=measure, rule=RULE).collate(mixed)
    longer = replace(batches[1], max_seqlen=255)
    step = CapturedStep(model, batches[0], warmup=1)
    for batch in (batches[0], other, batches[1], longer, other, batches[2]):
        plain.zero_grad()
        expected = plain(batch, global_supervised=99)
        expected.loss.backward()
        out = step(batch, global_supervised=99)
        torch.testing.assert_close(out.loss, expected.loss.detach(), rtol=0, atol=1e-12)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
    assert step.fallbacks == {"another input_ids": 2, "another max_seqlen": 1}
    assert step.replays == 2
    assert len(graphs) == 1
    assert all(p.grad is grad for p, grad in zip(model.parameters(), graphs[0].gradients))


def test_a_window_of_mixed_shapes_adds_up(build, epoch, measure, mixed, graphs):
    plain, model = build(RULE), build(RULE)
    batches, other = epoch(), Collator(measure=measure, rule=RULE).collate(mixed)
    step = CapturedStep(model, batches[0], warmup=1)
    for window in (
        [batches[0], batches[4]],
        [batches[5], batches[6]],
        [batches[0], other, batches[6]],
        [other, batches[4], other],
    ):
        plain.zero_grad()
        for n, batch in enumerate(window):
            plain(batch, global_supervised=99).loss.backward()
            step(batch, global_supervised=99, is_first_microbatch=n == 0)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
    assert step.replays == 2 + 2 + 1
    assert step.fallbacks == {"another input_ids": 3}


def test_a_consumer_that_makes_offsets_on_the_host_is_never_replayed(build, epoch):
    model, batch = build(RULE), epoch([[0, 3]])[0]
    step = CapturedStep(model, batch)
    step(batch, global_supervised=99)
    assert "te_real" not in str(step.fallbacks)
    model.consumer = "te_real"
    forward = model.llm.forward
    model.llm.forward = lambda x, *, cu_seqlens_kv, **_: forward(x, **batch.kwargs("plain"))
    step = CapturedStep(model, batch)
    step(batch, global_supervised=99)
    assert step.fallbacks == {"consumer 'te_real' makes offsets on the host": 1}


def test_a_model_in_another_mode_falls_back(build, epoch, graphs):
    model, batch = build(RULE), epoch([[0, 3]])[0]
    step = CapturedStep(model, batch, warmup=1)
    for training in (True, True, False, True):
        model.train(training)
        step(batch, global_supervised=99)
    assert step.fallbacks == {"another mode of the model": 1}
    assert step.replays == 2


@pytest.mark.parametrize("inside", [False, True], ids=["captured", "launched"])
def test_a_part_of_the_model_in_another_mode_falls_back(build, epoch, graphs, inside):
    """An encoder is put into evaluation, or out of it, while the rest trains."""
    model, batch = build(RULE), epoch([[0, 3]])[0]
    model.encoder.train(inside)
    step = CapturedStep(model, batch, warmup=1)
    for _ in range(2):
        step(batch, global_supervised=99)
    model.encoder.train(not inside)
    step(batch, global_supervised=99)
    assert step.fallbacks == {"another mode of the model": 1}
    model.encoder.train(inside)
    step(batch, global_supervised=99)
    assert step.replays == 2


def test_one_sequence_handed_over_as_a_row_is_not_replayed_for_several(build, epoch, graphs):
    model = build(RULE)
    model.llm.layouts = ("bshd",)
    one, several = epoch([[0], [0, 1]])
    step = CapturedStep(model, one, warmup=1)
    for _ in range(2):
        step(one, global_supervised=99)
    with pytest.raises(ConfigError, match="would attend across the sequences"):
        step(several, global_supervised=99)


# -- what is copied ahead ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_feed_gives_every_batch_in_order_one_behind(build, epoch, anywhere, count):
    batches, asked = epoch()[:count], []

    def loader():
        for batch in batches:
            asked.append(batch.step)
            yield batch

    step = CapturedStep(build(RULE), epoch([[0]])[0])
    given = []
    for batch in step.feed(loader()):
        given.append((batch.step, len(asked)))
        step(batch, global_supervised=99)
    assert given == [(n, min(n + 2, count)) for n in range(count)]


def test_batches_that_were_sent_ahead_and_left_out_do_no_harm(build, epoch, graphs):
    plain, model = build(RULE), build(RULE)
    batches = epoch()
    step = CapturedStep(model, batches[0], warmup=1)
    order = (0, 4, 5, 4, 1, 6, 0)
    for sent, given in zip((4, 1, 3, 6, 2, 0, 5), order, strict=True):
        step.prefetch(batches[sent])
        expected = plain(batches[given], global_supervised=99).loss
        torch.testing.assert_close(step(batches[given], global_supervised=99).loss, expected.detach(), rtol=0, atol=1e-12)
    assert step.replays == len(order) - 1


def test_two_batches_may_be_on_their_way(build, epoch, graphs):
    batches = epoch()
    step, copies = CapturedStep(build(RULE), batches[0]), []
    send = step._static.send
    step._static.send = lambda batch: copies.append(batch.step) or send(batch)
    for batch in batches[:3]:
        step.prefetch(batch)
    for batch in (batches[1], batches[2], batches[0]):
        step(batch, global_supervised=99)
    assert copies == [0, 1, 2, 0]


def test_a_batch_of_another_shape_is_not_sent_ahead(build, epoch, measure, mixed, graphs):
    other = Collator(measure=measure, rule=RULE).collate(mixed)
    step = CapturedStep(build(RULE), epoch([[0]])[0])
    step.prefetch(other)
    assert step(other, global_supervised=99).loss > 0


def test_the_tensors_of_a_batch_stand_side_by_side(build, epoch, graphs):
    batches = epoch()
    step = CapturedStep(build(RULE), batches[0])
    placed = step._static.take(batches[4])
    storages = set()
    for name in ("input_ids", "labels", "padding_mask", "cu_seqlens", "audio", "audio_offsets", "audio_source"):
        tensor = getattr(placed, name)
        assert torch.equal(tensor, getattr(batches[4], name))
        assert tensor.data_ptr() % 16 == 0
        storages.add(tensor.untyped_storage().data_ptr())
    assert len(storages) == 1
    assert placed.ids == batches[4].ids
