"""Training on a mesh, and alone on the same global packs: loss and norm of the gradient, step by step."""

import torch
from workload import Place, collator_of, gradient_norm, model_of, sampler_of

from packfp8 import Topology, align
from packfp8.data import PackedDataset
from packfp8.data.lockstep import in_lockstep
from packfp8.data.peers import check_start
from packfp8.model.loss import count_supervised

STEPS = 20


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)


def epochs(sampler, dataset, steps):
    """Batches of so many steps, over as many epochs as they take."""
    while steps:
        for pack in sampler:
            yield dataset[pack]
            steps -= 1
            if not steps:
                return
        sampler.set_epoch(sampler.epoch + 1)


def on_mesh(sizes, layout, device="cpu", group=None):
    """What each step told. The `group` of gloo, all ranks, is for what stays on the host; the default group without one."""
    place = Place(sizes, layout, device=device)
    sampler, collator = sampler_of(place.rule), collator_of(place.rule)
    check_start(sampler, collator, group, steps=4)
    model = place.model()
    optimizer, told = optimizer_of(model), []
    for batch in in_lockstep(epochs(sampler, PackedDataset(collator), STEPS), group, peers=place.peers):
        count = count_supervised([batch], place.data, device=device)
        out = model(batch.to(device), global_supervised=count)
        out.loss.backward()
        told.append((place.mean(out.loss_sum, count), gradient_norm(model), batch.ids))
        optimizer.step()
        optimizer.zero_grad()
    return told


def alone(sizes, layout, device="cpu"):
    """The packs of all data-parallel ranks as micro-batches of one process."""
    names = ("dp", "dp_shard")
    dp = max(sizes.get(name, 1) for name in names)
    cut = {"dp": dp, "cp": sizes.get("cp", 1), "tp": sizes.get("tp", 1), "sp": "tp" in sizes}
    samplers = [sampler_of(align("block", Topology(**cut, dp_rank=rank), layout=layout)) for rank in range(dp)]
    rule = align("bf16", Topology(), layout=layout)
    collator, model = collator_of(rule, budget=None), model_of(rule).to(device)
    optimizer, told = optimizer_of(model), []
    columns = [epochs(sampler, _Packs(collator), STEPS) for sampler in samplers]
    for batches in zip(*columns, strict=True):
        count = sum(batch.num_supervised for batch in batches)
        sums = []
        for batch in batches:
            out = model(batch.to(device), global_supervised=count)
            out.loss.backward()
            sums.append(out.loss_sum.item())
        told.append((sum(sums) / count, gradient_norm(model), tuple(batch.ids for batch in batches)))
        optimizer.step()
        optimizer.zero_grad()
    return told


class _Packs:
    def __init__(self, collator):
        self.collator = collator

    def __getitem__(self, pack):
        return self.collator.collate(pack, step=pack.step)
