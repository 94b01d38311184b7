"""F. State, epochs, workers and transfer. What needs pinned memory and a GPU is in `tests/gpu/test_field_gpu.py`."""

import pickle
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

from packfp8 import Measure, StateError, Topology, align
from packfp8.data import Collator, PackedDataset, PackingSampler

MEASURE = Measure(frames=None)
TEXTS = [{"id": f"t{n}", "text": "ab" * 20} for n in range(10)]  # 53 tokens each: one to a pack of 64


def sampler_of(texts=TEXTS, *, dp=1, rank=0, budget=64, recipe="block", cp=1, seed=0):
    rule = align(recipe, Topology(dp=dp, dp_rank=rank, cp=cp))
    return PackingSampler(texts, measure=MEASURE, rule=rule, budget=budget, seed=seed)


def loader_of(sampler, **options):
    dataset = PackedDataset(Collator(measure=MEASURE, rule=sampler.terms.rule, budget=sampler.terms.budget))
    return DataLoader(dataset, sampler=sampler, batch_size=None, **options)


def names(batches):
    return [batch.ids for batch in batches]


@pytest.mark.parametrize("trained", [1, 3])
def test_a_state_is_of_what_was_trained_on_and_skips_once(trained):
    """Prefetched batches counted as consumed, and the skip was applied to later epochs too.

    2 workers that prefetch 2 batches, 10 batches, saved after the first and after the third.
    lhotse-speech/lhotse#785, #417, #747.
    """
    workers = {"num_workers": 2, "prefetch_factor": 2, "timeout": 60}
    sampler = sampler_of()
    batches = list(islice(loader_of(sampler, **workers), trained))
    state = pickle.loads(pickle.dumps(sampler.state_dict(step=batches[-1].step)))
    whole = names(loader_of(sampler_of()))
    resumed = sampler_of()
    resumed.load_state_dict(state)
    loader = loader_of(resumed, **workers)
    assert names(batches) + names(loader) == whole
    resumed.set_epoch(1)
    second = names(loader)
    assert sorted(second) == sorted(whole)
    assert second != whole


def test_workers_that_stay_get_each_epoch_and_share_it_out():
    """Workers kept epoch 0, or shared one generator and returned duplicates. 2 persistent workers, 2 epochs, run twice.

    huggingface/datasets#6673; facebookresearch/fairseq#1383; webdataset/webdataset#172. Nothing random is drawn in a worker.
    """
    runs = []
    for _ in range(2):
        sampler = sampler_of()
        loader, epochs = loader_of(sampler, num_workers=2, persistent_workers=True, timeout=60), []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            epochs.append(names(loader))
        runs.append(epochs)
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]
    assert all(sorted(epoch) == sorted((text["id"],) for text in TEXTS) for epoch in runs[0])
    assert names(loader_of(sampler_of(seed=1))) != runs[0][0]


@pytest.mark.timeout(120)
def test_everything_that_a_spawned_worker_needs_travels():
    """Local functions and lambdas do not. k2-fsa/icefall#284."""
    sampler = sampler_of(TEXTS[:3])
    loader = loader_of(sampler, num_workers=1, multiprocessing_context="spawn", timeout=100)
    there = list(loader)
    here = list(loader_of(sampler_of(TEXTS[:3])))
    twin = pickle.loads(pickle.dumps(loader.dataset))
    again = [twin[pack] for pack in pickle.loads(pickle.dumps(sampler_of(TEXTS[:3])))]
    for batches in (there, again):
        assert names(batches) == names(here)
        assert [batch.checksum for batch in batches] == [batch.checksum for batch in here]
        assert all(torch.equal(one.input_ids, other.input_ids) for one, other in zip(batches, here, strict=True))


def test_each_batch_has_memory_of_its_own():
    """A reused buffer was overwritten while a copy was in flight: step N read step N + 1. vllm-project/vllm#47644.

    Any two batches of one collator, of equal shape: no tensor shares memory. The copies themselves are tested on a GPU.
    """
    kept = list(loader_of(sampler_of()))
    places = [{tensor.untyped_storage().data_ptr() for tensor in vars_of(batch) if tensor.numel()} for batch in kept]
    assert len(set().union(*places)) == sum(map(len, places)) == 10 * len(places[0])


def vars_of(batch):
    return [value for name in type(batch).__slots__ if isinstance(value := getattr(batch, name), torch.Tensor)]


# More of the same kind: the last step, and three ranks with three workers.


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_after_the_last_step_leaves_nothing_and_the_next_epoch_whole(workers):
    """Saved at the very end, and one step before it: the rest is empty, and one; the epoch after has all 10."""
    whole = names(loader_of(sampler_of()))
    for step, left in ((9, []), (8, whole[9:])):
        first = sampler_of()
        list(loader_of(first))
        resumed = sampler_of()
        resumed.load_state_dict(first.state_dict(step=step))
        loader = loader_of(resumed, num_workers=workers, timeout=60 if workers else 0)
        assert names(loader) == left
        resumed.set_epoch(1)
        assert len(names(loader)) == 10


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")  # on machines of two cores
def test_three_ranks_with_three_workers_resume_where_training_was():
    """dp 3, 3 workers each, 10 packs: 4 steps, the last with one example. One state serves every rank."""
    whole = [names(loader_of(sampler_of(dp=3, rank=rank))) for rank in range(3)]
    assert [len(column) for column in whole] == [4, 4, 4]
    state = None
    for rank in range(3):
        sampler = sampler_of(dp=3, rank=rank)
        batches = list(islice(loader_of(sampler, num_workers=3, timeout=60), 2))
        saved = sampler.state_dict(step=batches[-1].step)
        assert state is None or saved == state
        state = saved
    for rank in range(3):
        sampler = sampler_of(dp=3, rank=rank)
        sampler.load_state_dict(state)
        assert names(loader_of(sampler)) == whole[rank][2:]
    with pytest.raises(StateError, match="world of another size"):
        sampler_of(dp=2).load_state_dict(state)
