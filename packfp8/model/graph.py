"""Graph: one training step as a CUDA graph, with the losses and gradients that each replay overwrites."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from packfp8.errors import ConfigError


class Graph:
    """A step that is launched at once.

    Attributes:
        out: what the step returned; its tensors are overwritten by each replay.
        gradients: of the trained parameters, in their order, None where there is none; overwritten, or added to, likewise.

    Args:
        run: the step. It is captured here and not run; whatever it refers to is kept.
        model: whose parameters it trains. Where they have no gradients, its backward makes them, and overwrites them in each
            replay; where they have, it adds to those.
        optimizer: one that steps within.
        stream: on which such a step has run before.
        beside: graphs that are never replayed at the same time; they share their memory.

    Raises:
        ConfigError: the step does something that cannot be captured.
    """

    def __init__(
        self,
        run: Callable[[], object],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        stream: torch.cuda.Stream,
        beside: Sequence[Graph] = (),
    ) -> None:
        self._run = run  # whose tensors are read at their addresses, for as long as the graph lives
        self._graph, self._known = torch.cuda.CUDAGraph(), _known(optimizer)
        pool = beside[0]._graph.pool() if beside else None
        collects = gc.isenabled()
        gc.disable()  # a graph that dies while another is captured ends the capture (read: pytorch/pytorch#161037)
        try:
            # Other threads go on with their own work, as the one that pins the loader's batches does.
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self.out = run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as fault:
            raise _not_capturable(fault) from fault
        finally:
            if collects:
                gc.enable()
        self.gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]

    def replay(self) -> None:
        """Runs the step on what stands in its places, on the current stream."""
        self._graph.replay()

    def is_stale(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Whether the optimizer has other numbers or tensors than the graph: its state was loaded, or a setting changed."""
        now = _known(optimizer)
        return len(now) != len(self._known) or not all(map(_is_same, self._known, now))


def _known(optimizer: torch.optim.Optimizer | None) -> list:
    """What a captured step of the optimizer took as it was: a tensor of its state, and all settings of its groups.

    Loading a state replaces all of its tensors, so that one of them tells.
    """
    if optimizer is None:
        return []
    states = optimizer.state.values()
    first = next((value for state in states for value in state.values() if isinstance(value, Tensor)), None)
    settings = [(key, value) for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [first, *(part for pair in settings for part in pair), *trained]


def _is_same(one: object, other: object) -> bool:
    """Whether a graph that took the one knows the other: tensors by what they are, numbers by their value."""
    return one is other if isinstance(one, Tensor) or isinstance(other, Tensor) else one == other


def _not_capturable(fault: RuntimeError) -> ConfigError:
    return ConfigError(
        "the step cannot be captured as a CUDA graph",
        got=f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}",
        expected="kernels alone: nothing that waits for the device, and nothing copied from pageable memory",
        because="a graph repeats what was launched; what the host decided in between is not in it",
        fix="look for it in the traceback above, or run a step under torch.cuda.set_sync_debug_mode('error')",
    )
