"""Labels: shifted within each sequence, before any split; learned are answers and their end, and nothing else."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packfp8.data import Collator
from packfp8.lengths import AudioFrames, ByteTokenizer, Measure
from packfp8.rule import RECIPES, Topology, align

IGN = -100


def test_labels_never_cross_into_the_next_document(bare, docs):
    batch = bare(align("bf16"))(docs("1 2 3", "4 5"))
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert batch.labels.tolist() == [2, 3, IGN, 5, IGN]
    assert batch.num_supervised == 3


def test_labels_are_shifted_before_the_split_over_ranks(bare, docs):
    slabs = [bare(align("bf16", Topology(cp=2, cp_rank=r)))(docs("1 2 3", "4 5 6 7 8")) for r in range(2)]
    # slots | 1 2 3 . | and | 4 5 6 7 8 . . . |; rank 0 has the first and the last chunk of each
    assert slabs[0].input_ids.tolist() == [1, 0, 4, 5, 0, 0]
    assert slabs[0].labels.tolist() == [2, IGN, 5, 6, IGN, IGN]
    assert slabs[1].input_ids.tolist() == [2, 3, 6, 7, 8, 0]
    assert slabs[1].labels.tolist() == [3, IGN, 7, 8, IGN, IGN]
    assert [slab.num_supervised for slab in slabs] == [3, 3]


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_one_token_documents_have_a_slot_and_no_label(bare, docs, layout):
    batch = bare(align("bf16", layout=layout))(docs("3", "1", "4 9"))
    assert batch.num_supervised == int((batch.labels != IGN).sum()) == 1
    assert len(batch.cu_seqlens) == 4


def test_only_answers_and_their_end_are_learned(examples, collator_of, rule_of, measure):
    batch = collator_of(rule_of())(examples)
    labels = batch.unpack(batch.labels)
    words = {name: ByteTokenizer().decode(row[row != IGN].tolist()) for name, row in labels.items()}
    assert words == {
        "one clip": "yes",
        "two clips": "They differ.",
        "text": "Hi",
        "letter": "a",
        "talk": "onetwo",
        "long": "y" * 33,
        "short": "z",
    }
    ends = {name: int((row == ByteTokenizer().eos_token_id).sum()) for name, row in labels.items()}
    assert ends == {**dict.fromkeys(words, 1), "talk": 2}
    assert batch.num_supervised == sum(measure(example).supervised for example in examples)


def test_the_last_label_of_each_sequence_and_every_frame_is_ignored_unless_an_answer_follows(examples, collator_of, rule_of):
    batch = collator_of(rule_of())(examples)
    for row in batch.unpack(batch.labels).values():
        assert row[-1] == IGN
    frames = torch.zeros(batch.tokens, dtype=torch.bool)
    frames[batch.audio_destination] = True
    assert (batch.labels[frames] == IGN).all()  # each of these clips is followed by the mark of a turn


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_where_padding_has_the_id_of_eos_the_learned_eos_stays_and_no_pad_is_learned(rule_of, examples, layout):
    tokenizer = ByteTokenizer(pad_is_eos=True)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    frames = AudioFrames.linear(800)
    made = [
        Collator(measure=Measure(frames=frames, tokenizer=t), rule=rule_of(layout=layout))(examples)
        for t in (tokenizer, ByteTokenizer())
    ]
    assert int((made[0].labels == tokenizer.eos_token_id).sum()) == len(examples) + 1
    assert torch.equal(made[0].labels, made[1].labels)
    assert torch.equal(made[0].padding_mask, made[1].padding_mask)


def test_a_real_token_with_the_id_of_pads_is_learned(bare, docs):
    batch = bare(align("block"))(docs("0 0 0", "5 0"))
    assert batch.labels.tolist()[:5] == [0, 0, IGN, 0, IGN]
    assert batch.padding_mask.tolist() == [False] * 5 + [True] * 11


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("topology", [(1, 1, False), (2, 1, False), (4, 2, True), (3, 2, True), (1, 4, True)], ids=str)
def test_both_layouts_learn_the_same_tokens_for_every_rule(batches_of, examples, measure, recipe, topology):
    cp, tp, sp = topology
    wanted = Counter()
    for example in examples:
        encoded = measure.encode(example)
        wanted.update(encoded.ids[1:][encoded.supervised[1:]].tolist())
    for layout in ("thd", "bshd"):
        batches = batches_of(examples, recipe=recipe, layout=layout, cp=cp, tp=tp, sp=sp)
        labels = torch.cat([batch.labels.reshape(-1) for batch in batches])
        assert Counter(labels[labels != IGN].tolist()) == wanted
        assert sum(batch.num_supervised for batch in batches) == sum(wanted.values())
        for batch in batches:
            assert batch.num_supervised == int((batch.labels != IGN).sum())


texts = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), min_size=1, max_size=6)


@given(texts, st.sampled_from([1, 2, 4]), st.sampled_from(["thd", "bshd"]), st.sampled_from(["bf16", "block"]))
def test_the_labels_of_a_pack_are_those_of_each_document_alone(bare, docs, texts, cp, layout, recipe):
    items = docs(*(" ".join(map(str, text)) for text in texts))
    rules = [align(recipe, Topology(cp=cp, cp_rank=rank), layout=layout) for rank in range(cp)]
    batches = [bare(rule)(items) for rule in rules]
    labels = batches[0].unpack([batch.labels for batch in batches])
    ids = batches[0].unpack([batch.input_ids for batch in batches])
    for n, text in enumerate(texts):
        assert ids[str(n)].tolist() == text
        assert labels[str(n)].tolist() == [*text[1:], IGN]
    assert sum(batch.num_supervised for batch in batches) == sum(len(text) - 1 for text in texts)
