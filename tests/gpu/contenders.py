"""What `bench_captured.py` compares: the same speech in padded batches and in packs, and the steps that are timed on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from bench_tokens import bucketed
from torch import Tensor
from workload import MEASURE, examples

from packfp8 import Alignment, StreamPacker, align
from packfp8.data import Collator, Example, PackedBatch
from packfp8.lengths import rooms
from packfp8.model import Fp8, PackedModel
from packfp8.model.captured import CapturedStep
from packfp8.model.graph import Graph
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder
from packfp8.model.plain_encoder import PlainEncoder, PlainProjector
from packfp8.model.te_decoder import TeDecoder

_ROUND_TOKENS = 64  # of the longest slot and of the head's rows: constants that one example more does not change
_COPIES = 1.5  # bucket batches that the corpus is repeated for, over the 30 that there must be at least
RULE = align("block")  # the batches of all recipes are made by it: its multiples are also those of the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Batches of the corpus, in pinned memory where there is a GPU.

    Args:
        padded: (a) BSHD, drawn from 30 length buckets.
        packs: (b, c) THD, as many tokens as there are.
        static: (d, e) the same packs in one shape.
        loss_rows: most supervised tokens of a pack, rounded up.
        told: a line for people.
    """

    padded: list[PackedBatch]
    packs: list[PackedBatch]
    static: list[PackedBatch]
    loss_rows: int
    told: str


