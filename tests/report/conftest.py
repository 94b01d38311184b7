"""One small corpus in every spelling that manifests have."""

import gzip
import io
import json
import tarfile

import numpy as np
import pytest

ROWS = [
    (1.0, "one two"),
    (4.56, "drei vier fünf"),
    (0.8, "six"),
    (12.04, "sieben\u2028acht\u0085neun"),
    (3.2, ""),
    (1.0, "one two"),
]


@pytest.fixture(scope="session")
def rows():
    """(seconds, text) of each example; a text with Unicode line ends, one with none, and two examples alike."""
    return list(ROWS)


def _nemo(seconds, text):
    return {"audio_filepath": "a.wav", "duration": seconds, "text": text}


def _cut(number, seconds, text):
    supervision = {"id": f"s{number}", "recording_id": "r", "start": 0.0, "duration": seconds, "channel": 0, "text": text}
    return {
        "id": f"c{number}",
        "start": 0.0,
        "duration": seconds,
        "channel": 0,
        "supervisions": [supervision],
        "type": "MonoCut",
    }


def _lines(entries, **options):
    return "".join(json.dumps(entry, **options) + "\n" for entry in entries).encode()


@pytest.fixture
def write(tmp_path):
    """write(kind, rows) -> the path of a manifest of that kind."""

    def write(kind, rows, name=None):
        cuts = [_cut(n, seconds, text) for n, (seconds, text) in enumerate(rows)]
        nemo = [_nemo(seconds, text) for seconds, text in rows]
        path = tmp_path / (name or kind)
        if kind == "nemo.json":
            path.write_bytes(_lines(nemo, ensure_ascii=False))
        elif kind == "windows.jsonl":
            path.write_bytes(b"\xef\xbb\xbf" + _lines(nemo, ensure_ascii=False).replace(b"\n", b"\r\n"))
        elif kind == "cuts.jsonl":
            path.write_bytes(_lines(cuts))
        elif kind == "cuts.jsonl.gz":
            half = len(cuts) // 2  # two gzip members, as appending writes them
            path.write_bytes(gzip.compress(_lines(cuts[:half])) + gzip.compress(_lines(cuts[half:])))
        elif kind == "list.json":
            path.write_bytes(json.dumps(cuts, indent=1).encode())
        elif kind == "table.csv":
            table = [f"{seconds},{len(text.encode())}\n" for seconds, text in rows]
            path.write_text("duration_s,utf8_bytes\n" + "".join(table))
        elif kind == "texts.tsv":
            table = [f"{text}\t{seconds}\r\n" for seconds, text in rows]
            path.write_bytes(("text\tduration\r\n" + "".join(table)).encode())
        elif kind == "shar":
            path.mkdir()
            for shard, part in enumerate((cuts[:2], cuts[2:])):
                (path / f"cuts.{shard:06d}.jsonl.gz").write_bytes(gzip.compress(_lines(part)))
            with tarfile.open(path / "recording.000000.tar", "w") as tar:
                tar.addfile(tarfile.TarInfo("a.wav"), io.BytesIO())
        elif kind == "kaldi":
            path.mkdir()
            (path / "utt2dur").write_text("".join(f"utt{n} {seconds}\n" for n, (seconds, _) in enumerate(rows)))
            (path / "text").write_text("".join(f"utt{n} {text}\n" for n, (_, text) in enumerate(rows)), newline="\n")
        else:
            raise AssertionError(kind)
        return path

    return write


KINDS = [
    "nemo.json", "windows.jsonl", "cuts.jsonl", "cuts.jsonl.gz", "list.json", "table.csv", "texts.tsv", "shar", "kaldi",
]  # fmt: skip


@pytest.fixture(params=KINDS)
def manifest(request, write, rows):
    """The corpus as a manifest of each kind."""
    return write(request.param, rows)


@pytest.fixture
def lengths_file(tmp_path):
    """lengths_file(lengths) -> the path of a `.npy` file with them."""

    def lengths_file(lengths, name="lengths.npy"):
        np.save(tmp_path / name, lengths)
        return tmp_path / name

    return lengths_file


@pytest.fixture
def lines_of():
    """lines_of(error) -> its five lines, each looked at."""

    def lines_of(error):
        lines = str(error).splitlines()
        assert [line.split(":")[0].strip() for line in lines[1:]] == ["got", "expected", "because", "fix"]
        assert all(line.split(":", 1)[1].strip() for line in lines[1:])
        return lines

    return lines_of
