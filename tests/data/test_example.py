"""Whatever shape an item comes in, the same conversation comes out: cuts, dicts, manifests, columns of audio."""

from collections import UserDict
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from lhotse import MonoCut, Recording, SupervisionSegment
from lhotse.cut.text import TextExample

from packfp8.data import Clip, Collator, Example, Turn, as_example, as_examples, corpus
from packfp8.errors import AudioError, ExampleError, LengthError
from packfp8.lengths import AudioFrames, Measure, Template
from packfp8.rule import align


@pytest.fixture
def speech(wav):
    return wav("speech.wav", 24_001)


@pytest.fixture
def cut(speech):
    recording = Recording.from_file(speech)
    made = recording.to_cut()
    said = [(1.0, "world"), (0.0, "hello"), (1.2, None)]
    made.supervisions = [SupervisionSegment(f"s{n}", recording.id, start, 0.3, text=t) for n, (start, t) in enumerate(said)]
    made.custom = {"prompt": "Say: "}
    return made


def tokens_of(collator, item):
    batch = collator([item])
    return batch.input_ids.tolist(), batch.labels.tolist(), batch.audio_destination.tolist(), batch.audio.tolist()


# ---- one conversation in many shapes


def test_every_shape_of_one_utterance_gives_the_same_tokens_and_samples(collator_of, rule_of, speech, cut):
    collator = collator_of(rule_of())
    samples, _ = soundfile.read(speech, dtype="float32")
    text = {"text": "hello world", "prompt": "Say: "}
    turns = [{"role": "user", "content": "Say: <|audio|>"}, {"role": "assistant", "content": "hello world"}]
    nested = {"array": samples, "sampling_rate": 16_000, "path": "gone.wav"}
    items = [
        {"audio": str(speech), **text},
        {"audio": speech, "duration": 24_001 / 16_000, **text},
        {"audio_filepath": str(speech), "duration": 1.5000625, **text},  # a line of a NeMo manifest
        {"audio_filepath": str(speech), "duration": 1.5000625, "offset": 0.0, **text},
        {"audio_filepath": str(speech), "offset": 0.0, **text},
        {"audio": None, "audio_filepath": str(speech), **text},
        {"audio": samples, **text},
        {"audio": samples.tolist(), **text},
        {"audio": torch.from_numpy(samples), **text},
        {"audio": samples.astype(np.float64), "num_samples": 24_001, "sample_rate": 16_000.0, **text},
        {"audio": np.stack([samples, samples]), "num_samples": 24_001, **text},
        {"audio": nested, **text},  # a row of a Hugging Face dataset, decoded
        {"audio": {"bytes": speech.read_bytes(), "path": None}, **text},  # and not decoded
        {"audio": {"array": None, "bytes": None, "path": str(speech)}, **text},
        {"audio": speech.read_bytes(), **text},
        {"audio": cut, **text},
        {"audio": cut.recording, **text},
        {"audio": [speech], "duration": 24_001 / 16_000, **text},
        {"audio": [speech], "messages": turns},
        {"audio": speech, "messages": turns},
        {"audio": [{"path": str(speech), "duration": 24_001 / 16_000}], "messages": turns},
        UserDict({"audio": speech, **text}),
        cut,
        as_example(cut),
        Example(
            id="made",
            turns=(
                Turn("user", ("Say: ", Clip(source=speech, num_samples=24_001, sample_rate=16_000))),
                Turn("assistant", ("hello world",)),
            ),
        ),
    ]
    first = tokens_of(collator, items[0])
    assert len(first[2]) == 24_001 // 800
    for item in items[1:]:
        assert tokens_of(collator, item) == first, item


def test_a_cut_of_the_corpus_is_its_file_and_its_text(collator_of, rule_of):
    collator, cut = collator_of(rule_of()), corpus()[7]
    line = {"audio_filepath": cut.recording.sources[0].source, "duration": cut.duration, "text": cut.supervisions[0].text}
    assert tokens_of(collator, cut) == tokens_of(collator, line)


