"""prove_isolation: that a language model keeps the sequences of a pack apart, by changing some and watching the others.

An attention that is not told the offsets, or does not read them, fails nowhere: it takes the pack for one sequence, and the
loss still falls. Everything else works row by row, so where nothing crosses a boundary the others do not move at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace

import torch
from torch import Tensor

from packfp8.data import PackedBatch
from packfp8.errors import ConfigError

IDS = ("seq_idx", "document_ids")
POSITIONS = ("position_ids",)


def prove_isolation(
    run: Callable[..., Tensor],
    embeddings: Tensor,
    batch: PackedBatch,
    metadata: Mapping[str, object],
    *,
    tolerance: float = 0.0,
) -> None:
    """Nothing, where no sequence of the batch moves when others, or the padding, are changed.

    Costs five forward passes. Under CP every rank must call it; each tells of its own tokens.

    Args:
        run: (embeddings, **metadata) -> one vector for each token: hidden states, or logits. It must give the same twice: no
            dropout.
        embeddings: `[tokens of the batch..., hidden]`; the others are compared with what `run` gives for them.
        batch: of at least two sequences.
        metadata: what `run` is told of the batch, `batch.kwargs(...)` without labels.
        tolerance: most by which an element of another sequence may move. 0 is right without FP8; scales of a whole tensor
            (torchao's tensorwise) let every row feel every other.

    Raises:
        ConfigError: something moved (the message names the arguments that were ignored), or nothing could be proved.
    """
    if batch.slots.sequences < 2:
        raise _nothing_proved(batch, f"{batch.slots.sequences} sequences", "at least two sequences", "pass a pack of several")
    pads, slot = batch.padding_mask, batch.seq_idx
    changes = {
        "the first sequence": ~pads & (slot == 0),
        "every second sequence": ~pads & (slot % 2 == 1),
        "the others": ~pads & (slot % 2 == 0),
        "the padding": pads,
    }
    with torch.no_grad():
        before = run(embeddings, **metadata)
        noise = _noise(embeddings)
        after = {name: run(torch.where(here[..., None], noise, embeddings), **metadata) for name, here in changes.items()}
    for name, here in changes.items():
        moved = ~((after[name] - before).abs().amax(-1) <= tolerance)  # NaN has moved
        if here.any() and name != "the padding" and not (moved & here).any():
            raise _nothing_proved(
                batch, f"{name} was changed and did not move", "a model that reads its input", "pass a model with weights"
            )
        if (moved & ~here & ~pads).any():
            raise _leak(run, embeddings, before, batch, metadata, name, after[name], moved & ~here & ~pads)


def ignored(
    run: Callable[..., Tensor], embeddings: Tensor, before: Tensor, batch: PackedBatch, metadata: Mapping[str, object]
) -> list[str]:
    """Names of the arguments that tell of boundaries, and whose change changes nothing.

    The first two slots are made one in all offsets at once, or in all ids, or the positions of the second run on.
    """
    names = []
    for keys in (_offset_keys(metadata), [k for k in IDS if k in metadata], [k for k in POSITIONS if k in metadata]):
        joined = {key: _joined(key, metadata[key], batch) for key in keys}
        longest = {key: batch.slots.total for key in metadata if key.startswith("max_") and keys == _offset_keys(metadata)}
        with torch.no_grad():
            if keys and torch.equal(run(embeddings, **{**metadata, **joined, **longest}), before):
                names += keys
    return names


def _offset_keys(metadata: Mapping[str, object]) -> list[str]:
    return [key for key in metadata if key.startswith(("cu_seqlens", "cu_seq_")) or key == "packed_seq_params"]


def _joined(key: str, value: object, batch: PackedBatch) -> object:
    """`value` as if the first two slots were one."""
    if is_dataclass(value):  # Megatron's PackedSeqParams
        own = {f.name: getattr(value, f.name) for f in fields(value) if f.init and getattr(value, f.name) is not None}
        joined = {name: _joined(name, own[name], batch) for name in _offset_keys(own)}
        return replace(value, **joined, **{name: batch.slots.total for name in own if name.startswith("max_seqlen")})
    if key in IDS:
        return value.clamp(min=1)
    if key in POSITIONS:
        second = (batch.seq_idx == 1).reshape(value.shape)
        return torch.where(second, value + int(batch.slots.sizes[0]), value)
    value = value.clone()
    value[1] = 0
    return value


def _noise(embeddings: Tensor) -> Tensor:
    """Other embeddings of the same size, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(embeddings.shape, generator=generator).to(embeddings)
    return noise * embeddings.std().clamp(min=1e-3)


def _leak(run, embeddings, before, batch, metadata, name, after, moved) -> ConfigError:
    slots = sorted(set(batch.seq_idx[moved].tolist()))
    most = (after - before)[moved].abs().max().item()
    unread = ignored(run, embeddings, before, batch, metadata)
    if unread:
        because = f"the model ignores {', '.join(unread)}: changing what they say changes nothing"
    elif _offset_keys(metadata) or any(key in metadata for key in (*IDS, *POSITIONS)):
        because = "every argument is read and some layer crosses boundaries all the same (a convolution, a scan, a mean?)"
    else:
        because = (
            f"nothing of what it is told in layout {batch.layout!r} tells of boundaries: {', '.join(metadata) or 'nothing'}"
        )
    return ConfigError(
        f"the model does not keep apart the sequences of {', '.join(batch.ids[:4])}",
        got=f"{name} changed, and {', '.join(batch.ids[n] for n in slots[:4])} moved by up to {most:.3g}",
        expected="every other sequence as it was",
        because=because,
        fix="choose the consumer that the model reads, an attention that takes offsets, or align(..., layout='bshd')",
    )


def _nothing_proved(batch: PackedBatch, got: str, expected: str, fix: str) -> ConfigError:
    return ConfigError(
        f"nothing was proved with the batch of {', '.join(batch.ids[:4]) or 'no sequence'}",
        got=got,
        expected=expected,
        because="a change must reach one sequence, and another must be there that it could reach too",
        fix=fix,
    )
