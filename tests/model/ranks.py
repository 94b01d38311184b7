"""What one of two processes does (gloo, CPU). `test_ranks.py` starts it as `python ranks.py RANK FOLDER`, twice.

Rank 0 has audio and rank 1 text alone (kind "fsdp"), or both hold slabs of one pack (kind "cp"). Each saves its gradients.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from packfp8.data import Clip, Collator, Example, Turn
from packfp8.lengths import AudioFrames, Measure
from packfp8.model import PackedModel
from packfp8.model.gather import GatherOverRanks
from packfp8.model.loss import count_supervised
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder
from packfp8.model.plain_encoder import PlainEncoder, PlainProjector
from packfp8.rule import Topology, align

MEASURE = Measure(frames=AudioFrames.fastconformer())


def examples():
    source = 0.1 * np.random.default_rng(0).standard_normal(60_000).astype(np.float32)
    clip = Clip(source=source, num_samples=60_000, sample_rate=16_000)
    turns = [(Turn("user", (clip,)), Turn("assistant", ("good morning",))), (Turn("assistant", ("text alone",)),)]
    return [Example(id=str(n), turns=t) for n, t in enumerate(turns)]


def make_model(rule):
    torch.manual_seed(0)
    parts = {"encoder": PlainEncoder(width=8, mel_bins=10), "projector": PlainProjector(width=8, hidden=16)}
    llm = PlainDecoder(DecoderSizes(vocab=272, hidden=16, ffn=24))
    return PackedModel(**parts, llm=llm, rule=rule, consumer="plain", frames=MEASURE.frames).double()


def shares(kind, rank):
    """The rule of this rank and the examples of its pack."""
    if kind == "fsdp":
        return align("block", Topology(dp=2, dp_rank=rank)), examples()[rank : rank + 1]
    return align("block", Topology(cp=2, cp_rank=rank)), examples()


def work(kind, rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp" if kind == "fsdp" else "cp",))
    rule, own = shares(kind, rank)
    model, batch = make_model(rule), Collator(measure=MEASURE, rule=rule)(own)
    for part in (model.encoder, *model.llm.layers, model):
        fully_shard(part, mesh=mesh)
    if kind == "cp":
        model.llm.gather = GatherOverRanks(mesh.get_group())
    count = count_supervised([batch], mesh)
    out = model(batch, global_supervised=count)
    out.loss.backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return {"grads": grads, "count": count, "clips": batch.audio.shape[0], "sum": out.loss_sum.detach()}


def main(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save({kind: work(kind, rank) for kind in ("fsdp", "cp")}, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
