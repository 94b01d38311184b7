"""Small models and batches on the GPU, for Transformer Engine and torchao: `pytest -m gpu tests/gpu`."""

import importlib.metadata

import numpy as np
import pytest
import torch

from packfp8.data import Clip, Collator, Example, Turn
from packfp8.lengths import AudioFrames, Measure
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder

SIZES = DecoderSizes(vocab=272, hidden=128, ffn=256, layers=2, heads=4, kv_heads=2)
FRAMES = AudioFrames.fastconformer()


def pytest_report_header():
    names = ("torch", "transformer_engine", "torchao")
    found = {d.metadata["Name"].lower().replace("-", "_"): d.version for d in importlib.metadata.distributions()}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return ", ".join([gpu, *(f"{name} {found.get(name, 'absent')}" for name in names), f"CUDA {torch.version.cuda}"])


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu"):  # what the GPU libraries warn of is theirs, and changes with their versions
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def sizes():
    return SIZES


@pytest.fixture(scope="session")
def frames():
    return FRAMES


@pytest.fixture(scope="session")
def measure():
    return Measure(frames=FRAMES)


@pytest.fixture(scope="session")
def examples():
    """Twelve examples: speech, text, two clips, and a very short one."""
    generator = np.random.default_rng(0)

    def clip(samples):
        wave = 0.1 * generator.standard_normal(samples).astype(np.float32)
        return Clip(source=wave, num_samples=samples, sample_rate=16_000)

    made = []
    for n in range(10):
        parts = (clip(int(generator.integers(8_000, 90_000))),) if n % 3 else ("name a colour",)
        made.append(Example(id=f"e{n}", turns=(Turn("user", parts), Turn("assistant", ("word " * (n + 1),)))))
    two = (clip(9_000), " and ", clip(30_000))
    made.append(Example(id="two clips", turns=(Turn("user", two), Turn("assistant", ("the second",)))))
    return [*made, Example(id="short", turns=(Turn("assistant", ("a",)),))]


@pytest.fixture(scope="session")
def collate(measure, examples):
    """collate(rule, examples=..., **options of the collator) -> the batch, on the GPU."""

    def collate(rule, chosen=None, **options):
        batch = Collator(measure=measure, rule=rule, **options)(examples if chosen is None else chosen)
        return batch.pin_memory().to("cuda", non_blocking=True)

    return collate


@pytest.fixture
def plain_state():
    """Parameters of the plain decoder, in float32, the same every time; large enough that everything matters."""
    torch.manual_seed(0)
    decoder = PlainDecoder(SIZES)
    for weight in (decoder.embedding.weight, decoder.head.weight):
        torch.nn.init.normal_(weight, std=0.1)
    return decoder.state_dict()


@pytest.fixture
def distance():
    """distance(a, b) -> the norm of their difference over the norm of b, for tensors or dicts of tensors."""

    @torch.no_grad()
    def distance(a, b):
        pairs = [(a[name], b[name]) for name in b] if isinstance(b, dict) else [(a, b)]
        difference = sum((x.double() - y.double().to(x.device)).square().sum() for x, y in pairs)
        return float((difference / sum(y.double().square().sum() for _, y in pairs).to(difference.device)).sqrt())

    return distance
