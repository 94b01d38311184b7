"""Template: its marks, and raw text split at its audio marks."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packfp8.errors import ConfigError, ExampleError
from packfp8.lengths import Template


@given(texts=st.lists(st.text("ab <|audio>"), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_splitting_puts_each_clip_at_its_mark_and_keeps_all_text(texts):
    texts = [text.replace("<|audio|>", "") for text in texts]
    clips = [object() for _ in texts[1:]]
    raw = "<|audio|>".join(texts)
    if raw.count("<|audio|>") != len(clips):  # two pieces of text that spell a mark where they meet
        return
    parts = Template().split(raw, clips, id="ex")
    assert [p for p in parts if not isinstance(p, str)] == clips
    assert "".join(p if isinstance(p, str) else "<|audio|>" for p in parts) == raw
    assert all(p != "" for p in parts)


def test_another_mark_may_stand_for_audio():
    assert Template(audio="[A]").split("x[A]<|audio|>", [1.5], id="ex") == ("x", 1.5, "<|audio|>")


@pytest.mark.parametrize(("text", "clips"), [("a", 1), ("<|audio|>", 0), ("<|audio|> and <|audio|>", 1)])
def test_marks_that_do_not_match_the_clips_are_refused(text, clips, five_lines):
    with pytest.raises(ExampleError) as error:
        Template().split(text, [None] * clips, id="utt-7")
    five_lines(
        error.value,
        what="example 'utt-7' does not have one <|audio|> for each clip",
        got=f"{text.count('<|audio|>')} marks, {clips} clips",
        expected="as many marks as clips",
        because="counted per clip",
        fix="once for each clip",
    )


def test_the_fingerprint_follows_every_field():
    base = Template()
    assert base.fingerprint == Template().fingerprint == pickle.loads(pickle.dumps(base)).fingerprint
    others = [
        Template(roles={"user": ("", ""), "assistant": ("", "")}),
        Template(audio="[A]"),
        Template(prompt=""),
        Template(bos=True),
        Template(eos=2),
        Template(eos="2"),
        Template(audio_token_id=5),
    ]
    assert len({t.fingerprint for t in [base, *others]}) == 8
    turned = dict(reversed(base.roles.items()))
    assert Template(roles=turned).fingerprint == base.fingerprint


def test_roles_given_by_the_user_are_copied():
    roles = {"user": ("U", ""), "assistant": ("A", "")}
    template = Template(roles=roles)
    roles["user"] = ("changed", "")
    assert template.roles["user"] == ("U", "")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"roles": {}}, "roles"),
        ({"roles": {"user": ("before",)}}, "roles['user']"),
        ({"roles": {"user": ("before", 3)}}, "roles['user']"),
        ({"audio": ""}, "audio"),
        ({"prompt": None}, "prompt"),
        ({"eos": -1}, "eos"),
        ({"bos": 1.0}, "bos"),
        ({"audio_token_id": -1}, "audio_token_id"),
    ],
)
def test_a_mark_that_cannot_be_is_refused(fields, name, five_lines):
    with pytest.raises(ConfigError) as error:
        Template(**fields)
    five_lines(
        error.value,
        what=f"{name} of the template cannot be",
        got="",
        expected="a",
        because="part of each example's length",
        fix="help(packfp8.lengths.Template)",
    )
