"""check_peers: ranks that must hold one pack, each in a process of its own."""

import multiprocessing
from dataclasses import replace

import pytest
import torch.distributed as dist

from packfp8.data.peers import check_peers
from packfp8.errors import StateError


def rank_of(rank, world, path, batch, answers):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    try:
        check_peers(batch, pairs[rank // 2])
        answers.put((rank, "alike"))
    except StateError as error:
        answers.put((rank, str(error)))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def ask(tmp_path):
    """A function from each rank's batch to each rank's answer; pairs of ranks are peers."""

    def ask(batches):
        context = multiprocessing.get_context("fork")
        answers, path = context.Queue(), tmp_path / f"store{len(batches)}"
        ranks = [
            context.Process(target=rank_of, args=(rank, len(batches), path, batch, answers))
            for rank, batch in enumerate(batches)
        ]
        for process in ranks:
            process.start()
        told = dict(answers.get(timeout=60) for _ in ranks)
        for process in ranks:
            process.join(timeout=60)
        return [told[rank] for rank in range(len(batches))]

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
