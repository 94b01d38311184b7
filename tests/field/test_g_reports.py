"""G. Reports and reuse: what is said of steps, shapes and speed, and what may be taken up again."""

import json
from itertools import pairwise

import numpy as np
import pytest

from packfp8 import ByteTokenizer, Measure, StateError, Template, Topology, align
from packfp8.data import PackingSampler
from packfp8.errors import ConfigError
from packfp8.report import report
from packfp8.report.payoff import payoff

LINES = [
    {"audio_filepath": f"{n}.wav", "duration": 1 + n * 37 % 50 / 4, "text": "wörter und  " * (1 + n % 5)} for n in range(300)
]


@pytest.mark.parametrize("dp", [1, 3])
def test_steps_are_an_exact_dry_run_and_the_sampler_has_no_length(dp, tmp_path, docs, measure):
    """An estimate forgot that efficiency is below 1 and that ranks differ: 230, 232 and 227 steps. `__len__` counted cuts.

    axolotl-ai-cloud/axolotl#3152; lhotse-speech/lhotse#212, #1337. Here all ranks have as many steps, counted by the sampler.
    """
    lengths = [1 + n * 61 % 90 for n in range(697)]
    np.save(tmp_path / "lengths.npy", lengths)
    found = report(tmp_path / "lengths.npy", budget=128, topology=Topology(dp=dp))
    samplers = [
        PackingSampler(
            docs(*lengths), measure=measure, rule=align("bf16", Topology(dp=dp, dp_rank=rank)), budget=128, shuffle=False
        )
        for rank in range(dp)
    ]
    steps = [sum(1 for _ in sampler) for sampler in samplers]
    assert len(set(steps)) == 1
    assert steps[0] == sum(1 for _ in samplers[0].forecast())
    assert abs(found.steps - steps[0]) <= 0.02 * steps[0]  # the report walks one shuffled order, this test another
    assert found.steps == -(-found.packs // dp)
    with pytest.raises(TypeError):
        len(samplers[0])


def test_figures_that_stand_for_more_than_was_walked_say_so(tmp_path):
    """The same reports: an estimate must be labelled. 100,001 examples, of which 100,000 are walked."""
    said = []
    for count in (3000, 100_001):
        np.save(tmp_path / f"{count}.npy", np.full(count, 16))
        found = report(tmp_path / f"{count}.npy", budget=4096)
        said.append((found.walked, any("drawn at random" in str(part) for part in found.table().renderables)))
    assert said == [(3000, False), (100_000, True)]


def test_a_state_is_refused_under_another_split_recipe_tokenizer_budget_or_seed(docs, measure, lines_of):
    """Packs made for cp 1 were reused for cp 2. Nothing is cached here; what can be taken up again is a sampler's state.

    NVIDIA-NeMo/Megatron-Bridge#1867.
    """

    def sampler(recipe="block", cp=1, measure=measure, budget=64, seed=0):
        rule = align(recipe, Topology(cp=cp))
        return PackingSampler(docs(5, 6, 7), measure=measure, rule=rule, budget=budget, seed=seed)

    one = sampler()
    next(iter(one))
    state = one.state_dict()
    sampler().load_state_dict(state)
    tokenizer = Measure(frames=measure.frames, tokenizer=ByteTokenizer(), template=measure.template)
    template = Measure(frames=measure.frames, tokenizer=measure.tokenizer, template=Template(eos=0))
    frames = Measure(frames=measure.frames.stacked(2), tokenizer=measure.tokenizer, template=measure.template)
    changes = {
        "rule": [{"cp": 2}, {"recipe": "mxfp8"}],
        "measure": [{"measure": tokenizer}, {"measure": template}, {"measure": frames}],
        "budget": [{"budget": 80}],
        "seed": [{"seed": 1}],
    }
    for name, several in changes.items():
        for change in several:
            with pytest.raises(StateError) as refusal:
                sampler(**change).load_state_dict(state)
            assert lines_of(refusal.value)["what"] == f"the state was saved under another {name}"


class SlowAtSmallSizes:
    """A timer of a GPU on which FP8 loses below 8,192 tokens, and of which one case cannot be timed."""

    device, versions, recipes = "none", {}, ("current",)

    def baseline(self, recipe):
        return "bf16"

    def blocks(self, recipe):
        return ("linear",)

    def time(self, case):
        return (1.0 + case.tokens / 4096,) * 3 if case.recipe == "bf16" else (2.0 + case.tokens / 8192,) * 3


def test_no_speed_is_claimed_that_was_not_measured():
    """FP8 lost to BF16 at small GEMMs, unsaid. 1,024 tokens and 32,768, hidden 1,024; and a recipe without a timing.

    NVIDIA/TransformerEngine#445; pytorch/ao#1297; huggingface/accelerate#2597. On a GPU: `tests/gpu/test_field_gpu.py`.
    """
    found = payoff(hidden=1024, tokens=(1024, 32_768), timer=SlowAtSmallSizes())
    assert "losing side" in found.verdict("current", 1024)
    assert "on the winning side for current" in found.verdict("current", 32_768)
    assert found.wins_from("linear", "current", "eager") == 32_768
    assert "no timing of block" in found.verdict("block", 32_768)
    with pytest.raises(ConfigError, match="token counts cannot be timed"):
        payoff(hidden=1024, tokens=(1000,), timer=SlowAtSmallSizes())


# More of the same kind: manifests from Windows, under names with spaces, in every format.


def manifest(folder, kind, end):
    """LINES as a manifest of this kind whose lines end so."""
    folder.mkdir(parents=True)
    if kind == "kaldi":
        (folder / "utt2dur").write_bytes(b"".join(f"u{n} {x['duration']}{end}".encode() for n, x in enumerate(LINES)))
        (folder / "text").write_bytes(b"".join(f"u{n} {x['text'].strip()}{end}".encode() for n, x in enumerate(LINES)))
        return folder
    path = folder / f"my data (1).{kind}"
    if kind == "jsonl":
        path.write_bytes(b"".join(json.dumps(line, ensure_ascii=False).encode() + end.encode() for line in LINES))
    else:
        rows = ["duration,text", *(f'{x["duration"]},"{x["text"].strip()}"' for x in LINES)]
        path.write_bytes(b"".join(row.encode() + end.encode() for row in rows))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "kaldi"])
