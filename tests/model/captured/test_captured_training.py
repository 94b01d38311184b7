"""A captured training is that of the plain model, whatever changes between its steps."""

import copy

import numpy as np
import pytest
import torch

from packfp8.data import Collator
from packfp8.lengths import Measure
from packfp8.model.captured import CapturedStep
from packfp8.rule import align

RULE = align("block")


@pytest.mark.usefixtures("_capturable_on_a_cpu")
@pytest.mark.parametrize("inside", [False, True], ids=["optimizer outside", "optimizer inside"])
def test_a_training_is_that_of_the_plain_model_from_its_first_step_on(build, epoch, anywhere, inside, adamw, trained):
    batches = epoch()
    plain, model = build(RULE, loss_rows=64), build(RULE, loss_rows=64)  # as many rows replayed as not: equal bit for bit
    expected = trained(plain, batches, adamw(plain))
    optimizer = adamw(model)
    step = CapturedStep(model, batches[0], optimizer=optimizer if inside else None)

    def call(batch, count):
        out = step(batch, global_supervised=count)
        if not inside:
            optimizer.step()
        return out

    assert trained(model, step.feed(batches), optimizer, call)[0] == expected[0]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), expected[1]))
    assert len(set(expected[0])) == len(batches) - 1  # two of them have nothing to learn from
    if anywhere is None:
        assert step.fallbacks == {"no CUDA GPU": len(batches)}
    else:
        assert not step.fallbacks
        assert step.replays == len(batches) - 3
        assert len(anywhere) == 1


def test_the_micro_batches_of_a_window_add_up(build, epoch, anywhere):
    batches = epoch()
    plain, model = build(RULE), build(RULE)
    step = CapturedStep(model, batches[0], warmup=1)
    for _ in range(3):
        for begin in (0, 4):
            window = batches[begin : begin + 4]
            count = torch.tensor(sum(batch.num_supervised for batch in window))
            plain.zero_grad()
            for n, batch in enumerate(window):
                plain(batch, global_supervised=count).loss.backward()
                step(batch, global_supervised=count, is_first_microbatch=n == 0)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
    if anywhere is not None:
        # The first window runs kernel by kernel, and so do additions to gradients that are not yet those of a graph.
        assert step.replays == 5 * 4
        assert len(anywhere) == 2
        assert anywhere[0].gradients == anywhere[1].gradients


def test_is_first_microbatch_reaches_a_language_model_that_takes_it(build, epoch, anywhere):
    model, told = build(RULE), []
    forward = model.llm.forward

    def forward_told(x, *, is_first_microbatch=None, **rest):
        told.append(is_first_microbatch)
        return forward(x, **rest)

    model.llm.forward = forward_told
    batch = epoch([[0]])[0]
    step = CapturedStep(model, batch)
    for first in (None, True, False):
        step(batch, global_supervised=99, is_first_microbatch=first)
    assert told == [None, True, False]


def test_a_model_of_text_alone_is_replayed_too(build, mixed, graphs):
    texts = Collator(measure=Measure(frames=None), rule=RULE, static=True, budget=80, max_sequences=3)
    batches = [texts.collate([mixed[n] for n in numbers]) for numbers in ([2], [], [1, 2])]
    model = build(RULE, encoder=None, projector=None, frames=None)
    expected = [model(batch, global_supervised=99).loss.item() for batch in batches]
    step = CapturedStep(model, batches[0], warmup=1)
    step(batches[0], global_supervised=99)
    assert [step(batch, global_supervised=99).loss.item() for batch in batches] == pytest.approx(expected, abs=1e-12)
    assert step.replays == 3


def test_zero_grad_between_steps_changes_nothing(build, epoch, graphs):
    model, batch = build(RULE, loss_rows=64), epoch([[0, 3]])[0]
    step = CapturedStep(model, batch, warmup=1)
    found = []
    for _ in range(4):
        step(batch, global_supervised=32)
        found.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad(set_to_none=True)
    assert step.replays == 3
    for gradients in found[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, found[0], strict=True))


@pytest.mark.parametrize("count", [99, np.int64(99), torch.tensor([99])], ids=repr)
def test_counts_and_flags_of_numpy_and_tensors_of_one_number_are_what_they_say(build, epoch, anywhere, count):
    """`is_first_microbatch=np.False_` adds to the window, and does not begin one."""
    plain, model, batches = build(RULE), build(RULE), epoch([[0], [3]])
    step = CapturedStep(model, batches[0], warmup=1)
    for _ in range(3):
        plain.zero_grad()
        for n, batch in enumerate(batches):
            plain(batch, global_supervised=99).loss.backward()
            out = step(batch, global_supervised=count, is_first_microbatch=np.bool_(n == 0))
            assert out.loss.shape == ()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


# -- an optimizer that changes -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_capturable_on_a_cpu")
def test_a_state_that_was_loaded_into_the_optimizer_is_captured_anew(build, epoch, graphs, adamw):
    plain, model = build(RULE), build(RULE)
    batches = epoch()
    optimizers = adamw(plain), adamw(model)
    step = CapturedStep(model, batches[0], optimizer=optimizers[1], warmup=1)
    losses = []
    for n, batch in enumerate(batches):
        if n == 5:
            for optimizer in optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        plain.zero_grad()
        expected = plain(batch, global_supervised=torch.tensor(99))
        expected.loss.backward()
        optimizers[0].step()
        losses.append((step(batch, global_supervised=99).loss.item(), expected.loss.item()))
    assert all(ours == pytest.approx(theirs, abs=1e-12) for ours, theirs in losses)
    assert len(graphs) == 2


def _set_a_rate(optimizer):
    optimizer.param_groups[0]["lr"] = torch.tensor(3e-2, dtype=torch.float64)


def _set_decay(optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.3


@pytest.mark.usefixtures("_capturable_on_a_cpu")
@pytest.mark.parametrize("change", [_set_a_rate, _set_decay])
def test_a_setting_of_the_optimizer_that_changed_is_captured_anew(build, epoch, graphs, change, adamw, trained):
    """A graph keeps what it took: another tensor of the learning rate, or a number, would silently do nothing."""
    plain, model = build(RULE, loss_rows=64), build(RULE, loss_rows=64)
    batches = epoch()
    optimizers = adamw(plain), adamw(model)
    step = CapturedStep(model, batches[0], optimizer=optimizers[1], warmup=1)

    def call(batch, count):
        return step(batch, global_supervised=count)

    for part in (batches[:3], batches[3:]):
        trained(plain, part, optimizers[0])
        trained(model, part, optimizers[1], call)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), plain.parameters()))
        for optimizer in optimizers:
            change(optimizer)
    assert len(graphs) == 2


@pytest.mark.usefixtures("_capturable_on_a_cpu")
@pytest.mark.parametrize("schedule", ["LambdaLR", "CosineAnnealingLR", "OneCycleLR"])
def test_a_schedule_changes_the_tensor_that_the_graph_reads(build, epoch, graphs, schedule, adamw, trained):
    made = {
        "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
        "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=9, cycle_momentum=False),
    }[schedule]
    plain, model = build(RULE, loss_rows=64), build(RULE, loss_rows=64)
    batches = epoch()
    optimizers = adamw(plain), adamw(model)
    schedules = [made(optimizer) for optimizer in optimizers]
    step = CapturedStep(model, batches[0], optimizer=optimizers[1], warmup=1)
    for batch in batches:
        trained(plain, [batch], optimizers[0])
        trained(model, [batch], optimizers[1], lambda batch, count: step(batch, global_supervised=count))
        for one in schedules:
            one.step()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), plain.parameters()))
    assert len(graphs) == 1
