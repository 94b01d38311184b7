"""What the scripts for two GPUs share: this rank's place, a sharded model, its gradient's norm.

On a CPU there is gloo, and stand-ins for Transformer Engine's layers, without FP8.
"""

from __future__ import annotations

import importlib
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from workload import MEASURE, header

from packfp8 import Alignment, Topology, align
from packfp8.model import Fp8, PackedModel, te
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder
from packfp8.model.plain_encoder import PlainEncoder, PlainProjector
from packfp8.model.te_decoder import TeDecoder
from packfp8.rule import RECIPES

PLAIN = ("plain", "tensorwise")
"""Variants of the decoder in plain torch: BF16, and torchao's recipe on it. All others are of Transformer Engine's layers."""


def stand_in_for_te() -> None:
    """Nothing; this process then has layers in plain torch under Transformer Engine's names, and still no GPU."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "model"))
    found = torch.cuda.is_available
    importlib.import_module("te_stand_in").install()
    torch.cuda.is_available, te.why_absent = found, lambda: None


class Ranks:
    """The process group under torchrun: NCCL, or gloo on a CPU; and one of gloo beside it, for what stays on the host.

    Attributes:
        rank, world: of the default group.
        device: this rank's.
        host: a gloo group over all ranks.
    """

    def __init__(self, device: str) -> None:
        local, self._header = int(os.environ["LOCAL_RANK"]), header()
        self.device = torch.device(device, local) if device == "cuda" else torch.device(device)
        if device == "cuda":
            torch.cuda.set_device(self.device)
            dist.init_process_group("nccl")
        else:
            torch.set_num_threads(1)
            dist.init_process_group("gloo")
            stand_in_for_te()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.host = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))

    def mesh(self, name: str) -> DeviceMesh:
        """All ranks as one dimension."""
        return init_device_mesh(self.device.type, (self.world,), mesh_dim_names=(name,))

    def tell(self, text: str) -> None:
        """Prints once."""
        if not self.rank:
            print(text, flush=True)

    def header(self) -> None:
        """How the program was started, the versions, the GPUs and the backend."""
        told = (
            header().replace("$ python ", f"$ torchrun --nproc-per-node {self.world} ").replace("tests/gpu/", "tests/gpu/two/")
        )
        self.tell(told.rstrip() + f"\n{self.world} ranks, {dist.get_backend()}\n")


def rule_of(variant: str, topology: Topology) -> Alignment:
    """The rule of a variant's packs, THD."""
    return align("bf16" if variant == "plain" else variant, topology)


def fp8_of(variant: str, device: torch.device, *, sharded: bool = True) -> Fp8 | None:
    """How a variant runs in FP8.

    torchao gathers the weights of a sharded model in FP8, by scales found beforehand. In a model that is not sharded, delayed
    scaling keeps its maxima to itself.
    """
    if variant in ("bf16", "plain"):
        return None
    if RECIPES[variant].library == "torchao":
        return Fp8.torchao(variant, fsdp_all_gather=sharded, precompute_scale=sharded, emulate=device.type == "cpu")
    if device.type == "cpu":
        return None
    if variant != "delayed" or sharded:
        return Fp8.te(variant)
    recipe = te.make_recipe(variant)
    recipe.reduce_amax = False
    return Fp8.te(recipe)


def build(
    variant: str, sizes: DecoderSizes, rule: Alignment, *, seed: int, device: torch.device, width: int = 256
) -> PackedModel:
    """A model in float32 with parameters that `seed` alone decides."""
    torch.manual_seed(seed)
    llm, encoder, projector = PlainDecoder(sizes), PlainEncoder(width=width), PlainProjector(width=width, hidden=sizes.hidden)
    llm, encoder, projector = (part.to(device) for part in (llm, encoder, projector))
    consumer = "plain"
    if variant not in PLAIN:
        llm, consumer = TeDecoder(sizes, dtype=torch.float32, device=device).load_plain(llm.state_dict()), "te"
    parts = {"encoder": encoder, "projector": projector, "llm": llm, "frames": MEASURE.frames}
    return PackedModel(**parts, rule=rule, consumer=consumer, fp8=fp8_of(variant, device))


def shard(model: PackedModel, mesh: DeviceMesh) -> PackedModel:
    """The model cut over the ranks: float32 shards, gathered and computed with in BF16, gradients summed in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.llm.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


def clip(parameters: list[nn.Parameter], most: float = 1.0) -> Tensor:
    """The norm of the whole gradient, a scalar on the device; the gradients are scaled to `most` at most. Nothing waits."""
    grads = [parameter.grad.to_local() for parameter in parameters]
    total = torch.stack(torch._foreach_norm(grads)).square().sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    torch._foreach_mul_(grads, (most / (norm + 1e-6)).clamp(max=1.0))
    return norm


def forget(device: torch.device) -> None:
    """Nothing; Transformer Engine's list of the maxima of all models of this process is empty afterwards, as in a new one."""
    if device.type == "cuda":
        importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager.reset()
