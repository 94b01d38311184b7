"""The one file that imports Transformer Engine: whether it is here, its recipes, its contexts, its known faults.

Nothing is imported before it is asked for, so that a machine without Transformer Engine reads configurations and runs all the
rest. What an import raises there differs by what is missing (measured, Transformer Engine 2.20.2): ImportError without the
package, FileNotFoundError without its torch extension, OSError where it is loaded before torch, RuntimeError without a GPU.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import nn

from packfp8.errors import ConfigError

RECIPE_CLASSES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
"""Names of our recipes and of the classes in `transformer_engine.common.recipe`."""

_LINEAR = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")


def library() -> ModuleType:
    """`transformer_engine.pytorch`.

    Raises:
        ConfigError: it cannot be imported, or there is no GPU to run it.
    """
    reason = why_absent()
    if reason:
        raise ConfigError(
            "Transformer Engine cannot run here",
            got=reason,
            expected="a CUDA GPU, and transformer_engine with its torch extension",
            because="an FP8 configuration that the machine cannot run would silently train in another precision",
            fix="pip install 'transformer-engine[pytorch]' on the GPU machine, or choose fp8=None",
        )
    return importlib.import_module("transformer_engine.pytorch")


def why_absent() -> str | None:
    """One line that says why Transformer Engine cannot run here; None where it can."""
    if not torch.cuda.is_available():
        return "no CUDA GPU" if _found() else "no CUDA GPU, and no module named 'transformer_engine'"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as fault:  # FileNotFoundError is an OSError
        text = " ".join(str(fault).split())
        return f"{type(fault).__name__}: {text[:200]}"
    return None


def version() -> tuple[int, ...] | None:
    """Numbers of the installed version, e.g. (2, 20, 2); None where none is installed. Nothing is imported."""
    try:
        text = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in text.split("+")[0].split(".") if part.isdigit())


def recipe_name(recipe: object) -> str | None:
    """Our name of a Transformer Engine recipe object, by its class or the nearest base; None where the rule knows none."""
    names = {cls: name for name, cls in RECIPE_CLASSES.items()}
    return next((names[kind.__name__] for kind in type(recipe).__mro__ if kind.__name__ in names), None)


def make_recipe(name: str) -> object:
    """A new Transformer Engine recipe with that library's own defaults.

    Raises:
        ConfigError: Transformer Engine is absent or too old for the recipe.
    """
    library()
    recipes, cls = importlib.import_module("transformer_engine.common.recipe"), RECIPE_CLASSES[name]
    if not hasattr(recipes, cls):
        raise ConfigError(
            f"this Transformer Engine has no recipe {name!r}",
            got=f"version {'.'.join(map(str, version() or ()))}, without {cls}",
            expected=f"a version with transformer_engine.common.recipe.{cls}",
            because="another recipe in its place would need other token multiples",
            fix="upgrade transformer-engine, or choose another recipe",
        )
    return getattr(recipes, cls)()


def autocast(recipe: object) -> AbstractContextManager:
    """The context in which Transformer Engine's layers run by `recipe`; it is for the forward pass alone.

    Backward reads what forward stored. Entered anew around backward, delayed scaling would take its maxima twice a step.
    """
    te = library()
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=recipe)
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe)  # the older spelling


def checkpoint(function: Callable, *args, **kwargs):
    """What `function` returns; its activations are computed again in backward, with the FP8 scales of this forward.

    torch's own checkpointing knows nothing of the scales. Transformer Engine's runs a function again in a context of its own,
    at whose end delayed scaling would take its maxima once more; inside another, which is off, it does not.
    """
    te = library()
    off = getattr(te, "autocast", None) or te.fp8_autocast

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), off(enabled=False)

    return te.checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def rotary_angles(tokens: int, head_dim: int, base: float, device: torch.device) -> torch.Tensor:
    """float32 `[tokens, 1, 1, head_dim]`, the angle of every position; the halves of a head turn together."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    angles = torch.arange(tokens, dtype=torch.float32, device=device)[:, None] * base ** (-pairs / head_dim)
    return torch.cat((angles, angles), dim=-1)[:, None, None]


