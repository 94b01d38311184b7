"""The encoder shared over CP ranks gives the loss and the gradients of encoding everywhere, over gloo."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist

from packfp8.data import Collator
from packfp8.errors import ConfigError, PackError
from packfp8.model.encoder_share import FrameExchange
from packfp8.model.gather import GatherOverRanks
from packfp8.rule import Topology, align


def work(rank, world, path, job, answers):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    answer = "died"
    try:
        answer = job(rank)
    except PackError as error:
        answer = str(error)
    finally:
        answers.put((rank, answer))
        dist.destroy_process_group()


@pytest.fixture
def on_ranks(tmp_path):
    """on_ranks(job, world) -> what job(rank) returned, or its error as text, of each rank."""

    def on_ranks(job, world):
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


@pytest.fixture
def gradients(build, measure):
    """gradients(examples, cp, layout, rank, share) -> loss and gradients summed over ranks, audio_lens, frames sent away."""

    def gradients(examples, cp, layout, rank, share):
        rule = align("block", Topology(cp=cp, cp_rank=rank), layout=layout)
        batch = Collator(measure=measure, rule=rule, share_encoder=share)(examples)
        model = build(rule, **({"cp_group": dist.group.WORLD} if share else {}))
        model.llm.gather = GatherOverRanks(dist.group.WORLD)
        count = torch.tensor(batch.num_supervised)
        dist.all_reduce(count)
        model(batch, global_supervised=count).loss_sum.backward()
        out = model(batch, global_supervised=count).loss_sum.detach()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        for tensor in (out, *grads.values()):
            dist.all_reduce(tensor)
        away = sum(batch.frames_sent) - batch.frames_sent[rank]
        return out.item(), {name: grad.tolist() for name, grad in grads.items()}, batch.audio_lens.tolist(), away

    return gradients


@pytest.mark.timeout(180)
@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("cp", [2, 4])
def test_loss_and_gradients_are_those_of_encoding_everywhere(cp, layout, mixed, gradients, on_ranks):
    told = on_ranks(lambda rank: [gradients(mixed, cp, layout, rank, share) for share in (False, True)], cp)
    (loss, grads, _, _), (shared_loss, shared_grads, _, _) = told[0]
    assert shared_loss == pytest.approx(loss, rel=1e-12)
    for name, grad in grads.items():
        torch.testing.assert_close(torch.tensor(shared_grads[name]), torch.tensor(grad), rtol=1e-9, atol=1e-12, msg=name)
    assert any(torch.tensor(grad).abs().max() > 1e-6 for name, grad in grads.items() if name.startswith("encoder"))
    everywhere, shared = [[answer[share][2] for answer in told] for share in (0, 1)]
    declared = [clip.num_samples for example in mixed for clip in example.clips]
    assert sorted(samples for rank in shared for samples in rank) == sorted(declared)  # each once
    assert max(map(sum, shared)) < max(map(sum, everywhere))  # the rank with the most to encode has less
    assert sum(answer[0][3] for answer in told) == 0 < sum(answer[1][3] for answer in told)


@pytest.mark.timeout(180)
def test_ranks_without_a_clip_of_their_own_take_part(mixed, gradients, on_ranks):
    """One clip for four ranks: three encode silence, one sends to all."""
    told = on_ranks(lambda rank: [gradients(mixed[4:5], 4, "thd", rank, share) for share in (False, True)], 4)
    assert [len(answer[1][2]) for answer in told] == [1, 0, 0, 0]
    (_, grads, _, _), (_, shared_grads, _, _) = told[0]
    for name, grad in grads.items():
        torch.testing.assert_close(torch.tensor(shared_grads[name]), torch.tensor(grad), rtol=1e-9, atol=1e-12, msg=name)


def test_a_shared_batch_is_refused_by_a_model_without_the_group(mixed, build, measure):
    rule = align("block", Topology(cp=2))
    batch = Collator(measure=measure, rule=rule, share_encoder=True)(mixed)
    with pytest.raises(ConfigError) as caught:
        build(rule)(batch, global_supervised=1_000)
    what, got, expected, because, fix = str(caught.value).splitlines()
    assert "shared over CP ranks for the batch of speech" in what
    assert "frames sent (" in got
    assert "at CP rank 0" in expected
    assert "fetched" in because
    assert "cp_group" in fix


@pytest.mark.timeout(120)
def test_a_group_of_another_size_than_cp_is_refused(mixed, measure, on_ranks):
    def job(rank):
        batch = Collator(measure=measure, rule=align("block", Topology(cp=4, cp_rank=rank)), share_encoder=True)(mixed)
        return FrameExchange(dist.group.WORLD)(torch.zeros(sum(batch.frames_sent), 2), batch)

    for text in on_ranks(job, 2):
        what, got, expected, because, fix = text.splitlines()
        assert "not the CP group" in what
        assert "2 ranks" in got
        assert "4 ranks" in expected
        assert "to no other" in because
        assert 'mesh["cp"]' in fix
