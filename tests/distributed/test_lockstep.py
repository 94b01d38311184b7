"""A rank that fails ends all ranks with the same words, soon; or the example is set aside, and everybody goes on."""

import multiprocessing
import os
import signal
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from packfp8.data import Clip, Collator, Example, PackedDataset, PackingSampler, PeerLoader, Turn
from packfp8.data.lockstep import in_lockstep
from packfp8.errors import StateError
from packfp8.lengths import AudioFrames, Measure
from packfp8.rule import Topology, align

MEASURE = Measure(frames=AudioFrames.fastconformer())
SOON = 30  # seconds


def example(n):
    source = 0.1 * np.random.default_rng(n).standard_normal(3_000 + 700 * n).astype(np.float32)
    clip = Clip(source=source, num_samples=len(source), sample_rate=16_000)
    return Example(id=f"s{n}", turns=(Turn("user", (clip,)), Turn("assistant", (f"answer {n}",))))


EXAMPLES = [example(n) for n in range(24)]


def broken(n, path="/nowhere/gone.wav"):
    clip = Clip(source=path, num_samples=9_000, sample_rate=16_000)
    return Example(id=f"broken{n}", turns=(Turn("user", (clip,)), Turn("assistant", ("no",))))


class Interfered(PackedDataset):
    """A dataset in which something befalls the pack of one step, on one rank."""

    def __init__(self, collator, act, step=3):
        super().__init__(collator)
        self.act, self.step = act, step

    def __getitem__(self, pack):
        if pack.step == self.step:
            self.act()
        return super().__getitem__(pack)


def nothing():
    """What befalls the other ranks."""


def kill_worker():
    os.kill(os.getpid(), signal.SIGKILL)


def raise_value():
    raise ValueError("a transform of the user's\nfound something")


def hang():
    time.sleep(600)


def train(rank, act=nothing, examples=EXAMPLES, *, world=2, workers=1, culprit=1, group=None, **options):
    """Ids and set-aside ids of each step; every step ends with a collective, as a model's would."""
    rule = align("block", Topology(dp=world, dp_rank=rank))
    sampler = PackingSampler(examples, measure=MEASURE, rule=rule, budget=96, shuffle=False, window=2)
    collator = Collator(measure=MEASURE, rule=rule, budget=96, **options)
    dataset = Interfered(collator, act if rank == culprit else nothing)
    loader = DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=workers, timeout=3 if workers else 0)
    seen = []
    for batch in in_lockstep(loader, group):
        dist.all_reduce(torch.ones(()))
        seen.append((batch.ids, [one.id for one in batch.set_aside], batch.tokens))
    return seen


def check(told, seconds, lines_of, *words, culprit=1):
    assert len(set(told)) == 1, told
    assert max(seconds) < SOON
    lines = lines_of(told[0])
    assert lines["what"] == f"StateError: rank {culprit} has no batch, and all ranks stop"
    assert lines["got"].startswith(f"rank {culprit}: ")
    for word in words:
        assert word in lines["got"]
    assert lines["expected"] == "a batch on every rank"
    assert "waiting" in lines["because"]
    assert "set_aside" in lines["fix"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_file_stops_all_ranks_and_is_named_by_all(on_ranks, lines_of, workers):
    told, seconds = on_ranks(lambda rank: train(rank, examples=[*EXAMPLES, broken(0)], workers=workers))
    culprit = int(told[0].split("rank ")[1][0])
    check(told, seconds, lines_of, "AudioError: ", "gone.wav", " | expected: ", culprit=culprit)
    assert "Traceback" not in told[0]


def test_a_broken_file_is_set_aside_alike_and_shapes_and_steps_stay_equal(on_ranks):
    examples = [*EXAMPLES[:9], broken(0), *EXAMPLES[9:], broken(1)]
    told, _ = on_ranks(lambda rank: train(rank, examples=examples, on_fault="set_aside"))
    assert len(told[0]) == len(told[1]) > 5
    steps = [step for column in told for step in column]
    assert sorted(name for ids, _, _ in steps for name in ids) == sorted(one.id for one in EXAMPLES)
    assert sorted(name for _, aside, _ in steps for name in aside) == ["broken0", "broken1"]
    assert all(tokens > 0 for _, _, tokens in steps)


@pytest.mark.parametrize("broadcast", [False, True])
def test_cp_peers_set_the_same_example_aside_though_one_of_them_alone_would_hear_it(on_ranks, broadcast):
    """The clip is so short that one CP rank holds all its frames; with broadcast only one rank reads at all."""
    examples = [*EXAMPLES[:5], broken(0), *EXAMPLES[5:8]]

    def job(rank):
        rule = align("block", Topology(cp=2, cp_rank=rank))
        sampler = PackingSampler(examples, measure=MEASURE, rule=rule, budget=192, shuffle=False)
        collator = Collator(measure=MEASURE, rule=rule, budget=192, on_fault="set_aside")
        batches = PeerLoader(sampler, collator, broadcast=broadcast)
        return [
            (batch.ids, [one.id for one in batch.set_aside], batch.checksum, batch.tokens)
            for batch in in_lockstep(batches, peers=dist.group.WORLD)
        ]

    told, _ = on_ranks(job)
    assert told[0] == told[1]
    assert [name for _, aside, _, _ in told[0] for name in aside] == ["broken0"]


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_file_that_one_cp_peer_alone_cannot_read(on_ranks, lines_of, tmp_path, broadcast):
    """A node's own disk: where each peer reads, the packs differ, and all stop; where one reads for all, it goes on."""
    import soundfile

    soundfile.write(tmp_path / "0.wav", np.zeros(9_000, np.float32), 16_000)

    def job(rank):
        rule = align("block", Topology(cp=2, cp_rank=rank))
        examples = [*EXAMPLES[:5], broken(0, str(tmp_path / f"{rank}.wav")), *EXAMPLES[5:8]]
        sampler = PackingSampler(examples, measure=MEASURE, rule=rule, budget=192, shuffle=False)
        collator = Collator(measure=MEASURE, rule=rule, budget=192, on_fault="set_aside")
        batches = PeerLoader(sampler, collator, broadcast=broadcast)
        return [batch.ids for batch in in_lockstep(batches, peers=dist.group.WORLD)]

    told, seconds = on_ranks(job)
    if broadcast:
        assert told[0] == told[1]
        assert "broken0" in [name for ids in told[0] for name in ids]
        return
    assert told[0] == told[1]
    assert max(seconds) < SOON
    assert "holds another pack than its peers" in lines_of(told[0])["got"]


def test_a_killed_worker_stops_all_ranks(on_ranks, lines_of):
    told, seconds = on_ranks(lambda rank: train(rank, kill_worker))
    check(told, seconds, lines_of, "Error: ")  # torch finds a closed pipe, or hears of the death: whichever comes first


def test_a_worker_killed_during_the_models_step_is_told_of_at_the_next_draw(on_ranks, lines_of):
    """While the ranks compute; torch alone would raise on this rank, in the model's collective."""

    def job(rank):
        rule = align("block", Topology(dp=2, dp_rank=rank))
        sampler = PackingSampler(EXAMPLES, measure=MEASURE, rule=rule, budget=96)
        dataset = PackedDataset(Collator(measure=MEASURE, rule=rule, budget=96))
        loader = DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=1, prefetch_factor=2)
        try:
            for batch in in_lockstep(loader):
                if rank and batch.step == 2:
                    (worker,) = multiprocessing.active_children()
                    os.kill(worker.pid, signal.SIGKILL)
                    worker.join()
                dist.all_reduce(torch.ones(1000))
                last = batch.step
        except StateError as error:
            assert last == 2
            return f"{type(error).__name__}: {error}", signal.getsignal(signal.SIGCHLD).__module__

    told, seconds = on_ranks(job)
    check([text for text, _ in told], seconds, lines_of, "RuntimeError: DataLoader worker")
    assert told[1][1].startswith("torch.")  # which hears of deaths by itself again


