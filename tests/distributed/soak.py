"""Sampler and collator for many steps over 2 ranks of 2 workers: resident memory, open descriptors, examples lost or repeated.

    python tests/distributed/soak.py [--steps 50000] [--examples 4000]

Each epoch deals out the same examples in another order; after each, all ranks together must have seen every one once. Memory
is resident megabytes of a rank and of its workers, descriptors are those of all three; rank 0 prints them ten times.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))

from packfp8.data import Clip, Collator, Example, PackedDataset, PackingSampler, Turn
from packfp8.data.lockstep import in_lockstep
from packfp8.lengths import AudioFrames, Measure
from packfp8.rule import Topology, align

MEASURE = Measure(frames=AudioFrames.fastconformer())
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def examples(num: int) -> list[Example]:
    """Clips of 0.1 to 0.3 seconds with an answer; every fifth is text alone."""
    rng, made = np.random.default_rng(0), []
    for n, samples in enumerate(rng.integers(1_600, 4_800, num).tolist()):
        wave = (0.1 * rng.standard_normal(samples)).astype(np.float32)
        heard = (Clip(source=wave, num_samples=samples, sample_rate=16_000),) if n % 5 else ("read",)
        made.append(Example(id=str(n), turns=(Turn("user", heard), Turn("assistant", ("yes" * (n % 7),)))))
    return made


def held(pids: list[int]) -> tuple[list[float], int]:
    """Resident megabytes of each process, and the open descriptors of all."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return [page * PAGE_BYTES / 1e6 for page in pages], sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)  # noqa: PTH208


def work(rank: int, world: int, folder: str, steps: int, num: int) -> None:
    """Draw so many steps; exit code 1 where an epoch was not whole."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    rule = align("block", Topology(dp=world, dp_rank=rank))
    sampler = PackingSampler(examples(num), measure=MEASURE, rule=rule, budget=256, lookahead=64)
    dataset = PackedDataset(Collator(measure=MEASURE, rule=rule, budget=256))
    loader = DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=2, persistent_workers=True, timeout=60)
    done, epochs, began, whole = 0, 0, time.monotonic(), torch.tensor([num, num * (num - 1) // 2])
    every = max(1, steps // 10)
    while done < steps:
        sampler.set_epoch(epochs)
        seen = torch.zeros(2, dtype=torch.int64)
        for batch in in_lockstep(loader):
            seen += torch.tensor([len(batch.ids), sum(map(int, batch.ids))])
            done += 1
            if not rank and (done == 100 or done % every == 0):
                memory, descriptors = held([os.getpid(), *(child.pid for child in multiprocessing.active_children())])
                told = " ".join(f"{one:7.1f}" for one in memory)
                print(f"{done:>7} steps {epochs:>4} epochs {told} MB {descriptors:>4} descriptors", end=" ")
                print(f"{time.monotonic() - began:7.0f} s", flush=True)
        dist.all_reduce(seen)
        epochs += 1
        if not torch.equal(seen, whole):
            sys.exit(f"epoch {epochs - 1}: {seen.tolist()} examples and sum of their numbers, expected {whole.tolist()}")
    if not rank:
        print(f"{done} steps a rank, {epochs} epochs of {num} examples: every epoch whole on {world} ranks")
    dist.destroy_process_group()


@click.command()
@click.option("--steps", default=50_000, show_default=True, help="of each rank, to the end of the epoch")
@click.option("--examples", "num", default=4_000, show_default=True, help="of an epoch")
def main(steps: int, num: int) -> None:
    """Run the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        ranks = [fork.Process(target=work, args=(rank, 2, folder, steps, num)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        sys.exit(max(process.exitcode != 0 for process in ranks))


if __name__ == "__main__":
    main()
