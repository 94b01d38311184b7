"""Sources: whatever lhotse walks is packed, the same on every rank and in every pass, and is left as it was."""

import random
from collections import Counter
from pathlib import Path

import pytest
import soundfile
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from lhotse.cut.text import TextExample

from packfp8.data import Clip, Collator, Example, PackedDataset, Turn, corpus
from packfp8.data.source import indexable, walk
from packfp8.errors import ConfigError


@pytest.fixture(scope="module")
def cuts(make_cuts):
    return make_cuts([0.1 + n * 37 % 90 / 10 for n in range(80)])


@pytest.fixture
def sources(cuts, tmp_path):
    """Ways to walk the same 80 cuts, by name."""
    cuts.to_file(tmp_path / "cuts.jsonl.gz")
    (tmp_path / "shar").mkdir()
    cuts.to_shar(tmp_path / "shar", fields={}, shard_size=10, warn_unused_fields=False)
    lazy = CutSet.from_file(tmp_path / "cuts.jsonl.gz")
    half = [CutSet(list(cuts)[:30]), CutSet(list(cuts)[30:])]
    return {
        "eager": cuts,
        "list": list(cuts),
        "jsonl.gz": lazy,
        "shar": CutSet.from_shar(in_dir=tmp_path / "shar"),
        "shar, shuffled shards": CutSet.from_shar(in_dir=tmp_path / "shar", shuffle_shards=True),
        "mux": CutSet.mux(*half, weights=[3, 1], seed=1),
        "chain": half[0].repeat(1, preserve_id=True) + lazy.filter(is_late),
        "repeat": lazy.repeat(1, preserve_id=True),
        "lazy shuffle": lazy.shuffle(rng=random.Random(5), buffer_size=20),
        "lazy shuffle by the global generator": lazy.shuffle(buffer_size=20),
        "mux by chance": CutSet.mux(*half, seed="trng"),
        "files": CutSet.from_files(split(cuts, tmp_path)),
        "shards in turn": CutSet.from_files(split(cuts, tmp_path), seed=3),
    }


def is_late(cut):
    return int(cut.id[1:]) >= 30


def split(cuts, folder):
    paths = []
    for number in range(4):
        CutSet(list(cuts)[number::4]).to_file(folder / f"part{number}.jsonl")
        paths.append(folder / f"part{number}.jsonl")
    return paths


NAMES = ["eager", "list", "jsonl.gz", "shar", "shar, shuffled shards", "mux", "chain", "repeat", "lazy shuffle", "files"]
NAMES += ["lazy shuffle by the global generator", "mux by chance", "shards in turn"]


@pytest.mark.parametrize("name", NAMES)
def test_every_source_is_shared_out_whole_reordered_by_epoch_and_resumed(sources, cuts, sampler_of, ids_of, name):
    assert set(NAMES) == set(sources)
    source = sources[name]
    samplers = [sampler_of(source, dp=2, rank=rank, shuffle_buffer=30) for rank in range(2)]
    epochs = []
    for epoch in (0, 1, 0):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        columns = [ids_of(sampler) for sampler in samplers]
        assert len(columns[0]) == len(columns[1])
        assert Counter(name for column in columns for pack in column for name in pack) == Counter(cut.id for cut in cuts)
        epochs.append(columns)
    assert epochs[0] == epochs[2] != epochs[1]

    samplers[0].set_epoch(1)
    samplers[0].load_state_dict(samplers[1].state_dict(step=3) if samplers[1].epoch == 1 else after(samplers[1], 1, 3))
    assert ids_of(samplers[0]) == epochs[1][0][4:]


def after(sampler, epoch, step):
    sampler.set_epoch(epoch)
    return sampler.state_dict(step=step)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_walk_leaves_the_source_as_it_was(sources, shuffle):
    for name in NAMES:
        source = sources[name]
        walks = [list(walk(source, seed=0, epoch=0, shuffle=shuffle, shuffle_buffer=9)) for _ in range(2)]
        assert [cut.id for _, cut in walks[0]] == [cut.id for _, cut in walks[1]]
        assert sorted(index for index, _ in walks[0]) == list(range(80))


