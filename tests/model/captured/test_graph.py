"""What a graph holds on to, told without a GPU: the capture itself is a stand-in."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from packfp8 import ConfigError
from packfp8.model.graph import Graph


@pytest.fixture
def capture(monkeypatch):
    """capture(run) -> the graph of a step that is called once, as a capture does."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: None, replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    return lambda run: Graph(run, torch.nn.Linear(2, 2), None, stream=None)


def test_it_keeps_what_the_step_reads_for_as_long_as_it_lives(capture):
    """A replay reads at addresses; a tensor that only the step knew would be another's memory by then."""
    given = torch.ones(3)
    alive = weakref.ref(given)
    graph = capture(lambda given=given: given.sum())
    del given
    gc.collect()
    assert alive() is not None
    assert graph.out == 3
    del graph
    gc.collect()
    assert alive() is None


def test_a_step_that_cannot_be_captured_is_told_of_and_the_collector_runs_again(capture):
    def run():
        assert not gc.isenabled()
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(ConfigError, match="the step cannot be captured as a CUDA graph"):
        capture(run)
    assert gc.isenabled()
