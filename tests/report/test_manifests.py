"""Every kind of manifest gives the same tally; what is bad is named and the rest goes on."""

import gzip
import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packfp8.errors import ConfigError
from packfp8.report import reading
from packfp8.report.counting import Counting
from packfp8.report.lines import count_lines
from packfp8.report.manifests import Kind, find_manifests
from packfp8.report.reading import read
from packfp8.report.tally import Tally

COUNTING = Counting()


def _expected(rows):
    """Literal: 12.5 frames a second, four bytes a token."""
    frames = [round(seconds * 16000) // 1280 for seconds, _ in rows]
    return Tally.of(np.array(frames), np.array([len(text.encode()) // 4 for _, text in rows]))


def test_every_kind_of_manifest_gives_the_same_tally(manifest, rows):
    if manifest.name == "kaldi":  # Kaldi's text has no utterance without words, and ends words at spaces
        rows = [(seconds, text.strip()) for seconds, text in rows]
    tally, rejected = read(find_manifests([manifest]), COUNTING)
    assert rejected.count == 0
    assert tally == _expected(rows)


def test_line_ends_inside_a_text_do_not_split_its_line(write):
    rows = [(1.0, f"a{mark}b") for mark in ("\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\r")]
    for kind in ("nemo.json", "cuts.jsonl.gz"):
        tally, rejected = read(find_manifests([write(kind, rows)]), COUNTING)
        assert (tally.examples, rejected.count) == (len(rows), 0)


def test_bad_lines_are_counted_and_the_first_ten_named_with_their_numbers(tmp_path):
    good = json.dumps({"audio_filepath": "a", "duration": 2.0, "text": "word"})
    bad = {
        3: '{"duration": 1.0, "text": "cut o',
        5: '{"audio_filepath": "a", "text": "no length"}',
        6: '{"audio_filepath": "a", "duration": NaN, "text": "x"}',
        8: '{"duration": -1.0, "text": "x"}',
        9: '{"duration": 0, "text": "x"}',
        11: "[1, 2]",
        12: '{"duration": "long", "text": "x"}',
        13: '{"duration": null, "text": "x", "audio_filepath": "a"}',
        14: '{"duration": [1.0], "text": "x"}',
        15: '{"duration": 0.01, "text": ""}',
        17: "7",
        18: '{"duration": 1.0, "text": 5}',
    }
    lines = [bad.get(number, "" if number == 2 else good) for number in range(1, 21)]
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(lines))
    tally, rejected = read(find_manifests([path]), COUNTING)
    assert tally.examples == 20 - 1 - len(bad)
    assert rejected.count == len(bad)
    assert [line.split(":")[1] for line in rejected.named] == [str(number) for number in sorted(bad)[:10]]
    assert all(line.startswith(f"{path}:") for line in rejected.named)
    assert "no field 'duration'" in rejected.named[1]
    assert "impossible duration -1.0 s" in rejected.named[3]
    assert "no token: 0.01 s and no text" in rejected.named[9]


def test_lines_that_are_whole_only_together_are_rejected_each(tmp_path):
    good, one, two = b'{"duration": 1.0, "text": "word"}', b'{"duration": 2.0, "text": "a', b'b"}'
    for block in (b"\n".join((good, one, two, good)), b"\n".join((one, two)), b'{"duration": [1.0\n2.0], "text": "x"}'):
        part = count_lines(block, COUNTING)
        assert part.rejected == 2
        assert part.tally.examples == block.count(good)
    assert count_lines(good + b"," + good + b"\n" + good, COUNTING).rejected == 1


def test_a_text_without_audio_is_an_example_of_text_alone():
    part = count_lines(b'{"text": "eight by"}\n{"text": ""}\n', COUNTING)
    assert part.tally == Tally.of(np.array([0]), np.array([2]))
    assert part.rejected == 1


def test_a_mixed_cut_lasts_until_its_last_track_ends():
    inner = {"duration": 2.0, "supervisions": [{"start": 0, "duration": 2.0, "text": "four"}]}
    late = {"duration": 3.0, "supervisions": [{"start": 0, "duration": 3.0, "text": "more"}]}
    cut = {"id": "m", "type": "MixedCut", "tracks": [{"cut": inner}, {"cut": late, "offset": 2.5}]}
    part = count_lines(json.dumps(cut).encode(), COUNTING)
    assert part.tally == Tally.of(np.array([68]), np.array([2]))  # 5.5 s; "four more"


def test_supervisions_are_read_in_the_order_in_which_they_are_spoken(monkeypatch):
    texts = []
    counting = Counting.of(tokenizer=lambda text: texts.append(text) or [0] * len(text))
    supervisions = [{"start": 3, "text": "second"}, {"start": 1, "text": "first"}, {"start": 2, "text": None}]
    count_lines(json.dumps({"duration": 4.0, "supervisions": supervisions}).encode(), counting)
    assert texts[-1] == "first second"


@given(st.integers(1, 400), st.booleans())
def test_a_file_cut_into_byte_ranges_has_the_same_lines(size, ends_with_newline):
    import tempfile
    from pathlib import Path

    entries = [{"duration": 1 + n / 8, "text": "x" * (7 * n % 23)} for n in range(12)]
    lines = [json.dumps(entry) for entry in entries]
    lines.insert(5, "broken")
    lines.insert(9, "")
    text = "\n".join(lines) + ("\n" if ends_with_newline else "")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.jsonl"
        path.write_text(text)
        whole = count_lines(text.encode(), COUNTING)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reading, "_RANGE", size)
            tally, rejected = read(find_manifests([path]), COUNTING, cores=1)
    assert tally == whole.tally
    assert rejected.named == (f"{path}:6: not JSON: {whole.faults[0][1].removeprefix('not JSON: ')}",)


def test_children_count_what_this_process_counts(write, rows, monkeypatch):
    monkeypatch.setattr(reading, "_SMALL", 0)
    monkeypatch.setattr(reading, "_RANGE", 100)
    monkeypatch.setattr(reading, "_BLOCK", 256)
    monkeypatch.setattr(reading, "_FED", 64)
    broken = write("nemo.json", rows * 20, "broken.jsonl")
    broken.write_bytes(broken.read_bytes() + b"{\n")
    paths = [broken, write("cuts.jsonl.gz", rows * 20), write("table.csv", rows)]
    alone, apart = (read(find_manifests(paths), COUNTING, cores=cores) for cores in (1, 2))
    assert apart[0] == alone[0]
    assert apart[1] == alone[1]
    assert alone[1].named[0].startswith(f"{broken}:121:")


@pytest.mark.parametrize("ends_with_newline", [True, False])
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize(("fed", "block"), [(1, 1), (7, 64), (64, 300), (1 << 16, 1), (1 << 16, 2 << 20)])
def test_a_gzipped_file_is_the_same_text_in_bites_of_any_size(tmp_path, monkeypatch, fed, block, members, ends_with_newline):
    lines = [f"line {n} {'ab' * (n * 37 % 90)} {n * 7919}".encode() for n in range(120)]
    text = b"\n".join(lines) + (b"\n" if ends_with_newline else b"")
    cuts = [len(text) * n // members for n in range(members + 1)]
    path = tmp_path / "m.jsonl.gz"
    path.write_bytes(b"".join(gzip.compress(text[a:b]) for a, b in pairwise(cuts)))
    monkeypatch.setattr(reading, "_FED", fed)
    monkeypatch.setattr(reading, "_BLOCK", block)
    blocks = list(reading._unzipped(path))
    assert b"".join(part for part, _ in blocks) == text
    assert all(part.endswith(b"\n") for part, _ in blocks[:-1] if part)
    assert sum(size for _, size in blocks) == path.stat().st_size


def test_a_gzipped_file_that_is_cut_off_keeps_its_whole_lines_and_is_named(write, rows):
    path = write("cuts.jsonl.gz", rows * 400)
    packed = gzip.compress(gzip.decompress(path.read_bytes()))
    path.write_bytes(packed[: len(packed) // 2])
    tally, rejected = read(find_manifests([path]), COUNTING)
    assert 100 < tally.examples < 6 * 400
    assert rejected.count == 1
    assert "the gzipped file is broken from here on" in rejected.named[0]


def test_a_file_that_only_begins_like_gzip_is_named(tmp_path):
    (tmp_path / "x.jsonl.gz").write_bytes(b"\x1f\x8bnot at all")
    tally, rejected = read(find_manifests([tmp_path / "x.jsonl.gz"]), COUNTING)
    assert (tally.examples, rejected.count) == (0, 1)


def test_lengths_that_are_none_are_named_and_the_others_counted(lengths_file):
    path = lengths_file(np.array([5, 0, 7, -3, 7]))
    tally, rejected = read(find_manifests([path]), COUNTING)
    assert tally.text_tokens.tolist() == [5, 7]
    assert tally.counts.tolist() == [1, 2]
    assert tally.bare == 3
    assert rejected.named == (f"{path}:2: 0 is not a length", f"{path}:4: -3 is not a length")
    floats, _ = read(find_manifests([lengths_file(np.array([5.0, 2.5, np.nan]), "f.npy")]), COUNTING)
    assert floats.examples == 1


def test_a_table_may_hold_final_lengths(tmp_path):
    (tmp_path / "t.csv").write_text("name,num_tokens\na,12\nb,x\nc,0\nd,12\n")
    tally, rejected = read(find_manifests([tmp_path / "t.csv"]), COUNTING)
    assert (tally.bare, tally.text_tokens.tolist(), tally.counts.tolist()) == (2, [12], [2])
    assert [line.split(":")[1] for line in rejected.named] == ["3", "4"]


def test_a_quoted_text_may_hold_the_delimiter_and_a_line_end(tmp_path):
    (tmp_path / "t.csv").write_text('duration,text\n1.0,"a, b\nc d"\n2.0,plain\nshort\n')
    tally, rejected = read(find_manifests([tmp_path / "t.csv"]), COUNTING)
    assert (tally.examples, rejected.count) == (2, 1)


def test_an_utterance_without_a_text_is_rejected_by_name(write, rows):
    folder = write("kaldi", [(seconds, text or "x") for seconds, text in rows])
    text = (folder / "text").read_text().split("\n", 1)[1]
    (folder / "text").write_text(text)
    _, rejected = read(find_manifests([folder]), COUNTING)
    assert rejected.named == (f"{folder}:1: utterance utt0 has no text",)


def test_frame_counts_of_kaldi_stand_for_seconds(tmp_path):
    (tmp_path / "utt2num_frames").write_text("a 800\n")
    tally, _ = read(find_manifests([tmp_path / "utt2num_frames"]), COUNTING)
    assert tally.encoder_frames.tolist() == [100]


def test_globs_and_repeated_paths_name_each_file_once(write, rows, tmp_path):
    write("nemo.json", rows, "b.json")
    write("nemo.json", rows, "a.json")
    found = find_manifests([tmp_path / "*.json", tmp_path / "a.json"])
    assert [manifest.path.name for manifest in found] == ["a.json", "b.json"]


def test_kinds_are_told_by_content_where_the_name_says_nothing(write, rows, tmp_path, lengths_file):
    named = {
        write("nemo.json", rows, "data1"): Kind.LINES,
        write("cuts.jsonl.gz", rows, "data2"): Kind.LINES_GZ,
        write("list.json", rows, "data3"): Kind.LIST,
        write("table.csv", rows, "data4"): Kind.TABLE,
    }
    assert [find_manifests([path])[0].kind for path in named] == list(named.values())


@pytest.mark.parametrize("given", ["missing.jsonl", "*.nothing"])
def test_a_path_that_names_nothing_is_told(tmp_path, given, lines_of):
    with pytest.raises(ConfigError) as caught:
        find_manifests([tmp_path / given])
    assert "names no file" in lines_of(caught.value)[0]


def test_unknown_files_and_folders_are_told(tmp_path, lines_of):
    (tmp_path / "x.bin").write_bytes(b"\x00\x01")
    for path in (tmp_path, tmp_path / "x.bin"):
        with pytest.raises(ConfigError) as caught:
            find_manifests([path])
        assert str(path) in lines_of(caught.value)[0]
    with pytest.raises(ConfigError, match="no manifest is named"):
        find_manifests([])


def test_tables_and_arrays_without_lengths_are_told(tmp_path, lengths_file, lines_of):
    (tmp_path / "t.csv").write_text("name,size\na,1\n")
    for path in (tmp_path / "t.csv", lengths_file(np.ones((2, 2), dtype=int))):
        with pytest.raises(ConfigError) as caught:
            read(find_manifests([path]), COUNTING)
        assert str(path) in lines_of(caught.value)[0]


def test_progress_ends_at_all_bytes(write, rows):
    seen = []
    read(find_manifests([write("cuts.jsonl.gz", rows), write("kaldi", rows)]), COUNTING, progress=lambda *x: seen.append(x))
    assert seen[-1][0] == seen[-1][1] > 0
