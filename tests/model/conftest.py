"""A small exact model, examples of every kind, and CP ranks as threads that hand their keys to each other."""

import copy
import threading

import numpy as np
import pytest
import torch

from packfp8.data import Clip, Collator, Example, Turn
from packfp8.lengths import AudioFrames, Measure, Template
from packfp8.model import PackedModel
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder, own
from packfp8.model.plain_encoder import PlainEncoder, PlainProjector
from packfp8.rule import Topology, align

SIZES = DecoderSizes(vocab=272, hidden=16, ffn=24, layers=2, heads=4, kv_heads=2)
FRAMES = AudioFrames.fastconformer()


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def measure():
    """A system turn has no marks, so that a sequence can be a single token."""
    roles = {**Template().roles, "system": ("", "")}
    return Measure(frames=FRAMES, template=Template(roles=roles))


@pytest.fixture(scope="session")
def make_clip():
    def make_clip(samples, seed=0):
        source = 0.1 * np.random.default_rng(seed).standard_normal(samples).astype(np.float32)
        return Clip(source=source, num_samples=samples, sample_rate=16_000)

    return make_clip


@pytest.fixture(scope="session")
def mixed(make_clip):
    """Audio and text, two clips in one example, text alone, a clip alone (nothing supervised), one token."""
    user, answer = (lambda *parts: Turn("user", parts)), (lambda text: Turn("assistant", (text,)))
    return [
        Example(id="speech", turns=(user(make_clip(9_000, 1)), answer("good morning"))),
        Example(id="one token", turns=(Turn("system", ("a",)),)),
        Example(id="text", turns=(user("name a colour"), answer("blue"))),
        Example(id="two clips", turns=(user("compare ", make_clip(400, 2), " and ", make_clip(20_000, 3)), answer("longer"))),
        Example(id="clip alone", turns=(user("", make_clip(5_000, 4)),)),
        Example(id="turns", turns=(user(make_clip(1_700, 5)), answer("no"), user("sure?"), answer("yes"))),
    ]


@pytest.fixture
def build():
    """build(rule) -> a PackedModel in float64, with the same parameters every time."""

    def build(rule, **changes):
        torch.manual_seed(0)
        parts = {
            "encoder": PlainEncoder(width=8, mel_bins=10),
            "projector": PlainProjector(width=8, hidden=SIZES.hidden),
            "llm": PlainDecoder(SIZES),
            "frames": FRAMES,
        }
        model = PackedModel(**{**parts, "consumer": "plain", "loss_chunk_tokens": 50, **changes}, rule=rule).double()
        for name, parameter in model.named_parameters():  # away from the small start, so that everything matters
            if name.endswith(("embedding.weight", "head.weight")):
                torch.nn.init.normal_(parameter, std=0.5)
        return model

    return build


@pytest.fixture
def run_ranks(build, measure):
    """run_ranks(examples, recipe, layout, cp) -> the model, and each CP rank's (batch, output), joined in one graph."""

    def run_ranks(examples, recipe="bf16", layout="thd", cp=1, *, tp=1, sp=False, change=lambda batch: batch, **collator):
        rules = [align(recipe, Topology(cp=cp, cp_rank=r, tp=tp, sp=sp), layout=layout) for r in range(cp)]
        batches = [change(Collator(measure=measure, rule=rule, **collator).collate(examples)) for rule in rules]
        model = build(rules[0])
        count = sum(batch.num_supervised for batch in batches)
        if cp > 1:
            outputs = _in_threads(model, rules, batches, count)
        else:
            outputs = [model(batches[0], global_supervised=count, return_logits=True)]
        return model, batches, outputs

    return run_ranks


def _in_threads(model, rules, batches, count):
    peers, shelf, results = threading.Barrier(len(rules), timeout=30), {}, {}
    this = threading.local()

    def gather(tensor, dim):
        shelf[this.rank] = tensor
        peers.wait()
        joined = torch.cat([shelf[rank] for rank in range(len(rules))], dim)
        peers.wait()
        return joined

    def work(rank):
        this.rank = rank
        local = copy.copy(model)  # the same parameters, another rank's rule
        local.rule = rules[rank]
        try:
            results[rank] = local(batches[rank], global_supervised=count, return_logits=True)
        except BaseException:
            peers.abort()
            raise

    model.llm.gather = gather
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(rules))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model.llm.gather = own
    return [results[rank] for rank in range(len(rules))]
