"""What the data room's tests share: examples whose every sample tells where it belongs, collators, errors line by line."""

import numpy as np
import pytest
import soundfile

from packfp8.data import Clip, Collator, Example, Turn
from packfp8.lengths import AudioFrames, Measure, Template
from packfp8.rule import Topology, align

SAMPLES_PER_FRAME = 800  # 20 frames a second


@pytest.fixture(scope="session")
def lines_of():
    """A function from a PackError to its five lines by name; none of them may be empty."""

    def lines_of(error):
        what, *rest = str(error).split("\n")
        lines = [line.split(":", 1) for line in rest]
        assert [name.strip() for name, _ in lines] == ["got", "expected", "because", "fix"]
        named = {"what": what} | {name.strip(): text.strip() for name, text in lines}
        assert all(named.values())
        return named

    return lines_of


@pytest.fixture(scope="session")
def measure():
    return Measure(frames=AudioFrames.linear(SAMPLES_PER_FRAME))


@pytest.fixture(scope="session")
def make_clip():
    """A function (name, frames) -> a clip in which every sample of frame n is `name + n / 1024`, exact in float32."""

    def make_clip(name, frames):
        wave = (name + np.arange(frames) / 1024).astype(np.float32).repeat(SAMPLES_PER_FRAME)
        return Clip(source=wave, num_samples=wave.size, sample_rate=16_000)

    return make_clip


@pytest.fixture(scope="session")
def examples(make_clip):
    """Seven conversations: one clip, two clips, text alone, an answer of one letter, several turns, a long one, a short one."""
    user, answer = (lambda *parts: Turn("user", parts)), (lambda text: Turn("assistant", (text,)))
    turns = {
        "one clip": (user(make_clip(1, 7)), answer("yes")),
        "two clips": (user("Compare ", make_clip(2, 5), " with ", make_clip(3, 9), "."), answer("They differ.")),
        "text": (Turn("system", ("Be brief.",)), user("Hello"), answer("Hi")),
        "letter": (answer("a"),),
        "talk": (user(make_clip(4, 3)), answer("one"), user("and?", make_clip(5, 1)), answer("two")),
        "long": (user("x" * 61, make_clip(6, 40)), answer("y" * 33)),
        "short": (user(make_clip(7, 1)), answer("z")),
    }
    return [Example(id=name, turns=turns) for name, turns in turns.items()]


@pytest.fixture(scope="session")
def docs():
    """A function from texts such as "1 2 3" to one example for each, named by its number, all of it supervised."""
    return lambda *texts: [Example(id=str(n), turns=(Turn("assistant", (text,)),)) for n, text in enumerate(texts)]


@pytest.fixture(scope="session")
def bare():
    """A function from a rule and options to a collator of `docs`: words are ids, and nothing stands around them."""
    template = Template(roles={"assistant": ("", ""), "user": ("", "")}, prompt="", eos=False)
    measure = Measure(frames=None, tokenizer=lambda text: [int(word) for word in text.split()], template=template)
    return lambda rule, **options: Collator(**{"measure": measure, "rule": rule, **options})


@pytest.fixture(scope="session")
def rule_of():
    """A function from a recipe, layout and sizes to the rule of one rank."""

    def rule_of(recipe="block", layout="thd", **topology):
        return align(recipe, Topology(**topology), layout=layout)

    return rule_of


@pytest.fixture
def collator_of(measure):
    """A function from a rule and options to a collator."""

    def collator_of(rule, **options):
        return Collator(**{"measure": measure, "rule": rule, **options})

    return collator_of


@pytest.fixture
def batches_of(collator_of, rule_of):
    """A function from items to the batches of all CP ranks, in rank order."""

    def batches_of(items, *, recipe="block", layout="thd", cp=1, step=0, tp=1, sp=False, **options):
        rules = [rule_of(recipe, layout, cp=cp, cp_rank=rank, tp=tp, sp=sp) for rank in range(cp)]
        return [collator_of(rule, **options).collate(items, step=step) for rule in rules]

    return batches_of


@pytest.fixture
def wav(tmp_path):
    """A function that writes samples, or so many samples of noise, to a wav file and returns its path."""

    def wav(name, samples, rate=16_000):
        if isinstance(samples, int):
            samples = np.random.default_rng(0).normal(0, 0.1, samples)
        soundfile.write(tmp_path / name, samples, rate, subtype="PCM_16")
        return tmp_path / name

    return wav
