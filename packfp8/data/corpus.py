"""The embedded corpus: 240 short utterances with their texts, and 20 texts without audio.

It lets the demo, the notebooks and the tests run on real files, anywhere. All of it was made for this project: sentences
drawn from a small grammar, spoken by eSpeak NG, with several English voices and eleven other languages, mono at 16 kHz,
Opus in Ogg at about 18 kbit/s (2.2 MB, 950 s, 0.5 to 19 s each). It is synthetic, names nobody, and is released under
the licence of the project. `tests/make_corpus.py` made it.

The files end in `.ogg`, not `.opus`: lhotse would try ffmpeg for the latter, soundfile reads the former.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import orjson
from lhotse import CutSet
from lhotse.cut.text import TextExample


def corpus() -> CutSet:
    """The utterances as an eager CutSet in a fixed order; each cut's one supervision has text, language and speaker."""
    folder = _folder()
    return CutSet.from_file(folder / "cuts.jsonl").with_recording_path_prefix(folder).to_eager()


def texts() -> list[TextExample]:
    """The texts without audio, in a fixed order; `custom` holds id and language."""
    # Lines end at newline bytes only: U+2028 and its like may stand inside a text.
    lines = (_folder() / "texts.jsonl").read_bytes().rstrip(b"\n").split(b"\n")
    rows = [orjson.loads(line) for line in lines]
    return [TextExample(text=row.pop("text"), custom=row) for row in rows]


def _folder() -> Path:
    return Path(str(resources.files("packfp8.data") / "speech"))
