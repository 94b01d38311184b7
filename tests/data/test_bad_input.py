"""Bad input through the collator: one clear error each, read line by line; set aside, it leaves the rest as it was."""

import numpy as np
import pytest
import torch

from packfp8.data import Example, Turn
from packfp8.errors import AudioError, BudgetError, ExampleError, LengthError, PackError

LAYOUTS = ["thd", "bshd"]
DURATION = {
    "expected": "a finite duration of at least one sample at 16000 Hz",
    "because": "a clip without samples has no encoder frame, and a length that is not a number sorts anywhere",
    "fix": "repair or remove the manifest line",
}
NO_TEXT = {
    "expected": "a text that is not empty",
    "because": "without an answer none of its tokens would be supervised, and it would train nothing",
    "fix": "add the transcript, drop the example, or pass packfp8.Example with the turns you mean",
}
MARKS = {
    "expected": "as many marks as clips, in the order in which they are heard",
    "because": "a mark is where the frames of one clip are placed; counted per clip, not per example",
    "fix": "write <|audio|> in the text once for each clip",
}
BROKEN = {
    "expected": "audio that soundfile decodes to its end (wav, flac, ogg, opus, mp3)",
    "because": "what is left of a broken file is not what its text says",
    "fix": "fetch the file again, convert it, or remove the example",
}


def timed(seconds):
    return lambda folder: {"id": "bad", "audio": folder / "good.wav", "duration": seconds, "text": "a"}


def spoken(*messages, clips=0):
    made = [{"role": role, "content": content} for role, content in messages]
    return lambda folder: {"id": "bad", "audio": [folder / "good.wav"] * clips, "messages": made}


CASES = {
    "empty text": (
        lambda folder: {"id": "bad", "text": ""},
        ExampleError,
        {"what": "example 'bad' has no text to learn from", "got": "''", **NO_TEXT},
    ),
    "audio only": (
        lambda folder: {"id": "bad", "audio": folder / "good.wav"},
        ExampleError,
        {"what": "example 'bad' has no text to learn from", "got": "None", **NO_TEXT},
    ),
    **{
        f"duration {seconds}": (
            timed(seconds),
            LengthError,
            {"what": "example 'bad' has an impossible duration", "got": f"{seconds!r} s", **DURATION},
        )
        for seconds in (0.0, -2.86, float("nan"), float("inf"), None)
    },
    "too short for a frame": (
        lambda folder: {"id": "bad", "audio": np.zeros(799, np.float32), "text": "a"},
        LengthError,
        {
            "what": "example 'bad', clip 0 is too short for one encoder frame",
            "got": "799 samples at 16000 Hz, 799 at 16000 Hz",
            "expected": "at least 800 samples at 16000 Hz",
            "because": "a clip without a frame would be heard by nobody, and its answer learned from nothing",
            "fix": "drop the example, or pad the recording",
        },
    ),
    "a mark without a clip": (
        spoken(("user", "<|audio|>"), ("assistant", "a")),
        ExampleError,
        {"what": "example 'bad' does not have one <|audio|> for each clip", "got": "1 marks, 0 clips", **MARKS},
    ),
    "a clip without a mark": (
        spoken(("user", "<|audio|>"), ("assistant", "a"), clips=2),
        ExampleError,
        {"what": "example 'bad' does not have one <|audio|> for each clip", "got": "1 marks, 2 clips", **MARKS},
    ),
    "a mark in a text": (
        lambda folder: {"id": "bad", "audio": folder / "good.wav", "text": "so <|audio|>"},
        ExampleError,
        {
            "what": "example 'bad' has the audio mark <|audio|> in its text",
            "got": "'so <|audio|>'",
            "expected": "clips as parts of the turn, and no mark",
            "because": "the mark would be read as text, and the clip it stands for not heard",
            "fix": "split the text with Template.split(text, clips, id=...)",
        },
    ),
    "a missing file": (
        lambda folder: {"id": "bad", "audio": "lost/speech.wav", "duration": 1.0, "text": "a"},
        AudioError,
        {
            "what": "audio file 'lost/speech.wav' is missing",
            "got": "no file of this name",
            "expected": "a file that can be read here and in every worker",
            "because": "a clip without its audio would train on silence",
            "fix": "correct the path in the manifest; relative paths start at the working directory",
        },
    ),
    "a broken file": (
        lambda folder: {"id": "bad", "audio": b"RIFF and then nothing of a wav", "duration": 1.0, "text": "a"},
        AudioError,
        {"what": "audio in 30 bytes cannot be read", "got": "Format not recognised.", **BROKEN},
    ),
    "a file of another length": (
        lambda folder: {"id": "bad", "audio": folder / "good.wav", "duration": 4.0, "text": "a"},
        AudioError,
        {
            "what": "audio file 'FOLDER/good.wav' is not as long as its manifest says",
            "got": "16000 samples at 16000 Hz",
            "expected": "64000 samples, within 800",
            "because": "its place in the pack was decided from the declared length",
            "fix": "correct the manifest, name where the clip begins if a part is meant, or allow a larger tolerance",
        },
    ),
    "an unknown role": (
        spoken(("narrator", "once"), ("assistant", "a")),
        ExampleError,
        {
            "what": "example 'bad' has a turn of an unknown role",
            "got": "'narrator'",
            "expected": "one of system, user, assistant",
            "because": "only assistant turns are learned from, so the role decides what is supervised",
            "fix": "rename the role in the example's messages",
        },
    ),
    "an unknown role in an Example": (
        lambda folder: Example(id="bad", turns=(Turn("narrator", ("once",)),)),
        ExampleError,
        {
            "what": "example 'bad' has a turn of a role that the template does not know",
            "got": "'narrator'",
            "expected": "one of system, user, assistant",
            "because": "the role decides the marks around a turn, and only the assistant's text is learned",
            "fix": "rename the role, or give its marks: Template(roles={..., role: (before, after)})",
        },
    ),
    "an Example of nothing": (
        lambda folder: Example(id="bad", turns=()),
        ExampleError,
        {
            "what": "example 'bad' has no token",
            "got": "0 turns, all empty",
            "expected": "at least one token of text or audio",
            "because": "a sequence of no tokens has no slot in a pack",
            "fix": "drop the example, or give it text or a clip",
        },
    ),
    "an unknown type": (
        lambda folder: 3.5,
        ExampleError,
        {
            "what": "item 1 of the batch is of a type that is not known",
            "got": "float",
            "expected": "packfp8.Example, a lhotse cut or TextExample, or a dict",
            "because": "its audio and text cannot be found without knowing its fields",
            "fix": "map the dataset to dicts with 'audio' and 'text', or build packfp8.Example yourself",
        },
    ),
}


