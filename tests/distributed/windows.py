"""Accumulation windows in which ranks and micro-batches are as unequal as can be, in float64, beside one batch of everything.

rank            micro-batch 0        1                    2
dp 0            audio, 2 examples    filler alone         text of many labels
dp 1            text alone           nothing supervised   filler alone
"""

import torch
from parallel import order_of
from workload import SIZES, Place, collator_of, model_of

from packfp8 import Topology, align
from packfp8.data import Clip, Example, Turn
from packfp8.model.loss import count_supervised


def text(name, answer):
    return Example(id=name, turns=(Turn("user", ("say it",)), Turn("assistant", (answer,))))


def speech(name, samples, answer):
    wave = 0.1 * torch.randn(samples, generator=torch.Generator().manual_seed(samples)).numpy()
    clip = Clip(source=wave, num_samples=samples, sample_rate=16_000)
    return Example(id=name, turns=(Turn("user", (clip,)), Turn("assistant", (answer,))))


def unlearned(name):
    return Example(id=name, turns=(Turn("user", ("nobody answers",)),))


WINDOW = (
    ([speech("long", 30_000, "yes"), text("short", "a")], [], [text("many", "a much longer answer " * 6)]),
    ([text("alone", "no")], [unlearned("silent"), unlearned("mute")], []),
)


def gradients(model, tp=1):
    """The whole gradient of each parameter, its rows in the order of the model before it was split."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        found[name] = torch.empty_like(grad)
        found[name][order_of(name, SIZES, tp) if tp > 1 else slice(None)] = grad
    return found


def on_mesh(sizes, layout):
    """This rank's counts and losses, the count of all, and the gradient."""
    place = Place(sizes, layout)
    columns = WINDOW if place.rule.topology.dp > 1 else (WINDOW[0],)
    batches = [collator_of(place.rule, budget=None).collate(pack) for pack in columns[place.rule.topology.dp_rank]]
    count, model = count_supervised(batches, place.data), place.model(torch.float64)
    sums = []
    for number, batch in enumerate(batches):
        model.set_requires_gradient_sync(number == len(batches) - 1)
        out = model(batch, global_supervised=count)
        out.loss.backward()
        sums.append(out.loss_sum.item())
    counts = [batch.num_supervised for batch in batches]
    return {"counts": counts, "sums": sums, "count": int(count), "gradients": gradients(model, place.rule.topology.tp)}


def alone(sizes, layout):
    """The gradient of one batch that holds every example, and its sum."""
    columns = WINDOW if max(sizes.get("dp", 1), sizes.get("dp_shard", 1)) > 1 else (WINDOW[0],)
    rule = align("bf16", Topology(), layout=layout)
    batch = collator_of(rule, budget=None).collate([item for column in columns for pack in column for item in pack])
    model = model_of(rule, torch.float64)
    out = model(batch, global_supervised=batch.num_supervised)
    out.loss.backward()
    return {"count": batch.num_supervised, "sum": out.loss_sum.item(), "gradients": gradients(model)}
