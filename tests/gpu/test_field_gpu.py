"""Public reports of faults that show on a GPU only; the rest of the catalogue is in `tests/field`.

That nothing waits for the device (modelscope/ms-swift#9797) is `test_nothing_waits_for_the_device_from_batch_to_gradients`.
"""

from dataclasses import fields, replace

import pytest
import torch
from torch.utils.data import DataLoader

from packfp8 import Example, Measure, PackedModel, Template, Topology, Turn, align
from packfp8.data import Collator, PackedBatch, PackedDataset, PackingSampler
from packfp8.model.fp8 import Fp8
from packfp8.model.plain_decoder import PlainDecoder
from packfp8.model.te_decoder import TeDecoder
from packfp8.report.payoff import payoff
from packfp8.report.payoff_gpu import GpuTimer
from packfp8.report.timing import Sizes

pytestmark = pytest.mark.gpu

TE, TORCHAO = ["delayed", "current", "block"], ["tensorwise", "rowwise"]


def words(text):
    """Token ids, spelled in words; another word is 0."""
    return [int(word) if word.isascii() and word.isdigit() else 0 for word in text.split()]


BARE = Measure(frames=None, tokenizer=words, template=Template(roles={"assistant": ("", "")}, prompt="", eos=False))


def docs(*lengths):
    """Documents of so many tokens, all supervised."""
    texts = [" ".join(str(1 + n % 200) for n in range(length)) for length in lengths]
    return [Example(id=str(n), turns=(Turn("assistant", (text,)),)) for n, text in enumerate(texts)]


def collated(lengths, recipe, layout="thd", topology=None, **options):
    rule = align(recipe, topology or Topology(), layout=layout)
    return Collator(measure=BARE, rule=rule, **options).collate(docs(*lengths))


def tensors(batch):
    return {f.name: value for f in fields(batch) if isinstance(value := getattr(batch, f.name), torch.Tensor)}


@pytest.fixture
def model_of(plain_state, sizes):
    """model_of(recipe, layout) -> a model of text in this recipe, the same parameters every time."""

    def model_of(recipe, layout="thd"):
        rule = align(recipe, layout=layout)
        if recipe in TORCHAO:
            llm = PlainDecoder(sizes).cuda()
            llm.load_state_dict(plain_state)
            llm, fp8, consumer = llm.bfloat16(), Fp8.torchao(recipe), "plain"
        else:
            llm, fp8, consumer = TeDecoder(sizes).load_plain(plain_state), Fp8.te(recipe) if recipe in TE else None, "te"
        return PackedModel(encoder=None, projector=None, llm=llm, rule=rule, consumer=consumer, fp8=fp8)

    return model_of


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("recipe", TE + TORCHAO)
def test_rows_of_1_and_7_tokens_train_in_fp8(recipe, layout, model_of):
    """FP8 GEMMs refuse 14 rows, in torchao only in backward. NVIDIA/TransformerEngine#1422, #1571; pytorch/ao#571."""
    batch = collated((1, 7), recipe, layout).to("cuda")
    assert batch.tokens == 16
    model = model_of(recipe, layout)
    out = model(batch, global_supervised=batch.num_supervised)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("recipe", TE)
def test_filler_changes_no_output_of_a_real_token(recipe, model_of, distance):
    """Pads in the last document's segment looked real, and gradients grew with FP8 scaling. 10 and 11 tokens, T from 21 to 32.

    NVIDIA/TransformerEngine#2892, #2911.
    """
    padded, tight = collated((10, 11), recipe).to("cuda"), collated((10, 11), "bf16").to("cuda")
    assert padded.cu_seqlens.tolist() == [0, 10, 21, 32]
    filled = replace(padded, input_ids=padded.input_ids.masked_fill(padded.padding_mask, 271))
    found = []
    for batch, name in ((tight, "bf16"), (padded, recipe), (filled, recipe)):
        model = model_of(name)
        out = model(batch, global_supervised=batch.num_supervised, return_logits=True)
        out.loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert all(torch.isfinite(grad).all() for grad in grads.values())
        found.append((torch.cat(list(batch.unpack(out.logits.detach()).values())), grads))
    errors = [distance(found[n][0], found[m][0]) for n, m in ((1, 0), (2, 1))]
    grown = distance(found[1][1], found[0][1])
    print(f"\n{recipe}: outputs {errors[0]:.2e} from BF16, {errors[1]:.2e} by other pads; gradients {grown:.2e}", end="")
    assert 0 < errors[0] < 0.2
    assert grown < 0.5
    # One scale for a whole tensor hears of its largest value, so what fills pads moves the rounding of real tokens: at most
    # from one rounding of the BF16 result to another. Block's scales are of 128 values of one row, and hear nothing.
    assert errors[1] == 0 if recipe == "block" else errors[1] <= 2 * errors[0]
    assert distance(found[2][0], found[0][0]) < 0.2