@pytest.mark.parametrize("name", ["files", "shar, shuffled shards", "shards in turn"])
def test_shards_are_reshuffled_by_epoch_alone(sources, name):
    def order(epoch):
        return [cut.id for _, cut in walk(sources[name], seed=0, epoch=epoch, shuffle=False, shuffle_buffer=1)]

    orders = [order(epoch) for epoch in (0, 1, 2, 1)]
    assert orders[1] == orders[3]
    assert orders[0] != orders[1] != orders[2]


def test_a_lazy_set_smaller_than_the_buffer_is_shuffled_as_a_whole(sources):
    order = [index for index, _ in walk(sources["jsonl.gz"], seed=0, epoch=0, shuffle=True, shuffle_buffer=1000)]
    assert sorted(order) == list(range(80))
    assert sum(index != place for place, index in enumerate(order)) > 70


@pytest.mark.parametrize("lazy", [False, True])
def test_the_order_depends_on_seed_and_epoch(cuts, sources, lazy):
    source = sources["jsonl.gz" if lazy else "eager"]

    def order(seed, epoch):
        return tuple(index for index, _ in walk(source, seed=seed, epoch=epoch, shuffle=True, shuffle_buffer=16))

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9  # seed 0, epoch 1 is not seed 1, epoch 0
    assert all(sorted(one) == list(range(80)) for one in orders)
    assert order(2, 1) == order(2, 1)


def test_a_buffer_moves_examples_forward_by_no_more_than_its_size(sources):
    order = [index for index, _ in walk(sources["jsonl.gz"], seed=0, epoch=0, shuffle=True, shuffle_buffer=16)]
    assert all(index - place <= 16 for place, index in enumerate(order))
    assert sum(index != place for place, index in enumerate(order)) > 60


def test_what_is_in_memory_is_indexed_and_what_is_lazy_is_not(sources):
    assert {name for name in NAMES if indexable(sources[name]) is not None} == {"eager", "list"}


def test_a_repeated_set_goes_on_without_end(cuts, sampler_of):
    sampler = sampler_of(cuts.repeat(), shuffle_buffer=10)
    packs = iter(sampler)
    names = [cut.id for _ in range(100) for cut in next(packs)]
    assert len(names) == len(set(names)) > 160
    assert {name.split("_")[1] for name in names} >= {"repeat0", "repeat1", "repeat2"}


def test_texts_are_packed_with_cuts_and_without_an_id_are_named_by_their_place(cuts, sampler_of, measure):
    texts = [TextExample(text="abc" * n) for n in range(1, 9)]
    sampler = sampler_of(CutSet(texts), shuffle=False, budget=64)
    collator = Collator(measure=measure, rule=sampler.terms.rule, budget=64)
    batches = [PackedDataset(collator)[pack] for pack in sampler]
    assert len(batches) > 1
    assert sorted(name for batch in batches for name in batch.ids) == [f"example-{n}" for n in range(8)]
    assert all(text.custom is None for text in texts)
    mixed = sampler_of(CutSet.mux(CutSet(texts), cuts, seed=0))
    assert sum(len(pack) for pack in mixed) == 88


def test_dicts_and_examples_are_packed_too(sampler_of, measure):
    items = [
        {"text": "no name"},
        {"id": 7, "text": "a number"},
        Example(
            id="turns",
            turns=(Turn("user", (Clip(source=None, num_samples=8000, sample_rate=16_000),)), Turn("assistant", ("hi",))),
        ),
    ]
    (pack,) = sampler_of(items, shuffle=False)
    assert [item["id"] if isinstance(item, dict) else item.id for item in pack] == ["example-0", 7, "turns"]
    assert "id" not in items[0]


