"""At the start ranks compare what decides packs; in debug mode CP and TP peers compare their packs at every step."""

import pytest
import torch.distributed as dist

from packfp8.data import Collator, Example, PackedDataset, PackingSampler, Turn
from packfp8.data.lockstep import in_lockstep
from packfp8.data.peers import check_start
from packfp8.lengths import Measure, Template
from packfp8.rule import Topology, align

EXAMPLES = [Example(id=f"t{n}", turns=(Turn("assistant", ("ab" * (3 + n * 7 % 20),)),)) for n in range(40)]
MEASURE = Measure(frames=None)


def parts(rank, world, *, recipe="block", budget=128, measure=MEASURE, seed=0, examples=EXAMPLES, window=4, **collator):
    rule = align(recipe, Topology(dp=world, dp_rank=rank))
    sampler = PackingSampler(examples, measure=measure, rule=rule, budget=budget, seed=seed, window=window)
    return sampler, Collator(measure=measure, rule=rule, budget=budget, **collator)


OTHERS = {
    "rule": {"recipe": "bf16"},
    "budget": {"budget": 256},
    "seed": {"seed": 3},
    "measure": {"measure": Measure(frames=None, template=Template(prompt="Say it. "))},
    "window": {"window": 5},
    "collator's on_fault": {"on_fault": "set_aside"},
    "collator's max_seqlen": {"max_seqlen": 60},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_rank_with_another_setting_is_named_with_it_on_every_rank(on_ranks, lines_of, name):
    told, _ = on_ranks(lambda rank: check_start(*parts(rank, 3, **(OTHERS[name] if rank == 1 else {}))), world=3)
    assert len(set(told)) == 1
    lines = lines_of(told[0])
    assert lines["what"].startswith("StateError: rank 1 starts with another ")
    assert name in lines["what"]
    assert lines["got"].startswith("rank 1: ")
    assert lines["expected"].startswith("as rank 0: ")
    assert name in lines["got"]
    assert name in lines["expected"]
    assert "repeat some examples, lose others, or hang" in lines["because"]
    assert "one configuration" in lines["fix"]


def test_ranks_that_start_alike_pass_and_leave_the_sampler_where_it_is(on_ranks):
    def job(rank):
        sampler, collator = parts(rank, 3)
        check_start(sampler, collator)
        return next(iter(sampler)).step

    assert on_ranks(job, world=3)[0] == [0, 0, 0]


def test_ranks_of_other_examples_are_found_after_equal_settings(on_ranks, lines_of):
    def job(rank, steps):
        check_start(*parts(rank, 3, examples=EXAMPLES[: 40 - (rank == 2)]), steps=steps)

    told, _ = on_ranks(lambda rank: job(rank, 64), world=3)
    assert lines_of(told[0])["what"] == "StateError: rank 2 plans other steps than the other ranks"
    assert len(set(told)) == 1
    assert on_ranks(lambda rank: job(rank, 0), world=3)[0] == [None] * 3


@pytest.mark.parametrize("debug", [False, True])
def test_peers_of_different_packs_stop_every_rank_in_debug_mode(on_ranks, lines_of, debug):
    """Ranks 2 and 3 are TP peers; rank 3 has exchanged two letters of one example, which changes no length."""
    changed = [*EXAMPLES[:9], Example(id="t9", turns=(Turn("assistant", ("ba" * (3 + 63 % 20),)),)), *EXAMPLES[10:]]

    def job(rank):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        rule = align("block", Topology(dp=2, tp=2, dp_rank=rank // 2, tp_rank=rank % 2))
        items = changed if rank == 3 else EXAMPLES
        sampler = PackingSampler(items, measure=MEASURE, rule=rule, budget=128)
        dataset = PackedDataset(Collator(measure=MEASURE, rule=rule, budget=128))
        batches = (dataset[pack] for pack in sampler)
        return [batch.ids for batch in in_lockstep(batches, peers=pairs[rank // 2] if debug else None)]

    told, _ = on_ranks(job, world=4)
    if not debug:
        assert told[0] == told[1] != told[2] == told[3]  # nothing is noticed: the ids are the same
        return
    assert len(set(told)) == 1
    lines = lines_of(told[0])
    assert lines["what"].startswith("StateError: rank ")
    assert lines["what"].endswith("has no batch, and all ranks stop")
    assert "rank 3 holds another pack than its peers" in lines["got"]
    assert "checksum" in lines["got"]
