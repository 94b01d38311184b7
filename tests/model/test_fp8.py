"""Fp8.prepare: every check before a kernel, and torchao's training by emulated FP8 on a CPU."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from packfp8 import ConfigError, RuleError, Topology, align
from packfp8.model import float8
from packfp8.model.fp8 import Fp8


def _model(out_features=48):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, out_features, bias=False), nn.SiLU(), nn.Linear(out_features, 32, bias=False))


def _refusal(error, act):
    with pytest.raises(error) as caught:
        act()
    assert len(str(caught.value).splitlines()) == 5
    return caught.value


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_emulated_torchao_trains_on_a_cpu(recipe):
    model = Fp8.torchao(recipe, emulate=True).prepare(_model(), align(recipe))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(64, 32), torch.randn(64, 32)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with Fp8.torchao(recipe, emulate=True).forward_context():
            loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    exact = _model()(x)
    assert not torch.equal(exact, Fp8.torchao(recipe, emulate=True).prepare(_model(), align(recipe))(x))


def test_conversion_keeps_the_parameters_themselves():
    model = _model()
    before = dict(model.named_parameters())
    after = dict(Fp8.torchao("rowwise", emulate=True).prepare(model, align("rowwise")).named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_a_filter_keeps_the_layers_that_it_names():
    model = Fp8.torchao("tensorwise", filter_fqns=["2"], emulate=True).prepare(_model(), align("tensorwise"))
    assert [name for name, _ in float8.linear_layers(model)] == ["0"]


def test_the_head_keeps_its_precision_and_its_odd_sizes():
    model = _model()
    model.head = nn.Linear(32, 259, bias=False)
    prepared = Fp8.torchao("tensorwise", emulate=True).prepare(model, align("tensorwise"))
    assert [name for name, _ in float8.linear_layers(prepared)] == ["0", "2"]
    assert type(prepared.head) is nn.Linear


@pytest.mark.parametrize(
    ("filters", "model"),
    [(("0", "2"), _model), ((), lambda: nn.Sequential(nn.SiLU(), nn.RMSNorm(32)))],
    ids=["filtered", "none"],
)
def test_a_conversion_that_converts_no_layer_is_an_error(filters, model):
    fp8 = Fp8.torchao("tensorwise", filter_fqns=filters, emulate=True)
    error = _refusal(ConfigError, lambda: fp8.prepare(model(), align("tensorwise")))
    assert error.what == "no layer of the language model would run in FP8"
    assert "Sequential" in error.got
    assert "filter_fqns" in error.fix


def test_a_rule_of_another_recipe_is_refused():
    fp8 = Fp8.torchao("tensorwise", emulate=True)
    error = _refusal(ConfigError, lambda: fp8.prepare(_model(), align("rowwise_with_gw_hp")))
    assert "'rowwise_with_gw_hp'" in error.got
    assert "'tensorwise'" in error.got


def test_fp8_attention_on_packs_is_refused_and_on_rows_is_not():
    recipe = type("DelayedScaling", (), {"fp8_dpa": True, "fp8_mha": False})()
    error = _refusal(ConfigError, lambda: Fp8.te(recipe).prepare(_model(), align("delayed")))
    assert error.what == "FP8 attention cannot be trained on packs"
    assert error.got == "fp8_dpa=True, layout 'thd'"
    with pytest.raises(ConfigError, match="Transformer Engine cannot run here"):
        Fp8.te(recipe).prepare(_model(), align("delayed", layout="bshd"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_torchao_without_a_gpu_and_without_emulation_is_an_error():
    error = _refusal(ConfigError, lambda: Fp8.torchao("tensorwise").prepare(_model(), align("tensorwise")))
    assert error.what == "recipe 'tensorwise' cannot run on this device"
    assert error.got == "a model on 'cpu', no CUDA GPU"
    assert "sm89" in error.expected
    assert "emulate=True" in error.fix


def test_features_are_checked_one_step_below_and_the_layer_is_named():
    fp8 = Fp8.torchao("tensorwise", emulate=True)
    error = _refusal(RuleError, lambda: fp8.prepare(_model(out_features=40), align("tensorwise")))
    assert error.what.startswith("linear layer '0'")
    assert "40 output features" in error.got
    assert error.expected == "a multiple of 16"


@pytest.mark.parametrize(("splits", "passes"), [({}, True), ({"0": "out", "2": "in"}, False), ({"0": "in"}, True)])
def test_features_are_checked_as_each_rank_holds_them(splits, passes):
    rule = align("tensorwise", Topology(tp=2))
    fp8 = Fp8.torchao("tensorwise", emulate=True)
    if passes:  # 48 output features are 16 * 3, of which each of two ranks would hold 24; 32 input features make 16
        fp8.prepare(_model(), rule, splits=splits)
    else:
        assert "24 on each of 2 TP ranks" in _refusal(RuleError, lambda: fp8.prepare(_model(), rule, splits=splits)).got


@pytest.fixture
def mesh():
    """A function from dimension names to a device mesh of two ranks in each, of processes that do not exist."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield lambda *names: init_device_mesh("cpu", (4,) if len(names) == 1 else (2, 2), mesh_dim_names=names)
    destroy_process_group()


def _spread(model, mesh, *placements):
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, placements))
    return model


@pytest.mark.parametrize(
    ("configured", "placement", "called"), [(True, Shard(0), 1), (True, Replicate(), 0), (False, Shard(0), 0), (True, None, 0)]
)
def test_scales_are_precomputed_exactly_when_configured_and_sharded(monkeypatch, mesh, configured, placement, called):
    calls = []
    monkeypatch.setattr(float8, "precompute_scales", calls.append)
    fp8 = Fp8.torchao("tensorwise", fsdp_all_gather=True, precompute_scale=configured, emulate=True)
    model = fp8.prepare(_model(), align("tensorwise"))
    if placement is not None:
        model = _spread(model, mesh("dp_shard"), placement)
    fp8.after_optimizer_step(model)
    assert calls == [model] * called


def test_transformer_engine_needs_nothing_after_an_optimizer_step(monkeypatch, mesh):
    monkeypatch.setattr(float8, "precompute_scales", lambda model: pytest.fail("called"))
    Fp8.te("block").after_optimizer_step(_spread(_model(), mesh("dp_shard"), Shard(0)))


def test_the_scale_is_known_before_the_next_forward(mesh):
    fp8 = Fp8.torchao("tensorwise", fsdp_all_gather=True, precompute_scale=True, emulate=True)
    model = _spread(fp8.prepare(_model(), align("tensorwise")), mesh("dp_shard"), Shard(0))
    local = model[0].weight.to_local()
    assert local._precomputed_scale is None
    fp8.after_optimizer_step(model)
    largest = model[0].weight._local_tensor._tensor.abs().max()  # of this rank: the others do not exist
    assert model[0].weight._local_tensor._precomputed_scale == pytest.approx(448 / largest.item())


def test_what_fsdp_cuts_is_checked_whole_and_what_tp_cuts_is_checked_in_part(mesh):
    fp8, grid = Fp8.torchao("tensorwise", emulate=True), mesh("dp_shard", "tp")
    rule = align("tensorwise", Topology(dp=2, tp=2))
    fp8.prepare(_spread(_model(), grid, Shard(0), Replicate()), rule)
    error = _refusal(RuleError, lambda: fp8.prepare(_spread(_model(), grid, Replicate(), Shard(0)), rule))
    assert error.got == "24 output features"