def test_a_text_example_and_a_dict_of_text_are_the_same_text(collator_of, rule_of):
    collator = collator_of(rule_of())
    assert tokens_of(collator, TextExample(text="good day")) == tokens_of(collator, {"text": "good day"})
    assert as_example(TextExample(text="x"), position=4).id == "example-4"
    assert as_example(TextExample(text="x", custom={"id": "t1"})).id == "t1"


def test_a_part_of_a_file_is_that_part(collator_of, rule_of, speech):
    samples, _ = soundfile.read(speech, dtype="float32")
    collator = collator_of(rule_of())
    for item in ({"offset": 0.5, "duration": 0.75}, {"offset": 0.5, "num_samples": 12_000}):
        batch = collator([{"audio_filepath": speech, "text": "a", **item}])
        assert torch.equal(batch.audio[0], torch.from_numpy(samples[8_000:20_000]))
    rest = collator([{"audio_filepath": speech, "text": "a", "offset": 0.5}])
    assert torch.equal(rest.audio[0], torch.from_numpy(samples[8_000:]))


def test_clips_of_a_conversation_stand_where_their_marks_are_in_the_order_heard(make_clip):
    waves = [make_clip(n, 2).source for n in (1, 2, 3)]
    item = {
        "id": "talk",
        "audio": waves,
        "messages": [
            {"role": "system", "content": ""},
            {"role": "user", "content": "<|audio|>first, <|audio|>"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "and <|audio|> then"},
            {"role": "assistant", "content": "no"},
        ],
    }
    example = as_example(item)
    parts = [(turn.role, [p if isinstance(p, str) else int(p.source[0]) for p in turn.parts]) for turn in example.turns]
    assert parts == [
        ("system", []),
        ("user", [1, "first, ", 2]),
        ("assistant", ["yes"]),
        ("user", ["and ", 3, " then"]),
        ("assistant", ["no"]),
    ]
    assert [int(clip.source[0]) for clip in example.clips] == [1, 2, 3]


def test_the_rate_beside_several_clips_is_that_of_each():
    item = {"audio": [np.zeros(80), np.zeros(160)], "sampling_rate": 8_000, "text": "a"}
    assert [(clip.num_samples, clip.sample_rate) for clip in as_example(item).clips] == [(80, 8_000), (160, 8_000)]
    item |= {"audio": [{"array": np.zeros(80), "sampling_rate": 48_000}, np.zeros(160)]}
    assert [clip.sample_rate for clip in as_example(item).clips] == [48_000, 8_000]
    one = {"audio": np.zeros(80), "sampling_rate": None, "sample_rate": 8_000, "messages": None, "text": "a"}
    assert as_example(one).clips[0].sample_rate == 8_000


def test_seconds_without_a_rate_are_counted_at_the_encoders_and_rounded_half_up():
    clip = as_example({"audio": "x.wav", "duration": 1.5 / 8_000, "text": "a"}, sample_rate=8_000).clips[0]
    assert (clip.num_samples, clip.sample_rate) == (2, 8_000)


def test_a_file_without_any_length_has_its_header_read_at_its_own_rate(wav):
    path = wav("cd.wav", 44_100, rate=44_100)
    clip = as_example({"audio": path, "text": "a"}).clips[0]
    assert (clip.num_samples, clip.sample_rate, clip.start_sample) == (44_100, 44_100, None)
    part = as_example({"audio": path, "text": "a", "offset": 0.25}, sample_rate=16_000).clips[0]
    assert (part.num_samples, part.sample_rate, part.start_sample) == (33_075, 44_100, 11_025)


def test_supervisions_are_read_in_the_order_in_which_they_are_spoken(cut):
    assert as_example(cut).turns[1].parts == ("hello world",)


def test_a_padded_cut_keeps_its_text_and_its_prompt(cut):
    example = as_example(cut.pad(duration=2.0))
    assert example.turns[0].parts[0] == "Say: "
    assert (example.clips[0].num_samples, example.turns[1].parts) == (32_000, ("hello world",))


