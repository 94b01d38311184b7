"""Fp8: which library runs the language model's linear layers in FP8, by which recipe; and the checks before any kernel.

    Fp8.te("block")              Transformer Engine, by its own context around the forward pass
    Fp8.torchao("tensorwise")    torchao, by conversion of the linear layers; no context
    Fp8.from_config(config)      either, in NeMo's spelling

Whatever would silently do nothing is refused: a missing library, a GPU that lacks the recipe, a model without such layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.tensor import DTensor

from packfp8.errors import ConfigError
from packfp8.model import float8, fp8_config, te
from packfp8.model.float8 import Float8Options
from packfp8.rule import RECIPES, Alignment

_WHOLE: Mapping[str, str] = MappingProxyType({})
_DEFAULTS = Float8Options()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """The FP8 of a language model. Build it with `Fp8.te`, `Fp8.torchao` or `Fp8.from_config`.

    Args:
        library: "te" or "torchao".
        recipe: a key of `packfp8.rule.RECIPES`; the rule of the batches must name the same.
        filter_fqns: linear layers whose name contains one of these are not converted.
        te_recipe: the Transformer Engine recipe object; empty where its defaults are taken on first use, or for torchao.
        options: what torchao is asked for; `filter_fqns` serves both.
    """

    library: str
    recipe: str
    te_recipe: tuple[object, ...] = ()
    options: Float8Options = _DEFAULTS

    @classmethod
    def te(cls, recipe: object, *, filter_fqns: Iterable[str] = ()) -> Fp8:
        """FP8 through Transformer Engine.

        Args:
            recipe: "delayed", "current", "block", "mxfp8", "nvfp4", or a recipe object of Transformer Engine.
            filter_fqns: matters only for a model whose `nn.Linear` layers are to be converted.

        Raises:
            ConfigError: a recipe that the rule does not know.
        """
        name = recipe if isinstance(recipe, str) else te.recipe_name(recipe)
        _known("te", name, recipe)
        objects = () if isinstance(recipe, str) else (recipe,)
        return cls(library="te", recipe=name, te_recipe=objects, options=Float8Options(filter_fqns=tuple(filter_fqns)))

    @classmethod
    def torchao(
        cls,
        recipe: str,
        *,
        filter_fqns: Iterable[str] = (),
        fsdp_all_gather: bool = False,
        precompute_scale: bool = False,
        recompute_weight: bool = False,
        emulate: bool = False,
    ) -> Fp8:
        """FP8 through torchao; the arguments are those of `packfp8.model.float8.Float8Options`.

        Raises:
            ConfigError: an unknown recipe, or options that contradict each other.
        """
        _known("torchao", recipe, recipe)
        if fsdp_all_gather and recipe != "tensorwise":
            raise _useless(
                "fsdp_all_gather", f"recipe {recipe!r}", "recipe 'tensorwise'", "only weights of one scale are gathered in FP8"
            )
        if precompute_scale and not fsdp_all_gather:
            raise _useless(
                "precompute_scale", "fsdp_all_gather=False", "fsdp_all_gather=True", "the scales are those of the FP8 gather"
            )
        options = Float8Options(
            filter_fqns=tuple(filter_fqns),
            fsdp_all_gather=fsdp_all_gather,
            precompute_scale=precompute_scale,
            recompute_weight=recompute_weight,
            emulate=emulate,
        )
        return cls(library="torchao", recipe=recipe, options=options)

    @classmethod
    def from_config(cls, node: object) -> Fp8 | None:
        """What a configuration asks for, in NeMo's spelling; None where it asks for no FP8.

        Raises:
            ConfigError: both libraries at once, a key that nothing reads, a section that would do nothing.
        """
        found = fp8_config.read(node)
        if found is None:
            return None
        library, arguments = found
        return getattr(cls, library)(arguments.pop("recipe"), **arguments)

    def prepare(self, llm: nn.Module, rule: Alignment, *, splits: Mapping[str, str] = _WHOLE) -> nn.Module:
        """The language model ready for this recipe, every check passed.

        torchao replaces its linear layers. For Transformer Engine its own layers are used as they stand; a model without any
        has its `nn.Linear` layers replaced.

        Args:
            rule: the rule of the batches that the model will see.
            splits: last name of a linear layer to the side that tensor parallelism divides, "out" or "in", for layers that
                are given whole and will be divided later. Layers that know it, or are divided already, need none.

        Raises:
            ConfigError: the rule names another recipe, the machine cannot run it, or no layer would run in FP8.
            RuleError: a layer whose features, as each rank holds them, are no multiple.
        """
        self._check_rule(rule)
        self._check_machine(llm)
        self._check_features(self._candidates(llm), rule, splits)
        if self.library == "torchao":
            llm = float8.convert(llm, self.recipe, self.options, self._chooser(llm))
            self._check_any(float8.linear_layers(llm), llm)
        else:
            te.patch_known_faults()
            llm = llm if te.linear_layers(llm) else te.convert(llm, self._chooser(llm))
            self._check_any(te.linear_layers(llm), llm)
        return llm

    def forward_context(self) -> AbstractContextManager:
        """The context of one forward pass; backward stays outside it, or delayed scaling would take its maxima twice."""
        if self.library == "torchao":
            return nullcontext()
        return te.autocast(self.te_recipe[0] if self.te_recipe else te.make_recipe(self.recipe))

    def checkpoint(self, function: Callable, *args, **kwargs):
        """What `function` returns, its activations computed again in backward rather than kept."""
        if self.library == "te":
            return te.checkpoint(function, *args, **kwargs)
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)

    def after_optimizer_step(self, model: nn.Module) -> None:
        """Nothing; call it after each optimizer step, and after loading weights.

        torchao finds the scales of all FP8 weights in one all-reduce here, exactly where that was configured and the model is
        sharded over more than one rank. Every rank must call it.
        """
        if self.options.precompute_scale and float8.is_sharded(model):
            float8.precompute_scales(model)

    def _check_rule(self, rule: Alignment) -> None:
        if rule.recipe != self.recipe:
            raise ConfigError(
                "the rule and the model speak of different recipes",
                got=f"a rule for {rule.recipe!r}, a model in {self.recipe!r}",
                expected="one recipe",
                because="each recipe asks for its own token multiples",
                fix=f"align({self.recipe!r}, ...), on the data side too",
            )
        fp8_attention = [f for f in ("fp8_dpa", "fp8_mha") if any(getattr(r, f, False) for r in self.te_recipe)]
        if fp8_attention and rule.layout == "thd":
            raise ConfigError(
                "FP8 attention cannot be trained on packs",
                got=f"{fp8_attention[0]}=True, layout 'thd'",
                expected=f"{fp8_attention[0]}=False",
                because="FP8 attention with THD has no backward pass on Hopper [read: Transformer Engine 2.20.2]",
                fix="leave attention in BF16: FP8 is for the linear layers",
            )

    def _check_machine(self, llm: nn.Module) -> None:
        """Refuses a machine that lacks the library or the kernels. A model on `meta` is asked about where it will go."""
        needed = RECIPES[self.recipe].capability
        if self.library == "te":
            te.library()
        device = next((parameter.device for parameter in llm.parameters()), torch.device("cpu"))
        if self.options.emulate or (self.library == "torchao" and device.type == "meta"):
            return
        found = (
            torch.cuda.get_device_capability(device if device.type == "cuda" else None) if torch.cuda.is_available() else None
        )
        if device.type not in ("cuda", "meta") or found is None or found < needed:
            raise ConfigError(
                f"recipe {self.recipe!r} cannot run on this device",
                got=f"a model on {device.type!r}" + (f", sm{found[0]}{found[1]}" if found else ", no CUDA GPU"),
                expected=f"a CUDA GPU of sm{needed[0]}{needed[1]} or newer",
                because="the FP8 kernels of the recipe exist from that capability on",
                fix="move the model to such a GPU first, or choose emulate=True (torchao) or fp8=None",
            )

    def _chooser(self, llm: nn.Module) -> Callable[[nn.Module, str], bool]:
        """Whether a layer is to be converted: a plain linear one that no filter names. The loss keeps the head's precision."""
        head, filters = getattr(llm, "head", None), self.options.filter_fqns
        return lambda layer, name: type(layer) is nn.Linear and layer is not head and not any(f in name for f in filters)

    def _candidates(self, llm: nn.Module) -> list[tuple[str, nn.Module]]:
        """Names and modules of the layers that will run in FP8."""
        layers, chosen = te.linear_layers(llm) if self.library == "te" else [], self._chooser(llm)
        return layers or [(name, layer) for name, layer in llm.named_modules() if chosen(layer, name)]

    def _check_features(self, layers: list[tuple[str, nn.Module]], rule: Alignment, splits: Mapping[str, str]) -> None:
        for name, layer in layers:
            for weight_name, weight in layer.named_parameters(recurse=False):
                if weight.dim() == 2:
                    held = _held(weight)
                    split = splits.get(name.rpartition(".")[2]) if held == tuple(weight.shape) else None
                    label = name or type(layer).__name__
                    label = label if weight_name == "weight" else f"{label}.{weight_name}"
                    rule.check_features(label, held[1], held[0], split=split)

    def _check_any(self, layers: list, llm: nn.Module) -> None:
        if not layers:
            raise ConfigError(
                "no layer of the language model would run in FP8",
                got=f"{type(llm).__name__} of {len(list(llm.modules()))} modules, filter_fqns={self.options.filter_fqns}",
                expected="at least one linear layer, besides the head, that is not filtered out",
                because="the configuration would silently do nothing",
                fix="loosen filter_fqns, or choose fp8=None",
            )


