"""Lines of JSON to a tally: lhotse cuts and NeMo manifest entries, told apart line by line.

A line ends at a newline byte and nowhere else: U+2028, U+0085 and a carriage return may stand inside a text. A bad line is
rejected with its number and reason, and the rest goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import orjson

from packfp8.report.counting import Counting
from packfp8.report.tally import MOST, NAMED, Tally

_BOM = b"\xef\xbb\xbf"
_PIECE = 64 << 10  # bytes; larger ones fall out of the cache (measured, two cores)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one part of a file holds.

    Attributes:
        tally: its good lines.
        lines: number of lines, blank ones too, so that the next part can number its own.
        rejected: number of bad lines.
        faults: (line number from 1, reason) of the first bad ones.
    """

    tally: Tally
    lines: int
    rejected: int
    faults: tuple[tuple[int, str], ...]


def count_lines(block: bytes, counting: Counting) -> Part:
    """What a block of whole lines holds."""
    rows, faults, lines = Rows(counting), [], 0
    for piece in _pieces(block.removeprefix(_BOM)):
        number = piece.count(b"\n") + 1
        if not rows.add_alike(lines, number, piece):
            faults += _add_one_by_one(rows, lines, piece.split(b"\n"))
        lines += number
    return rows.part(lines, faults)


def count_list(text: bytes, counting: Counting) -> Part:
    """What a JSON file that is one list of objects holds; its "lines" are the entries.

    A file that only begins like a list, as a broken one or lines of which the first is a list, is taken line by line.
    """
    try:
        entries = orjson.loads(text)
    except orjson.JSONDecodeError:
        return count_lines(text, counting)
    rows, faults = Rows(counting), []
    for number, entry in enumerate(entries, 1):
        try:
            rows.add(number, entry)
        except (ValueError, LookupError, TypeError, AttributeError) as fault:
            faults.append((number, _reason(fault)))
    return rows.part(len(entries), faults)


def _pieces(block: bytes) -> Iterator[bytes]:
    """The block in pieces of whole lines that fit a core's cache once they are parsed, without their last newline."""
    start = 0
    while start < len(block):
        end = block.find(b"\n", start + _PIECE)
        end = len(block.removesuffix(b"\n")) if end < 0 else end
        yield block[start:end]
        start = end + 1


def _add_one_by_one(rows: Rows, before: int, lines: list[bytes]) -> list[tuple[int, str]]:
    """The faults of these lines; the good ones join the rows."""
    faults = []
    for number, line in enumerate(lines, before + 1):
        try:
            rows.add(number, orjson.loads(line))
        except (ValueError, LookupError, TypeError, AttributeError) as fault:
            if line.strip():
                faults.append((number, _reason(fault)))
    return faults


class Rows:
    """Examples of one part, collected one by one and checked all at once."""

    def __init__(self, counting: Counting) -> None:
        self._counting, self._count_text = counting, counting.text_counter()
        self._seconds, self._text, self._numbers = [], [], []
        self._mute_text = []  # text tokens of examples without audio

    def add_alike(self, before: int, lines: int, piece: bytes) -> bool:
        """Whether the piece's lines were all NeMo entries, or all plain cuts, and have been taken; else nothing has happened.

        They are parsed as one JSON list, which takes half the time of line after line. A line that is broken breaks the list,
        or makes one object of two lines; the count tells.
        """
        try:
            rows = orjson.loads(b"[" + piece.replace(b"\n", b",") + b"]")
            seconds = [row["duration"] for row in rows]
            if "supervisions" in rows[0]:
                texts = [only["text"] for row in rows for (only,) in (row["supervisions"],)]
            else:
                texts = [row["text"] for row in rows]
            tokens = self._counting.text_tokens(texts)
        except (ValueError, LookupError, TypeError, AttributeError):
            return False
        if len(rows) != lines or None in seconds:
            return False
        self._seconds += seconds
        self._text += tokens
        self._numbers += range(before + 1, before + 1 + lines)
        return True

    def add(self, number: int, row: dict) -> None:
        """Take the cut or manifest entry of line `number`.

        Raises ValueError, LookupError, TypeError or AttributeError where it is not one.
        """
        if "supervisions" in row:
            seconds, text = row["duration"], _spoken(row)
        elif "tracks" in row:
            seconds, text = _mixed(row)
        else:
            seconds, text = row.get("duration"), row.get("text") or ""
            if seconds is None:
                if not text or "audio_filepath" in row or "recording" in row:
                    raise LookupError("duration")
                self._mute_text.append(self._count_text(text))
                return
        self.add_counted(number, seconds, self._count_text(text))

    def add_counted(self, number: int, seconds: float, text_tokens: int) -> None:
        """Take an example with audio whose text is counted already."""
        self._seconds.append(seconds)
        self._text.append(text_tokens)
        self._numbers.append(number)

    def part(self, lines: int, faults: list[tuple[int, str]]) -> Part:
        """The tally of all rows; those with an impossible duration or no token join the `faults`."""
        seconds = _numbers(self._seconds)
        text = np.array(self._text, dtype=np.int64)
        frames = self._counting.encoder_frames(seconds)
        bad = (frames < 0) | (frames + text + self._counting.prompt_tokens == 0) | (frames > MOST) | (text > MOST)
        if bad.any():
            faults = [*faults, *((self._numbers[i], _impossible(self._seconds[i], frames[i])) for i in np.flatnonzero(bad))]
            frames, text = frames[~bad], text[~bad]
        if self._mute_text:
            frames = np.concatenate((frames, np.zeros(len(self._mute_text), dtype=np.int64)))
            text = np.concatenate((text, np.array(self._mute_text, dtype=np.int64)))
        return Part(tally=Tally.of(frames, text), lines=lines, rejected=len(faults), faults=tuple(sorted(faults)[:NAMED]))


def _spoken(cut: dict) -> str:
    """The text of a cut: its supervisions' texts in the order in which they are spoken."""
    supervisions = cut["supervisions"]
    if len(supervisions) == 1:
        return supervisions[0].get("text") or ""
    ordered = sorted(supervisions, key=lambda supervision: supervision["start"])
    return " ".join(s["text"] for s in ordered if s.get("text"))


def _mixed(cut: dict) -> tuple[float, str]:
    """Seconds and text of lhotse's MixedCut: as long as the track that ends last."""
    tracks = [(track.get("offset", 0.0), track["cut"]) for track in cut["tracks"]]
    seconds = max(offset + inner["duration"] for offset, inner in tracks)
    texts = [_spoken(inner) for _, inner in sorted(tracks, key=lambda track: track[0]) if inner.get("supervisions")]
    return seconds, " ".join(text for text in texts if text)


def _numbers(values: list) -> np.ndarray:
    """float64 [n]; NaN where a value is not a number. NumPy would read the text "1" as one, which no loader does."""
    if not set(map(type, values)) <= {int, float}:
        values = [value if type(value) in (int, float) else np.nan for value in values]
    return np.array(values, dtype=np.float64)


def _impossible(seconds: object, frames: int) -> str:
    return f"impossible duration {seconds!r} s" if frames < 0 else f"no token: {seconds!r} s and no text"


def _reason(fault: Exception) -> str:
    if isinstance(fault, orjson.JSONDecodeError):
        return f"not JSON: {fault.msg}"
    if isinstance(fault, LookupError):
        return f"no field {fault.args[0]!r}"
    return "not an object with 'duration' and 'text'"
