"""Fuzzing: wild input gives a clear error or something lawful, and never anything else.

A short run, always the same, is part of the tests. A long one draws new inputs for as many seconds a target:

    PACKFP8_FUZZ_SECONDS=600 python -m pytest tests/field/test_fuzz.py -k align

What failed once is kept as an `example` beside its target.
"""

import gzip
import json
import os
import pickle
import secrets
import time
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, seed, settings
from hypothesis import strategies as st

from packfp8 import (
    RECIPES,
    AudioFrames,
    BudgetError,
    ByteTokenizer,
    ConfigError,
    Measure,
    PackError,
    StreamPacker,
    Topology,
    align,
)
from packfp8.data import Clip, Collator, Example, Turn
from packfp8.data.consumers import CONSUMERS
from packfp8.report.counting import Counting
from packfp8.report.manifests import find_manifests
from packfp8.report.reading import read

SECONDS = float(os.environ.get("PACKFP8_FUZZ_SECONDS", "0"))
pytestmark = [
    pytest.mark.timeout(SECONDS + 300),
    pytest.mark.filterwarnings("ignore:Reading `.npy`"),  # NumPy's, of headers that Python 2 may have written; they are read
]

WILD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 40),
    st.integers(2**45, 2**70),  # between, a length is one that a machine may hold and a test had better not
    st.floats(max_value=40),
    st.floats(min_value=1e15),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.lists(st.integers(-2, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def fuzz(*strategies, failed=(), count=60):
    """A test of drawn inputs: `count` that never change and those that `failed` once, or new ones for SECONDS seconds."""

    def decorate(law):
        def run():
            common = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
            if not SECONDS:
                test = given(*strategies)(law)
                for one in failed:
                    test = example(*one)(test)
                settings(max_examples=count, derandomize=True, **common)(test)()
                return
            end, tried = time.monotonic() + SECONDS, 0
            while time.monotonic() < end:
                test = settings(max_examples=200, derandomize=False, **common)(given(*strategies)(law))
                seed(secrets.randbits(64))(test)()
                tried += 200
            print(f"\n{law.__name__}: {tried} inputs in {SECONDS:g} s", end="")

        run.__name__, run.__doc__, run.__module__ = law.__name__, law.__doc__, law.__module__
        return run

    return decorate


def clear(error):
    """An error has its five lines."""
    lines = str(error).split("\n")
    assert [line.split(":")[0].strip() for line in lines[-4:]] == ["got", "expected", "because", "fix"]


# -- the rule ---------------------------------------------------------------------------------------------------------


@st.composite
def settings_of_a_rule(draw):
    """Arguments of `Topology` and `align`, sensible but for at most two that are wild."""
    topology = {name: draw(st.integers(1, 9)) for name in ("dp", "cp", "tp")} | {"sp": draw(st.booleans())}
    topology |= {f"{name}_rank": draw(st.integers(0, topology[name] - 1)) for name in ("dp", "cp", "tp")}
    rule = {"recipe": draw(st.sampled_from(sorted(RECIPES))), "layout": draw(st.sampled_from(["thd", "bshd"]))}
    rule |= {"trains_weights": draw(st.booleans()), "fast": draw(st.booleans())}
    for where in draw(st.lists(st.sampled_from([topology, rule]), max_size=2)):
        where[draw(st.sampled_from(sorted(where)))] = draw(WILD)
    return topology, rule


@fuzz(settings_of_a_rule(), st.integers(0, 10**6), st.integers(1, 300), WILD, count=150)
def test_align_gives_a_lawful_rule_or_a_clear_error(given_settings, tokens, batch, wild):
    topology, arguments = given_settings
    try:
        sizes = Topology(**topology)
        rule = align(arguments.pop("recipe"), sizes, **arguments)
    except PackError as error:
        clear(error)
        return
    assert all(type(value) is bool for value in (sizes.sp, rule.trains_weights, rule.fast))
    assert rule.slot(tokens) - tokens in range(rule.sequence)
    assert rule.pack(tokens) - tokens in range(rule.total)
    rule.check(rule.pack(tokens), slots=[rule.slot(tokens), rule.pack(tokens) - rule.slot(tokens)])
    if rule.layout == "bshd":
        rule.check(batch * rule.row(batch), slots=[rule.row(batch)] * batch, batch=batch)
    with pytest.raises(PackError):
        rule.floor(rule.total - 1)
    assert rule.floor(rule.total + tokens) == (rule.total + tokens) // rule.total * rule.total
    assert pickle.loads(pickle.dumps(rule)) == rule
    other = {**topology, "dp": sizes.dp + 1, "cp_rank": 0, "tp_rank": 0}
    assert align(rule.recipe, Topology(**other), **arguments).fingerprint == rule.fingerprint
    assert rule.fingerprint in str(rule)
    for ask in (rule.slot, rule.pack, rule.row, rule.floor, rule.check):
        try:
            ask(wild)
        except PackError as error:
            clear(error)
        else:
            assert isinstance(wild, int)
            assert not isinstance(wild, bool)


# -- the stream packer ------------------------------------------------------------------------------------------------

PUSHES = st.one_of(st.integers(1, 70), st.integers(1, 70), st.integers(1, 70), WILD, st.sampled_from(["pop", "flush", "save"]))


@fuzz(
    st.tuples(st.integers(1, 64), st.integers(1, 9), st.integers(1, 12), st.one_of(st.none(), st.integers(1, 6))),
    st.sampled_from(["error", "set_aside"]),
    st.lists(PUSHES, max_size=60),
    count=150,
)
def test_the_stream_packer_loses_repeats_and_overfills_nothing(sizes, policy, pushes):
    capacity, multiple, lookahead, most = sizes
    make = lambda: StreamPacker(capacity, multiple, lookahead, most, over_budget=policy)  # noqa: E731
    try:
        packer = make()
    except PackError:
        assert capacity < multiple
        return
    lengths, packs = {}, []
    for key, push in enumerate(pushes):
        if push == "pop":
            packs += [packer.pop() or []]
        elif push == "flush":
            packer.flush()
        elif push == "save":
            state, packer = json.loads(json.dumps(packer.state_dict())), make()
            packer.load_state_dict(state)
        else:
            try:
                packer.push(key, push)
                lengths[key] = push
            except PackError as error:
                clear(error)
                assert (
                    not isinstance(push, int)
                    or isinstance(push, bool)
                    or push < 1
                    or (policy == "error" and push > capacity // multiple * multiple)
                )
    packer.flush()
    packs += list(iter(packer.pop, None))
    aside = [one.key for one in packer.set_aside]
    assert sorted([key for pack in packs for key in pack] + aside) == sorted(lengths)
    assert len(packer) == 0
    for pack in packs:
        assert sum(-(-lengths[key] // multiple) * multiple for key in pack) <= capacity
        assert len(pack) <= (most or len(pack))


# -- manifests --------------------------------------------------------------------------------------------------------

SECONDS_OF = st.one_of(st.floats(0.01, 30), st.integers(1, 30), WILD)
TEXTS = st.one_of(st.text(max_size=20), st.sampled_from(["\u2028", "a\u0085b", "\r", "🎧", "", " "]), WILD)
LINES = st.one_of(
    st.fixed_dictionaries({"audio_filepath": st.just("a.wav"), "duration": SECONDS_OF, "text": TEXTS}),
    st.fixed_dictionaries(
        {
            "duration": SECONDS_OF,
            "supervisions": st.lists(st.fixed_dictionaries({"text": TEXTS, "start": SECONDS_OF}), max_size=3),
        }
    ),
    st.fixed_dictionaries(
        {
            "tracks": st.lists(
                st.fixed_dictionaries({"offset": SECONDS_OF, "cut": st.fixed_dictionaries({"duration": SECONDS_OF})}),
                max_size=2,
            )
        }
    ),
    st.fixed_dictionaries({"text": TEXTS}),
    WILD,
)
CELLS = st.one_of(
    st.floats(0.01, 30),
    st.integers(-3, 2**70),
    st.text(max_size=6),
    st.sampled_from(["", "nan", "inf", '"', "1e999", "9" * 30]),
)
HEADS = st.sampled_from(
    [
        "duration,text",
        "duration;utf8_bytes",
        "tokens",
        "duration\ttext\tbytes",
        "Duration , TEXT",
        "a,b",
        "",
        '"duration","text"',
    ]
)
ENDS = st.sampled_from(["\n", "\r\n", "\n\n"])
CUTS = st.lists(st.tuples(st.integers(0, 2000), st.binary(max_size=3), st.integers(0, 3)), max_size=3)


def told(value):
    """JSON as people's tools write it, NaN and Infinity too; bytes as their repr."""
    return json.dumps(value, ensure_ascii=False, default=repr).encode("utf-8", "surrogatepass")


def damaged(content, cuts):
    """The bytes with some put in, and some left out, at places."""
    for place, put, left in cuts:
        place = place % (len(content) + 1)
        content = content[:place] + put + content[place + left :]
    return content


def read_all(folder, files):
    """The tally of files by name: (examples, tokens, rejected), or the error."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    try:
        tally, rejected = read(find_manifests([folder / next(iter(files))]), Counting.of(tokenizer=ByteTokenizer()), cores=1)
    except PackError as error:
        clear(error)
        return type(error)
    finally:
        for name in files:
            (folder / name).unlink()
    assert tally.examples == int(tally.counts.sum()) >= 0
    assert (tally.tokens(0) > 0).all()
    assert rejected.count >= len(rejected.named)
    return tally.examples, int((tally.tokens(0) * tally.counts).sum()), rejected.count


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(autouse=True)
def _in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def here():
    from pathlib import Path

    return Path.cwd()


@fuzz(st.lists(LINES, max_size=8), ENDS, CUTS)
def test_lines_of_json_are_counted_or_rejected_one_by_one(lines, end, cuts):
    rows = [told(line) for line in lines]
    assume(not rows or not rows[0].startswith(b"["))  # that is a file of another kind, one list
    whole = read_all(here(), {"m.jsonl": b"".join(row + end.encode() for row in rows)})
    assert whole == read_all(here(), {"m.jsonl": b"".join(row + b"\n" for row in rows)})
    assert whole[0] + whole[2] == len(rows)
    zipped = gzip.compress(b"".join(row + end.encode() for row in rows), mtime=0)
    assert read_all(here(), {"m.jsonl.gz": zipped}) == whole
    if not any(row.startswith(b"[") for row in rows):  # alone, such a line is a list of entries
        alone = [read_all(here(), {"m.jsonl": row}) for row in rows]
        assert [sum(column) for column in zip(*alone, strict=True)] == list(whole if rows else ())
    read_all(here(), {"m.jsonl": damaged(b"\n".join(rows), cuts)})
    read_all(here(), {"m.jsonl.gz": damaged(zipped, cuts)})
    read_all(here(), {"m.json": damaged(told(lines), cuts)})


@fuzz(HEADS, st.lists(st.lists(CELLS, min_size=1, max_size=3), max_size=8), ENDS, CUTS, count=150)
def test_tables_are_counted_or_refused(head, rows, end, cuts):
    delimiter = max(",;\t", key=head.count)
    lines = [head, *(delimiter.join(map(str, row)) for row in rows)]
    content = "".join(line + end for line in lines).encode("utf-8", "surrogatepass")
    read_all(here(), {"m.csv": content})
    read_all(here(), {"m.csv": damaged(content, cuts)})


@fuzz(st.lists(st.tuples(st.text(max_size=4), CELLS, TEXTS), max_size=8), ENDS, CUTS, st.booleans())
def test_kaldi_folders_are_counted_or_refused(rows, end, cuts, texts):
    duration = "".join(f"{name} {value}{end}" for name, value, _ in rows).encode("utf-8", "surrogatepass")
    text = "".join(f"{name} {value}{end}" for name, _, value in rows).encode("utf-8", "surrogatepass")
    read_all(here(), {"utt2dur": duration} | ({"text": text} if texts else {}))
    read_all(here(), {"utt2dur": damaged(duration, cuts)} | ({"text": damaged(text, cuts)} if texts else {}))


@fuzz(
    st.lists(st.one_of(st.integers(-3, 2**62), st.floats()), max_size=8),
    st.sampled_from(["int64", "uint8", "float32", "float64", "bool", "complex64", "U3", "2d"]),
    CUTS,
)
def test_arrays_of_lengths_are_counted_or_refused(values, kind, cuts):
    if kind == "2d":
        array = np.array([[1, 2]])
    else:
        with np.errstate(all="ignore"):
            least, most = (0, 255) if kind in ("uint8", "bool") else (-(2**62), 2**62)
            fitting = values if kind[0] in "fcU" else [int(v) for v in values if np.isfinite(v) and least <= v <= most]
            array = np.array(fitting, dtype=object).astype(kind)
    np.save(here() / "made.npy", array)
    content = (here() / "made.npy").read_bytes()
    read_all(here(), {"m.npy": content})
    read_all(here(), {"m.npy": damaged(content, cuts)})


@fuzz(st.binary(max_size=60), st.sampled_from(["jsonl", "jsonl.gz", "json", "csv", "npy", "txt"]))
def test_any_bytes_under_any_name_are_counted_or_refused(content, suffix):
    read_all(here(), {f"m.{suffix}": content})


# -- the collator -----------------------------------------------------------------------------------------------------

RATES = st.sampled_from([16_000, 8_000, 48_000, 44_100])
WAVES = st.one_of(
    st.integers(0, 9000).map(lambda n: np.linspace(-1, 1, n, dtype=np.float32)),
    st.integers(1, 3000).map(lambda n: np.zeros((2, n), np.float64)),
    st.integers(1, 3000).map(lambda n: np.zeros((n, 2), np.float16)),
    st.integers(1, 3000).map(lambda n: np.full(n, np.nan, np.float32)),
    st.integers(1, 3000).map(lambda n: np.zeros(n, np.int16)),
    st.integers(1, 3000).map(lambda n: [0.5] * n),
    WILD,
)


@st.composite
def items(draw):
    """What people put in a batch: dicts of one clip or of a conversation, examples, and wild things."""
    kind = draw(st.sampled_from(["clip", "clip", "text", "messages", "example", "wild"]))
    if kind == "wild":
        return draw(WILD)
    if kind == "example":
        wave = draw(st.integers(1, 9000))
        clip = Clip(
            source=np.zeros(wave, np.float32), num_samples=wave + draw(st.integers(-1, 1)) or 1, sample_rate=draw(RATES)
        )
        turns = draw(
            st.lists(
                st.tuples(
                    st.sampled_from(["user", "assistant", "system"]),
                    st.lists(st.one_of(st.text(max_size=9), st.just(clip)), max_size=3),
                ),
                max_size=3,
            )
        )
        return Example(id=draw(st.text(max_size=4)), turns=tuple(Turn(role, tuple(parts)) for role, parts in turns))
    item = {"text": draw(TEXTS)}
    if kind == "clip":
        wave = draw(WAVES)
        item |= {"audio": wave, "num_samples": max(np.shape(wave), default=0) if isinstance(wave, np.ndarray) else 100}
    if kind == "messages":
        marks = draw(st.integers(0, 2))
        item = {"audio": [np.zeros(1600, np.float32)] * draw(st.integers(0, 2)), "messages": []}
        item["messages"] = [
            {"role": "user", "content": "<|audio|>" * marks + draw(st.text(max_size=5))},
            {"role": "assistant", "content": draw(TEXTS)},
        ]
    for _ in range(draw(st.integers(0, 2))):
        name = draw(
            st.sampled_from(
                ["audio", "text", "duration", "num_samples", "sampling_rate", "offset", "channel", "prompt", "id", "messages"]
            )
        )
        item[name] = draw(WILD)
    return item


@st.composite
def collators(draw):
    topology = {name: draw(st.integers(1, 4)) for name in ("cp", "tp")} | {"sp": draw(st.booleans())}
    options = {
        "budget": draw(st.one_of(st.none(), st.integers(1, 2000))),
        "max_sequences": draw(st.one_of(st.none(), st.integers(1, 4))),
        "frame_budget": draw(st.one_of(st.none(), st.integers(0, 200))),
    }
    options |= {"static": draw(st.booleans()), "resample": draw(st.booleans())}
    return draw(st.sampled_from(sorted(RECIPES))), draw(st.sampled_from(["thd", "bshd"])), topology, options


MEASURE = Measure(frames=AudioFrames.fastconformer())


@fuzz(st.lists(items(), max_size=5), collators())
def test_the_collator_makes_lawful_batches_of_what_is_sound_and_lists_the_rest(given_items, collator):
    recipe, layout, topology, options = collator
    rules = [align(recipe, Topology(**topology, cp_rank=rank), layout=layout) for rank in range(topology["cp"])]
    try:
        strict, lenient = (
            [Collator(measure=MEASURE, rule=rule, over_budget=policy, on_fault=policy, **options) for rule in rules]
            for policy in ("error", "set_aside")
        )
    except PackError as error:
        clear(error)
        return
    batches = [collator.collate(given_items, step=3) for collator in lenient]  # sets aside, and never raises
    lawful(batches, len(given_items))
    try:
        whole = [collator.collate(given_items) for collator in strict]
    except PackError as error:
        clear(error)
        assert batches[0].set_aside
    else:
        assert not batches[0].set_aside
        assert [batch.checksum for batch in whole] == [batch.checksum for batch in batches]


def lawful(batches, count):
    """Asserts what holds for the batches of all CP ranks, whatever they were made of."""
    first = batches[0]
    rule, slots = first.rule, first.slots
    rule.check(slots.total, slots=slots.sizes.tolist(), batch=slots.rows or None)
    assert len(first.ids) + len(first.set_aside) == count
    assert len({(batch.checksum, batch.ids, tuple(one.id for one in batch.set_aside)) for batch in batches}) == 1
    placed = 0
    for batch in batches:
        assert batch.tokens * len(batches) == slots.total
        assert {getattr(batch, name).shape for name in ("input_ids", "labels", "position_ids", "seq_idx", "padding_mask")} == {
            batch.input_ids.shape
        }
        assert batch.num_supervised == int((batch.labels != -100).sum())
        assert not (batch.labels[batch.padding_mask] != -100).any()
        assert batch.audio_destination.numel() == batch.audio_source.numel()
        here = batch.audio_destination < batch.tokens  # in one row, places that are not there make the number constant
        source, destination = batch.audio_source[here], batch.audio_destination[here]
        assert here.all() or (
            batch.audio_offsets is not None and set(batch.audio_source[~here].tolist()) == {batch.audio_frames}
        )
        assert destination.unique().numel() == source.unique().numel() == destination.numel()
        assert not batch.padding_mask.flatten()[destination].any()
        assert source.numel() == 0 or int(source.max()) < batch.audio.shape[0] * batch.audio_frames
        assert torch.isfinite(batch.audio).all()
        assert int(batch.cu_seqlens[-1]) == slots.total
        placed += destination.numel()
        for consumer in set(CONSUMERS) - {"megatron"}:
            try:
                batch.kwargs(consumer)
            except ConfigError as error:
                clear(error)
        twin = pickle.loads(pickle.dumps(batch))
        assert all(
            torch.equal(getattr(twin, f.name), getattr(batch, f.name))
            for f in fields(batch)
            if isinstance(getattr(batch, f.name), torch.Tensor)
        )
    if len(set(first.ids)) == len(first.ids):
        parts = first.unpack([batch.labels for batch in batches])
        assert [len(part) for part in parts.values()] == slots.lengths[: slots.sequences].tolist()
        assert all(part[-1] == -100 for part in parts.values())


# -- what failed once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["false", 0, None, 1.0])
@pytest.mark.parametrize("name", ["sp", "trains_weights", "fast"])
def test_a_flag_that_is_no_bool_is_refused_and_not_taken_for_true(name, flag):
    with pytest.raises(PackError, match=f"{name} is neither True nor False") as refusal:
        align("block", Topology(sp=flag, tp=2)) if name == "sp" else align("block", **{name: flag})
    clear(refusal.value)


@pytest.mark.parametrize("arguments", [(["block"],), ({"recipe": "block"},), ("block", 4), ("block", "dp2")])
def test_a_recipe_or_topology_of_another_type_is_refused(arguments):
    with pytest.raises(PackError) as refusal:
        align(*arguments)
    clear(refusal.value)


@pytest.mark.parametrize("total", [None, True, 16.0, "16"])
def test_a_total_that_is_no_count_is_refused(total):
    with pytest.raises(PackError, match="the tokens of a pack is not a count") as refusal:
        align("block").check(total)
    clear(refusal.value)


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("m.jsonl", b'{"audio_filepath": "a.wav", "duration": -1180591620717411303424, "text": "a"}', (0, 0, 1)),
        ("m.jsonl", b'{"audio_filepath": "a.wav", "duration": "1", "text": "a"}', (0, 0, 1)),
        ("m.jsonl", b'[1]\n{"audio_filepath": "a.wav", "duration": 1, "text": "a"}', (1, 13, 1)),  # begins like a list
        ("m.json", b'[{"audio_filepath": "a.wav", "duration": 1, "text": "a"}, ', (0, 0, 1)),  # a list cut off
        ("m.csv", b"duration,utf8_bytes\n1.0,999999999999999999999999999999\n2.0,8\n", (1, 27, 1)),
        ("m.csv", b"duration,utf8_bytes\n1.0,-5\n", (0, 0, 1)),
        ("m.csv", b"duration\ra,b\n1.0,5\n", ConfigError),
        ("m.npy", b"\x93NUMPY\x00\x01", ConfigError),
        ("m.npy", b"\x93NUMPY\x01\x00\x05\x00{'de", ConfigError),
    ],
)
def test_a_broken_manifest_is_rejected_line_by_line_or_refused(name, content, found):
    assert read_all(here(), {name: content}) == found


@pytest.mark.parametrize("messages", [False, 7, 0.5, "text", {"role": "user"}, [None], [[]]])
def test_messages_that_are_no_list_of_messages_are_an_example_error(messages):
    collator = Collator(measure=MEASURE, rule=align("block"), on_fault="set_aside")
    batch = collator.collate([{"id": "bad", "messages": messages}])
    assert "has a message whose content is not text" in batch.set_aside[0].reason


@pytest.mark.parametrize(("samples", "budget"), [(2**40, 4096), (2**44, 4096), (2**44, None), (2**62, None), (2**70, 64)])
def test_an_absurd_length_is_told_before_memory_is_taken_for_it(samples, budget):
    items = [{"id": "ages", "audio": "/nowhere.wav", "num_samples": samples, "text": "a"}, {"id": "fine", "text": "b"}]
    options = {"measure": MEASURE, "rule": align("block"), "budget": budget}
    with pytest.raises(BudgetError, match="'ages' does not fit the pack") as refusal:
        Collator(**options).collate(items)
    clear(refusal.value)
    batch = Collator(**options, over_budget="set_aside").collate(items)
    assert (batch.ids, [one.id for one in batch.set_aside]) == (("fine",), ["ages"])


@pytest.mark.parametrize("channel", ["left", 0.0, True, [0], -1, 1])
def test_a_channel_that_is_no_index_is_set_aside_and_named(channel):
    item = {"id": "bad", "audio": np.zeros(1600, np.float32), "text": "a", "channel": channel}
    batch = Collator(measure=MEASURE, rule=align("block"), on_fault="set_aside").collate([item])
    assert f"has no channel {channel}" in batch.set_aside[0].reason


@pytest.mark.parametrize("end", ["\n", "\r\n", "\u2028"])
def test_an_error_has_five_lines_whatever_the_users_text_holds(end):
    with pytest.raises(PackError) as refusal:
        Collator(measure=MEASURE, rule=align("block"))([{"text": "a", "audio": {f"one{end}two": 0}, "num_samples": 100}])
    clear(refusal.value)
    assert len(str(refusal.value).splitlines()) == 5
    assert r"one\ntwo" in str(refusal.value)
