"""CapturedStep without a GPU: kernel by kernel, and its bookkeeping around a stand-in for the graph."""

import sys
from typing import ClassVar

import pytest
import torch

from packfp8.data import Collator, PackedBatch
from packfp8.model import captured, wrapper
from packfp8.model.graph import Graph
from packfp8.model.graph import _known as known
from packfp8.rule import align

RULE = align("block")
STATIC = {"static": True, "budget": 256, "max_sequences": 6, "frame_budget": 40}
EPOCH = ([0, 1, 2], [3], [2], [], [4, 5, 1, 0], [5, 2], [0, 3], [1])


@pytest.fixture
def epoch(measure, mixed):
    """epoch(lists of numbers of examples) -> their static batches."""

    def epoch(chosen=EPOCH, **options):
        collator = Collator(measure=measure, rule=RULE, **{**STATIC, **options})
        return [collator.collate([mixed[n] for n in numbers], step=step) for step, numbers in enumerate(chosen)]

    return epoch


class Nothing:
    """A stream or an event of a machine without any."""

    def __init__(self, *args):
        pass

    wait_stream = wait_event = record = __init__

    def __enter__(self):
        return self

    def __exit__(self, *fault):
        pass


class Rerun:
    """In the place of a graph: runs the step anew, with the tensors that it was made with."""

    made: ClassVar[list] = []

    def __init__(self, run, model, optimizer, *, stream, beside=()):
        self.run, self.out = run, None
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.overwrites = all(p.grad is None for p in self.parameters)
        self.gradients = [torch.zeros_like(p) if self.overwrites else p.grad for p in self.parameters]
        self._known = known(optimizer)
        Rerun.made.append(self)

    def replay(self):
        before = [parameter.grad for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient.zero_() if self.overwrites else gradient
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wrapper, "is_replayed", lambda: True)
            out = self.run()
        self.out = out if self.out is None else self.out
        for kept, now in zip(self.out[:2], out[:2], strict=True):
            kept.copy_(now)
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient  # a graph knows tensors, and no attributes

    is_stale = Graph.is_stale


@pytest.fixture
def graphs(monkeypatch):
    """Graphs, streams and pinned memory are stand-ins; the graphs that were made."""
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Nothing)
    monkeypatch.setattr(PackedBatch, "pin_memory", lambda self: self)
    monkeypatch.setattr(captured, "why_never", lambda *_: None)
    monkeypatch.setattr(captured, "Graph", Rerun)
    monkeypatch.setattr(Rerun, "made", [])
    return Rerun.made


@pytest.fixture(params=["no GPU", "stand-in"])
def anywhere(request):
    """Both without a GPU and with the stand-in."""
    return request.getfixturevalue("graphs") if request.param == "stand-in" else None


@pytest.fixture
def _capturable_on_a_cpu(monkeypatch):
    """torch asks for a GPU otherwise."""
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_get_capturable_supported_devices", lambda **_: ["cpu"])


@pytest.fixture
def adamw():
    """adamw(model, ...) -> an optimizer whose step can be captured."""

    def adamw(model, **options):
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2, dtype=torch.float64), capturable=True, **options)

    return adamw


@pytest.fixture
def trained():
    """trained(model, batches, optimizer, call) -> the losses of a training, and its parameters afterwards."""

    def trained(model, batches, optimizer, call=None):
        losses = []
        for batch in batches:
            count = torch.tensor(max(1, batch.num_supervised))
            if call is None:
                optimizer.zero_grad()
                out = model(batch, global_supervised=count)
                out.loss.backward()
                optimizer.step()
            else:
                out = call(batch, count)
            losses.append(out.loss.item())
        return losses, [p.detach().clone() for p in model.parameters()]

    return trained


@pytest.fixture
def lines():
    """lines(caught) -> the lines of an error that was raised."""

    def lines(caught):
        return str(caught.value).splitlines()

    return lines
