"""The edge to Transformer Engine where it is absent, broken, old or new: told by stand-ins for its package."""

import importlib.machinery
import sys
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import nn

from packfp8 import ConfigError, align
from packfp8.model import te
from packfp8.model.fp8 import Fp8


@pytest.fixture
def package(monkeypatch):
    """A function that installs modules under transformer_engine: (dotted name, attributes) -> the module."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def install(name, **attributes):
        module = ModuleType(name)
        module.__dict__.update(attributes, __path__=[], __spec__=importlib.machinery.ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return install


def _absent():
    with pytest.raises(ConfigError) as caught:
        te.library()
    assert len(str(caught.value).splitlines()) == 5
    return caught.value


def test_without_a_gpu_or_the_package_there_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = _absent()
    assert error.what == "Transformer Engine cannot run here"
    assert "no CUDA GPU" in error.got
    assert "torch extension" in error.expected
    assert "silently train in another precision" in error.because
    assert "pip install" in error.fix


@pytest.mark.parametrize(
    "fault",
    [
        ImportError("no module"),
        OSError("libtransformer_engine.so: undefined symbol"),
        FileNotFoundError("could not find shared object file"),
        RuntimeError("No CUDA GPUs are available"),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_whatever_the_import_raises_is_told_in_the_same_words(package, monkeypatch, fault):
    monkeypatch.delitem(sys.modules, "transformer_engine.pytorch", raising=False)

    def broken(name):
        raise fault

    monkeypatch.setattr(te.importlib, "import_module", broken)
    assert _absent().got == f"{type(fault).__name__}: {fault}"


def test_an_unforeseen_error_is_not_hidden(package, monkeypatch):
    def broken(name):
        raise ZeroDivisionError

    monkeypatch.setattr(te.importlib, "import_module", broken)
    with pytest.raises(ZeroDivisionError):
        te.library()


def test_reading_a_configuration_needs_no_transformer_engine_and_preparing_a_model_does(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fp8 = Fp8.from_config({"automodel_backend": {"te_fp8": {"recipe": "block"}}})
    for act in (lambda: fp8.prepare(nn.Linear(32, 32), align("block")), fp8.forward_context):
        with pytest.raises(ConfigError, match="Transformer Engine cannot run here"):
            act()


@contextmanager
def _recorded(calls, **arguments):
    calls.append(arguments)
    yield


@pytest.mark.parametrize("spelling", ["autocast", "fp8_autocast"])
def test_both_spellings_of_the_context_are_served(package, spelling):
    calls, recipe = [], object()
    package("transformer_engine.pytorch", **{spelling: lambda **arguments: _recorded(calls, **arguments)})
    with te.autocast(recipe):
        pass
    assert calls == [{"enabled": True, "recipe" if spelling == "autocast" else "fp8_recipe": recipe}]


def test_the_newer_spelling_is_preferred_as_the_older_one_warns(package):
    calls = []
    package(
        "transformer_engine.pytorch",
        autocast=lambda **arguments: _recorded(calls, **arguments),
        fp8_autocast=lambda **arguments: pytest.fail("deprecated"),
    )
    with te.autocast("recipe"):
        pass
    assert len(calls) == 1


def test_recipes_are_made_by_their_class_and_a_version_without_one_is_named(package):
    package("transformer_engine.pytorch")
    made = type("Float8BlockScaling", (), {})
    package("transformer_engine.common.recipe", Float8BlockScaling=made)
    assert type(te.make_recipe("block")) is made
    with pytest.raises(ConfigError, match="this Transformer Engine has no recipe 'nvfp4'"):
        te.make_recipe("nvfp4")


class TeLinear(nn.Linear):
    """Stands for te.Linear; a subclass of nn.Linear, so that its type alone tells them apart."""

    def __init__(self, in_features, out_features, *, bias, params_dtype, device):
        super().__init__(in_features, out_features, bias=bias, dtype=params_dtype, device=device)


@pytest.fixture
def layers(package):
    stand_ins = {name: type(name, (nn.Module,), {}) for name in ("LayerNormLinear", "LayerNormMLP", "GroupedLinear")}
    package("transformer_engine.pytorch", Linear=TeLinear, **stand_ins)


def _on_gpu(model):
    """On `meta`, which stands for a GPU that this machine lacks."""
    return model.to("meta")


def test_a_plain_model_is_converted_over_the_same_parameters_but_for_filters_and_head(layers):
    model = _on_gpu(nn.ModuleDict({"a": nn.Linear(32, 16), "b": nn.Linear(16, 32, bias=False), "head": nn.Linear(32, 7)}))
    model.head = model["head"]
    kept = dict(model.named_parameters())
    after = Fp8.te("block", filter_fqns=["b"]).prepare(model, align("block"))
    assert [type(after[name]) for name in ("a", "b", "head")] == [TeLinear, nn.Linear, nn.Linear]
    assert all(parameter is kept[name] for name, parameter in after.named_parameters())


def test_a_model_with_layers_of_transformer_engine_is_left_as_it_stands(layers):
    model = _on_gpu(nn.Sequential(TeLinear(32, 16, bias=False, params_dtype=torch.float32, device="cpu"), nn.Linear(16, 7)))
    assert type(Fp8.te("current").prepare(model, align("current"))[1]) is nn.Linear


def test_a_model_in_which_no_layer_would_run_in_fp8_is_an_error(layers):
    with pytest.raises(ConfigError, match="no layer of the language model would run in FP8"):
        Fp8.te("block", filter_fqns=["0"]).prepare(_on_gpu(nn.Sequential(nn.Linear(32, 32))), align("block"))


@pytest.mark.parametrize(("recipe", "runs"), [("block", True), ("delayed", True), ("mxfp8", False), ("nvfp4", False)])
def test_a_recipe_beyond_the_gpu_is_refused_before_any_kernel(layers, recipe, runs):
    model, rule = _on_gpu(nn.Sequential(nn.Linear(32, 32))), align(recipe)
    if runs:
        Fp8.te(recipe).prepare(model, rule)
    else:
        with pytest.raises(ConfigError) as caught:
            Fp8.te(recipe).prepare(model, rule)
        assert "sm90" in caught.value.got
        assert "sm100" in caught.value.expected


class Quantised:
    """Stands for an FP8 parameter: what is made like it, is FP8 again."""

    dtype, shape = "fp8", (4,)

    def quantize_(self, tensor):
        raise NotImplementedError

    def dequantize(self):
        return torch.zeros(4)


def _old_adam():
    """FusedAdam of Transformer Engine 2.10, in what matters: states are made like the parameter."""

    class FusedAdam:
        def __init__(self):
            self.state, self._scales = {}, {}

        def _initialize_state(self, param, state_name, zero_buffer, store_param_remainders=False):
            like = torch.empty_like(param, dtype=torch.float32).dtype if isinstance(param, torch.Tensor) else param.dtype
            self.state.setdefault(param, {})[state_name] = like
            self._scales.setdefault(param, {})[state_name] = "scale"

    return FusedAdam


@pytest.fixture
def optimizers(package, monkeypatch):
    package("transformer_engine.pytorch")
    package("transformer_engine.pytorch.optimizers")
    monkeypatch.setattr(te, "_PATCHED", set())
    return package("transformer_engine.pytorch.optimizers.fused_adam", FusedAdam=_old_adam()).FusedAdam


def test_the_optimizer_of_quantised_parameters_is_patched_once_where_the_version_has_the_fault(optimizers, monkeypatch):
    monkeypatch.setattr(te, "version", lambda: (2, 11, 0))
    parameter, plain, optimizer = Quantised(), torch.zeros(4), optimizers()
    optimizer._initialize_state(parameter, "exp_avg", True)
    assert optimizer.state[parameter]["exp_avg"] == "fp8"

    assert [(fault.present, fault.patched) for fault in te.known_faults()] == [(True, False)]
    assert te.patch_known_faults() == ("FusedAdam with quantised parameters",)
    method = optimizers._initialize_state
    assert te.patch_known_faults() == ()
    assert optimizers._initialize_state is method
    assert [(fault.present, fault.patched) for fault in te.known_faults()] == [(True, True)]

    for name in ("exp_avg", "exp_avg_sq"):
        optimizer._initialize_state(parameter, name, True, store_param_remainders=False)
        optimizer._initialize_state(plain, name, True)
    assert optimizer.state == {p: {"exp_avg": torch.float32, "exp_avg_sq": torch.float32} for p in (parameter, plain)}
    assert optimizer._scales.keys() == {parameter, plain}


@pytest.mark.parametrize("installed", [(2, 12), (2, 12, 0), (2, 20, 2), (3, 0), None])
def test_a_version_without_the_fault_is_left_alone(optimizers, monkeypatch, installed):
    monkeypatch.setattr(te, "version", lambda: installed)
    method = optimizers._initialize_state
    assert te.patch_known_faults() == ()
    assert optimizers._initialize_state is method
    assert not any(fault.present or fault.patched for fault in te.known_faults())


def test_a_known_fault_says_what_it_does_and_since_when_it_is_gone():
    for fault in te.known_faults():
        assert fault.name
        assert fault.effect
        assert fault.fixed_in > (2, 0)


@pytest.mark.parametrize(("text", "numbers"), [("2.20.2", (2, 20, 2)), ("2.10.0+cu13", (2, 10, 0)), ("2.9", (2, 9))])
def test_the_version_is_read_without_an_import(monkeypatch, text, numbers):
    monkeypatch.setattr(te.importlib.metadata, "version", lambda name: text)
    assert te.version() == numbers


@pytest.mark.parametrize("spelling", ["autocast", "fp8_autocast"])
def test_recomputation_goes_through_the_library_inside_a_context_that_is_off(package, spelling):
    calls, contexts = [], []

    def checkpoint(function, *args, use_reentrant, context_fn, **kwargs):
        calls.append(use_reentrant)
        first, again = context_fn()
        with first:
            out = function(*args, **kwargs)
        with again:
            return out

    package("transformer_engine.pytorch", checkpoint=checkpoint, **{spelling: lambda **given: _recorded(contexts, **given)})
    assert Fp8.te("delayed").checkpoint(lambda a, b: a + b, 1, b=2) == 3
    assert calls == [False]
    assert contexts == [{"enabled": False}]


def test_torchao_recomputes_as_torch_does():
    x = torch.ones(3, requires_grad=True)
    runs = []

    def double(t):
        runs.append(1)
        return (t * t).exp()

    Fp8.torchao("tensorwise", emulate=True).checkpoint(double, x).sum().backward()
    assert len(runs) == 2
    assert torch.allclose(x.grad, 2 * torch.ones(3).exp())
