"""tensor_parallel: a `PlainDecoder` over TP peers with sequence parallelism, by torch's own styles.

tokens of the slab --split--> shard -> norm -> gather -> qkv, attention -> proj -> shard -> ... -> norm --gather--> slab
"""

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder


def tensor_parallel(decoder: PlainDecoder, mesh, token_dim: int) -> None:
    """Nothing; the decoder's layers are split over the mesh `tp`, its tokens along `token_dim` between them."""
    tp, split = mesh.size(), Shard(token_dim)
    plan = {
        "attn_norm": SequenceParallel(sequence_dim=token_dim),
        "qkv": ColwiseParallel(input_layouts=split),
        "proj": RowwiseParallel(output_layouts=split),
        "mlp_norm": SequenceParallel(sequence_dim=token_dim),
        "fc1": ColwiseParallel(input_layouts=split),
        "fc2": RowwiseParallel(output_layouts=split),
    }
    for layer in decoder.layers:
        sizes = layer.sizes
        for name in ("qkv", "fc1"):
            _reorder(getattr(layer, name), order_of(name, sizes, tp))
        layer.sizes = replace(sizes, hidden=sizes.hidden // tp, heads=sizes.heads // tp, kv_heads=sizes.kv_heads // tp)
        parallelize_module(layer, mesh, plan)
    first = PrepareModuleInput(
        input_layouts=(Replicate(), None, None, None), desired_input_layouts=(split, None, None, None), use_local_output=True
    )
    parallelize_module(decoder.layers[0], mesh, first)
    parallelize_module(decoder, mesh, {"norm": SequenceParallel(sequence_dim=token_dim)})
    parallelize_module(decoder, mesh, PrepareModuleOutput(output_layouts=split, desired_output_layouts=Replicate()))


def order_of(name: str, sizes: DecoderSizes, tp: int) -> torch.Tensor | slice:
    """Where each row of a parameter of a split decoder stood before: a rank's run of rows holds its share of every part."""
    head, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    parts = {"qkv": (head, kv, kv), "fc1": (sizes.ffn, sizes.ffn)}.get(name.removesuffix(".weight").split(".")[-1])
    if parts is None:
        return slice(None)
    starts = [sum(parts[:n]) for n in range(len(parts))]
    shares = [(start + rank * size // tp, size // tp) for rank in range(tp) for start, size in zip(starts, parts, strict=True)]
    return torch.cat([torch.arange(first, first + rows) for first, rows in shares])


def _reorder(linear: nn.Linear, order: torch.Tensor) -> None:
    with torch.no_grad():
        linear.weight.copy_(linear.weight[order].clone())
