"""Loaders: workers share the packs out without repeating any, in every way that torch and lhotse iterate a sampler."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from lhotse import CutSet
from lhotse.cut.text import TextExample
from lhotse.dataset.iterable_dataset import IterableDatasetWrapper
from torch.utils.data import DataLoader

import packfp8
from packfp8.data import Collator, PackedDataset, corpus
from packfp8.errors import ConfigError
from packfp8.lengths import Measure
from packfp8.rule import Topology, align


@pytest.fixture(scope="module")
def texts():
    return [{"id": f"t{n}", "text": "ab" * (3 + n * 29 % 50)} for n in range(60)]


@pytest.fixture(scope="module")
def dataset_of(measure):
    """A function from a sampler to the dataset with its rule."""
    return lambda sampler, **options: PackedDataset(
        Collator(measure=measure, rule=sampler.terms.rule, budget=sampler.terms.budget, **options)
    )


def names(batches):
    return [batch.ids for batch in batches]


def test_persistent_workers_give_every_example_once_an_epoch_in_a_new_order(texts, sampler_of, dataset_of):
    sampler = sampler_of(texts)
    loader = DataLoader(
        dataset_of(sampler), sampler=sampler, batch_size=None, num_workers=2, persistent_workers=True, timeout=60
    )
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = list(loader)
        assert [batch.step for batch in batches] == list(range(len(batches)))
        assert sorted(name for batch in batches for name in batch.ids) == sorted(text["id"] for text in texts)
        epochs.append(names(batches))
    assert epochs[0] != epochs[1]
    with pytest.raises(TypeError):
        len(loader)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_lhotses_iterable_wrapper_gives_the_same_batches_in_the_same_order(make_text_cuts, sampler_of, dataset_of, workers):
    sampler = sampler_of(make_text_cuts)
    expected = names(dataset_of(sampler)[pack] for pack in sampler)
    wrapped = IterableDatasetWrapper(dataset_of(sampler), sampler_of(make_text_cuts))
    batches = list(DataLoader(wrapped, batch_size=None, num_workers=workers, timeout=60 if workers else 0))
    assert names(batches) == expected
    assert [batch.step for batch in batches] == list(range(len(expected)))

    state = wrapped.sampler.state_dict(step=4)  # the next step is odd: workers do not take it by its number
    resumed = IterableDatasetWrapper(dataset_of(sampler), sampler_of(make_text_cuts))
    resumed.sampler.load_state_dict(state)
    assert names(DataLoader(resumed, batch_size=None, num_workers=workers, timeout=60 if workers else 0)) == expected[5:]


@pytest.fixture(scope="module")
def make_text_cuts():
    return [TextExample(text="ab" * (3 + n * 29 % 50), custom={"id": f"t{n}"}) for n in range(60)]


def test_a_persistent_iterable_wrapper_goes_through_new_epochs(make_text_cuts, sampler_of, dataset_of):
    sampler = sampler_of(make_text_cuts)
    wrapped = IterableDatasetWrapper(dataset_of(sampler), sampler, auto_increment_epoch=True)
    loader = DataLoader(wrapped, batch_size=None, num_workers=2, persistent_workers=True, timeout=60)
    first, second = list(loader), list(loader)
    for batches in (first, second):
        assert len({name for batch in batches for name in batch.ids}) == sum(len(batch.ids) for batch in batches) == 60
    assert names(first) != names(second)


def test_a_lhotse_wrapper_with_several_ranks_shares_the_set(make_text_cuts, sampler_of, dataset_of):
    seen = []
    for rank in range(2):
        sampler = sampler_of(make_text_cuts, dp=2, rank=rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # lhotse asks whether several ranks are meant
            wrapped = IterableDatasetWrapper(dataset_of(sampler), sampler)
        seen.append(names(DataLoader(wrapped, batch_size=None, num_workers=1, timeout=60)))
    assert len(seen[0]) == len(seen[1])
    assert len({name for column in seen for pack in column for name in pack}) == 60


@pytest.mark.timeout(120)
def test_sampler_and_dataset_go_to_a_spawned_worker_which_reads_real_audio(sampler_of, dataset_of):
    sampler = sampler_of(CutSet(list(corpus())[:60]), budget=2048, cp=2)
    loader = DataLoader(
        IterableDatasetWrapper(dataset_of(sampler), sampler),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="spawn",
        timeout=100,
    )
    batches = list(loader)
    assert names(batches) == [tuple(cut.id for cut in pack) for pack in sampler] != []
    assert all(batch.audio.shape[0] for batch in batches)


TRAINING = """
import json, os, signal, sys
from torch.utils.data import DataLoader
from packfp8 import AudioFrames, Collator, Measure, PackedDataset, PackingSampler, align

