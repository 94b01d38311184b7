"""check_loader: packs are dealt once, by the sampler; examples once, among the data-parallel ranks. Frameworks: tests/peers."""

import pytest
from torch.utils.data import DataLoader, DistributedSampler

from packfp8.data import Collator, Example, PackedDataset, PackingSampler, Turn
from packfp8.data.reshard import check_loader
from packfp8.errors import ConfigError
from packfp8.lengths import Measure
from packfp8.rule import Topology, align

EXAMPLES = [Example(id=f"s{n}", turns=(Turn("assistant", ("hello",)),)) for n in range(8)]
MEASURE = Measure(frames=None)


def examples_loader(topology, dealt=None):
    sampler = None if dealt is None else DistributedSampler(EXAMPLES, num_replicas=dealt[0], rank=dealt[1])
    collator = Collator(measure=MEASURE, rule=align("block", topology))
    return DataLoader(EXAMPLES, batch_size=2, sampler=sampler, collate_fn=collator)


def lines(caught):
    return str(caught.value).splitlines()


def test_a_pack_sampler_alone_is_let_pass_and_one_that_is_wrapped_is_not():
    rule = align("block", Topology(dp=2))
    sampler = PackingSampler(EXAMPLES, measure=MEASURE, rule=rule, budget=64)
    dataset = PackedDataset(Collator(measure=MEASURE, rule=rule))
    check_loader(DataLoader(dataset, sampler=sampler, batch_size=None))
    wrapped = DistributedSampler(range(4), num_replicas=2, rank=1)
    wrapped.sampler = sampler
    with pytest.raises(ConfigError) as caught:
        check_loader(DataLoader(dataset, sampler=wrapped, batch_size=None))
    what, got, expected, because, fix = lines(caught)
    assert "a second time" in what
    assert "DistributedSampler among 2 processes" in got
    assert "PackingSampler alone" in expected
    assert "share of its own packs" in because
    assert "Accelerate" in fix
    assert "get_train_dataloader" in fix


@pytest.mark.parametrize(
    ("topology", "dealt"),
    [(Topology(), None), (Topology(cp=2, tp=2), None), (Topology(dp=2, dp_rank=1, cp=2), (2, 1))],
    ids=["one rank", "peers", "two shares"],
)
def test_examples_dealt_among_data_parallel_ranks_are_let_pass(topology, dealt):
    check_loader(examples_loader(topology, dealt))


@pytest.mark.parametrize(
    ("topology", "dealt", "got"),
    [
        (Topology(dp=2), None, "every process gets all"),
        (Topology(dp=2, cp=2), (4, 3), "rank 3 of 4"),
        (Topology(dp=2, dp_rank=1), (2, 0), "rank 0 of 2"),
        (Topology(cp=2), (2, 1), "rank 1 of 2"),
    ],
    ids=["not dealt", "among all", "another's share", "among peers"],
)
def test_examples_dealt_otherwise_are_refused(topology, dealt, got):
    with pytest.raises(ConfigError) as caught:
        check_loader(examples_loader(topology, dealt))
    what, told, expected, because, fix = lines(caught)
    assert "not dealt out among the data-parallel ranks" in what
    assert got in told
    assert (f"of {topology.dp}" if topology.dp > 1 else "dp is 1") in expected
    assert "CP and TP peers" in because
    assert "num_replicas=topology.dp" in fix


def test_a_loader_of_something_else_is_not_judged():
    with pytest.raises(ConfigError, match="no pack sampler and no collator") as caught:
        check_loader(DataLoader(EXAMPLES))
    assert "DataLoader" in lines(caught)[1]
    assert "collate_fn=Collator" in lines(caught)[2]
    assert "cannot be told" in lines(caught)[3]
    assert "check the DataLoader itself" in lines(caught)[4]