@pytest.mark.parametrize("workers", [0, 2])
def test_pinning_keeps_the_batch_what_it_was(workers):
    """A dict subclass came back as a dict, and another type was left unpinned. pytorch/pytorch#67831, #32150, #196801."""
    rule = align("block")
    items = [{"id": f"t{n}", "text": "ab" * (3 + n)} for n in range(12)]
    measure = Measure(frames=None)
    dataset = PackedDataset(Collator(measure=measure, rule=rule, budget=64))
    sampler = PackingSampler(items, measure=measure, rule=rule, budget=64)
    pinned = list(DataLoader(dataset, sampler=sampler, batch_size=None, pin_memory=True, num_workers=workers))
    plain = list(DataLoader(dataset, sampler=sampler, batch_size=None))
    assert len(pinned) == len(plain) > 2
    for batch, other in zip(pinned, plain, strict=True):
        assert type(batch) is PackedBatch
        assert all(tensor.is_pinned() for tensor in tensors(batch).values() if tensor.numel())
        assert type(batch.max_seqlen) is type(batch.num_supervised) is type(batch.step) is int
        assert (batch.ids, batch.step, batch.checksum) == (other.ids, other.step, other.checksum)
        assert all(torch.equal(tensor, tensors(other)[name]) for name, tensor in tensors(batch).items())


def test_a_copy_in_flight_reads_its_own_step():
    """A reused pinned buffer was overwritten: the copy of step N read step N + 1. Four in flight. vllm-project/vllm#47644."""
    collator = Collator(measure=BARE, rule=align("block"), budget=4096, static=True, max_sequences=64)
    kept, there = [], []
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # about 0.1 s in which the copies wait
    for n in range(4):
        batch = collator.collate(docs(*range(10 + n, 70)))
        kept.append({name: tensor.clone() for name, tensor in tensors(batch).items()})
        there.append(batch.pin_memory().to("cuda", non_blocking=True))
        del batch
    torch.cuda.synchronize()
    for expected, batch in zip(kept, there, strict=True):
        assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in tensors(batch).items())
    assert len({tuple(batch.cu_seqlens.tolist()) for batch in there}) == 4


def test_no_speed_is_claimed_that_this_gpu_did_not_show():
    """FP8 lost to BF16 at small GEMMs, unsaid. 1,024 tokens, hidden 1,024.

    NVIDIA/TransformerEngine#445; pytorch/ao#1297; huggingface/accelerate#2597.
    """
    timer = GpuTimer.here(Sizes(hidden=1024, ffn=2816, layers=1))
    timer.recipes = tuple(recipe for recipe in timer.recipes if recipe == "current")
    found = payoff(hidden=1024, layers=1, tokens=(1024,), timer=timer)
    said, gains = found.verdict("current", 1024), []
    for mode in ("eager", "graph"):
        gain = found.gain("layer", "current", mode, 1024)
        if gain:
            gains.append(gain.least > 1)
            assert f"{gain.ratio:.2f} times BF16's speed" in said
    print(f"\n{said}", end="")
    assert gains
    assert ("losing side" in said) == (not any(gains))
    assert "no timing of block" in found.verdict("block", 1024)


# More of the same kind: a batch without examples, and a slab of three.


def test_a_batch_without_examples_or_audio_is_pinned_and_moved():
    """Tensors of no element: no clip, no frame, no sequence."""
    batch = collated((), "block").pin_memory().to("cuda", non_blocking=True)
    assert batch.audio.shape == (0, 0)
    assert (batch.tokens, batch.num_supervised) == (16, 0)
    assert {tensor.device.type for tensor in tensors(batch).values()} == {"cuda"}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_slab_of_three_ranks_unpacks_on_the_gpu(rank):
    """cp 3, odd lengths: the slabs of all ranks, moved, give each document back."""
    slabs = [collated((5, 7, 1), "bf16", topology=Topology(cp=3, cp_rank=n)).to("cuda") for n in range(3)]
    parts = slabs[rank].unpack([slab.input_ids for slab in slabs])
    assert [part.tolist() for part in parts.values()] == [[*range(1, 6)], [*range(1, 8)], [1]]
    assert all(part.is_cuda for part in parts.values())
