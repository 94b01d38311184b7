"""CapturedStep: a whole training step of constant shape as one CUDA graph, replayed for every batch.

    batch --copied ahead--> [ encoder, splice, decoder, loss, backward, and the optimizer if it is given ] --> loss, gradients
                              captured once: the host then launches one thing instead of some thousand

At small and middle sizes FP8 training waits for the host, which cannot launch kernels fast enough. A step can be captured
because every shape is constant, which a static collator gives.

The first steps run as they are, kernel by kernel: libraries choose their kernels there, the optimizer makes its state, delayed
scaling gets its first maxima. They are steps of the training like all others, so that nothing has to be undone: a captured
training is the same from its first step on.

Transformer Engine needs no help. Under `torch.cuda.graph` its own updates of scales and maxima, at the end of the forward
context and of backward, are kernels of the graph; it leaves them out only under its own `make_graphed_callables`, which
captures module by module [read: Transformer Engine 2.20.2, `graph.is_graph_capturing`].
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from packfp8.data import PackedBatch
from packfp8.model.checks import check_is_batch
from packfp8.model.graph import Graph
from packfp8.model.handover import handed
from packfp8.model.replayable import WARM_UP, check_optimizer, check_step, check_trained, steps_each_time, why_never
from packfp8.model.static_batch import StaticBatch
from packfp8.model.wrapper import PackedModel, PackedOutput


class CapturedStep:
    """Forward and backward of a model, and a step of its optimizer, replayed from a CUDA graph where that is possible.

        step = CapturedStep(model, example)
        for batch in step.feed(loader):                        # batch k + 1 is copied while batch k is computed
            out = step(batch, global_supervised=batch.num_supervised)
            optimizer.step()                                   # or given to CapturedStep, and captured too

    Gradients overwrite those of the step before; those of `is_first_microbatch=False` are added to them. `zero_grad` is not
    needed. The tensors `.grad` and the losses that a call returns keep their addresses, and are overwritten by the next call.

    A batch of another shape runs kernel by kernel, all the same right; so does everything without a GPU. `fallbacks` counts
    them by their reasons. Freeze parameters and move the model before it is given; to train others later, make another.

    Args:
        model: on its GPU.
        example: a batch of the one shape that is captured, wherever it is.
        optimizer: steps within the graph, for one micro-batch a step. It must be capturable, and its learning rate a tensor
            on the GPU, which schedulers of torch change in place. Whenever another of its numbers changes, a step is captured
            anew: cycle the learning rate alone.
        warmup: steps that run kernel by kernel before one is captured.

    Attributes:
        fallbacks: reason -> how many batches ran kernel by kernel for it.
        replays: how many batches were replayed.

    Raises:
        ConfigError: something else than a model and a batch, no step of warm-up, or an optimizer whose step cannot be replayed.
    """

    def __init__(
        self,
        model: PackedModel,
        example: PackedBatch,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        warmup: int = WARM_UP,
    ) -> None:
        check_step(model, example, warmup)
        self.model, self.optimizer, self.warmup = model, optimizer, warmup
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.device = next(model.parameters()).device
        self._trains = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        self._modules = list(model.modules())
        self._modes: list[bool] | None = None  # those that were captured
        self.fallbacks: Counter[str] = Counter()
        self.replays = 0
        self._caches_weights = "is_first_microbatch" in inspect.signature(model.llm.forward).parameters
        self._graphs: dict[bool | None, Graph] = {}
        self._runs: Counter[bool | None] = Counter()
        self._never = why_never(model.consumer, self.parameters, self.device)
        if self._never is None:
            if optimizer is not None:
                check_optimizer(optimizer, self.device)
            self._layout = self._handed(example)
            self._static = StaticBatch(example, self.device)
            self._stream = torch.cuda.Stream(self.device)
            self._count = torch.zeros((), dtype=torch.int64, device=self.device)

    def __call__(
        self, batch: PackedBatch, *, global_supervised: int | Tensor, is_first_microbatch: bool | None = None
    ) -> PackedOutput:
        """The losses of one micro-batch, whose gradients stand in `.grad` of the parameters; without logits and graph.

        Args:
            batch: on any device; best on the host, in pinned memory, and sent ahead.
            global_supervised: as for `PackedModel`.
            is_first_microbatch: of an accumulation window: True for its first, False for the others, which add to its
                gradients. Transformer Engine then makes the FP8 copies of the weights once a window. None is a window of one.

        Raises:
            StateError, ConfigError, LengthError: as `PackedModel`, for every batch.
            ConfigError: micro-batches with an optimizer inside; a model that cannot be captured; parameters that were frozen,
                freed or replaced since.
        """
        first = None if is_first_microbatch is None else bool(is_first_microbatch)  # numpy has a False of its own
        if first is not None and self.optimizer is not None:
            raise steps_each_time(first)
        check_trained(self.model, self._trains)
        self.model.check(batch, global_supervised)
        reason = self._why_not(batch)
        if reason is not None:
            self.fallbacks[reason] += 1
            return self._launched(batch.to(self.device, non_blocking=True), global_supervised, first)
        batch = self._static.take(batch)
        self._set_count(global_supervised)
        if self._is_warm(first):
            return self._replayed(batch, first)
        self._runs[first] += 1
        return self._launched(batch, self._count, first)

    def prefetch(self, batch: PackedBatch) -> None:
        """Starts to copy a batch that will be given to one of the next two calls. It must be the same object then, unchanged.

        Raises:
            ConfigError: something else than a batch.
        """
        check_is_batch(batch)
        if self._never is None and self._static.difference(batch) is None:
            self._static.send(batch)

    def feed(self, loader: Iterable[PackedBatch]) -> Iterator[PackedBatch]:
        """The batches of `loader`, each sent ahead while the one before is computed.

        Args:
            loader: whose batches keep their memory to themselves: a batch is drawn before the one before it is yielded.
        """
        ahead: list[PackedBatch] = []
        for batch in loader:
            self.prefetch(batch)
            ahead.append(batch)
            if len(ahead) > 1:
                yield ahead.pop(0)
        yield from ahead

    # -- inside -------------------------------------------------------------------------------------------------------

    def _why_not(self, batch: PackedBatch) -> str | None:
        """Why this batch cannot be replayed, in words that do not differ from batch to batch."""
        if self._never is not None:
            return self._never
        # Handing over may depend on the number of sequences, and refuses what a model would mix up.
        layout = None if self._handed(batch) == self._layout else "another layout for the language model"
        mode = None if self._modes in (None, self._modes_now()) else "another mode of the model"
        return self._static.difference(batch) or layout or mode

    def _handed(self, batch: PackedBatch) -> str:
        return handed(batch, self.model.consumer, self.model.llm.layouts).layout

    def _modes_now(self) -> list[bool]:
        return [module.training for module in self._modules]  # an encoder may be in a mode of its own

    def _is_warm(self, first: bool | None) -> bool:
        """Whether such a step may be captured: gradients are added to those of a graph only."""
        return self._runs[first] >= self.warmup and (first is not False or self._gradients_are_those_of(True))

    def _gradients_are_those_of(self, first: bool) -> bool:
        graph = self._graphs.get(first)
        return graph is not None and all(p.grad is grad for p, grad in zip(self.parameters, graph.gradients, strict=True))

    def _launched(self, batch: PackedBatch, global_supervised: int | Tensor, first: bool | None) -> PackedOutput:
        """The step, kernel by kernel; on the stream of the graphs, where there are any."""
        if first is not False:
            graph = self._graphs.get(first)
            if graph is None:
                self._set_gradients([None] * len(self.parameters))
            else:  # its tensors stay those that the others know
                self._set_gradients(graph.gradients)
                torch._foreach_zero_([grad for grad in graph.gradients if grad is not None])
        with self._on_stream():
            return self._run(batch, global_supervised, first)

    def _replayed(self, batch: PackedBatch, first: bool | None) -> PackedOutput:
        graph = self._graphs.get(first)
        if graph is None or graph.is_stale(self.optimizer):
            if self.optimizer is not None:
                check_optimizer(self.optimizer, self.device)  # what was loaded or set since
            self._modes = self._modes_now()
            if first is not False:
                self._set_gradients([None] * len(self.parameters))  # made by the graph's backward, at addresses of its own
            run = partial(self._run, batch, self._count, first)
            others = tuple(self._graphs.values())
            graph = self._graphs[first] = Graph(run, self.model, self.optimizer, stream=self._stream, beside=others)
        graph.replay()
        self._set_gradients(graph.gradients)
        self.replays += 1
        return graph.out

    def _run(self, batch: PackedBatch, global_supervised: int | Tensor, first: bool | None) -> PackedOutput:
        told = {"is_first_microbatch": first} if self._caches_weights else {}
        out = self.model(batch, global_supervised=global_supervised, **told)
        out.loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return PackedOutput(out.loss.detach(), out.loss_sum.detach(), None)

    def _set_count(self, count: int | Tensor) -> None:
        if isinstance(count, Tensor):
            self._count.copy_(count.reshape(()), non_blocking=True)
        else:
            self._count.fill_(count)

    def _set_gradients(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._never is not None:
            yield
            return
        outside = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            yield
        outside.wait_stream(self._stream)
