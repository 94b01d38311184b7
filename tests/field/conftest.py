"""What the catalogue shares: documents whose words are token ids, batches of all CP ranks, a small exact model, real processes.

Each test of this folder is a kind of fault that people met in public when packing or collating, as the behaviour that we owe
them: one sentence of context, where it was reported, the input, and the behaviour as the test's name.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from packfp8 import Topology, align
from packfp8.data import Clip, Collator, Example, Turn
from packfp8.lengths import AudioFrames, Measure, Template
from packfp8.model import PackedModel
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder
from packfp8.model.plain_encoder import PlainEncoder, PlainProjector

BARE = Template(roles={"system": ("", ""), "user": ("", ""), "assistant": ("", "")}, prompt="", eos=False)


def words(text):
    """Token ids, spelled in words; another word is 0 (a measure's fingerprint tokenises a text of its own)."""
    return [int(word) if word.isascii() and word.isdigit() else 0 for word in text.split()]


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def lines_of():
    """A function from a PackError to its five lines by name; none of them may be empty."""

    def lines_of(error):
        what, *rest = str(error).split("\n")
        named = {"what": what} | {name.strip(): text.strip() for name, text in (line.split(":", 1) for line in rest)}
        assert list(named) == ["what", "got", "expected", "because", "fix"]
        assert all(named.values())
        return named

    return lines_of


@pytest.fixture(scope="session")
def measure():
    """Words are ids, nothing stands around them; a frame of audio is 16 samples."""
    return Measure(frames=AudioFrames.linear(16), tokenizer=words, template=BARE)


@pytest.fixture(scope="session")
def docs():
    """docs(3, "4 5") -> a document of 3 tokens 1 2 3 and one of the tokens 4 5, all supervised, named "0" and "1"."""

    def text(given):
        return given if isinstance(given, str) else " ".join(str(1 + n % 200) for n in range(given))

    return lambda *given: [Example(id=str(n), turns=(Turn("assistant", (text(one),)),)) for n, one in enumerate(given)]


@pytest.fixture(scope="session")
def spoken():
    """spoken(frames, ..., answer="1 2", name="speech") -> an example with a clip of so many frames each, and an answer."""

    def spoken(*frames, answer="1 2", name="speech"):
        waves = [np.random.default_rng(n).normal(0, 0.1, n * 16).astype(np.float32) for n in frames]
        clips = tuple(Clip(source=wave, num_samples=wave.size, sample_rate=16_000) for wave in waves)
        return Example(id=name, turns=(Turn("user", clips), Turn("assistant", (answer,))))

    return spoken


@pytest.fixture(scope="session")
def collate(measure):
    """collate(items, recipe, layout, cp=..., tp=..., sp=..., **options) -> the batches of all CP ranks, in rank order."""

    def collate(items, recipe="block", layout="thd", *, cp=1, tp=1, sp=False, dp=1, **options):
        rules = [align(recipe, Topology(dp=dp, cp=cp, cp_rank=rank, tp=tp, sp=sp), layout=layout) for rank in range(cp)]
        return [Collator(**{"measure": measure, "rule": rule, **options}).collate(items) for rule in rules]

    return collate


@pytest.fixture(scope="session")
def model_of():
    """model_of(rule, **changes) -> a PackedModel of text in float64, the same parameters every time."""

    def model_of(rule, *, audio=False, **changes):
        torch.manual_seed(0)
        llm = PlainDecoder(DecoderSizes(vocab=272, hidden=16, ffn=24, layers=2, heads=4, kv_heads=2))
        parts = {"encoder": None, "projector": None}
        if audio:
            frames = AudioFrames.fastconformer()
            parts = {"encoder": PlainEncoder(width=8, mel_bins=10), "projector": PlainProjector(width=8, hidden=16)}
            parts["frames"] = frames
        model = PackedModel(**{**parts, "llm": llm, "consumer": "plain", "rule": rule, **changes}).double()
        for name, parameter in model.named_parameters():  # away from the small start, so that everything matters
            if name.endswith(("embedding.weight", "head.weight")):
                torch.nn.init.normal_(parameter, std=0.5)
        return model

    return model_of


@pytest.fixture
def sound(tmp_path):
    """sound(name, samples, rate) writes so many samples of noise, or an array, and returns the path."""

    def sound(name, samples, rate=16_000):
        if isinstance(samples, int):
            samples = np.random.default_rng(0).normal(0, 0.1, samples)
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, samples, rate)
        return path

    return sound


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """What real processes found (gloo, CPU): world size -> scenario -> one result for each rank. See `ranks.py`."""
    folder, root = tmp_path_factory.mktemp("ranks"), str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    script = Path(__file__).parent / "ranks.py"
    told = subprocess.run([sys.executable, script, folder], env=env, stderr=subprocess.PIPE, text=True, timeout=280)
    assert told.returncode == 0, told.stderr
    return torch.load(folder / "all.pt", weights_only=False)