# ---- names


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ({"id": "a", "audio_filepath": "x.wav", "duration": 1, "text": "t"}, "a"),
        ({"id": 0, "text": "t"}, "0"),
        ({"audio_filepath": "x.wav", "duration": 1, "text": "t"}, "x.wav"),
        ({"audio": Path("d") / "x.wav", "duration": 1, "text": "t"}, str(Path("d") / "x.wav")),
        ({"audio_filepath": "x.wav", "duration": 1, "offset": 2.5, "text": "t"}, "x.wav@2.5"),
        ({"audio_filepath": "x.wav", "duration": 1, "offset": 0.0, "text": "t"}, "x.wav"),
        ({"text": "t"}, "example-3"),
        ({"id": None, "text": "t"}, "example-3"),
    ],
)
def test_an_item_is_named_by_its_id_or_by_its_audio_or_by_its_place(item, name):
    assert as_example(item, position=3).id == name


def test_items_set_aside_have_the_names_that_they_would_have_had(collator_of, rule_of, speech):
    items = [{"audio_filepath": str(speech), "duration": -1, "text": "t"}, {"text": ""}, TextExample(text=""), object()]
    batch = collator_of(rule_of(), on_fault="set_aside")([*items, {"text": "fine"}])
    assert [left.id for left in batch.set_aside] == [str(speech), "example-1", "example-2", "example-3"]
    assert batch.ids == ("example-4",)


def test_two_parts_of_one_file_are_two_examples(collator_of, rule_of, speech):
    line = {"audio_filepath": str(speech), "duration": 0.5, "text": "a"}
    batch = collator_of(rule_of())([{**line, "offset": 0.0}, {**line, "offset": 0.5}])
    assert len(batch.unpack(batch.input_ids)) == 2


def test_examples_of_a_list_keep_their_order_and_places(cut):
    assert [example.id for example in as_examples([cut, {"text": "a"}, {"text": "b"}])] == [cut.id, "example-1", "example-2"]


# ---- what cannot become an example


def refusal(lines_of, kind, item, **options):
    with pytest.raises(kind) as caught:
        as_example(item, position=3, **options)
    return lines_of(caught.value)


@pytest.mark.parametrize("item", ["text", 5, None, b"RIFF", ["a"], object()])
def test_an_item_of_an_unknown_type_is_refused(lines_of, item):
    assert refusal(lines_of, ExampleError, item) == {
        "what": "item 3 of the batch is of a type that is not known",
        "got": type(item).__name__,
        "expected": "packfp8.Example, a lhotse cut or TextExample, or a dict",
        "because": "its audio and text cannot be found without knowing its fields",
        "fix": "map the dataset to dicts with 'audio' and 'text', or build packfp8.Example yourself",
    }


@pytest.mark.parametrize(
    "item",
    [
        {"id": "x", "audio": "x.wav", "duration": 1.0},
        {"id": "x", "audio": "x.wav", "duration": 1.0, "text": None},
        {"id": "x", "text": ""},
        {"id": "x", "text": " \n"},
        {"id": "x", "text": 7},
        {"id": "x", "messages": []},
        {"id": "x", "messages": [{"role": "user", "content": "hello"}]},
        {"id": "x", "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": " "}]},
        {"id": "x", "audio": "x.wav", "duration": 1.0, "messages": [{"role": "assistant", "content": "<|audio|>"}]},
        MonoCut("x", 0.0, 1.0, 0, recording=Recording("x", [], 16_000, 16_000, 1.0)),
        TextExample(text="", custom={"id": "x"}),
    ],
)
def test_an_item_without_an_answer_to_learn_is_refused(lines_of, item):
    lines = refusal(lines_of, ExampleError, item)
    assert lines["what"] == "example 'x' has no text to learn from"
    assert lines["got"] in ("None", "''", "' \\n'", "7", "' '")
    assert lines["expected"] == "a text that is not empty"
    assert "none of its tokens would be supervised" in lines["because"]
    assert lines["fix"] == "add the transcript, drop the example, or pass packfp8.Example with the turns you mean"


