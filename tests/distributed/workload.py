"""What the ranks train: a small model on the shortest utterances of the embedded corpus and its texts."""

import functools
import math

import torch
import torch.distributed as dist
from parallel import tensor_parallel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from packfp8 import AudioFrames, Measure, PackedModel, Topology, align
from packfp8.data import Collator, PackingSampler, corpus
from packfp8.data.corpus import texts
from packfp8.model.gather import GatherOverRanks
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder
from packfp8.model.plain_encoder import PlainEncoder, PlainProjector

MEASURE = Measure(frames=AudioFrames.fastconformer())
SIZES = DecoderSizes(vocab=272, hidden=32, ffn=48, layers=2, heads=4, kv_heads=2)
BUDGET = 256
MESHES = {
    "dp 2": {"dp": 2},
    "dp_shard 2, cp 2": {"dp_shard": 2, "cp": 2},
    "cp 2, tp 2 with SP": {"cp": 2, "tp": 2},
    "dp 2, cp 2, tp 2 with SP": {"dp": 2, "cp": 2, "tp": 2},
}


@functools.cache
def items():
    """Utterances of at most 3 seconds, decoded once, and texts."""
    spoken = sorted((cut for cut in corpus() if cut.duration <= 3), key=lambda cut: cut.id)
    written = [one for one in texts() if len(one.text) < 120]
    return [*(cut.move_to_memory(audio_format="wav") for cut in spoken[:80]), *written]


def sampler_of(rule, **options):
    return PackingSampler(items(), measure=MEASURE, rule=rule, **{"budget": BUDGET, "window": 4, **options})


def collator_of(rule, **options):
    return Collator(measure=MEASURE, rule=rule, **{"budget": BUDGET, **options})


def model_of(rule, dtype=torch.float32):
    """The same parameters for every rule."""
    torch.manual_seed(0)
    parts = {"encoder": PlainEncoder(width=16, mel_bins=20), "projector": PlainProjector(width=16, hidden=SIZES.hidden)}
    return PackedModel(**parts, llm=PlainDecoder(SIZES), rule=rule, consumer="plain", frames=MEASURE.frames).to(dtype)


def gradient_norm(model):
    """The norm over all parameters; each rank adds its shards, divided by how many ranks hold the same."""
    world, parameters = (dist.get_world_size() if dist.is_initialized() else 1), list(model.parameters())
    total = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for parameter in parameters:
        grad, holders = parameter.grad, world
        if isinstance(grad, DTensor):
            cuts = [size for size, placement in zip(grad.device_mesh.shape, grad.placements) if not placement.is_replicate()]
            holders, grad = world // math.prod(cuts), grad.to_local()
        total += grad.double().square().sum() / holders
    if world > 1:
        dist.all_reduce(total)
    return total.sqrt().item()


class Place:
    """This rank on a mesh: its rule, its groups, and the model cut for it.

    Args:
        sizes: of the mesh, by dimension.
        layout: "thd" or "bshd".
        device: "cpu", or "cuda" with NCCL.
    """

    def __init__(self, sizes, layout, recipe="block", device="cpu"):
        self.device = device
        self.mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        topology = Topology.from_mesh(self.mesh, sp="tp" in sizes)
        self.rule = align(recipe, topology, layout=layout)
        self.token_dim = 0 if layout == "thd" else 1
        data = tuple(name for name in sizes if name != "tp")
        peers = tuple(name for name in sizes if name in ("cp", "tp"))
        self.data = self._joined(data)
        self.peers = self._joined(peers).get_group() if peers else None

    def _joined(self, names):
        return self.mesh[names]._flatten("_".join(names) + "_joined") if len(names) > 1 else self.mesh[names[0]]

    def model(self, dtype=torch.float32):
        """The model, split over TP peers and then sharded over the rest."""
        model = model_of(self.rule, dtype).to(self.device)
        if self.rule.topology.tp > 1:
            tensor_parallel(model.llm, self.mesh["tp"], self.token_dim)
        if self.rule.topology.cp > 1:
            model.llm.gather = GatherOverRanks(self.mesh["cp"].get_group())
        for part in (*model.llm.layers, model):
            fully_shard(part, mesh=self.data)
        return model

    def mean(self, total, count):
        """The loss over all data- and context-parallel ranks."""
        total = total.detach().double()
        dist.all_reduce(total, group=self.data.get_group())
        return total.item() / max(1, int(count))
