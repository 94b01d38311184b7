"""Checks over a group: ranks that must hold one pack, or plan the same steps, each in a process of its own."""

import multiprocessing
from dataclasses import replace

import pytest
import torch.distributed as dist

from packfp8.data import PackingSampler
from packfp8.data.peers import check_peers, check_plan
from packfp8.errors import StateError


def rank_of(rank, world, path, held, answers, all_here):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    all_here.wait(60)  # a rank that leaves while others still connect takes their connections with it
    try:
        if isinstance(held, PackingSampler):
            check_plan(held)
        else:
            check_peers(held, pairs[rank // 2])
        answers.put((rank, "alike"))
    except StateError as error:
        answers.put((rank, str(error)))
    all_here.wait(60)
    dist.destroy_process_group()


@pytest.fixture
def ask(tmp_path):
    """A function from each rank's batch or sampler to each rank's answer; batches are compared by two, samplers by all."""

    def ask(held):
        context = multiprocessing.get_context("fork")
        answers, path = context.Queue(), tmp_path / f"store{len(held)}"
        world = len(held)
        all_here = context.Barrier(world)
        places = [(rank, world, path, held[rank], answers, all_here) for rank in range(world)]
        ranks = [context.Process(target=rank_of, args=place, daemon=True) for place in places]
        for process in ranks:
            process.start()
        told = dict(answers.get(timeout=60) for _ in ranks)
        for process in ranks:
            process.join(timeout=60)
        return [told[rank] for rank in range(world)]

    return ask


@pytest.mark.timeout(120)
def test_cp_peers_hold_one_pack_though_not_the_same_tokens(batches_of, examples, ask):
    slabs = batches_of(examples, cp=2)
    assert slabs[0].input_ids.tolist() != slabs[1].input_ids.tolist()
    assert ask(slabs) == ["alike", "alike"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", ["examples", "step", "rule"])
def test_a_rank_with_another_pack_is_named_on_every_rank(batches_of, examples, lines_of, ask, fault):
    (batch,) = batches_of(examples)
    other = {
        "examples": lambda: batches_of(examples[1:])[0],
        "step": lambda: replace(batch, step=3),
        "rule": lambda: replace(batch, fingerprint="another"),
    }[fault]()
    answers = ask([batch, batch, batch, other])
    assert answers[:2] == ["alike", "alike"]
    assert answers[2] == answers[3]
    lines = lines_of(answers[3])
    assert lines["what"] == "rank 3 holds another pack than its peers"
    assert lines["got"].startswith(f"rank 3: step {other.step}, {len(other.ids)} sequences")
    assert lines["expected"].startswith(f"as rank 2: step {batch.step}, {len(batch.ids)} sequences")
    assert "one pack" in lines["because"]
    assert "data-parallel rank, not its global rank" in lines["fix"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", [None, "order", "seed", "epoch", "filter"])
def test_a_rank_that_plans_other_steps_is_named_on_every_rank(measure, rule_of, examples, lines_of, ask, fault):
    samplers = []
    for rank in range(4):
        items = examples[::-1] if (rank, fault) == (1, "order") else examples
        seed = 1 if (rank, fault) == (1, "seed") else 0
        sampler = PackingSampler(items, measure=measure, rule=rule_of(dp=4, dp_rank=rank), budget=256, seed=seed)
        sampler.set_epoch(1 if (rank, fault) == (1, "epoch") else 0)
        samplers.append(sampler.filter(is_short) if (rank, fault) == (1, "filter") else sampler)
    answers = ask(samplers)
    if fault is None:
        assert answers == ["alike"] * 4
        return
    assert len(set(answers)) == 1
    lines = lines_of(answers[0])
    assert lines["what"] == "rank 1 plans other steps than the other ranks"
    assert lines["got"].startswith("rank 1: epoch 1" if fault == "epoch" else "rank 1: epoch 0")
    assert lines["expected"].startswith("as rank 0: epoch 0")
    assert "repeat some examples and lose others" in lines["because"]
    assert "same manifests in the same order" in lines["fix"]


def is_short(example):
    return example.id != "long"
