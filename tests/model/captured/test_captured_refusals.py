"""What a captured step refuses."""

import copy

import pytest
import torch

from packfp8.data import Collator
from packfp8.errors import ConfigError, StateError
from packfp8.model.captured import CapturedStep
from packfp8.rule import align

RULE = align("block")
STATIC = {"static": True, "budget": 256, "max_sequences": 6, "frame_budget": 40}


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


def test_an_optimizer_inside_steps_for_windows_of_one_alone(build, epoch, lines):
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
def test_an_optimizer_that_cannot_be_replayed_is_refused(build, epoch, graphs, options, got, lines):
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
def test_a_parameter_that_is_frozen_or_freed_afterwards_is_refused(build, epoch, anywhere, freed, lines):
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


@pytest.mark.usefixtures("_capturable_on_a_cpu")
def test_a_learning_rate_that_becomes_a_number_is_refused(build, epoch, graphs, adamw):
    model, batch = build(RULE), epoch([[0]])[0]
    optimizer = adamw(model)
    step = CapturedStep(model, batch, optimizer=optimizer, warmup=1)
    for _ in range(2):
        step(batch, global_supervised=99)
    optimizer.param_groups[0]["lr"] = 1e-4
    with pytest.raises(ConfigError, match="capturable=True, a learning rate of type float"):
        step(batch, global_supervised=99)


def test_a_learning_rate_on_another_device_is_refused(build, epoch, graphs, adamw):
    """A number on the host would be a constant of the graph."""
    model = build(RULE)
    optimizer = adamw(model)
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    with pytest.raises(ConfigError, match="capturable=True, a learning rate of type Tensor on meta"):
        CapturedStep(model, epoch([[0]])[0], optimizer=optimizer)


def test_parameters_that_were_replaced_are_refused(build, epoch, anywhere, lines):
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


def test_what_is_no_packed_model_is_refused(build, epoch, lines):
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
def test_a_capture_without_warm_up_is_refused(build, epoch, warmup, lines):
    with pytest.raises(ConfigError) as caught:
        CapturedStep(build(RULE), epoch([[0]])[0], warmup=warmup)
    assert lines(caught) == [
        "a step cannot be captured before it has run",
        f"  got:      warmup={warmup}",
        "  expected: at least 1",
        "  because:  libraries choose kernels, and delayed scaling takes note of its layers, in a step that is not captured",
        "  fix:      leave it at 3",
    ]
