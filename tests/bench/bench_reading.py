"""Reading of manifests: lines a second of a NeMo manifest, a lhotse `jsonl.gz` and 10^8 lengths, against plain loops.

    python tests/bench/bench_reading.py [--lines 2000000] [--rounds 3] [--lengths 100000000] [--folder DIR] [--json]

Rivals: `json.loads` over the lines, and lhotse's lazy reader (over a twentieth of the lines). Each round runs all of them
in turn; the figures are the best round's. Only our reader counts frames and tokens; a plain loop does nothing with a line.
On a machine that others use, the CPU figures say what the wall clock cannot.
The last part is a whole report of `.npy` lengths, with the peak memory of its process.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np

_WORDS = (
    "the", "of", "and", "to", "in", "that", "was", "his", "he", "it", "with", "is", "for", "as", "had", "you", "not", "be",
    "her", "on", "at", "by", "which", "have", "from", "this", "him", "but",
)  # fmt: skip
_REPORT = """
import json, resource, sys, time
started = time.perf_counter()
from packfp8.report import report
imported = time.perf_counter()
told = report(sys.argv[1], budget=16384, recipe="block")
seconds = time.perf_counter() - imported
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({"seconds": seconds, "import_seconds": imported - started, "peak_gib": peak, "packs": told.packs,
                  "examples": told.examples, "fill_real": told.fill_real}))
"""


def write_manifests(folder: Path, lines: int) -> tuple[Path, Path]:
    """A NeMo manifest and the same utterances as lhotse cuts, written where they are missing."""
    nemo, cuts = folder / f"nemo-{lines}.json", folder / f"cuts-{lines}.jsonl.gz"
    if nemo.exists() and cuts.exists():
        return nemo, cuts
    rng = random.Random(0)
    with nemo.open("w") as plain, gzip.open(cuts, "wt", compresslevel=4) as packed:
        for number in range(lines):
            seconds = round(rng.uniform(1, 20), 4)
            text = " ".join(rng.choices(_WORDS, k=int(2.5 * seconds) + 1))
            entry = {"audio_filepath": f"/data/train/{number // 1000:05d}/{number:09d}.wav", "duration": seconds, "text": text}
            plain.write(json.dumps(entry) + "\n")
            common = {"start": 0.0, "duration": seconds, "channel": 0}
            supervision = {"id": f"u{number}", "recording_id": f"r{number}", **common, "text": text, "language": "English"}
            source = {"type": "file", "channels": [0], "source": f"/data/train/{number}.flac"}
            recording = {
                "id": f"r{number}", "sources": [source], "sampling_rate": 16000, "num_samples": int(16000 * seconds),
                "duration": seconds, "channel_ids": [0],
            }  # fmt: skip
            cut = {"id": f"u{number}", **common, "supervisions": [supervision], "recording": recording, "type": "MonoCut"}
            packed.write(json.dumps(cut) + "\n")
    return nemo, cuts


def plain(path: Path) -> int:
    """Lines of a loop of `json.loads`."""
    count = 0
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for line in file:
            json.loads(line)
            count += 1
    return count


def lhotse_lazy(path: Path, lines: int) -> int:
    """Cuts of lhotse's lazy reader."""
    from lhotse import CutSet

    return sum(1 for _ in itertools.islice(CutSet.from_jsonl_lazy(path), lines))


def ours(path: Path, cores: int) -> int:
    """Examples of our reader."""
    from packfp8.report.counting import Counting
    from packfp8.report.manifests import find_manifests
    from packfp8.report.reading import read

    return read(find_manifests([path]), Counting(), cores=cores)[0].examples


@click.command()
@click.option("--lines", default=2_000_000)
@click.option("--rounds", default=3)
@click.option("--lengths", default=100_000_000, help="of the .npy report; 0 leaves it out")
@click.option("--folder", type=click.Path(path_type=Path), help="keeps the files for another run")
@click.option("--json", "as_json", is_flag=True)
def main(lines: int, rounds: int, lengths: int, folder: Path | None, as_json: bool) -> None:
    """Measure reading."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder or Path(scratch)
        told = {path.name: reading(path, lines, rounds) for path in write_manifests(folder, lines)}
        if lengths:
            told["npy"] = report_of_lengths(folder / f"lengths-{lengths}.npy", lengths)
    if as_json:
        print(json.dumps(told))
        return
    for name, figures in told.items():
        print(name, *(f"{key} {value:,.2f}" for key, value in figures.items()), sep="\n  ")


def reading(path: Path, lines: int, rounds: int) -> dict[str, float]:
    """Microseconds a line by reader, and how many times faster than the plain loop ours is."""
    tried = {"json.loads": lambda: plain(path)}
    if path.suffix == ".gz":
        tried["lhotse lazy"] = lambda: lhotse_lazy(path, lines // 20)
    tried |= {f"ours, {cores} cores": lambda cores=cores: ours(path, cores) for cores in (1, len(os.sched_getaffinity(0)))}
    best, cpu = dict.fromkeys(tried, float("inf")), dict.fromkeys(tried, float("inf"))
    for _ in range(rounds):
        for name, run in tried.items():
            before, started = os.times(), time.perf_counter()
            count = run()
            best[name] = min(best[name], 1e6 * (time.perf_counter() - started) / count)
            cpu[name] = min(cpu[name], 1e6 * sum(now - then for now, then in zip(os.times()[:4], before[:4])) / count)
    told = {f"{name}, us a line": best[name] for name in best}
    told |= {f"{name}, CPU us a line, children included": cpu[name] for name in best}
    last = list(best)[-1]
    return told | {f"{last}: times {name}": best[name] / best[last] for name in best if "ours" not in name}


def report_of_lengths(path: Path, lengths: int) -> dict[str, float]:
    """Seconds and memory of a report of lognormal lengths, in a process of its own."""
    if not path.exists():
        drawn = np.lib.format.open_memmap(path, mode="w+", dtype=np.int32, shape=(lengths,))
        rng = np.random.default_rng(0)
        for start in range(0, lengths, 1 << 22):
            part = drawn[start : start + (1 << 22)]
            part[:] = np.clip(rng.lognormal(5.5, 0.9, len(part)), 4, 16_384)
        drawn.flush()
    done = subprocess.run([sys.executable, "-c", _REPORT, str(path)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
