"""Placing audio frames among text embeddings: one index operation against a loop over utterances, and against a bare copy.

    python tests/gpu/bench_splice.py

The rival is written here as speech models commonly do it: for each utterance, ask the device where its audio placeholders stand
and how many frames it has (`.tolist()`, `.item()`), cut, `torch.cat`. The floor is a copy of the result on the device. Loop and
splice are compared before they are timed.
"""

from __future__ import annotations

import click
import numpy as np
import torch
from workload import header, median_seconds

from packfp8 import Alignment, AudioFrames, Measure, align
from packfp8.data import Clip, Collator, Example, PackedBatch, Turn
from packfp8.model.splice import splice

PLACEHOLDER = 0


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


def loop(ids: torch.Tensor, text: torch.Tensor, frames: torch.Tensor, lens: torch.Tensor, offsets: torch.Tensor):
    """The spliced tokens `[T, hidden]` and a mask of the audio among them `[T]`, utterance by utterance.

    Args:
        ids: `[T]` with one placeholder for each audio frame. text: `[T, hidden]`. frames: `[clips, frames, hidden]`.
        lens: frames of each clip. offsets: `[slots + 1]`.
    """
    bounds, parts, masks = offsets.tolist(), [], []
    for n in range(len(bounds) - 1):
        a, b = bounds[n], bounds[n + 1]
        mask = torch.zeros(b - a, dtype=torch.bool, device=text.device)
        where = (ids[a:b] == PLACEHOLDER).nonzero().flatten().tolist()
        if where:
            first, count = where[0], lens[n].item()
            mask[first : first + count] = True
            parts += [text[a : a + first], frames[n, :count], text[a + first + count : b]]
        else:
            parts.append(text[a:b])
        masks.append(mask)
    return torch.cat(parts), torch.cat(masks)


def measured(utterances: int, hidden: int, repeats: int) -> str:
    """One line of the table."""
    batch, lens = make_batch(utterances, align("block"))
    tokens, offsets = batch.input_ids.numel(), batch.cu_seqlens
    torch.manual_seed(0)
    text = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    frames = torch.randn(utterances, batch.audio_frames, hidden, dtype=torch.bfloat16, device="cuda")
    ids = batch.input_ids.where(~batch.padding_mask, 1)
    ours = splice(text, frames, batch)
    if not torch.equal(ours, loop(ids, text, frames, lens, offsets)[0]):
        raise SystemExit("the loop and splice differ")
    again = torch.empty_like(ours)
    slow = median_seconds(lambda: loop(ids, text, frames, lens, offsets), repeats)
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
