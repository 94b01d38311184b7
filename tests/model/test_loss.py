"""The chunked cross-entropy: equal to the plain one, never whole, deaf to what is not supervised; and its scale."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from packfp8.data import Collator
from packfp8.errors import ConfigError
from packfp8.model.loss import count_supervised, is_replayed, loss_sum, scaled, supervised_rows
from packfp8.rule import Topology, align

TOKENS, HIDDEN, VOCAB = 37, 12, 50


def draw(seed=0, dtype=torch.float64, supervised=0.4):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=g, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=g)
    labels[torch.rand(TOKENS, generator=g) >= supervised] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.parametrize("chunk_tokens", [1, 5, 36, 37, 1000])
def test_value_and_gradients_are_those_of_cross_entropy(chunk_tokens):
    hidden, weight, labels = draw()
    ours = torch.autograd.grad(3 * loss_sum(hidden, weight, labels, chunk_tokens=chunk_tokens), (hidden, weight))
    total = F.cross_entropy(hidden @ weight.T, labels, ignore_index=-100, reduction="sum")
    theirs = torch.autograd.grad(3 * total, (hidden, weight))
    assert loss_sum(hidden, weight, labels, chunk_tokens=chunk_tokens).item() == pytest.approx(total.item(), rel=1e-13)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_rows_may_have_any_shape():
    hidden, weight, labels = draw()
    rows = loss_sum(hidden[:36].reshape(4, 9, HIDDEN), weight, labels[:36].reshape(4, 9))
    torch.testing.assert_close(rows, loss_sum(hidden[:36], weight, labels[:36]))


def test_bf16_is_summed_in_float32():
    """One row of a loss of about 4 in 4,096: a sum in bfloat16 stops growing at 256 times the addend."""
    hidden, weight = torch.zeros(4096, 16, dtype=torch.bfloat16), torch.zeros(VOCAB, 16, dtype=torch.bfloat16)
    total = loss_sum(hidden, weight, torch.zeros(4096, dtype=torch.int64), chunk_tokens=64)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(4096 * torch.tensor(VOCAB).double().log().item(), rel=1e-6)


def test_weight_gradient_adds_up_its_chunks_in_float32():
    hidden, weight, labels = draw(dtype=torch.bfloat16, supervised=1.0)
    exact_hidden, exact_weight, _ = draw(supervised=1.0)
    exact_hidden, exact_weight = (
        x.detach().copy_(y.detach()).requires_grad_() for x, y in ((exact_hidden, hidden), (exact_weight, weight))
    )
    loss_sum(hidden, weight, labels, chunk_tokens=1).backward()
    F.cross_entropy(exact_hidden @ exact_weight.T, labels, reduction="sum").backward()
    assert weight.grad.dtype == torch.bfloat16
    error = (weight.grad.double() - exact_weight.grad).norm() / exact_weight.grad.norm()
    assert error < 4e-3  # half a unit in the last place of bfloat16 is 2e-3; a running sum in bfloat16 has 1e-2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_at_pads_reach_nothing(bad):
    hidden, weight, labels = draw()
    clean = torch.autograd.grad(loss_sum(hidden, weight, labels, chunk_tokens=8), (hidden, weight))
    spoilt = torch.where((labels == -100)[:, None], bad, hidden.detach()).requires_grad_()
    total = loss_sum(spoilt, weight, labels, chunk_tokens=8)
    assert total.item() == pytest.approx(loss_sum(hidden, weight, labels).item(), rel=1e-13)
    for one, other in zip(torch.autograd.grad(total, (spoilt, weight)), clean, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_no_supervised_token_gives_zero_with_a_graph():
    hidden, weight, labels = draw(supervised=0.0)
    loss = scaled(loss_sum(hidden, weight, labels), Topology(), 0)
    assert loss.item() == 0
    loss.backward()
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0


def test_frozen_parts_need_no_gradient():
    hidden, weight, labels = draw()
    (alone,) = torch.autograd.grad(loss_sum(hidden, weight.detach(), labels), (hidden,))
    both = torch.autograd.grad(loss_sum(hidden, weight, labels), (hidden, weight))
    torch.testing.assert_close(alone, both[0])
    with torch.no_grad():
        assert not loss_sum(hidden, weight, labels).requires_grad


@pytest.mark.parametrize("supervised", [0.0, 0.4, 1.0])
def test_the_supervised_rows_alone_give_the_same_loss_and_gradient(supervised):
    hidden, weight, labels = draw(supervised=supervised)
    count = int((labels != -100).sum())
    rows, theirs = supervised_rows(hidden.reshape(1, TOKENS, HIDDEN), labels[None], count)
    assert rows.shape == (count, HIDDEN)
    assert torch.equal(theirs, labels[labels != -100])
    one = torch.autograd.grad(loss_sum(rows, weight, theirs, chunk_tokens=5), (hidden, weight))
    other = torch.autograd.grad(loss_sum(hidden, weight, labels), (hidden, weight))
    for ours, all_rows in zip(one, other, strict=True):
        torch.testing.assert_close(ours, all_rows, rtol=0, atol=1e-12)


def test_all_rows_are_kept_where_no_count_is_given():
    hidden, _, labels = draw()
    rows, kept = supervised_rows(hidden, labels, None)
    assert torch.equal(rows, hidden)
    assert torch.equal(kept, labels)


def test_more_rows_than_are_supervised_bring_others_without_a_label():
    hidden, weight, labels = draw()
    count = int((labels != -100).sum())
    rows, kept = supervised_rows(hidden, labels, count + 3)
    assert rows.shape == (count + 3, hidden.shape[1])
    assert (kept[count:] == -100).all()
    expected = loss_sum(supervised_rows(hidden, labels, count)[0], weight, labels[labels != -100])
    torch.testing.assert_close(loss_sum(rows, weight, kept), expected)


@pytest.mark.filterwarnings("default")  # dynamo warns of torch's own code
def test_a_step_that_is_captured_or_compiled_is_known(monkeypatch):
    """A replay has the shapes of the capture: a count of that one batch would cut later ones."""
    assert not is_replayed()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert is_replayed()
    monkeypatch.undo()
    assert torch.compile(lambda x: x + is_replayed(), backend="eager")(torch.zeros(())) == 1


class Largest(TorchDispatchMode):
    """The most elements that any tensor had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_the_logits_of_a_pack_are_never_held_whole():
    tokens, vocab = 4096, 500
    hidden, weight = torch.randn(tokens, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.int64)
    with Largest() as chunked:
        loss_sum(hidden, weight, labels, chunk_tokens=64).backward()
    with Largest() as whole:
        F.cross_entropy(hidden @ weight.T, labels, reduction="sum").backward()
    assert whole.elements == tokens * vocab
    assert chunked.elements == max(64 * vocab, tokens * 8)


