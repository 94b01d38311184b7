"""Resume: a rank is killed under torchrun, all start again from the checkpoint, and the end is that of an undisturbed run."""

import json
import os
import subprocess
import sys

import pytest
import torch

from packfp8.data import Collator, PackedDataset, PackingSampler
from packfp8.data.progress import Progress
from packfp8.lengths import Measure
from packfp8.rule import Topology, align

STEPS, SAVED_AFTER, KILLED_AT = 20, 7, 11


@pytest.fixture(scope="module")
def runs(here, tmp_path_factory):
    """The folders of an undisturbed run and of one whose rank 1 was killed at step 11; they run side by side."""
    root, found = str(here.parents[1]), {}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    # Without the second, gloo's ranks of the new attempt look for those of the old (torch 2.13: the store outlives an attempt).
    env |= {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    for name, options in (("undisturbed", []), ("killed", ["--kill-at", str(KILLED_AT)])):
        folder = tmp_path_factory.mktemp(name)
        command = [*torchrun, here / "train.py", folder, *options]
        found[name] = (folder, subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    try:
        for name, (folder, run) in found.items():
            told = run.communicate(timeout=140)[1]
            assert run.returncode == 0, told[-5000:]
            found[name] = folder
    finally:
        for run in found.values():
            if isinstance(run, tuple):
                run[1].terminate()
    return found


def log(folder, rank, attempt):
    return [json.loads(line) for line in (folder / f"rank{rank}-attempt{attempt}.jsonl").read_text().splitlines()]


@pytest.mark.timeout(300)
def test_the_examples_consumed_are_those_of_an_undisturbed_run(runs):
    whole, killed = runs["undisturbed"], runs["killed"]
    for rank in range(2):
        expected = log(whole, rank, 0)
        before, after = log(killed, rank, 0), log(killed, rank, 1)
        assert len(expected) == STEPS
        assert len(before) == KILLED_AT
        assert [one["done"] for one in after] == list(range(SAVED_AFTER + 1, STEPS + 1))
        joined = before[:SAVED_AFTER] + after
        assert [(one["epoch"], one["step"], one["ids"]) for one in joined] == [
            (one["epoch"], one["step"], one["ids"]) for one in expected
        ]
        assert [one["loss"] for one in joined] == [one["loss"] for one in expected]  # to the last bit
        again = after[: KILLED_AT - SAVED_AFTER]  # what was trained on in vain
        assert [(one["ids"], one["loss"]) for one in before[SAVED_AFTER:]] == [(one["ids"], one["loss"]) for one in again]
    assert len({one["epoch"] for one in log(whole, 0, 0)}) > 1  # the run goes through the end of an epoch


@pytest.mark.timeout(300)
def test_the_parameters_and_the_state_beside_them_are_those_of_an_undisturbed_run(runs):
    whole, killed = (torch.load(runs[name] / "end.pt", weights_only=True) for name in ("undisturbed", "killed"))
    assert torch.equal(whole["history"], killed["history"])
    assert (whole["history"] > 0).all()
    assert whole["parameters"].keys() == killed["parameters"].keys()
    for name, parameter in whole["parameters"].items():
        assert torch.equal(parameter, killed["parameters"][name]), name


@pytest.mark.timeout(300)
def test_no_rank_waits_for_the_killed_one(runs):
    """From the death of rank 1 to the first step of the next attempt. Most of it starts python again; a hang is 30 minutes."""
    (*_, last), (first, *_) = log(runs["killed"], 1, 0), log(runs["killed"], 0, 1)
    assert first["time"] - last["time"] < 120


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_resumes_in_the_middle_of_an_epoch(workers):
    """torchdata's loader asks the sampler at each pack that it sends to a worker, and keeps what belongs to the batch."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    texts = [{"id": f"t{n}", "text": "ab" * (3 + n * 29 % 50)} for n in range(120)]
    measure, rule = Measure(frames=None), align("block", Topology(dp=2, dp_rank=1))

    def parts():
        sampler = PackingSampler(texts, measure=measure, rule=rule, budget=256, window=4)
        dataset = PackedDataset(Collator(measure=measure, rule=rule, budget=256))
        return sampler, loaders.StatefulDataLoader(dataset, sampler=sampler, batch_size=None, num_workers=workers)

    sampler, loader = parts()
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append([batch.ids for batch in loader])
    _, loader = parts()
    batches = iter(loader)
    before, state = [next(batches).ids for _ in range(7)], loader.state_dict()
    sampler, loader = parts()
    loader.load_state_dict(json.loads(json.dumps(state)) if not workers else state)
    assert before + [batch.ids for batch in loader] == epochs[0]
    sampler.set_epoch(1)
    assert [batch.ids for batch in loader] == epochs[1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_progress_is_that_of_training_and_not_of_what_was_drawn(tmp_path):
    import torch.distributed.checkpoint as dcp

    texts = [{"id": f"t{n}", "text": "ab" * (3 + n * 29 % 50)} for n in range(120)]
    measure, rule = Measure(frames=None), align("block", Topology(dp=2, dp_rank=1))
    collator = Collator(measure=measure, rule=rule, budget=256)

    def sampler():
        return PackingSampler(texts, measure=measure, rule=rule, budget=256, window=4)

    first = sampler()
    progress, packs = Progress(first), [collator.collate(pack, step=pack.step) for pack in first]
    for number, done in enumerate((None, *packs[:3])):  # the sampler is at its end all the while
        if done is not None:
            progress.trained(done)
        folder = tmp_path / str(number)
        dcp.save({"progress": progress}, checkpoint_id=folder, no_dist=True)
        second = sampler()
        resumed = Progress(second)
        dcp.load({"progress": resumed}, checkpoint_id=folder, no_dist=True)
        assert resumed.state_dict() == progress.state_dict()
        assert [[item["id"] for item in pack] for pack in second] == [
            list(batch.ids) for batch in packs[0 if done is None else done.step + 1 :]
        ]
    first.set_epoch(1)
    assert json.loads(progress.state_dict()["sampler"])["step"] == -1
    assert json.loads(progress.state_dict()["sampler"])["epoch"] == 1