@pytest.fixture
def folder(wav):
    return wav("good.wav", 16_000).parent


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_a_bad_item_is_refused_line_by_line(collator_of, rule_of, lines_of, folder, examples, case, layout):
    make, kind, lines = CASES[case]
    with pytest.raises(PackError) as caught:
        collator_of(rule_of(layout=layout))([examples[0], make(folder), examples[1]])
    assert type(caught.value) is kind
    assert lines_of(caught.value) == {name: line.replace("FOLDER", str(folder)) for name, line in lines.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_item_is_set_aside_with_that_reason_and_the_rest_is_as_without_it(batches_of, folder, examples, case):
    make, _, lines = CASES[case]
    (batch,) = batches_of([examples[0], make(folder), examples[1]], on_fault="set_aside")
    (left,) = batch.set_aside
    assert left.id == ("example-1" if case == "an unknown type" else "bad")
    assert left.reason.split("\n")[0] == lines["what"].replace("FOLDER", str(folder))
    (sound,) = batches_of(examples[:2])
    assert batch.ids == sound.ids
    assert batch.checksum == sound.checksum
    assert torch.equal(batch.audio, sound.audio)


# ---- what is not a bad item


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_batch_is_refused(collator_of, rule_of, lines_of, layout):
    with pytest.raises(ExampleError) as caught:
        collator_of(rule_of(layout=layout))([])
    assert lines_of(caught.value) == {
        "what": "the batch is empty",
        "got": "no examples",
        "expected": "at least one",
        "because": "a batch of no token is refused by the kernels, and a rank that skips a step hangs the others",
        "fix": "check the filters before the loader; PackingSampler gives ranks without examples a pack of zero weight",
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_alone_is_legal(collator_of, rule_of, layout):
    batch = collator_of(rule_of(layout=layout))([{"text": "one"}, {"text": "two", "prompt": "say it: "}])
    assert batch.num_supervised == 8
    assert batch.audio.numel() == 0


@pytest.mark.parametrize("make", [lambda: {"text": "a"}, lambda: "a", lambda: Example(id="x", turns=()), lambda: 5])
def test_one_item_in_place_of_a_list_is_refused(collator_of, rule_of, lines_of, make):
    with pytest.raises(ExampleError) as caught:
        collator_of(rule_of())(make())
    assert lines_of(caught.value) == {
        "what": "the batch is one item and not a list of them",
        "got": type(make()).__name__,
        "expected": "a list of examples, cuts or dicts, or a CutSet",
        "because": "a pack is made of the examples of a batch; DataLoader(batch_size=None) hands over what the dataset returns",
        "fix": "give DataLoader a batch_size, or let the dataset return lists",
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", [31, 1, 0])
def test_a_budget_below_the_least_pack_is_refused_before_any_batch(collator_of, rule_of, lines_of, layout, budget):
    rule = rule_of(layout=layout, cp=2)
    collator_of(rule, budget=32)
    with pytest.raises(BudgetError) as caught:
        collator_of(rule, budget=budget)
    assert lines_of(caught.value) == {
        "what": "the budget is below the least pack",
        "got": f"{budget} tokens",
        "expected": "at least 32 tokens",
        "because": f"block, {layout.upper()}, dp 1, cp 2, tp 1, weights trained makes packs of multiples of 32 tokens",
        "fix": "raise the budget to a multiple of 32, or lower cp or tp",
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_example_over_the_budget_is_refused_and_never_cut(collator_of, rule_of, lines_of, examples, layout):
    with pytest.raises(BudgetError) as caught:
        collator_of(rule_of(layout=layout), budget=100)([examples[5]])
    lines = lines_of(caught.value)
    assert lines["what"] == "example 'long' does not fit the pack"
    assert lines["because"] == "the budget is a bound, not an aim, and neither audio nor text is ever cut"
    assert (
        lines["fix"]
        == "raise the budget, give PackingSampler the same, or a batch fewer examples, or choose over_budget='set_aside'"
    )