def test_the_scale_undoes_the_mean_over_ranks():
    total, topology = torch.tensor(6.0), Topology(dp=4, cp=2)
    assert scaled(total, topology, 3).item() == 16
    assert scaled(total, topology, torch.tensor(3)).item() == 16
    assert (
        scaled(total, topology, 0).item() == scaled(total, topology, torch.tensor(0)).item() == 48
    )  # of a sum that is zero then


def test_supervised_tokens_of_a_window_are_counted_on_the_host(measure, mixed):
    rule = align("bf16")
    batches = [Collator(measure=measure, rule=rule)(mixed[:3]), Collator(measure=measure, rule=rule)(mixed[3:])]
    count = count_supervised(batches)
    assert count.dtype == torch.int64
    assert count.item() == sum(measure(example).supervised for example in mixed) == 32


def test_a_window_without_a_batch_is_refused():
    with pytest.raises(ConfigError) as caught:
        count_supervised([])
    assert str(caught.value).splitlines() == [
        "the accumulation window has no micro-batch",
        "  got:      no batches",
        "  expected: at least one on every rank",
        "  because:  a rank that skips a step hangs the others",
        "  fix:      PackingSampler gives ranks without examples a pack of zero weight",
    ]


def test_counting_over_fewer_ranks_than_share_the_data_is_refused(measure, mixed):
    batch = Collator(measure=measure, rule=align("bf16", Topology(dp=4, cp=2)))(mixed)
    with pytest.raises(ConfigError) as caught:
        count_supervised([batch])
    assert str(caught.value).splitlines() == [
        "the group that counts supervised tokens is not that of the data- and context-parallel ranks",
        "  got:      no group",
        "  expected: 8 ranks: dp 4 * cp 2",
        "  because:  a count over fewer ranks makes the loss too large, and one over TP peers counts each token twice",
        '  fix:      pass group=mesh["dp", "cp"]._flatten().get_group()',
    ]
