"""Every mesh and layout, trained and compared. `python ranks.py FOLDER` forks worlds of 1, 2, 4 and 8 ranks (gloo, CPU).

FOLDER/all.pt then holds what each rank found: world size -> rank -> (scenario, mesh, layout) -> result; world 1 is alone.
"""

import multiprocessing
import sys
import time
from pathlib import Path

import meshes
import torch
import torch.distributed as dist
import windows
from workload import MESHES, items

LAYOUTS = ("thd", "bshd")
SCENARIOS = {"training": meshes, "window": windows}
KINDS = [(scenario, mesh, layout) for scenario in SCENARIOS for mesh in MESHES for layout in LAYOUTS]


def work(rank, world, folder):
    torch.set_num_threads(1)
    found = {}
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    for scenario, mesh, layout in KINDS:
        sizes, started = MESHES[mesh], time.perf_counter()
        if world not in (1, torch.Size(sizes.values()).numel()):
            continue
        run = SCENARIOS[scenario].alone if world == 1 else SCENARIOS[scenario].on_mesh
        found[scenario, mesh, layout] = run(sizes, layout)
        if not rank:
            print(f"{world} ranks: {scenario}, {mesh}, {layout}: {time.perf_counter() - started:.1f} s", flush=True)
    torch.save(found, folder / f"{world}-{rank}.pt")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def forked(work, world, folder, timeout=150):
    """Runs work(rank, world, folder) on every rank; leaves where one of them fails."""
    fork = multiprocessing.get_context("fork")  # so that torch is imported once
    started = [fork.Process(target=work, args=(rank, world, folder)) for rank in range(world)]
    for process in started:
        process.start()
    for process in started:
        process.join(timeout=timeout)
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
    if any(code != 0 for code in codes):
        sys.exit(f"world of {world}: exit codes {codes}")
    return [torch.load(folder / f"{world}-{rank}.pt", weights_only=False) for rank in range(world)]


def main(folder):
    items()  # before the fork
    torch.save({world: forked(work, world, folder) for world in (1, 2, 4, 8)}, folder / "all.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
