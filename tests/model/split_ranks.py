"""One of two processes (gloo, CPU): the decoder under Transformer Engine split over both, by stand-ins for its layers.

`test_tensor_split.py` starts it as `python split_ranks.py RANK FOLDER`, twice. Each saves, for every case, its loss, its logits
and its gradients, by the plain decoder's names.
"""

import sys
from pathlib import Path

import te_stand_in
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from packfp8.data import Collator, Example, Turn
from packfp8.errors import LengthError
from packfp8.lengths import Measure
from packfp8.model import PackedModel
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder
from packfp8.model.te_decoder import TeDecoder, plain_name
from packfp8.rule import Topology, align

SIZES = DecoderSizes(vocab=272, hidden=16, ffn=24, layers=2, heads=4, kv_heads=2)
EXAMPLES = [Example(id=f"s{n}", turns=(Turn("assistant", ("ab " * n,)),)) for n in (3, 1, 9, 4)]
TP, SP, CP = {"tp": 2}, {"tp": 2, "sp": True}, {"cp": 2}
CASES = {
    "tp 2": (TP, "thd", None),
    "tp 2, rows": (TP, "bshd", None),
    "tp 2 with SP": (SP, "thd", None),
    "tp 2 with SP, rows as slots": (SP, "bshd", None),
    "tp 2 with SP, sequence first": (SP, "bshd", ("sbhd",)),
    "cp 2": (CP, "thd", None),
    "cp 2, rows": (CP, "bshd", None),
}
"""Topology, layout of the rule, and the layouts that the decoder is made to take."""


def plain_state():
    torch.manual_seed(0)
    decoder = PlainDecoder(SIZES).double()
    for weight in (decoder.embedding.weight, decoder.head.weight):
        torch.nn.init.normal_(weight, std=0.5)
    return decoder.state_dict()


def batch_of(rule, examples=EXAMPLES):
    return Collator(measure=Measure(frames=None), rule=rule)(examples)


def decoder_of(topology, group, **options):
    split = {"tp_group": group, "sp": topology.sp} if topology.tp > 1 else {}
    decoder = TeDecoder(SIZES, dtype=torch.float64, device="cpu", **split, **options).load_plain(plain_state())
    return decoder.split_context(group, stream=object()) if topology.cp > 1 else decoder


def work(rank, sizes, layout, taken, sharded=False, halves=False, **options):
    names = {f"{name}_rank": rank for name in ("tp", "cp") if name in sizes}
    rule = align("block", Topology(**sizes, **names), layout=layout)
    decoder = decoder_of(rule.topology, dist.group.WORLD, **options)
    if taken:
        decoder.layouts = taken
    model = PackedModel(encoder=None, projector=None, llm=decoder, rule=rule)
    batch = batch_of(rule)
    count = batch.num_supervised
    if rule.topology.cp > 1:
        count = torch.tensor(count)
        dist.all_reduce(count)
    if sharded:  # over one rank: FSDP puts parameters of its own in the place of those that were built
        alone = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["dp"]
        for part in (*decoder.layers, model):
            fully_shard(part, mesh=alone)
    for _ in range(2):  # the second time, nothing may be summed twice
        model.zero_grad(set_to_none=True)
        out = model(batch, global_supervised=count, return_logits=True)
        out.loss.backward()
    if halves:  # the same gradient from a window of two micro-batches
        model.zero_grad(set_to_none=True)
        for part in (EXAMPLES[:2], EXAMPLES[2:]):
            model(batch_of(rule, part), global_supervised=count).loss.backward()
    grads = {plain_name(name).removeprefix("llm."): p.grad for name, p in model.named_parameters()}
    return {
        "loss_sum": out.loss_sum.detach(),
        "logits": out.logits.detach(),
        "grads": {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()},
    }


def drawn(rank, seed):
    """A fresh decoder's parameters by name, and a random number after it."""
    torch.manual_seed(seed)
    decoder = TeDecoder(SIZES, dtype=torch.float64, device="cpu", tp_group=dist.group.WORLD, sp=True)
    return {name: p.detach() for name, p in decoder.named_parameters()} | {"after": torch.rand(())}


def refused():
    """What a slab of five rows is told under SP."""
    decoder = decoder_of(Topology(**SP), dist.group.WORLD)
    try:
        decoder(torch.zeros(5, SIZES.hidden, dtype=torch.float64), qkv_format="thd", max_seqlen_q=5)
    except LengthError as fault:
        return str(fault)
    return None


def moved(rank, layout):
    """How far this rank's last token of every row moves when the first is changed; rows cut as `layout` is gathered."""
    rule = align("block", Topology(**SP, tp_rank=rank), layout="bshd")
    decoder, batch = decoder_of(rule.topology, dist.group.WORLD), batch_of(rule)
    tokens = 1 if layout == "bshd" else 0
    told = {"qkv_format": layout, "attn_mask_type": "causal"}
    with torch.no_grad():
        before = decoder.embed(batch.input_ids if layout == "bshd" else batch.as_sbhd().input_ids)
        after = before.clone()
        after.select(tokens, 0).neg_()
        shards = [x.chunk(2, dim=tokens)[rank].contiguous() for x in (before, after)]
        rotate = decoder._rotation(shards[0] if layout == "bshd" else before, layout, told)
        for layer in decoder.layers:
            shards = [layer(x, rotate, told, None) for x in shards]
    return (shards[1] - shards[0]).select(tokens, -1).abs().amax(-1)


def main(rank, folder):
    torch.set_num_threads(1)
    te_stand_in.install()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {name: work(rank, *case) for name, case in CASES.items()}
    found["tp 2 with SP, sharded"] = work(rank, *CASES["tp 2 with SP"], sharded=True)
    found["tp 2 with SP, recomputed"] = work(rank, *CASES["tp 2 with SP"], recompute=True)
    found["tp 2 with SP, accumulated"] = work(rank, *CASES["tp 2 with SP"], recompute=True, halves=True)
    found["moved"] = {layout: moved(rank, layout) for layout in ("bshd", "sbhd")}
    found["drawn"] = {"one seed": drawn(rank, 5), "a seed each": drawn(rank, rank)}
    found["refused"] = refused()
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
