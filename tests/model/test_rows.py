"""Rows move by an index exactly as torch moves them, whatever their width, type and place in memory; and so do gradients."""

import pytest
import torch

from packfp8.model import rows as rows_module
from packfp8.model.rows import placed, placed_within, taken, taken_within


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
    within = placed_within(base, taken_within(rows, source), places)
    assert torch.equal(within, found)
    for ours, theirs in zip(*(torch.autograd.grad(out, (base, rows), grad, retain_graph=True) for out in (within, found))):
        assert torch.equal(ours, theirs)
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


SOURCE, PLACES = torch.tensor([7, 0, 3, 9, 9, 9]), torch.tensor([11, 2, 5, 12, 12, 12])
"""Of 9 rows, into 12 places: three that are there, and three that are not."""


@pytest.mark.parametrize("features", [8, 3])
def test_a_row_past_the_end_goes_nowhere_and_nothing_is_read_of_it(features):
    generator = torch.Generator().manual_seed(0)
    rows, base, grad = (torch.randn(n, features, generator=generator) for n in (9, 12, 12))
    rows[[1, 2, 4, 5, 6, 8]] = float("nan")  # none of these is taken; the last stands in for the row that is not there
    rows, base = rows.requires_grad_(), base.requires_grad_()
    found = placed_within(base, taken_within(rows, SOURCE), PLACES)
    expected = base.index_copy(0, PLACES[:3], rows.index_select(0, SOURCE[:3]))
    assert torch.equal(found, expected)
    assert found.isfinite().all()
    ours, theirs = (torch.autograd.grad(out, (base, rows), grad) for out in (found, expected))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_gradients_within_are_those_of_differences():
    generator = torch.Generator().manual_seed(0)
    rows, base = (torch.randn(n, 2, generator=generator, dtype=torch.float64).requires_grad_() for n in (9, 12))
    assert torch.autograd.gradcheck(lambda base, rows: placed_within(base, taken_within(rows, SOURCE), PLACES), (base, rows))


def test_no_row_within_leaves_everything_in_place_with_a_graph():
    base, rows = torch.ones(4, 8, requires_grad=True), torch.ones(2, 8, requires_grad=True)
    found = placed_within(base, taken_within(rows, torch.tensor([2, 2])), torch.tensor([4, 4]))
    found.sum().backward()
    assert torch.equal(found, base)
    assert base.grad.all()
    assert not rows.grad.any()