@pytest.mark.parametrize("duration", [0, 0.0, -2.86, float("nan"), float("inf"), None, "1.5", True, 1e-5, 1e306])
def test_an_impossible_duration_is_refused(lines_of, duration):
    item = {"id": "x", "audio": "x.wav", "duration": duration, "text": "a"}
    assert refusal(lines_of, LengthError, item) == {
        "what": "example 'x' has an impossible duration",
        "got": f"{duration!r} s",
        "expected": "a finite duration of at least one sample at 16000 Hz",
        "because": "a clip without samples has no encoder frame, and a length that is not a number sorts anywhere",
        "fix": "repair or remove the manifest line",
    }


@pytest.mark.parametrize("count", [0, -5, float("nan"), "16000", False])
def test_an_impossible_number_of_samples_is_refused(lines_of, count):
    lines = refusal(lines_of, LengthError, {"id": "x", "audio": "x.wav", "num_samples": count, "text": "a"})
    assert lines["what"] == "example 'x' has an impossible duration"
    assert lines["got"] == f"{count!r} samples"


def test_an_offset_behind_the_end_of_the_file_leaves_no_duration(lines_of, speech):
    lines = refusal(lines_of, LengthError, {"id": "x", "audio": speech, "offset": 2.0, "text": "a"})
    assert lines["what"] == "example 'x' has an impossible duration"
    assert lines["got"] == "-7999 samples"


@pytest.mark.parametrize("offset", [-0.1, float("nan"), float("inf"), "1", 1e306])
def test_an_impossible_offset_is_refused(lines_of, offset):
    item = {"id": "x", "audio": "x.wav", "duration": 1.0, "offset": offset, "text": "a"}
    assert refusal(lines_of, LengthError, item) == {
        "what": "example 'x' begins at an impossible offset",
        "got": f"{offset!r} s",
        "expected": "a finite number of seconds, at least 0",
        "because": "another part of the file says another text",
        "fix": "repair or remove the manifest line",
    }


@pytest.mark.parametrize("rate", [0, -16_000, 22_050.5, float("nan"), "16000"])
def test_an_impossible_sample_rate_is_refused(lines_of, rate):
    item = {"id": "x", "audio": "x.wav", "duration": 1.0, "sampling_rate": rate, "text": "a"}
    assert refusal(lines_of, LengthError, item) == {
        "what": "example 'x' has an impossible sample rate",
        "got": repr(rate),
        "expected": "a whole number of samples a second, at least 1",
        "because": "seconds become samples by the rate, and samples become tokens",
        "fix": "correct 'sampling_rate', or leave it out for the encoder's",
    }


def test_an_offset_into_an_array_or_a_cut_is_refused_and_not_ignored(lines_of, cut):
    for source, kind in ((np.zeros(1600), "ndarray"), (cut, "MonoCut"), ({"array": np.zeros(1600)}, "ndarray")):
        lines = refusal(lines_of, ExampleError, {"id": "x", "audio": source, "offset": 0.05, "text": "a"})
        assert lines["what"] == "example 'x' has an offset into audio that is not a file"
        assert lines["got"] == f"offset 0.05 beside {kind}"
        assert lines["expected"] == "an offset beside a path or encoded bytes"
        assert "another text" in lines["because"]
        assert lines["fix"] == "slice the array, or truncate the cut"


@pytest.mark.parametrize(
    "item",
    [
        {"id": "x", "path": "x.wav", "duration": 2.0, "text": "a"},
        {"id": "x", "audio": None, "num_samples": 5, "text": "a"},
        {"id": "x", "audio": [], "duration": 2.0, "messages": [{"role": "assistant", "content": "a"}]},
        {"id": "x", "audio": {"path": None, "bytes": None}, "text": "a"},
        {"id": "x", "audio": {"file": "x.wav"}, "duration": 2.0, "text": "a"},
    ],
)
def test_audio_that_is_announced_and_not_there_is_refused_and_not_left_out(lines_of, item):
    lines = refusal(lines_of, ExampleError, item)
    assert lines["what"] == "example 'x' announces audio and has none"
    assert lines["got"].startswith("keys id, ")
    assert lines["expected"] == "'audio' or 'audio_filepath', or a dict with one of array, bytes, audio_filepath, path"
    assert "text alone" in lines["because"]
    assert "name the audio" in lines["fix"]


