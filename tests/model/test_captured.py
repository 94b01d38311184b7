"""CapturedStep without a GPU: kernel by kernel, and its bookkeeping around a stand-in for the graph."""

import copy
import sys
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from packfp8.data import Collator, PackedBatch
from packfp8.errors import ConfigError, StateError
from packfp8.lengths import Measure
from packfp8.model import captured, wrapper
from packfp8.model.captured import CapturedStep
from packfp8.model.graph import Graph
from packfp8.model.graph import _known as known
from packfp8.rule import align

RULE = align("block")
STATIC = {"static": True, "budget": 256, "max_sequences": 6, "frame_budget": 40}
EPOCH = ([0, 1, 2], [3], [2], [], [4, 5, 1, 0], [5, 2], [0, 3], [1])


@pytest.fixture
def epoch(measure, mixed):
    """epoch(lists of numbers of examples) -> their static batches."""

    def epoch(chosen=EPOCH, **options):
        collator = Collator(measure=measure, rule=RULE, **{**STATIC, **options})
        return [collator.collate([mixed[n] for n in numbers], step=step) for step, numbers in enumerate(chosen)]

    return epoch


class Nothing:
    """A stream or an event of a machine without any."""

    def __init__(self, *args):
        pass

    wait_stream = wait_event = record = __init__

    def __enter__(self):
        return self

    def __exit__(self, *fault):
        pass


class Rerun:
    """In the place of a graph: runs the step anew, with the tensors that it was made with."""

    made: ClassVar[list] = []

    def __init__(self, run, model, optimizer, *, stream, beside=()):
        self.run, self.out = run, None
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.overwrites = all(p.grad is None for p in self.parameters)
        self.gradients = [torch.zeros_like(p) if self.overwrites else p.grad for p in self.parameters]
        self._known = known(optimizer)
        Rerun.made.append(self)

    def replay(self):
        before = [parameter.grad for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient.zero_() if self.overwrites else gradient
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wrapper, "is_replayed", lambda: True)
            out = self.run()
        self.out = out if self.out is None else self.out
        for kept, now in zip(self.out[:2], out[:2], strict=True):
            kept.copy_(now)
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient  # a graph knows tensors, and no attributes

    is_stale = Graph.is_stale


@pytest.fixture
def graphs(monkeypatch):
    """Graphs, streams and pinned memory are stand-ins; the graphs that were made."""
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Nothing)
    monkeypatch.setattr(PackedBatch, "pin_memory", lambda self: self)
    monkeypatch.setattr(captured, "why_never", lambda *_: None)
    monkeypatch.setattr(captured, "Graph", Rerun)
    monkeypatch.setattr(Rerun, "made", [])
    return Rerun.made


@pytest.fixture(params=["no GPU", "stand-in"])
def anywhere(request):
    """Both without a GPU and with the stand-in."""
    return request.getfixturevalue("graphs") if request.param == "stand-in" else None


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2, dtype=torch.float64), capturable=True, **options)


def trained(model, batches, optimizer, call=None):
    """The losses of a training, and its parameters afterwards."""
    losses = []
    for batch in batches:
        count = torch.tensor(max(1, batch.num_supervised))
        if call is None:
            optimizer.zero_grad()
            out = model(batch, global_supervised=count)
            out.loss.backward()
            optimizer.step()
        else:
            out = call(batch, count)
        losses.append(out.loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


def lines(caught):
    return str(caught.value).splitlines()


# -- equal to the plain model ------------------------------------------------------------------------------------------


@pytest.fixture
def _capturable_on_a_cpu(monkeypatch):
    """torch asks for a GPU otherwise."""
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_get_capturable_supported_devices", lambda **_: ["cpu"])


@pytest.mark.usefixtures("_capturable_on_a_cpu")
@pytest.mark.parametrize("inside", [False, True], ids=["optimizer outside", "optimizer inside"])
def test_a_training_is_that_of_the_plain_model_from_its_first_step_on(build, epoch, anywhere, inside):
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


@pytest.mark.usefixtures("_capturable_on_a_cpu")
def test_a_state_that_was_loaded_into_the_optimizer_is_captured_anew(build, epoch, graphs):
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
def test_a_setting_of_the_optimizer_that_changed_is_captured_anew(build, epoch, graphs, change):
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
def test_a_schedule_changes_the_tensor_that_the_graph_reads(build, epoch, graphs, schedule):
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


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_batch_of_another_rule_is_refused_also_where_it_would_be_replayed(build, epoch, measure, mixed, anywhere):
    batch = epoch([[0]])[0]
    step = CapturedStep(build(RULE), batch, warmup=1)
    for _ in range(2):
        step(batch, global_supervised=99)
    foreign = Collator(measure=measure, rule=align("mxfp8"), **STATIC).collate(mixed[:1])
    with pytest.raises(StateError, match="was made by another rule"):
        step(foreign, global_supervised=99)
    with pytest.raises(ConfigError, match="global_supervised is less than"):
        step(batch, global_supervised=1)


def test_an_optimizer_inside_steps_for_windows_of_one_alone(build, epoch):
    model = build(RULE)
    batch = epoch([[0]])[0]
    step = CapturedStep(model, batch, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(ConfigError) as caught:
        step(batch, global_supervised=99, is_first_microbatch=True)
    assert lines(caught) == [
        "the optimizer would step after every micro-batch",
        "  got:      is_first_microbatch=True, and an optimizer inside the captured step",
        "  expected: is_first_microbatch=None, or the optimizer outside",
        "  because:  gradients of a window are added up before the optimizer takes them",
        "  fix:      CapturedStep(model, example) without the optimizer, and optimizer.step() after each window",
    ]


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"lr": 1e-3}, "capturable=False, a learning rate of type float"),
        ({"lr": 1e-3, "capturable": True}, "capturable=True, a learning rate of type float"),
        ({"lr": torch.tensor(1e-3)}, "capturable=False, a learning rate of type Tensor on cpu"),
    ],
)
def test_an_optimizer_that_cannot_be_replayed_is_refused(build, epoch, graphs, options, got):
    model = build(RULE)
    with pytest.raises(ConfigError) as caught:
        CapturedStep(model, epoch([[0]])[0], optimizer=torch.optim.AdamW(model.parameters(), foreach=False, **options))
    assert lines(caught) == [
        "a step of AdamW cannot be replayed",
        f"  got:      {got}",
        "  expected: capturable=True, and a learning rate that is a tensor on cpu",
        "  because:  a graph keeps every number as it was at the capture: schedules would silently do nothing",
        '  fix:      AdamW(..., lr=torch.tensor(1e-4, device="cuda"), capturable=True), or step the optimizer outside',
    ]


