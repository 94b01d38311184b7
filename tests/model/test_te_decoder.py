"""TeDecoder holds the plain decoder's parameters, told by stand-ins for its layers; what it computes, the GPU tests tell."""

import importlib.machinery
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from packfp8 import ConfigError
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder
from packfp8.model.te_decoder import TeDecoder, plain_name

SIZES = DecoderSizes(vocab=48, hidden=32, ffn=16, layers=3, heads=4, kv_heads=2)


def _weights(**shapes):
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    return module


def _stand_ins():
    """Layers that hold parameters under Transformer Engine's names, in its shapes."""
    return {
        "LayerNormLinear": lambda i, o, **_: _weights(layer_norm_weight=(i,), weight=(o, i)),
        "Linear": lambda i, o, **_: _weights(weight=(o, i)),
        "LayerNormMLP": lambda h, f, **_: _weights(layer_norm_weight=(h,), fc1_weight=(2 * f, h), fc2_weight=(h, f)),
        "DotProductAttention": lambda *_, **__: nn.Module(),
    }


@pytest.fixture
def decoder(monkeypatch):
    module = ModuleType("transformer_engine.pytorch")
    module.__dict__.update(_stand_ins(), __spec__=importlib.machinery.ModuleSpec("transformer_engine.pytorch", None))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return TeDecoder(SIZES, dtype=torch.float32, device="cpu")


def test_it_holds_the_plain_decoder_s_parameters_and_no_others(decoder):
    state = PlainDecoder(SIZES).state_dict()
    found = {plain_name(name): parameter.shape for name, parameter in decoder.named_parameters()}
    assert found == {name: value.shape for name, value in state.items()}
    decoder.load_plain(state)
    assert all(torch.equal(parameter, state[plain_name(name)]) for name, parameter in decoder.named_parameters())


@pytest.mark.parametrize(
    ("change", "name", "got"),
    [
        (lambda state: state.pop("layers.1.fc1.weight"), "layers.1.fc1.weight", "nothing"),
        (lambda state: state.update({"layers.1.fc1.bias": torch.zeros(32)}), "layers.1.fc1.bias", "(32,)"),
        (lambda state: state.update({"norm.weight": torch.zeros(31)}), "norm.weight", "(31,)"),
    ],
    ids=["missing", "unknown", "of another shape"],
)
def test_a_parameter_that_does_not_fit_is_named(decoder, change, name, got):
    state = PlainDecoder(SIZES).state_dict()
    change(state)
    with pytest.raises(ConfigError) as caught:
        decoder.load_plain(state)
    assert caught.value.what == f"parameter {name!r} does not fit the decoder"
    assert caught.value.got == got
    assert len(str(caught.value).splitlines()) == 5


def test_without_transformer_engine_it_cannot_be_built(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="Transformer Engine cannot run here"):
        TeDecoder(SIZES)


def test_rows_under_sequence_parallelism_are_refused(decoder, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    for name, stand_in in {"get_rank": 1, "get_global_rank": 0, "broadcast": None}.items():
        monkeypatch.setattr(torch.distributed, name, lambda *_, told=stand_in, **__: told)
    divided = TeDecoder(SIZES, dtype=torch.float32, device="cpu", tp_group=object(), sp=True)
    assert divided.layouts == ("thd", "sbhd")
    assert decoder.layouts == TeDecoder(SIZES, device="cpu", tp_group=object()).layouts == ("thd", "bshd", "sbhd")
    with pytest.raises(ConfigError) as caught:
        divided(torch.zeros(2, 8, 32), qkv_format="bshd", attn_mask_type="causal")
    assert caught.value.what == "a batch cannot reach this decoder as bshd"
    assert caught.value.expected == "thd with equal slots, or sbhd"
    assert len(str(caught.value).splitlines()) == 5
