"""The mixture of experts: pads reach no expert and no statistic; an expert without tokens works."""

import pytest
import torch

from packfp8.model.moe import Moe, PlainExperts

HIDDEN, EXPERTS = 8, 4


@pytest.fixture
def moe():
    torch.manual_seed(0)
    return Moe(PlainExperts(count=EXPERTS, hidden=HIDDEN, ffn=16), hidden=HIDDEN, chosen=2).double()


def _one_by_one(moe, x):
    """The mixture token by token, by its definition."""
    rows = []
    for token in x:
        scores = torch.softmax(token.float() @ moe.router.weight.float().T, -1)
        best = scores.topk(moe.chosen)
        weights = (best.values / best.values.sum()).to(x.dtype)
        parts = []
        for weight, expert in zip(weights, best.indices.tolist()):
            gate, up = (moe.experts.fc1[expert] @ token).chunk(2)
            parts.append(weight * (moe.experts.fc2[expert] @ (torch.nn.functional.silu(gate) * up)))
        rows.append(sum(parts))
    return torch.stack(rows)


@pytest.fixture(autouse=True)
def _float32_router(moe):
    moe.router.float()


def test_it_is_the_weighted_sum_of_the_chosen_experts(moe):
    x = torch.randn(20, HIDDEN, dtype=torch.float64)
    out = moe(x, torch.zeros(20, dtype=torch.bool))
    torch.testing.assert_close(out.output, _one_by_one(moe, x), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rubbish", [0.0, 1e3, float("nan")])
def test_what_stands_in_a_pad_changes_nothing(moe, rubbish):
    real, pads = torch.randn(12, HIDDEN, dtype=torch.float64), torch.zeros(20, dtype=torch.bool)
    pads[[3, 4, 9, 15, 16, 17, 18, 19]] = True
    x = torch.full((20, HIDDEN), rubbish, dtype=torch.float64)
    x[~pads] = real
    alone, among = moe(real, torch.zeros(12, dtype=torch.bool)), moe(x.requires_grad_(), pads)
    torch.testing.assert_close(among.output[~pads], alone.output)
    assert torch.equal(among.output[pads], torch.zeros(8, HIDDEN, dtype=torch.float64))
    torch.testing.assert_close(among.balance_loss, alone.balance_loss)
    assert torch.equal(among.load, alone.load)
    assert among.load.sum() == 12 * 2
    (among.output.sum() + among.balance_loss).backward()
    assert torch.equal(x.grad[pads], torch.zeros(8, HIDDEN, dtype=torch.float64))
    assert x.grad[~pads].abs().min() > 0
    assert all(torch.isfinite(parameter.grad).all() for parameter in moe.parameters())


def test_an_expert_without_tokens_works_and_gets_a_gradient_of_zero(moe):
    with torch.no_grad():
        moe.router.weight[2] = -100 * moe.router.weight[[0, 1, 3]].sum(0)
    x = torch.rand(16, HIDDEN, dtype=torch.float64)
    x = x[(x.float() @ moe.router.weight.T).argmin(-1) == 2]
    assert len(x) > 4
    out = moe(x, torch.zeros(len(x), dtype=torch.bool))
    assert out.load[2] == 0
    out.output.sum().backward()
    assert torch.equal(moe.experts.fc1.grad[2], torch.zeros_like(moe.experts.fc1[2]))
    assert moe.experts.fc1.grad[0].abs().max() > 0


def test_a_pack_of_filler_gives_zero_with_a_graph(moe):
    out = moe(torch.randn(16, HIDDEN, dtype=torch.float64), torch.ones(16, dtype=torch.bool))
    assert torch.equal(out.output, torch.zeros(16, HIDDEN, dtype=torch.float64))
    assert out.load.sum() == 0
    assert out.balance_loss == 0
    (out.output.sum() + out.balance_loss).backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in moe.parameters())


def test_an_even_load_costs_one_and_a_lopsided_load_costs_more(moe):
    with torch.no_grad():
        moe.router.weight.zero_()
    x, none = torch.randn(64, HIDDEN, dtype=torch.float64), torch.zeros(64, dtype=torch.bool)
    assert moe(x, none).balance_loss.item() == pytest.approx(1.0)
    with torch.no_grad():
        moe.router.weight[0] = 5.0
    assert moe(x.abs(), none).balance_loss > 1.5


def test_the_shape_of_a_padded_batch_is_kept(moe):
    x = torch.randn(3, 8, HIDDEN, dtype=torch.float64)
    pads = torch.arange(8)[None] >= torch.tensor([8, 3, 1])[:, None]
    out = moe(x, pads)
    assert out.output.shape == x.shape
    torch.testing.assert_close(out.output[1, :3], moe(x[1, :3], pads[1, :3]).output)
