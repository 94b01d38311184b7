"""The demo: real audio and text through the whole house, on a CPU: lengths, packs, batches, a model that learns.

The model is small, in plain torch and float32. The packs are those of the recipe that was asked for: what an FP8 run on a GPU
would be given.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from packfp8.data import Collator, Example, PackedBatch, PackedDataset, PackingSampler, SetAside, as_example, corpus
from packfp8.data.corpus import texts
from packfp8.errors import ConfigError, ExampleError, PackError
from packfp8.layout import Slots, place
from packfp8.lengths import AudioFrames, Measure
from packfp8.model import PackedModel
from packfp8.model.loss import count_supervised
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder
from packfp8.model.plain_encoder import PlainEncoder, PlainProjector
from packfp8.report.demo_result import DemoResult
from packfp8.report.folder import read_folder
from packfp8.rule import Alignment, align

HIDDEN, WIDTH = 96, 64  # features of decoder and encoder: a step of 2,048 tokens takes about 0.4 s on one core
LEARNING_RATE = 2e-3  # the loss of so small a model falls within a dozen steps


def run_demo(
    data: Path | None = None,
    *,
    steps: int = 20,
    layout: str = "thd",
    recipe: str = "block",
    budget: int = 2048,
    seed: int = 0,
) -> DemoResult:
    """What came of packing a corpus and training a small model on it for a few steps.

    Args:
        data: a folder of audio with a `.txt` beside each file; the embedded corpus where it is left out.
        steps: optimiser steps, of one pack each; the epochs follow one another.
        layout: "thd" for packed batches, "bshd" for padded ones.
        recipe: the FP8 recipe whose rule makes the packs.
        budget: most tokens of a pack.
        seed: of the order and of the model.

    Raises:
        AudioError, ExampleError: nothing in the folder can be trained on.
        RuleError, BudgetError: as `align` and `PackingSampler`.
        ConfigError: less than one step.
    """
    if steps < 1:
        raise ConfigError(
            "the demo has no step to take",
            got=f"steps={steps}",
            expected="at least 1",
            because="it shows a loss, and that it falls",
            fix="leave steps out, or give a positive number",
        )
    began = time.perf_counter()
    rule = align(recipe, layout=layout)
    measure = Measure(frames=AudioFrames.fastconformer())
    examples, aside = _examples(data)

    def sampler() -> PackingSampler:
        terms = {"measure": measure, "rule": rule, "budget": budget, "seed": seed}
        return PackingSampler(examples, **terms, over_budget="set_aside", on_fault="set_aside")

    packs, left_out = _planned(sampler(), rule)
    aside += left_out
    if not packs:
        raise _nothing_left(aside)
    collator = Collator(measure=measure, rule=rule, budget=budget, on_fault="set_aside", resample=True)
    batches: list[PackedBatch] = []
    losses = []
    with _by_itself(seed):
        model = make_model(measure, rule)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        for batch in _batches(sampler(), collator, steps):
            losses.append(train_step(model, optimizer, [batch]))
            batches.append(batch)
    names = {one.id for one in aside}
    broken = {one.id: one for batch in batches for one in batch.set_aside if one.id not in names}
    return DemoResult(
        source="the embedded corpus" if data is None else str(data),
        rule=rule,
        budget=budget,
        examples=sum(slots.sequences for slots in packs),
        packs=tuple(packs),
        set_aside=(*aside, *broken.values()),
        losses=tuple(losses),
        supervised_tokens=sum(batch.num_supervised for batch in batches),
        trained_tokens=sum(batch.tokens for batch in batches),
        audio_seconds=sum(int(batch.audio_lens.sum()) for batch in batches) / measure.frames.sample_rate,
        seconds=time.perf_counter() - began,
    )


def make_model(measure: Measure, rule: Alignment) -> PackedModel:
    """A small encoder, projector and decoder in float32, for the tokens of `measure`; sizes legal under the rule."""
    vocab = -(-measure.tokenizer.vocab_size // rule.features) * rule.features
    return PackedModel(
        encoder=PlainEncoder(width=WIDTH),
        projector=PlainProjector(width=WIDTH, hidden=HIDDEN),
        llm=PlainDecoder(DecoderSizes(vocab=vocab, hidden=HIDDEN, ffn=3 * HIDDEN, layers=2)),
        rule=rule,
        consumer="plain",
        frames=measure.frames,
    )


def train_step(model: PackedModel, optimizer: torch.optim.Optimizer, window: list[PackedBatch]) -> float:
    """The mean loss of one optimiser step over the micro-batches of `window`, per supervised token."""
    count = count_supervised(window)
    optimizer.zero_grad()
    total = 0.0
    for batch in window:
        out = model(batch, global_supervised=count)
        out.loss.backward()
        total += out.loss.item()
    optimizer.step()
    return total


@contextmanager
def _by_itself(seed: int) -> Iterator[None]:
    """Seeded, on one thread, and the caller's own state as it was.

    The tensors are small: threads that wait for each other cost more than they save (measured on two busy cores: five times).
    """
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _examples(data: Path | None) -> tuple[list[Example], list[SetAside]]:
    """The examples of the corpus or the folder; a file whose header cannot be read is set aside."""
    items, aside = ([*corpus(), *texts()], []) if data is None else read_folder(Path(data))
    examples = []
    for position, item in enumerate(items):
        try:
            examples.append(as_example(item, position=position))
        except PackError as fault:
            aside.append(SetAside(id=item["id"] if isinstance(item, dict) else str(item.id), reason=str(fault)))
    return examples, aside


def _planned(sampler: PackingSampler, rule: Alignment) -> tuple[list[Slots], list[SetAside]]:
    """The slots of every pack of the first epoch, and what no pack holds. From lengths alone."""
    packs = [place([one.tokens for one in pack], rule) for step in sampler.forecast() for pack in step if pack]
    for _ in sampler:
        pass  # only a pass that has ended knows all that was set aside
    return packs, list(sampler.set_aside)


def _batches(sampler: PackingSampler, collator: Collator, count: int) -> Iterator[PackedBatch]:
    """`count` batches, epoch after epoch."""
    loader, epoch = DataLoader(PackedDataset(collator), sampler=sampler, batch_size=None), 0
    while count > 0:
        sampler.set_epoch(epoch)
        for batch in loader:
            yield batch
            count -= 1
            if count == 0:
                return
        epoch += 1


def _nothing_left(aside: list[SetAside]) -> ExampleError:
    return ExampleError(
        "no example is left to train on",
        got=f"{len(aside)} set aside; {aside[0].id}: {aside[0].reason.splitlines()[0]}",
        expected="at least one that fits the budget",
        because="a pack of no token teaches nothing",
        fix="raise the budget, or repair the files that are named",
    )
