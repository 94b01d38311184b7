"""How many of 2,100 real Kaldi frame counts does AudioFrames give? Prints a table: python tests/lengths/kaldi_agreement.py

The file holds, for read Sanskrit speech, each utterance's duration in seconds and the number of 10 ms frames that Kaldi
extracted (25 ms window, snipped edges). It names no sample rate, and durations carry seven significant digits. So two things
are found out from the data alone: the rate, as the one at which durations are whole samples; and, for every way of counting
that people use, which utterances it gets wrong and why.

Needs PACKFP8_TEST_DATA, the folder of outside test data.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import click

from packfp8.lengths import AudioFrames

RATES = (8_000, 11_025, 16_000, 22_050, 32_000, 44_100, 48_000)
DIGITS = 7  # significant digits of a printed duration


@dataclass(frozen=True, slots=True)
class Utterance:
    """One line of the file: seconds as printed, and Kaldi's frames."""

    seconds: Fraction
    frames: int

    @property
    def rounding(self) -> Fraction:
        """Most that the printed seconds may be off: half of the last significant digit."""
        whole_digits = len(str(int(self.seconds))) if self.seconds >= 1 else 0
        return Fraction(1, 2 * 10 ** (DIGITS - whole_digits))

    def is_whole(self, rate: int) -> bool:
        """Whether some whole number of samples at `rate` prints as these seconds."""
        return abs(self.seconds * rate - round(self.seconds * rate)) <= self.rounding * rate

    def samples(self, rate: int) -> int:
        """The nearest whole number of samples."""
        return round(self.seconds * rate)


def read(data: Path) -> list[Utterance]:
    """The utterances of the file, in order."""
    with (data / "lengths" / "read_sanskrit.csv").open(newline="") as lines:
        return [Utterance(Fraction(r["duration_s"]), int(r["num_frames_10ms"])) for r in csv.DictReader(lines)]


def whole_at(utterances: list[Utterance]) -> dict[int, int]:
    """Rate -> utterances whose duration is a whole number of samples at it."""
    return {rate: sum(u.is_whole(rate) for u in utterances) for rate in RATES}


def _kaldi(rate: int, snip_edges: bool = True) -> Callable[[Utterance], int]:
    frames = AudioFrames.kaldi(sample_rate=rate, snip_edges=snip_edges)
    return lambda u: frames.feature_frames(u.samples(rate))


# Each way of counting, the one that should be right first.
WAYS: dict[str, Callable[[Utterance], int]] = {
    "16 kHz, samples rounded, edges snipped": _kaldi(16_000),
    "16 kHz, samples cut off by int()": lambda u: AudioFrames.kaldi().feature_frames(int(float(u.seconds) * 16_000)),
    "16 kHz, edges kept": _kaldi(16_000, snip_edges=False),
    "floor(100 * seconds)": lambda u: int(float(u.seconds) * 100),
    "8 kHz, samples rounded": _kaldi(8_000),
    "22.05 kHz, samples rounded": _kaldi(22_050),
    "44.1 kHz, samples rounded": _kaldi(44_100),
    "48 kHz, samples rounded": _kaldi(48_000),
}


def explanation(way: str, utterance: Utterance, counted: int) -> str:
    """Why `way` counts `counted` and not Kaldi's number; empty where nothing known explains it."""
    samples = utterance.samples(16_000)
    more, over = counted - utterance.frames, samples % 160
    if "edges kept" in way and more == 2:
        # Rounding samples / 160 half up adds 80 before it divides; snipping takes 240 (window less hop) away.
        return "80 + 240 samples are two hops: always two more"
    if "100 * seconds" in way:
        # The window is 240 samples longer than the hop: one and a half hops, so one or two frames hang over the end.
        if over == 0 and more == 1:
            return "a whole number of frames, but the float falls just below it: one more"
        if more == (1 if over >= 80 else 2):
            return f"does not take the window off: {('one', 'two')[more - 1]} more"
    if way.startswith("8 kHz") and samples % 2 and abs(more) == 1 and (over - 80) % 160 in (0, 159):
        return "an odd number of 16 kHz samples, rounded over the end of the last window"
    if way.startswith("22.05 kHz") and 0 < more <= utterance.seconds * (Fraction(22_050, 220) - 100) + 1:
        return "10 ms are 220.5 samples and Kaldi rounds down: a frame every 9.977 ms, 0.23 more a second"
    return ""


def compare(way: str, utterances: list[Utterance]) -> tuple[int, Counter]:
    """Utterances for which `way` gives Kaldi's count, and the explanations of the others ("" is unexplained)."""
    count = WAYS[way]
    wrong = [(u, n) for u in utterances if (n := count(u)) != u.frames]
    return len(utterances) - len(wrong), Counter(explanation(way, u, n) for u, n in wrong)


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), envvar="PACKFP8_TEST_DATA", required=True)
def main(data: Path) -> None:
    """Print the agreement."""
    utterances = read(data)
    click.echo(f"{len(utterances)} utterances; durations that are a whole number of samples, by rate:")
    for rate, whole in whole_at(utterances).items():
        click.echo(f"  {rate:>6} Hz  {whole:>5}")
    click.echo("\nframe counts equal to Kaldi's, by way of counting:")
    for way in WAYS:
        agree, reasons = compare(way, utterances)
        click.echo(f"  {agree:>5}  {way}")
        for reason, n in reasons.most_common():
            click.echo(f"         {n:>5} not: {reason or 'UNEXPLAINED'}")


if __name__ == "__main__":
    main()