@pytest.mark.parametrize("freed", [False, True])
def test_a_parameter_that_is_frozen_or_freed_afterwards_is_refused(build, epoch, anywhere, freed):
    """Its gradients would be added up over all steps, or be there where none should be."""
    model, batch = build(RULE), epoch([[0]])[0]
    model.llm.embedding.weight.requires_grad_(not freed)
    step = CapturedStep(model, batch, warmup=1)
    for _ in range(2):
        step(batch, global_supervised=99)
    model.llm.embedding.weight.requires_grad_(freed)
    with pytest.raises(ConfigError) as caught:
        step(batch, global_supervised=99)
    assert lines(caught) == [
        f"parameter 'llm.embedding.weight' was {'freed' if freed else 'frozen'} after the captured step was made",
        f"  got:      requires_grad={freed}",
        f"  expected: requires_grad={not freed}, as it was then",
        "  because:  a replay computes the gradients of the same parameters as at the capture, and sets back no others",
        "  fix:      make another CapturedStep after freezing or freeing parameters",
    ]


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


@pytest.mark.usefixtures("_capturable_on_a_cpu")
def test_a_learning_rate_that_becomes_a_number_is_refused(build, epoch, graphs):
    model, batch = build(RULE), epoch([[0]])[0]
    optimizer = adamw(model)
    step = CapturedStep(model, batch, optimizer=optimizer, warmup=1)
    for _ in range(2):
        step(batch, global_supervised=99)
    optimizer.param_groups[0]["lr"] = 1e-4
    with pytest.raises(ConfigError, match="capturable=True, a learning rate of type float"):
        step(batch, global_supervised=99)


def test_a_learning_rate_on_another_device_is_refused(build, epoch, graphs):
    """A number on the host would be a constant of the graph."""
    model = build(RULE)
    optimizer = adamw(model)
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    with pytest.raises(ConfigError, match="capturable=True, a learning rate of type Tensor on meta"):
        CapturedStep(model, epoch([[0]])[0], optimizer=optimizer)


def test_parameters_that_were_replaced_are_refused(build, epoch, anywhere):
    model, batch = build(RULE), epoch([[0]])[0]
    step = CapturedStep(model, batch)
    step(batch, global_supervised=99)
    model.encoder = copy.deepcopy(model.encoder)
    with pytest.raises(ConfigError) as caught:
        step(batch, global_supervised=99)
    assert lines(caught) == [
        "the model has other parameters than when the captured step was made",
        "  got:      parameters that were replaced since",
        "  expected: those that it had then",
        "  because:  the step resets, and a replay makes, the gradients of those that it knows",
        "  fix:      shard the model, and exchange its parts, before CapturedStep(model, ...)",
    ]


def test_what_is_no_packed_model_is_refused(build, epoch):
    with pytest.raises(ConfigError) as caught:
        CapturedStep(torch.nn.DataParallel(build(RULE)), epoch([[0]])[0])
    assert lines(caught) == [
        "what shall be captured is not a PackedModel",
        "  got:      DataParallel",
        "  expected: a PackedModel, not wrapped",
        "  because:  a step splices, computes the loss and knows the layouts of the language model by it",
        "  fix:      PackedModel(encoder=..., projector=..., llm=...); a wrapped model trains without a captured step",
    ]


def test_an_example_that_is_no_batch_is_refused(build, epoch, anywhere):
    with pytest.raises(ConfigError, match="not a batch"):
        CapturedStep(build(RULE), {"input_ids": torch.zeros(3)})
    step = CapturedStep(build(RULE), epoch([[0]])[0])
    with pytest.raises(ConfigError, match="not a batch"):
        next(step.feed([{"input_ids": torch.zeros(3)}]))


@pytest.mark.parametrize("warmup", [0, "3", 1.5])
def test_a_capture_without_warm_up_is_refused(build, epoch, warmup):
    with pytest.raises(ConfigError) as caught:
        CapturedStep(build(RULE), epoch([[0]])[0], warmup=warmup)
    assert lines(caught) == [
        "a step cannot be captured before it has run",
        f"  got:      warmup={warmup}",
        "  expected: at least 1",
        "  because:  libraries choose kernels, and delayed scaling takes note of its layers, in a step that is not captured",
        "  fix:      leave it at 3",
    ]
