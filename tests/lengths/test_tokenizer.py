"""ByteTokenizer, and any other tokenizer through to_ids."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packfp8.errors import ConfigError
from packfp8.lengths import ByteTokenizer
from packfp8.lengths.text import identity, special_id, to_ids

any_text = st.text(st.characters(exclude_categories=()), max_size=60)  # surrogates included


# -- the embedded one -------------------------------------------------------------------------------------------------


@given(text=any_text)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_bytes_come_back_as_the_text_they_were(text):
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.int64
    assert len(ids) == len(text.encode("utf-8", "surrogatepass"))
    assert ByteTokenizer().decode(ids) == text


def test_a_lone_surrogate_is_three_bytes():
    assert ByteTokenizer().encode("\ud800").tolist() == [0xED, 0xA0, 0x80]


def test_no_text_spells_a_special_id_and_decoding_leaves_them_out():
    t = ByteTokenizer()
    assert (t.bos_token_id, t.eos_token_id, t.pad_token_id, t.vocab_size) == (256, 257, 258, 259)
    assert t.encode("".join(map(chr, range(0x300)))).max() < 256
    assert t.decode([t.bos_token_id, 104, 105, t.eos_token_id, t.pad_token_id]) == "hi"
    assert t.decode([104, 255, 105]) == "h\ufffdi"


def test_padding_may_share_the_id_of_eos():
    t = ByteTokenizer(pad_is_eos=True)
    assert (t.eos_token_id, t.pad_token_id, t.vocab_size) == (257, 257, 258)


def test_unicode_line_separators_are_ordinary_text():
    assert len(ByteTokenizer().encode("a\u2028b\u0085c")) == 3 + 3 + 2


# -- others -----------------------------------------------------------------------------------------------------------


def words(text: str) -> list[int]:
    """A tokenizer by plain callable: one id a word."""
    return [len(word) for word in text.split()]


class Sentences:
    """A tokenizer with encode alone."""

    vocab_size = 7

    def encode(self, text):
        return np.arange(text.count(".")) % 7


class Special:
    """A tokenizer that adds an id at each end unless told not to, and answers in the given wrapping."""

    def __init__(self, wrap=list):
        self.wrap = wrap

    def encode(self, text, add_special_tokens=True):
        ids = [1, *(ord(c) for c in text), 2] if add_special_tokens else [ord(c) for c in text]
        return self.wrap(ids)

    def __len__(self):
        return 50_000


class Encoding:
    def __init__(self, ids):
        self.ids = ids


@pytest.mark.parametrize(
    "wrap",
    [list, tuple, np.array, torch.tensor, Encoding, lambda ids: {"input_ids": ids}],
    ids=["list", "tuple", "array", "tensor", "encoding", "mapping"],
)
def test_ids_are_taken_in_every_usual_wrapping_and_without_special_tokens(wrap):
    ids = to_ids(Special(wrap), "ab")
    assert ids.tolist() == [97, 98]
    assert ids.dtype == np.int64
    assert not ids.flags.writeable


def test_a_callable_and_an_object_with_encode_are_tokenizers():
    assert to_ids(words, "to be or").tolist() == [2, 2, 2]
    assert to_ids(Sentences(), "A. B.").tolist() == [0, 1]
    assert to_ids(words, "").tolist() == []
    assert to_ids(words, "").dtype == np.int64


def test_the_tokenizers_own_array_stays_writeable():
    kept = np.array([1, 2, 3])
    assert not to_ids(lambda text: kept, "x").flags.writeable
    assert kept.flags.writeable


@pytest.fixture(scope="module")
def hugging_face():
    """A Hugging Face tokenizer, made here, that wraps each text in <s> and </s> unless told not to."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, "hello": 3, "world": 4, "<|end|>": 5}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return inner, fast


def test_hugging_face_tokenizers_give_no_special_tokens_around_a_segment(hugging_face):
    for tokenizer in hugging_face:
        assert to_ids(tokenizer, "hello world hello").tolist() == [3, 4, 3]
        assert list(getattr(tokenizer.encode("hello"), "ids", tokenizer.encode("hello"))) == [0, 3, 1]
    assert special_id(hugging_face[1], "bos") == 0
    assert special_id(hugging_face[1], "eos") == 1


# -- identity ---------------------------------------------------------------------------------------------------------


def other_words(text: str) -> list[int]:
    return [len(word) + 1 for word in text.split()]


def test_identity_is_what_a_tokenizer_does_with_a_fixed_text():
    def same_words(text):
        return [len(word) for word in text.split()]

    assert identity(words) == identity(same_words) != identity(other_words)
    assert identity(ByteTokenizer()) == identity(pickle.loads(pickle.dumps(ByteTokenizer())))
    assert identity(ByteTokenizer()) != identity(ByteTokenizer(pad_is_eos=True))


def test_identity_sees_the_size_of_the_vocabulary():
    small, large = Sentences(), Sentences()
    large.vocab_size = 8
    assert identity(small) != identity(large)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("thing", "got"), [("gpt2", "'gpt2'"), (3, "int"), (None, "NoneType")])
def test_what_is_no_tokenizer_is_refused(thing, got, five_lines):
    with pytest.raises(ConfigError) as error:
        to_ids(thing, "text")
    five_lines(
        error.value,
        what="neither be called nor has it a method encode",
        got=got,
        expected="a callable text -> ids",
        because="the model was trained with",
        fix="ByteTokenizer()",
    )


@pytest.mark.parametrize("ids", [[[1, 2]], ["a"], [1.5], [-1], [True]], ids=["nested", "text", "float", "negative", "bool"])
def test_what_is_no_flat_row_of_ids_is_refused(ids, five_lines):
    with pytest.raises(ConfigError) as error:
        to_ids(lambda text: ids, "text")
    five_lines(
        error.value,
        what="does not give a flat row of ids",
        got=str(ids),
        expected="integers of at least 0",
        because="a row of the embedding",
        fix="for one text at a time",
    )


def test_a_special_id_that_a_tokenizer_lacks_is_refused(five_lines):
    with pytest.raises(ConfigError) as error:
        special_id(words, "eos")
    five_lines(
        error.value,
        what="wants the tokenizer's own eos",
        got="function with eos_token_id = None",
        expected="an integer eos_token_id",
        because="does not learn to stop",
        fix="Template(eos=<id>)",
    )
    with pytest.raises(ConfigError, match="that is guessed belongs to some other token"):
        special_id(words, "bos")
