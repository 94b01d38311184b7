"""Writes the embedded corpus: synthetic speech of eSpeak NG over sentences drawn from a small grammar.

Run by hand, from the root of the project, where `espeak-ng` is installed; the result is kept in the project:

    python tests/make_corpus.py

The same seed and the same release of eSpeak NG (1.51) give the same texts, voices and lengths; only the serial number
inside each Ogg stream differs from run to run. Costs about half a minute.
"""

from __future__ import annotations

import io
import random
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import orjson
import soundfile
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from lhotse.audio import AudioSource
from scipy.signal import resample_poly

SAMPLE_RATE = 16_000
SHORTEST_SECONDS, LONGEST_SECONDS = 0.4, 20.0
SILENCE_SECONDS = 0.15  # kept after the last sound; eSpeak NG leaves 0.3 s and more
COMPRESSION = 0.96  # of libsndfile, 0 to 1: about 18 kbit/s; at 0.99 the codec falls back to half of the bandwidth
CHARACTERS_PER_SECOND = 17  # of eSpeak NG at 170 words per minute, over the English sentences

UTTERANCES = {
    "en": 176,
    "de": 10,
    "fr": 10,
    "es": 10,
    "it": 6,
    "pt": 6,
    "pl": 5,
    "sv": 4,
    "tr": 3,
    "el": 3,
    "ru": 3,
    "zh": 4,
}
TEXTS = 20  # without audio
VOICES = {
    "en": ["en-gb", "en-us", "en-gb-scotland", "en-gb-x-rp", "en-us-nyc", "en-029"],
    "fr": ["fr-fr"],
    "pt": ["pt-br"],
    "zh": ["cmn"],
}
TIMBRES = ["m1", "m3", "m4", "m7", "f1", "f2", "f4", "f5"]

GRAMMAR = tomllib.loads(Path(__file__).with_name("corpus_grammar.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """One voice of eSpeak NG: a language variety, a timbre, a pitch of 0 to 99."""

    voice: str
    timbre: str
    pitch: int

    @property
    def name(self) -> str:
        return f"{self.voice}+{self.timbre}"


def expand(rng: random.Random, pattern: str) -> str:
    """A text with every "{word}" of the pattern replaced, and a capital first."""
    while slot := re.search(r"\{(\w+)\}", pattern):
        word = rng.choice(GRAMMAR["words"][slot[1]])
        pattern = pattern[: slot.start()] + word + pattern[slot.end() :]
    return pattern[0].upper() + pattern[1:]


def draw_seconds(rng: random.Random) -> float:
    """A wanted duration: short commands and single sentences, with a second mode of long turns around 14 s."""
    seconds = rng.gauss(14.5, 3.0) if rng.random() < 0.14 else rng.lognormvariate(0.75, 0.75)
    return min(max(seconds, 0.5), 19.5)


def draw_text(rng: random.Random, language: str, characters: float, taken: set[str]) -> str:
    """The text of about that many characters that no earlier utterance has."""
    candidates = []
    for _ in range(200):
        parts = [expand(rng, rng.choice(GRAMMAR["short"][language]))]
        if rng.random() < 0.75:
            parts = [expand(rng, rng.choice(GRAMMAR["sentences"][language])) for _ in range(rng.randint(1, 6))]
        text = ("" if language == "zh" else " ").join(dict.fromkeys(parts))
        if text not in taken:
            candidates.append(text)
    letters = 4 if language == "zh" else 1  # that take as long to say as one character
    return min(candidates, key=lambda text: abs(letters * len(text) - characters))


def speak(speaker: Speaker, words_per_minute: int, text: str) -> np.ndarray:
    """float64 [samples] at 16 kHz, its trailing silence cut."""
    command = ["espeak-ng", "-v", speaker.name, "-s", f"{words_per_minute}", "-p", f"{speaker.pitch}", "--stdout"]
    done = subprocess.run([*command, text], check=True, capture_output=True)
    # The header of a streamed wav declares no true length: count the bytes after it (44 bytes, then 16 bit mono).
    wave, rate = np.frombuffer(done.stdout[44:], dtype="<i2") / 32768, 22_050
    last_sound = np.flatnonzero(np.abs(wave) > 1e-3)[-1]
    return resample_poly(wave[: last_sound + int(SILENCE_SECONDS * rate)], 320, 441)


def encode(wave: np.ndarray) -> bytes:
    """One Ogg stream of Opus."""
    buffer = io.BytesIO()
    soundfile.write(buffer, wave, SAMPLE_RATE, format="OGG", subtype="OPUS", compression_level=COMPRESSION)
    return buffer.getvalue()


def describe(name: str, path: Path, text: str, language: str, speaker: Speaker) -> MonoCut:
    """The cut of one file, its length counted by decoding the file."""
    samples = len(soundfile.read(path)[0])
    seconds = samples / SAMPLE_RATE
    source = AudioSource(type="file", channels=[0], source=path.name)
    recording = Recording(name, sources=[source], sampling_rate=SAMPLE_RATE, num_samples=samples, duration=seconds)
    supervision = SupervisionSegment(name, name, 0.0, seconds, text=text, language=language, speaker=speaker.name)
    return MonoCut(name, 0.0, seconds, channel=0, supervisions=[supervision], recording=recording)


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default=Path("packfp8/data/speech"), show_default=True)
@click.option("--seed", default=8, show_default=True)
def main(folder: Path, seed: int) -> None:
    """Write FOLDER: one .ogg per utterance, cuts.jsonl with paths relative to it, and texts.jsonl without audio."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    cuts, taken = [], set()
    for language, count in UTTERANCES.items():
        voices = VOICES.get(language, [language])
        speakers = [Speaker(voice=v, timbre=t, pitch=rng.randint(30, 70)) for v in voices for t in TIMBRES]
        kept = 0
        while kept < count:
            speaker, words_per_minute = rng.choice(speakers), rng.randint(140, 200)
            characters = draw_seconds(rng) * CHARACTERS_PER_SECOND * words_per_minute / 170
            text = draw_text(rng, language, characters, taken)
            wave = speak(speaker, words_per_minute, text)
            if not SHORTEST_SECONDS <= len(wave) / SAMPLE_RATE <= LONGEST_SECONDS:
                continue
            kept += 1
            taken.add(text)
            name = f"{language}-{kept:03d}"
            path = folder / f"{name}.ogg"
            path.write_bytes(encode(wave))
            cuts.append(describe(name, path, text, language, speaker))
    CutSet.from_cuts(cuts).to_file(folder / "cuts.jsonl")
    with (folder / "texts.jsonl").open("wb") as file:
        for index, language in enumerate(rng.choices(list(UTTERANCES), list(UTTERANCES.values()), k=TEXTS), start=1):
            text = draw_text(rng, language, draw_seconds(rng) * CHARACTERS_PER_SECOND, taken)
            taken.add(text)
            line = {"id": f"text-{index:03d}", "text": text, "language": language}
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    size = sum(path.stat().st_size for path in folder.iterdir())
    click.echo(f"{len(cuts)} utterances, {sum(cut.duration for cut in cuts):.0f} s, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
