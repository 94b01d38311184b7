"""The edge to torchao: conversion of `nn.Linear` to `Float8Linear`, and the scales that FSDP wants after an optimizer step."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from packfp8.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Options:
    """What torchao is asked for.

    Args:
        filter_fqns: layers whose name contains one of these stay as they are.
        fsdp_all_gather: FSDP gathers the weights in FP8; tensorwise only.
        precompute_scale: one all-reduce after each optimizer step finds the scales of all weights; needs `fsdp_all_gather`.
        recompute_weight: backward casts the gathered weight again instead of keeping its FP8 copy.
        emulate: the FP8 numbers without FP8 hardware, slowly; runs on a CPU.
    """

    filter_fqns: tuple[str, ...] = ()
    fsdp_all_gather: bool = False
    precompute_scale: bool = False
    recompute_weight: bool = False
    emulate: bool = False


def library() -> ModuleType:
    """`torchao.float8`.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return importlib.import_module("torchao.float8")
    except (ImportError, OSError, RuntimeError) as fault:
        raise ConfigError(
            "torchao cannot run here",
            got=f"{type(fault).__name__}: {fault}",
            expected="the package torchao, of a version for this torch",
            because="an FP8 configuration that the machine cannot run would silently train in another precision",
            fix="pip install torchao, or choose fp8=None",
        ) from fault


def convert(module: nn.Module, recipe: str, options: Float8Options, chosen: Callable[[nn.Module, str], bool]) -> nn.Module:
    """`module` with its chosen `nn.Linear` layers replaced by `Float8Linear` over the same parameters."""
    float8 = library()
    config = replace(
        float8.Float8LinearConfig.from_recipe_name(recipe),
        enable_fsdp_float8_all_gather=options.fsdp_all_gather,
        force_recompute_fp8_weight_in_bwd=options.recompute_weight,
        emulate=options.emulate,
    )
    return float8.convert_to_float8_training(module, config=config, module_filter_fn=chosen)


def linear_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules of the converted layers."""
    kind = importlib.import_module("torchao.float8.float8_linear").Float8Linear
    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, kind)]


def precompute_scales(module: nn.Module) -> None:
    """Nothing; the scales of all FP8 weights are known afterwards, at the cost of one all-reduce."""
    library().precompute_float8_dynamic_scale_for_fsdp(module)


def is_sharded(module: nn.Module) -> bool:
    """Whether a parameter of `module` is cut over more than one rank."""
    return any(
        isinstance(placement, Shard) and parameter.device_mesh.size(dim) > 1
        for parameter in module.parameters()
        if isinstance(parameter, DTensor)
        for dim, placement in enumerate(parameter.placements)
    )
