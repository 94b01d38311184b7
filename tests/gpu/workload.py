"""What the GPU scripts of this folder share: a header for their logs, the corpus in packs, a model, an optimizer, a clock."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from packfp8 import Alignment, AudioFrames, Collator, Measure, StreamPacker, corpus
from packfp8.data import PackedBatch
from packfp8.data.example import Example, as_example
from packfp8.model import Fp8, PackedModel
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder
from packfp8.model.plain_encoder import PlainEncoder, PlainProjector
from packfp8.model.te_decoder import TeDecoder
from packfp8.rule import RECIPES

MEASURE = Measure(frames=AudioFrames.fastconformer())
RESULTS = Path(__file__).parent / "results"


def header() -> str:
    """How this program was started, the versions of what it runs on, and the GPU."""
    versions = []
    for name in ("torch", "transformer_engine", "torchao", "numpy"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    gpu = "no GPU"
    if torch.cuda.is_available():
        versions.append(f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
        gpu = torch.cuda.get_device_name()
    script = Path(sys.argv[0])
    command = " ".join(["python", f"tests/gpu/{script.name}", *sys.argv[1:]])
    return f"$ {command}\nPython {platform.python_version()}, {', '.join(versions)}\n{gpu}\n"


def examples() -> list[Example]:
    """The embedded corpus, in its order."""
    return [as_example(cut, sample_rate=MEASURE.frames.sample_rate, position=n) for n, cut in enumerate(corpus())]


def packs(rule: Alignment, budget: int, count: int, seed: int, chosen: list[Example]) -> list[list[Example]]:
    """`count` packs of examples: epoch after epoch, each in a new order that `seed` decides."""
    made: list[list[Example]] = []
    generator = np.random.default_rng(seed)
    lengths = [MEASURE.measure(example).tokens for example in chosen]
    while len(made) < count:
        packer = StreamPacker(rule.floor(budget), multiple=rule.sequence)
        for n in generator.permutation(len(chosen)).tolist():
            packer.push(n, lengths[n])
        packer.flush()
        while (keys := packer.pop()) is not None:
            made.append([chosen[key] for key in keys])
    return made[:count]


def batches(rule: Alignment, groups: Iterable[list[Example]], device: str, workers: int = 0, **options) -> list[PackedBatch]:
    """The batch of every group, on `device`."""
    collator = Collator(measure=MEASURE, rule=rule, **options)
    loader = DataLoader(list(groups), batch_size=None, collate_fn=collator, num_workers=workers)
    return [batch.to(device) for batch in loader]


def build(
    variant: str, sizes: DecoderSizes, rule: Alignment, *, seed: int, device: str, width: int = 256, recompute: bool = False
) -> PackedModel:
    """A model in BF16 with parameters that `seed` alone decides.

    Args:
        variant: a recipe, "bf16" for Transformer Engine's layers in BF16, or "plain" for the decoder in plain torch.
    """
    torch.manual_seed(seed)
    parts = PlainDecoder(sizes), PlainEncoder(width=width), PlainProjector(width=width, hidden=sizes.hidden)
    llm, encoder, projector = (part.to(device) for part in parts)
    encoder.convs.bfloat16()
    encoder.norm.bfloat16()
    fp8 = None
    if variant == "plain" or RECIPES[variant].library == "torchao":
        llm, consumer = llm.bfloat16(), "plain"
        fp8 = Fp8.torchao(variant, emulate=device == "cpu") if variant != "plain" else None
    else:
        llm, consumer = TeDecoder(sizes, recompute=recompute).load_plain(llm.state_dict()), "te"
        fp8 = Fp8.te(variant) if variant != "bf16" else None
    return PackedModel(
        encoder=encoder, projector=projector.bfloat16(), llm=llm, rule=rule, consumer=consumer, frames=MEASURE.frames, fp8=fp8
    )


class MasterAdamW:
    """AdamW on float32 copies of BF16 parameters: a small update is not lost in the rounding of a weight."""

    def __init__(self, model: nn.Module, lr: float, warmup_steps: int = 20, clip_norm: float = 1.0) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().clone() for p in self.parameters]
        self.adam = torch.optim.AdamW(self.masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.01, foreach=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.adam, lambda step: min(1.0, (step + 1) / warmup_steps))
        self.clip_norm = clip_norm

    def step(self) -> None:
        """Takes the gradients, moves the masters, and rounds them into the parameters; gradients are gone afterwards."""
        for master, parameter in zip(self.masters, self.parameters):
            master.grad = parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(self.masters, self.clip_norm, foreach=True)
        self.adam.step()
        self.schedule.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)


def median_seconds(act: Callable[[], object], repeats: int, warmups: int = 3) -> float:
    """The median time of `act` on the GPU, by events."""
    for _ in range(warmups):
        act()
    seconds = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        act()
        stop.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(seconds)