@pytest.mark.parametrize("audio", [np.zeros((2, 100)), np.zeros(0), np.zeros(()), 5.0])
def test_an_array_that_does_not_show_its_length_is_refused(lines_of, audio):
    lines = refusal(lines_of, LengthError, {"id": "x", "audio": audio, "text": "a"})
    assert lines["what"] == "the length of example 'x' cannot be read from its array"
    assert lines["got"] in (f"shape {np.shape(audio)}", type(audio).__name__)
    assert lines["expected"] == "an array [samples], or 'num_samples' beside an array with a channel axis"
    assert "destroys the signal" in lines["because"]
    assert "num_samples" in lines["fix"]


ANSWER = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("audio", "content", "got"),
    [
        (["x.wav"], "no mark", "0 marks, 1 clips"),
        (["x.wav"], "<|audio|><|audio|>", "2 marks, 1 clips"),
        (["x.wav", "y.wav"], "<|audio|>", "1 marks, 2 clips"),
        ([], "<|audio|>", "1 marks, 0 clips"),
        (None, "<|audio|>", "1 marks, 0 clips"),
    ],
)
def test_marks_that_do_not_match_the_clips_are_refused(lines_of, audio, content, got):
    audio = audio and [{"path": path, "duration": 1.0} for path in audio]
    item = {"id": "x", "audio": audio, "messages": [{"role": "user", "content": content}, ANSWER]}
    assert refusal(lines_of, ExampleError, item) == {
        "what": "example 'x' does not have one <|audio|> for each clip",
        "got": got,
        "expected": "as many marks as clips, in the order in which they are heard",
        "because": "a mark is where the frames of one clip are placed; counted per clip, not per example",
        "fix": "write <|audio|> in the text once for each clip",
    }


@pytest.mark.parametrize("role", ["human", "", None, "Assistant"])
def test_an_unknown_role_is_refused(lines_of, role):
    assert refusal(lines_of, ExampleError, {"id": "x", "messages": [{"role": role, "content": "hi"}, ANSWER]}) == {
        "what": "example 'x' has a turn of an unknown role",
        "got": repr(role),
        "expected": "one of system, user, assistant",
        "because": "only assistant turns are learned from, so the role decides what is supervised",
        "fix": "rename the role in the example's messages",
    }


@pytest.mark.parametrize(
    "message",
    [
        "hi",
        None,
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ],
)
def test_a_message_that_is_not_text_is_refused_and_not_spelled_out(lines_of, message):
    assert refusal(lines_of, ExampleError, {"id": "x", "messages": [message, ANSWER]}) == {
        "what": "example 'x' has a message whose content is not text",
        "got": repr(message),
        "expected": "{'role': ..., 'content': text}, with <|audio|> where a clip is heard",
        "because": "what is not text would be learned in its Python spelling, brackets and all",
        "fix": "join the parts of the content into one text, with <|audio|> for each clip",
    }


def test_a_missing_file_without_a_length_is_refused_when_its_header_is_asked_for(lines_of, tmp_path):
    lines = refusal(lines_of, AudioError, {"id": "x", "audio": tmp_path / "lost.wav", "text": "a"})
    assert lines["what"] == f"audio file {str(tmp_path / 'lost.wav')!r} is missing"


def test_a_templates_own_audio_mark_and_roles_are_those_of_the_messages():
    template = Template(audio="[speech]", roles={"human": ("H: ", "\n"), "assistant": ("A: ", "\n")})
    clip = {"array": np.zeros(1600, np.float32), "sampling_rate": 16_000}
    messages = [{"role": "human", "content": "hear [speech] now"}, {"role": "assistant", "content": "done"}]
    example = as_example({"id": "x", "audio": [clip], "messages": messages}, template=template)
    assert [[type(part).__name__ for part in turn.parts] for turn in example.turns] == [["str", "Clip", "str"], ["str"]]
    measure = Measure(frames=AudioFrames.fastconformer(), template=template)
    item = {"id": "x", "audio": [clip], "messages": messages}
    batch = Collator(measure=measure, rule=align("bf16"))([item])
    assert batch.slots.lengths.tolist() == [measure(example).tokens]
