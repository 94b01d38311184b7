"""What real processes find (gloo, CPU). `python ranks.py FOLDER` forks worlds of 2, 3 and 4 ranks, and saves what each says.

A world of 4 is 2 data-parallel ranks of 2 TP peers each; the others are data parallel alone. Each scenario trains one step
under FSDP and compares the gradient with that of one batch, or walks the loader and counts.
"""

import multiprocessing
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from packfp8 import AudioFrames, Measure, PackedModel, StateError, Topology, align
from packfp8.data import Clip, Collator, Example, PackedDataset, PackingSampler, Turn
from packfp8.data.peers import check_peers
from packfp8.model.loss import count_supervised
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder
from packfp8.model.plain_encoder import PlainEncoder, PlainProjector

MEASURE = Measure(frames=AudioFrames.fastconformer())
WORLDS = (2, 3, 4)


def text(name, answer):
    """An example of as many labels as the answer has bytes, and one for its end."""
    return Example(id=name, turns=(Turn("user", ("say it",)), Turn("assistant", (answer,))))


def speech(name, samples, answer):
    wave = 0.1 * np.random.default_rng(samples).standard_normal(samples).astype(np.float32)
    clip = Clip(source=wave, num_samples=samples, sample_rate=16_000)
    return Example(id=name, turns=(Turn("user", (clip,)), Turn("assistant", (answer,))))


def unlearned(name):
    """An example without a label."""
    return Example(id=name, turns=(Turn("user", ("nobody answers",)),))


def missing(name):
    return {"id": name, "audio": f"/nowhere/{name}.wav", "duration": 1.0, "text": "gone"}


# For each scenario the examples of data-parallel ranks 0, 1 and 2.
TRAINED = {
    "five labels and one": ([text("five", "four")], [text("one", "")], [text("two", "a")]),
    "one rank without a label": ([text("learned", "hello")], [unlearned("silent")], [unlearned("mute")]),
    "no rank with a label": ([unlearned("a")], [unlearned("b")], [unlearned("c")]),
    "audio on one rank": ([speech("heard", 30_000, "yes")], [text("read", "no")], []),
    "every example of one rank rejected": (
        [speech("sound", 9_000, "yes"), text("fine", "no")],
        [missing("x"), missing("y")],
        [missing("z")],
    ),
}


def model_of(rule):
    torch.manual_seed(0)
    parts = {"encoder": PlainEncoder(width=8, mel_bins=10), "projector": PlainProjector(width=8, hidden=16)}
    llm = PlainDecoder(DecoderSizes(vocab=272, hidden=16, ffn=24))
    return PackedModel(**parts, llm=llm, rule=rule, consumer="plain", frames=MEASURE.frames).double()


def collated(items, rule):
    return Collator(measure=MEASURE, rule=rule, on_fault="set_aside").collate(items)


def gradient(model):
    parts = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return torch.cat([part.flatten() for part in parts])


def alone(items, count):
    """The gradient of these items in one batch on one rank, for a window of `count` labels."""
    rule = align("block")
    model = model_of(rule)
    model(collated(items, rule), global_supervised=torch.tensor(count)).loss.backward()
    return gradient(model)


def trained(mesh, topology, packs):
    rule = align("block", topology)
    batch = collated(packs[topology.dp_rank], rule)
    model = model_of(rule)
    for part in (model.encoder, *model.llm.layers, model):
        fully_shard(part, mesh=mesh["dp"])
    count = count_supervised([batch], mesh["dp"])
    out = model(batch, global_supervised=count)
    out.loss.backward()
    found, packs = gradient(model), packs[: topology.dp]
    expected = alone([item for pack in packs for item in pack], int(count))
    counts = [collated(pack, align("block")).num_supervised for pack in packs]
    means = sum(alone(pack, max(1, n)) for pack, n in zip(packs, counts)) / len(packs)
    size = max(float(expected.norm()), 1e-30)
    return {
        "supervised": batch.num_supervised,
        "clips": batch.audio.shape[0],
        "tokens": batch.tokens,
        "set aside": [one.id for one in batch.set_aside],
        "difference": float((found - expected).norm()) / (size if expected.any() else 1.0),
        "mean of means": float((means - expected).norm()) / size,
        "finite": bool(torch.isfinite(found).all() and torch.isfinite(out.loss)),
    }


def walked(topology, examples):
    """Steps of this rank, each closed by a collective, and the names that it saw."""
    rule = align("block", topology)
    sampler = PackingSampler(examples, measure=MEASURE, rule=rule, budget=64)
    dataset = PackedDataset(Collator(measure=MEASURE, rule=rule, budget=64))
    names, steps = [], 0
    for batch in DataLoader(dataset, sampler=sampler, batch_size=None):
        ranks = torch.ones(())
        dist.all_reduce(ranks)
        names += batch.ids
        steps += 1
        assert int(ranks) == dist.get_world_size()
        assert batch.tokens > 0
    return {"steps": steps, "names": names}


def compared(mesh, right, wrong):
    """Whether TP peers hold one pack: with the data-parallel rank, and with the global rank in its place."""
    examples, told = [text(f"t{n}", "word " * (n % 5)) for n in range(24)], {}
    for name, topology in (("by data-parallel rank", right), ("by global rank", wrong)):
        rule = align("block", topology)
        pack = next(iter(PackingSampler(examples, measure=MEASURE, rule=rule, budget=64)))
        batch = Collator(measure=MEASURE, rule=rule, budget=64).collate(pack, step=pack.step)
        try:
            check_peers(batch, mesh["tp"].get_group())
            told[name] = (batch.ids, "")
        except StateError as error:
            told[name] = (batch.ids, str(error))
    return told


def work(rank, world, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, 2) if world == 4 else (world,), mesh_dim_names=("dp", "tp") if world == 4 else ("dp",))
    topology = Topology.from_mesh(mesh)
    found = {name: trained(mesh, topology, packs) for name, packs in TRAINED.items()}
    found["five packs"] = walked(topology, [text(f"p{n}", "x" * 30) for n in range(5)])
    found["one example"] = walked(topology, [text("single", "x")])
    if world > 2:
        peers = mesh if world == 4 else init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))
        found["peers"] = compared(peers, Topology.from_mesh(peers), Topology(dp=world, dp_rank=rank))
    torch.save(found, folder / f"{world}-{rank}.pt")
    dist.destroy_process_group()


def main(folder):
    fork = multiprocessing.get_context("fork")  # so that torch is imported once
    said = {}
    for world in WORLDS:
        started = [fork.Process(target=work, args=(rank, world, folder)) for rank in range(world)]
        for process in started:
            process.start()
        for process in started:
            process.join(timeout=80)
        codes = [process.exitcode for process in started]
        for process in started:
            process.kill()
        if any(codes):
            sys.exit(f"world of {world}: exit codes {codes}")
        found = [torch.load(folder / f"{world}-{rank}.pt", weights_only=False) for rank in range(world)]
        said[world] = {name: [one[name] for one in found] for name in found[0]}
    torch.save(said, folder / "all.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
