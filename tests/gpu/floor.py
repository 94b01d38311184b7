"""Floor: how long a step's matrix products take at the rate that this GPU was measured to have."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from packfp8.data import PackedBatch
from packfp8.model.plain_decoder import DecoderSizes

_SIDE = 8192  # of the square GEMM: large enough that nothing but its own speed counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Rates of one large GEMM, in FLOP/s."""

    fp8: float
    bf16: float

    @classmethod
    def measured(cls, device: str) -> Floor:
        """The rates of this GPU; on a CPU those of a small float32 product, so that a dry run has numbers."""
        if device == "cpu":
            a = torch.randn(256, 256)
            rate = _rate(lambda: a @ a, 256, device)
            return cls(fp8=rate, bf16=rate)
        a, b = (torch.randn(_SIDE, _SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
        a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)

        def product() -> None:
            torch._scaled_mm(a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

        return cls(fp8=_rate(product, _SIDE, device), bf16=_rate(lambda: a @ b, _SIDE, device))

    def __str__(self) -> str:
        return f"one GEMM of {_SIDE}^3: FP8 {self.fp8 / 1e12:.0f}, BF16 {self.bf16 / 1e12:.0f} TFLOP/s"

    def milliseconds(self, sizes: DecoderSizes, batches: Sequence[PackedBatch], loss_rows: int) -> dict[str, float]:
        """Of one batch of one shape, by part: products alone, forward and the two of backward.

        The decoder's linear layers run at the FP8 rate; attention over each sequence's own tokens (half of the square, being
        causal), head, encoder and projector at that of BF16.
        """
        h, tokens, frames = sizes.hidden, batches[0].tokens, batches[0].audio_frames
        layer = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim * h + h * h + 3 * h * sizes.ffn
        squares = statistics.mean(float((batch.slots.sizes.astype(float) ** 2).sum()) for batch in batches)
        encoder = frames * (4 * 3 * 80 * h + (2 + 1) * 3 * h * h + 2 * h * h)  # three convolutions at 4, 2 and 1, projector
        flops = {
            "linear layers": 6 * sizes.layers * layer * tokens,
            "attention": 3 * 2 * sizes.layers * h * squares,
            "head": 6 * loss_rows * h * sizes.vocab,
            "encoder": 6 * encoder,
        }
        return {part: 1e3 * count / (self.fp8 if part == "linear layers" else self.bf16) for part, count in flops.items()}

    def told(self, sizes: DecoderSizes, batches: Sequence[PackedBatch], loss_rows: int) -> str:
        """A line for people."""
        parts = self.milliseconds(sizes, batches, loss_rows)
        decoder = parts["linear layers"] + parts["attention"]
        listed = ", ".join(f"{part} {ms:.2f}" for part, ms in parts.items())
        return f"floor (products alone): decoder {decoder:.2f} ms, step {sum(parts.values()):.2f} ms ({listed})"


def _rate(product: Callable[[], object], side: int, device: str, repeats: int = 10) -> float:
    for _ in range(3):
        product()
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            product()
        return 2 * side**3 * repeats / (time.perf_counter() - start)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        product()
    stop.record()
    torch.cuda.synchronize()
    return 2 * side**3 * repeats / (start.elapsed_time(stop) / 1e3)