class Killed(PackedDataset):
    def __getitem__(self, pack):
        if pack.step == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(pack)

measure, rule = Measure(frames=AudioFrames.linear(800)), align("block")
sampler = PackingSampler(json.load(sys.stdin), measure=measure, rule=rule, budget=256, window=4)
dataset = Killed(Collator(measure=measure, rule=rule, budget=256))
for batch in DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=2, timeout=30):
    print(json.dumps([batch.ids, sampler.state_dict(step=batch.step)]), flush=True)
"""


@pytest.mark.timeout(90)
def test_a_killed_worker_ends_training_with_an_error_and_the_last_state_leads_on(texts, sampler_of):
    # A process of its own: torch raises the error of a killed worker wherever its main process happens to be.
    told = subprocess.run(
        [sys.executable, "-c", TRAINING],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        timeout=80,
        env={**os.environ, "PYTHONPATH": str(Path(packfp8.__file__).parents[1])},
    )
    assert told.returncode != 0
    # torch names the worker, or the connection to it where it dies while its tensors are being received
    assert any(word in told.stderr for word in ("worker", "ConnectionResetError", "EOFError")), told.stderr
    trained = [json.loads(line) for line in told.stdout.split("\n")[:-1]]
    assert 0 < len(trained) <= 7
    sampler = sampler_of(texts)
    whole = [[text["id"] for text in pack] for pack in sampler]
    sampler.load_state_dict(trained[-1][1])
    assert [ids for ids, _ in trained] + [[text["id"] for text in pack] for pack in sampler] == whole


def test_packs_without_examples_are_whole_batches_of_zero_weight(texts, sampler_of, dataset_of):
    steps = []
    for rank in range(4):
        sampler = sampler_of(texts[:1], dp=4, rank=rank)
        steps.append([dataset_of(sampler)[pack] for pack in sampler])
    assert [len(batches) for batches in steps] == [1, 1, 1, 1]
    batches = [batches[0] for batches in steps]
    assert sorted(len(batch.ids) for batch in batches) == [0, 0, 0, 1]  # evaluation counts the example once
    for batch in batches:
        assert batch.tokens > 0
        assert batch.tokens % batch.rule.total == 0
        assert (batch.num_supervised == 0) == (not batch.ids)
        assert torch.all(batch.labels == -100) or batch.ids


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_both_layouts_go_through_a_loader_within_the_budget(texts, sampler_of, dataset_of, layout):
    sampler = sampler_of(texts, layout=layout, cp=2, dp=2)
    for batch in DataLoader(dataset_of(sampler), sampler=sampler, batch_size=None):
        assert batch.slots.total <= 256
        assert batch.fingerprint == sampler.terms.rule.fingerprint


def test_something_else_than_a_pack_is_refused(texts, sampler_of, dataset_of, lines_of):
    with pytest.raises(ConfigError) as refusal:
        dataset_of(sampler_of(texts))[3]
    lines = lines_of(refusal.value)
    assert "something else than a pack" in lines["what"]
    assert lines["got"] == "int"
    assert "SampledPack" in lines["expected"]
    assert "as many steps" in lines["because"]
    assert "batch_size=None" in lines["fix"]


@pytest.mark.parametrize("options", [{"recipe": "bf16"}, {"measure": Measure(frames=None)}])
def test_a_pack_made_by_another_rule_or_measure_is_refused(texts, sampler_of, measure, lines_of, options):
    pack = next(iter(sampler_of(texts, **options)))
    rule = align("block", Topology())
    with pytest.raises(ConfigError) as refusal:
        PackedDataset(Collator(measure=measure, rule=rule, budget=256))[pack]
    lines = lines_of(refusal.value)
    assert "another rule or measure" in lines["what"]
    assert lines["got"] == f"sampler {pack.fingerprint}"
    assert lines["expected"] == f"collator {rule.fingerprint} {measure.fingerprint}"
    assert "illegal" in lines["because"]
    assert "same rule and measure" in lines["fix"]
