"""torch.compile: static batches compile once an epoch, others once for each shape, and the checks stay outside."""

import pytest
import torch
from torch._dynamo.utils import counters

from packfp8.data import Collator
from packfp8.errors import ConfigError
from packfp8.rule import align

pytestmark = pytest.mark.filterwarnings("ignore")  # dynamo warns of torch's own code
RULE = align("block")
STATIC = {"static": True, "budget": 256, "max_sequences": 6, "frame_budget": 40}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def epoch(measure, mixed):
    """epoch(chosen, ...) -> a batch of each list of examples, at steps 0, 1, 2, ..."""

    def epoch(*chosen, **options):
        collator = Collator(measure=measure, rule=RULE, **options)
        return [collator.collate([mixed[n] for n in numbers], step=step) for step, numbers in enumerate(chosen)]

    return epoch


def gradients(model, batch, count):
    model.zero_grad()
    out = model(batch, global_supervised=count)
    out.loss.backward()
    return [out.loss, *(parameter.grad for parameter in model.parameters())]


def compiled(build, backend, **changes):
    model = build(RULE, **changes)
    model.compile(backend=backend, dynamic=False)
    return model


@pytest.mark.parametrize(("backend", "options"), [("aot_eager", {}), ("eager", {"loss_rows": 40})])
def test_static_batches_compile_once_without_a_graph_break(build, epoch, backend, options):
    model, plain = compiled(build, backend, **options), build(RULE, **options)
    batches = epoch([0, 1, 2], [3], [2], [], [4, 5, 1, 0], **STATIC)
    for batch in batches:
        count = max(1, batch.num_supervised)  # a number, another one for each batch
        for ours, theirs in zip(gradients(model, batch, count), gradients(plain, batch, count), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
        assert counters["stats"]["unique_graphs"] == 1
    assert len({batch.num_supervised for batch in batches}) == 5
    assert not counters["graph_break"]


def test_other_batches_compile_once_for_each_shape(build, epoch):
    model = compiled(build, "eager")
    chosen = ([0], [2], [3], [0], [3], [2])
    batches = epoch(*chosen)
    for batch in batches:
        gradients(model, batch, 99)
    shapes = {(b.input_ids.shape, b.cu_seqlens.shape, b.audio.shape, b.audio_source.shape, b.max_seqlen) for b in batches}
    assert len(shapes) == 3
    assert counters["stats"]["unique_graphs"] == 3
    assert not counters["graph_break"]


def test_compiling_the_module_from_outside_compiles_once_too(build, epoch):
    """The checks are looked at then as well, which breaks the graph before the model, and not within."""
    model = torch.compile(build(RULE), backend="eager", dynamic=False)
    batches = epoch([0, 1, 2], [3], [], **STATIC)
    for batch in batches:
        gradients(model, batch, torch.tensor(99))
        assert counters["stats"]["unique_graphs"] == 1


def test_a_compiled_model_refuses_as_before(build, epoch):
    model = compiled(build, "eager")
    with pytest.raises(ConfigError, match="global_supervised is less than"):
        model(epoch([0], **STATIC)[0], global_supervised=1)
    assert not counters["stats"]["unique_graphs"]
