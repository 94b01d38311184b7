"""Placing audio frames among text embeddings: index operations against a loop over utterances, and against a bare copy.

    python tests/gpu/bench_splice.py

The rival is written here as speech models commonly do it, after the encoder has run: for each utterance ask the device how many
tokens it has, where its audio stands and how many frames that has (`.item()`, `.tolist()`), cut, `torch.cat`, do the same to
the labels, then pad all to the longest. The labels and the layout of a pack were made by the collator, from lengths alone. The
floor is a copy of our result on the device. Loop and splice are compared before they are timed.
"""

from __future__ import annotations

import click
import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from workload import header, median_seconds

from packfp8 import Alignment, AudioFrames, Measure, align
from packfp8.data import Clip, Collator, Example, PackedBatch, Turn
from packfp8.model.splice import splice

PLACEHOLDER, PAD, IGNORED = -1, -2, -100


def make_batch(utterances: int, rule: Alignment, seed: int = 0) -> tuple[PackedBatch, torch.Tensor]:
    """A pack of as many sequences of text, audio, text, without its waveforms, and the frames of each clip, on the GPU."""
    generator = np.random.default_rng(seed)
    measure = Measure(frames=AudioFrames.fastconformer())
    made = []
    for n in range(utterances):
        samples = int(generator.uniform(4, 14) * 16_000)
        clip = Clip(source=np.zeros(samples, np.float32), num_samples=samples, sample_rate=16_000)
        made.append(
            Example(id=str(n), turns=(Turn("user", (clip,)), Turn("assistant", ("w" * int(generator.integers(8, 24)),))))
        )
    batch = Collator(measure=measure, rule=rule)(made)
    frames = torch.tensor([measure.measure(example).encoder_frames[0] for example in made])
    return batch.to("cuda"), frames.cuda()


def as_utterances(batch: PackedBatch, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same data as a model gets it that splices in a loop: ids, embeddings and labels `[utterances, text tokens, ...]`.

    Each clip is one placeholder there; rows are padded to the longest text.
    """
    ids = batch.input_ids.clone()
    ids[batch.audio_destination] = PLACEHOLDER
    rows = []
    for start, length in zip(batch.slots.offsets[:-1].tolist(), batch.slots.lengths.tolist()):
        if length:
            own = torch.arange(start, start + length, device=ids.device)
            keep = (ids[own] != PLACEHOLDER) | (torch.roll(ids[own], 1) != PLACEHOLDER)
            rows.append(own[keep])
    where = pad_sequence(rows, batch_first=True, padding_value=-1)
    inside = where >= 0
    where = where.clamp(min=0)
    return ids[where].where(inside, PAD), text[where], batch.labels[where].where(inside, IGNORED)


def loop(ids: torch.Tensor, text: torch.Tensor, labels: torch.Tensor, frames: torch.Tensor, lens: torch.Tensor):
    """Spliced tokens `[utterances, longest, hidden]`, labels and a mask of what is real, utterance by utterance."""
    spliced, targets, clip = [], [], 0
    for n in range(ids.shape[0]):
        count = (ids[n] != PAD).sum().item()
        parts, marks, at = [], [], 0
        for place in (ids[n, :count] == PLACEHOLDER).nonzero().flatten().tolist():
            length = lens[clip].item()
            parts += [text[n, at:place], frames[clip, :length]]
            marks += [labels[n, at:place], torch.full((length,), IGNORED, device=ids.device)]
            at, clip = place + 1, clip + 1
        spliced.append(torch.cat([*parts, text[n, at:count]]))
        targets.append(torch.cat([*marks, labels[n, at:count]]))
    sizes = torch.tensor([len(row) for row in spliced], device=ids.device)
    mask = torch.arange(int(sizes.max()), device=ids.device) < sizes[:, None]
    return pad_sequence(spliced, batch_first=True), pad_sequence(targets, batch_first=True, padding_value=IGNORED), mask


def measured(utterances: int, hidden: int, repeats: int) -> str:
    """One line of the table."""
    batch, lens = make_batch(utterances, align("block"))
    tokens = batch.input_ids.numel()
    torch.manual_seed(0)
    text = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    frames = torch.randn(utterances, batch.audio_frames, hidden, dtype=torch.bfloat16, device="cuda")
    apart = as_utterances(batch, text)
    ours, (theirs, _, mask) = splice(text, frames, batch), loop(*apart, frames, lens)
    real = ~batch.padding_mask
    if not torch.equal(ours[real], theirs[mask]):
        raise SystemExit("the loop and splice differ")
    again = torch.empty_like(ours)
    slow = median_seconds(lambda: loop(*apart, frames, lens), repeats)
    fast = median_seconds(lambda: splice(text, frames, batch), repeats)
    floor = median_seconds(lambda: again.copy_(ours), repeats)
    numbers = f"{1e3 * slow:>10.3f}{1e3 * fast:>10.3f}{1e3 * floor:>10.3f}{slow / fast:>13.0f}{fast / floor:>14.2f}"
    return f"{utterances:>10}{tokens:>9}{batch.audio_source.numel():>9}{numbers}"


@click.command()
@click.option("--hidden", default=2688, show_default=True)
@click.option("--repeats", default=30, show_default=True)
def main(hidden: int, repeats: int) -> None:
    """Print milliseconds and ratios."""
    print(header())
    print(f"hidden {hidden}, BF16; median of {repeats}; milliseconds, forward\n")
    columns = (("utterances", 10), ("tokens", 9), ("frames", 9), ("loop", 10), ("splice", 10), ("floor", 10))
    print("".join(f"{name:>{width}}" for name, width in (*columns, ("loop/splice", 13), ("splice/floor", 14))))
    with torch.no_grad():
        for utterances in (16, 64, 256):
            print(measured(utterances, hidden, repeats), flush=True)


if __name__ == "__main__":
    main()
