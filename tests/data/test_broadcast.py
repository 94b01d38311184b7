"""PeerLoader: one rank reads for its CP and TP peers, who get what they would have built; a failure reaches all of them."""

import multiprocessing
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from packfp8.data import Clip, Collator, Example, PackedDataset, PackingSampler, Turn
from packfp8.data.broadcast import PeerLoader, Slabs
from packfp8.data.flat import described, fill, restored
from packfp8.data.sampled_pack import SampledPack, fingerprint_of
from packfp8.errors import ConfigError, PackError
from packfp8.lengths import AudioFrames, Measure
from packfp8.rule import Topology, align

MEASURE = Measure(frames=AudioFrames.fastconformer())
BUDGET = 192


def example(n, samples):
    source = (
        0.1 * np.random.default_rng(n).standard_normal(max(samples, 1)).astype(np.float32) if samples >= 0 else "missing.wav"
    )
    clip = Clip(source=source, num_samples=abs(samples), sample_rate=16_000)
    return Example(id=f"s{n}", turns=(Turn("user", (clip,)), Turn("assistant", (f"answer {n}",))))


EXAMPLES = [example(n, 3_000 + 1_700 * n) for n in range(9)]


def parts(rank, examples=EXAMPLES, *, cp=2, tp=2, recipe="block", layout="thd"):
    rule = align(recipe, Topology(cp=cp, tp=tp, sp=tp > 1, cp_rank=rank // tp, tp_rank=rank % tp), layout=layout)
    sampler = PackingSampler(examples, measure=MEASURE, rule=rule, budget=BUDGET, shuffle=False)
    return sampler, Collator(measure=MEASURE, rule=rule, budget=BUDGET)


def same(a, b):
    """The same batch, field by field."""
    for field in fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype, field.name
            assert torch.equal(x, y), field.name
        elif field.name == "slots":
            assert x.offsets.tolist() == y.offsets.tolist()
            assert x.lengths.tolist() == y.lengths.tolist()
        else:
            assert x == y, field.name
    return True


def work(rank, world, path, job, answers):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    answer = "died"
    try:
        answer = job(rank)
    except PackError as error:
        answer = f"{type(error).__name__}: {error}"
    finally:
        answers.put((rank, answer))
        dist.destroy_process_group()


@pytest.fixture
def on_ranks(tmp_path):
    """on_ranks(job, world=4) -> what job(rank) returned, or the error that it raised as text, of each rank."""

    def on_ranks(job, world=4):
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        ranks = [context.Process(target=work, args=(n, world, tmp_path / "store", job, answers)) for n in range(world)]
        for process in ranks:
            process.start()
        told = dict(answers.get(timeout=60) for _ in ranks)
        for process in ranks:
            process.join(timeout=60)
        return [told[n] for n in range(world)]

    return on_ranks


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_each_of_four_peers_gets_the_batches_that_it_would_have_built(layout, on_ranks):
    def job(rank):
        sampler, collator = parts(rank, layout=layout)
        alone = list(PeerLoader(*parts(rank, layout=layout)))
        shared = list(PeerLoader(sampler, collator, broadcast=True))
        states = [sampler.state_dict(step=batch.step) for batch in shared]
        return len(shared) == len(alone) > 1 and all(map(same, shared, alone)), states

    told = on_ranks(job)
    assert all(right for right, _ in told)
    assert all(states == told[0][1] for _, states in told)


@pytest.mark.timeout(120)
def test_only_one_rank_reads_and_each_step_is_one_header_and_one_run_of_bytes(on_ranks):
    def job(rank):
        sent, broadcast = [], dist.broadcast
        dist.broadcast = lambda tensor, *args, **kwargs: (
            sent.append((tensor.dtype, tensor.numel())) or broadcast(tensor, *args, **kwargs)
        )
        sampler, collator = parts(rank)
        read = []
        load = collator.intake.load
        collator.intake = SimpleNamespace(take=collator.intake.take, load=lambda clip: read.append(id(clip)) or load(clip))
        steps = len(list(PeerLoader(sampler, collator, broadcast=True)))
        return steps, len(read), sent

    told = on_ranks(job)
    steps = told[0][0]
    assert [read for _, read, _ in told] == [len(EXAMPLES), 0, 0, 0]  # each clip once, though two CP ranks hold frames of it
    for _, _, sent in told:
        assert [dtype for dtype, _ in sent] == [torch.int64, torch.uint8] * steps + [torch.int64]
        assert {size for dtype, size in sent if dtype == torch.int64} == {3}


@pytest.mark.timeout(120)
def test_a_rank_that_fails_in_mid_epoch_raises_on_all_peers(on_ranks):
    examples = [*EXAMPLES[:7], example(7, -5_000)]

    def job(rank):
        got = []
        for batch in PeerLoader(*parts(rank, examples), broadcast=True):
            got.append(batch.step)
            if len(got) > 20:
                return "endless"
        return got

    told = on_ranks(job)
    assert told[0].startswith("AudioError")
    for text in told[1:]:
        what, got, expected, because, fix = text.splitlines()
        assert what.startswith("StateError: rank 0, which builds")
        assert "AudioError" in got
        assert "s7" in got or "missing.wav" in got
        assert "every peer" in expected
        assert "wait for ever" in because
        assert "rank 0" in fix


@pytest.mark.timeout(120)
def test_peers_of_different_rules_are_refused_on_every_rank_before_anything_is_read(on_ranks):
    told = on_ranks(lambda rank: PeerLoader(*parts(rank, recipe="block" if rank else "mxfp8"), broadcast=True) and "let pass")
    for text in told:
        what, got, expected, because, fix = text.splitlines()
        assert "different rules or measures" in what
        assert "rank 3" in got
        assert "one rule" in expected
        assert "another rule cut" in because
        assert "same configuration" in fix


@pytest.mark.timeout(120)
def test_a_group_that_is_not_the_peers_is_refused(on_ranks):
    told = on_ranks(lambda rank: PeerLoader(*parts(rank % 2, tp=1), broadcast=True) and "let pass", world=3)
    for text in told:
        what, got, expected, because, fix = text.splitlines()
        assert "not that of the CP and TP peers" in what
        assert "3 ranks" in got
        assert "2: cp 2 * tp 1" in expected
        assert "hold one pack" in because
        assert "_flatten" in fix


def test_a_sampler_of_another_rule_than_the_collator_is_refused():
    sampler, _ = parts(0)
    with pytest.raises(ConfigError, match="another rule or measure") as caught:
        PeerLoader(sampler, parts(0, recipe="mxfp8")[1])
    assert "collator" in str(caught.value).splitlines()[2]


def slabs_of(examples):
    _, collator = parts(0)
    fingerprint = fingerprint_of(collator.rule, collator.measure)
    return Slabs(collator)[SampledPack(examples, step=3, fingerprint=fingerprint)]


def test_slabs_are_the_batches_of_each_cp_rank():
    for rank, slab in enumerate(slabs_of(EXAMPLES[:3])):
        _, collator = parts(rank * 2)
        fingerprint = fingerprint_of(collator.rule, collator.measure)
        alone = PackedDataset(collator)[SampledPack(EXAMPLES[:3], step=3, fingerprint=fingerprint)]
        same(slab, alone)


@pytest.mark.parametrize("examples", [EXAMPLES[:3], []], ids=["audio", "a pack of filler alone"])
def test_batches_go_into_bytes_and_back(examples):
    slabs = slabs_of(examples)
    description, tensor_bytes = described(slabs)
    flat = torch.full((tensor_bytes,), 255, dtype=torch.uint8)
    fill(flat, description, slabs)
    for number, slab in enumerate(slabs):
        same(restored(flat, description, number, slab.rule), slab)


def test_no_waveform_is_in_the_description():
    (short, _), (long, long_bytes) = described(slabs_of([example(1, 3_000)])), described(slabs_of([example(1, 20_000)]))
    assert abs(len(long) - len(short)) < 64
    assert long_bytes > 4 * 20_000 > 4 * len(long)
