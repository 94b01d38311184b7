"""Columns of numbers to a tally: CSV files, Kaldi data folders, NumPy lengths."""

from __future__ import annotations

import csv
import tokenize
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from packfp8.errors import ConfigError
from packfp8.lengths import Histogram
from packfp8.lengths.histogram import chunks
from packfp8.report.counting import Counting
from packfp8.report.lines import Part, Rows
from packfp8.report.tally import MOST, NAMED, NOTHING, Tally

_KALDI_FRAME_SECONDS = 0.01  # Kaldi's default frame shift, in utt2num_frames

# What a column may be called, for each thing that it may hold.
_SECONDS = ("duration", "duration_s", "duration_seconds", "seconds", "dur")
_LENGTH = ("tokens", "num_tokens", "length", "n_tokens")
_TEXT = ("text", "transcript", "transcription", "sentence")
_BYTES = ("utf8_bytes", "bytes", "chars")


def count_csv(path: Path, counting: Counting) -> Part:
    """What a table with a header holds.

    Columns: a duration in seconds, and a text or the number of its UTF-8 bytes (or characters); or final lengths in tokens.

    Raises:
        ConfigError: no column says how long an example is.
    """
    lines = _text_lines(path)
    header = next(lines, "")
    delimiter = max(",\t;", key=header.count)
    names = _names(header, delimiter)
    seconds, length, text, size = (_place(names, known) for known in (_SECONDS, _LENGTH, _TEXT, _BYTES))
    if seconds is None and length is None:
        raise _no_length_column(path, names)
    rows, lengths, faults = Rows(counting), [], []
    count_text = counting.text_counter()
    reader = csv.reader(lines, delimiter=delimiter)
    while True:
        try:
            row = next(reader)
            number = reader.line_num + 1
            if not row:
                continue
            if seconds is None:
                lengths.append((number, int(row[length])))
                continue
            tokens = count_text(row[text]) if text is not None else 0
            if text is None and size is not None:
                tokens = int(counting.of_bytes(_num_bytes(row[size])))
            rows.add_counted(number, float(row[seconds]), tokens)
        except StopIteration:
            break
        except (ValueError, IndexError, csv.Error) as fault:
            faults.append((reader.line_num + 1, " ".join(str(fault).split())))
    if seconds is None:
        return _of_lengths(lengths, faults, reader.line_num + 1)
    return rows.part(reader.line_num + 1, faults)


def count_kaldi(folder: Path, counting: Counting) -> Part:
    """What a Kaldi data folder holds; an utterance without a text is rejected where the folder has texts."""
    source = folder / ("utt2dur" if (folder / "utt2dur").is_file() else "utt2num_frames")
    scale = 1.0 if source.name == "utt2dur" else _KALDI_FRAME_SECONDS
    texts = _kaldi_texts(folder / "text", counting) if (folder / "text").is_file() else None
    rows, faults, number = Rows(counting), [], 0
    for number, line in enumerate(source.read_bytes().split(b"\n"), 1):
        fields = line.split()
        if not fields:
            continue
        try:
            name, value = fields
            rows.add_counted(number, float(value) * scale, 0 if texts is None else texts[name])
        except KeyError:
            faults.append((number, f"utterance {fields[0].decode('utf-8', 'replace')} has no text"))
        except ValueError:
            faults.append((number, "not 'utterance number'"))
    return rows.part(number, faults)


def count_numpy(path: Path, counting: Counting) -> Part:
    """What an array of final lengths holds (whole numbers [n]); `counting` only adds its prompt, later.

    Raises:
        ConfigError: it is broken, or not one row of numbers.
    """
    try:
        lengths = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, TypeError, SyntaxError, EOFError, tokenize.TokenError) as fault:  # whatever stands in its header
        raise ConfigError(
            f"{path} is not a NumPy array that can be read",
            got=f"{type(fault).__name__}: {' '.join(str(fault).split())[:200]}",
            expected="a whole .npy file of numbers",
            because="a report on part of the data would look like a report on all of it",
            fix="fetch or write the file again: np.save(path, lengths)",
        ) from fault
    if lengths.ndim != 1 or lengths.dtype.kind not in "iuf":
        raise ConfigError(
            f"{path} is not a row of lengths",
            got=f"{lengths.dtype} {list(lengths.shape)}",
            expected="whole numbers of tokens, in one dimension",
            because="each number is the length of one example",
            fix="np.save(path, lengths) with an integer array [n]",
        )
    total, rejected, faults, start = Histogram.of([]), 0, [], 0
    for chunk in chunks(lengths):
        good = (chunk >= 1) & (chunk <= MOST)  # False for NaN
        if chunk.dtype.kind == "f":
            good &= np.floor(chunk) == chunk
        if good.all():
            total += Histogram.of(chunk)
        else:
            bad = np.flatnonzero(~good)
            rejected += len(bad)
            faults += [(start + int(i) + 1, f"{chunk[i]} is not a length") for i in bad[: NAMED - len(faults)]]
            total += Histogram.of(chunk[good])
        start += len(chunk)
    return Part(tally=Tally.of_lengths(total), lines=len(lengths), rejected=rejected, faults=tuple(faults))


def _of_lengths(lengths: list[tuple[int, int]], faults: list[tuple[int, str]], lines: int) -> Part:
    good = [length for _, length in lengths if 1 <= length <= MOST]
    faults = sorted([*faults, *((n, f"{length} is not a length") for n, length in lengths if not 1 <= length <= MOST)])
    tally = Tally.of_lengths(Histogram.of(np.array(good))) if good else NOTHING
    return Part(tally=tally, lines=lines, rejected=len(faults), faults=tuple(faults[:NAMED]))


def _text_lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:  # a binary file ends its lines at newline bytes only
        for number, line in enumerate(file):
            yield (line.removeprefix(b"\xef\xbb\xbf") if not number else line).decode("utf-8", "replace")


def _names(header: str, delimiter: str) -> list[str]:
    """Names of the columns; none where the first line is not one of a table."""
    try:
        return [name.strip().lower() for name in next(csv.reader([header], delimiter=delimiter), [])]
    except csv.Error:
        return []


def _num_bytes(cell: str) -> int:
    """A number of bytes or characters; ValueError where it cannot be."""
    count = int(cell or 0)
    if not 0 <= count <= MOST:
        raise ValueError(f"{count} is not a number of bytes")
    return count


def _place(names: list[str], known: tuple[str, ...]) -> int | None:
    return next((names.index(name) for name in known if name in names), None)


def _kaldi_texts(path: Path, counting: Counting) -> dict[bytes, int]:
    """Text tokens of each utterance."""
    count_text, tokens = counting.text_counter(), {}
    for line in path.read_bytes().split(b"\n"):
        name, *text = line.split(None, 1)[:2] or [b""]
        tokens[name] = count_text(text[0].rstrip(b"\r").decode("utf-8", "replace")) if text else 0
    return tokens


def _no_length_column(path: Path, names: list[str]) -> ConfigError:
    return ConfigError(
        f"{path} has no column that says how long an example is",
        got=f"columns {', '.join(names)[:200]}",
        expected=f"seconds ({', '.join(_SECONDS)}) or tokens ({', '.join(_LENGTH)})",
        because="the first line of a table names its columns",
        fix="rename the column, and give the table a header",
    )
