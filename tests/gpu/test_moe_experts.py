"""Experts in grouped GEMMs by Transformer Engine, against the plain ones: pads excluded, an expert without tokens."""

import pytest
import torch

from packfp8 import align
from packfp8.model.fp8 import Fp8
from packfp8.model.moe import Moe, PlainExperts, TeExperts
from packfp8.model.te import autocast, make_recipe

pytestmark = pytest.mark.gpu

HIDDEN, FFN, EXPERTS, TOKENS = 128, 256, 8, 200


@pytest.fixture
def pair():
    """The same mixture twice: plain in float32, and under Transformer Engine in BF16; expert 3 is never chosen."""
    torch.manual_seed(0)
    plain = Moe(PlainExperts(count=EXPERTS, hidden=HIDDEN, ffn=FFN), hidden=HIDDEN).cuda()
    with torch.no_grad():
        plain.router.weight[3] = 0
        plain.router.weight[:, 0] += torch.where(torch.arange(EXPERTS) == 3, -100.0, 0.0).cuda()
    fast = Moe(TeExperts(count=EXPERTS, hidden=HIDDEN, ffn=FFN).load_plain(plain.experts), hidden=HIDDEN, device="cuda")
    fast.router.load_state_dict(plain.router.state_dict())
    return plain, fast


def _batch(rubbish):
    torch.manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
    x[:, 0] = x[:, 0].abs() + 1  # what expert 3 is kept away by
    pads = torch.arange(TOKENS, device="cuda") % 9 >= 7
    return torch.where(pads[:, None], rubbish, x).bfloat16(), pads


def _run(moe, x, pads, recipe=None):
    x = x.clone().requires_grad_()
    if recipe:
        with autocast(make_recipe(recipe)):
            out = moe(x, pads)
    else:
        out = moe(x, pads)
    (out.output.float().square().sum() + out.balance_loss).backward()
    return out, x.grad


@pytest.mark.parametrize("rubbish", [0.0, 1e4, float("nan")], ids=["zeros", "large", "nan"])
@pytest.mark.parametrize(("recipe", "tolerance"), [(None, 1e-2), ("current", 0.1), ("block", 0.1)])
def test_grouped_experts_compute_what_plain_ones_do_whatever_stands_in_pads(pair, distance, recipe, tolerance, rubbish):
    plain, fast = pair
    x, pads = _batch(rubbish)
    expected, expected_grad = _run(plain, x.float(), pads)
    found, grad = _run(fast, x, pads, recipe)
    real = ~pads
    errors = distance(found.output[real], expected.output[real]), distance(grad[real], expected_grad[real])
    print(f"\n{recipe or 'bf16'}: output {errors[0]:.2e}, gradient {errors[1]:.2e}, rows {found.load.tolist()}", end="")
    assert max(errors) < tolerance
    assert torch.equal(found.load, expected.load)
    assert found.load[3] == 0
    assert found.load.sum() == 2 * real.sum()
    torch.testing.assert_close(found.balance_loss, expected.balance_loss, rtol=1e-4, atol=0)
    assert not found.output[pads].any()
    assert not grad[pads].any()
    assert not fast.experts.fc1.weight3.grad.any()
    for number in (0, 7):
        weight = getattr(fast.experts.fc1, f"weight{number}").grad
        assert distance(weight, plain.experts.fc1.grad[number]) < 2 * tolerance


@pytest.mark.parametrize("recipe", [None, "current", "block"])
def test_a_pack_of_filler_passes_forward_and_backward(pair, recipe):
    _, fast = pair
    x, _ = _batch(0.0)
    out, grad = _run(fast, x, torch.ones(TOKENS, dtype=torch.bool, device="cuda"), recipe)
    assert not out.output.any()
    assert not grad.any()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in fast.parameters())


def test_the_experts_count_as_layers_that_run_in_fp8(pair):
    assert Fp8.te("block").prepare(pair[1], align("block")) is pair[1]