@pytest.mark.parametrize("workers", [0, 1])
def test_any_error_in_the_collator_stops_all_ranks_with_its_words(on_ranks, lines_of, workers):
    told, seconds = on_ranks(lambda rank: train(rank, raise_value, workers=workers))
    check(told, seconds, lines_of, "ValueError: ", "found something")


def test_a_worker_that_hangs_stops_all_ranks_after_the_loaders_timeout(on_ranks, lines_of):
    told, seconds = on_ranks(lambda rank: train(rank, hang))
    check(told, seconds, lines_of, "timed out after 3 seconds")


def test_ranks_of_unequal_steps_are_named_instead_of_waited_for(on_ranks, lines_of):
    told, seconds = on_ranks(lambda rank: train(rank, examples=EXAMPLES[: 24 - 8 * (rank == 2)], world=3), world=3)
    assert len(set(told)) == 1
    assert max(seconds) < SOON
    lines = lines_of(told[0])
    assert lines["what"] == "StateError: rank 2 is not at the step of the other ranks"
    assert lines["got"] == "rank 2: the end of the epoch"
    assert lines["expected"].startswith("as rank 0: step ")
    assert "too early" in lines["because"]
    assert "check_start" in lines["fix"]


def test_a_rank_that_resumes_at_another_step_is_named(on_ranks, lines_of):
    def job(rank):
        rule = align("block", Topology(dp=2, dp_rank=rank))
        sampler = PackingSampler(EXAMPLES, measure=MEASURE, rule=rule, budget=96)
        if rank:
            sampler.load_state_dict(sampler.state_dict(step=1))
        dataset = PackedDataset(Collator(measure=MEASURE, rule=rule, budget=96))
        return [batch.ids for batch in in_lockstep(dataset[pack] for pack in sampler)]

    told, _ = on_ranks(job)
    assert len(set(told)) == 1
    lines = lines_of(told[0])
    assert (lines["got"], lines["expected"]) == ("rank 1: step 2", "as rank 0: step 0")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_or_stands_still_is_not_waited_for(on_ranks, lines_of, how):
    def job(rank):
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
        rule = align("block", Topology(dp=2, dp_rank=rank))
        sampler = PackingSampler(EXAMPLES, measure=MEASURE, rule=rule, budget=96)
        dataset = PackedDataset(Collator(measure=MEASURE, rule=rule, budget=96))
        for batch in in_lockstep((dataset[pack] for pack in sampler), group):
            if rank and batch.step == 2:
                os.kill(os.getpid(), how)

    told, seconds = on_ranks(job, silent=[1])
    assert max(seconds) < SOON
    lines = lines_of(told[0])
    assert "another rank is gone, or has said nothing for too long" in lines["what"]
    assert lines["got"].startswith("RuntimeError: ")
    assert "every rank after each draw" in lines["expected"]
    assert "in another collective" in lines["because"]
    assert "torchrun --max-restarts" in lines["fix"]


def test_batches_pass_through_unchanged_to_the_end(on_ranks):
    told, _ = on_ranks(lambda rank: (train(rank), train(rank, workers=0)))
    assert all(one == other for one, other in told)
    assert sorted(name for (column, _) in told for ids, _, _ in column for name in ids) == sorted(one.id for one in EXAMPLES)
