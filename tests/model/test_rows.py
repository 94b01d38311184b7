"""Rows move by an index exactly as torch moves them, whatever their width, type and place in memory; and so do gradients."""

import pytest
import torch

from packfp8.model import rows as rows_module
from packfp8.model.rows import placed, taken


@pytest.fixture(autouse=True, params=["many", "few"])
def _many_or_few(request, monkeypatch):
    """Both ways, whatever the number of elements."""
    monkeypatch.setattr(rows_module, "_FEW_ELEMENTS", 0 if request.param == "many" else 1 << 60)


SHAPES = [
    (8, torch.bfloat16),
    (16, torch.bfloat16),
    (6, torch.bfloat16),
    (4, torch.float32),
    (3, torch.float32),
    (2, torch.float64),
]


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize(("features", "dtype"), SHAPES)
def test_rows_are_taken_and_placed_as_torch_does(features, dtype, offset):
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        return (
            torch.randn(count * features + offset, generator=generator)
            .to(dtype)[offset:]
            .view(count, features)
            .requires_grad_()
        )

    rows, base = draw(9), draw(12)
    source, places = torch.tensor([7, 0, 3, 8]), torch.tensor([11, 2, 5, 0])
    grad = draw(12).detach()
    found = placed(base, taken(rows, source), places)
    expected = base.index_copy(0, places, rows.index_select(0, source))
    assert torch.equal(found, expected)
    assert found.dtype == dtype
    for ours, theirs in zip(torch.autograd.grad(found, (base, rows), grad), torch.autograd.grad(expected, (base, rows), grad)):
        assert torch.equal(ours, theirs)
        assert theirs.any()


def test_the_arguments_are_not_changed():
    base, rows = torch.zeros(4, 8), torch.ones(2, 8)
    placed(base, taken(rows, torch.tensor([1])), torch.tensor([2]))
    assert not base.any()
    assert rows.all()


def test_no_row_leaves_everything_in_place_with_a_graph():
    base, rows, none = (
        torch.ones(4, 8, requires_grad=True),
        torch.ones(2, 8, requires_grad=True),
        torch.zeros(0, dtype=torch.int64),
    )
    found = placed(base, taken(rows, none), none)
    found.sum().backward()
    assert torch.equal(found, base)
    assert base.grad.all()
    assert not rows.grad.any()


def test_a_gradient_that_is_one_number_for_all_is_taken():
    base, rows = torch.ones(4, 8, requires_grad=True), torch.ones(2, 8, requires_grad=True)
    placed(base, taken(rows, torch.tensor([1, 0])), torch.tensor([2, 3])).sum().backward()  # an expanded, strideless gradient
    assert base.grad.sum() == 16
    assert rows.grad.sum() == 16
