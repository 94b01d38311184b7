"""What a captured step refuses, and what keeps a model from ever being replayed: told before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from packfp8.errors import ConfigError
from packfp8.model.checks import check_is_batch
from packfp8.model.wrapper import PackedModel

WARM_UP = 3
"""Steps before a capture: as many as torch.cuda.make_graphed_callables takes [read: torch 2.11]."""


def check_step(model: object, example: object, warmup: object) -> None:
    """Nothing, where a step of the model on batches as `example` can be captured after `warmup` steps.

    Raises:
        ConfigError: something else than a model, a batch, and a number of at least 1.
    """
    if not isinstance(model, PackedModel):
        raise _no_model(model)
    check_is_batch(example)
    if not isinstance(warmup, int) or warmup < 1:
        raise _no_warm_up(warmup)


def check_trained(model: nn.Module, trains: Sequence[tuple[Tensor, bool]]) -> None:
    """Nothing, where each parameter of `model`, in their order, is trained or not as it was.

    Raises:
        ConfigError: one was frozen or freed since, or they were replaced.
    """
    first = trains[0][0]  # looked at in every step, so this one stands for all; FSDP puts others in their places for a while
    if not isinstance(first, DTensor) and next(model.parameters()) is not first:
        raise ConfigError(
            "the model has other parameters than when the captured step was made",
            got="parameters that were replaced since",
            expected="those that it had then",
            because="the step resets, and a replay makes, the gradients of those that it knows",
            fix="shard the model, and exchange its parts, before CapturedStep(model, ...)",
        )
    changed = next((n for n, (parameter, was) in enumerate(trains) if parameter.requires_grad != was), None)
    if changed is None:
        return
    name, now = [name for name, _ in model.named_parameters()][changed], not trains[changed][1]
    raise ConfigError(
        f"parameter {name!r} was {'freed' if now else 'frozen'} after the captured step was made",
        got=f"requires_grad={now}",
        expected=f"requires_grad={not now}, as it was then",
        because="a replay computes the gradients of the same parameters as at the capture, and sets back no others",
        fix="make another CapturedStep after freezing or freeing parameters",
    )


def why_never(consumer: str, parameters: list[Tensor], device: torch.device) -> str | None:
    """Why a model of these parameters is never replayed, whatever the batch; None where it may be."""
    if consumer == "te_real":
        return "consumer 'te_real' makes offsets on the host"
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    if device.type != "cuda":
        return f"the model is on {device.type!r}"
    return "the parameters are sharded" if any(isinstance(parameter, DTensor) for parameter in parameters) else None


def check_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Nothing, where a step of the optimizer does the same in a graph on `device` as outside.

    Raises:
        ConfigError: a group of it does not.
    """
    for group in optimizer.param_groups:
        rate = group["lr"]
        where = f" on {rate.device}" if isinstance(rate, Tensor) else ""
        if not group.get("capturable", False) or not isinstance(rate, Tensor) or rate.device != device:
            raise ConfigError(
                f"a step of {type(optimizer).__name__} cannot be replayed",
                got=f"capturable={group.get('capturable')}, a learning rate of type {type(rate).__name__}{where}",
                expected=f"capturable=True, and a learning rate that is a tensor on {device}",
                because="a graph keeps every number as it was at the capture: schedules would silently do nothing",
                fix='AdamW(..., lr=torch.tensor(1e-4, device="cuda"), capturable=True), or step the optimizer outside',
            )


def _no_model(model: object) -> ConfigError:
    return ConfigError(
        "what shall be captured is not a PackedModel",
        got=type(model).__name__,
        expected="a PackedModel, not wrapped",
        because="a step splices, computes the loss and knows the layouts of the language model by it",
        fix="PackedModel(encoder=..., projector=..., llm=...); a wrapped model trains without a captured step",
    )


def _no_warm_up(warmup: object) -> ConfigError:
    return ConfigError(
        "a step cannot be captured before it has run",
        got=f"warmup={warmup}",
        expected="at least 1",
        because="libraries choose kernels, and delayed scaling takes note of its layers, in a step that is not captured",
        fix=f"leave it at {WARM_UP}",
    )


def steps_each_time(first: bool) -> ConfigError:
    """The error for micro-batches given to a step with its optimizer inside."""
    return ConfigError(
        "the optimizer would step after every micro-batch",
        got=f"is_first_microbatch={first}, and an optimizer inside the captured step",
        expected="is_first_microbatch=None, or the optimizer outside",
        because="gradients of a window are added up before the optimizer takes them",
        fix="CapturedStep(model, example) without the optimizer, and optimizer.step() after each window",
    )