def made(budget: int, count: int, *, device: str, whole_max_seqlen: bool) -> Data:
    """`count` batches of each kind within `budget` tokens, of the corpus repeated as often as the buckets need."""
    corpus = [example for example in examples() if MEASURE.measure(example).tokens <= budget]
    measured = [MEASURE.measure(example) for example in corpus]
    tokens = sum(m.tokens for m in measured)
    copies = int(_COPIES * 30 * budget / tokens) + 2
    order = np.random.default_rng(0).permutation(len(corpus) * copies) % len(corpus)
    lengths = np.array([measured[n].tokens for n in order])
    frames = np.array([sum(rooms(f) for f in measured[n].encoder_frames) for n in order])
    groups = _packed(lengths, frames, budget, None)
    frame_budget = int(np.percentile([frames[group].sum() for group in groups], 95))
    groups = _packed(lengths, frames, budget, frame_budget)
    most = max(map(len, groups))
    chosen = [groups[n] for n in np.random.default_rng(1).choice(len(groups) - 1, count, replace=False)]
    rows = align("bf16", layout="bshd")
    buckets = bucketed(lengths, rows, budget)
    drawn = [buckets[n] for n in np.random.default_rng(1).choice(len(buckets), count, replace=False)]
    static = {"static": True, "budget": budget, "max_sequences": most, "frame_budget": frame_budget}

    def collated(groups: Sequence[Sequence[int]], rule: Alignment, **options) -> list[PackedBatch]:
        collator = Collator(measure=MEASURE, rule=rule, **options)
        named = [[Example(id=f"{n}", turns=corpus[order[n]].turns) for n in group] for group in groups]
        batches = [collator(group) for group in named]
        return [batch.pin_memory() for batch in batches] if device == "cuda" else batches

    longest = min(budget, -(-max(map(RULE.slot, lengths.tolist())) // _ROUND_TOKENS) * _ROUND_TOKENS)
    constant = collated(chosen, RULE, **static, max_seqlen=None if whole_max_seqlen else longest)
    padded = collated(drawn, rows)
    told = (
        f"{copies} copies of {len(corpus)} examples of {tokens} tokens together; frame budget {frame_budget}, "
        f"at most {most} sequences, max_seqlen {constant[0].max_seqlen}; "
        f"real of all tokens: packs {_real(constant):.4f}, buckets {_real(padded):.4f}"
    )
    supervised = max(batch.num_supervised for batch in constant)
    loss_rows = min(budget, -(-supervised // _ROUND_TOKENS) * _ROUND_TOKENS)
    return Data(padded=padded, packs=collated(chosen, RULE), static=constant, loss_rows=loss_rows, told=told)


def real_tokens(batches: Sequence[PackedBatch]) -> int:
    """Tokens that are no padding."""
    return sum(int(batch.slots.lengths.sum()) for batch in batches)


def _real(batches: Sequence[PackedBatch]) -> float:
    return real_tokens(batches) / sum(batch.tokens for batch in batches)


def _packed(lengths: np.ndarray, frames: np.ndarray, budget: int, frame_budget: int | None) -> list[list[int]]:
    packer, groups = StreamPacker(RULE.floor(budget), multiple=RULE.sequence, frame_budget=frame_budget), []
    for n, (length, heard) in enumerate(zip(lengths.tolist(), frames.tolist())):
        packer.push(n, length, heard)
    packer.flush()
    while (keys := packer.pop()) is not None:
        groups.append(keys)
    return groups


def build(recipe: str, sizes: DecoderSizes, *, device: str) -> PackedModel:
    """A model in BF16 with its decoder by `recipe`; on a CPU the plain decoder in float32 stands in, without FP8."""
    torch.manual_seed(0)
    encoder, projector = PlainEncoder(width=sizes.hidden), PlainProjector(width=sizes.hidden, hidden=sizes.hidden)
    if device == "cpu":
        llm, consumer, fp8 = PlainDecoder(sizes), "plain", None
    else:
        encoder, projector = encoder.cuda(), projector.cuda().bfloat16()
        encoder.convs.bfloat16()
        encoder.norm.bfloat16()
        llm, consumer, fp8 = TeDecoder(sizes), "te", Fp8.te(recipe) if recipe != "bf16" else None
    parts = {"encoder": encoder, "projector": projector, "llm": llm, "frames": MEASURE.frames}
    return PackedModel(**parts, rule=align(recipe), consumer=consumer, fp8=fp8)


def ruled(batches: Sequence[PackedBatch], rule: Alignment) -> list[PackedBatch]:
    """The batches as if `rule` had made them, whose multiples they meet."""
    return [replace(batch, rule=rule, fingerprint=rule.fingerprint) for batch in batches]


# -- steps: functions that run forward and backward once for each batch --------------------------------------------------


def whole(model: PackedModel, batches: list[PackedBatch], device: str) -> Callable[[], None]:
    """Encoder, splice, decoder, loss and backward, launched kernel by kernel."""

    def run() -> None:
        for batch in batches:
            model.zero_grad(set_to_none=True)
            model(batch.to(device, non_blocking=True), global_supervised=batch.num_supervised).loss.backward()

    return run


def whole_captured(model: PackedModel, batches: list[PackedBatch]) -> Callable[[], None]:
    """The same, captured; batches are copied ahead."""
    step = CapturedStep(model, batches[0])

    def run() -> None:
        for batch in step.feed(batches):
            step(batch, global_supervised=batch.num_supervised)

    while not (step.replays or step.fallbacks):  # what is timed comes after the capture
        run()
    return run


def decoder(model: PackedModel, batches: list[PackedBatch], device: str) -> Callable[[], None]:
    """The decoder alone on embeddings that are there, launched kernel by kernel."""
    steps = [partial(_decode, model, *_inputs(model, batch.to(device))) for batch in batches]

    def run() -> None:
        for step in steps:
            model.zero_grad(set_to_none=True)
            step()

    return run


def decoder_captured(model: PackedModel, batches: list[PackedBatch]) -> Callable[[], None]:
    """The same, captured: only the offsets change from batch to batch."""
    stream, static = torch.cuda.Stream(), batches[0].to("cuda")
    offsets = [batch.cu_seqlens.to("cuda") for batch in batches]
    step = partial(_decode, model, *_inputs(model, static))
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    graph = Graph(step, model, None, stream=stream)

    def run() -> None:
        for own in offsets:
            static.cu_seqlens.copy_(own)
            graph.replay()

    return run


def _inputs(model: PackedModel, batch: PackedBatch) -> tuple[Tensor, Tensor, dict]:
    """Embeddings, a gradient of the hidden states, and the metadata of `batch`."""
    weight = model.llm.head.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = (*batch.input_ids.shape, weight.shape[1])
    embeddings, gradient = (torch.randn(shape, dtype=weight.dtype, device=weight.device, generator=generator) for _ in range(2))
    told = {key: value for key, value in batch.kwargs(model.consumer).items() if key not in ("labels", "loss_mask")}
    return embeddings.requires_grad_(), gradient, told


def _decode(model: PackedModel, embeddings: Tensor, gradient: Tensor, told: dict) -> None:
    embeddings.grad = None
    with model.fp8.forward_context() if model.fp8 else nullcontext():
        hidden = model.llm(embeddings, **told)
    hidden.backward(gradient)
