"""A captured training is the eager one: losses, parameters, optimizer and delayed scaling's maxima, over different batches."""

import gc
import subprocess
import sys

import pytest
import torch

from packfp8 import align
from packfp8.data import Collator
from packfp8.model import PackedModel
from packfp8.model.captured import CapturedStep
from packfp8.model.fp8 import Fp8
from packfp8.model.graph import Graph
from packfp8.model.plain_decoder import PlainDecoder
from packfp8.model.plain_encoder import PlainEncoder, PlainProjector
from packfp8.model.te_decoder import TeDecoder

pytestmark = pytest.mark.gpu

RECIPES = ["bf16", "current", "block", "delayed"]
STATIC = {"static": True, "budget": 512, "max_sequences": 5, "frame_budget": 320}
EPOCH = ([1, 2], [0, 3], [4, 11], [5, 0], [10], [], [7, 8], [6, 9], [11, 2], [3])
"""Speech, text alone (0, 3, 6, 9 and 11), two clips, and a pack of filler."""


@pytest.fixture
def _deterministic(monkeypatch):
    """Attention and convolutions add up in one order, so that two trainings can be equal bit for bit."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture
def batches(measure, examples):
    """batches(recipe, ...) -> those of an epoch, in pinned memory."""

    def batches(recipe, chosen=EPOCH, **options):
        collator = Collator(measure=measure, rule=align(recipe), **{**STATIC, **options})
        return [collator.collate([examples[n] for n in numbers], step=k).pin_memory() for k, numbers in enumerate(chosen)]

    return batches


@pytest.fixture
def build(plain_state, sizes, frames):
    """build(recipe) -> a model with the same parameters every time; its head works on as many rows eager as captured."""

    def build(recipe):
        torch.manual_seed(1)
        encoder, projector = PlainEncoder(width=32).cuda(), PlainProjector(width=32, hidden=sizes.hidden).cuda().bfloat16()
        encoder.convs.bfloat16()
        encoder.norm.bfloat16()
        return PackedModel(
            encoder=encoder,
            projector=projector,
            llm=TeDecoder(sizes).load_plain(plain_state),
            rule=align(recipe),
            frames=frames,
            fp8=Fp8.te(recipe) if recipe != "bf16" else None,
            loss_rows=512,
        )

    return build


def adamw(model):
    lr = torch.tensor(1e-3, device="cuda")
    return torch.optim.AdamW(model.parameters(), lr=lr, capturable=True, foreach=True)


def count_of(batch):
    return torch.tensor(max(1, batch.num_supervised), device="cuda")


def state_of(model, optimizer=None):
    """Everything that a training leaves behind: parameters, gradients, delayed scaling's maxima and scales, moments."""
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    state |= {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for name, module in model.named_modules():
        for key in ("scaling_fwd", "scaling_bwd"):
            scaling = getattr(module, "fp8_meta", {}).get(key)
            for part in ("amax_history", "scale"):
                if isinstance(tensor := getattr(scaling, part, None), torch.Tensor):
                    state[f"{name}.{key}.{part}"] = tensor.clone()
    if optimizer is not None:
        for n, values in enumerate(optimizer.state.values()):
            state |= {f"optimizer {n} {key}": value.clone() for key, value in values.items()}
    return state


def check_equal(found, one, other):
    """`found` is `one` bit for bit where two eager trainings are, and else as near to it as they are to each other."""
    assert found.keys() == one.keys() == other.keys()
    exact = 0
    for name, tensor in found.items():
        if torch.equal(one[name], other[name]):
            exact += 1
            assert torch.equal(tensor, one[name]), name
        else:
            spread = (one[name].double() - other[name].double()).abs().max()
            assert (tensor.double() - one[name].double()).abs().max() <= 4 * spread, name
    print(f"{exact} of {len(found)} tensors equal bit for bit")
    assert exact >= 0.9 * len(found)


def eager(model, batches, optimizer):
    losses = []
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        out = model(batch.to("cuda"), global_supervised=count_of(batch))
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.detach().clone())
    return {"losses": torch.stack(losses), **state_of(model, optimizer)}


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("inside", [True, False], ids=["optimizer inside", "optimizer outside"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_captured_training_is_the_eager_one(build, batches, recipe, inside):
    made = batches(recipe)
    twice = []
    for _ in range(2):
        model = build(recipe)
        twice.append(eager(model, made, adamw(model)))
    model = build(recipe)
    optimizer = adamw(model)
    step, losses = CapturedStep(model, made[0], optimizer=optimizer if inside else None), []
    for batch in step.feed(made):
        losses.append(step(batch, global_supervised=count_of(batch)).loss.clone())
        if not inside:
            optimizer.step()
    assert step.replays == len(made) - 3
    assert not step.fallbacks
    check_equal({"losses": torch.stack(losses), **state_of(model, optimizer)}, *twice)
    if recipe == "delayed":
        assert sum(".amax_history" in name for name in twice[0]) > 8


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("recipe", ["bf16", "current", "delayed"])
def test_captured_windows_add_up_as_eager_ones(build, batches, recipe):
    """Transformer Engine makes the FP8 copies of the weights in the first micro-batch of each window alone."""
    made = batches(recipe)
    windows = [made[0:3], made[3:5], made[5:8], made[7:10], made[1:4]]

    def run(step, model):
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for window in windows:
            count = torch.stack([count_of(batch) for batch in window]).sum()
            for n, batch in enumerate(window):
                losses.append(step(batch, count, n == 0).clone())
            optimizer.step()
        return {"losses": torch.stack(losses), **state_of(model)}

    def plainly(model):
        def step(batch, count, first):
            if first:
                model.zero_grad(set_to_none=True)
            out = model(batch.to("cuda"), global_supervised=count, is_first_microbatch=first)
            out.loss.backward()
            return out.loss.detach()

        return step

    twice = [run(plainly(model), model) for model in (build(recipe), build(recipe))]
    model = build(recipe)
    step = CapturedStep(model, made[0], warmup=1)
    found = run(lambda batch, count, first: step(batch, global_supervised=count, is_first_microbatch=first).loss, model)
    assert step.replays == sum(map(len, windows[1:]))
    check_equal(found, *twice)


def test_a_batch_of_another_shape_runs_eagerly_in_between(build, batches, measure, examples):
    model, plain, made = build("block"), build("block"), batches("block")
    other = Collator(measure=measure, rule=align("block"))([examples[1], examples[2]]).pin_memory()
    step = CapturedStep(model, made[0], warmup=1)
    for batch in (made[0], made[4], other, made[1], made[5]):
        plain.zero_grad(set_to_none=True)
        expected = plain(batch.to("cuda"), global_supervised=count_of(batch))
        expected.loss.backward()
        out = step(batch, global_supervised=count_of(batch))
        assert torch.equal(out.loss, expected.loss)
        grads = [p.grad for p in plain.parameters()]
        for ours, theirs in zip([p.grad for p in model.parameters()], grads, strict=True):
            assert (ours - theirs).norm() <= 1e-2 * theirs.norm()
    assert step.fallbacks == {"another input_ids": 1}
    assert step.replays == 3
    where = [p.grad.data_ptr() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    step(made[2], global_supervised=99)
    assert [p.grad.data_ptr() for p in model.parameters()] == where


def test_nothing_is_overwritten_while_it_is_read(build, batches):
    """Sixty batches without a pause; the host is far ahead of the device, and of what is copied."""
    model, made = build("bf16"), batches("bf16")
    expected = [model(batch.to("cuda"), global_supervised=99).loss.item() for batch in made]
    step = CapturedStep(model, made[0], warmup=1)
    losses = [step(batch, global_supervised=99).loss.clone() for batch in step.feed(made * 6)]
    assert torch.stack(losses).tolist() == pytest.approx(expected * 6, rel=1e-6)
    paged = [step(batch, global_supervised=99).loss.clone() for batch in batches("bf16") * 2]  # not sent ahead
    there = [step(batch.to("cuda"), global_supervised=99).loss.clone() for batch in made]
    assert torch.stack(paged + there).tolist() == pytest.approx(expected * 3, rel=1e-6)
    assert step.replays == 6 * len(made) - 1 + 3 * len(made)


def test_a_static_step_waits_for_nothing(build, batches):
    model, made = build("current"), batches("current")
    on_gpu = [batch.to("cuda") for batch in made]
    counts = [count_of(batch) for batch in made]
    step = CapturedStep(model, made[0], warmup=1)
    for batch in made[:2]:
        model(batch.to("cuda"), global_supervised=99).loss.backward()
        step(batch, global_supervised=99)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch, count in zip(on_gpu, counts, strict=True):
            model(batch, global_supervised=count).loss.backward()
        for batch in step.feed(made):
            step(batch, global_supervised=batch.num_supervised)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_keeps_what_it_reads():
    """Tensors that only the step knew would be others' memory by now."""
    weight = torch.nn.Linear(64, 1, bias=False, device="cuda")
    given = torch.full((1 << 20, 64), 0.5, device="cuda")
    expected, stream = weight(given).sum().item(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        weight(given).sum().backward()
    weight.weight.grad = None
    torch.cuda.synchronize()

    def run(given=given):
        out = weight(given).sum()
        out.backward()
        return out.detach()

    graph = Graph(run, weight, None, stream=stream)
    del given, run
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 20, 64), float("nan"), device="cuda") for _ in range(4)]
    graph.replay()
    assert graph.out.item() == pytest.approx(expected, rel=1e-6)
    assert weight.weight.grad.mean().item() == pytest.approx(0.5 * (1 << 20), rel=1e-6)
    del junk


_WAITS = """
import sys, torch
from packfp8 import ConfigError, Measure, align
from packfp8.data import Collator, Example, Turn
from packfp8.model import PackedModel
from packfp8.model.captured import CapturedStep
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder

class Waits(PlainDecoder):
    def forward(self, embeddings, **told):
        return super().forward(embeddings, **told) * (1 + 0 * embeddings.sum().item())

rule = align("bf16")
collator = Collator(measure=Measure(frames=None), rule=rule, static=True, budget=64, max_sequences=2)
batch = collator([Example(id="a", turns=(Turn("assistant", ("hello",)),))])
model = PackedModel(encoder=None, projector=None, llm=Waits(DecoderSizes(vocab=272)).cuda(), rule=rule, consumer="plain")
step = CapturedStep(model, batch, warmup=1)
step(batch, global_supervised=9)
try:
    step(batch, global_supervised=9)
except ConfigError as fault:
    print(fault)
"""


def test_a_model_that_waits_is_refused_with_the_reason():
    done = subprocess.run([sys.executable, "-c", _WAITS], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert lines[0] == "the step cannot be captured as a CUDA graph", done.stderr[-2000:]
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["got", "expected", "because", "fix"]


def test_a_compiled_model_of_plain_layers_is_captured_too(measure, examples, sizes, frames, plain_state):
    rule = align("bf16")
    collator = Collator(measure=measure, rule=rule, **STATIC)
    made = [collator.collate([examples[n] for n in numbers]) for numbers in EPOCH]
    torch.manual_seed(1)
    encoder, projector = PlainEncoder(width=32).cuda(), PlainProjector(width=32, hidden=sizes.hidden).cuda()
    llm = PlainDecoder(sizes).cuda()
    llm.load_state_dict(plain_state)
    model = PackedModel(encoder=encoder, projector=projector, llm=llm, rule=rule, consumer="plain", frames=frames)
    expected = [model(batch.to("cuda"), global_supervised=99).loss.item() for batch in made]
    model.compile(backend="aot_eager")
    step = CapturedStep(model, made[0], warmup=1)
    losses = [step(batch, global_supervised=99).loss.clone() for batch in step.feed(made)]
    assert torch.stack(losses).tolist() == pytest.approx(expected, rel=1e-4)
    assert step.replays == len(made) - 1
