"""The decoder under Transformer Engine against the plain one, in every layout; and what FP8 does once a step."""

import pytest
import torch

from packfp8 import ConfigError, Topology, align
from packfp8.model import PackedModel
from packfp8.model import te as edge
from packfp8.model.fp8 import Fp8
from packfp8.model.plain_decoder import PlainDecoder
from packfp8.model.plain_encoder import PlainEncoder, PlainProjector
from packfp8.model.te_decoder import TeDecoder, plain_name

pytestmark = pytest.mark.gpu

FP8 = ["current", "block", "delayed"]


def _model(llm, rule, frames, sizes, *, consumer="te", fp8=None, dtype=torch.bfloat16):
    torch.manual_seed(1)
    encoder, projector = PlainEncoder(width=32).cuda(), PlainProjector(width=32, hidden=sizes.hidden).cuda()
    encoder.convs.to(dtype)
    encoder.norm.to(dtype)
    projector.to(dtype)
    return PackedModel(encoder=encoder, projector=projector, llm=llm, rule=rule, consumer=consumer, frames=frames, fp8=fp8)


def _step(model, batch, **arguments):
    """Loss and gradients by the plain decoder's names."""
    model.zero_grad(set_to_none=True)
    out = model(batch, global_supervised=batch.num_supervised, **arguments)
    out.loss.backward()
    return out.loss.detach(), {plain_name(n): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def te_step(collate, plain_state, sizes, frames):
    """te_step(recipe, layout="thd", recompute=False, rule_of=...) -> loss and gradients of one step."""

    def te_step(recipe, layout="thd", recompute=False, topology=None, **arguments):
        rule = align(recipe or "bf16", topology or Topology(), layout=layout)
        llm = TeDecoder(sizes, recompute=recompute).load_plain(plain_state)
        model = _model(llm, rule, frames, sizes, fp8=Fp8.te(recipe) if recipe else None)
        return _step(model, collate(rule), **arguments)

    return te_step


@pytest.fixture
def exact(collate, plain_state, sizes, frames):
    """Loss and gradients of the plain decoder in float32."""
    rule = align("bf16")
    llm = PlainDecoder(sizes).cuda()
    llm.load_state_dict(plain_state)
    return _step(_model(llm, rule, frames, sizes, consumer="plain", dtype=torch.float32), collate(rule))


@pytest.mark.parametrize("topology", [Topology(), Topology(tp=2, sp=True)], ids=["alone", "handed over as under SP"])
@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_it_computes_what_the_plain_decoder_computes(te_step, exact, distance, layout, topology):
    loss, grads = te_step(None, layout, topology=topology)
    exact_loss, exact_grads = exact
    print(f"\n{layout}: loss {loss:.5f} against {exact_loss:.5f}, gradients {distance(grads, exact_grads):.2e}", end="")
    assert abs(loss - exact_loss) < 2e-3 * exact_loss
    assert grads.keys() == exact_grads.keys()
    assert distance(grads, exact_grads) < 2e-2


def test_sequence_first_computes_the_same(te_step, exact, distance, monkeypatch):
    monkeypatch.setattr(TeDecoder, "layouts", ("sbhd",))
    loss, grads = te_step(None, "bshd", topology=Topology(tp=2, sp=True))
    assert abs(loss - exact[0]) < 2e-3 * exact[0]
    assert distance(grads, exact[1]) < 2e-2


@pytest.mark.parametrize("recipe", FP8)
def test_fp8_is_near_and_is_not_bf16(te_step, exact, distance, recipe):
    loss, grads = te_step(recipe)
    _, bf16 = te_step(None)
    error = distance(grads, exact[1])
    print(f"\n{recipe}: loss {loss:.5f} against {exact[0]:.5f}, gradients {error:.2e}", end="")
    assert abs(loss - exact[0]) < 2e-2 * exact[0]
    assert distance(bf16, exact[1]) < error < 0.3


@pytest.mark.parametrize("recipe", [None, *FP8])
def test_computing_activations_again_changes_nothing(te_step, distance, recipe):
    kept, again = te_step(recipe), te_step(recipe, recompute=True)
    assert torch.equal(kept[0], again[0])
    assert distance(again[1], kept[1]) < 1e-3


@pytest.mark.parametrize("recipe", FP8)
def test_weights_quantised_once_a_window_give_the_same_gradients(collate, plain_state, sizes, frames, distance, recipe):
    rule, grads = align(recipe), []
    batch = collate(rule)
    for firsts in ((None, None), (True, False)):
        model = _model(TeDecoder(sizes).load_plain(plain_state), rule, frames, sizes, fp8=Fp8.te(recipe))
        for first in firsts:
            model(batch, global_supervised=2 * batch.num_supervised, is_first_microbatch=first).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    # delayed scaling casts the weights by a newer scale on the second micro-batch, unless they are kept
    assert distance(grads[1], grads[0]) < (0.1 if recipe == "delayed" else 1e-3)


@pytest.fixture
def updates(monkeypatch):
    """Counts how often delayed scaling's maxima are taken, forward and backward."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

    counts, original = {True: 0, False: 0}, Manager.reduce_and_update_fp8_tensors.__func__

    def counting(cls, forward=True):
        counts[forward] += 1
        return original(cls, forward)

    monkeypatch.setattr(Manager, "reduce_and_update_fp8_tensors", classmethod(counting))
    return counts


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "computed again"])
def test_delayed_scaling_takes_its_maxima_once_a_step(updates, collate, plain_state, sizes, frames, recompute):
    rule = align("delayed")
    model = _model(TeDecoder(sizes, recompute=recompute).load_plain(plain_state), rule, frames, sizes, fp8=Fp8.te("delayed"))
    batch = collate(rule)
    for step in range(1, 4):
        _step(model, batch)
        assert updates == {True: step, False: step}


def test_a_context_around_backward_would_take_them_twice(updates, collate, plain_state, sizes, frames):
    rule = align("delayed")
    model = _model(TeDecoder(sizes).load_plain(plain_state), rule, frames, sizes, fp8=Fp8.te("delayed"))
    batch = collate(rule)
    out = model(batch, global_supervised=batch.num_supervised)
    with model.fp8.forward_context():
        out.loss.backward()
    assert updates == {True: 2, False: 1}


@pytest.mark.parametrize("recipe", [None, *FP8])
def test_nothing_waits_for_the_device_from_batch_to_gradients(collate, plain_state, sizes, frames, recipe):
    rule = align(recipe or "bf16")
    model = _model(TeDecoder(sizes).load_plain(plain_state), rule, frames, sizes, fp8=Fp8.te(recipe) if recipe else None)
    _step(model, collate(rule))  # handles, plans and workspaces are made on first use
    host = collate(rule).to("cpu").pin_memory()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = host.to("cuda", non_blocking=True)
        out = model(batch, global_supervised=batch.num_supervised)
        out.loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(out.loss)


def test_the_mode_that_forbids_waiting_works_here():
    value = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):
            value.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_parameters_of_other_sizes_are_refused_by_name(plain_state, sizes):
    decoder = TeDecoder(sizes)
    with pytest.raises(ConfigError, match=r"parameter 'norm.weight' does not fit"):
        decoder.load_plain({name: value for name, value in plain_state.items() if name != "norm.weight"})
    with pytest.raises(ConfigError, match=r"parameter 'head.weight' does not fit"):
        decoder.load_plain({**plain_state, "head.weight": torch.zeros(3, 3)})


def test_the_installed_version_is_read_and_its_faults_are_listed():
    assert edge.version() >= (2, 0)
    assert all(fault.present == (edge.version() < fault.fixed_in) for fault in edge.known_faults())


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_torchao_runs_the_plain_decoder_on_the_gpu(collate, plain_state, sizes, frames, exact, distance, recipe):
    rule = align(recipe)
    llm = PlainDecoder(sizes).cuda()
    llm.load_state_dict(plain_state)
    model = _model(llm.bfloat16(), rule, frames, sizes, consumer="plain", fp8=Fp8.torchao(recipe))
    loss, grads = _step(model, collate(rule))
    print(f"\n{recipe}: loss {loss:.5f} against {exact[0]:.5f}, gradients {distance(grads, exact[1]):.2e}", end="")
    assert abs(loss - exact[0]) < 2e-2 * exact[0]
    assert distance(grads, exact[1]) < 0.3