def _known(library: str, name: str | None, given: object) -> None:
    names = [recipe.name for recipe in RECIPES.values() if recipe.library == library]
    if name not in names:
        raise ConfigError(
            f"the recipe is none of {'Transformer Engine' if library == 'te' else 'torchao'} that the rule knows",
            got=repr(given),
            expected=f"one of {', '.join(names)}" + (", or such a recipe object" if library == "te" else ""),
            because="without its token multiples no batch can be made for it",
            fix="name one of these recipes",
        )


def _useless(option: str, got: str, expected: str, because: str) -> ConfigError:
    return ConfigError(
        f"torchao's {option} would do nothing",
        got=got,
        expected=expected,
        because=because,
        fix=f"give {expected}, or leave {option} out",
    )


def _held(weight: torch.Tensor) -> tuple[int, ...]:
    """The shape of `weight` as each TP rank uses it: what FSDP cuts is gathered again before the GEMM, what tp cuts is not."""
    shape = list(weight.shape)
    if isinstance(weight, DTensor):
        names = weight.device_mesh.mesh_dim_names or ()
        for dim, (name, placement) in enumerate(zip(names, weight.placements)):
            if name == "tp" and placement.is_shard():
                shape[placement.dim] //= weight.device_mesh.size(dim)
    return tuple(shape)