def rotated(t: torch.Tensor, angles: torch.Tensor, layout: str, cu_seqlens: torch.Tensor | None, cp: int, cp_rank: int):
    """`t` `[tokens..., heads, head_dim]` turned by each token's place in its slot, or in its row where there are no offsets."""
    rope = importlib.import_module("transformer_engine.pytorch.attention.rope")
    return rope.apply_rotary_pos_emb(
        t, angles, tensor_format=layout, fused=True, cu_seqlens=cu_seqlens, cp_size=cp, cp_rank=cp_rank
    )


def is_quantising() -> bool:
    """Whether the code runs within `autocast`."""
    homes = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")  # the newer first
    home = homes[0] if importlib.util.find_spec(homes[0]) else homes[1]
    return importlib.import_module(home).FP8GlobalStateManager.is_fp8_enabled()


def linear_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules of the Transformer Engine layers that hold GEMM weights."""
    te = library()
    kinds = tuple(getattr(te, name) for name in _LINEAR)
    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, kinds)]


def convert(module: nn.Module, chosen: Callable[[nn.Module, str], bool]) -> nn.Module:
    """`module` with its chosen `nn.Linear` layers replaced by `te.Linear` over the same parameters."""
    te = library()

    def replaced(layer: nn.Linear) -> nn.Module:
        weight, bias = layer.weight, layer.bias
        new = te.Linear(
            layer.in_features, layer.out_features, bias=bias is not None, params_dtype=weight.dtype, device=weight.device
        )
        new.weight = weight
        if bias is not None:
            new.bias = bias
        return new.train(layer.training)

    for name, layer in list(module.named_modules()):
        if chosen(layer, name):
            parent, _, child = name.rpartition(".")
            if not name:
                return replaced(layer)
            setattr(module.get_submodule(parent), child, replaced(layer))
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of Transformer Engine that we know.

    Args:
        name: short, for people.
        fixed_in: first version without it.
        effect: what happens to whom it meets.
        present: whether the installed version has it.
        patched: whether it has been patched in this process.
    """

    name: str
    fixed_in: tuple[int, ...]
    effect: str
    present: bool
    patched: bool


def known_faults() -> tuple[Fault, ...]:
    """The faults that we know of, and whether they concern the installed version. Nothing is imported or changed."""
    installed = version()
    return tuple(
        Fault(
            name=name,
            fixed_in=fixed_in,
            effect=effect,
            present=installed is not None and installed < fixed_in,
            patched=name in _PATCHED,
        )
        for name, (fixed_in, effect, _) in _FAULTS.items()
    )


def patch_known_faults() -> tuple[str, ...]:
    """Names of the faults that this call patched: those that the installed version has and that were not patched before."""
    todo = [fault.name for fault in known_faults() if fault.present and not fault.patched]
    for name in todo:
        _FAULTS[name][2]()
        _PATCHED.add(name)
    return tuple(todo)


def _patch_fused_adam() -> None:
    """The optimizer's state of a quantised parameter is laid out as its plain values are."""
    adam = importlib.import_module("transformer_engine.pytorch.optimizers.fused_adam").FusedAdam
    original = adam._initialize_state

    def _initialize_state(self, param, state_name, *args, **kwargs):
        if not hasattr(param, "quantize_"):  # only a quantised tensor has it
            return original(self, param, state_name, *args, **kwargs)
        plain = param.dequantize().detach()
        original(self, plain, state_name, *args, **kwargs)
        self.state[param][state_name] = self.state.pop(plain)[state_name]
        if plain in self._scales:
            self._scales.setdefault(param, {}).update(self._scales.pop(plain))
        return None

    adam._initialize_state = _initialize_state


_FAULTS: dict[str, tuple[tuple[int, ...], str, Callable[[], None]]] = {
    "FusedAdam with quantised parameters": (
        (2, 12),
        "its states inherit the FP8 type of the parameter instead of the type asked for "
        "(read: NVIDIA/TransformerEngine#2535, NVIDIA-NeMo/Automodel#1417)",
        _patch_fused_adam,
    )
}
_PATCHED: set[str] = set()


def _found() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None
