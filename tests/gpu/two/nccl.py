"""Data parallel over NCCL: each step's loss and gradient norm are those of one GPU; a rank that fails ends all, by one error.

    torchrun --nproc-per-node 2 tests/gpu/two/nccl.py

The training of `tests/distributed/meshes.py` in float32, packed and padded. What is compared on the host, as settings, plans,
steps and checksums are, goes over gloo. It ends with a non-zero code where a difference is above 1e-5, or errors are not alike.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "distributed"), str(TESTS.parent)]  # whose `workload` is another than that of tests/gpu

import click  # noqa: E402
import meshes  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from workload import Place, collator_of, sampler_of  # noqa: E402

from packfp8.data import PackedDataset  # noqa: E402
from packfp8.data.lockstep import in_lockstep  # noqa: E402
from packfp8.data.peers import check_peers, check_start  # noqa: E402
from packfp8.errors import PackError  # noqa: E402
from packfp8.model.loss import count_supervised  # noqa: E402

MOST, SOON_SECONDS, FAULTY_STEP = 1e-5, 30, 5


class Faulty(PackedDataset):
    """A dataset whose collator raises at one step of rank 1."""

    def __getitem__(self, pack):
        if pack.step == FAULTY_STEP and dist.get_rank() == 1:
            raise ValueError("a transform of the user's found something")
        return super().__getitem__(pack)


def compared(layout: str, alone: list, device: str, host: dist.ProcessGroup) -> bool:
    """Whether every step on the ranks is that of one process; prints the largest relative differences."""
    found = meshes.on_mesh({"dp": dist.get_world_size()}, layout, device, host)
    pairs = list(zip(found, alone, strict=True))
    loss, norm = (max(abs(one[n] - right[n]) / right[n] for one, right in pairs) for n in (0, 1))
    same = all(one[2] == right[2][dist.get_rank()] for one, right in pairs)
    told: list = [None] * dist.get_world_size()
    dist.all_gather_object(told, (loss, norm, same), group=host)
    loss, norm, same = max(one[0] for one in told), max(one[1] for one in told), all(one[2] for one in told)
    right = max(loss, norm) <= MOST and same
    if not dist.get_rank():
        learned = f"{len(pairs)} steps, loss {found[0][0]:.4f} to {found[-1][0]:.4f}"
        packs, verdict = "the same packs" if same else "OTHER PACKS", "right" if right else "WRONG"
        print(
            f"dp {len(told)}  {layout:<5} {learned}: loss {loss:.1e}, gradient norm {norm:.1e}, {packs}: {verdict}", flush=True
        )
    return right


def faulty(device: str, host: dist.ProcessGroup, workers: int) -> bool:
    """Whether all ranks end soon and with the same words after one of them failed; their model runs over NCCL meanwhile."""
    place = Place({"dp": dist.get_world_size()}, "thd", device=device)
    sampler, collator = sampler_of(place.rule), collator_of(place.rule)
    check_start(sampler, collator, host, steps=4)
    model, started, steps, error = place.model(), time.perf_counter(), 0, ""
    loader = DataLoader(Faulty(collator), sampler=sampler, batch_size=None, num_workers=workers)
    try:
        for batch in in_lockstep(loader, host):
            count = count_supervised([batch], place.data, device=device)
            model(batch.to(device), global_supervised=count).loss.backward()
            steps += 1
    except PackError as caught:
        error = f"{type(caught).__name__}: {caught}"
    seconds, told = time.perf_counter() - started, [None] * dist.get_world_size()
    dist.all_gather_object(told, (error, steps, seconds), group=host)
    alike = len({one[:2] for one in told}) == 1 and steps == FAULTY_STEP and "rank 1 has no batch" in error
    right = alike and max(one[2] for one in told) < SOON_SECONDS
    if not dist.get_rank():
        last, words = max(one[2] for one in told), "the same words" if alike else "OTHER WORDS"
        print(f"rank 1 raises at step {FAULTY_STEP}, {workers} workers: all end {last:.1f} s after the start, by {words}:")
        print("    " + error.replace("\n", "\n    "), flush=True)
    return right


def unequal_peers(device: str, host: dist.ProcessGroup) -> bool:
    """Whether every rank is told that one holds another pack than its peers."""
    place = Place({"cp": dist.get_world_size()}, "thd", device=device)
    sampler, collator = sampler_of(place.rule, seed=dist.get_rank()), collator_of(place.rule)
    packs = iter(sampler)
    try:
        check_peers(PackedDataset(collator)[next(packs)], host)
    except PackError as caught:
        error = str(caught)
    else:
        error = ""
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, error, group=host)
    right = len(set(told)) == 1 and "another pack than its peers" in error
    if not dist.get_rank():
        print(f"peers with different packs: {'named on all ranks' if right else 'NOT FOUND'}", flush=True)
    return right


@click.command()
@click.option("--device", default="cuda", show_default=True)
def main(device: str) -> None:
    """Compare, and fail on purpose."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    sizes, local = {"dp": int(os.environ["WORLD_SIZE"])}, int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local)
    else:
        torch.set_num_threads(1)
    alone = {layout: meshes.alone(sizes, layout, device) for layout in ("thd", "bshd")}  # before there is any group
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    host = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    if not dist.get_rank():
        nccl = (
            f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {torch.cuda.get_device_name()}"
            if device == "cuda"
            else "gloo"
        )
        print(f"torch {torch.__version__}, {dist.get_world_size()} ranks, {nccl}\n", flush=True)
    verdicts = [compared(layout, alone[layout], device, host) for layout in alone]
    verdicts += [faulty(device, host, workers) for workers in (0, 1)]
    verdicts.append(unequal_peers(device, host))
    dist.destroy_process_group()
    sys.exit(not all(verdicts))


if __name__ == "__main__":
    main()
