"""Ranks as forked processes over gloo, and small sets of examples with audio that is drawn from a seed."""

import multiprocessing
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from packfp8.errors import PackError


def run_rank(rank, world, path, job, answers, all_here):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    all_here.wait(60)  # a rank that leaves while others still connect takes their connections with it
    started = time.perf_counter()
    try:
        answer = job(rank)
    except PackError as error:
        answer = f"{type(error).__name__}: {error}"
    except Exception:
        answers.put((rank, traceback.format_exc(), time.perf_counter() - started))
        raise
    answers.put((rank, answer, time.perf_counter() - started))
    answers.close()
    answers.join_thread()
    all_here.wait(60)
    dist.destroy_process_group()


@pytest.fixture
def on_ranks(tmp_path):
    """on_ranks(job, world=2) -> what job(rank) returned on each rank, or the text of its error; and the seconds of each."""
    started, kept = [], []

    def on_ranks(job, world=2, silent=()):
        context = multiprocessing.get_context("fork")
        answers, path = context.Queue(), tmp_path / f"store{len(started)}"
        all_here = context.Barrier(world)
        ranks = [context.Process(target=run_rank, args=(n, world, path, job, answers, all_here)) for n in range(world)]
        started.extend(ranks)
        kept.append(all_here)  # its memory would be given to the next barrier, while these ranks still wait at it
        for process in ranks:
            process.start()
        told = [answers.get(timeout=90) for _ in range(world - len(silent))]
        by_rank = {rank: (answer, seconds) for rank, answer, seconds in told}
        return [by_rank[n][0] for n in sorted(by_rank)], [by_rank[n][1] for n in sorted(by_rank)]

    yield on_ranks
    for process in started:
        process.join(timeout=0.5)
        process.kill()


@pytest.fixture(scope="session")
def lines_of():
    """A function from the text of a PackError to its five lines by name; none of them may be empty."""

    def lines_of(text):
        what, *rest = text.split("\n")
        lines = [line.split(":", 1) for line in rest]
        assert [name.strip() for name, _ in lines] == ["got", "expected", "because", "fix"]
        named = {"what": what} | {name.strip(): told.strip() for name, told in lines}
        assert all(named.values())
        return named

    return lines_of


@pytest.fixture(scope="session")
def here():
    """The folder of these tests, on the path of modules, so that scripts and tests share `workload`."""
    folder = Path(__file__).parent
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
