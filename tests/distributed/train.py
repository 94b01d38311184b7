"""A training run that torchrun starts, and starts again: 20 steps, a checkpoint after step 7, a rank that may be killed.

    torchrun --nproc-per-node 2 --max-restarts 1 train.py FOLDER [--kill-at 11]

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 lets gloo start again. Model, optimizer and sampler go through
torch.distributed.checkpoint; each rank writes what it consumed to FOLDER.
"""

import argparse
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader
from workload import Place, collator_of, sampler_of

from packfp8.data import PackedDataset
from packfp8.data.lockstep import in_lockstep
from packfp8.data.peers import check_start
from packfp8.data.progress import Progress
from packfp8.model.loss import count_supervised

STEPS, SAVED_AFTER = 20, 7


class History(nn.Module):
    """State that is no parameter, as delayed scaling keeps: the largest absolute values of the last steps."""

    def __init__(self):
        super().__init__()
        self.largest = torch.zeros(4)

    def see(self, value):
        self.largest = torch.cat((self.largest[1:], value.detach().abs().max()[None]))

    def get_extra_state(self):
        return self.largest

    def set_extra_state(self, state):
        self.largest = state.clone()


class Run(dcp.stateful.Stateful):
    """Model and optimizer, as torch.distributed.checkpoint wants them."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def batches(sampler, dataset, group):
    """Epoch after epoch, with workers that run ahead."""
    while True:
        loader = DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=1, prefetch_factor=4)
        yield from in_lockstep(loader, group)
        sampler.set_epoch(sampler.epoch + 1)


def main(folder, kill_at):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    place = Place({"dp_shard": 2}, "thd")
    sampler, collator = sampler_of(place.rule, budget=512), collator_of(place.rule, budget=512)
    check_start(sampler, collator, steps=4)
    model = place.model()
    model.history = History()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    progress, done = Progress(sampler), 0
    state = {"run": Run(model, optimizer), "progress": progress, "done": 0}
    saved = folder / "checkpoint"
    if (saved / ".metadata").exists():
        dcp.load(state, checkpoint_id=saved)
        done = state["done"]
    log = (folder / f"rank{rank}-attempt{attempt}.jsonl").open("w")
    for batch in batches(sampler, PackedDataset(collator), group):
        if rank == 1 and not attempt and done == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        count = count_supervised([batch], place.data)
        out = model(batch, global_supervised=count)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.history.see(out.loss_sum)
        progress.trained(batch)
        done += 1
        entry = {"done": done, "epoch": sampler.epoch, "step": batch.step, "ids": batch.ids, "time": time.time()}
        print(json.dumps(entry | {"loss": place.mean(out.loss_sum, count)}), file=log, flush=True)
        if done == SAVED_AFTER and not (saved / ".metadata").exists():
            dcp.save(state | {"done": done}, checkpoint_id=saved)
        if done == STEPS:
            break
    whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    if not rank:
        torch.save({"parameters": whole, "history": model.history.largest}, folder / "end.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-at", type=int, default=-1)
    arguments = parser.parse_args()
    main(arguments.folder, arguments.kill_at)