@pytest.mark.parametrize("folder", ["plain", "my data, «größer» #1"])
def test_windows_line_ends_and_names_with_spaces_change_no_figure(kind, folder, tmp_path):
    """The same 300 lines ended by \\n, by \\r\\n, and by \\r\\n after a byte-order mark, found by name and by pattern."""
    told = []
    for n, end in enumerate(("\n", "\r\n")):
        path = manifest(tmp_path / str(n) / folder, kind, end)
        told.append(report(path, budget=256, tokenizer=ByteTokenizer()).to_dict())
    if kind != "kaldi":
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        told.append(report(path, budget=256, tokenizer=ByteTokenizer()).to_dict())
        told.append(report(path.parent / "my*", budget=256, tokenizer=ByteTokenizer()).to_dict())
    assert told[0]["examples"] == 300
    assert told[0]["rejected"] == 0
    assert all(one == other for one, other in pairwise(told))


@pytest.mark.parametrize("budget", [63, 64, 65, 127, 128, 129])
def test_a_report_floors_the_budget_as_the_sampler_does(budget, tmp_path, docs, measure):
    """cp 2 and block: packs of 32. One token below, at and above a multiple, both count packs of the same capacity."""
    lengths = [1 + n * 7 % 60 for n in range(100)]
    np.save(tmp_path / "lengths.npy", lengths)
    found = report(tmp_path / "lengths.npy", budget=budget, recipe="block", topology=Topology(cp=2))
    assert found.capacity == budget // 32 * 32
    rule = align("block", Topology(cp=2))
    sampler = PackingSampler(docs(*lengths), measure=measure, rule=rule, budget=budget, over_budget="set_aside")
    packed = sum(len(part) for part in sampler)
    assert packed == found.examples - found.over_budget
    assert all(sum(rule.slot(one.tokens) for one in part) <= found.capacity for (part,) in sampler.forecast())
