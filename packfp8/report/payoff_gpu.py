"""GpuTimer: forward and backward of a decoder's layers on the CUDA GPU at hand, by CUDA events."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packfp8.errors import ConfigError
from packfp8.model import float8, te
from packfp8.model.plain_decoder import DecoderSizes
from packfp8.report.timing import BF16, BLOCKS, COMPILED, Case, Sizes, Untimed
from packfp8.rule import RECIPES

_WARM_UP = 3  # steps before anything is timed or captured: kernels are chosen, delayed scaling gets its first maxima
_REPEATS = 7
_REPEAT_SECONDS = 0.04  # a repeat runs as many steps as fit, so that the clock's grain and the event itself do not count


class GpuTimer:
    """Times cases on the current CUDA device.

    Attributes:
        device: its name.
        versions: of torch, CUDA and the FP8 libraries.
        recipes: the FP8 recipes that the GPU and the installed libraries have.
    """

    def __init__(self, sizes: Sizes, recipes: tuple[str, ...]) -> None:
        self.sizes, self.recipes = sizes, recipes
        self.device = torch.cuda.get_device_name()
        self.versions = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
        if te.version():
            self.versions["transformer_engine"] = ".".join(map(str, te.version()))

    @classmethod
    def here(cls, sizes: Sizes) -> GpuTimer:
        """The timer of this machine.

        Raises:
            ConfigError: no GPU, or none that has FP8, or no library that runs it.
        """
        if not torch.cuda.is_available():
            raise _no_gpu("no CUDA GPU")
        capability = torch.cuda.get_device_capability()
        libraries = [name for name, why in (("te", te.why_absent()), ("torchao", _why_no_torchao())) if why is None]
        able = [r for r in RECIPES.values() if r.library in libraries and r.capability <= capability]
        if not able:
            raise _no_gpu(f"sm{capability[0]}{capability[1]}, FP8 libraries: {', '.join(libraries) or 'none'}")
        return cls(sizes, tuple(sorted((r.name for r in able), key=lambda name: RECIPES[name].library != "te")))

    def baseline(self, recipe: str) -> str:
        """BF16 through the same library: torchao's layers are compiled, and so is what they are compared with."""
        return BF16 if RECIPES[recipe].library == "te" else COMPILED

    def blocks(self, recipe: str) -> tuple[str, ...]:
        """All for Transformer Engine; torchao converts linear layers only."""
        return BLOCKS if recipe == BF16 or (recipe in RECIPES and RECIPES[recipe].library == "te") else ("linear",)

    def time(self, case: Case) -> tuple[float, ...]:
        """Milliseconds of one forward and backward, for each of several repeats.

        Raises:
            Untimed: out of memory, or refused by the library.
        """
        try:
            step = self._step(case)
            return _repeats(_captured(step) if case.mode == "graph" else step)
        except torch.cuda.OutOfMemoryError as fault:
            raise Untimed("out of memory") from fault
        except (RuntimeError, ValueError, ImportError, AssertionError) as fault:  # what the libraries raise
            raise Untimed(f"{type(fault).__name__}: {' '.join(str(fault).split())[:160]}") from fault
        finally:
            step = None
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _step(self, case: Case) -> Callable[[], None]:
        """A function that runs forward and backward once."""
        torch.manual_seed(0)
        model = self._model(case)
        context = self._context(case.recipe)
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        x = torch.randn(case.tokens, self.sizes.hidden, requires_grad=True, **options)
        grad = torch.randn(case.tokens, self.sizes.hidden, **options)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            x.grad = None
            with context():
                y = model(x)
            y.backward(grad)

        return step

    def _model(self, case: Case) -> nn.Module | Callable[[Tensor], Tensor]:
        sizes = self.sizes
        if case.recipe == BF16 or RECIPES.get(case.recipe, RECIPES["bf16"]).library == "te":
            from packfp8.model.te_decoder import TeDecoder

            heads = sizes.hidden // sizes.head_dim
            decoder = TeDecoder(
                DecoderSizes(vocab=16, hidden=sizes.hidden, ffn=sizes.ffn, layers=sizes.layers, heads=heads, kv_heads=heads)
            )
            return _Linears(decoder) if case.block == "linear" else _Packed(decoder, case.tokens, sizes.sequence_tokens)
        model = nn.Sequential(*(_PlainLinears(sizes) for _ in range(sizes.layers))).to("cuda", torch.bfloat16)
        if case.recipe != COMPILED:
            model = float8.convert(model, case.recipe, float8.Float8Options(), lambda layer, name: isinstance(layer, nn.Linear))
        torch.compiler.reset()
        return torch.compile(model, dynamic=False)

    def _context(self, recipe: str) -> Callable[[], AbstractContextManager]:
        if recipe not in RECIPES or RECIPES[recipe].library != "te":
            return nullcontext
        made = te.make_recipe(recipe)
        return lambda: te.autocast(made)


class _Linears(nn.Module):
    """The linear layers of a Transformer Engine decoder, without attention."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.layers = decoder.layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer.proj(layer.qkv(x)[:, : x.shape[1]])
            x = x + layer.mlp(x)
        return x


class _Packed(nn.Module):
    """The decoder's layers on a pack of equal sequences, and a shorter one at the end."""

    def __init__(self, decoder: nn.Module, tokens: int, sequence_tokens: int) -> None:
        super().__init__()
        self.decoder = decoder
        offsets = [*range(0, tokens, sequence_tokens), tokens]
        offsets = torch.tensor(offsets, dtype=torch.int32, device="cuda")
        longest = min(tokens, sequence_tokens)
        self.attended = {
            "qkv_format": "thd",
            "cu_seqlens_q": offsets,
            "cu_seqlens_kv": offsets,
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
        }

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, **self.attended)


class _PlainLinears(nn.Module):
    """The same linear layers as `nn.Linear`: what torchao converts."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, ffn = sizes.hidden, sizes.ffn
        self.attn_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.fc1, self.fc2 = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.qkv(self.attn_norm(x))[:, : x.shape[1]])
        gate, up = self.fc1(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.fc2(F.silu(gate) * up)


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _repeats(run: Callable[[], None]) -> tuple[float, ...]:
    """Milliseconds of one run, for each repeat."""
    for _ in range(_WARM_UP):
        run()
    once = _milliseconds(run, 1)
    runs = max(1, min(100, round(1000 * _REPEAT_SECONDS / once)))
    return tuple(_milliseconds(run, runs) for _ in range(_REPEATS))


def _milliseconds(run: Callable[[], None], runs: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(runs):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / runs


def _why_no_torchao() -> str | None:
    try:
        float8.library()
    except ConfigError as fault:
        return str(fault.got)
    return None


def _no_gpu(got: str) -> ConfigError:
    return ConfigError(
        "the payoff of FP8 is timed on a GPU, and this machine cannot",
        got=got,
        expected="a CUDA GPU of sm89 or newer, with Transformer Engine or torchao",
        because="a speed that was not measured here would be a guess",
        fix="run `packfp8 payoff` on the GPU machine; `packfp8 doctor` says what is missing",
    )