def test_mixed_and_padded_cuts_are_packed_and_left_as_they_are(make_cut, sampler_of):
    padded, mixed = make_cut("padded", 1.0).pad(duration=2.0), make_cut("mixed", 2.0)
    mixed.language = "en"
    mixed = mixed.mix(make_cut("noise", 1.0))
    (pack,) = sampler_of([padded, mixed], shuffle=False)
    assert [cut.id for cut in pack] == [padded.id, mixed.id]
    assert all(cut.dataloading_info["world_size"] == 1 for cut in pack)
    assert pack[1].language == "en"
    assert not padded.custom
    assert mixed.custom == {"language": "en"}


@pytest.mark.parametrize("source", [iter([]), (n for n in "ab"), {}, "cuts.jsonl", Path("cuts.jsonl"), 5, CutSet(iter([]))])
def test_what_cannot_be_walked_again_is_refused(sampler_of, lines_of, source):
    with pytest.raises(ConfigError) as refusal:
        sampler_of(source)
    lines = lines_of(refusal.value)
    assert "cannot be walked" in lines["what"]
    assert type(getattr(source, "data", source)).__name__ in lines["got"]
    assert "again and again" in lines["expected"]
    assert ("spent" if hasattr(source, "__next__") or isinstance(source, CutSet) else "nothing in it") in lines["because"]
    path = isinstance(source, (str, Path))
    assert lines["fix"] == (
        "CutSet.from_file(path) opens a manifest" if path else "pass a CutSet; list(...) makes a list of an iterator"
    )


def test_a_shar_set_that_splits_itself_is_refused(cuts, sampler_of, lines_of, tmp_path):
    cuts.to_shar(tmp_path, fields={}, shard_size=40, warn_unused_fields=False)
    with pytest.raises(ConfigError) as refusal:
        sampler_of(CutSet.from_shar(in_dir=tmp_path, split_for_dataloading=True))
    lines = lines_of(refusal.value)
    assert "splits itself" in lines["what"]
    assert lines["got"] == "split_for_dataloading=True"
    assert lines["expected"] == "split_for_dataloading=False"
    assert "unequal steps" in lines["because"]
    assert "from_shar" in lines["fix"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # lhotse leaves its tar files open
def test_shar_with_its_audio_goes_through_to_the_batch(sampler_of, measure, tmp_path):
    cuts = CutSet(list(corpus())[:6])
    cuts.to_shar(tmp_path, fields={"recording": "wav"}, shard_size=3)
    sampler = sampler_of(CutSet.from_shar(in_dir=tmp_path), budget=2048)
    dataset = PackedDataset(Collator(measure=measure, rule=sampler.terms.rule, budget=2048))
    batches = [dataset[pack] for pack in sampler]
    assert sorted(name for batch in batches for name in batch.ids) == sorted(cut.id for cut in cuts)
    assert sum(int(batch.audio_lens.sum()) for batch in batches) == sum(cut.num_samples for cut in cuts)


def test_a_cut_whose_audio_is_not_as_long_as_declared_follows_the_collators_policy(sampler_of, measure, tmp_path):
    soundfile.write(tmp_path / "short.wav", [0.0] * 8000, 16_000)
    recording = Recording.from_file(tmp_path / "short.wav")
    recording.num_samples, recording.duration = 32_000, 2.0
    spoken = [SupervisionSegment(id="s", recording_id=recording.id, start=0, duration=2.0, text="abc")]
    cut = MonoCut(id="short", start=0, duration=2.0, channel=0, supervisions=spoken, recording=recording)
    sampler = sampler_of([cut])
    (pack,) = sampler
    assert [len(step[0]) for step in sampler.forecast()] == [1]
    collator = Collator(measure=measure, rule=sampler.terms.rule, budget=256, on_fault="set_aside")
    batch = PackedDataset(collator)[pack]
    assert (batch.ids, [one.id for one in batch.set_aside]) == ((), ["short"])
