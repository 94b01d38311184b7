"""Measure: what it counts is what it encodes, and what it lets be learned."""

from __future__ import annotations

import multiprocessing
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packfp8.data.example import Clip, Example, Turn
from packfp8.errors import ConfigError, ExampleError, LengthError
from packfp8.lengths import AudioFrames, ByteTokenizer, ClipSpan, Measure, Measured, Template

FRAMES = AudioFrames.fastconformer()
BARE = Template(roles=dict.fromkeys(("system", "user", "assistant"), ("", "")), prompt="", eos=False)


class Pairs:
    """A tokenizer whose count depends on where segments end: two characters a token, the rest of one another."""

    bos_token_id, eos_token_id, vocab_size = 7, 8, 4_096

    def encode(self, text):
        return [len(text[i : i + 2]) * 100 + i for i in range(0, len(text), 2)]


# -- the oracle -------------------------------------------------------------------------------------------------------


def literal(example: Example, tokenizer, template: Template) -> list[tuple[int, bool]]:
    """(id, target) of every token, by the template's drawing, one turn at a time."""
    own = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}

    def special(name):
        mark = getattr(template, name)
        return [own[name]] if mark is True else [] if mark is False else text(mark) if isinstance(mark, str) else [mark]

    def text(value):
        return list(map(int, tokenizer.encode(value))) if value else []

    tokens = [(i, False) for i in special("bos")]
    for turn in example.turns:
        before, after = template.roles[turn.role]
        answer = turn.role == "assistant"
        tokens += [(i, False) for i in text(before)]
        spoken_only = bool(turn.parts) and not any(p for p in turn.parts if isinstance(p, str))
        if turn.role == "user" and spoken_only:
            tokens += [(i, False) for i in text(template.prompt)]
        merged: list = []
        for part in turn.parts:
            if isinstance(part, str) and merged and isinstance(merged[-1], str):
                merged[-1] += part
            else:
                merged.append(part)
        for part in merged:
            if isinstance(part, str):
                tokens += [(i, answer) for i in text(part)]
            else:
                samples = -(-part.num_samples * 16_000 // part.sample_rate)
                tokens += [(template.audio_token_id, False)] * -(-(samples // 160) // 8)
        if answer:
            tokens += [(i, True) for i in special("eos")]
        tokens += [(i, False) for i in text(after)]
    return tokens


clips = st.builds(
    Clip,
    source=st.none(),
    num_samples=st.integers(500, 60_000),
    sample_rate=st.sampled_from([8_000, 16_000, 22_050, 48_000]),
)
parts = st.lists(st.one_of(st.text(max_size=9), clips), max_size=5).map(tuple)
turns = st.lists(st.builds(Turn, st.sampled_from(["system", "user", "assistant"]), parts), max_size=4).map(tuple)
marks = st.sampled_from(["", "x", "Role: ", "\n"])
templates = st.builds(
    Template,
    roles=st.fixed_dictionaries({role: st.tuples(marks, marks) for role in ("system", "user", "assistant")}),
    prompt=st.sampled_from(["", "Transcribe: "]),
    bos=st.sampled_from([True, False, 5, "<s>"]),
    eos=st.sampled_from([True, False, 6, "</s>"]),
    audio_token_id=st.integers(0, 3),
)
tokenizers = st.sampled_from([ByteTokenizer(), ByteTokenizer(pad_is_eos=True), Pairs()])


@given(example=st.builds(Example, id=st.just("ex"), turns=turns), template=templates, tokenizer=tokenizers)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_measure_and_encode_are_the_literal_drawing(example, template, tokenizer):
    measure = Measure(frames=FRAMES, tokenizer=tokenizer, template=template)
    tokens = literal(example, tokenizer, template)
    if not tokens:
        with pytest.raises(ExampleError, match="has no token"):
            measure(example)
        with pytest.raises(ExampleError, match="has no token"):
            measure.encode(example)
        return
    encoded, measured = measure.encode(example), measure(example)
    assert list(zip(encoded.ids.tolist(), encoded.supervised.tolist(), strict=True)) == tokens
    assert measured.tokens == len(encoded) == len(tokens)
    assert measured.supervised == encoded.supervised[1:].sum()
    assert measured.encoder_frames == tuple(span.encoder_frames for span in encoded.clips)
    assert measured.text_tokens == measured.tokens - sum(measured.encoder_frames)
    audio = np.zeros(len(encoded), dtype=bool)
    for span, clip in zip(encoded.clips, example.clips, strict=True):
        here = slice(span.start, span.start + span.encoder_frames)
        assert not audio[here].any()
        audio[here] = True
        assert span.samples == FRAMES.resampled(clip.num_samples, clip.sample_rate)
        assert FRAMES.encoder_frames(span.samples) == span.encoder_frames
    assert not encoded.supervised[audio].any()
    assert (encoded.ids[audio] == template.audio_token_id).all()


# -- behaviour by example ---------------------------------------------------------------------------------------------


def test_one_clip_and_its_transcript_read_as_drawn(clip, conversation):
    example = conversation(("user", clip(12_800)), ("assistant", "hi"))
    encoded = Measure(frames=FRAMES).encode(example)
    text = ByteTokenizer().decode(i for i in encoded.ids.tolist() if i)
    assert text == "User: Transcribe: \nAssistant: hi\n"
    assert encoded.clips == (ClipSpan(start=18, encoder_frames=10, samples=12_800),)
    assert encoded.ids[encoded.supervised].tolist() == [ord("h"), ord("i"), 257]
    assert Measure(frames=FRAMES)(example) == Measured(
        tokens=18 + 10 + 1 + 11 + 2 + 1 + 1, text_tokens=34, encoder_frames=(10,), supervised=3
    )


def test_two_clips_are_counted_each_and_not_together(clip, conversation):
    # 100 and 250 feature frames: 13 + 32 encoder frames; 350 together would be 44
    example = conversation(("user", clip(16_000), clip(40_000)), ("assistant", "x"))
    assert Measure(frames=FRAMES)(example).encoder_frames == (13, 32)


def test_speech_in_the_answer_is_never_learned(clip, conversation):
    example = conversation(("assistant", "a", clip(), "b"))
    encoded = Measure(frames=FRAMES, template=BARE).encode(example)
    assert encoded.supervised.tolist() == [True, *[False] * 13, True]


def test_text_alone_and_speech_alone_are_examples(clip, conversation):
    text = Measure(frames=None)(conversation(("assistant", "abc")))
    assert (text.encoder_frames, text.supervised) == ((), 4)
    speech = Measure(frames=FRAMES, template=BARE)(conversation(("user", clip())))
    assert speech == Measured(tokens=13, text_tokens=0, encoder_frames=(13,), supervised=0)


def test_the_first_token_is_nobodys_label(conversation):
    measure = Measure(frames=None, template=BARE)
    assert measure(conversation(("assistant", "abc"))).supervised == 2
    assert measure(conversation(("assistant", "a"))) == Measured(tokens=1, text_tokens=1, encoder_frames=(), supervised=0)
    assert measure(conversation(("user", "a"), ("assistant", "b"))).supervised == 1


def test_the_prompt_stands_only_before_a_user_turn_of_clips_alone(clip, conversation):
    measure = Measure(frames=FRAMES, template=Template(prompt="PROMPT"))
    plain = Measure(frames=FRAMES, template=Template(prompt=""))

    def prompted(*turn):
        return measure(conversation(turn)).tokens - plain(conversation(turn)).tokens

    assert prompted("user", clip(), clip()) == prompted("user", "", clip()) == 6
    assert prompted("user", clip(), "text") == prompted("user") == prompted("assistant", clip()) == 0


def test_text_between_two_clips_is_one_segment_however_many_parts_it_came_in(clip, conversation):
    measure = Measure(frames=FRAMES, tokenizer=Pairs(), template=BARE)
    whole, pieces = conversation(("user", "abcd", clip())), conversation(("user", "a", "", "bcd", clip()))
    assert measure.encode(whole).ids.tolist() == measure.encode(pieces).ids.tolist()
    assert measure(conversation(("user", "a", clip(), "bcd"))).text_tokens == 1 + 2  # a clip parts them


def test_the_eos_of_an_answer_is_learned_where_it_is_also_the_pad(conversation):
    tokenizer = ByteTokenizer(pad_is_eos=True)
    encoded = Measure(frames=None, tokenizer=tokenizer).encode(conversation(("assistant", "ok")))
    assert encoded.ids[encoded.supervised].tolist()[-1] == tokenizer.pad_token_id == 257


def test_marks_are_tokenised_once(conversation):
    seen = []

    def counting(text):
        seen.append(text)
        return [1] * len(text)

    measure = Measure(frames=None, tokenizer=counting, template=Template(eos="</s>"))
    seen.clear()
    for _ in range(3):
        measure(conversation(("user", "question"), ("assistant", "answer")))
    assert seen == ["question", "answer"] * 3


def test_counts_come_from_the_tokenizer_and_not_from_characters(conversation):
    measure = Measure(frames=None, template=BARE)
    assert measure(conversation(("assistant", "你好\u2028"))).tokens == 9


def test_any_object_with_the_fields_is_an_example():
    piece = SimpleNamespace(num_samples=np.int64(16_000), sample_rate=16_000)
    turn = SimpleNamespace(role="user", parts=[piece, "hi"])
    assert Measure(frames=FRAMES, template=BARE)(SimpleNamespace(id=1, turns=[turn])).tokens == 15


def test_what_is_encoded_cannot_be_changed(conversation):
    encoded = Measure(frames=None).encode(conversation(("assistant", "a")))
    for array in (encoded.ids, encoded.supervised):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


# -- identity and workers ---------------------------------------------------------------------------------------------


def test_the_fingerprint_follows_template_tokenizer_and_frames():
    base = Measure(frames=FRAMES)
    assert base.fingerprint == Measure(frames=AudioFrames.fastconformer()).fingerprint
    others = [
        Measure(frames=None),
        Measure(frames=AudioFrames.linear()),
        Measure(frames=FRAMES, tokenizer=ByteTokenizer(pad_is_eos=True)),
        Measure(frames=FRAMES, tokenizer=Pairs()),
        Measure(frames=FRAMES, template=Template(prompt="")),
    ]
    assert len({m.fingerprint for m in [base, *others]}) == 6


def test_a_pickled_measure_is_the_same(clip, conversation):
    measure = Measure(frames=FRAMES, tokenizer=ByteTokenizer(pad_is_eos=True))
    again = pickle.loads(pickle.dumps(measure))
    example = conversation(("user", clip()), ("assistant", "ok"))
    assert again == measure
    assert again.fingerprint == measure.fingerprint
    assert again(example) == measure(example)


def test_a_spawned_process_measures_the_same(clip, conversation):
    measure = Measure(frames=FRAMES)
    example = conversation(("user", clip()), ("assistant", "ok"))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(measure, (example,)) == measure(example)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["measure", "encode"])
def refused(request):
    """refused(kind, measure, example): the error that measuring, and encoding, raises."""

    def call(kind, measure, example):
        with pytest.raises(kind) as error:
            getattr(measure, request.param)(example)
        return error.value

    return call


@pytest.mark.parametrize("item", [{"id": "a", "text": "b"}, "b"], ids=["dict", "text"])
def test_what_is_not_yet_an_example_is_refused(refused, five_lines, item):
    """Cuts and dicts are what a collator takes; a measure takes what it makes of them."""
    five_lines(
        refused(ExampleError, Measure(frames=FRAMES), item),
        what="what shall be measured is not an example",
        got=type(item).__name__,
        expected="an object with id and turns",
        because="counted turn by turn",
        fix="packfp8.data.as_example(item)",
    )


def test_an_example_without_a_token_is_refused(refused, conversation, five_lines):
    five_lines(
        refused(ExampleError, Measure(frames=None, template=BARE), conversation(("user", ""), id="empty")),
        what="example 'empty' has no token",
        got="1 turns, all empty",
        expected="at least one token",
        because="no slot in a pack",
        fix="drop the example",
    )


def test_audio_without_an_encoder_is_refused(refused, clip, conversation, five_lines):
    five_lines(
        refused(ExampleError, Measure(frames=None), conversation(("user", clip()), id="utt-1")),
        what="example 'utt-1' has audio, and this measure knows no encoder",
        got="frames=None",
        expected="an AudioFrames",
        because="its encoder's frames",
        fix="AudioFrames.fastconformer()",
    )


def test_a_clip_too_short_for_one_frame_is_refused_and_one_sample_more_is_not(refused, clip, conversation, five_lines):
    measure = Measure(frames=FRAMES)
    shortest = FRAMES.shortest_samples
    five_lines(
        refused(LengthError, measure, conversation(("user", clip(), clip(shortest - 1)), id="utt-2")),
        what="example 'utt-2', clip 1 is too short for one encoder frame",
        got="159 samples at 16000 Hz",
        expected="at least 160 samples at 16000 Hz",
        because="learned from nothing",
        fix="drop the example",
    )
    assert measure(conversation(("user", clip(), clip(shortest)))).encoder_frames == (13, 1)


@pytest.mark.parametrize("samples", [0, -45_760, float("nan"), None])
def test_a_clip_of_impossible_length_is_named_by_its_example(refused, clip, conversation, five_lines, samples):
    five_lines(
        refused(LengthError, Measure(frames=FRAMES), conversation(("user", clip(samples)), id="utt-3")),
        what="example 'utt-3', clip 0: a clip has an impossible length",
        got=f"{samples!r} samples",
        expected="at least 1",
        because="no encoder frame",
        fix="repair the manifest",
    )


def test_a_clip_over_the_encoders_limit_is_named_by_its_example(refused, clip, conversation, five_lines):
    measure = Measure(frames=AudioFrames.whisper())
    five_lines(
        refused(LengthError, measure, conversation(("user", clip(480_001)), id="long")),
        what="example 'long', clip 0: a clip is longer than the encoder takes",
        got="480001 samples",
        expected="at most 480000 samples",
        because="never cut",
        fix="shorter clips",
    )
    assert measure(conversation(("user", clip(480_000)))).encoder_frames == (1_500,)


def test_an_unknown_role_is_refused(refused, conversation, five_lines):
    five_lines(
        refused(ExampleError, Measure(frames=None), conversation(("tool", "x"), id="utt-4")),
        what="example 'utt-4' has a turn of a role that the template does not know",
        got="'tool'",
        expected="one of system, user, assistant",
        because="the role decides the marks",
        fix="Template(roles=",
    )


def test_a_part_that_is_neither_text_nor_clip_is_refused(refused, conversation, five_lines):
    five_lines(
        refused(ExampleError, Measure(frames=FRAMES), conversation(("user", 3.5), id="utt-5")),
        what="example 'utt-5' has a part that is neither text nor a clip",
        got="float",
        expected="num_samples and sample_rate",
        because="each part becomes tokens",
        fix="packfp8.data.Clip",
    )


def test_an_audio_mark_left_in_text_is_refused(refused, conversation, five_lines):
    five_lines(
        refused(ExampleError, Measure(frames=FRAMES), conversation(("user", "hear <|audio|>"), id="utt-6")),
        what="example 'utt-6' has the audio mark <|audio|> in its text",
        got="'hear <|audio|>'",
        expected="clips as parts of the turn",
        because="not heard",
        fix="Template.split",
    )


def test_a_template_that_wants_an_eos_the_tokenizer_lacks_is_refused_at_once():
    with pytest.raises(ConfigError, match="wants the tokenizer's own eos"):
        Measure(frames=None, tokenizer=lambda text: [1])
    assert Measure(frames=None, tokenizer=lambda text: [1], template=Template(eos=2))
